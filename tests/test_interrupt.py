"""A look at the model, or another precision, in the middle of a batch: as in float32, or refused; never a scaled step

That a change is refused is in `test_skipped`; exceptions there are in `test_faults` and `test_signals`."""
from faults import *

pytestmark = pytest.mark.filterwarnings('ignore')

def test_validation_in_a_skipped_step():
    "Has the loss of the model, not that of the steps before"
    learn,found = get_learner().to_bf16(),[]
    learn.fit(1, cbs=[InfiniteAt(3),On('after_cancel_step', lambda learn: found.append(learn.validate()))])
    assert found[0][0]==learn.validate()[0]

def by_hand(learn):
    with torch.no_grad(): learn.model(learn.xb[0])

looks = [('fp16',by_hand),('native_bf16',Learner.validate)]

@pytest.mark.parametrize('mode,look', crossed(modes, [by_hand,Learner.validate], fast=lambda *o: o in looks))
def test_look_inside_a_batch(mode, look):
    "Where float32 can be validated in the middle of a batch, so can each precision, with the same effect; or predict"
    def run(mode, event):
        try: return way(in_mode(mode, opt_func=SGD, lr=.05), 1, Now(event, look))
        except Exception as e: return type(e)
    for event in in_batch:
        want,got = run(None, event),run(mode, event)
        if isinstance(want, type): assert got is want, (event, got)
        else: assert (got-want).norm()<.02*want.norm(), event
