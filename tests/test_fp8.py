"""FP8: the same bits as torchao, in a learner that stays an ordinary one, and a report that finds outliers

What torchao's module swap breaks is here right: hooks, subclasses, interrupts, the float32 reference."""
import dataclasses

from torch.nn.utils import parametrizations,prune

from learners import *
from mp_callbacks.core.dtypes import half_dtypes
from mp_callbacks.core.fp8 import Fp8,Fp8Recipe,fp8_linear,fp8_recipes
from mp_callbacks.look.fp8_report import Fp8Report,measure_fp8

recipes = [*fp8_recipes]
each_recipe = pytest.mark.parametrize('recipe', recipes)
def has_kernels():
    try: return fp8_linear(torch.ones(16,16), torch.ones(16,16)) is not None
    except NotImplementedError: return False

# PyTorch's CPU kernels take everything, so they show the bits only
kernels = patched('mp_callbacks.core.fp8.check_fp8', lambda device: None)

with kernels: emulations = [True] if not has_kernels() else [True,False] # PyTorch 2.6 has no kernel for a CPU
each_emulation = pytest.mark.parametrize('emulate', emulations)

mlp = partial(mlp, n=32)
def learner(model=None, **kwargs): return get_learner(mlp() if model is None else model, **kwargs)
def in_fp8(learn, **kwargs): return learn.to_fp8(**{'emulate':True, **kwargs})

