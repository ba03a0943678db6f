"""What holds for any tree, loss scale and gradients: hypothesis looks for some that it doesn't hold for

The same examples each time. What is expected is computed another way: in float64, or by walking both structures."""
from dataclasses import asdict,fields,is_dataclass,replace

from learners import *
pytest.importorskip('hypothesis')
from hypothesis import HealthCheck,assume,given,settings,strategies as st
from mp_callbacks.core.dtypes import cast_tree

def examples(n):
    return settings(max_examples=n, derandomize=True, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))

floating = (torch.float16,torch.bfloat16,torch.float32,torch.float64)
other    = (torch.int64,torch.uint8,torch.bool,torch.complex64)

class Items(list): "Somebody's own list"

def tensor(dtype, shape, kind): return torch.ones(shape).to(dtype).as_subclass(kind)

tensors = st.builds(tensor, st.sampled_from(floating+other), st.lists(st.integers(0,3), max_size=3),
                    st.sampled_from([torch.Tensor,TensorBase]))
leaves  = (tensors | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
           | st.sampled_from([torch.float16,object(),range(3),{1,2}]))

def nested(c):
    some = st.lists(c, max_size=3)
    return st.one_of(some, some.map(tuple), some.map(L), some.map(Items),
                     st.dictionaries(st.text(max_size=2), c, max_size=3),
                     st.dictionaries(st.integers(), c, max_size=3).map(OrderedDict),
                     st.builds(Named, c, c), st.builds(Data, c, c), st.builds(Frozen, c))

trees = st.recursive(leaves, nested, max_leaves=12)

def walk(tree, path=()):
    "The class of each node and each leaf itself, by path"
    if   isinstance(tree, torch.Tensor): yield path,tree; return
    elif isinstance(tree, dict): inside = tree.items()
    elif isinstance(tree, (list,tuple,L)): inside = enumerate(tree)
    elif is_dataclass(tree): inside = ((o.name,getattr(tree, o.name)) for o in fields(tree))
    else: yield path,tree; return
    yield path,type(tree)
    for k,o in inside: yield from walk(o, (*path,k))

@given(trees, st.sampled_from(floating),
       st.none() | st.sampled_from(floating) | st.lists(st.sampled_from(floating+other), max_size=3))
@examples(100)
def test_cast_tree(tree, dtype, source):
    """Floating tensors (of a `source` dtype) get the dtype, with their values and classes

    The rest are the same objects, and the tree stays as it was. A second cast changes nothing."""
    sources = floating if source is None else source if isinstance(source, list) else [source]
    before = list(walk(tree))
    res,changed = cast_tree(tree, dtype, source),False
    assert all(p==q and a is b for (p,a),(q,b) in zip(walk(tree), before, strict=True))
    for (p,a),(q,b) in zip(walk(res), before, strict=True):
        assert p==q
        if isinstance(b, torch.Tensor) and b.dtype.is_floating_point and b.dtype in sources and b.dtype!=dtype:
            assert a.dtype==dtype and type(a) is type(b) and torch.equal(a, b.to(dtype))
            changed = True
        else: assert a is b
    assert (res is tree) is not changed
    assert cast_tree(res, dtype, source) is res

@st.composite
def scales(draw, **kwargs):
    lo,s,hi = sorted(draw(st.lists(st.floats(2**-20, 2**30), min_size=3, max_size=3)))
    options = dict(period=st.integers(1,5), factor=st.floats(1.01, 16), backoff=st.none() | st.floats(.01, .99),
                   consecutive=st.booleans(), growth_delay=st.integers(0,2), hysteresis=st.integers(1,3),
                   refill=st.sampled_from(['growth','finite','backoff','finite+backoff']),
                   at_min=st.sampled_from(['clip','raise']), at_max=st.sampled_from(['clip','keep']))
    return DynamicLossScale(s, min_loss_scale=lo, max_loss_scale=hi, **draw(st.fixed_dictionaries(options | kwargs)))

flags = st.sampled_from([True,True,True,False])

@given(scales(), st.lists(flags, max_size=40))
@examples(100)
def test_scale(s, flags):
    """Within its bounds; up only on a finite step, by `factor` or to the maximum, down only on an overflow

    `adjust` changes nothing and returns the same again, and what it changes is in `state_dict`."""
    for ok in flags:
        try: new = s.adjust(ok)
        except FloatingPointError: assert s.at_min=='raise' and not ok; return
        before,a,b = asdict(s),s.loss_scale,new.loss_scale
        assert s.adjust(ok)==new and asdict(s)==before
        assert new.min_loss_scale<=b<=new.max_loss_scale and type(b) is float
        if b>a: assert ok and b in (a*s.factor, s.max_loss_scale)
        if b<a: assert not ok and b in (a/s.factor if s.backoff is None else a*s.backoff, s.min_loss_scale)
        assert type(new)(**asdict(new))==new and s.load_state_dict(new.state_dict())==new
        assert all(type(o) in (int,float,bool) for o in new.state_dict().values())
        s = new

def ordinary(s): return replace(s, headroom=None, found=False)

@given(scales(headroom=st.integers(0, 6) | st.floats(0, 6), found=st.booleans(), at_min=st.just('clip')),
       st.lists(st.tuples(flags, st.just(0.) | st.floats(1e-12, 1e6)), max_size=40))
