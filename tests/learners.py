"Small learners for the tests: one line of data, one model, and every precision that we have"
import csv,functools,gc,inspect,io,itertools,json,math,os,pickle,random,re,subprocess,sys,threading,time,warnings
import matplotlib.pyplot as plt,numpy as np,pandas as pd,pytest,torch
from collections import Counter,OrderedDict,namedtuple
from contextlib import contextmanager,nullcontext
from copy import copy,deepcopy
from dataclasses import dataclass,replace
from importlib import import_module
from types import SimpleNamespace
from multiprocessing import get_context,set_forkserver_preload
from tempfile import TemporaryDirectory
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from unittest.mock import patch as patched
from weakref import ref

from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.fp16 import MixedPrecision as FastaiPrecision
from mp_callbacks.all import *
from mp_callbacks.core.all import *
from mp_callbacks.learner.precision import PrecisionCallback
from mp_callbacks.look.plan import LiveBytes
from cases import *
from interpreters import cells_of,root
from states import *

modes = dict( # the scale starts where nothing overflows, so that no step is skipped and trajectories can be compared
    fp16         = lambda learn, **kwargs: learn.to_fp16(**{'max_loss_scale':2.**10, **kwargs}),
    fp16_static  = lambda learn, **kwargs: learn.to_fp16(**{'dynamic':False, **kwargs}),
    bf16         = lambda learn, **kwargs: learn.to_bf16(**kwargs),
    native_fp16  = lambda learn, **kwargs: learn.to_native_fp16(**{'init_scale':2.**10, **kwargs}),
    native_bf16  = lambda learn, **kwargs: learn.to_native_bf16(**kwargs))
def one_by_one(opt_func):
    "`opt_func`, with a first stepper that isn't marked as elementwise: fastai's own step goes through its parameters"
    def _make(*args, **kwargs):
        opt = opt_func(*args, **kwargs)
        steppers = getattr(opt, 'opt', opt).cbs
        steppers[0] = partial(steppers[0])
        steppers[0].elementwise = False
        return opt
    return _make
def off(got, want): return ((got.float()-want.float()).norm()/want.float().norm()).item()
def roundoff(mode): return 2**-11 if 'fp16' in mode else 2**-8
with_fp8 = {**modes, 'fp8': lambda learn, **kwargs: learn.to_fp8(emulate=True, **kwargs)}
calls = 'to_fp16 to_bf16 to_native_fp16 to_native_bf16'.split()

f16,bf16,f32 = torch.float16,torch.bfloat16,torch.float32
def autocast(model=None, dtype=bf16): return torch.autocast('cpu', dtype, cache_enabled=False)
def unmeasured(*args, **kwargs):
    "A `half_precision` that calls the model once in its first batch, for who counts its calls, or what it sees"
    return half_precision(*args, measure=False, **kwargs)
def ask_nothing(learn):
    "`learn`, whose model isn't called in its first batch to measure: for who counts calls, or what is seen in them"
    if cb := getattr(learn, 'mixed_precision', None): cb.half = cb.half.without_measure()
    return learn
def half(model, **kwargs): return half_precision(model, bf16, **kwargs)

# A test's processes are forks of one that has imported fastai, and so start at once. A fork can't use a GPU.
start_method = 'spawn' if torch.cuda.is_available() else 'forkserver'
set_forkserver_preload('fastai.callback.all fastai.distributed mp_callbacks.all sklearn.datasets torch._dynamo'.split())

fsdp2_runs = torch.cuda.is_available() or tuple(map(int, torch.__version__.split('.')[:2]))>=(2,9)
no_fsdp2 = ('FSDP2 on a CPU needs PyTorch 2.9: 2.6 ends with an AttributeError, 2.7 and 2.8 add up gradients instead '
            'of averaging them')

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

def as_dls(x, y, bs=16):
    "Training and validation data with these rows, in order"
    items = [*zip(x, y)]
    return DataLoaders.from_dsets(items, items, bs=bs, device='cpu', num_workers=0, shuffle=False)

def mlp(norm=False, n=16):
    torch.manual_seed(1)
    norms = [nn.BatchNorm1d(n)] if norm else []
    layers = nn.Linear(8,n,bias=not norm),*norms,nn.GELU(),nn.Linear(n,n),nn.GELU(),nn.Linear(n,1)
    return nn.Sequential(*layers)

class Does(nn.Module):
    "Computes `f` of itself and its inputs; `parts` are its attributes, tensors of them parameters, if not buffers"
    def __init__(self, f, /, **parts):
        super().__init__()
        self.function = f
        for k,v in parts.items():
            trained = type(v) is torch.Tensor and not isinstance(v, nn.Buffer)
            setattr(self, k, nn.Parameter(v) if trained else v)
    def forward(self, *args, **kwargs): return self.function(self, *args, **kwargs)

class Operations(TorchDispatchMode):
    "Call `see` with each operation that PyTorch computes meanwhile, its arguments, and what it returns"
    def __init__(self, see): super().__init__(); self.see = see
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        self.see(func, args, res)
        return res

def mse_of(model, x, y): return F.mse_loss(model(x), y)

def train_steps(steps, batches, loss=mse_of):
    "`steps`, of `TrainingSteps`, after one with each of `batches`"
    for o in batches:
        with steps.batch(*o): steps.backward(loss(steps.model, *o))
        steps.make()
    return steps

def returned(module):
    "A list, to which each call of `module` adds what it returns"
    res = []
    module.register_forward_hook(lambda module, args, out: res.append(out))
    return res

def batch(model, x, around=half):
    "Output and gradients of a batch, computed in `around`, or in what it returns; nothing is left in the model"
    model.zero_grad()
    with around if isinstance(around, half_precision) else around(model): (res := model(x)).square().sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [res.detach(),*grads]

