"""An exception or an interrupt leaves a float32 learner that can go on, wherever it comes from

A dozen places in each precision. `test_faults` has the whole table of places and exceptions."""
import pytest
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))

class Raise(Callback):
    "Raise `e` in `event`, of the second batch if it is one of a batch"
    def __init__(self, event, e, order, training=True):
        self.e,self.order,self.want = e,order,training
        setattr(self, event, self._inner if event in in_batch else self._raise)
    def _inner(self):
        if self.training==self.want and self.iter==1: self._raise()
    def _raise(self): raise self.e('as asked')

class Probe(Callback):
    "Remember all that a batch can change, as it was when the second one began"
    order = -200
    def before_batch(self):
        if self.training and self.iter==1: self.before = everything(self.learn)

def everything(learn):
    states = [o for s in learn.opt.state_dict()['state'] for _,o in sorted(s.items())]
    return [o.clone() if isinstance(o, torch.Tensor) else o for o in (*learn.model.state_dict().values(), *states)]

def equal(xs, ys): return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x==y for x,y in zip(xs, ys, strict=True))

class Patient:
    "A learner, and how it should be between fits"
    def __init__(self, mode):
        self.learn = get_learner(norm=True, dls=get_dls(n=32), lr=1e-3)
        modes[mode](self.learn)
        self.learn.fit(1)
        self.params,self.cbs = list(self.learn.model.parameters()),list(self.learn.cbs)

    def fit(self, *cbs):
        "Fit with `cbs`; returns the exception that came out, if any"
        try: self.learn.fit(1, cbs=L(cbs))
        except BaseException as e: return e

    def check(self, what):
        learn = self.learn
        assert all(p is q for p,q in zip(learn.model.parameters(), self.params, strict=True)), what
        assert all(p is q for p,q in zip([p for pg in learn.opt.param_lists for p in pg], self.params, strict=True)), what
        for p in self.params:
            assert p.dtype==torch.float32 and p.requires_grad and p.isfinite().all(), what
            assert p.grad is None or p.grad.isfinite().all(), what
        assert not torch.is_autocast_enabled('cpu') and torch.is_grad_enabled(), what
        assert nn.Linear(2,2)(torch.zeros(1,2)).dtype==torch.float32, what
        assert not [n for n,m in learn.model.named_modules() if 'forward' in vars(m)], what
        assert all(a is b for a,b in zip(learn.cbs, self.cbs, strict=True)), what
        assert not learn.lock.locked(), what

    def recovered(self):
        "Does the next fit train on each of its batches?"
        probe,before = Probe(),[p.clone() for p in self.params]
        assert self.fit(probe) is None
        assert not any(torch.equal(p, q) for p,q in zip(self.params, before))
        first = probe.before[:len(self.learn.model.state_dict())]
        assert not equal(first, list(self.learn.model.state_dict().values()))
        assert math.isfinite(self.learn.validate()[0])

before_the_step = 'before_batch after_pred after_loss before_backward after_backward before_step'.split()
in_batch = before_the_step+'after_step after_batch'.split()
moments = [('before_batch',-50,True), ('before_batch',80,True), ('after_pred',80,True), ('after_loss',-50,True),
           ('before_backward',80,True), ('after_backward',-50,True), ('before_step',-50,True), ('before_step',80,True),
           ('after_step',80,True), ('after_batch',-50,True), ('before_batch',80,False), ('after_pred',-50,False),
           ('after_validate',80,True)]

@each_mode
def test_errors(mode):
    "The exception comes out, and a batch that has not stepped has left no trace"
    patient = Patient(mode)
    for event,order,training in moments:
        for e in (KeyboardInterrupt, RuntimeError):
            what,probe = (event, order, training, e.__name__),Probe()
            got = patient.fit(Raise(event, e, order, training), probe)
            assert isinstance(got, e), (what, got)
            patient.check(what)
            if training and event in before_the_step:
                assert equal(everything(patient.learn), probe.before), what
                assert all(p.grad is None for p in patient.params), what
    patient.recovered()

