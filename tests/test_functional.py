"""The functions of 04 and the three vocabularies, where a notebook would be too long

Every kind of leaf, gradients against float64, properties."""
import inspect,math,re
from collections import OrderedDict,namedtuple
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest,torch
from hypothesis import given,settings,strategies as st
from torch import nn
import torch.nn.functional as F

from mp_callbacks import emily,functional,jmp,mpx
from mp_callbacks.functional import (all_finite,apply_if_finite,cast_copy,grad,leaves,optimizer_update,scale_tree,
                                     select_tree,train_step,tree_map,unscale_tree,value_and_grad)
from mp_callbacks.grads import prepare_grads
from mp_callbacks.half import half_precision
from mp_callbacks.loss_scale import DynamicLossScale,StaticLossScale

f8,f16,bf16,f32,f64 = torch.float8_e4m3fn,torch.float16,torch.bfloat16,torch.float32,torch.float64
inf,nan = math.inf,math.nan
prop = settings(derandomize=True, database=None, deadline=None, max_examples=60)

@dataclass(frozen=True)
class Layer: w:torch.Tensor; act:str='relu'; n:int=3
Pair = namedtuple('Pair', 'a b')

def is_tensor(o): return isinstance(o, torch.Tensor)

def same(a, b):
    "Are two structures the same, bit for bit: classes, keys, dtypes, numbers?"
    if is_tensor(a):
        if not is_tensor(b) or (a.dtype,a.shape)!=(b.dtype,b.shape): return False
        return a.equal(b) and (a.is_complex() or torch.signbit(a).equal(torch.signbit(b))) # -0. too
    if isinstance(a, dict): return type(a)==type(b) and list(a)==list(b) and all(same(a[k],b[k]) for k in a)
    if isinstance(a, (list,tuple)): return type(a)==type(b) and len(a)==len(b) and all(map(same,a,b))
    if isinstance(a, Layer): return isinstance(b, Layer) and same(vars(a),vars(b))
    return a==b

# --- Leaves

floats = [f8,f16,bf16,f32,f64]
others = [torch.complex64,torch.int64,torch.uint8,torch.bool]
plain  = [None,3,2.5,True,'text',b'bytes',1j,torch.relu,object(),range(2),torch.float16]

def mpx_to(dtype): return [f8,dtype,dtype,dtype,f64]

casts = {
    'jmp.cast_to_half': (jmp.cast_to_half,[f16]*5), 'jmp.cast_to_full': (jmp.cast_to_full,[f32]*5),
    'jmp.Policy': (jmp.get_policy('p=f32,c=bf16').cast_to_compute,[bf16]*5),
    'mpx.cast_to_half_precision': (mpx.cast_to_half_precision,mpx_to(f16)),
    'mpx.cast_to_full_precision': (mpx.cast_to_full_precision,mpx_to(f32)),
    'mpx.cast_to_bfloat16': (mpx.cast_to_bfloat16,mpx_to(bf16)),
    'mpx.cast_to_float16': (mpx.cast_to_float16,mpx_to(f16)),
    'mpx.cast_to_float32': (mpx.cast_to_float32,mpx_to(f32)),
    'mpx.cast_tree': (partial(mpx.cast_tree, dtype='f64'),mpx_to(f64)),
    'emily.cast_params': (partial(emily.cast_params, type='bf16'),[bf16]*5),
    'emily.accumulate_grad': (partial(emily.accumulate_grad, type=f32),[f32]*5)}

