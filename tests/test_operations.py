"""Where autocast runs, copies run: PyTorch's database of modules, and operations on own parameters

Each case runs in float32, under autocast and with copies: what runs under autocast runs with copies, with float32
results and gradients whose error is at most three times autocast's. The database is a slow test.

The file takes long because it runs all of PyTorch's modules."""
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

ways = dict(float32=None, autocast=False, copies=True)

def outcome(model, args, way, dtype, kwargs={}):
    "Outputs and gradients of `model` computed in a `way`, as one vector; the error where it raises one"
    half = nullcontext() if ways[way] is None else half_precision(model, dtype, copies=ways[way])
    torch.manual_seed(0)
    try:
        with half:
            res = leaves(model(*args, **kwargs))
            outs = [o for o in res if isinstance(o, Tensor) and o.dtype.is_floating_point]
            if grown := [o for o in outs if o.requires_grad]: sum(o.to_dense().sum() for o in grown).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert {o.dtype for o in (*outs,*grads)}<={torch.float32}
        return flat([o.to_dense() for o in (*outs,*grads)]) if outs else torch.zeros(0)
    except (RuntimeError,TypeError,NotImplementedError) as e: return e

def compare(new, args, dtype, kwargs={}):
    "Raise an error if copies fail where autocast doesn't, are less exact, or leave something behind"
    seen = {}
    for way in ways:
        torch.manual_seed(0)
        model = new()
        before = [*model.named_parameters()],dict(model.named_buffers())
        if not before[0]: return # nothing to compute from
        seen[way] = outcome(model, args, way, dtype, kwargs)
        assert [(n,id(p)) for n,p in model.named_parameters()]==[(n,id(p)) for n,p in before[0]]
        assert not any('forward' in vars(m) or {*vars(m)}&{*m._parameters} for m in model.modules())
        assert {p.dtype for p in model.parameters()}<={torch.float32}
    full,auto,ours = seen.values()
    if isinstance(full, Exception) or isinstance(auto, Exception): return
    if isinstance(ours, Exception): raise ours
    if not full.numel(): return
    errors = [((o-full).norm()/full.norm().clamp_min(1e-6)).item() for o in (auto,ours)]
    assert ours.isfinite().all() or not auto.isfinite().all()
    if auto.isfinite().all(): assert errors[1]<=3*max(errors[0], torch.finfo(dtype).eps), errors

# --- Operations on a float32 tensor and an own parameter

class Uses(nn.Module):
    "Behind a layer that computes in half precision: `f` of a float32 tensor and an own parameter"
    def __init__(self, f, shape):
        super().__init__()
        self.f,self.layer,self.w = f,nn.Linear(4,4),nn.Parameter(torch.rand(shape)+.5)
    def forward(self, x): return self.f(x, self.w)+self.layer(x).float().mean()

