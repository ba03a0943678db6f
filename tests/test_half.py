"""`half_precision` in a loop written by hand: what a `with` does, and what is left after it, in any order, after an
exception, in copies; how layers compute in it, and what it refuses"""
import ast

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mp_callbacks.core.half import check_device
from mp_callbacks.core.modules import parameter_name
from mp_callbacks.core.ways import is_norm
from learners import *
from machines import Fake,machine,pretend

class Block(nn.Sequential): pass

def net():
    torch.manual_seed(1)
    block = Block(nn.Linear(8,8), nn.GELU())
    return nn.Sequential(nn.Linear(4,8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8,8), nn.BatchNorm1d(8), block,
                         nn.Linear(8,1))

def watched(model):
    "Name -> dtype that this module of `model` returned last"
    res = {}
    for n,m in model.named_modules(): m.register_forward_hook(lambda m,args,out,n=n: res.update({n:out.dtype}))
    return res

def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return x,x.sin().sum(1, keepdim=True)

@pytest.mark.parametrize('dtype,rules', [(f16,True),(bf16,True),(bf16,False)])
def test_trains(dtype, rules):
    "To nearly the loss that float32 reaches; and an overflow is found"
    def fit(scale, half):
        torch.manual_seed(1)
        model,(x,y) = net(),data()
        half,seen = half(model),watched(model)
        params,opt = [*model.parameters()],torch.optim.AdamW(model.parameters(), 1e-2)
        for i in range(31):
            with half: loss = F.mse_loss(model(x if i<30 else x*torch.inf), y)
            (loss*scale).backward()
            if i<30: last = loss.item()
            stats = prepare_grads(params, scale, clip=1.)
            assert stats.finite==(i<30)
            if stats.finite: opt.step()
            opt.zero_grad()
        assert identical(model.parameters(), params) and all(p.isfinite().all() for p in params)
        assert_plain(model)
        return last,seen['0'],seen['']
    full,*_ = fit(1., lambda model: nullcontext())
    loss,inside,pred = fit(2.**10, lambda model: half_precision(model, dtype, rules=rules))
    assert loss<full+.05 and (inside,pred)==(dtype,f32)

class Stop(BaseException): pass

@pytest.mark.parametrize('where', ['module','loss','backward'])
def test_exceptions(where):
    "From a module, the loss or the backward pass: nothing stays behind, and the next batch is right"
    model,(x,y) = net().eval(),data()
    half,hook = half_precision(model, bf16),None
    want = batch(model, x, half)
    def stop(*_): raise Stop
    with pytest.raises(Stop), half:
        if where=='module': hook = model[4].register_forward_hook(stop)
        pred = model(x)
        if where=='loss': stop()
        hook = model[3].weight.register_hook(stop)
        F.mse_loss(pred, y).backward()
    if hook: hook.remove()
    assert_plain(model)
    model.zero_grad()
    assert same(batch(model, x, half), want)

def test_forward_looks_the_same():
    "Trainers ask for the parameters of `forward`, by name"
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.LayerNorm(8), nn.Linear(8,8), nn.GELU())
    def looks(): return [(inspect.signature(m.forward),m.forward.__name__,m.forward.__doc__) for m in model.modules()]
    before = looks()
    with half_precision(model, bf16): assert looks()==before and 'forward' in vars(model)

@pytest.mark.parametrize('rules', [True,False])
def test_users_autocast_around(rules):
    "Stays open, and keeps no casts of weights that a step has changed"
    def run(around):
        model,(x,y) = net(),data()
        opt,half = torch.optim.SGD(model.parameters(), .1),half_precision(model, bf16, rules=rules)
        with torch.autocast('cpu', f16) if around else nullcontext():
            for _ in range(3):
                with half: pred = model(x)
                assert torch.is_autocast_enabled('cpu')==around
                if around: assert torch.get_autocast_dtype('cpu')==f16
                with half, torch.autocast('cpu', enabled=False): F.mse_loss(pred, y).backward()
                opt.step()
                opt.zero_grad()
        assert_plain(model)
        return [*model.parameters()]
    assert same(run(True), run(False))