@pytest.mark.parametrize('name', casts)
def test_cast_leaves(name):
    "What is cast and what isn't, in every structure, the input untouched"
    cast,want = casts[name]
    ts,rest = [torch.ones(2).to(o) for o in floats],[torch.ones(2).to(o) for o in others]
    tree = {'t':ts, 'r':(*rest,*plain), 'p':Pair(ts[3],'x'), 'd':Layer(ts[3]), 'o':OrderedDict(z=ts[3],a=1),
            'e':[(),{},[]]}
    res = cast(tree)
    assert [o.dtype for o in res['t']]==want and [o.dtype for o in tree['t']]==floats
    assert all(a is b for a,b in zip(res['r'],tree['r']))
    assert [type(o) for o in res.values()]==[type(o) for o in tree.values()]
    assert (res['p'].a.dtype,res['d'].w.dtype,res['o']['z'].dtype)==(want[3],)*3 and list(res['o'])==['z','a']
    assert all(torch.equal(a.float(),b.float()) for a,b in zip(res['t'],ts))
    for a,b,d in zip(res['t'],ts,want): assert (a is b)==(b.dtype==d) # the same dtype is the same tensor

@pytest.mark.parametrize('name', ['jmp.cast_to_half','mpx.cast_to_full_precision','emily.cast_params'])
def test_cast_modules(name):
    "A module becomes a copy, and gradients flow back through it"
    cast,want = casts[name]
    net = nn.Sequential(nn.Linear(2,3), nn.BatchNorm1d(3), nn.Linear(3,2,bias=False))
    net.tied = net[2]
    res = cast({'net':net})['net']
    assert {o.dtype for o in net.parameters()}=={f32} and {o.dtype for o in res.parameters()}=={want[3]}
    assert res[1].num_batches_tracked.dtype==torch.int64
    assert res.tied is res[2] and ((res is net)==(want[3]==f32))
    res[0](torch.ones(4,2,dtype=want[3])).sum().backward()
    assert net[0].bias.grad.equal(torch.full((3,),4.))

def test_all_finite():
    assert jmp.all_finite is mpx.all_finite is all_finite
    finite = [None, {}, [(),[]], torch.tensor([1,2**60]), torch.tensor([True]), 'nan', print, nn.Linear(1,1)]
    others = [inf, nan, -inf, complex(0,nan), torch.tensor([1.,nan]), torch.tensor(complex(inf,0)),
              torch.tensor([6e4]).half()*2, torch.tensor([nan]).to(f8), Layer(torch.tensor([-inf])),
              Pair(torch.ones(1),{'a':[torch.tensor(nan)]})]
    for trees,want in ((finite,True),(others,False)):
        for tree in trees:
            res = all_finite(tree)
            assert res.dtype==torch.bool and res.ndim==0 and res.item()==want, tree

@pytest.mark.parametrize('module', [jmp,functional])
def test_select_tree(module):
    assert mpx.select_tree is jmp.select_tree
    a,b = [{'x':torch.tensor([float(n),nan]),'n':n,'l':Layer(torch.tensor(float(n)),n=n),'f':torch.relu,'o':None}
           for n in (1,2)]
    for yes,no in ((True,False),(torch.tensor(True),torch.tensor(False))):
        for p,want in ((yes,1),(no,2)):
            res = module.select_tree(p, a, b)
            assert (res['x'][0],res['n'],res['l'].w,res['l'].n)==(want,)*4 and (res['f'],res['o'])==(torch.relu,None)
    for p in (None,1,0.,'x',torch.tensor([True]),torch.tensor(1.)):
        with pytest.raises(TypeError): module.select_tree(p, a, a)
    with pytest.raises(ValueError): module.select_tree(torch.tensor(True), {'x':1}, {'y':1})
    with pytest.raises(TypeError): module.select_tree(torch.tensor(True), torch.ones(1), torch.ones(1,dtype=f16))

