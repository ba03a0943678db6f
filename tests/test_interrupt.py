"""Whatever ends a batch, anywhere, the learner is a healthy float32 learner that can go on

A table of places times a table of exceptions, in each precision. The same learner goes from one to the next, so it has to survive them in any order."""
import pytest
from fastai.callback.core import _events
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

errors  = [KeyboardInterrupt,SystemExit,RuntimeError,MemoryError,torch.OutOfMemoryError,GeneratorExit,AssertionError]
cancels = [CancelBatchException,CancelBackwardException,CancelStepException,CancelTrainException,CancelValidException,CancelEpochException,CancelFitException]

before_the_step = 'before_batch after_pred after_loss before_backward after_backward before_step'.split()
in_batch = before_the_step+'after_step after_batch'.split()
in_fit = in_batch+'before_fit before_epoch before_train after_train before_validate after_validate after_epoch after_fit'.split()
assert set(in_fit)=={o for o in _events if 'cancel' not in o and o!='after_create'} # all that there are

class Raise(Callback):
    "Raise `e` in `event`, of the second batch if it is one of a batch, before or after those who change precision"
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
    states = learn.opt.state_dict()['state']
    return [o.clone() for o in learn.model.state_dict().values()]+[o.clone() if isinstance(o, torch.Tensor) else o for s in states for _,o in sorted(s.items())]

def equal(xs, ys): return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x==y for x,y in zip(xs, ys, strict=True))

class Patient:
    "A learner, and how it should be between fits"
    def __init__(self, mode):
        self.learn = get_learner(norm=True, dls=get_dls(n=32), lr=1e-3)
        modes[mode](self.learn)
        self.learn.fit(1)
        self.params,self.cbs = list(self.learn.model.parameters()),list(self.learn.cbs)

    def fit(self, *cbs):
        "Fit with `cbs`, and return what came of it: None, or what was raised"
        try: self.learn.fit(1, cbs=L(cbs))
        except BaseException as e: return e

    def check(self, what):
        learn = self.learn
        assert all(p is q for p,q in zip(learn.model.parameters(), self.params, strict=True)), what
        assert all(p is q for p,q in zip([p for pg in learn.opt.param_lists for p in pg], self.params, strict=True)), what
        for p in self.params:
            assert p.dtype==torch.float32 and p.requires_grad and p.isfinite().all(), what
            assert p.grad is None or not p.grad.any(), what
        assert not torch.is_autocast_enabled('cpu') and torch.is_grad_enabled(), what
        assert nn.Linear(2,2)(torch.zeros(1,2)).dtype==torch.float32, what
        assert not [n for n,m in learn.model.named_modules() if 'forward' in vars(m)], what
        assert all(a is b for a,b in zip(learn.cbs, self.cbs, strict=True)), what
        assert not learn.lock.locked(), what

    def recovered(self):
        "Does the next fit go on as if there had been no other?"
        probe,before = Probe(),[p.clone() for p in self.params]
        assert self.fit(probe) is None
        assert not any(torch.equal(p, q) for p,q in zip(self.params, before))
        first = probe.before[:len(self.learn.model.state_dict())]
        assert not equal(first, list(self.learn.model.state_dict().values())) # both batches count
        assert math.isfinite(self.learn.validate()[0])

each_mode = pytest.mark.parametrize('mode', modes)

@each_mode
@pytest.mark.parametrize('event', in_fit)
def test_errors(event, mode):
    "An exception that is no Cancel: it comes out, and a batch that has not stepped has left no trace"
    patient = Patient(mode)
    for i,e in enumerate(errors):
        for order in ((-50,80)[i%2],):
            for training in (True,False) if event in ('before_batch', 'after_pred', 'after_loss', 'after_batch') else (True,):
                what,probe = (event, e.__name__, order, training),Probe()
                got = patient.fit(Raise(event, e, order, training), probe)
                assert isinstance(got, e), (what, got)
                patient.check(what)
                if training and event in before_the_step: assert equal(everything(patient.learn), probe.before), what
    patient.recovered()

@each_mode
@pytest.mark.parametrize('event', in_fit)
def test_cancels(event, mode):
    "fastai's own ways to leave, those included that nobody expects where they are raised"
    patient = Patient(mode)
    for i,e in enumerate(cancels):
        for order in ((-50,80)[i%2],):
            what = event,e.__name__,order
            got = patient.fit(Raise(event, e, order))
            assert got is None or isinstance(got, e), (what, got)
            patient.check(what)
    patient.recovered()

class Bomb(nn.Module):
    "A layer that raises what is in `fuse`, once, in `where`"
    fuse,where = None,None
    def _go(self, where):
        if self.fuse is None or where!=self.where: return
        e,self.fuse = self.fuse,None
        raise e('as asked')
    def forward(self, x):
        self._go('forward')
        if x.requires_grad: x.register_hook(lambda g: self._go('backward'))
        return x

@each_mode
@pytest.mark.parametrize('where', 'forward backward loss step zero_grad data metric'.split())
def test_places(where, mode, monkeypatch):
    "Not only callbacks can fail"
    patient = Patient(mode)
    learn = patient.learn
    bomb = Bomb()
    learn.model.insert(2, bomb)
    def go(*args): bomb._go(where)
    def first(f):
        def _f(*args, **kwargs): go(); return f(*args, **kwargs)
        return _f
    def metric(p, y): go(); return p.sum()
    class Data(list):
        def __iter__(self):
            for i,b in enumerate(super().__iter__()):
                if i==1: go()
                yield b
    if where=='loss': learn.loss_func = first(learn.loss_func)
    if where=='data': learn.dls = DataLoaders(*[Data(dl) for dl in learn.dls], device='cpu')
    if where=='metric': learn.metrics = metric
    if where in ('step','zero_grad'): monkeypatch.setattr(learn.opt, where, first(getattr(learn.opt, where)))
    for e in (KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError):
        probe,bomb.fuse,bomb.where = Probe(),e,where
        got = patient.fit(probe)
        assert isinstance(got, e), (where, got)
        patient.check((where, e.__name__))
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
def test_meddler(mode):
    "Another callback that spoils all gradients after they were checked: no weight is touched, and after `max_skips` steps there is an error"
    class Spoil(Callback):
        order = 20
        def before_step(self): next(self.model.parameters()).grad.fill_(float('inf'))
    learn = modes[mode](get_learner(cbs=Spoil()), max_skips=10)
    before,steps = weights(learn),[]
    class Count(Callback):
        def before_step(self): steps.append(self.train_iter)
    with pytest.raises(FloatingPointError, match='10 steps in a row'): learn.fit(10, cbs=Count())
    assert all(map(torch.equal, weights(learn), before)) and len(steps)==10

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