def test_float32_inside():
    "A part of the model that disables autocast computes in float32, and so does one that is called directly"
    def _careful(m, x):
        x = m.a(x)
        with torch.autocast('cpu', enabled=False): return m.b(x.float())
    careful = Does(_careful, a=nn.Linear(4,4), b=nn.Linear(4,4))
    model,(x,_) = nn.Sequential(careful, nn.Linear(4,4), nn.Linear(4,1)),data()
    want,seen,half = model[1](x),watched(model),half_precision(model, bf16)
    for _ in range(2):
        with half:
            model(x).sum().backward()
            assert seen=={'0.a':bf16, '0.b':f32, '0':f32, '1':bf16, '2':bf16, '':f32}
            assert torch.equal(model[1](x), want)

def test_autocast_to_another_dtype():
    "In a part that its author computes in another dtype weights are rounded once, to that one, in each call"
    def _other(m, x):
        with torch.autocast('cpu', f16): return m.lin(x)*m.gain
    torch.manual_seed(1)
    other = Does(_other, lin=nn.Linear(8,64), gain=torch.rand(64)+.5)
    model,(x,_),seen = nn.Sequential(nn.Linear(4,8), other, nn.Linear(64,1)),data(),returned(other.lin)
    with torch.autocast('cpu', bf16, cache_enabled=False): model(x)
    want,half = seen.pop().detach(),unmeasured(model, bf16)
    for _ in range(3):
        with half: model(x).sum().backward()
    assert want.dtype==f16 and same([o.detach() for o in seen], [want]*3)
    assert other.gain.grad.isfinite().all()

def attends():
    "Predictions with padding, for which PyTorch has a fast path; calls `wait` before"
    def _forward(m, x, wait=noop):
        wait()
        mask = torch.zeros(2, 4, dtype=torch.bool)
        mask[0,2:] = True
        return m.layer(x, src_key_padding_mask=mask)[0,:2]
    torch.manual_seed(1)
    return Does(_forward, layer=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)).eval()

fast_path = torch.backends.mha

@pytest.mark.filterwarnings('ignore:.*nested tensor')
@pytest.mark.parametrize('options', [{},dict(rules=False),dict(keep=nn.MultiheadAttention)])
def test_fast_path_is_off(options):
    """In this model, as it fails under autocast on a CPU, also without rules, and where attention stays in float32

    What others, and other threads, have of it stays as it is, inside and after an error, too."""
    model,x,seen = attends(),torch.randn(2,4,8),[]
    half = half_precision(model, bf16, **options)
    def stop():
        seen.append(fast_path.get_fastpath_enabled())
        raise Stop
    for was in (True,False):
        fast_path.set_fastpath_enabled(was)
        try:
            with half, torch.no_grad():
                res = model(x, lambda: seen.append(fast_path.get_fastpath_enabled()))
                with pytest.raises(Stop): model(x, stop)
            assert fast_path.get_fastpath_enabled()==was
        finally: fast_path.set_fastpath_enabled(True)
        assert_plain(model)
        assert (res-model(x)).norm()<=.02*res.norm()
    assert seen==[True,True,False,False]

def test_fast_path_in_two_threads():
    "Neither is in the other's way"
    first_in,second_in,first_out = (threading.Event() for _ in range(3))
    x,models = torch.randn(2,4,8),[attends(),attends()]
    @torch.no_grad()
    def call(model, wait):
        with half_precision(model, bf16): return model(x, wait)
    def first():
        try: return call(models[0], lambda: first_in.set() or second_in.wait(20))
        finally: first_out.set()
    def second():
        first_in.wait(20)
        return call(models[1], lambda: second_in.set() or first_out.wait(20))
    with ThreadPoolExecutor(2) as pool: a,b = [o.result() for o in [pool.submit(first), pool.submit(second)]]
    assert torch.equal(a, b) and fast_path.get_fastpath_enabled()

def with_pos(m, x): return m.body(x)+m.pos

def reached(o):
    "All objects that `o` leads to, but for modules of Python, classes and what these lead to"
    found,todo = {},[o]
    while todo:
        o = todo.pop()
        if id(o) in found or isinstance(o, (type,type(sys))): continue
        found[id(o)] = o
        todo += [v for v in gc.get_referents(o) if not (inspect.isfunction(o) and v is o.__globals__)]
    return [*found.values()]

@pytest.mark.parametrize('how', [deepcopy,by_pickle])
def test_copied_while_held(how):
    "A copy of a model, or of a part of it, leads to nothing of this package and to nothing of the original"
    model = Does(with_pos, body=net(), pos=torch.zeros(1))
    half,mine = half_precision(model, bf16),{id(o) for o in (*model.parameters(),*model.modules())}
    half.hold('somebody')
    with torch.no_grad(): model(data()[0])
    copies = how(model.body),how(model)
    half.release('somebody')
    for o in copies:
        found = reached(o)
        assert not mine & {*map(id, found)}
        assert [v for v in found if str(type(v).__module__).startswith('mp_callbacks')]==[]