signatures = {
    jmp: dict(
        get_policy=['policy_name'], cast_to_full=['tree'], cast_to_half=['tree'], half_dtype=[],
        all_finite=['tree'], select_tree=['pred','a','b'], NoOpLossScale=[], StaticLossScale=['loss_scale'],
        DynamicLossScale=['loss_scale',('counter',0),('period',2000),('factor',2),('min_loss_scale',1.),'kwargs']),
    mpx: dict(
        set_half_precision_datatype=['datatype'], half_precision_datatype=[], cast_tree=['tree','dtype'],
        **{f'cast_to_{o}':['x'] for o in ('half_precision','full_precision','float16','bfloat16','float32')},
        cast_function=['func','dtype',('return_dtype',None)], all_finite=['tree'], select_tree=['pred','a','b'],
        scaled=['func','scale',('has_aux',False)],
        DynamicLossScaling=['loss_scaling','min_loss_scaling',('factor',2),('period',2000),('counter',None),
                            ('max_loss_scaling',None)],
        **{o:['func','scaling',('has_aux',False),('use_mixed_precision',True)]
           for o in ('filter_grad','filter_value_and_grad','calculate_scaled_grad')},
        optimizer_update=['model','optimizer','optimizer_state','grads','grads_finite',('scheduler',None)]),
    emily: dict(
        cast_params=['params','type'], accumulate_grad=['grads','type'], has_overflow=['structure'],
        loss_scale=['opts'], scale_loss=['loss','scaler'], unscale=['grads','scaler'], update=['scaler','overflow'],
        LossScaler=[('scale',65536.),('growth_factor',2.),('backoff_factor',.5),('growth_interval',2000),
                    ('min_scale',1.),('counter',0)])}

@pytest.mark.parametrize('module', signatures)
def test_signatures(module):
    "Names, arguments, order and defaults of the originals"
    def arguments(name):
        ps = inspect.signature(getattr(module, name)).parameters.values()
        return [o.name if o.default is o.empty else (o.name,o.default) for o in ps]
    assert {k:arguments(k) for k in signatures[module]}==signatures[module]

@pytest.mark.parametrize('module', [functional,*signatures])
def test_without_fastai(module):
    "They import PyTorch, fastcore, the standard library, and those of us who do no more"
    names = re.findall(r'^(?:from|import) (\S+)(?: import (.+))?', inspect.getsource(module), re.M)
    ours = {o for a,b in names if a[0]=='.' for o in ([a[1:]] if a!='.' else [p.split()[0] for p in b.split(',')])}
    assert ours<={'dtypes','loss_scale','grads','half','functional','jmp'}
    assert not any(a.startswith('fastai') for a,_ in names)

# --- Gradients

def mlp(p, x):
    for i in range(3): x = torch.tanh(x@p[f'w{i}']+p[f'b{i}'])
    return x@p['w3']

def mse(p, x, y): return (mlp(p, x).to(y.dtype)-y).square().mean()

@pytest.fixture
def problem():
    "Parameters, batch, and the gradients computed in float64"
    sizes = [16,64,64,64]
    p = {}
    for i,(a,b) in enumerate(zip(sizes,sizes[1:])): p |= {f'w{i}':torch.randn(a,b)/a**.5, f'b{i}':torch.zeros(b)}
    p['w3'] = torch.randn(64,4)/8
    x,y = torch.randn(128,16),torch.randn(128,4)
    truth = torch.func.grad(mse)(*tree_map(torch.Tensor.double, (p,x,y)))
    return p,x,y.double(),truth

def error(grads, truth): return max(((grads[k].double()-o).norm()/o.norm()).item() for k,o in truth.items())

ways = {
    'through':                   lambda f,dt,s,*a: grad(f, dt, s)(*a),
    'copies':                    lambda f,dt,s,*a: grad(f, None, s)(*mpx.cast_tree(a, dt)),
    'train_step':                lambda f,dt,s,*a: via_train_step(f, dt, StaticLossScale(s), *a),
    'mpx.filter_grad':           lambda f,dt,s,*a: via_mpx(mpx.filter_grad, f, dt, s, *a)[2],
    'mpx.filter_value_and_grad': lambda f,dt,s,*a: via_mpx(mpx.filter_value_and_grad, f, dt, s, *a)[3],
    'jmp':                       lambda f,dt,s,*a: via_jmp(f, jmp.Policy(f32,dt,f32), jmp.DynamicLossScale(s), *a),
    'emily':                     lambda f,dt,s,*a: via_emily(f, dt, emily.loss_scale(scale=s), *a)}

