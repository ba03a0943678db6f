"""The one cast: its weights give the numbers that autocast's casts give, whatever a model does with them meanwhile

Cases run several batches in one `with`, as the first call of a model casts nothing ahead, and are compared with
autocast. Layers are 64 wide, so that their biases lie in one block of memory, as in most models."""
from contextlib import nullcontext
from functools import partial

import pytest,torch
from torch import nn
from torch.func import functional_call,grad,jacfwd,jacrev,vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize,prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mp_callbacks import cast
from mp_callbacks.half import half_precision
from learners import flat
from states import *
from tracing import interrupted

bf16 = torch.bfloat16
autocast = partial(torch.autocast, 'cpu', bf16, cache_enabled=False)

def data(n=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 64, generator=g)

class Model(nn.Module):
    "Three layers; `forward` of a subclass says what it does with them"
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a,self.b,self.c = nn.Linear(64,64),nn.Linear(64,64),nn.Linear(64,1)
    def forward(self, x): return self.c(self.b(self.a(x).tanh()).tanh())

def backward(model, x): model(x).square().mean().backward()

def grads(model, around, run=backward, times=3):
    "The gradients of each of some batches"
    res,x = [],data()
    for _ in range(times):
        model.zero_grad()
        with around: run(model, x)
        res.append({k:None if p.grad is None else p.grad.clone() for k,p in model.named_parameters()})
    return res

def close(got, want, tol):
    if want is None or got is None: return want is got
    return (got-want).norm()<=tol*want.norm()+1e-7

def check(make, run=backward, tol=.02, inference=True):
    """All batches have the same gradients, which are near autocast's and float32's

    And what they return in training they return without gradients, too."""
    model = make()
    half = half_precision(model, bf16)
    first,*others = grads(model, half, run)
    with half:
        outs = [model(data()),*without_gradients(model, data(), inference=inference),model(data())]
        assert all(same(o.detach(), outs[0].detach()) for o in outs)
    others += grads(model, half, run) # predictions in between are no obstacle
    for o in others: assert all(close(o[k], g, 0) for k,g in first.items()), 'not those of the first call'
    for around,limit in ((autocast(),tol),(nullcontext(),3*tol)):
        want = grads(make(), around, run)[0]
        assert all(close(first[k], g, limit) for k,g in want.items()), (around,first,want)

class Casts(TorchDispatchMode):
    "Casts from float32 to half precision or back: how many tensors each common one has, and how many single ones"
    def __init__(self): super().__init__(); self.together,self.single = [],0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._foreach_copy_: self.together.append(len(args[0]))
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].dtype==torch.float32: self.single += 1
        return func(*args, **(kwargs or {}))

# --- What is cast

@pytest.mark.parametrize('node_bytes,nodes', [(2**25,[6]), (16700,[4,2])])
def test_once(node_bytes, nodes, monkeypatch):
    """From the second call on one operation casts all weights, and one casts their gradients back

    Or one for each node of `node_bytes`, so that gradients in half precision don't all wait for the last."""
    monkeypatch.setattr(cast, 'node_bytes', node_bytes)
    model,x = Model(),data()
    half = half_precision(model, bf16)
    for together,single in (([],7),(nodes,1),(nodes,1)): # the input is cast, too
        with half,Casts() as forward: loss = model(x).sum()
        with half,Casts() as back: loss.backward()
        assert forward.together==together==back.together[::-1] and forward.single==single
    check(Model)

def test_size_of_a_node(monkeypatch):
    "At most `node_bytes`, or one layer that has more"
    monkeypatch.setattr(cast, 'node_bytes', 600)
    class Heads(nn.ModuleList):
        def forward(self, x): return sum(o(x).sum() for o in self)
    model = Heads([nn.Linear(8, n, bias=False) for n in (20,30,10,3,40,1,12,12,12)]) # of 16 bytes a row
    half,x = half_precision(model, bf16),data()[:,:8]
    for together in ([],[1,1,2,1,3,1]):
        with half,Casts() as forward: model(x)
        assert forward.together==together

def test_no_weights():
    "A norm may have none, as with `affine=False`"
    def _make():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64,64), nn.GroupNorm(2, 64, affine=False), nn.Linear(64,1))
    check(_make)