@pytest.mark.parametrize('how', [deepcopy,by_pickle])
def test_copied_inside(how):
    "A copy made inside the `with` is an ordinary float32 model with its own parameters, and computes as any other"
    model,(x,_) = net().eval(),data()
    want = model(x)
    with half_precision(model, bf16):
        model(x)
        other = how(model)
        assert not torch.equal(model(x), want) and torch.equal(other(x), want)
    assert torch.equal(model(x), want) and torch.equal(other(x), want)
    half,fresh = half_precision(other, bf16),half_precision(model, bf16)
    assert half.policy().equals(fresh.policy()) # its layers are cast ahead
    for _ in range(2): assert same(batch(other, x, half), batch(model, x, fresh))
    with torch.no_grad(): other[0].weight.zero_()
    assert torch.equal(model(x), want) and not torch.equal(other(x), want)
    assert_plain(other)
    with half_precision(model, bf16, keep='3') as half: again = how(half) # with its model, and switched off
    assert torch.equal(again.model(x), want)
    again.hold(0)
    assert not torch.equal(again.model(x), want) and again.policy().equals(half.policy())
    again.release(0)
    assert_plain(again.model)

keeps = dict(
    type       = (lambda: Block, {'5'}),
    name       = (lambda: '5', {'5'}),
    pattern    = (lambda: '5*', {'5'}),
    function   = (lambda: lambda n,m: n=='5' or is_norm(n, m), {'1','4','5'}),
    collection = (lambda: ['5', is_norm, {nn.LayerNorm}], {'1','4','5'}),
    dict       = (lambda: {'5':'float32', '5.0':'bfloat16', '6':torch.float32}, {'5','6'}))

wraps = dict(
    plain      = lambda m: m,
    compiled   = lambda m: torch.compile(m, backend='eager'),
    in_place   = lambda m: (m.compile(backend='eager'), m)[1],
    checkpoint = lambda m: (m.__setitem__(5, checkpoint_wrapper(m[5])), m)[1],
    ddp        = lambda m: DistributedDataParallel(m),
    both       = lambda m: torch.compile(DistributedDataParallel(m), backend='eager'))

# each form with the plain model, and each wrapper with a dict
keep_cases = [slow_unless(w!='both', w, f) for w in wraps for f in keeps if w=='plain' or f=='dict']

@pytest.mark.parametrize('wrap,form', keep_cases)
def test_keep(wrap, form, one_process):
    "Means the same modules, by the names that they have in the model that was compiled or wrapped"
    torch._dynamo.reset()
    inner,(keep,kept) = net(),keeps[form]
    seen = watched(inner)
    model,(x,_) = wraps[wrap](inner),data()
    half = half_precision(model, bf16, keep())
    rows = (table := half.policy().set_index('module')).compute
    norms = set() if wrap in ('compiled','in_place','both') else {'1'} # on a CPU `LayerNorm` is, unless compiled
    assert {n for n in rows.index if '.' not in n and rows[n]=='float32'}==kept|norms
    assert rows['5.0']==('bfloat16' if form=='dict' or '5' not in kept else 'float32')
    with half: model(x).sum().backward()
    assert {n:seen[n] for n in '013456'}=={n:f32 if n in kept else bf16 for n in '013456'}
    assert all(p.grad.dtype==f32 for p in model.parameters()) and ('layer' in {*table.way})==bool(norms)

class Masks(nn.Linear):
    "Masks with float32's least number, which half precision can't hold, as DeBERTa's attention does"
    def forward(self, x): return super().forward(x).masked_fill(x>1, torch.finfo(torch.float32).min)

def masking(): return nn.Sequential(nn.Linear(4,4), Masks(4,1))
def checkpointed(model): return nn.Sequential(*map(checkpoint_wrapper, model))