class Descend:
    def update(self, grads, state, params): return tree_map(lambda g: -g, grads),state

def via_train_step(f, dt, s, p, *args):
    return tree_map(lambda o,n: o-n, p, train_step(f, Descend(), dt)(p, (), s, *args).model)

def via_mpx(make, f, dt, s, *args):
    with mpx.use_half_precision_datatype(dt): return make(f, mpx.DynamicLossScaling(s, 1.))(*args)

def via_jmp(f, policy, s, p, x, y):
    return s.unscale(torch.func.grad(lambda p: s.scale(f(*policy.cast_to_compute((p,x)), y)))(p))

def via_emily(f, dt, s, p, x, y):
    def scaled(p): return emily.scale_loss(f(emily.cast_params(p,dt), x.to(dt), y), s)
    grads,overflow = emily.unscale(torch.func.grad(scaled)(p), s)
    assert not overflow
    return emily.accumulate_grad(grads, f32)

@pytest.mark.parametrize('way', ways)
def test_gradients(problem, way):
    "As good as the dtype allows, in float32, by whichever function"
    p,x,y,truth = problem
    for dtype,eps in ((f16, .01 if way=='train_step' else 4e-3), (bf16,3e-2)): # to subtract what was added rounds too
        grads = ways[way](mse, dtype, 2.**10, p, x, y)
        assert {o.dtype for o in grads.values()}=={f32} and error(grads, truth)<eps

@pytest.mark.parametrize('way', [o for o in ways if o!='train_step'])
def test_scale_saves_small_gradients(problem, way):
    "A loss whose gradients are too small for float16: lost without a scale, as good as any with one"
    p,x,y,_ = problem
    def small(p, x, y): return mse(p, x, y)*1e-6
    truth = torch.func.grad(small)(*tree_map(torch.Tensor.double, (p,x,y)))
    assert error(ways[way](small, f16, 1., p, x, y), truth)>.2
    assert error(ways[way](small, f16, 2.**15, p, x, y), truth)<1e-2

@pytest.mark.parametrize('dtype', [f16,bf16])
def test_two_ways_one_gradient(problem, dtype):
    p,x,y,_ = problem
    assert same(grad(mse, dtype, 2.**10)(p, x, y), grad(mse, None, 2.**10)(*mpx.cast_tree((p,x,y), dtype)))

@pytest.mark.parametrize('dtype,eps', [(f16,1e-2),(bf16,6e-2)])
def test_module_as_in_a_loop(dtype, eps):
    "Gradients, value and buffers as with the context manager, with all norms, tied and frozen weights"
    net = nn.Sequential(nn.Linear(16,32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,32,bias=False), nn.LayerNorm(32),
                        nn.Linear(32,32,bias=False), nn.Unflatten(1,(8,4)), nn.GroupNorm(2,8), nn.Flatten(),
                        nn.Linear(32,3))
    net[5].weight = net[3].weight
    net[0].bias.requires_grad_(False)
    x,y,twin = torch.randn(64,16),torch.randint(3,(64,)),deepcopy(net)
    res = value_and_grad(lambda m,x,y: F.cross_entropy(m(x), y), dtype, 64.)(net, x, y)
    with half_precision(twin, dtype): loss = F.cross_entropy(twin(x), y); (loss*64).backward()
    prepare_grads(twin.parameters(), 64.)
    assert list(res.grads)==[n for n,_ in twin.named_parameters()] and abs(res.value-loss)<1e-3
    for n,p in twin.named_parameters():
        if p.grad is None: assert res.grads[n] is None
        else: assert (res.grads[n]-p.grad).norm()<=eps*p.grad.norm()+1e-4
    for (n,a),b in zip(net.named_buffers(), twin.buffers()):
        assert a.dtype==b.dtype and torch.allclose(a.float(), b.float(), atol=1e-3), n

