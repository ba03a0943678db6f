"""The functions without objects, and the names of JMP, MPX and Emily: their gradients are right, and skipped steps
leave no trace

What becomes of each kind of leaf is in the notebooks, beside the functions."""
import inspect
from copy import deepcopy

import pytest,torch
from torch import nn
import torch.nn.functional as F

from mp_callbacks import emily,functional,jmp,mpx
from mp_callbacks.dtypes import tree_map
from mp_callbacks.functional import all_finite,optimizer_update,scale_tree,value_and_grad
from mp_callbacks.half import half_precision
from mp_callbacks.loss_scale import DynamicLossScale

f16,bf16,f32,f64 = torch.float16,torch.bfloat16,torch.float32,torch.float64

def is_tensor(o): return isinstance(o, torch.Tensor)

def same(a, b):
    "Are two structures the same, bit for bit: classes, keys, dtypes, numbers?"
    if is_tensor(a):
        if not is_tensor(b) or (a.dtype,a.shape)!=(b.dtype,b.shape): return False
        return a.equal(b) and (a.is_complex() or torch.signbit(a).equal(torch.signbit(b))) # -0. too
    if isinstance(a, dict): return type(a)==type(b) and list(a)==list(b) and all(same(a[k],b[k]) for k in a)
    if isinstance(a, (list,tuple)): return type(a)==type(b) and len(a)==len(b) and all(map(same,a,b))
    return a==b

# --- The names of other libraries

signatures = {
    jmp: dict(
        get_policy=['policy_name'], cast_to_full=['tree'], cast_to_half=['tree'], half_dtype=[],
        all_finite=['tree'], NoOpLossScale=[], StaticLossScale=['loss_scale'],
        DynamicLossScale=['loss_scale',('counter',0),('period',2000),('factor',2),('min_loss_scale',1.)]),
    mpx: dict(
        set_half_precision_datatype=['datatype'], half_precision_datatype=[], cast_tree=['tree','dtype'],
        **{f'cast_to_{o}':['x'] for o in ('half_precision','full_precision','float16','bfloat16','float32')},
        cast_function=['func','dtype',('return_dtype',None)], all_finite=['tree'],
        force_full_precision=['func',('return_dtype','args')], scaled=['func','scaling',('has_aux',False)],
        DynamicLossScaling=['loss_scaling','min_loss_scaling',('factor',2),('period',2000),('counter',0)],
        **{o:['func','scaling',('has_aux',False),('use_mixed_precision',True)]
           for o in ('filter_grad','filter_value_and_grad')},
        optimizer_update=['model','optimizer','optimizer_state','grads','grads_finite']),
    emily: dict(
        cast_params=['params','type'], has_overflow=['structure'], scale_loss=['loss','scaler'],
        unscale=['grads','scaler'], update=['scaler','overflow'],
        loss_scale=[('scale',65536.),('growth_factor',2.),('backoff_factor',.5),('growth_interval',2000),
                    ('min_scale',1.),('counter',0)])}

@pytest.mark.parametrize('module', signatures)
def test_signatures(module):
    "Names, arguments, order and defaults of the originals, perhaps with more at the end"
    def arguments(name):
        ps = inspect.signature(getattr(module, name)).parameters.values()
        return [o.name if o.default is o.empty else (o.name,o.default) for o in ps]
    assert {k:arguments(k)[:len(o)] for k,o in signatures[module].items()}==signatures[module]

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
    'through':                   lambda f,dt,s,*a: value_and_grad(f, dt, s)(*a).grads,
    'copies':                    lambda f,dt,s,*a: value_and_grad(f, None, s)(*mpx.cast_tree(a, dt)).grads,
    'mpx.filter_grad':           lambda f,dt,s,*a: via_mpx(mpx.filter_grad, f, dt, s, *a)[2],
    'mpx.filter_value_and_grad': lambda f,dt,s,*a: via_mpx(mpx.filter_value_and_grad, f, dt, s, *a)[3],
    'jmp':                       lambda f,dt,s,*a: via_jmp(f, jmp.Policy(f32,dt,f32), jmp.DynamicLossScale(s), *a),
    'emily':                     lambda f,dt,s,*a: via_emily(f, dt, emily.loss_scale(scale=s), *a)}

def via_mpx(make, f, dt, s, *args):
    mpx.set_half_precision_datatype(dt)
    try: return make(f, mpx.DynamicLossScaling(s, 1.))(*args)
    finally: mpx.set_half_precision_datatype(f16)

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
    for dtype,eps in ((f16,4e-3), (bf16,3e-2)):
        grads = ways[way](mse, dtype, 2.**10, p, x, y)
        assert {o.dtype for o in grads.values()}=={f32} and error(grads, truth)<eps