@pytest.mark.parametrize('wrap', [[],[checkpointed],[checkpointed,DistributedDataParallel]])
def test_advice_under_wrappers(wrap, one_process):
    "What can't be computed in half precision has a note, with a name that `keep` takes, and that helps"
    model,x = masking(),torch.ones(2,4)
    for f in wrap: model = f(model)
    assert parameter_name(model, [*model.parameters()][-1])=='1.bias' # as what the recorder says, and errors
    with half_precision(model, bf16), pytest.raises(RuntimeError, match='without overflow') as e: model(x)
    if hasattr(e.value, 'add_note'): # Python 3.11
        note, = e.value.__notes__
        assert note.startswith('In 1 (Masks)') and "keep='1' computes it in float32" in note
    del e # the hooks of checkpointing are on as long as the frames of its traceback are there
    with half_precision(model, bf16, keep='1'): model(x).sum().backward()

class Doubled(nn.Linear):
    def forward(self, x): return 2*super().forward(x)

def test_changed_when_training_begins(one_process):
    "By a callback that comes after ours and wraps the model, as fastai's for several processes: that is seen at once"
    def wrap(learn):
        learn.model[4].__class__ = Doubled
        learn.model = DistributedDataParallel(learn.model)
    seen,learn = [],get_learner().to_bf16(measure=False) # which would be the first to see the change
    def look(learn): seen.append((learn.pred-learn.model(learn.x)).norm()/learn.pred.norm()) # which is in float32 here
    learn.fit(1, cbs=[On('before_fit', wrap, 11),On('after_pred', look, 20, at=[0])])
    assert len(seen)==1 and seen[0]<.05

def own_forward(m): m.forward = lambda input: F.linear(input, m.weight, m.bias)*2
def another_parameter(m): m.scale = nn.Parameter(torch.ones(1))
def plain_weight(m): m.weight = m._parameters.pop('weight').detach()

def linear(m, x, weight, bias=None, **kwargs): return F.linear(x, weight, bias)

@pytest.mark.parametrize('make,function,change', [
    (lambda: nn.Linear(8,8), linear, None),
    (lambda: nn.GroupNorm(2,8), lambda m,x,weight,bias: F.group_norm(x, 2, weight, bias), None),
    (lambda: nn.Linear(8,8), lambda *args, **kwargs: linear(*args, **kwargs)*2, own_forward),
    (lambda: nn.Linear(8,8), linear, another_parameter),
    (lambda: nn.Linear(8,8), lambda m,x,bias: F.linear(x, m.weight.to(bf16), bias), plain_weight)])
def test_layers(make, function, change):
    "What its function returns with rounded parameters, in each call, also if somebody has changed the layer"
    torch.manual_seed(0)
    model,x = nn.Sequential(make(), nn.Linear(8,8)),torch.randn(4,8).to(bf16)
    if change: change(model[0])
    def rounded(m): return {k:p.to(bf16) for k,p in m._parameters.items() if p is not None}
    def whole(m, x): return linear(model[1], function(model[0], x, **rounded(model[0])), **rounded(model[1])).float()
    want,mine = batch(Does(whole, model=model), x, lambda model: nullcontext()),half_precision(model, bf16)
    for _ in range(2): assert same(batch(model, x, mine), want)

@pytest.mark.parametrize('layer', [nn.Linear(4,4),nn.LayerNorm(4),nn.Embedding(9,16)], ids=['layer','norm','lookup'])
def test_forward_put_back(layer):
    "A function in place of a layer's `forward` counts as long as it is there"
    x = torch.arange(4) if isinstance(layer, nn.Embedding) else torch.randn(3,4)
    half = half_precision(nn.Sequential(layer), bf16)
    def out():
        with half: return half.model(x)
    want = out()
    layer.forward = lambda x: 0*type(layer).forward(layer, x)
    assert not out().any()
    del layer.forward
    assert same(out(), want)

@pytest.mark.parametrize('keeps_name', [True,False])
def test_convolution_with_weights_of_its_making(keeps_name):
    "In a `_conv_forward` of its own: autocast gives it float32 weights, also if it has the name of PyTorch's"
    class Standardized(nn.Conv1d):
        def _conv_forward(self, x, weight, bias):
            seen.append(weight.dtype)
            return super()._conv_forward(x, (weight-weight.mean())/weight.std(), bias)
        if keeps_name: _conv_forward = functools.wraps(nn.Conv1d._conv_forward)(_conv_forward)
    seen,model = [],nn.Sequential(Standardized(2, 4, 3), nn.Conv1d(4, 2, 3))
    half = unmeasured(model, bf16)
    for _ in range(2):
        with half: model(torch.randn(2,2,9)).sum().backward()
    assert seen==[f32,f32] and half.ways['0'].name!='layer'