@pytest.mark.parametrize('period,factor', [(1,2),(2,4),(5,2)])
def test_growth_steps_are_exact(period, factor):
    "No step has other gradients or another value because the scale changes after it"
    w,x = torch.tensor([0.,1.]),torch.tensor([6.,5.])
    def f(w, x): return (w*x).sum().float()
    s,j = [o(4., period=period, factor=factor) for o in (DynamicLossScale,jmp.DynamicLossScale)]
    m = mpx.DynamicLossScaling(4., 1., factor, period)
    e = emily.loss_scale(scale=4., growth_interval=period, growth_factor=float(factor), backoff_factor=1/factor)
    skipped = 0
    for _ in range(25):
        res = value_and_grad(f, f16, s)(w, x)
        mv,mn,mf,mg = mpx.filter_value_and_grad(f, m)(w, x)
        jg = j.unscale(torch.func.grad(lambda w: j.scale(f(w.half(), x.half())))(w))
        scaled = torch.func.grad(lambda w: emily.scale_loss(f(w.half(), x.half()), e))(w)
        eg,eo = emily.unscale(scaled, e)
        assert res.value==mv==5 and res.finite==mf==all_finite(jg)==(not eo)
        if res.finite:
            for g in (res.grads,mg,jg,eg): assert g.tolist()==[6.,5.] and g.dtype==f32
        skipped += not res.finite
        s,m,j,e = s.adjust(res.finite),mn,j.adjust(all_finite(jg)),emily.update(e, eo)
        if s.loss_scale<=65504: assert s.loss_scale==m.loss_scaling
        assert s.loss_scale==j.loss_scale==e.scale
        if s.loss_scale>65504: m = mpx.DynamicLossScaling(s.loss_scale, 1., factor, period, s.counter)
    assert skipped or period==5

def test_gradient_structure():
    "Like the parameters, with None where nothing can be differentiated"
    def f(p): return sum(o.sum().float() for o in leaves(p) if is_tensor(o))*2
    for tree in (Layer(torch.ones(2)), Pair(torch.ones(2),'x'), [torch.ones(2),{'a':(torch.ones(1),None)}],
                 OrderedDict(z=torch.ones(1),a=7), torch.ones(3)):
        want = tree_map(lambda o: torch.full_like(o,2.) if is_tensor(o) else None, tree)
        assert same(grad(f, f16, 8.)(tree), want)

def test_vmap_and_compile(problem):
    p,x,y,_ = problem
    each  = torch.vmap(value_and_grad(mse, bf16, 4.), in_dims=(None,0,0))(p, x[:8], y[:8])
    whole = value_and_grad(mse, bf16, 4.)(p, x[:8], y[:8])
    for k in p: assert (each.grads[k].mean(0)-whole.grads[k]).norm()<.05*whole.grads[k].norm()
    f = lambda p,s,x,y: value_and_grad(mse, bf16, s)(p, x, y)
    for s in (4.,8.):
        res = torch.compile(f, backend='eager', fullgraph=True)(p, torch.tensor(s), x[:8], y[:8])
        assert same(res.grads, whole.grads) and res.value==whole.value
    torch._dynamo.reset()

def test_compile_around_a_module():
    "Not compiled, but right"
    net,x,y = nn.Sequential(nn.Linear(4,8), nn.LayerNorm(8), nn.Linear(8,1)),torch.randn(8,4),torch.randn(8,1)
    f = value_and_grad(lambda m,x,y: F.mse_loss(m(x), y), bf16, 4.)
    assert same(torch.compile(f, backend='eager')(net, x, y).grads, f(net, x, y).grads)
    torch._dynamo.reset()