def torchao(recipe, emulate=True):
    "`F.linear` of torchao, the oracle"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            import torchao.float8 as ao
            from torchao.float8.float8_linear import Float8Linear,matmul_with_hp_or_float8_args
        except (ImportError,AttributeError) as e:
            pytest.skip(f'torchao is not installed, or too new for this PyTorch: {e}')
    config = dataclasses.replace(ao.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    if config.round_scales_to_power_of_2!=fp8_recipes[recipe].power_of_2:
        pytest.skip('this version of torchao has another rule')
    mm_config = Float8Linear.from_float(nn.Linear(16,16), config).linear_mm_config
    def _linear(x, weight, bias=None, *args):
        res = matmul_with_hp_or_float8_args.apply(x, weight.t(), mm_config, config)
        return res if bias is None else res+bias.to(res.dtype)
    return _linear

def products(linear, x, weight, bias, grad):
    "Result and gradients of `linear`"
    given = [t.clone().requires_grad_() for t in (x,weight,bias)]
    res = linear(*given)
    res.backward(grad)
    return [res,*[t.grad for t in given]]

@each_recipe
@each_emulation
@pytest.mark.parametrize('dtype', [bf16,torch.float32])
@pytest.mark.parametrize('shape', [(48,64),(2,3,64),(7,64)])
def test_products(recipe, emulate, dtype, shape):
    if recipe=='rowwise' and not emulate and tuple(map(int, torch.__version__.split('.')[:2]))<(2,12):
        pytest.skip('PyTorch 2.10 and 2.11 have no such product on a CPU, where a learner needs emulate=True')
    linear = torchao(recipe, emulate)
    torch.manual_seed(0)
    x,weight,bias = torch.randn(shape).to(dtype),torch.randn(32,64).to(dtype),torch.randn(32).to(dtype)
    x[...,3] *= 500
    grad = torch.randn(*shape[:-1],32).to(dtype)*1e-3
    with kernels: ours = products(lambda *given: fp8_linear(*given, recipe, emulate), x, weight, bias, grad)
    for ours,theirs in zip(ours, products(linear, x, weight, bias, grad), strict=True): assert ours.equal(theirs)

@pytest.mark.parametrize('format', [torch.float8_e4m3fn,torch.float8_e5m2])
def test_rounds_to_the_nearest(format):
    "Each number of the format, scaled by a power of two, comes back; between two of them, the nearest"
    quantize = fp8_recipes['tensorwise'].quantize
    all_ = torch.arange(256, dtype=torch.uint8).view(format).float()
    numbers = all_[all_.isfinite()].unique()
    back = quantize(numbers*2.**-9, format)
    assert back.dequantize().equal(numbers*2.**-9)
    x = torch.linspace(-1, 1, 999)*torch.finfo(format).max
    nearest = numbers[(x[:,None]-numbers).abs().argmin(1)]
    assert ((quantize(x, format).dequantize()-x).abs()<=(nearest-x).abs()*(1+1e-6)).all()

shapes = dict(x=(8,32), weight=(16,32), grad=(8,16))

def grads_of(recipe, **given):
    "Result and gradients in FP8, with some of `x`, `weight` and `grad` given"
    x,weight,grad = (given.get(k, torch.randn(shape)) for k,shape in shapes.items())
    x,weight = x.clone().requires_grad_(x.is_floating_point()),weight.clone().requires_grad_()
    res = fp8_linear(x, weight, None, recipe, emulate=True)
    res.backward(grad)
    return res.detach(),x.grad,weight.grad

@each_recipe
@pytest.mark.parametrize('where', shapes)
def test_special_numbers(recipe, where):
    "inf and nan anywhere reach the gradients, and so the check before the step; zeros stay zeros, and finite"
    for bad in (torch.inf,-torch.inf,torch.nan):
        given = torch.randn(shapes[where])
        given[2,3] = bad
        res,dx,dw = grads_of(recipe, **{where:given})
        assert res.isfinite().all()==(where=='grad') and not (dx if where=='weight' else dw).isfinite().all()
    for rows in (slice(None),slice(1,3)):
        given = torch.randn(shapes[where])
        given[rows] = 0
        res,dx,dw = grads_of(recipe, **{where:given})
        assert all(t.isfinite().all() for t in (res,dx,dw))
        assert not dict(x=res[rows], weight=res[:,rows], grad=dx[rows])[where].any()

def test_empty():
    "An expert without tokens: no result, and gradients of zero"
    x,linear = torch.randn(0,32, requires_grad=True),nn.Linear(32,16)
    fp8_linear(x, linear.weight, linear.bias, emulate=True).sum().backward()
    assert x.grad.shape==x.shape and not linear.weight.grad.any()

def test_frozen():
    "What nobody needs is not computed"
    for needs_x,needs_weight in ((True,False),(False,True)):
        x,weight = torch.randn(16,32, requires_grad=needs_x),torch.randn(64,32, requires_grad=needs_weight)
        fp8_linear(x, weight, None, emulate=True).sum().backward()
        assert (x.grad is not None)==needs_x and (weight.grad is not None)==needs_weight

def test_second_derivative():
    x = torch.randn(4,16, requires_grad=True)
    grad, = torch.autograd.grad(fp8_linear(x, torch.randn(16,16), emulate=True).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): grad.sum().backward()

def test_inside_autocast():
    "Emulation multiplies in float32, also inside the user's own autocast"
    x,weight = torch.randn(8,32),torch.randn(16,32)
    want = fp8_linear(x, weight, emulate=True)
    with torch.autocast('cpu', bf16): assert fp8_linear(x, weight, emulate=True).equal(want)

def test_own_recipe():
    "Any combination: here gradients in e4m3 with one scale, and those of weights in the dtype of the input"
    for recipe in (Fp8Recipe(False, torch.float8_e4m3fn, True, False),Fp8Recipe(True, torch.float8_e5m2, False)):
        res,dx,dw = grads_of(recipe)
        assert all(t.isfinite().all() for t in (res,dx,dw))
    assert Fp8(recipe).recipe is recipe

def ways(model, **kwargs):
    table = half_precision(model, bf16, fp8=Fp8(emulate=True), **kwargs).policy()
    return {name:f'{way} {why}'.strip() for name,way,why in zip(table.module, table.way, table.why)}

def test_eligible():
    class Own(nn.Linear):
        def forward(self, x): return super().forward(x)*2
    model = nn.ModuleDict(dict(first=nn.Linear(16,16), plain=nn.Linear(16,32), own=Own(16,16), odd=nn.Linear(16,24),
                               mha=nn.MultiheadAttention(16,2), param=parametrizations.weight_norm(nn.Linear(16,16)),
                               hook=nn.utils.spectral_norm(nn.Linear(16,16)), conv=nn.Conv1d(16,16,1),
                               patched=nn.Linear(16,16), pruned=prune.random_unstructured(nn.Linear(16,16), 'bias', .5),
                               kept=nn.Linear(16,16), last=nn.Linear(16,16)))
    model.patched.forward = lambda x: x
    got = ways(model, keep={'kept':'bfloat16'})
    assert got['plain']=='fp8' and got['conv']==got['kept']=='layer cast with all others'
    want = dict(first='layer not in FP8: first linear layer', last='layer not in FP8: last linear layer',
                odd='layer not in FP8: 24 is no multiple of 16', patched='layer not in FP8: a forward of its own',
                own='own parameters not in FP8: a forward of its own',
                **dict.fromkeys(('param','hook','pruned'), 'autocast not in FP8: its weight or bias is computed'),
                **{'mha.out_proj':'layer not in FP8: inside MultiheadAttention'})
    assert {name:got[name] for name in want}==want
    assert ways(model, keep='kept')['kept']=='float32 keep'

def test_tied_and_used_twice():
    "One layer under two names, and two layers with one weight, whose gradient is the sum"
    a,b,c,d = (nn.Linear(16,16) for _ in range(4))
    c.weight = b.weight
    model,x = Does(lambda m,x: m.d(m.c(m.again(m.b(m.a(x))))), a=a, b=b, c=c, d=d, again=b),torch.randn(8,16)
    assert [*ways(model).values()].count('fp8')==2
    half = half_precision(model, bf16, fp8=Fp8(emulate=True))
    got,want = (batch(model, x, o)[3] for o in (half, lambda model: nullcontext())) # the gradient of that weight
    assert (got-want).norm()<.1*got.norm()

def test_refused():
    def _half(*args, **kwargs): return half_precision(mlp(), *args, **kwargs)
    patched_class = patched.object(nn.Linear, 'forward', functools.wraps(nn.Linear.forward)(noop))
    for error,match,call in (
        (ValueError, 'needs bfloat16 and rules=True', lambda: _half(fp8=Fp8(emulate=True))),
        (ValueError, 'needs bfloat16 and rules=True', lambda: _half(bf16, rules=False, fp8=Fp8())),
        (ValueError, '24 is no multiple of 16', lambda: ways(mlp(n=24))),
        (ValueError, 'a forward of its own', lambda: patched_class(ways)(mlp())),
        (ValueError, 'there is none', lambda: ways(nn.Sequential(nn.Conv2d(1,1,1)))),
        (ValueError, "keep={'2': 'bfloat16'} leaves no layer", lambda: in_fp8(learner(), keep={'2':'bfloat16'})),
        (ValueError, "recipe='row' must be one of", lambda: learner().to_fp8('row')),
        (ValueError, r"recipe=\['rowwise'\] must be one of", lambda: learner().to_fp8(['rowwise'])),
        (ValueError, 'tolerance=-1 must be a positive', lambda: in_fp8(learner()).precision_report(tolerance=-1)),
        (ValueError, "The model isn't in FP8", lambda: measure_fp8(Fp8Report(Fp8()), mlp(), None, _half())),
        (TypeError, "fp8='rowwise' must be an Fp8", lambda: half_precision(mlp(), bf16, fp8='rowwise')),
        (TypeError, "emulate='no' must be True or False", lambda: learner().to_fp8(emulate='no')),
        (TypeError, 'x has the dtype torch.int64', lambda: grads_of('rowwise', x=torch.ones(8,32).long()))):
        with pytest.raises(error, match=match): call()

@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU may have FP8')
def test_without_the_hardware():
    "An error that names what is needed, before anything has changed; which devices have it: test_devices"
    learn = learner()
    told = pytest.raises(ValueError, match=r'compute capability 8\.9.*to_bf16\(\) .*, or emulate=True')
    with stays(list, learn.cbs), told: learn.to_fp8()
    with half_precision(mlp(), bf16, fp8=Fp8()) as half, pytest.raises(ValueError, match='device=cpu'):
        half.model(torch.randn(4,8))

def test_interrupts(monkeypatch, tmp_path):
    import test_faults
    monkeypatch.setitem(test_faults.precisions, 'fp8', in_fp8)
    test_faults.test_faults('fp8', ('train','forward',0), tmp_path)

@pytest.mark.parametrize('recipe', crossed(recipes, fast=lambda o: o=='rowwise'))
def test_learns(recipe):
    "As in bfloat16, and what changes bits is only FP8"
    learn,other = fitted(in_fp8(learner(), recipe=recipe), 6),fitted(learner().to_bf16(), 6)
    assert 0<apart(learn, other, flat(weights(learner())))<.2
    assert learn.recorder.values[-1][0]<learn.recorder.values[0][0]*.8 and skipped(learn)==0
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32}

