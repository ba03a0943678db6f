"""Where autocast runs, half precision runs: PyTorch's database of modules, and the code of other people's modules

Each case runs in float32, under autocast and in half precision, with float32 results and gradients whose error is at
most three times autocast's. The database is a slow test, and makes the file take long."""
from concurrent.futures import ProcessPoolExecutor

from learners import *
from mp_callbacks.core.devices import support
from mp_callbacks.core.dtypes import cast_tree,leaves

ways = dict(float32=None, autocast=False, half=True)

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

def behind(module):
    "Hands half-precision numbers to a module, as the layer before it would"
    def _forward(m, *args, **kwargs):
        return m.module(*cast_tree(args, m.layer(torch.ones(1,1)).dtype, torch.float32), **kwargs)
    return Does(_forward, module=module, layer=nn.Linear(1,1))

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
        for new in (_new, lambda: behind(_new())):
            try: compare(new, args, dtype, called.kwargs)
            except Exception as e: yield f'{info.name}, {sample.desc}: {type(e).__name__}: {e}'

@pytest.fixture(scope='module')
def pool():
    "A process of its own, as PyTorch's test helpers change settings of PyTorch for good"
    with ProcessPoolExecutor(1, get_context('spawn')) as res: yield res

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.bfloat16,torch.float16])
def test_modules(dtype, pool): assert pool.submit(check_modules, dtype).result()==[]

def uses(f): return Does(lambda m,x: x+f(x.float(), m.w).mean(), w=torch.rand(8,8)+.5)

class GroupNorm32(nn.GroupNorm):
    "As the diffusion models have it"
    def forward(self, x): return super().forward(x.float()).type(x.dtype)

class Decorated(nn.Linear):
    @torch.autocast('cpu', enabled=False)
    def forward(self, x): return x.float()*self.weight[0]+F.linear(x.float(), self.weight, self.bias)

def fills():
    "Adds a position of its own, and lets a module inside write into the sum"
    def _adds(m, x):
        y = x+m.pos
        m.inner(y)
        return y
    inner = Does(lambda m,y: y.mul_(2).add_(m.layer(y.detach())), layer=nn.Linear(8,8))
    return Does(_adds, pos=torch.ones(8), inner=inner)

def attributes():
    "As fastai's `SequentialEx` and `MergeLayer`"
    def _remembers(m, x):
        y = x*m.gain
        y.orig = x
        return m.merge(y)
    return Does(_remembers, gain=torch.ones(8), merge=Does(lambda m,x: x+x.orig))

def mask():
    "Some rows may look at nothing, as with left padding"
    def _forward(m, x):
        mask = torch.full((len(x),len(x)), -1e9).triu(1)
        mask[0] = -1e9
        return m.attend(x+m.pos, mask)
    attend = Does(lambda m,x,mask: (m.q(x)@m.k(x).T+mask).softmax(-1)@x, q=nn.Linear(8,8), k=nn.Linear(8,8))
    return Does(_forward, pos=torch.ones(8), attend=attend)

own_code = dict(
    group_norm = lambda: GroupNorm32(2, 8),
    decorated  = lambda: Decorated(8, 8),
    fills      = fills,
    attributes = attributes,
    mask       = mask,
    # operations that half precision doesn't have, or not beside float32
    lerp       = lambda: uses(lambda x,w: torch.lerp(x, w, .3)),
    written    = lambda: uses(lambda x,w: (w*2).index_add_(0, torch.arange(8), x)),
    to_numpy   = lambda: uses(lambda x,w: x+torch.from_numpy(w.detach().numpy())))

@pytest.mark.parametrize('dtype', [torch.bfloat16,torch.float16])
@pytest.mark.parametrize('name', own_code)
def test_own_code(name, dtype):
    "Between two layers"
    def _new(): return nn.Sequential(nn.Linear(8,8), own_code[name](), nn.Linear(8,1))
    compare(_new, [numbers(8)[0]], dtype)
    way = half_precision(_new(), dtype).policy().set_index('module').way['1']
    assert way==('float32 norm' if name=='group_norm' else 'own parameters')