def test_memory_format():
    "A copy has that of its weight, and the gradient, too: a convolution in `channels_last` stays so"
    weight = nn.Parameter(torch.randn(4,3,3,3).to(memory_format=torch.channels_last))
    copy, = cast.CastAll.apply(bf16, weight)
    copy.square().sum().backward()
    for o in (copy,weight.grad): assert o.is_contiguous(memory_format=torch.channels_last)

# --- What a model does to its parameters in the middle of a call

class Written(Model):
    "Writes into the weights of a layer before it computes"
    def __init__(self, write): super().__init__(); self.write = write
    def forward(self, x):
        x = self.a(x).tanh()
        with torch.no_grad(): self.write(self.b)
        return self.c(self.b(x).tanh())

def mul(m): m.weight.mul_(1.5)
def mul_data(m): m.weight.data.mul_(1.5)
def assign_data(m): m.weight.data = m.weight.data*1.5
def replace(m): m.weight = nn.Parameter(m.weight*1.5)
def other_bias(m): m.bias = nn.Parameter(torch.full((64,), .5)) if m.bias is None else None

class Pruned(Model):
    "Takes numbers out of a weight in the middle of its second call"
    def __init__(self): super().__init__(); self.b,self.calls = nn.Linear(64, 64, bias=False),0
    def forward(self, x):
        x,self.calls = self.a(x).tanh(),self.calls+1
        if self.calls==2: prune.l1_unstructured(self.b, 'weight', .9)
        return self.c(self.b(x).tanh())

class Momentum(nn.Module):
    "As much code of momentum encoders does it: in place, through `.data`"
    def __init__(self):
        super().__init__()
        self.q,self.k = [nn.Sequential(nn.Linear(64,64), nn.LayerNorm(64)) for _ in range(2)]
        self.k.requires_grad_(False)
    def forward(self, x):
        q = self.q(x)
        with torch.no_grad():
            for a,b in zip(self.q.parameters(), self.k.parameters()): b.data.mul_(.5).add_(a.data, alpha=.5)
            k = self.k(x)
        return (q*k).sum(1)

class Clamped(nn.Linear):
    "Keeps its weights small"
    def forward(self, x):
        with torch.no_grad(): self.weight.clamp_(-.2, .2)
        return super().forward(x)

class Codebook(nn.Embedding):
    "Rows that follow the inputs next to them, in place of which they are returned"
    def __init__(self, *args): super().__init__(4, 64); self.weight.requires_grad_(False)
    def forward(self, x):
        nearest = torch.cdist(x.detach().float(), self.weight).argmin(1)
        for i in nearest.unique(): self.weight.data[i].lerp_(x.detach()[nearest==i].float().mean(0), .5)
        return x+(super().forward(nearest)-x).detach()

class Borrows(Model):
    "Computes with other weights in place of its own, and then with its own, which have changed where they lie"
    def forward(self, x):
        own,x = self.b.weight.data,self.a(x).tanh()
        self.b.weight.data = 2*own
        x = self.b(x).tanh()
        self.b.weight.data = own.mul_(-1)
        return self.c(self.b(x).tanh())

def between(kind): return lambda: nn.Sequential(nn.Linear(64,64), kind(64, 64), nn.Linear(64,1))

writes = dict(mul=mul, assign_data=assign_data, replace=replace, other_bias=other_bias)
kinds = dict({k:partial(Written, o) for k,o in writes.items()}, pruned=Pruned, momentum=Momentum,
             borrows=Borrows, clamped=between(Clamped), codebook=between(Codebook))

@pytest.mark.parametrize('kind', kinds)
def test_written(kind):
    "The layer computes with what was written, in the same call, and the model keeps it; without gradients, too"
    def run(half):
        torch.manual_seed(0)
        model,x,seen = kinds[kind](),data(),[]
        around = half_precision(model, bf16) if half else nullcontext()
        for i in range(4):
            with around, torch.set_grad_enabled(i!=2):
                loss = model(x).square().mean()
                if i!=2: loss.backward()
            known = [p for p in model.parameters() if p.grad is not None]
            seen += [flat(model.state_dict().values()),flat([p.grad for p in known]) if known else None]
            with torch.no_grad():
                for p in known: p -= .1*p.grad
            model.zero_grad()
        assert_plain(model)
        return seen
    for got,want,tol in zip(run(True), run(False), [.01,.07]*4, strict=True): assert close(got, want, tol), kind