def test_bad_losses():
    for f in (lambda p: p['w'], lambda p: 3., lambda p: p['w'].sum().long(), lambda p: None):
        for vg in (value_and_grad(f), mpx.filter_grad(f, mpx.DynamicLossScaling(8.,1.))):
            with pytest.raises(ValueError, match='The loss is a'): vg({'w':torch.ones(2)})

# --- Properties

def power(lo, hi): return st.integers(lo, hi).map(lambda k: 2.**k)

@st.composite
def tensors(draw, most):
    "A tensor of any floating dtype, none of whose numbers exceeds its dtype's largest divided by `most`"
    dtype = draw(st.sampled_from([f16,bf16,f32,f64]))
    hi = min(torch.finfo(dtype).max, 3e38)/most
    xs = draw(st.lists(st.floats(-hi, hi, width=64, allow_nan=False), max_size=4))
    t = torch.tensor(xs, dtype=f64).to(dtype)
    return torch.where(t.abs()>hi, torch.zeros((),dtype=dtype), t) # rounded up, out of bounds

def trees(most):
    leaf = tensors(most) | st.sampled_from([None,3,True,'s',torch.arange(3),torch.tensor([True]),torch.tensor([1+2j])])
    def nested(o):
        return (st.lists(o, max_size=3) | st.tuples(o,o) | st.dictionaries(st.text('abc',max_size=2), o, max_size=3)
                | st.builds(Pair,o,o) | tensors(most).map(Layer))
    return st.recursive(leaf, nested, max_leaves=8)

scales = st.shared(power(0,12), key='scale')

@prop
@given(scales, scales.flatmap(trees))
def test_scale_unscale(s, tree):
    "With a power of two, and without overflow, unscaling what was scaled gives the same bits"
    for o in (StaticLossScale(s), DynamicLossScale(s), jmp.StaticLossScale(s), jmp.DynamicLossScale(s),
              jmp.NoOpLossScale()):
        assert same(o.unscale(o.scale(tree)), tree)
    wide = tree_map(lambda t: t.float() if is_tensor(t) and t.dtype in (f16,bf16) else t, tree) # these promote
    o = mpx.DynamicLossScaling(s,1.)
    assert same(o.unscale(o.scale(tree)), wide)
    assert same(unscale_tree(scale_tree(tree, s), s), wide)
    e = emily.loss_scale(scale=s)
    scaled = tree_map(lambda t: emily.scale_loss(t, e) if is_tensor(t) and t.is_floating_point() else t, tree)
    assert same(emily.unscale(scaled, e)[0], tree)

@prop
@given(trees(1.), st.booleans())
def test_select_properties(tree, finite):
    "Chosen whole, and from itself the same"
    other = tree_map(lambda o: o+1 if is_tensor(o) and o.is_floating_point() else o, tree)
    for f in (finite, torch.tensor(finite)):
        assert same(select_tree(f, other, tree), other if finite else tree)
        assert same(apply_if_finite(f, lambda t: other, tree), other if finite else tree)
    assert all_finite(tree).item() and not emily.has_overflow(tree)
    assert same(cast_copy(cast_copy(tree, f64), f64), cast_copy(tree, f64))

@prop
@given(st.lists(st.booleans(), max_size=60), st.integers(1,5), power(0,15), power(0,6))
def test_trajectories(finite, period, start, lo):
    "All of them follow one rule, and never leave their bounds"
    start = max(start, lo)
    s,c = start,0
    j,m = jmp.DynamicLossScale(start, 0, period, 2, lo),mpx.DynamicLossScaling(start, lo, 2, period)
    e = emily.loss_scale(scale=start, growth_interval=period, min_scale=lo)
    sm = start
    for ok in finite:
        grow = ok and c+1==period
        s,sm = [o*2 if grow else o if ok else max(o/2,lo) for o in (s,sm)]
        sm,c = min(sm,65504.),0 if grow or not ok else c+1
        j,m,e = j.adjust(ok),m.adjust(torch.tensor(ok)),emily.update(e, not ok)
        assert (j.loss_scale,j.counter,e.scale,e.counter,m.loss_scaling,m.counter)==(s,c,s,c,sm,c)

