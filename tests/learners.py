"Small learners for the tests: one line of data, one model, and every precision that we have"
import pytest,torch
from collections import namedtuple
from dataclasses import dataclass
from multiprocessing import set_forkserver_preload
from typing import Any

from fastai.basics import *
from fastai.callback.all import *
from mp_callbacks.all import *
from mp_callbacks.callback import PrecisionCallback
from cases import *

modes = dict( # the scale starts where nothing overflows, so that no step is skipped and trajectories can be compared
    fp16         = lambda learn, **kwargs: learn.to_fp16(**{'max_loss_scale':2.**10, **kwargs}),
    fp16_static  = lambda learn, **kwargs: learn.to_fp16(**{'dynamic':False, **kwargs}),
    bf16         = lambda learn, **kwargs: learn.to_bf16(**kwargs),
    native_fp16  = lambda learn, **kwargs: learn.to_native_fp16(**{'init_scale':2.**10, **kwargs}),
    native_bf16  = lambda learn, **kwargs: learn.to_native_bf16(**kwargs))
calls = 'to_fp16 to_bf16 to_native_fp16 to_native_bf16'.split()

# A test's processes are forks of one that has imported fastai, and so start at once. A fork can't use a GPU.
start_method = 'spawn' if torch.cuda.is_available() else 'forkserver'
set_forkserver_preload('fastai.callback.all fastai.distributed mp_callbacks.all sklearn.datasets torch._dynamo'.split())

fsdp2_runs = torch.cuda.is_available() or tuple(map(int, torch.__version__.split('.')[:2]))>=(2,9)
no_fsdp2 = 'FSDP2 on a CPU needs PyTorch 2.9: 2.6 ends with an AttributeError, 2.7 and 2.8 add up gradients instead of averaging them'

def numbers(n=64, seed=0):
    "`n` rows of eight numbers, and something to learn from them"
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return x,x[:,:4].sin().sum(1, keepdim=True)+x[:,4:].prod(1, keepdim=True)

class At:
    "Item number `i` of `xs`; a class, so that it can be exported"
    def __init__(self, xs): self.xs = xs
    def __call__(self, i:int): return self.xs[i]

def get_dls(bs=16, device='cpu', **kwargs):
    "Training and validation data, both the same and in order. An item is its number."
    x,y = numbers(**kwargs)
    dsets = [Datasets(range(len(x)), [[At(x)],[At(y)]]) for _ in range(2)]
    return DataLoaders.from_dsets(*dsets, bs=bs, device=device, num_workers=0, shuffle=False)

def mlp(norm=False):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8,16,bias=not norm), *([nn.BatchNorm1d(16)] if norm else []), nn.GELU(), nn.Linear(16,16), nn.GELU(), nn.Linear(16,1))

def get_learner(model=None, dls=None, norm=False, **kwargs):
    "A quiet learner, the same each time"
    if model is None: model = mlp(norm)
    learn = Learner(get_dls() if dls is None else dls, model, **{'loss_func':MSELossFlat(), 'lr':1e-2, **kwargs})
    for cb in learn.cbs.filter(lambda o: isinstance(o, ProgressCallback)): learn.remove_cb(cb)
    learn.logger,learn.create_mbar = noop,False
    return learn

Named = namedtuple('Named', 'a b')

@dataclass
class Data:
    a:Any
    b:Any=None

@dataclass(frozen=True)
class Frozen:
    a:Any
    b:Any=None

def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
def flat(ts): return torch.cat([t.detach().double().reshape(-1) for t in ts])
def apart(learn, other, start=0): return ((flat(weights(learn))-flat(weights(other))).norm()/(flat(weights(other))-start).norm()).item() # relative to the way from `start`
def precision_state(learn): return [*learn.mixed_precision.state]
def skipped(learn): return int(learn.precision_recorder.log.skipped.sum())

__all__ = [o for o in globals() if not o.startswith(('test','_'))] # for pytest would run what fastai has in the way of `test_fail`