def test_replaced_without_a_copy():
    "A new parameter over the old one's memory, with the same version, gets the gradient"
    def wrap(m): m.weight = nn.Parameter(m.weight.data)
    model = Written(wrap)
    with half_precision(model, bf16):
        for _ in range(2): # the second call casts
            model(data()).sum().backward()
            assert model.b.weight.grad is not None

def test_limit_of_data():
    "A trained weight that is written in place through `.data` counts from the next call on, as the page says"
    model,x = Written(mul_data),data()
    with half_precision(model, bf16):
        for _ in range(2): model(x)
        before = model.b.weight.detach().clone()
        stale = model(x)
        assert torch.equal(model.b.weight, before*1.5)
        model.write = lambda m: None
        fresh = model(x)
    assert not torch.equal(stale, fresh)

def test_not_cast_in_vain():
    "A layer that a call writes into, or doesn't use any more, is left to autocast from then on"
    for model,uses,casts in ((Written(mul), [True]*4,                      [[],[6],[4],[4]]),
                             (Branches(),   [True,True,False,True,True], [[],[6],[6],[4],[4]])):
        half = half_precision(model, bf16)
        for model.use,together in zip(uses, casts, strict=True):
            with half,Casts() as forward: model(data())
            assert forward.together==together

# --- Which layers a call uses, and how

class Frozen(Model):
    "Freezes one layer between two uses of it, and another, trained when it was cast, before the first"
    def forward(self, x):
        self.b.requires_grad_(False)
        x = self.b(self.a(x).tanh()).tanh()
        self.a.requires_grad_(False)
        self.b.requires_grad_(True)
        x = self.b(self.a(x).tanh()).tanh()
        self.a.requires_grad_(True)
        return self.c(x)

class Repeated(Model):
    def forward(self, x):
        for _ in range(3): x = self.b(self.a(x).tanh()).tanh()
        return self.c(x)

class CallsItself(Model):
    def forward(self, x, deep=2):
        x = self.b(self.a(x).tanh()).tanh()
        return self(x, deep-1) if deep else self.c(x)

class Tied(Model):
    "Three uses, so that the order in which gradients add up can be seen"
    def __init__(self): super().__init__(); self.b.weight = self.a.weight
    def forward(self, x): return super().forward(self.a(x).tanh())

class NoGrad(Model):
    "Teacher and student in one call"
    def forward(self, x):
        with torch.no_grad(): teacher = super().forward(x)
        return super().forward(x)-.5*teacher

class OnlyBiases(Model):
    def __init__(self):
        super().__init__()
        for m in (self.a,self.b,self.c): m.weight.requires_grad_(False)

class ComputedBiases(Model):
    "By a parametrization, of a norm, too, and by hand"
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(self.a, nn.LayerNorm(64))
        for m in (self.a[1],self.b): parametrize.register_parametrization(m, 'bias', nn.Softplus())
        bias = self.c.bias
        del self.c.bias
        self.c.bias = bias.detach()+.5

class WasPruned(Model):
    "For good: the weights are registered after the biases then, of a norm, too"
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(self.a, nn.GroupNorm(2, 64))
        for m in (self.a[1],self.b):
            prune.l1_unstructured(m, 'weight', .5)
            prune.remove(m, 'weight')

class Hyper(Model):
    "Computes a weight for a layer"
    def forward(self, x):
        w = self.b.weight*self.a(x).mean()
        return self.c(functional_call(self.b, {'weight':w}, (x,)).tanh())

class Energy(Model):
    "Forces: a derivative inside `forward`, of which the loss is differentiated, too"
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

models = [Model,Frozen,Repeated,CallsItself,Tied,NoGrad,OnlyBiases,ComputedBiases,WasPruned,Hyper,
          Energy]