def get_learner(model=None, dls=None, norm=False, **kwargs):
    "A quiet learner, the same each time"
    if model is None: model = mlp(norm)
    return quiet(Learner(get_dls() if dls is None else dls, model, **{'loss_func':MSELossFlat(), 'lr':1e-2, **kwargs}))

def quiet(learn):
    "Without fastai's bar and table"
    learn.remove_cbs(learn.cbs.filter(lambda o: isinstance(o, ProgressCallback)))
    learn.logger,learn.create_mbar = noop,False
    return learn

before_the_step = 'before_batch after_pred after_loss before_backward after_backward before_step'.split()
in_batch = before_the_step+'after_step after_batch'.split()

class Now(Callback):
    "Call `f` with the learner in `event`, once; in the batch `at`, of training or else validation, if one of a batch"
    def __init__(self, event, f, order=80, training=True, at=1):
        self.f,self.order,self.where = f,order,(training,at) if event in in_batch else None
        setattr(self, event, self._now)
    def _now(self):
        if self.where and self.where!=(self.training,self.iter): return
        f,self.f = self.f,noop
        f(self.learn)

def raises(e):
    "A function that raises `e`"
    def _raise(*args, **kwargs): raise e
    return _raise

class On(Callback):
    "Call `f` with the learner in each `event`: if it is one of a batch, of the training batches `at`, counted from 0"
    run_valid = False
    def __init__(self, event, f, order=0, at=None):
        self.f,self.order,self.at = f,order,at
        setattr(self, event, self._on)
    def _on(self):
        if self.at is None or self.epoch*self.n_iter+self.iter in self.at: self.f(self.learn)

def overflow(*at, layer=0):
    "The gradient of a layer's weight overflows in the batches `at`; the loss doesn't"
    return On('after_backward', lambda learn: learn.model[layer].weight.grad.fill_(math.inf), -20, at)

def InfiniteAt(*at):
    "Infinite batches, those training batches `at`"
    return On('before_batch', lambda learn: setattr(learn, 'xb', (learn.x*math.inf,)), at=at)

def beyond_float16(*args):
    "A learner with a gain whose gradient float16 can't hold if inputs are `larger`: a sum, float32 under autocast"
    torch.manual_seed(0)
    model = Does(lambda m, x: m.lin(x.abs())*m.gain, lin=nn.Linear(8,16), gain=torch.ones(1))
    with torch.no_grad(): model.lin.weight.abs_()
    return get_learner(model, *args, loss_func=lambda pred, y: pred.sum(), lr=1e-9)
def larger(at=None): return On('before_batch', lambda learn: setattr(learn, 'xb', (learn.x*100,)), at=at)

class ScaledLoss(nn.Module):
    "A loss with a parameter"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
    def forward(self, pred, y): return F.mse_loss(self.w*pred, y)

class MovingLoss(ScaledLoss):
    "A loss that counts its calls, and divides by what targets have been"
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer('size', torch.ones(()))
    def forward(self, pred, y):
        self.calls += 1
        self.size.mul_(.9).add_(.1*y.abs().mean())
        return super().forward(pred/self.size, y/self.size)

class StepLoss(Callback):
    "Step the parameters of the loss with an optimizer of their own"
    def before_fit(self): self.opt2 = torch.optim.SGD(self.loss_func.parameters(), lr=.01)
    def after_step(self): self.opt2.step()
    def after_batch(self): self.opt2.zero_grad()

Named = namedtuple('Named', 'a b')

@dataclass
class Data:
    a:object
    b:object=None

@dataclass(frozen=True)
class Frozen:
    a:object
    b:object=None

has_notes = pytest.mark.skipif(not hasattr(Exception, 'add_note'), reason='Exceptions have notes since Python 3.11')

def fused_adam(params, **kwargs): return OptimWrapper(params, torch.optim.Adam, fused=True, **kwargs)
def by_pickle(o): return pickle.loads(pickle.dumps(o))
def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
def flat(ts): return torch.cat([t.detach().double().reshape(-1) for t in ts])
def apart(learn, other, start=0):
    "How far apart weights are, relative to the way from `start`"
    a,b = flat(weights(learn)),flat(weights(other))
    return ((a-b).norm()/(b-start).norm()).item()
def in_mode(mode, model=None, options={}, **kwargs):
    "A learner in `mode`, whose call has these `options`, or in float32"
    learn = get_learner(model, **kwargs)
    return modes[mode](learn, **options) if mode else learn
def fitted(learn, n=1, *cbs, **kwargs):
    "`learn`, after a fit of `n` epochs"
    learn.fit(n, cbs=[*cbs], **kwargs)
    return learn
def way(learn, n=1, *cbs):
    "How far the weights go in a fit of `n` epochs, each of them"
    start = flat(weights(learn))
    return flat(weights(fitted(learn, n, *cbs)))-start
def same_weights(learn, other): return all(map(torch.equal, weights(learn), weights(other)))
def log_of(learn): return learn.precision_recorder.log
def heard(f, *args, **kwargs):
    "The warnings of `f` about steps that were not finite, and the error that it ended with, or None"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        try: e = f(*args, **kwargs) and None
        except FloatingPointError as o: e = o
    return [str(o.message) for o in told if 'not finite' in str(o.message)],e
def note_of(f, *args, raises=RuntimeError):
    "The note to the error that a call of `f` raises"
    with pytest.raises(raises) as e: f(*args)
    note, = e.value.__notes__
    return note
def skipped(learn): return int(learn.precision_recorder.log.skipped.sum())

# pytest would run what fastai has in the way of `test_fail`
__all__ = [o for o in globals() if not o.startswith(('test','_'))]
