"What a learner is made of, to compare before and after"
from contextlib import contextmanager

import torch
from fastcore.foundation import L
from torch import nn
from torch.nn import functional as F

# `torch.manual_seed` also formats the stack for each kind of device that isn't there, which takes longer than a step
seed_cpu = torch.default_generator.manual_seed

def leaves(x):
    "All that is in `x`, in a list: values, and the keys of dicts"
    if isinstance(x, dict): return [o for k in sorted(x, key=str) for o in (str(k), *leaves(x[k]))]
    if isinstance(x, (list,tuple,L)): return [o for v in x for o in leaves(v)]
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x]

def opt_params(learn): return [p for pg in learn.opt.param_lists for p in pg]

def opt_state(learn):
    "What the optimizer remembers, without hyper-parameters: a schedule may have set these already"
    return {k:v for k,v in learn.opt.state_dict().items() if k not in ('hypers','param_groups')}

def precision_state(learn):
    "Without the checksum of a file's weights, which the first batch after a load removes"
    state = learn.mixed_precision.state.as_dict()
    if 'measured' in state: del state['measured']['weights']
    return state

def model_and_opt(learn):
    "Weights, buffers and the optimizer's state"
    return leaves([dict(learn.model.state_dict()), opt_state(learn)])

def everything(learn):
    "Weights, buffers, the optimizer's state and the numbers of the precision's"
    return [*model_and_opt(learn), *leaves(precision_state(learn))]

def same(xs, ys):
    "Are `xs` and `ys` equal, with all that is in them: lengths, types, dtypes, bits?"
    if type(xs) is not type(ys): return False
    if isinstance(xs, torch.Tensor): return xs.dtype==ys.dtype and torch.equal(xs, ys)
    if isinstance(xs, dict): return xs.keys()==ys.keys() and all(same(xs[k], ys[k]) for k in xs)
    if isinstance(xs, (list,tuple,L)): return len(xs)==len(ys) and all(map(same, xs, ys))
    return xs==ys

@contextmanager
def stays(state, *args):
    "What `state` of `args` returns is the same after the `with` as before"
    before = state(*args)
    yield
    assert same(state(*args), before)

def identical(xs, ys):
    "Are they the same objects, in the same order?"
    return all(x is y for x,y in zip(xs, ys, strict=True))

def without_gradients(model, *args, inference=True):
    "What `model` returns in validation, and in `inference` mode: twice, as some of it is cast from a second call on"
    res = []
    for mode in (torch.no_grad,)*2+(torch.inference_mode,)*2*inference:
        with mode(): res.append(model(*args))
    return [o.clone() for o in res] # which tests may compare and keep

def assert_plain(model, what=None):
    "Nothing of ours stands in `model`, and no autocast is open"
    assert not [n for n,m in model.named_modules() if 'forward' in vars(m)], what
    assert {(p.dtype,type(p)) for p in model.parameters()}=={(torch.float32,nn.Parameter)}, what
    assert not torch.is_autocast_enabled('cpu') and torch.is_grad_enabled(), what
    assert F.linear(torch.ones(1,2), torch.ones(2,2)).dtype==torch.float32, what

def assert_clean(model):
    "Also nothing is left of a batch"
    assert_plain(model)
    assert all(p.isfinite().all() and p.grad is None for p in model.parameters())
    assert all(b.isfinite().all() for b in model.buffers())