@pytest.mark.parametrize('make', models)
def test_same_as_autocast(make): check(make, tol=.05, inference=make is not Energy) # which computes gradients

def test_grad_inside_no_grad():
    "Gradients that are switched on inside a call without"
    class Adapts(Model):
        def forward(self, x):
            with torch.enable_grad(): g, = torch.autograd.grad(super().forward(x).sum(), self.b.weight)
            return x@g
    model,x = Adapts(),data()
    with half_precision(model, bf16),torch.no_grad(): res = [model(x) for _ in range(3)]
    want = Adapts()(x)
    for o in res: assert close(o, want, .05) and torch.equal(o, res[0])

def penalty(model, x):
    "A gradient penalty"
    x = x.clone().requires_grad_()
    out = model(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean()+(g.norm(dim=1)-1).square().mean()).backward()

def two_calls(model, x): (model(x).square().mean()+model(2*x).abs().mean()).backward()

def changed_between(model, x):
    "A weight is changed between two calls of the model in a batch"
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad(): model.b.weight.mul_(.5)
    model(x).square().mean().backward()
    with torch.no_grad(): model.b.weight.mul_(2)

def replaced_between(model, x):
    backward(model, x)
    own,model.b.weight = model.b.weight,nn.Parameter(model.b.weight.detach()*.5)
    backward(model, x)
    model.b.weight = own

def to_one_weight(model, x): model.b.weight.grad, = torch.autograd.grad(model(x).square().mean(), model.b.weight)

@pytest.mark.parametrize('run', [penalty,two_calls,changed_between,replaced_between,to_one_weight])
def test_batches(run): check(Model, run, tol=.05)

# --- torch.func

@pytest.mark.parametrize('f', ['grad','vmap','jacrev','jacfwd','functional_call'])
def test_torch_func(f):
    model,x = Model(),data()
    params = {k:p.detach() for k,p in model.named_parameters()}
    def loss(params, x): return functional_call(model, params, (x,)).square().mean()
    runs = dict(grad=lambda: grad(loss)(params, x)['b.weight'], vmap=lambda: vmap(lambda o: model(o[None])[0])(x),
                jacrev=lambda: jacrev(model)(x[:1]), jacfwd=lambda: jacfwd(model)(x[:1]),
                functional_call=lambda: functional_call(model, {k:2*p for k,p in params.items()}, (x,)))
    want = runs[f]()
    with half_precision(model, bf16):
        for _ in range(2): backward(model, x) # so that weights are cast ahead
        for _ in range(2): assert close(runs[f](), want, .05)
        backward(model, x)

def test_inference_mode():
    "A prediction in it is no obstacle to training"
    model,x = Model(),data()
    want = model(x)
    with half_precision(model, bf16) as half:
        for mode in (torch.inference_mode,torch.no_grad,torch.inference_mode,torch.enable_grad):
            for _ in range(2):
                with mode(): assert close(model(x), want, .02)
    want = grads(Model(), nullcontext(), times=1)[0]
    for got in grads(model, half): assert all(close(got[k], want[k], .05) for k in want)

# --- Computing again

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm,self.lin,self.scale = nn.RMSNorm(64),nn.Linear(64,64),nn.Parameter(torch.ones(64))
    def forward(self, x, t): return x+self.scale*self.lin(self.norm(x))*t

class Positions(nn.Module):
    "A model with a position of its own, which calls checkpointed blocks and gives them a time that it was given"
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(1)
        self.pos,self.reentrant = nn.Parameter(torch.randn(64)),reentrant
        self.emb,self.blocks,self.head = nn.Linear(64,64),nn.ModuleList([Block() for _ in range(2)]),nn.Linear(64,1)
    def forward(self, x, t):
        x = self.emb(x)+self.pos
        for o in self.blocks:
            x = o(x, t) if self.reentrant is None else checkpoint(o, x, t, use_reentrant=self.reentrant)
        return self.head(x)

def timed(model, x): model(x, torch.tensor([1.0009765625])).square().mean().backward()

@pytest.mark.parametrize('reentrant', [True,False])
def test_checkpointing(reentrant):
    "The same bits with and without, also in a block that a model with a position calls"
    def run(reentrant):
        model = Positions(reentrant)
        return grads(model, half_precision(model, bf16), timed)
    assert same(run(reentrant), run(None))

