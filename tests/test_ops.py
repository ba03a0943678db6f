"What our part of a batch asks of PyTorch and of Python grows no faster than the number of modules"
import gc,sys
from collections import Counter
from contextlib import nullcontext

import pytest,torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from learners import *

class Ops(TorchDispatchMode):
    "Counts operations"
    def __init__(self):
        super().__init__()
        self.counts = Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

class Calls:
    "Counts calls of functions written in Python: ours, and those of PyTorch and fastai that they need"
    def __init__(self): self.counts = Counter()
    def __enter__(self):
        gc.disable() # it calls others back when it runs
        sys.setprofile(self._event)
    def __exit__(self, *_):
        sys.setprofile(None)
        gc.enable()
    def _event(self, frame, event, arg):
        name = frame.f_globals.get('__name__', '')
        known = name.partition('.')[0] in ('mp_callbacks','torch','fastai') and not name.startswith('torch._dynamo')
        if event=='call' and known:
            self.counts[f'{name}.{frame.f_code.co_name}'] += 1

class Sub(nn.Module):
    "A module in another, with a parameter and a buffer besides"
    def __init__(self):
        super().__init__()
        self.lin,self.gain = nn.Linear(8,8),nn.Parameter(torch.ones(8))
        self.register_buffer('shift', torch.zeros(8))
    def forward(self, x): return x+self.lin(x)*self.gain+self.shift

def deep(n):
    "`n` modules of that kind, with norms, half of them in a module in a module"
    torch.manual_seed(0)
    def some(n): return nn.Sequential(*[nn.Sequential(Sub(), nn.LayerNorm(8), nn.BatchNorm1d(8)) for _ in range(n)])
    return nn.Sequential(some(n//2), nn.Sequential(nn.Sequential(some(n-n//2))), nn.Linear(8,1))

def count(counter, n, mode, **kwargs):
    "What `counter` sees in the third batch of a fit, and when a fit starts"
    learn = get_learner(deep(n))
    modes[mode](learn, **kwargs)
    learn.fit(1)
    steps,own = [],learn.one_batch
    def one_batch(i, b):
        steps.append(i)
        with counter if len(steps)==3 else nullcontext(): own(i, b)
    learn.one_batch = one_batch
    learn.fit(1)
    with counter: learn.mixed_precision.before_fit()
    return counter.counts

cases = [('fp16',{}), ('fp16',dict(clip=1., flat_master=True)), ('bf16',dict(keep=('*.1',nn.BatchNorm1d))),
         ('native_fp16',{}), ('native_bf16',{})]

def quick(counter, case): return case==cases[1] or (counter,case)==(Ops,cases[3])

@pytest.mark.parametrize('counter,case', crossed([Ops,Calls], cases, fast=quick))
def test_linear(counter, case):
    "From 20 modules to 40 the counts grow by no more than twice of what they grow by from 10 to 20"
    mode,kwargs = case
    few,some,many = (count(counter(), n, mode, **kwargs) for n in (10,20,40))
    assert sum(few.values())
    over = {k:(few[k],some[k],many[k]) for k in many if many[k]-some[k]>2*(some[k]-few[k])+2}
    assert not over