class Momentum:
    "A functional optimizer with a moment, a count and a schedule that goes by it"
    def init(self, params): return {'m':tree_map(torch.zeros_like, params), 'count':0, 'steps':torch.tensor(0)}
    def update(self, grads, state, params):
        m = tree_map(lambda m,g: .9*m+g, state['m'], grads)
        new = {'m':m, 'count':state['count']+1, 'steps':state['steps']+1}
        return tree_map(lambda m: -.1*.5**state['count']*m, m),new

def bits(o): return deepcopy(tree_map(lambda t: t.detach().clone() if is_tensor(t) else t, o))

@settings(prop, max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from(['tree','module','half tree']),
       st.sampled_from([inf,nan,-inf]), st.booleans())
def test_skipped_functional_update(good, kind, what, host):
    "Parameters, moments, counts and schedule after a skipped update are what they were, in any mixture of steps"
    torch.manual_seed(0)
    dtype = f16 if kind=='half tree' else f32
    model = nn.Linear(2,2) if kind=='module' else {'w':torch.randn(3).to(dtype), 'l':[torch.randn(2).to(dtype)]}
    params = dict(model.named_parameters()) if kind=='module' else model
    opt = Momentum(); state = opt.init(tree_map(lambda o: o.detach().float(), params))
    def values(): return bits(dict(model.named_parameters()) if kind=='module' else model)
    for n,ok in enumerate(good):
        grads = tree_map(lambda o: torch.ones_like(o, dtype=f32), params)
        if not ok: next(o for o in leaves(grads)).view(-1)[0] = what
        before,finite = bits((values(),state)),all_finite(grads)
        model,state = optimizer_update(model, opt, state, grads, finite.item() if host else finite)
        assert same((values(),bits(state)), before)==(not ok)
        assert all_finite((values(),state))
    assert state['count']==state['steps']==sum(good)

@pytest.mark.parametrize('make', [partial(torch.optim.SGD, lr=.1, momentum=.9, weight_decay=.1),
                                  partial(torch.optim.AdamW, lr=.1, amsgrad=True)], ids=['SGD','AdamW'])
@pytest.mark.parametrize('update', [optimizer_update,mpx.optimizer_update])
@pytest.mark.parametrize('module', [True,False])
def test_skipped_update(make, update, module):
    "The same for the optimizers of torch: state, step count and scheduler"
    model = nn.Linear(3,2) if module else {'w':torch.randn(3).requires_grad_(),'b':[torch.randn(2).requires_grad_()]}
    opt = make(leaves(model))
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, .5)
    params = dict(model.named_parameters()) if module else model
    good = tree_map(lambda o: torch.ones_like(o).detach(), params)
    bad  = tree_map(lambda o: o*nan, good)
    def now(): return bits((params, opt.state_dict(), sched.state_dict()))
    for n in range(4):
        before = now()
        for f in (torch.tensor(False), False):
            assert update(model, opt, None, bad, f, sched)==(model,None)
            assert same(now(), before)
        update(model, opt, None, good, torch.tensor(True), sched)
        assert not same(now()[0], before[0]) and sched.last_epoch==n+1
        assert all(o.grad is None for o in leaves(model)) and all_finite(now())