class Reverse(torch.autograd.Function):
    "Half of a reversible block: keeps no activations, and computes again outside of autocast"
    @staticmethod
    def forward(ctx, x, f, *params):
        ctx.f = f
        with torch.no_grad(): res = f(x)
        ctx.save_for_backward(x.detach())
        return res
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad(),torch.autocast('cpu', enabled=False):
            x = x.detach().requires_grad_()
            ctx.f(x).backward(g)
        return x.grad,None,*[None for _ in ctx.f.parameters()]

class Reversible(nn.Module):
    def __init__(self, direct):
        super().__init__()
        torch.manual_seed(1)
        self.first,self.f,self.last = nn.Linear(64,64),nn.Sequential(nn.Linear(64,64), nn.RMSNorm(64)),nn.Linear(64,1)
        self.direct = direct
    def forward(self, x):
        x = self.first(x)
        return self.last(self.f(x) if self.direct else Reverse.apply(x, self.f, *self.f.parameters()))

def test_reversible():
    "A layer that is given half precision outside of autocast computes in it, to the same bits"
    def run(direct):
        model = Reversible(direct)
        return grads(model, half_precision(model, bf16))
    assert same(run(False), run(True))

# --- DistributedDataParallel

class Branches(Model):
    "Uses its second layer only when told"
    use = True
    def forward(self, x):
        x = self.a(x).tanh()
        return self.c(self.b(x).tanh() if self.use else x)

def ddp_grads(model, x, uses, **kwargs):
    "Gradients of the second layer in each batch"
    ddp,res = DistributedDataParallel(model, **kwargs),[]
    half = half_precision(model, bf16)
    for use in uses:
        model.use = use
        model.zero_grad()
        with half: ddp(x).square().mean().backward()
        res.append(model.b.weight.grad is not None)
    return res

def test_ddp_unused(one_process):
    "DDP's own error, not gradients of zeros"
    with pytest.raises(RuntimeError, match='Expected to have finished reduction'):
        ddp_grads(Branches(), data(), [False,False,False])

def test_ddp_find_unused(one_process):
    assert ddp_grads(Branches(), data(), [False]*3, find_unused_parameters=True)==[False]*3

def test_ddp_reentrant_checkpoint(one_process):
    "Isn't counted twice"
    class Checkpointed(Branches):
        def forward(self, x): return self.c(checkpoint(self.b, self.a(x), use_reentrant=True))
    assert ddp_grads(Checkpointed(), data(), [True]*3)==[True]*3

def test_ddp_sends_early(one_process, monkeypatch):
    "The first bucket is sent while the backward pass of other layers is still to come"
    monkeypatch.setattr(cast, 'node_bytes', 2**12)
    model,differentiated,sent = nn.Sequential(*[nn.Linear(32,32) for _ in range(8)]),[],[]
    for m in model: m.register_full_backward_hook(lambda *args: differentiated.append(1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=.01)
    def note(state, bucket):
        sent.append(len(differentiated))
        fut = torch.futures.Future()
        fut.set_result(bucket.buffer())
        return fut
    ddp.register_comm_hook(None, note)
    half = half_precision(model, bf16)
    for _ in range(3):
        sent.clear()
        differentiated.clear()
        model.zero_grad()
        with half:
            with Casts() as forward: loss = ddp(torch.ones(2,32)).sum()
            loss.backward()
    assert forward.together and len(sent)>2 and sent[0]<=4 and len(differentiated)==8

# --- Ctrl-C

def test_interrupted():
    "At any line: nothing is left, and the next batch has the numbers that it would have had"
    model,x = Positions(),data()
    half = half_precision(model, bf16)
    want = grads(model, half, timed)[0]
    def batch():
        with half: timed(model, x)
    n = 1
    while interrupted(batch, n, 'cast.py', 'ways.py', 'own.py', 'modules.py', 'turn_on', 'turn_off', '_whole'):
        assert_plain(model)
        assert same(grads(model, half, timed, times=1)[0], want), n
        n += 17
    assert n>400
