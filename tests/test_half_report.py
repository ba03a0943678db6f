"`half_report`: its numbers beside those of a slow reference, and the modules that it says to keep"
from learners import *
from mp_callbacks.look.half_report import PrecisionReport,measure_precision
from mp_callbacks.core.blame import ddmin,shortest_keep
from sick_models import Overflows,SmallVariance,net

# --- Models, each with something that could be counted wrongly

def layers(): return nn.Sequential(nn.Linear(8,8), nn.Tanh(), nn.Linear(8,8), nn.Linear(8,1))

def tied():
    "Two layers with one weight"
    model = layers()
    model[2].weight = model[0].weight
    return model

def twice():
    "One layer, called twice; the model has a parameter of its own"
    return Does(lambda m, x: m.out(m.a(m.a(x).tanh()+m.shift)), a=nn.Linear(8,8), out=nn.Linear(8,1),
                shift=torch.ones(8))

def unused():
    "A layer that isn't called, one that is frozen, and a parameter that isn't used"
    model = layers()
    model[0].requires_grad_(False)
    model[1].idle,model[2].extra = nn.Linear(8,8),nn.Parameter(torch.ones(3))
    return model

def middle(): return nn.Linear(16,16)
makes = dict(mlp=mlp, batch_norm=lambda: mlp(norm=True), tied=tied, twice=twice, unused=unused,
             dropout=lambda: net(nn.Dropout, middle), compiled=lambda: torch.compile(mlp(), backend='eager'))
batches = [*zip(*[o[:48].split(16) for o in numbers()])] # the first three of the learner's

def make(name):
    torch.manual_seed(1)
    return makes[name]()

# --- The reference

def plain(model): return getattr(model, '_orig_mod', model) # without `torch.compile`
def own(model): return {n:m for n,m in plain(model).named_modules() if [*m.parameters(False)]}

def run(model, batch, half=None, scale=1.):
    "Loss, and for each module its outputs, their gradients, and the gradients of its weights"
    outs,acts,handles = {},{},[]
    def hook(n, m, args, out):
        outs.setdefault(n, []).append(out.detach().clone())
        if out.requires_grad: out.register_hook(lambda g: acts.setdefault(n, []).append(g.clone()))
    for n,m in own(model).items(): handles.append(m.register_forward_hook(partial(hook, n)))
    torch.manual_seed(5)
    for p in model.parameters(): p.grad = None
    with half or nullcontext():
        loss = F.mse_loss(model(batch[0]), batch[1])
        for o in handles: o.remove()
        (loss*scale).backward()
    grads = {n:[p.grad.clone() for p in m.parameters(False) if p.grad is not None] for n,m in own(model).items()}
    return loss.item(),outs,acts,grads

def run_both(model, batch, dtype, rules, scale, keep=()):
    "In float32 and in half precision, each with a copy of the model"
    a,b = [deepcopy(plain(model)) for _ in range(2)]
    return run(a, batch),run(b, batch, unmeasured(b, dtype, keep, rules), scale)

def norm(ts): return math.sqrt(sum(t.double().pow(2).sum().item() for t in ts))
def error(xs, ys): return norm([x.double()-y.double() for x,y in zip(xs, ys, strict=True)])/norm(ys) if norm(ys) else 0.

def lost(gs, dtype, scale):
    "Share of numbers that become zero"
    gs = torch.cat([torch.zeros(0), *[g.flatten() for g in gs]])
    return ((gs[gs!=0]*scale).to(dtype)==0).double().mean().item()

def largest_scale(gs, dtype):
    "Largest power of two that leaves six more, from 1 to 2**24"
    largest = max(g.abs().max().item() for g in gs)
    if dtype==torch.bfloat16 or largest==0: return 1.
    return max([2.**i for i in range(25) if largest*2.**i*2**6<=2**16], default=1.)

def off(full, half, scale):
    "Relative error of the gradients, in a root mean square over modules that have some"
    gs = [error([g/scale for g in half[3][n]], full[3][n]) for n in full[1] if full[3][n]]
    return math.sqrt(np.mean(np.square(gs)))

def expected(model, batches, dtype, rules, scale):
    "Table, error and safe scale of the report"
    both = [run_both(model, b, dtype, rules, scale) for b in batches]
    def cat(i, k, n): return [t for o in both for t in o[i][k].get(n, [])]
    names = [*both[0][0][1]]
    best = largest_scale([g for n in names for k in (2,3) for g in cat(0, k, n)], dtype)
    rows = {n:[max(t.abs().max().item() for t in cat(0,1,n))/torch.finfo(dtype).max, error(cat(1,1,n), cat(0,1,n)),
               error([g/scale for g in cat(1,3,n)], cat(0,3,n)),
               *[lost(cat(0,k,n), dtype, s) for k in (2,3) for s in (scale,best)]] for n in names}
    return pd.DataFrame(rows).T,max(off(*o, scale) for o in both),best