def test_forward_of_another_layer():
    "What somebody has put into an instance computes with the weights that it names, though it is PyTorch's function"
    model,other,(x,_) = net().eval(),nn.Linear(4,8),data()
    model[0].forward = functools.partial(nn.Linear.forward, other)
    want,half = model(x),half_precision(model, bf16)
    for _ in range(3):
        with half: res = model(x)
        assert (res-want).norm()<=.02*want.norm()
        res.sum().backward()
        assert model[0].weight.grad is None and other.weight.grad.norm()>0

def test_called_by_name():
    "A layer computes the same, and a norm returns the dtype of its input"
    parts = dict(lin=nn.Linear(4,4), layer=nn.LayerNorm(4), head=nn.Linear(4,1))
    model,(x,_) = Does(lambda m,x: m.head(m.layer(input=m.lin(input=x))), **parts),data()
    want,seen,half = model(x),watched(model),half_precision(model, bf16)
    for _ in range(2):
        with half: assert torch.allclose(model(x), want, atol=.05)
        assert {seen[n] for n in ('lin','layer','head')}=={bf16}

# --- What to write: the loop's words in a loop, the learner's after its calls

of_learners = re.compile(r'learn\.|\bto_(native_|non_native_)?(fp|bf)\d+\(')

def texts_in(path):
    "The strings in the code at `path` but for docstrings"
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    docs = {id(o.value) for o in nodes if isinstance(o, ast.Expr)}
    return [o.value for o in nodes if isinstance(o, ast.Constant) and isinstance(o.value, str) and id(o) not in docs]

@pytest.mark.parametrize('folder', ['core','look'])
def test_no_text_names_a_learner(folder):
    "Loops without a learner get these"
    found = {path.name:texts_in(path) for path in (root/'mp_callbacks'/folder).glob('*.py')}
    assert sum(map(len, found.values()))>99
    assert not [(name,o) for name,texts in found.items() for o in texts if of_learners.search(o)]

def told(f):
    "What `f` warns of and raises, with notes"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try: f(); errors = []
        except (ValueError,TypeError,RuntimeError) as e: errors = [str(e),*getattr(e, '__notes__', ())]
    return ' '.join([*[str(o.message) for o in caught if o.category is UserWarning],*errors])

def rounded(m, x):
    m.weight.data = m.weight.data.bfloat16()
    return F.linear(x, m.weight.float())
def float32_only(m, x):
    if (res := m.layer(x)).dtype!=f32: raise RuntimeError('expected scalar type Float')
    return res
def without_gradients():
    model = mlp()
    for p in model.parameters(): p.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None))
    return model

no_half = Fake('cpu', 'this CPU', no_dtype={f16,bf16})
ways_out = dict( # dtype, model, machine, `keep`, and the way out
    emulated    = (bf16, mlp, machine('AVX2'), (), f32),
    unsupported = (bf16, mlp, no_half, (), f32),
    all_kept    = (bf16, mlp, None, nn.Module, f32),
    rounded     = (bf16, lambda: Does(rounded, weight=torch.ones(1,8)), None, (), f32),
    the_model   = (bf16, lambda: Does(float32_only, layer=nn.Linear(8,1)), None, (), f32),
    no_gradient = (f16, without_gradients, None, (), bf16))

def loop(dtype, model, keep):
    half = half_precision(model, dtype, keep)
    train_steps(TrainingSteps(model, torch.optim.SGD(model.parameters(), lr=.1), half), [numbers(4)])

@pytest.mark.skipif(sys.version_info<(3,11), reason='errors have no notes')
@pytest.mark.parametrize('name', ways_out)
def test_way_out(name):
    dtype,make,on,keep,way = ways_out[name]
    call = 'to_fp16' if dtype==f16 else 'to_bf16'
    with pretend(on) if on else nullcontext():
        in_loop = told(lambda: loop(dtype, make(), keep))
        in_learner = told(lambda: getattr(get_learner(make()), call)(keep=keep).fit(1))
    assert str(way) in in_loop and not of_learners.search(in_loop)
    assert {f32:'learn.to_fp32()', bf16:'to_bf16()'}[way] in in_learner

@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_no_gpu():
    "Float32 is no way out"
    learn = get_learner()
    learn.dls.device = torch.device('cuda')
    for f in (learn.to_bf16,learn.to_fp8,lambda: check_device(torch.device('cuda'), half(mlp()))):
        assert "device=cuda doesn't compute on this machine. Put data and model on" in (text := told(f))
        assert 'float32' not in text
