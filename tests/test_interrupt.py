"""A look at the model, or another precision, in the middle of a batch: as in float32, or refused; never a scaled step

Exceptions there are in `test_faults` and `test_signals`."""
import pytest
from faults import *

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))

def by_hand(learn):
    with torch.no_grad(): learn.model(learn.xb[0])

looks = [('fp16',by_hand),('native_bf16',Learner.validate)]

@pytest.mark.parametrize('mode,look', crossed(modes, [by_hand,Learner.validate], fast=lambda *o: o in looks))
def test_look_inside_a_batch(mode, look):
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