@pytest.mark.parametrize('reentrant', [True,False])
def test_checkpointing(reentrant):
    def _net(checkpointed):
        def _forward(m, x):
            x,body = m.inner[0](x),m.inner[1:]
            return checkpoint(body, x, use_reentrant=reentrant) if checkpointed else body(x)
        return Does(_forward, inner=mlp())
    assert same_weights(*[fitted(in_fp8(learner(_net(o)))) for o in (True,False)])

def test_hooks_and_replaced_forward():
    "A layer's hooks run, also those that change its result; and so does a `forward` that somebody puts on it"
    calls,model = [],mlp()
    model[2].register_forward_hook(lambda module, args, out: calls.append(out.dtype) or out*0)
    model[2].register_forward_pre_hook(lambda module, args: calls.append('pre'))
    model[2].register_full_backward_hook(lambda module, grad_in, grad_out: calls.append('backward'))
    half = half_precision(model, bf16, fp8=Fp8(emulate=True))
    with half: res = model(torch.randn(4,8))
    res.sum().backward()
    assert calls==['pre',bf16,'backward']
    model[2].forward = lambda x: calls.append('replaced') or x
    with half: model(torch.randn(4,8))
    assert 'replaced' in calls

def test_back():
    "`to_bf16` and `to_fp32`, also in the middle of a fit"
    learn = in_fp8(learner())
    learn.fit(2, cbs=Callback(after_epoch=lambda cb: cb.learn.to_bf16() if cb.epoch==0 else None))
    assert 'fp8' not in [*learn.mixed_precision.policy().way]
    in_fp8(learn).to_fp32()
    assert not [m for m in learn.model.modules() if 'forward' in vars(m)] and not hasattr(learn, 'mixed_precision')
    assert learn.model(torch.randn(4,8)).dtype==torch.float32

