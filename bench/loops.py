"The training loops that are measured: plain PyTorch, fastai with its own callbacks, and fastai with ours"
import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fastai.callback import fp16 as theirs
from fastai.learner import Learner
from fastai.optimizer import Adam,OptimWrapper

import mp_callbacks.all # noqa: F401, as it adds `to_fp16` and its kin to `Learner`
from mp_callbacks.core.loss_scale import DynamicLossScale
from models import loss_func

fp16,bf16 = torch.float16,torch.bfloat16
# Every float16 loop starts here. With fastai's 2**24 the first steps, those timed here, would be skipped and cost less.
lr = 1e-9 # else the one batch is learned by heart: its gradients vanish, and their squares are denormal, slow on a CPU
init_scale = 2.**16
backend = 'inductor' # of compiled loops

class Variant(NamedTuple):
    # hand: a plain PyTorch loop; bare: forward and backward only; fastai: its own callbacks; ours; compiled: ours;
    # singly: ours without the one cast
    loop:str
    opt:str        # fused: torch's AdamW; fastai: fastai's Adam; flat: the same with flat_master=True
    # fp32; tf32; autocast-fp16, autocast-bf16; fp16, bf16: half-precision copies of float32 weights; fp8-RECIPE
    precision:str
    @property
    def dtype(self): return fp16 if 'fp16' in self.precision else bf16 if 'bf16' in self.precision else torch.float32

class Hand:
    "A training loop without a library"
    def __init__(self, v, model, make_opt):
        self.dtype,self.model,self.net,self.dev = v.dtype,model,model,next(model.parameters()).device.type
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
        if self.copies and x.is_floating_point(): x = x.to(self.dtype)
        with torch.autocast(self.dev, self.dtype) if self.autocast else nullcontext(): pred = self.net(x)
        return loss_func(pred.float(), y)

    def pull(self):
        if not self.copies: return
        for p in self.masters: p.grad = torch.empty_like(p)
        torch._foreach_copy_([p.grad for p in self.masters], [c.grad for c in self.copies])
        for c in self.copies: c.grad = None

    def step(self):
        if not self.scaler.is_enabled(): return self.opt.step()
        self.scaler.step(self.opt)
        self.scaler.update()

    def __call__(self, batches):
        for x,y in batches:
            self.push()
            self.scaler.scale(self.forward(x, y)).backward()
            self.pull()
            self.step()
            self.opt.zero_grad()

class Bare(Hand):
    "Forward, loss and backward, and nothing else"
    def __init__(self, v, model): super().__init__(v, model, lambda ps: torch.optim.SGD(ps, lr=0.))

    def __call__(self, batches):
        ps = self.copies or self.masters
        for x,y in batches:
            self.forward(x, y).backward()
            for p in ps: p.grad = None

def emulated(dev):
    "Must `dev` emulate FP8?"
    from mp_callbacks.core.fp8 import check_fp8 # here, as older versions that we compare with don't have it
    try: return check_fp8(dev) is not None
    except ValueError: return True

class Loaders(list):
    "As much of fastai's `DataLoaders` as a `Learner` needs here"
    def __init__(self, dev):
        super().__init__([[],[]])
        self.device = dev
    train = property(lambda self: self[0])

class FastaiNative(theirs.MixedPrecision):
    "fastai's, on any device: its own says 'cuda' wherever it is"
    def before_fit(self):
        super().before_fit()
        dev,dtype = self.dls.device.type,bf16 if self.amp_mode==theirs.AMPMode.BF16 else fp16
        if dev=='cuda': return
        self.autocast,self.learn.scaler = torch.autocast(dev, dtype),torch.amp.GradScaler(dev, **self.kwargs)

class FastaiNonNative(theirs.NonNativeMixedPrecision):
    "fastai's, without the check that the device is a GPU"
    def before_fit(self):
        dev,self.dls.device = self.dls.device,SimpleNamespace(type='cuda')
        try: super().before_fit()
        finally: self.dls.device = dev

class Fastai:
    "A `Learner`, with fastai's callbacks or ours"
    def __init__(self, v, model, make_opt):
        self.model,loaders = model,Loaders(next(model.parameters()).device)
        self.learn = Learner(loaders, model, loss_func=loss_func, opt_func=make_opt, lr=lr)
        (self._add_theirs if v.loop=='fastai' else self._add_ours)(v.precision, v.opt=='flat')
        self.learn.create_opt()
        self.opt = self.learn.opt

    def _add_theirs(self, precision, flat):
        if precision.startswith('autocast-'):
            self.learn.add_cb(FastaiNative(precision.removeprefix('autocast-'), init_scale=init_scale))
        elif precision=='fp16':
            self.learn.add_cbs([theirs.ModelToHalf(), FastaiNonNative(flat_master=flat, max_loss_scale=init_scale)])

    def _add_ours(self, precision, flat):
        if   precision=='autocast-fp16': self.learn.to_native_fp16(init_scale)
        elif precision=='autocast-bf16': self.learn.to_native_bf16()
        elif precision=='fp16':          self.learn.to_fp16(DynamicLossScale(init_scale), flat_master=flat)
        elif precision=='bf16':          self.learn.to_bf16(flat_master=flat)
        elif precision.startswith('fp8-'):
            self.learn.to_fp8(precision.removeprefix('fp8-'), emulate=emulated(self.learn.dls.device))

    def __call__(self, batches):
        self.learn.dls[0] = batches
        with self.learn.no_bar(), self.learn.no_logging(): self.learn.fit(1)

def without_one_cast(loop):
    "`loop` of ours, in which autocast casts each weight on its own"
    loop.learn.mixed_precision.half._chosen.cast._nodes.clear()
    return loop

def build(v, model):
    "The loop that `v` names, around `model`: call it with batches"
    if v.loop=='compiled': model = torch.compile(model, backend=backend)
    if v.loop=='bare': return Bare(v, model)
    if v.loop=='singly': return without_one_cast(build(v._replace(loop='ours'), model))
    if v.opt!='fused':   make_opt = lambda ps, lr=lr, **kw: Adam(ps, lr, wd=.01)
    elif v.loop=='hand': make_opt = lambda ps: torch.optim.AdamW(ps, lr=lr, fused=True)
    else:                make_opt = lambda ps, lr=lr, **kw: OptimWrapper(ps, torch.optim.AdamW, lr=lr, fused=True)
    return (Hand if v.loop=='hand' else Fastai)(v, model, make_opt)