@pytest.mark.parametrize('way', ways)
def test_scale_saves_small_gradients(problem, way):
    "A loss whose gradients are too small for float16: lost without a scale, as good as any with one"
    p,x,y,_ = problem
    def small(p, x, y): return mse(p, x, y)*1e-6
    truth = torch.func.grad(small)(*tree_map(torch.Tensor.double, (p,x,y)))
    assert error(ways[way](small, f16, 1., p, x, y), truth)>.2
    assert error(ways[way](small, f16, 2.**15, p, x, y), truth)<1e-2

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

def test_one_half_precision_for_a_model(monkeypatch):
    "Made in the first call, as that takes as long as a batch of a small model; two models in turns keep theirs"
    made,loss,x,nets = [],lambda m,x: m(x).mean(),torch.ones(4,2),[nn.Linear(2,1) for _ in range(2)]
    def counted(model, *args): made.append(model); return half_precision(model, *args)
    monkeypatch.setattr(functional, 'half_precision', counted)
    for net in nets*3: value_and_grad(loss, bf16)(net, x)
    assert made==nets

# --- Scales, and skipped steps

@pytest.mark.parametrize('scale', [1.,8.,2.**12])
def test_scale_unscale(scale):
    "With a power of two, and without overflow, unscaling what was scaled gives the same bits"
    tree = {str(o):torch.tensor([-0.,1.5,-3.], dtype=o) for o in (f16,bf16,f32,f64)}
    tree.update(none=None, text='s', numbers=[3,True,torch.arange(3),torch.tensor([1+2j])])
    wide = tree_map(lambda t: t.float() if is_tensor(t) and t.dtype in (f16,bf16) else t, tree) # these promote
    for o in (jmp.StaticLossScale(scale), jmp.DynamicLossScale(scale)): assert same(o.unscale(o.scale(tree)), tree)
    o = mpx.DynamicLossScaling(scale, 1.)
    assert same(o.unscale(o.scale(tree)), wide) and same(scale_tree(scale_tree(tree, scale), 1/scale), wide)
    e = emily.loss_scale(scale=scale)
    scaled = tree_map(lambda t: emily.scale_loss(t, e) if is_tensor(t) and t.is_floating_point() else t, tree)
    assert same(emily.unscale(scaled, e)[0], tree)

def bits(o): return deepcopy(tree_map(lambda t: t.detach().clone() if is_tensor(t) else t, o))

def fit(net, dtype, x, y, scale, overflows, n):
    "Losses and scales of `n` steps, of which those in `overflows` change nothing but the scale"
    opt,losses,scales = torch.optim.AdamW(net.parameters(), lr=.01),[],[]
    def now(): return bits((dict(net.state_dict()), opt.state_dict()))
    def loss(m, x, y): return F.mse_loss(m(x), y)
    for i in range(n):
        before = now()
        res = value_and_grad(loss, dtype, scale)(net, x*(1e39 if i in overflows else 1), y)
        optimizer_update(net, opt, None, res.grads, res.finite)
        assert same(now(), before)==(i in overflows)==(not res.finite)
        scale = scale.adjust(res.finite)
        losses.append(res.value.item())
        scales.append(scale.loss_scale)
    return losses,scales

def test_skipped_steps():
    "A batch that overflows changes nothing but the scale: neither model, buffers nor optimizer"
    net = nn.Sequential(nn.Linear(4,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,1))
    _,scales = fit(net, f16, torch.randn(32,4), torch.randn(32,1), DynamicLossScale(2.**10, period=3), (2,5), 8)
    assert scales==[1024,1024,512,512,512,256,256,256] and net[1].num_batches_tracked==6

# --- On an accelerator

@pytest.mark.cuda
@pytest.mark.results
@pytest.mark.parametrize('dtype,eps', [(f16,4e-3),(bf16,3e-2)])
def test_on_cuda(problem, dtype, eps):
    p,x,y,truth = tree_map(lambda o: o.cuda(), problem)
    for way in ways:
        grads = ways[way](mse, dtype, 2.**10, p, x, y)
        assert {o.device.type for o in grads.values()}=={'cuda'} and error(grads, truth)<max(eps,.01)
    net = nn.Sequential(nn.Linear(16,32), nn.BatchNorm1d(32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32,4)).cuda()
    values,_ = fit(net, dtype, x, y.float(), DynamicLossScale(2.**10), (4,), 20)
    assert values[-1]<values[0] and net[1].running_mean.dtype==f32