@each_mode
def test_cancels(mode):
    "fastai's own exceptions, those included that end nothing where they are raised. Gradients stay, as in fastai."
    patient = Patient(mode)
    for event,order,training in moments:
        for e in (CancelBatchException, CancelStepException, CancelFitException, CancelValidException):
            what = event,order,training,e.__name__
            got = patient.fit(Raise(event, e, order, training))
            assert got is None or isinstance(got, e), (what, got)
            patient.check(what)
    patient.recovered()

@each_mode
def test_metric(mode):
    "An error in a metric"
    patient,fuse = Patient(mode),[RuntimeError]
    def metric(p, y):
        if fuse: raise fuse.pop()('as asked')
        return p.sum()
    patient.learn.metrics = metric
    assert isinstance(patient.fit(), RuntimeError)
    patient.check('metric')
    patient.recovered()

@each_mode
def test_between_validation_batches(mode):
    "An interrupt while a validation batch is being loaded: the next training starts from the weights as they are, for each of its batches"
    learn = get_learner(opt_func=SGD, lr=.05)
    modes[mode](learn)
    batches = list(learn.dls.valid)
    class Stops(list):
        def __iter__(self):
            yield self[0]
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): learn.validate(dl=Stops(batches))
    losses = []
    class Losses(Callback):
        order = 80
        def after_batch(self):
            if self.training: losses.append(self.loss.item())
    learn.dls = DataLoaders([batches[0]]*6, batches)
    learn.fit(1, cbs=Losses())
    assert all(a>b for a,b in zip(losses, losses[1:])), losses # the same batch over and over

class Infer(Callback):
    "Call `f` with the learner, once, in `event` of the second batch"
    order = 80
    def __init__(self, event, f):
        self.f = f
        setattr(self, event, self._infer)
    def _infer(self):
        if not self.training or self.iter!=1: return
        f,self.f = self.f,noop
        f(self.learn)

@each_mode
def test_prediction_inside_a_batch(mode):
    "Calling the model by hand in the middle of a batch changes nothing"
    def by_hand(learn):
        with torch.no_grad(): learn.model(learn.xb[0])
    def run(event):
        learn = modes[mode](get_learner(opt_func=SGD))
        learn.fit(1, cbs=Infer(event, by_hand) if event else None)
        return weights(learn)
    want = run(None)
    for event in in_batch: assert all(map(torch.equal, run(event), want)), event

@each_mode
@pytest.mark.parametrize('f', [lambda learn: learn.validate(), lambda learn: learn.get_preds()], ids=['validate', 'get_preds'])
def test_validation_inside_a_fit(f, mode):
    "Where float32 can be validated in the middle of a batch, so can each precision, with the same effect"
    def run(mode, event):
        learn = get_learner(opt_func=SGD, lr=.05)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(2, cbs=Infer(event, f))
        except Exception as e: return type(e)
        return flat(weights(learn))-start
    for event in ('before_batch', 'after_pred', 'before_backward', 'after_backward', 'before_step', 'after_batch'):
        want,got = run(None, event),run(mode, event)
        if isinstance(want, type): assert got is want, (event, got)
        else: assert (got-want).norm()<.02*want.norm(), event

@each_mode
def test_missed_before_step(mode):
    "fastai takes a StopIteration in a callback for the end of the event, so that later callbacks, ours too, don't hear of it: no step with gradients that are still scaled"
    class Stop(Callback):
        order = 5
        def before_step(self): raise StopIteration('as asked')
    def run(mode):
        learn = get_learner(opt_func=SGD, lr=1e-3, cbs=Stop())
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(1)
        except RuntimeError: pass # to refuse is right, too
        return (flat(weights(learn))-start).norm().item()
    assert run(mode)<1.1*run(None)

@each_mode
def test_change_inside_a_batch(mode):
    "To change the precision in the middle of a batch is refused, or works; in no case is there a step with gradients that are still scaled"
    def run(mode, event):
        learn = get_learner(opt_func=SGD, lr=1e-3)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(1, cbs=Infer(event, lambda learn: learn.to_fp32()) if event else None)
        except RuntimeError as e: assert 'to_fp32' in str(e)
        assert {p.dtype for p in learn.model.parameters()}=={torch.float32} and not [n for n,m in learn.model.named_modules() if 'forward' in vars(m)]
        return (flat(weights(learn))-start).norm().item()
    most = 1.1*run(None, None)
    for event in in_batch: assert run(mode, event)<most, event
