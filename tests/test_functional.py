"""The functions without objects, and the names of JMP, MPX and Emily: their gradients are right, and skipped steps
leave no trace

What becomes of each kind of leaf is in the notebooks, beside the functions."""
from learners import *
from mp_callbacks.names import emily,functional,jmp,mpx
from mp_callbacks.core.dtypes import tree_map
from mp_callbacks.names.functional import all_finite,optimizer_update,value_and_grad

signatures = {
    jmp: dict(
        get_policy='policy_name', cast_to_full='tree', cast_to_half='tree', half_dtype='', all_finite='tree',
        NoOpLossScale='', StaticLossScale='loss_scale',
        DynamicLossScale='loss_scale counter=0 period=2000 factor=2.0 min_loss_scale=1.0'),
    mpx: dict(
        set_half_precision_datatype='datatype', half_precision_datatype='', cast_tree='tree dtype', all_finite='tree',
        **{f'cast_to_{o}':'x' for o in ('half_precision','full_precision','float16','bfloat16','float32')},
        cast_function='func dtype return_dtype=None', force_full_precision="func return_dtype='args'",
        scaled='func scaling has_aux=False', optimizer_update='model optimizer optimizer_state grads grads_finite',
        DynamicLossScaling='loss_scaling min_loss_scaling factor=2 period=2000 counter=0'), # filters: in the notebook
    emily: dict(
        cast_params='params type', has_overflow='structure', scale_loss='loss scaler', unscale='grads scaler',
        loss_scale='scale=65536.0 growth_factor=2.0 backoff_factor=0.5 growth_interval=2000 min_scale=1.0 counter=0',
        update='scaler overflow')}

@pytest.mark.parametrize('module', signatures)
def test_signatures(module):
    "Names, arguments, order and defaults of the originals, perhaps with more at the end"
    for name,arguments in signatures[module].items():
        ps = inspect.signature(getattr(module, name)).parameters.values()
        ours = [o.name if o.default is o.empty else f'{o.name}={o.default!r}' for o in ps]
        assert ours[:len(arguments.split())]==arguments.split(), name

def mlp(p, x):
    for i in range(3): x = torch.tanh(x@p[f'w{i}']+p[f'b{i}'])
    return x@p['w3']

def mse(p, x, y): return (mlp(p, x).to(y.dtype)-y).square().mean()

@pytest.fixture
def problem():
    "Parameters and a batch"
    sizes = [16,64,64,64]
    p = {}
    for i,(a,b) in enumerate(zip(sizes,sizes[1:])): p |= {f'w{i}':torch.randn(a,b)/a**.5, f'b{i}':torch.zeros(b)}
    p['w3'] = torch.randn(64,4)/8
    return p,torch.randn(128,16),torch.randn(128,4).double()

def error(grads, loss, *args):
    "The largest error of `grads`, compared with those computed in float64"
    truth = torch.func.grad(loss)(*tree_map(torch.Tensor.double, args))
    return max(((grads[k].double()-o).norm()/o.norm()).item() for k,o in truth.items())

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

def small(p, x, y): return mse(p, x, y)*1e-6

@pytest.mark.parametrize('way', ways)
def test_gradients(problem, way):
    """As good as the dtype allows, in float32, by whichever function

    Those that are too small for float16 are lost without a scale, as good as any with one."""
    for loss,dtype,scale,eps in ((mse,f16,2.**10,4e-3), (mse,bf16,2.**10,3e-2), (small,f16,2.**15,1e-2)):
        grads = ways[way](loss, dtype, scale, *problem)
        assert {o.dtype for o in grads.values()}=={f32} and error(grads, loss, *problem)<eps
    assert error(ways[way](small, f16, 1., *problem), small, *problem)>.2

def test_one_half_precision_for_a_model(monkeypatch):
    "Made in the first call, as that takes as long as a batch of a small model; two models in turns keep theirs"
    made,loss,x,nets = [],lambda m,x: m(x).mean(),torch.ones(4,2),[nn.Linear(2,1) for _ in range(2)]
    def counted(model, *args): made.append(model); return half_precision(model, *args)
    monkeypatch.setattr(functional, 'half_precision', counted)
    for net in nets*3: value_and_grad(loss, bf16)(net, x)
    assert made==nets

def fit(net, dtype, x, y, scale, overflows, n):
    "Losses and scales of `n` steps, of which those in `overflows` change nothing but the scale"
    opt,losses,scales = torch.optim.AdamW(net.parameters(), lr=.01),[],[]
    def now(): return deepcopy((dict(net.state_dict()), opt.state_dict()))
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

def test_skipped_steps():
    "A batch that overflows changes nothing but the scale: neither model, buffers nor optimizer"
    net = nn.Sequential(nn.Linear(4,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,1))
    _,scales = fit(net, f16, torch.randn(32,4), torch.randn(32,1), DynamicLossScale(2.**10, period=3), (2,5), 8)
    assert scales==[1024,1024,512,512,512,256,256,256] and net[1].num_batches_tracked==6

@pytest.mark.cuda
@pytest.mark.results
@pytest.mark.parametrize('dtype,eps', [(f16,4e-3),(bf16,3e-2)])
def test_on_cuda(problem, dtype, eps):
    p,x,y = tree_map(lambda o: o.cuda(), problem)
    for way in ways:
        grads = ways[way](mse, dtype, 2.**10, p, x, y)
        assert {o.device.type for o in grads.values()}=={'cuda'} and error(grads, mse, p, x, y)<max(eps,.01)
    net = nn.Sequential(nn.Linear(16,32), nn.BatchNorm1d(32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32,4)).cuda()
    values,_ = fit(net, dtype, x, y.float(), DynamicLossScale(2.**10), (4,), 20)
    assert values[-1]<values[0] and net[1].running_mean.dtype==f32
