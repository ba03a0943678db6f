"""An exception, or a callback's own doing, in the middle of a fit leaves a float32 learner that can go on

A dozen places in each precision, in a short time. `test_faults` has the whole table of places and exceptions."""
import pytest
from faults import *

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))

moments = [('before_batch',-50,True), ('before_batch',80,True), ('after_pred',80,True), ('after_loss',-50,True),
           ('before_backward',80,True), ('after_backward',-50,True), ('before_step',-50,True), ('before_step',80,True),
           ('after_step',80,True), ('after_batch',-50,True), ('before_batch',80,False), ('after_pred',-50,False),
           ('after_validate',80,True)]

@each_mode
def test_exceptions(mode):
    """Errors come out, and a batch that has not stepped has left no trace; fastai's own exceptions end what they end,
    and leave gradients, as in fastai. Then both batches train."""
    patient = Patient(modes[mode](get_learner(norm=True, dls=get_dls(n=32), lr=1e-3)))
    learn,params = patient.learn,patient.params
    some = CancelBatchException,CancelStepException,CancelFitException,CancelValidException # in turns
    for i,(event,order,training) in enumerate(moments):
        for e in (KeyboardInterrupt,some[i%4],RuntimeError):
            what,steps = (event,order,training,e.__name__),Steps()
            got = patient.fit(Now(event, raises(e('as asked')), order, training), steps)
            assert isinstance(got, e) or e in cancels.values() and got is None, (what, got)
            patient.float32(what)
            if training and event in before_the_step and e.__name__ in errors:
                assert same(everything(learn), steps.states[1]) and all(p.grad is None for p in params), what
    first,second = weights(learn),[]
    assert patient.fit(Now('before_batch', lambda o: second.extend(weights(o)), -200)) is None
    for a,b in ((first,second), (second,weights(learn))): assert len(a)==len(b) and not any(map(torch.equal, a, b))
    assert math.isfinite(learn.validate()[0])

def by_hand(learn):
    with torch.no_grad(): learn.model(learn.xb[0])

@pytest.mark.parametrize('look', [by_hand,Learner.validate])
@each_mode
def test_look_inside_a_batch(look, mode):
    "Where float32 can be validated in the middle of a batch, so can each precision, with the same effect; or predict"
    def run(mode, event):
        learn = get_learner(opt_func=SGD, lr=.05)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(1, cbs=Now(event, look))
        except Exception as e: return type(e)
        return flat(weights(learn))-start
    for event in in_batch:
        want,got = run(None, event),run(mode, event)
        if isinstance(want, type): assert got is want, (event, got)
        else: assert (got-want).norm()<.02*want.norm(), event

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