def test_resumes_exactly(tmp_path):
    "In another learner too: there is no state of FP8 to save, and an exported model is a plain one"
    learn,other = (in_fp8(learner(path=tmp_path), clip=1.) for _ in range(2))
    learn.fit(2)
    learn.save('m')
    learn.export('m.pkl')
    x = torch.ones(1,8)
    assert load_learner(tmp_path/'m.pkl').model(x).equal(learn.model(x))
    assert same_weights(fitted(learn, 2), fitted(other.load('m'), 2, reset_opt=False))

def test_carried_along():
    "Whatever makes another `half_precision` keeps it"
    half = half_precision(residuals(), bf16, fp8=Fp8('rowwise', True))
    other = half.keeping(['layers.0'], bf16)
    for o in (half.replace(keep='first'),half.keeping(['first']),other,pickle.loads(pickle.dumps(half))):
        o.refresh()
        assert o.fp8==half.fp8 and o.ways['layers.1'].name=='fp8'
    assert other.keep=={'layers.0':'bfloat16'}
    want = {'norms.0':'float32','norms.1':'float32','norms.2':'float32','first':'float32','layers.2':'bfloat16'}
    assert half.replace(keep=[nn.LayerNorm,'first']).keeping(['layers.2'], bf16).keep==want
    assert in_fp8(learner(), recipe='rowwise').find_nonfinite().where=='nothing'

def test_the_cause_names_the_call():
    model = mlp()
    model.insert(3, Does(lambda m,x: x/(x-x) if x.dtype in half_dtypes else x))
    found = in_fp8(learner(model)).find_nonfinite()
    assert found.precision and "learn.to_fp8(keep='3')" in str(found)

@each_emulation
def test_plan(emulate):
    "FP8 keeps less for the backward pass"
    with kernels, patched('mp_callbacks.core.half.check_fp8'):
        table = learner(mlp(n=256), dls=get_dls(64)).to_fp8(emulate=emulate).precision_plan().table
    row = 'fp8, emulated' if emulate else 'fp8'
    assert [*table.index]==['float32','to_bf16','to_native_bf16',row]
    assert table.activations[row]<table.activations.to_bf16

@pytest.mark.parametrize('recipe', crossed(recipes, fast=lambda o: o=='tensorwise'))
def test_compiled_is_in_fp8(recipe):
    "Without a graph break, and with the numbers of the model that isn't compiled, which aren't bfloat16's"
    def _out(fp8, backend=None):
        model = mlp()
        called = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        half = half_precision(called, bf16, fp8=fp8)
        with half: res = half.model(numbers()[0])
        res.sum().backward()
        return flat([res,*[p.grad for p in model.parameters()]])
    fp8,compiled,half = _out(Fp8(recipe, True)),_out(Fp8(recipe, True), 'aot_eager'),_out(None)
    assert (fp8-compiled).norm()<.01*(fp8-half).norm()

def _residual(m, x):
    x = m.first(x)
    for norm,layer in zip(m.norms, m.layers): x = x+F.gelu(layer(norm(x)))
    return m.last(x)

def residuals():
    "Three layers in FP8, each after a norm, so that an outlier can be planted"
    torch.manual_seed(2)
    return Does(_residual, first=nn.Linear(8,32), norms=nn.ModuleList([nn.LayerNorm(32) for _ in range(3)]),
                layers=nn.ModuleList([nn.Linear(32,32) for _ in range(3)]), last=nn.Linear(32,1))