def report_of(model, batches, dtype, rules=True, scale=1., keep=(), **kwargs):
    report = PrecisionReport(dtype, scale, **kwargs)
    for xb,yb in batches:
        torch.manual_seed(5)
        measure_precision(report, model, lambda: F.mse_loss(model(xb), yb), unmeasured(model, dtype, keep, rules))
    return report

def check(name, n, dtype, rules, scale):
    model = make(name)
    want,err,best = expected(model, batches[:n], dtype, rules, scale)
    report = report_of(model, batches[:n], dtype, rules, scale)
    table = report.table
    assert report.safe_scale==best and math.isclose(report.error, err, rel_tol=1e-5)
    assert {*table.index}=={*want.index} and list(table.kind)==[type(own(model)[o]).__name__ for o in table.index]
    got,want = table.drop(columns='kind').astype(float),want.loc[table.index].to_numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-12)
    assert (report.keep==[])==(err<=report.tolerance)
    return table

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
@pytest.mark.parametrize('rules', [True,False])
@pytest.mark.parametrize('name', makes)
def test_numbers(name, dtype, rules): check(name, 3 if name=='batch_norm' else 1, dtype, rules, 2.**4)

@pytest.mark.parametrize('scale', [2.**-14, 1., 2.**10])
def test_scales(scale):
    "A scale below 1 makes gradients vanish"
    table = check('mlp', 2, torch.float16, True, scale)
    assert (table['activation gradients lost']>.02).any()==(table['weight gradients lost']>.02).any()==(scale<1)
    assert all((table[f'{o} gradients lost, safe scale']==0).all() for o in ('activation','weight'))

def test_safe_scale_is_the_learners():
    "It is what `to_fp16` finds in the first step, where a weight has the largest gradient"
    learn = get_learner().to_fp16()
    best = learn.precision_report(batches=1).safe_scale
    assert best==fitted(learn).mixed_precision.loss_scale>1

@pytest.mark.parametrize('mode', modes)
def test_learner(mode):
    "The report of a learner is that of its batches, its precision and its loss scale"
    learn = fitted(modes[mode](get_learner()), 2)
    report,cb = learn.precision_report(batches=3),learn.mixed_precision
    want = report_of(learn.model, batches, cb.half_dtype, not mode.startswith('native'), cb.loss_scale)
    pd.testing.assert_frame_equal(report.table, want.table)
    assert str(report)==str(want) and report.scale==cb.loss_scale

def works(model, batch, keep, tolerance, dtype=torch.float16, scale=1.):
    try: full,half = run_both(model, batch, dtype, True, scale, keep)
    except ValueError: return True # everything is float32
    return math.isfinite(half[0]) and off(full, half, scale)<=tolerance

troubled = dict(variance = lambda: net(SmallVariance),
                inside   = lambda: net(lambda: nn.Sequential(nn.Tanh(), SmallVariance()), nn.GELU),
                both     = lambda: net(SmallVariance, middle, SmallVariance))

@pytest.mark.parametrize('name,keep', [('variance',['1']), ('inside',['1.1']), ('both',['1','3'])])
def test_keep(name, keep):
    "Enough, and none can be left out"
    model,batch = troubled[name](),batches[0]
    report = report_of(model, [batch], torch.float16)
    assert report.keep==keep and report.error>report.tolerance
    assert works(model, batch, keep, .1)
    for n in range(len(keep)):
        assert not any(works(model, batch, o, .1) for o in itertools.combinations(keep, n))
    assert report_of(model, [batch], torch.float16, keep=keep).keep==[]
    assert report_of(model, [batch], torch.bfloat16).keep==[] # has the range

@pytest.mark.parametrize('tolerance,n', [(.1,0), (.008,1), (.007,2), (.005,3)])
def test_tolerance(tolerance, n):
    "The bound that `keep` brings the errors under"
    model,batch = net(middle, nn.GELU, middle, nn.GELU),batches[0]
    report = report_of(model, [batch], torch.bfloat16, tolerance=tolerance)
    assert len(report.keep)==n and (report.error>tolerance)==(n>0)
    assert works(model, batch, report.keep, tolerance, torch.bfloat16)
    for o in report.keep: assert not works(model, batch, [k for k in report.keep if k!=o], tolerance, torch.bfloat16)