operations = dict(
    lerp          = (lambda x,w: torch.lerp(x, w, .3), (4,4)),
    lerp_weight   = (lambda x,w: torch.lerp(x, x+1, w), (4,4)),
    mv            = (lambda x,w: torch.mv(x, w), 4),
    dot           = (lambda x,w: torch.dot(x[0], w), 4),
    vdot          = (lambda x,w: torch.vdot(x[0], w), 4),
    inner         = (lambda x,w: torch.inner(x, w), 4),
    outer         = (lambda x,w: torch.outer(x[0], w), 4),
    tensordot     = (lambda x,w: torch.tensordot(x, w, 1), (4,4)),
    einsum        = (lambda x,w: torch.einsum('ij,jk->ik', x, w), (4,4)),
    cross         = (lambda x,w: torch.linalg.cross(x[:,:3], w), (4,3)),
    cdist         = (lambda x,w: torch.cdist(x, w), (4,4)),
    bilinear      = (lambda x,w: F.bilinear(x, x, w), (2,4,4)),
    addr          = (lambda x,w: torch.addr(x, w, w), 4),
    addmv         = (lambda x,w: torch.addmv(x[0], x, w), 4),
    addcmul       = (lambda x,w: torch.addcmul(x, x, w), (4,4)),
    addcdiv       = (lambda x,w: torch.addcdiv(x, x, w), (4,4)),
    kron          = (lambda x,w: torch.kron(x, w), (2,2)),
    index_add     = (lambda x,w: x.index_add(0, torch.tensor([1]), w), (1,4)),
    index_copy    = (lambda x,w: x.index_copy(0, torch.tensor([1]), w), (1,4)),
    index_put     = (lambda x,w: x.index_put((torch.tensor([1]),), w), (1,4)),
    scatter       = (lambda x,w: x.scatter(0, torch.zeros(1, 4, dtype=int), w), (1,4)),
    scatter_add   = (lambda x,w: x.scatter_add(0, torch.zeros(1, 4, dtype=int), w), (1,4)),
    masked_scatter= (lambda x,w: x.masked_scatter(x>0, w), (4,4)),
    masked_fill   = (lambda x,w: x.masked_fill(x>0, w.sum()), 4),
    where         = (lambda x,w: torch.where(x>0, x, w), (4,4)),
    assigned      = (lambda x,w: torch.zeros(4,4).index_put_((torch.tensor([1]),), w), (1,4)),
    layer_norm    = (lambda x,w: F.layer_norm(x, (4,), w), 4),
    batch_norm    = (lambda x,w: F.batch_norm(x, None, None, w, training=True), 4),
    group_norm    = (lambda x,w: F.group_norm(x, 2, w), 4),
    instance_norm = (lambda x,w: F.instance_norm(x[None], weight=w, bias=w), 4),
    prelu         = (lambda x,w: F.prelu(x, w), 1),
    linear        = (lambda x,w: F.linear(x, w), (4,4)),
    conv          = (lambda x,w: F.conv1d(x[None], w), (4,4,1)),
    bmm           = (lambda x,w: torch.bmm(x[None], w), (1,4,4)),
    cat           = (lambda x,w: torch.cat([x, w]), (4,4)),
    mul           = (lambda x,w: x*w, 4),
    pow           = (lambda x,w: x.abs()**w, 4),
    atan2         = (lambda x,w: torch.atan2(x, w), 4),
    normalized    = (lambda x,w: torch.mv(x, F.normalize(w, dim=0)), 4), # computed from the parameter alone
    transposed    = (lambda x,w: torch.lerp(x, w.t(), .3), (4,4)),
    shifted       = (lambda x,w: torch.dot(x[0], (w*2+1).exp()[0]), (4,4)),
    normal        = (lambda x,w: torch.distributions.Normal(w, 1.).log_prob(x), 4),
    stft          = (lambda x,w: torch.stft(x, 4, window=w, return_complex=True).abs(), 4),
    grid_sample   = (lambda x,w: F.grid_sample(x[None,None], w.tanh()), (1,2,2,2)),
    embedding_bag = (lambda x,w: F.embedding_bag(torch.zeros(1, 1, dtype=int), w, mode='sum'), (4,4)),
    to_numpy      = (lambda x,w: x+torch.from_numpy(w.detach().numpy()), 4),
    solve         = (lambda x,w: torch.linalg.solve(torch.eye(4)+w@w.T, x), (4,4)))

halves = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]

@pytest.mark.parametrize('dtype', halves)
@pytest.mark.parametrize('name', operations)
def test_operation(name, dtype):
    f,shape = operations[name]
    compare(partial(Uses, f, shape), [numbers()[0][:4,:4]], dtype)

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
    return [found for info in infos for training in (True,False) for found in check_module(info, training, dtype)]

def check_module(info, training, dtype):
    "As the model itself, and behind a layer in half precision"
    torch.manual_seed(0)
    samples = [*info.module_inputs_func(info, 'cpu', torch.float32, True, training)]
    for sample in samples[::1+2*(len(samples)//24)]: # one loss has hundreds; odd, as kinds of samples alternate
        made,called = sample.constructor_input,sample.forward_input
        if called is None: continue
        args = cast_tree(called.args, torch.float32, torch.float64)
        def _new():
            torch.manual_seed(0)
            return info.module_cls(*made.args, **made.kwargs).train(training)
        for new in (_new, lambda: Behind(_new())):
            try: compare(new, args, dtype, called.kwargs)
            except Exception as e: yield f'{info.name}, {sample.desc}: {type(e).__name__}: {e}'

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.bfloat16,torch.float16])
def test_modules(dtype):
    "In a process of its own, as PyTorch's test helpers change settings of PyTorch for good"
    with ProcessPoolExecutor(1, get_context('spawn')) as pool: assert pool.submit(check_modules, dtype).result()==[]

# --- A module's own code

class GroupNorm32(nn.GroupNorm):
    "As the diffusion models have it"
    def forward(self, x): return super().forward(x.float()).type(x.dtype)

class RootMeanSquare(nn.LayerNorm):
    "A norm in its name and in what it is made from, with code of its own that float16 can't hold"
    def forward(self, x): return x/x.pow(2).mean(-1, keepdim=True).sqrt()*self.weight

class AdaptiveNorm(nn.GroupNorm):
    "With layers inside it"
    def __init__(self, *args): super().__init__(*args); self.scale = nn.Linear(8,8)
    def forward(self, x): return super().forward(x)*(1+self.scale(x))