@examples(300)
def test_measuring_scale(s, steps):
    "Within its bounds. It falls by 2**16 only until it is found; from then on it is an ordinary scale."
    for ok,amax in steps:
        new = s.adjust(ok, amax if s.wants_amax else None)
        assert s.min_loss_scale<=new.loss_scale<=s.max_loss_scale
        if not s.wants_amax: assert new.found and ordinary(new)==ordinary(s).adjust(ok)
        elif ok: assert new.found==(amax*s.loss_scale>=torch.finfo(torch.float16).tiny)
        else: assert new.wants_amax and new.loss_scale==max(s.loss_scale/2**16, s.min_loss_scale)
        assert s.load_state_dict(new.state_dict())==new==eval(repr(new))
        s = new

grad_dtypes = (*floating,torch.complex64,torch.complex128)
layouts = ('plain','transposed','strided','channels_last','sparse','none')

@st.composite
def with_grads(draw):
    "Parameters with gradients in any layout, and for each the same numbers in double precision, or None"
    ps,want = [],[]
    g = torch.Generator().manual_seed(draw(st.integers(0,999)))
    for _ in range(draw(st.integers(0,5))):
        dtype,layout = draw(st.sampled_from(grad_dtypes)),draw(st.sampled_from(layouts))
        shape = draw(st.lists(st.integers(0,4), max_size=4))
        if layout=='channels_last': shape = (shape+[2]*4)[:4]
        if layout in ('transposed','strided') and len(shape)<2: shape = [3,2]
        if layout=='sparse': shape = [3,2]
        double = torch.complex128 if dtype.is_complex else torch.float64
        x = (torch.randn(shape, generator=g, dtype=double)*2.**draw(st.integers(-6,6))).to(dtype)
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if   layout=='transposed': x = x.mT.contiguous().mT
        elif layout=='strided': x = torch.stack([x,x], -1)[...,0]
        elif layout=='channels_last': x = x.contiguous(memory_format=torch.channels_last)
        elif layout=='sparse':
            rows = torch.tensor([draw(st.lists(st.integers(0,2), min_size=3, max_size=3))])
            x = torch.sparse_coo_tensor(rows, x, (4,2), check_invariants=True)
            p = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
        p.grad = None if layout=='none' else x
        ps.append(p)
        want.append(None if layout=='none' else dense(x).clone())
    return ps,want

def dense(g): return (g.to_dense() if g.is_sparse else g).to(torch.complex128 if g.is_complex() else torch.float64)
def eps(p): return torch.finfo(p.dtype).eps
def tiny(p): return torch.finfo(p.dtype).smallest_normal*eps(p)

any_scale = st.integers(0,16).map(lambda k: 2.**k) | st.floats(1., 2.**16)
any_clip  = st.none() | st.floats(2**-8, 2**8)

@given(with_grads(), any_scale, any_clip, st.booleans())
@examples(100)
def test_prepare_grads(made, scale, clip, twice):
    "Norms as in float64; gradients unscaled and clipped in their own dtype and place, each once"
    ps,want = made
    where = [p.grad.data_ptr() for p in ps if p.grad is not None and not p.grad.is_sparse]
    stats = prepare_grads(ps*2 if twice else iter(ps), scale, clip, step=3, amax=True)
    want = [None if o is None else o/scale for o in want]
    norms = torch.tensor([o.norm() for o in want if o is not None], dtype=torch.float64)
    assert stats[:2]==(3,scale) and stats.finite and stats.culprit is None
    assert stats.norm==pytest.approx(norms.norm().item(), rel=1e-5)
    largest = max([o.abs().max().item() for o in want if o is not None and o.numel()], default=0.)
    assert stats.amax==pytest.approx(largest, rel=1e-5)
    mult = 1. if clip is None else min(1., clip/(norms.norm().item()+1e-6))
    for p,o in zip(ps, want, strict=True):
        if o is None: assert p.grad is None; continue
        assert p.grad.dtype==p.dtype and p.grad.shape==p.shape
        assert ((dense(p.grad)-o*mult).abs()<=4*max(eps(p), 2**-20)*(o*mult).abs()+2*tiny(p)).all()
    assert where==[p.grad.data_ptr() for p in ps if p.grad is not None and not p.grad.is_sparse]
    if clip: assert sum(dense(p.grad).norm()**2 for p in ps if p.grad is not None)**.5<=clip*1.01+1e-3

@given(with_grads(), any_scale, any_clip, st.sampled_from([float('inf'),-float('inf'),float('nan')]),
       st.lists(st.integers(0,10**6), min_size=1, max_size=3))
@examples(100)
def test_prepare_grads_not_finite(made, scale, clip, bad, where):
    "One number anywhere is enough; no gradient is changed, and of several parameters the last is to blame"
    ps,_ = made
    values = [(p,p.grad._values() if p.grad.is_sparse else p.grad) for p in ps if p.grad is not None]
    values = [(p,v,i) for p,v in values for i in range(v.numel())]
    assume(values)
    chosen = {o%len(values) for o in where}
    for _,v,i in [values[o] for o in chosen]: v[tuple(torch.unravel_index(torch.tensor(i), v.shape))] = bad
    before = [None if p.grad is None else dense(p.grad.coalesce() if p.grad.is_sparse else p.grad).clone() for p in ps]
    stats = prepare_grads(ps, scale, clip)
    assert not stats.finite and stats.norm!=1/stats.norm
    assert stats.culprit is values[max(chosen)][0]
    def numbers(t): return t.nan_to_num(7., 8., 9.) # nan is not equal to itself
    for p,o in zip(ps, before):
        assert p.grad is None if o is None else torch.equal(numbers(dense(p.grad)), numbers(o))
