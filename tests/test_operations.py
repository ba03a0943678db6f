"""Where autocast runs, half precision runs: PyTorch's database of modules, and the code of other people's modules

Each case runs in float32, under autocast and in half precision, with float32 results and gradients whose error is at
most three times autocast's. The database is a slow test, and makes the file take long."""
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

import pytest,torch
from torch import Tensor,nn

from learners import *
from mp_callbacks.devices import support
from mp_callbacks.dtypes import cast_tree,leaves
from states import assert_plain,identical,seed_cpu

ways = dict(float32=None, autocast=False, half=True)
halves = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]

def outcome(model, args, way, dtype, kwargs={}):
    "Outputs and gradients of `model` computed in a `way`, as one vector; the error where it raises one"
    half = nullcontext() if ways[way] is None else half_precision(model, dtype, rules=ways[way])
    try:
        for _ in range(2 if ways[way] else 1): # in a second call, weights are cast together
            seed_cpu(0)
            model.zero_grad()
            with half:
                res = leaves(model(*args, **kwargs))
                outs = [o for o in res if isinstance(o, Tensor) and o.dtype.is_floating_point]
                if grown := [o for o in outs if o.requires_grad]: sum(o.to_dense().sum() for o in grown).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert {o.dtype for o in (*outs,*grads)}<={torch.float32}
        return flat([o.to_dense() for o in (*outs,*grads)]) if outs else torch.zeros(0)
    except (RuntimeError,TypeError,NotImplementedError) as e: return e

def compare(new, args, dtype, kwargs={}):
    "Raise an error if half precision fails where autocast doesn't, is less exact, or leaves something behind"
    seen = {}
    for way in ways:
        seed_cpu(0)
        model = new()
        params = dict(model.named_parameters())
        if not params: return # nothing to compute from
        seen[way] = outcome(model, args, way, dtype, kwargs)
        assert_plain(model)
        assert params.keys()==dict(model.named_parameters()).keys() and identical(model.parameters(), params.values())
    full,auto,ours = seen.values()
    if isinstance(full, Exception) or isinstance(auto, Exception): return
    if isinstance(ours, Exception): raise ours
    if not full.numel(): return
    errors = [((o-full).norm()/full.norm().clamp_min(1e-6)).item() for o in (auto,ours)]
    assert ours.isfinite().all() or not auto.isfinite().all()
    if auto.isfinite().all(): assert errors[1]<=3*max(errors[0], torch.finfo(dtype).eps), errors

# --- PyTorch's own database of modules

class Behind(nn.Module):
    "Hands half-precision numbers to a module, as the layer before it would"
    def __init__(self, module): super().__init__(); self.module,self.layer = module,nn.Linear(1,1)
    def forward(self, *args, **kwargs):
        dtype = self.layer(torch.ones(1,1)).dtype
        return self.module(*cast_tree(args, dtype, torch.float32), **kwargs)

def check_modules(dtype):
    "What is wrong with which module of the database"
    from torch.testing._internal.common_modules import module_db # PyTorch publishes its list of modules nowhere else
    warnings.simplefilter('ignore')
    slow = dtype==torch.float16 and support('cpu', dtype)=='emulated' # then convolutions take seconds
    # lazy modules are refused as long as they have no shapes
    infos = [o for o in module_db if 'Lazy' not in o.name and not (slow and 'Conv' in o.name)]
    # as PyTorch's own tests do: most modules compute the same in both
    def _trainings(info): return (True,False) if info.train_and_eval_differ else (True,)
    return [found for info in infos for o in _trainings(info) for found in check_module(info, o, dtype)]

def check_module(info, training, dtype):
    "As the model itself, and behind a layer in half precision"
    seed_cpu(0)
    samples = [*info.module_inputs_func(info, 'cpu', torch.float32, True, training)]
    for sample in samples[::1+2*(len(samples)//24)]: # one loss has hundreds; odd, as kinds of samples alternate
        made,called = sample.constructor_input,sample.forward_input
        if called is None: continue
        args = cast_tree(called.args, torch.float32, torch.float64)
        def _new():
            seed_cpu(0)
            return info.module_cls(*made.args, **made.kwargs).train(training)
        for new in (_new, lambda: Behind(_new())):
            try: compare(new, args, dtype, called.kwargs)
            except Exception as e: yield f'{info.name}, {sample.desc}: {type(e).__name__}: {e}'

@pytest.fixture(scope='module')
def pool():
    "A process of its own, as PyTorch's test helpers change settings of PyTorch for good"
    with ProcessPoolExecutor(1, get_context('spawn')) as res: yield res

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.bfloat16,torch.float16])
def test_modules(dtype, pool): assert pool.submit(check_modules, dtype).result()==[]

# --- A module's own code

class Uses(nn.Module):
    "`f` of a float32 tensor and a parameter of its own"
    def __init__(self, f): super().__init__(); self.f,self.w = f,nn.Parameter(torch.rand(8,8)+.5)
    def forward(self, x): return x+self.f(x.float(), self.w).mean()

operations = dict( # that half precision doesn't have, or not beside float32
    lerp           = lambda x,w: torch.lerp(x, w, .3),
    written        = lambda x,w: (w*2).index_add_(0, torch.arange(8), x),
    to_numpy       = lambda x,w: x+torch.from_numpy(w.detach().numpy()))

class GroupNorm32(nn.GroupNorm):
    "As the diffusion models have it"
    def forward(self, x): return super().forward(x.float()).type(x.dtype)

class Decorated(nn.Linear):
    @torch.autocast('cpu', enabled=False)
    def forward(self, x): return x.float()*self.weight[0]+F.linear(x.float(), self.weight, self.bias)

own_code = dict(group_norm=partial(GroupNorm32, 2, 8), decorated=partial(Decorated, 8, 8),
                **{name:partial(Uses, f) for name,f in operations.items()})

@pytest.mark.parametrize('dtype', halves)
@pytest.mark.parametrize('name', own_code)
def test_own_code(name, dtype):
    "Between two layers"
    def _new(): return nn.Sequential(nn.Linear(8,8), own_code[name](), nn.Linear(8,1))
    compare(_new, [numbers(8)[0]], dtype)
    way = half_precision(_new(), dtype).policy().set_index('module').way['1']
    assert way==('float32 norm' if name=='group_norm' else 'own parameters')