def planted(i, factor=3000):
    "The same function with an outlier in the input of layer `i`, or in its weight if `factor` is small"
    net = residuals()
    with torch.no_grad():
        for p in net.norms[i].parameters(): p[5] *= factor
        net.layers[i].weight[:,5] /= factor
    return net

def report_of(net, **kwargs): return in_fp8(learner(net, dls=get_dls(64)), **kwargs).precision_report()

@pytest.mark.parametrize('recipe,factor,i', crossed(recipes, [3000,1/3000,3e5], range(3),
                         fast=lambda recipe,factor,i: recipes.index(recipe)==i))
def test_finds_the_outlier(recipe, factor, i):
    report = report_of(planted(i, factor), recipe=recipe)
    assert report.keep=={f'layers.{i}':'bfloat16'}
    clean = report_of(planted(i, factor), recipe=recipe, keep=report.keep)
    assert clean.keep=={} and clean.error<1.5*report.digits_error and 'No layer has to' in str(clean)

@each_recipe
def test_no_false_alarm(recipe):
    "Errors are those of the digits alone, also where most numbers are tiny and don't matter"
    net = residuals()
    with torch.no_grad():
        for layer in net.layers: layer.weight *= 4; layer.bias -= 2
    for report in (report_of(residuals(), recipe=recipe),report_of(net, recipe=recipe)):
        assert report.keep=={} and report.error<1.5*report.digits_error
        assert report.bfloat16_error<report.digits_error/3
        assert [*report.table.index]==['layers.0','layers.1','layers.2'] and not report.table.isna().any(axis=None)

def test_report_looks_further():
    "A smaller tolerance takes out more layers, and only layers that are in FP8; where all would have to go, it says so"
    learn = in_fp8(learner(residuals(), dls=get_dls(64)), keep=['norms.0'])
    error = learn.precision_report().error
    report = learn.precision_report(tolerance=.95*error)
    assert 0<len(report.keep)<3 and {*report.keep}<={'layers.0','layers.1','layers.2'}
    assert report_of(residuals(), keep={'norms.0':'float32', **report.keep}).error<=.95*error
    report = learn.precision_report(tolerance=1e-5)
    assert report.keep is None and 'No choice of layers' in str(report)

def test_report_of_an_overflow():
    "What isn't finite in bfloat16 either has another cause"
    log = Does(lambda m,x: (1-x.sigmoid()).log() if x.dtype==bf16 else F.logsigmoid(-x))
    net = nn.Sequential(*mlp()[:3], log, *mlp()[2:])
    with torch.no_grad(): net[2].weight *= 1e3
    report = in_fp8(learner(net)).precision_report(batches=1)
    assert 'In bfloat16, gradients are not finite' in str(report) and report.keep=={}

@pytest.mark.parametrize('recipe', ['rowwise','rowwise_with_gw_hp'])
def test_report_looks_at_all_scales(recipe):
    "A large row of a weight has its own scale in the forward pass, and shares one in the backward pass"
    net = residuals()
    with torch.no_grad(): net.layers[1].weight[5] *= 3e4
    assert [*report_of(net, recipe=recipe).keep]==['layers.1']

def test_report_of_odd_batches():
    "Frozen layers and zeros have rows; a batch that isn't finite in float32 is an error; the report shows and plots"
    net = residuals()
    net.layers[1].requires_grad_(False)
    nn.init.zeros_(net.layers[2].weight)
    report = in_fp8(learner(net)).precision_report()
    assert report.keep=={} and report.table.loc['layers.1','gradient error']==0
    assert report.table.loc['layers.2','weight largest/median']==1
    assert '<table' in report._repr_html_() and report.plot().get_xlabel()=='largest/median'
    spoil = Callback(before_batch=lambda cb: setattr(cb.learn, 'xb', (cb.xb[0]*torch.nan,)))
    with pytest.raises(ValueError, match='find_nonfinite'): in_fp8(learner(residuals(), cbs=spoil)).precision_report()

def test_report_says_what_to_write():
    "What is kept already stays, also where it is named by type, which a dict of dtypes has no room for"
    told = str(report_of(planted(1), keep=[nn.LayerNorm])).partition('Take out of FP8: keep=')[2].removesuffix('.')
    want = {'norms.0':'float32','norms.1':'float32','norms.2':'float32','layers.1':'bfloat16'}
    assert told==str(want) and report_of(planted(1), keep=want).keep=={}