class Decorated(nn.Linear):
    @torch.autocast('cpu', enabled=False)
    def forward(self, x): return x.float()*self.weight[0]+F.linear(x.float(), self.weight, self.bias)

class Inside(nn.Linear):
    def forward(self, x):
        with torch.autocast('cpu', enabled=False): return self._sum(x.float())
    def _sum(self, x): return x*self.weight[0]+super().forward(x)

class Scaled(nn.Module):
    "Named like no norm"
    def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.rand(8)+.5)
    def forward(self, x): return F.layer_norm(x.float(), (8,), self.weight)

class Reversed(torch.autograd.Function):
    "As reversible layers: the backward pass computes again, outside autocast"
    @staticmethod
    def forward(ctx, x, f, *params):
        ctx.f,ctx.params = f,params
        ctx.save_for_backward(x)
        with torch.no_grad(): return f(x)
    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(): y = ctx.f(x)
        grads = torch.autograd.grad(y, [x,*ctx.params], grad.to(y.dtype))
        return grads[0],None,*grads[1:]

class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(8), nn.Linear(8,8), nn.GELU(), nn.Linear(8,8))
    def forward(self, x): return Reversed.apply(x, self.f, *self.f.parameters())

own_code = dict(group_norm=partial(GroupNorm32, 2, 8), root_mean_square=partial(RootMeanSquare, 8),
                adaptive_norm=partial(AdaptiveNorm, 2, 8), decorated=partial(Decorated, 8, 8),
                inside=partial(Inside, 8, 8), scaled=Scaled, reversible=Reversible, bilinear=None)

class Pairs(nn.Bilinear):
    def forward(self, x): return super().forward(x.float(), x.float())
own_code['bilinear'] = partial(Pairs, 8, 8, 8)

def around(new):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8,8), new(), nn.Linear(8,1))

@pytest.mark.parametrize('dtype', halves)
@pytest.mark.parametrize('name', own_code)
def test_own_code(name, dtype):
    x = numbers()[0]*(300 if name=='root_mean_square' else 1) # squares beyond float16
    compare(lambda: around(own_code[name]), [x], dtype)

@pytest.mark.parametrize('name', own_code)
@pytest.mark.parametrize('mode', ['bf16', pytest.param('fp16', marks=pytest.mark.slow)])
def test_own_code_trains(name, mode):
    "as in float32, and validates; `policy` says what is float32"
    learn,full = get_learner(around(own_code[name])),get_learner(around(own_code[name]))
    start = flat(weights(learn))
    modes[mode](learn)
    for o in (learn,full): o.fit(2)
    assert apart(learn, full, start)<(.1 if mode=='bf16' else .03) and skipped(learn)==0
    why = learn.mixed_precision.policy().set_index('module').why
    if name!='reversible': assert why['1']

def test_forward_runs_once():
    "What fails with copies is an operation, and only that is repeated; the warning comes once"
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight,self.calls = nn.Parameter(torch.rand(8)),0
            self.register_buffer('seen', torch.zeros(()))
        def forward(self, x):
            self.calls += 1
            self.seen += 1
            return torch.dot(x.float()[0], self.weight)+F.dropout(x)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8,8), Counts())
    half = half_precision(model, torch.bfloat16)
    with pytest.warns(UserWarning, match=r'1 \(Counts\) uses its parameters in dot.*keep=.1. computes') as warned:
        for i in range(3):
            with half: model(numbers()[0]).sum().backward()
    assert len(warned)==1 and model[1].calls==model[1].seen.item()==3
    assert half.policy().why.tolist()==['','float32 in dot']

@pytest.mark.parametrize('reentrant', [True,False])
def test_checkpointed_code(reentrant):
    "The backward pass computes again what the forward pass has computed"
    torch.manual_seed(1)
    class Block(nn.Module):
        def __init__(self): super().__init__(); self.layer,self.weight = nn.Linear(8,8),nn.Parameter(torch.rand(8))
        def forward(self, x): return torch.mv(self.layer(x).float(), self.weight*2)[:,None]*self.weight
    class Whole(nn.Module):
        def __init__(self): super().__init__(); self.first,self.block = nn.Linear(8,8),Block()
        def forward(self, x):
            x = self.first(x)
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)
    compare(Whole, [numbers()[0]], torch.bfloat16)

def test_result_is_written_nowhere():
    "An operation that would write into a float32 stand-in raises its own error"
    class Writes(nn.Module):
        def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.rand(8))
        def forward(self, x): return (self.weight*2).index_add_(0, torch.arange(8), x.float()[0])
    with pytest.raises(RuntimeError, match='same scalar type|dtype'), half_precision(Writes(), torch.bfloat16) as half:
        half.model(numbers()[0])