def test_keep_of_several_batches():
    "Each batch may add modules"
    class Sometimes(SmallVariance):
        def __init__(self, i): super().__init__(); self.i = i
        def forward(self, x): return super().forward(x) if seen==self.i else x
    model = net(partial(Sometimes, 0), middle, partial(Sometimes, 1))
    report,half = PrecisionReport(torch.float16),half_precision(model, torch.float16)
    def loss(i):
        nonlocal seen
        seen,(xb,yb) = i,batches[i]
        return F.mse_loss(model(xb), yb)
    seen,losses = 0,[partial(loss, i) for i in range(2)]
    for i,o in enumerate(losses): measure_precision(report, model, o, half, earlier=losses[:i])
    assert report.keep==['1','3']

def test_keep_that_a_later_one_replaces():
    "The first batch is cured by the norm or by the layer before, of which the second needs the layer"
    class Second(nn.Linear):
        def forward(self, x):
            large = 1e6 if x[0,0]==2 else 1
            return super().forward(x[:,1:])*large/large
    x = torch.cat([torch.tensor([1.,2.]).repeat_interleave(4)[:,None], torch.randn(8, 8)], 1)
    for n,keep in ((1,'1'), (2,'0')):
        learn = get_learner(nn.Sequential(Second(8,16), SmallVariance(), nn.Linear(16,1)), as_dls(x, x[:,1:2], 4))
        assert learn.to_fp16().precision_report(batches=n).keep==[keep]

def test_keep_where_dtypes_do_not_mix():
    "An attempt that the model's own code can't compute, as it writes one result into another, is one that doesn't work"
    def mix(m, x):
        res = m.a(x)
        res[x>0] = m.b(x)[x>0]
        return m.out(res)
    model = Does(mix, a=nn.Linear(8,8), b=Overflows(8,8), out=nn.Linear(8,1))
    found = get_learner(model).to_fp16().find_nonfinite()
    assert found.precision and found.keep==('a','b')

def test_keep_of_odd_names():
    "Names of modules are no patterns"
    model = nn.Sequential(nn.Linear(8,16), nn.ModuleDict({'p[0]': SmallVariance()}), nn.Linear(16,1))
    model[1].forward = lambda x: model[1]['p[0]'](x)
    assert get_learner(model).to_fp16().find_nonfinite().keep==('1.p[0]',)

@pytest.mark.parametrize('n', [8, 64, 128])
def test_few_runs(n):
    "One sick module among `n` is found by halves"
    half = half_precision(nn.Sequential(*[nn.Linear(1,1) for _ in range(n)]), torch.bfloat16)
    def _runs(sick, *guess):
        tried = []
        def _works(longer):
            tried.append(longer.keep)
            return sick in longer.keep
        assert shortest_keep(half, _works, *guess)==[sick]
        return len(tried)
    assert all(_runs(str(o))<=2*math.log2(n)+2 for o in (0, n//3, n-1)) and _runs('1', '1')==1
    assert ddmin(range(n), lambda names: {1,5}<={*names})==[1,5]

def test_text():
    "What is kept already stays; the numbers of the text are among the outputs that the notebook has saved"
    kept = report_of(troubled['both'](), batches[:1], torch.float16, keep='1')
    assert str(kept).endswith("Keep in float32: keep=['1', '3'].")

def test_plot():
    "A row for each module; lines are at the ends of what is not lost, at both scales"
    report = report_of(make('mlp'), batches[:1], torch.float16, scale=.25)
    _,ax = plt.subplots()
    assert report.plot(ax) is ax and [o.get_text() for o in ax.get_yticklabels()]==['0','2','4']
    lines = sorted({round(o.get_xdata()[0], 3) for o in ax.lines if len(o.get_xdata())})
    shifts = {-math.log2(o) for o in (.25,report.safe_scale)}
    np.testing.assert_allclose(lines, sorted(o+s for o in (-25,16) for s in shifts), atol=.01)
    plt.close('all')

def test_no_gradients():
    "A loss that has stopped moving: nothing is lost, and there is a picture"
    report = get_learner(loss_func=lambda pred, y: pred.sum()*0).to_fp16().precision_report()
    assert report.safe_scale==1 and report.error==0 and len(report.table)==3 and len(str(report))>50
    report.plot()
    plt.close('all')

@pytest.mark.parametrize('loss', [lambda p, y: (p-y).mean()*math.nan, lambda p, y: (p-p.detach()).pow(2).sum().sqrt()])
def test_not_finite_in_float32(loss):
    "Loss or gradients: the report is about precision, which is not the cause here"
    with pytest.raises(ValueError, match='not finite, so half precision is not the cause.*find_nonfinite'):
        get_learner(loss_func=loss).to_fp16().precision_report()
