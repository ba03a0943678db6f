"`half_precision` in a training loop written by hand: what a `with` does, and what is left after it"
import copy,io,pickle
from contextlib import nullcontext

import pytest,torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import *
from mp_callbacks.fp8 import Fp8
from mp_callbacks.grads import prepare_grads
from mp_callbacks.half import half_precision
from mp_callbacks.ways import is_norm
from states import *

f16,bf16,f32 = torch.float16,torch.bfloat16,torch.float32
each_dtype = pytest.mark.parametrize('dtype', [f16,bf16])

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

def data(n=32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g)
    return x,x.sin().sum(1, keepdim=True)

def grads(model): return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

def step(model, opt, half, x, y, scale=1.):
    with half:
        loss = F.mse_loss(model(x), y)
        (loss*scale).backward()
    stats = prepare_grads(model.parameters(), scale, clip=1.)
    if stats.finite: opt.step()
    opt.zero_grad()
    return loss.item(),stats

def plain_step(model, opt, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()

# --- The loop

@each_dtype
@pytest.mark.parametrize('copies', [True,False])
def test_trains(dtype, copies):
    "To nearly the loss that float32 reaches, with weights, gradients and predictions in float32"
    def fit(half):
        model,(x,y) = net(),data()
        params,opt,seen = [*model.parameters()],torch.optim.AdamW(model.parameters(), 1e-2),watched(model)
        h = half and half_precision(model, dtype, copies=copies)
        for _ in range(40):
            if half: loss,stats = step(model, opt, h, x, y, 2.**10 if dtype==f16 else 1.)
            else: loss = plain_step(model, opt, x, y)
        if half: assert stats.finite and seen['0']==seen['5']==dtype
        assert identical(model.parameters(), params)
        assert_plain(model)
        return loss
    first = F.mse_loss(net()(data()[0]), data()[1]).item()
    assert fit(True)<fit(False)+.05*first

@each_dtype
def test_overflow_is_found(dtype):
    model,(x,y) = net(),data()
    before,opt = copy.deepcopy(model.state_dict()),torch.optim.SGD(model.parameters(), .1)
    model.eval() # batch norm leaves its statistics alone
    _,stats = step(model, opt, half_precision(model, dtype), x*torch.inf, y)
    assert not stats.finite and same(model.state_dict(), before)

def test_parameters_never_move():
    "In hooks, and inside and outside of `forward`, they are float32 and the optimizer's"
    class Looks(nn.Linear):
        def forward(self, x): note('inside')(self); return super().forward(x)
    model,(x,_),seen = net(),data(),{}
    model[3] = Looks(8,8)
    params = [*model.parameters()]
    def note(when): return lambda m, *_: seen.setdefault(when, []).extend(m._parameters.values())
    model[3].register_forward_pre_hook(note('before'))
    model[3].register_forward_hook(note('after'))
    params[0].register_hook(lambda g: seen.update(grad=g.dtype))
    params[0].register_post_accumulate_grad_hook(lambda p: seen.update(accumulated=p.grad.dtype))
    with half_precision(model, bf16):
        model(x).sum().backward()
        assert identical(model.parameters(), params)
    assert seen.pop('grad')==seen.pop('accumulated')==f32 and [*seen]==['before','inside','after']
    assert all(identical(o, model[3].parameters()) for o in seen.values())

@pytest.mark.parametrize('copies', [True,False])
@pytest.mark.parametrize('reentrant', [True,False])
def test_checkpointing(reentrant, copies):
    "Of a module, and of a function: gradients are those without, bit for bit"
    class Checkpointed(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.body,self.on = net(),on
        def run(self, f, x): return checkpoint(f, x, use_reentrant=reentrant) if self.on else f(x)
        def forward(self, x):
            x = self.run(self.body[:4], x.requires_grad_()) # a new Sequential around the same modules
            x = self.run(self.body[4], x)
            return self.run(lambda o: self.body[6](self.body[5](o)), x)
    def run(on):
        model,(x,y) = Checkpointed(on),data()
        half = half_precision(model, bf16, copies=copies)
        for _ in range(2):
            with half: F.mse_loss(model(x.clone()), y).backward()
        assert_plain(model)
        return grads(model)
    assert same(run(True), run(False))

# --- Entering and leaving

def test_enter_again():
    "As often as you like, also inside itself, until the outermost `with` ends; in between the model is an ordinary one"
    model,(x,_) = net().eval(),data()
    half,plain = half_precision(model, bf16),model(x)
    for _ in range(3):
        with half as res:
            assert res is half and half.installed and not torch.equal(want := model(x), plain)
            with half: assert torch.equal(model(x), want)
            assert half.installed and torch.equal(model(x), want)
        assert not half.installed and torch.equal(model(x), plain)
        assert_plain(model)

def test_nested_objects():
    "Two objects for one model, or for a part of it: each `with` takes away only its own"
    model,(x,_) = net().eval(),data()
    with half_precision(model, bf16):
        want = model(x)
        with half_precision(model, bf16): assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
        with half_precision(model[5], bf16): assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
    assert_plain(model)

class Stop(BaseException): pass

@pytest.mark.parametrize('where', [0,1,4,5,6,'loss','backward','recomputed'])
def test_exceptions(where):
    "From a module, the loss or the backward pass: nothing stays behind, and the next batch is right"
    model,(x,y) = net().eval(),data()
    half,hooks = half_precision(model, bf16),[]
    with half: F.mse_loss(model(x), y).backward()
    want = grads(model)
    model.zero_grad()
    def stop(*_): raise Stop
    class Recomputed(nn.Module):
        def __init__(self): super().__init__(); self.net = model
        def forward(self, x): return checkpoint(self.net, x, use_reentrant=False)
    used = half_precision(r := Recomputed(), bf16) if where=='recomputed' else half
    with pytest.raises(Stop), used:
        if isinstance(where, int): hooks.append(model[where].register_forward_hook(stop))
        pred = (r if where=='recomputed' else model)(x)
        if where=='loss': stop()
        if where=='backward': hooks.append(model[3].weight.register_hook(stop))
        if where=='recomputed': hooks.append(model[3].register_forward_pre_hook(stop))
        F.mse_loss(pred, y).backward()
    for h in hooks: h.remove()
    assert_plain(model)
    assert not used.cast.calls
    model.zero_grad()
    with half: F.mse_loss(model(x), y).backward()
    assert same(grads(model), want)

changes = dict(
    added      = lambda m: m.append(nn.Linear(1,1)),
    replaced   = lambda m: m.__setitem__(3, nn.Linear(8,8)),
    inside     = lambda m: m[5].__setitem__(0, nn.Linear(8,8)),
    removed    = lambda m: m.__delitem__(2),
    new_weight = lambda m: setattr(m[3], 'weight', nn.Parameter(torch.randn(8,8))),
    frozen     = lambda m: m[0].requires_grad_(False),
    loaded     = lambda m: m.load_state_dict({k:v*.9 for k,v in m.state_dict().items()}))

@pytest.mark.parametrize('change', changes)
def test_model_changed(change):
    "Between two `with`s: what a new `half_precision` does, bit for bit"
    def run(fresh):
        model,(x,y) = net(),data()
        half = half_precision(model, bf16)
        with half: F.mse_loss(model(x), y).backward()
        model.zero_grad()
        torch.manual_seed(2)
        changes[change](model)
        if fresh: half = half_precision(model, bf16)
        with half: F.mse_loss(model(x), y).backward()
        assert_plain(model)
        return grads(model)
    assert same(run(False), run(True))

def test_model_no_longer_float32():
    model = net()
    half = half_precision(model, bf16)
    model.double()
    with pytest.raises(ValueError, match=r'no float32 parameters \(torch.float64\)'):
        with half: pass
    model.float()
    with half: model(data()[0])
    assert_plain(model)

# --- Autocast

def test_users_autocast_around():
    "Stays open, and keeps no casts of weights that a step has changed"
    def run(around):
        model,(x,y) = net(),data()
        opt,half = torch.optim.SGD(model.parameters(), .1),half_precision(model, bf16)
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

def test_autocast_disabled_inside():
    "A part of the model that disables autocast computes in float32"
    class Careful(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(4,4),nn.Linear(4,4)
        def forward(self, x):
            x = self.a(x)
            with torch.autocast('cpu', enabled=False): return self.b(x.float())
    model = nn.Sequential(Careful(), nn.Linear(4,4), nn.Linear(4,1))
    seen,half = watched(model),half_precision(model, bf16)
    for _ in range(2):
        with half: model(data()[0]).sum().backward()
        assert seen=={'0.a':bf16, '0.b':f32, '0':f32, '1':bf16, '2':bf16, '':f32}

def test_part_called_directly():
    "Outside the model's `forward` a module computes in float32, as do the losses that use its weights"
    model,(x,_) = net().eval(),data()
    want = model[0](x)
    with half_precision(model, bf16):
        model(x)
        res = model[0](x)
    assert res.dtype==f32 and torch.equal(res, want)

@pytest.mark.parametrize('make', [lambda x: x, lambda x: (x,[x]), lambda x: dict(a=x, b=None), lambda x: [x.long(),x]])
def test_predictions_are_float32(make):
    class Out(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(4,2)
        def forward(self, x): return make(self.lin(x))
    with half_precision(model := Out(), bf16): res = model(data()[0])
    assert type(res) is type(make(torch.ones(1)))
    assert {o.dtype for o in leaves(res) if isinstance(o, torch.Tensor)}<={f32,torch.int64}

# --- Copies of the model

def by_pickle(model): return pickle.loads(pickle.dumps(model))

def by_save(model):
    torch.save(model, f := io.BytesIO())
    f.seek(0)
    return torch.load(f, weights_only=False)

@pytest.mark.parametrize('how', [copy.deepcopy,by_pickle,by_save])
def test_copied_inside(how):
    "A copy made inside the `with` is an ordinary float32 model with its own parameters"
    model,(x,y) = net().eval(),data()
    want = model(x)
    with half_precision(model, bf16):
        model(x)
        other = how(model)
        assert not torch.equal(model(x), want) and torch.equal(other(x), want)
    assert torch.equal(model(x), want) and torch.equal(other(x), want)
    with torch.no_grad(): other[0].weight.zero_()
    assert torch.equal(model(x), want) and not torch.equal(other(x), want)
    with half_precision(other, bf16): F.mse_loss(other(x), y).backward()
    assert other[0].weight.grad is not None and model[0].weight.grad is None

def test_learner_for_a_model():
    class Learner: model = None
    with pytest.raises(TypeError, match='model is a Learner, and must be an nn.Module.*pass learn.model'):
        half_precision(Learner(), bf16)

def test_copied_inside_and_used():
    "A copy made while the `with` is open computes as any other model, with weights cast ahead and in FP8"
    model,x = nn.Sequential(*[nn.Linear(16,16) for _ in range(3)]),torch.ones(2,16)
    with half_precision(model, bf16): other = copy.deepcopy(model)
    assert half_precision(other, bf16, fp8=Fp8(emulate=True)).ways['1'].name=='fp8'
    half = half_precision(other, bf16)
    for _ in range(2):
        with half: other(x).sum().backward()
    assert len(half.cast._cast(True))==3
    assert_plain(other)

def test_exported_inside():
    "By `torch.export`, as under autocast"
    model,x = nn.Sequential(nn.Linear(4,8), nn.GELU(), nn.Linear(8,1)),torch.randn(2,4)
    with half_precision(model, bf16): exported = torch.export.export(model, (x,)).module()
    assert exported(x).dtype==f32 and (exported(x)-model(x)).norm()<=.05*model(x).norm()
    assert_plain(model)

# --- Which modules: `keep`

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
    part       = lambda m: (m.__setitem__(5, torch.compile(m[5], backend='eager')), m)[1],
    checkpoint = lambda m: (m.__setitem__(5, checkpoint_wrapper(m[5])), m)[1],
    ddp        = lambda m: DistributedDataParallel(m),
    both       = lambda m: torch.compile(DistributedDataParallel(m), backend='eager'))

@pytest.fixture(scope='module')
def one_process(tmp_path_factory):
    "A group of one process, for `DistributedDataParallel`"
    dist.init_process_group('gloo', init_method=f'file://{tmp_path_factory.mktemp("dist")}/init', rank=0, world_size=1)
    yield
    dist.destroy_process_group()

compiles = ('compiled','in_place','both') # compiling takes time: some forms of `keep`
fast = [(w,f) for w in wraps for f in keeps if w not in compiles or f=='dict' and w!='in_place']

@pytest.mark.parametrize('wrap,form', crossed(wraps, keeps, fast=lambda *o: o in fast))
def test_keep(wrap, form, one_process):
    "Means the same modules, by the names that they have in the model that was compiled or wrapped"
    torch._dynamo.reset()
    inner,(keep,kept) = net(),keeps[form]
    seen = watched(inner)
    model,(x,_) = wraps[wrap](inner),data()
    half = half_precision(model, bf16, keep())
    rows = half.policy().set_index('module').compute
    assert {n for n in rows.index if '.' not in n and rows[n]=='float32'}==kept|{'1'} # `LayerNorm` is, on a CPU
    assert rows['5.0']==('bfloat16' if form=='dict' or '5' not in kept else 'float32')
    with half: model(x).sum().backward()
    assert {n:seen[n] for n in '013456'}=={n:f32 if n in kept else bf16 for n in '013456'}
    assert all(p.grad.dtype==f32 for p in model.parameters())

# --- What can't be

@pytest.mark.parametrize('make,match', [
    (lambda: torch.jit.script(nn.Linear(2,2)),                 'A scripted model .* or use torch.compile'),
    (lambda: nn.Sequential(torch.jit.script(nn.Linear(2,2))),  'A scripted model'),
    (lambda: nn.DataParallel(nn.Linear(2,2)),                  'Use DistributedDataParallel'),
    (lambda: nn.Sequential(nn.LazyLinear(2), nn.Linear(2,2)),  'lazy parameters .* Call it once'),
    (lambda: nn.ReLU(),                                        r'This ReLU has no float32 parameters \(none at all\)'),
    (lambda: nn.Linear(2,2).half(), r'no float32 parameters \(torch.float16\).* model.float\(\)')])
def test_refused(make, match):
    with pytest.raises(ValueError, match=match): half_precision(make(), bf16)

# --- What a layer computes

def own_forward(m): m.forward = lambda input: F.linear(input, m.weight, m.bias)*2
def another_parameter(m): m.scale = nn.Parameter(torch.ones(1))
def plain_weight(m):
    weight = m.weight.detach()
    del m.weight
    m.weight = weight

def linear(m, x, weight, bias=None, **kwargs): return F.linear(x, weight, bias)

@pytest.mark.parametrize('make,function,change', [
    (lambda: nn.Linear(8,8), linear, None), (lambda: nn.Linear(8,8,bias=False), linear, None),
    (lambda: nn.RMSNorm(8), lambda m,x,weight: F.rms_norm(x, (8,), weight), None),
    (lambda: nn.GroupNorm(2,8), lambda m,x,weight,bias: F.group_norm(x, 2, weight, bias), None),
    (lambda: nn.GroupNorm(2,8,affine=False), lambda m,x: F.group_norm(x, 2), None),
    (lambda: nn.Linear(8,8), lambda *args, **kwargs: linear(*args, **kwargs)*2, own_forward),
    (lambda: nn.Linear(8,8), linear, another_parameter),
    (lambda: nn.Linear(8,8), lambda m,x,bias: F.linear(x, m.weight.to(bf16), bias), plain_weight)])
def test_layers(make, function, change):
    "What its function returns with rounded parameters, in each call, also if somebody has changed the layer"
    torch.manual_seed(0)
    model,x = nn.Sequential(make(), nn.Linear(8,8)),torch.randn(4,8).to(bf16)
    if change: change(model[0])
    def rounded(m): return {k:p.to(bf16) for k,p in m._parameters.items() if p is not None}
    want = linear(model[1], function(model[0], x, **rounded(model[0])), **rounded(model[1])).float()
    want.square().mean().backward()
    wanted,half = grads(model),half_precision(model, bf16)
    for _ in range(2):
        model.zero_grad()
        with half: (res := model(x)).square().mean().backward()
        assert res.equal(want) and same(grads(model), wanted)

def test_called_by_name():
    "A layer computes the same, and a norm returns the dtype of its input; an integer beside that doesn't count"
    class Label(nn.GroupNorm):
        def forward(self, x, y): return super().forward(x)+y.view(-1,1)*0
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.layer,self.group,self.head = nn.Linear(4,4),nn.LayerNorm(4),Label(2,4),nn.Linear(4,1)
        def forward(self, x):
            x = self.layer(input=self.lin(input=x))
            return self.head(self.group(x, y=torch.ones(len(x), dtype=torch.long)))
    model,(x,_) = Named(),data()
    want,seen,half = model(x),watched(model),half_precision(model, bf16)
    for _ in range(2):
        with half: assert torch.allclose(model(x), want, atol=.05)
        assert {seen[n] for n in ('lin','layer','group','head')}=={bf16}
