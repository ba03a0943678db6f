"The host waits for the device once a step because of us: whatever reads a number from a tensor is counted, by who asks"
import sys
from collections import Counter
import pytest
from learners import *

reads = 'cpu item tolist numpy __bool__ __float__ __int__'.split()

@pytest.fixture
def ours(monkeypatch):
    "Counts what modules of mp_callbacks read, by method"
    seen = Counter()
    def counted(name):
        f = getattr(torch.Tensor, name)
        def _f(self, *args, **kwargs):
            if 'mp_callbacks' in sys._getframe(1).f_globals.get('__name__', ''): seen[name] += 1
            return f(self, *args, **kwargs)
        return _f
    for o in reads: monkeypatch.setattr(torch.Tensor, o, counted(o))
    return seen

@pytest.mark.parametrize('clip', [None, .1])
@pytest.mark.parametrize('mode', modes)
def test_one_per_step(mode, clip, ours):
    "One copy from the device, of the norms. The first step of a scale to be found has a second one."
    learn = get_learner(norm=True)
    modes[mode](learn, clip=clip)
    learn.fit(1)
    ours.clear()
    learn.fit(2)
    steps = 2*len(learn.dls.train)
    assert ours['tolist']==steps and {*ours}=={'tolist','item'} # `item` of fastai's average, on the CPU

def test_skipped_steps(ours):
    "A skipped step has a second one, for the parameter that is to blame: the optimizer has nothing to do meanwhile"
    class Infinite(Callback):
        def before_batch(self): self.learn.xb = (self.x*float('inf'),)
    learn = get_learner(cbs=Infinite()).to_bf16()
    learn.fit(1) # the first fit measures the weights, once
    ours.clear()
    learn.fit(1)
    steps = len(learn.dls.train)
    assert ours['tolist']==2*steps
