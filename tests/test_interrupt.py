"""An exception or an interrupt leaves a float32 learner that can go on, wherever it comes from

A dozen places in each precision. `test_faults` has the whole table of places and exceptions."""
import pytest
from faults import *

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))

def patient_in(mode): return Patient(modes[mode](get_learner(norm=True, dls=get_dls(n=32), lr=1e-3)))

def assert_trains(patient):
    "On each of its two batches, in the next fit"
    learn,second = patient.learn,[]
    first = weights(learn)
    assert patient.fit(Now('before_batch', lambda o: second.extend(weights(o)), -200)) is None
    for a,b in ((first,second), (second,weights(learn))): assert len(a)==len(b) and not any(map(torch.equal, a, b))
    assert math.isfinite(learn.validate()[0])

moments = [('before_batch',-50,True), ('before_batch',80,True), ('after_pred',80,True), ('after_loss',-50,True),
           ('before_backward',80,True), ('after_backward',-50,True), ('before_step',-50,True), ('before_step',80,True),
           ('after_step',80,True), ('after_batch',-50,True), ('before_batch',80,False), ('after_pred',-50,False),
           ('after_validate',80,True)]

@each_mode
def test_errors(mode):
    "The exception comes out, and a batch that has not stepped has left no trace"
    patient = patient_in(mode)
    for event,order,training in moments:
        for e in (KeyboardInterrupt, RuntimeError):
            what,steps = (event, order, training, e.__name__),Steps()
            got = patient.fit(Now(event, raises(e('as asked')), order, training), steps)
            assert isinstance(got, e), (what, got)
            patient.float32(what)
            if training and event in before_the_step:
                assert same(everything(patient.learn), steps.states[1]), what
                assert all(p.grad is None for p in patient.params), what
    assert_trains(patient)

@each_mode
def test_cancels(mode):
    "fastai's own exceptions, those included that end nothing where they are raised. Gradients stay, as in fastai."
    patient = patient_in(mode)
    for event,order,training in moments:
        for e in (CancelBatchException, CancelStepException, CancelFitException, CancelValidException):
            what = event,order,training,e.__name__
            got = patient.fit(Now(event, raises(e('as asked')), order, training))
            assert got is None or isinstance(got, e), (what, got)
            patient.float32(what)
    assert_trains(patient)

@each_mode
def test_metric(mode):
    "An error in a metric"
    patient,fuse = patient_in(mode),[RuntimeError]
    def metric(p, y):
        if fuse: raise fuse.pop()('as asked')
        return p.sum()
    patient.learn.metrics = metric
    assert isinstance(patient.fit(), RuntimeError)
    patient.float32('metric')
    assert_trains(patient)

@each_mode
def test_between_validation_batches(mode):
    "An interrupt while a validation batch is being loaded: the next training starts from the weights as they are"
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

@each_mode
def test_prediction_inside_a_batch(mode):
    "Calling the model by hand in the middle of a batch changes nothing"
    def by_hand(learn):
        with torch.no_grad(): learn.model(learn.xb[0])
    def run(event):
        learn = modes[mode](get_learner(opt_func=SGD))
        learn.fit(1, cbs=Now(event, by_hand) if event else None)
        return weights(learn)
    want = run(None)
    for event in in_batch: assert all(map(torch.equal, run(event), want)), event

@each_mode
@pytest.mark.parametrize('f', ['validate', 'get_preds'])
def test_validation_inside_a_fit(f, mode):
    "Where float32 can be validated in the middle of a batch, so can each precision, with the same effect"
    def run(mode, event):
        learn = get_learner(opt_func=SGD, lr=.05)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(2, cbs=Now(event, methodcaller(f)))
        except Exception as e: return type(e)
        return flat(weights(learn))-start
    for event in ('before_batch', 'after_pred', 'before_backward', 'after_backward', 'before_step', 'after_batch'):
        want,got = run(None, event),run(mode, event)
        if isinstance(want, type): assert got is want, (event, got)
        else: assert (got-want).norm()<.02*want.norm(), event

@each_mode
def test_missed_before_step(mode):
    "fastai takes a `StopIteration` for the end of the event, and ours don't hear of it: no step with scaled gradients"
    stop = Callback(before_step=raises(StopIteration('as asked')))
    stop.order = 5
    def run(mode):
        learn = get_learner(opt_func=SGD, lr=1e-3, cbs=stop)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(1)
        except RuntimeError: pass # to refuse is right, too
        return (flat(weights(learn))-start).norm().item()
    assert run(mode)<1.1*run(None)

@each_mode
def test_change_inside_a_batch(mode):
    "To change the precision in the middle of a batch is refused, or works. No step has gradients still scaled."
    def run(mode, event):
        learn = get_learner(opt_func=SGD, lr=1e-3)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(1, cbs=Now(event, methodcaller('to_fp32')) if event else None)
        except RuntimeError as e: assert 'to_fp32' in str(e)
        assert_plain(learn.model)
        return (flat(weights(learn))-start).norm().item()
    most = 1.1*run(None, None)
    for event in in_batch: assert run(mode, event)<most, event
