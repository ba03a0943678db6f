"""The table *ours against fastai's own* of the README: each of its rows is a function here, which bears the row's name and returns what a user would see

Each runs with all of our `to_*` in this process and with all of fastai's in another, which never imports mp_callbacks: this file, run as a script.
fastai's are as they are, but for the device: where they say 'cuda' they get the CPU. In the row *CPU* they don't."""
import json,re,subprocess,sys,warnings
from contextlib import contextmanager,suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple

import fastai,pytest,torch
from fastai.basics import *
from fastai.callback import fp16
from fastai.callback.all import *

masters,native,theirs = ('to_fp16', 'to_bf16'),('to_native_fp16', 'to_native_bf16'),('to_fp16', 'to_bf16', 'to_non_native_fp16')
index = Path(__file__).resolve().parent.parent/'nbs/index.ipynb'
rows = {}

def row(
    *args, # Of our calls those that the row is about
    sees, # What one sees with ours
    **fastai # And with fastai's `to_fp16`, `to_bf16`, `to_non_native_fp16`, where it is something else; None: does not have what the row is about
):
    def _row(f): rows[f.__name__] = SimpleNamespace(f=f, ours=args, sees=sees, fastai=fastai); return f
    return _row

# --- What the rows are made of

def line(n=64):
    "Four numbers, and what a line makes of them"
    x = torch.randn(n, 4)
    return x,x.sum(1, keepdim=True)+1

def linear(): return nn.Linear(4, 1)

def learner(to, model=linear, loss=MSELossFlat(), data=line, lr=.1, options={}, **kwargs):
    set_seed(1)
    ds = list(zip(*data()))
    dls = DataLoaders.from_dsets(ds, ds, bs=16, device='cpu', num_workers=0)
    learn = Learner(dls, model(), loss_func=loss, lr=lr, **kwargs)
    learn.logger,learn.create_mbar = noop,False
    return getattr(learn, to)(**options)

class At(Callback):
    "Call `f` with the learner in an `event` of the training batch number `at`, or of each in `at`"
    order = 5
    def __init__(self, event, f, at=(2,), order=5):
        self.f,self.at,self.order = f,at,order
        setattr(self, event, self._do)
    def _do(self):
        if self.training and self.train_iter in self.at: self.f(self.learn)

def throw(e):
    def _throw(learn): raise e('here')
    return _throw

def times(x):
    "Multiply the inputs by `x`"
    def _times(learn): learn.xb = tuple(o*x for o in learn.xb)
    return _times

def error(f, *args, **kwargs):
    "The name of what `f` raises, if anything"
    try: f(*args, **kwargs)
    except BaseException as e: return type(e).__name__

def weights(learn): return torch.cat([p.detach().float().flatten() for p in learn.model.parameters()])
def dtypes(tensors): return ' '.join(sorted({str(o.dtype).removeprefix('torch.') for o in tensors}))
def weight_dtypes(learn): return dtypes(learn.model.parameters())
def autocast_on(): return torch.is_autocast_enabled('cpu')

def learns(learn):
    "Does the loss come down?"
    before = learn.validate()[0]
    learn.fit(8)
    return learn.validate()[0] < before/2

def loss_scale(learn):
    "The loss scale in force, in any of them"
    return learn.scaler.get_scale() if hasattr(learn, 'scaler') else getattr(learn, 'non_native_mixed_precision', learn).loss_scale