def test_train_step_skips():
    "A batch that overflows changes nothing but the scale: model, buffers, optimizer and schedule"
    net = nn.Sequential(nn.Linear(4,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,1))
    opt = torch.optim.AdamW(net.parameters(), lr=.01)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, .9)
    step,scale = train_step(lambda m,x,y: F.mse_loss(m(x),y), opt, f16, sched),DynamicLossScale(2.**10, period=3)
    x,y = torch.randn(32,4),torch.randn(32,1)
    def now(): return bits((dict(net.state_dict()), opt.state_dict(), sched.state_dict()))
    seen = []
    for n in range(8):
        before = now()
        res = step(net, None, scale, x*(1e30 if n in (2,5) else 1), y)
        assert same(now(), before)==(n in (2,5))==(not res.finite)
        scale = res.scale
        seen.append(scale.loss_scale)
    assert seen==[1024,1024,512,512,512,256,256,256] and net[1].num_batches_tracked==6 and sched.last_epoch==6

# --- On an accelerator

@pytest.mark.cuda
@pytest.mark.results
@pytest.mark.parametrize('dtype,eps', [(f16,4e-3),(bf16,3e-2)])
def test_on_cuda(problem, dtype, eps):
    p,x,y,truth = tree_map(lambda o: o.cuda(), problem)
    for way in ways:
        grads = ways[way](mse, dtype, 2.**10, p, x, y)
        assert {o.device.type for o in grads.values()}=={'cuda'} and error(grads, truth)<max(eps,.01)
    net = nn.Sequential(nn.Linear(16,32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,32), nn.LayerNorm(32),
                        nn.GroupNorm(2,32), nn.Linear(32,4)).cuda()
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    def loss(m, x, y): return F.mse_loss(m(x), y.float())
    step,scale,values = train_step(loss, opt, dtype),DynamicLossScale(2.**10),[]
    for n in range(20):
        before = bits((dict(net.state_dict()), opt.state_dict()))
        res = step(net, None, scale, x*(1e39 if n==4 else 1), y)
        if n==4: assert not res.finite and same(bits((dict(net.state_dict()), opt.state_dict())), before)
        scale = res.scale
        values.append(res.value.item())
    assert values[-1]<values[0] and net[1].running_mean.dtype==f32
    vg = torch.vmap(value_and_grad(loss, dtype, keep=nn.BatchNorm1d), in_dims=(None,0,0))
    each = vg(net.eval(), x[:8,None], y[:8,None])
    assert each.grads['0.weight'].shape==(8,32,16) and each.finite.all()

# --- What a step costs

def test_one_half_precision_per_model(monkeypatch):
    "Made in the first call for a model, by whatever function; two models in turns don't drive each other out"
    made = []
    def counted(model, *args, **kwargs): made.append(model); return half_precision(model, *args, **kwargs)
    monkeypatch.setattr(functional, 'half_precision', counted)
    def loss(m, x): return m(x).mean()
    x,nets = torch.ones(4,2),[nn.Linear(2,1) for _ in range(2)]
    step = train_step(loss, torch.optim.SGD([p for o in nets for p in o.parameters()], .1), bf16)
    for _ in range(3):
        for net in nets:
            step(net, None, StaticLossScale(), x)
            value_and_grad(loss, bf16)(net, x)
    with mpx.use_half_precision_datatype(bf16): mpx.filter_grad(loss, mpx.DynamicLossScaling(8., 1.))(nets[0], x)
    assert made==nets
    value_and_grad(loss, f16)(nets[0], x)
    assert made==[*nets, nets[0]] # another dtype

def test_one_wait_for_the_largest_gradient(monkeypatch):
    "With a `headroom`, the largest gradient of all tensors is read once"
    waits,own = [],torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, 'item', lambda self, own=torch.Tensor.item: waits.append(self.shape) or own(self))
    monkeypatch.setattr(torch.Tensor, 'tolist', lambda self: waits.append(self.shape) or own(self))
    params = {i:torch.ones(3) for i in range(20)}
    class Sgd:
        def update(self, grads, state, params): return grads,state
    step = train_step(lambda p,x: sum(o.sum() for o in p.values())*x, Sgd(), f16)
    res = step(params, (), DynamicLossScale(2.**10, headroom=6.), torch.tensor(1.))
    assert res.scale.found and len(waits)<=2 # whether the step was finite, and this
