"The training loops that are measured: plain PyTorch, fastai with its own callbacks, and fastai with ours"
import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fastai.callback import fp16 as theirs
from fastai.learner import Learner
from fastai.optimizer import Adam,OptimWrapper

from mp_callbacks.all import *
from models import loss_func

fp16,bf16 = torch.float16,torch.bfloat16
init_scale = 2.**16 # for every float16 loop: with fastai's 2**24 the first steps, the ones timed here, would be skipped and cost less

class Variant(NamedTuple):
    loop:str       # hand: a plain PyTorch loop; fastai: its own callbacks; ours; ours-loss-read: with loss_on_device=False
    opt:str        # fused: torch's AdamW; fastai: fastai's Adam; flat: the same with flat_master=True; flat-fused: with fused=True
    precision:str  # fp32; tf32; autocast-fp16, autocast-bf16; fp16, bf16: half-precision copies of float32 weights; bf16-split, …: the same with `master='split'`
    @property
    def dtype(self): return fp16 if 'fp16' in self.precision else bf16 if 'bf16' in self.precision else torch.float32

class Hand:
    "A training loop without a library"
    def __init__(self, v, model, make_opt):
        self.v,self.model,self.net,self.dev = v,model,model,next(model.parameters()).device.type
        self.autocast = v.precision.startswith('autocast')
        self.scaler = torch.amp.GradScaler(self.dev, init_scale=init_scale, enabled=v.dtype==fp16)
        self.masters,self.copies = list(model.parameters()),None
        self.opt = make_opt(self.masters)
        if v.precision in ('fp16','bf16'):
            self.net = copy.deepcopy(model).to(v.dtype)
            self.copies = list(self.net.parameters())

    def push(self):
        if self.copies: torch._foreach_copy_([c.data for c in self.copies], [p.data for p in self.masters])

    def forward(self, x, y):
        if self.copies and x.is_floating_point(): x = x.to(self.v.dtype)
        with torch.autocast(self.dev, self.v.dtype) if self.autocast else nullcontext(): pred = self.net(x)
        return loss_func(pred.float(), y)

    def backward(self, loss): self.scaler.scale(loss).backward()

    def pull(self):
        if not self.copies: return
        for p in self.masters: p.grad = torch.empty_like(p)
        torch._foreach_copy_([p.grad for p in self.masters], [c.grad for c in self.copies])
        for c in self.copies: c.grad = None

    def step(self):
        if not self.scaler.is_enabled(): return self.opt.step()
        self.scaler.step(self.opt)
        self.scaler.update()

    def grad_opt(self, loss):
        self.backward(loss)
        self.pull()
        self.step()
        self.opt.zero_grad()

    def __call__(self, batches):
        for x,y in batches:
            self.push()
            self.grad_opt(self.forward(x, y))

    def parts(self): return [(self,'push','push'), (self,'grad_opt','grad_opt'), (self,'backward','backward'), (self,'pull','pull'), (self,'step','opt'), (self.opt,'zero_grad','zero_grad')]

class Loaders(list):
    "As much of fastai's `DataLoaders` as a `Learner` needs here"
    def __init__(self, dev): super().__init__([[],[]]); self.device = dev
    train = property(lambda self: self[0])

class FastaiNative(theirs.MixedPrecision):
    "fastai's, on any device: its own says 'cuda' wherever it is"
    def before_fit(self):
        super().before_fit()
        dev,dtype = self.dls.device.type,bf16 if self.amp_mode==theirs.AMPMode.BF16 else fp16
        if dev!='cuda': self.autocast,self.learn.scaler = torch.autocast(dev, dtype),torch.amp.GradScaler(dev, **self.kwargs)

class FastaiNonNative(theirs.NonNativeMixedPrecision):
    "fastai's, without the check that the device is a GPU"
    def before_fit(self):
        dev,self.dls.device = self.dls.device,SimpleNamespace(type='cuda')
        try: super().before_fit()
        finally: self.dls.device = dev

class Fastai:
    "A `Learner`, with fastai's callbacks or ours"
    def __init__(self, v, model, make_opt):
        self.v,self.model,kind = v,model,v.precision.removeprefix('autocast-')
        self.learn = learn = Learner(Loaders(next(model.parameters()).device), model, loss_func=loss_func, opt_func=make_opt, lr=1e-4)
        flat,fused,auto,late = v.opt.startswith('flat'),v.opt=='flat-fused',v.precision.startswith('autocast'),False if v.loop=='ours-loss-read' else None
        kind,_,master = kind.partition('-')
        master = dict(master=master or 'float32', loss_on_device=late)
        if v.loop=='fastai':
            if auto: learn.add_cb(FastaiNative(kind, init_scale=init_scale))
            elif kind=='fp16': learn.add_cbs([theirs.ModelToHalf(), FastaiNonNative(flat_master=flat, max_loss_scale=init_scale)])
        elif auto: learn.to_native_fp16(init_scale, loss_on_device=late) if kind=='fp16' else learn.to_native_bf16(loss_on_device=late)
        elif kind=='fp16': learn.to_fp16(flat_master=flat, fused=fused, max_loss_scale=init_scale, headroom=None, **master)
        elif kind=='bf16': learn.to_bf16(flat_master=flat, fused=fused, **master)
        learn.create_opt()
        self.opt = learn.opt

    def __call__(self, batches):
        self.learn.dls[0] = batches
        with self.learn.no_bar(), self.learn.no_logging(): self.learn.fit(1)

    def parts(self):
        learn,phases = self.learn,dict(before_batch='push', after_backward='pull', before_step='check', after_step='after')
        cbs = [cb for cb in learn.cbs if isinstance(cb, (theirs.MixedPrecision,theirs.NonNativeMixedPrecision,MixedPrecision,ModelToHalf,NativeMixedPrecision))]
        res = [(learn,'_do_grad_opt','grad_opt'), (learn,'_backward','backward'), (learn,'_step','opt'), (learn.opt,'zero_grad','zero_grad')]
        if self.v.loop.startswith('ours') and self.v.opt!='fused': res[-1] = [(cb,'_zero_grad','zero_grad') for cb in cbs if hasattr(cb, '_zero_grad')][0] # stands in for the optimizer's while a fit runs
        res += [(cb,'after_step','record') for cb in learn.cbs if isinstance(cb, PrecisionRecorder)]
        return res+[(cb,k,o) for cb in cbs for k,o in phases.items() if hasattr(type(cb), k)]

def build(v, model):
    "The loop that `v` names, around `model`: call it with batches"
    if v.opt!='fused':       make_opt = lambda ps, lr=1e-4, **kw: Adam(ps, lr, wd=.01)
    elif v.loop=='hand':     make_opt = lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True)
    else:                    make_opt = lambda ps, lr=1e-4, **kw: OptimWrapper(ps, torch.optim.AdamW, lr=lr, fused=True)
    return (Hand if v.loop=='hand' else Fastai)(v, model, make_opt)
