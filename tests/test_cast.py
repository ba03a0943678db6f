"""The one cast: its weights give the numbers that autocast's casts give, whatever a model does with them meanwhile

Cases run several batches in one `with`, as the first call of a model casts nothing ahead, and are compared with
autocast. Layers are 64 wide, so that their biases lie in one block of memory, as in most models."""
from torch.func import functional_call,grad,jacfwd,jacrev,vmap
from torch.nn.utils import parametrize,prune
from torch.utils.checkpoint import CheckpointPolicy,create_selective_checkpoint_contexts

from learners import *
from mp_callbacks.core import cast
from tracing import interrupted

def data(): return torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

def plain(m, x): return m.c(m.b(m.a(x).tanh()).tanh())

def net(f=plain, **parts):
    "Three layers, and what `f` does with them"
    torch.manual_seed(1)
    return Does(f, **{**dict(a=nn.Linear(64,64), b=nn.Linear(64,64), c=nn.Linear(64,1)), **parts})

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
    half = unmeasured(model, bf16)
    first,*others = grads(model, half, run)
    with half:
        outs = [model(data()),*without_gradients(model, data(), inference=inference),model(data())]
        assert all(same(o.detach(), outs[0].detach()) for o in outs)
    others += grads(model, half, run) # predictions in between are no obstacle
    for o in others: assert all(close(o[k], g, 0) for k,g in first.items()), 'not those of the first call'
    for around,limit in ((autocast(),tol),(nullcontext(),3*tol)):
        want = grads(make(), around, run)[0]
        assert all(close(first[k], g, limit) for k,g in want.items()), (around,first,want)

class Casts(Operations):
    "Casts from float32 to half precision or back: how many tensors each common one has, and how many single ones"
    def __init__(self): super().__init__(self.count); self.together,self.single = [],0
    def count(self, func, args, res):
        if func.overloadpacket is torch.ops.aten._foreach_copy_: self.together.append(len(args[0]))
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].dtype==torch.float32: self.single += 1

@pytest.mark.parametrize('node_bytes,nodes', [(2**25,[6]), (16640,[4,2])])
def test_once(node_bytes, nodes, monkeypatch):
    """From the second call on one operation casts all weights, and one casts their gradients back

    Or one for each node of `node_bytes`, so that gradients in half precision don't all wait for the last."""
    monkeypatch.setattr(cast, 'node_bytes', node_bytes)
    model,x = net(),data()
    half = unmeasured(model, bf16)
    for together,single in (([],7),(nodes,1),(nodes,1)): # the input is cast, too
        with half,Casts() as forward: loss = model(x).sum()
        with half,Casts() as back: loss.backward()
        assert forward.together==together==back.together[::-1] and forward.single==single
    check(net)

ways = [{}, dict(rules=False)]

def left():
    "How many tensors in half precision there are"
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return sum(o.dtype==bf16 for o in tensors if o.numel()) # after an error PyTorch 2.6 has some without a dtype

def predict(model, casts):
    "Predictions, of which as many are single casts"
    with torch.no_grad(),Casts() as seen: res = model(data())
    assert seen.single==casts and not seen.together
    return res

@pytest.mark.parametrize('options', ways)
def test_kept_without_gradients(options):
    "Calls without gradients in one `with` cast each weight once, a tied one, too; what has changed is cast again"
    before,model = left(),net(c=nn.Linear(64,64))
    model.c.weight = model.a.weight
    half = unmeasured(model, bf16, **options)
    with half:
        first = predict(model, 7)
        for _ in range(2): assert torch.equal(predict(model, 1), first)
        for change in (mul,assign_data,replace,wrap):
            with torch.no_grad(): change(model.b)
            with torch.no_grad(),autocast(): want = plain(model, data())
            assert same(predict(model, 3), want.float())
    assert_plain(model)
    del first,want
    assert left()<=before

@pytest.mark.parametrize('options', ways)
def test_kept_until_training(options):
    "A call with gradients drops the copies: optimizers may write weights through `.data`, which changes no version"
    model = net()
    with unmeasured(model, bf16, **options):
        predict(model, 7)
        for _ in range(2): backward(model, data())
        for p in model.parameters(): p.data.mul_(1.5)
        with torch.no_grad(),autocast(): want = plain(model, data())
        assert same(predict(model, 7), want.float())
        got = grads(model, nullcontext())[-1]
    assert all(close(got[k], g, 0) for k,g in grads(model, half_precision(model, bf16, **options))[-1].items())

@pytest.mark.parametrize('call', ['to_bf16','to_native_bf16'])
def test_kept_in_validation(call):
    "`validate` and `get_preds` cast each weight once, and leave no copy, after an exception, too"
    learn = getattr(get_learner(), call)()
    learn.fit(1)
    n,before = sum(isinstance(m, nn.Linear) for m in learn.model.modules()),left()
    for run in (learn.validate,learn.get_preds):
        with Casts() as seen: run()
        assert seen.single==2*n+len(learn.dls.valid) and not seen.together and left()<=before
    for event in ('after_pred','after_batch'):
        with pytest.raises(KeyError): learn.validate(cbs=Now(event, raises(KeyError("stop")), training=False))
        assert left()<=before

def written(write):
    "Writes into the weights of a layer before it computes, in the middle of a call"
    def _forward(m, x):
        x = m.a(x).tanh()
        with torch.no_grad(): m.write(m.b)
        return m.c(m.b(x).tanh())
    return net(_forward, write=write)

def mul(m): m.weight.mul_(1.5)
def assign_data(m): m.weight.data = m.weight.data*1.5
def replace(m): m.weight = nn.Parameter(m.weight*1.5)
def wrap(m): m.weight = nn.Parameter(m.weight.data) # over the old one's memory, with the same version
def other_bias(m): m.bias = nn.Parameter(torch.full((64,), .5)) if m.bias is None else None

def prune_later(m):
    "Takes numbers out of a weight in the second call"
    m.calls = getattr(m, 'calls', 0)+1
    if m.calls==2: prune.l1_unstructured(m, 'weight', .9)

def momentum():
    "As much code of momentum encoders does it: in place, through `.data`"
    def _forward(m, x):
        q = m.q(x)
        with torch.no_grad():
            for a,b in zip(m.q.parameters(), m.k.parameters()): b.data.mul_(.5).add_(a.data, alpha=.5)
            k = m.k(x)
        return (q*k).sum(1)
    q,k = [nn.Sequential(nn.Linear(64,64), nn.LayerNorm(64)) for _ in range(2)]
    return Does(_forward, q=q, k=k.requires_grad_(False))

class Codebook(nn.Embedding):
    "Rows that follow the inputs next to them, in place of which they are returned"
    def __init__(self): super().__init__(4, 64); self.weight.requires_grad_(False)
    def forward(self, x):
        nearest = torch.cdist(x.detach().float(), self.weight).argmin(1)
        for i in nearest.unique(): self.weight.data[i].lerp_(x.detach()[nearest==i].float().mean(0), .5)
        return x+(super().forward(nearest)-x).detach()

def borrows():
    "Computes with other weights in place of its own, and then with its own, which have changed where they lie"
    def _forward(m, x):
        own,x = m.b.weight.data,m.a(x).tanh()
        m.b.weight.data = 2*own
        x = m.b(x).tanh()
        m.b.weight.data = own.mul_(-1)
        return m.c(m.b(x).tanh())
    return net(_forward)

writes = dict(mul=mul, assign_data=assign_data, replace=replace, wrap=wrap, other_bias=other_bias,
              pruned=prune_later)
kinds = dict(momentum=momentum, borrows=borrows, codebook=lambda: net(b=Codebook()),
             **{k:partial(written, o) for k,o in writes.items()})

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
            for p in known: p.data.sub_(.1*p.grad) # its version stays
            model.zero_grad()
        assert_plain(model)
        return seen
    for got,want,tol in zip(run(True), run(False), [.01,.07]*4, strict=True): assert close(got, want, tol), kind

def test_limit_of_data():
    "A trained weight that is written in place through `.data` counts from the next call on, as the page says"
    model,x = written(lambda m: m.weight.data.mul_(1.5)),data()
    with half_precision(model, bf16):
        for _ in range(2): model(x)
        before = model.b.weight.detach().clone()
        stale = model(x)
        assert torch.equal(model.b.weight, before*1.5)
        model.write = noop
        fresh = model(x)
    assert not torch.equal(stale, fresh)

def test_not_cast_in_vain():
    "A layer that a call writes into, or doesn't use any more, is left to autocast from then on"
    for model,uses,casts in ((written(mul),             [True]*4,                     [[],[6],[4],[4]]),
                             (net(branches, use=True), [True,True,False,True,True], [[],[6],[6],[4],[4]])):
        half = half_precision(model, bf16)
        for model.use,together in zip(uses, casts, strict=True):
            with half,Casts() as forward: model(data())
            assert forward.together==together

def branches(m, x):
    "Uses its second layer only when told"
    x = m.a(x).tanh()
    return m.c(m.b(x).tanh() if m.use else x)

def frozen(m, x):
    "Freezes one layer between two uses of it, and another, trained when it was cast, before the first"
    m.b.requires_grad_(False)
    x = m.b(m.a(x).tanh()).tanh()
    m.a.requires_grad_(False)
    m.b.requires_grad_(True)
    x = m.b(m.a(x).tanh()).tanh()
    m.a.requires_grad_(True)
    return m.c(x)

def repeated(m, x):
    for _ in range(3): x = m.b(m.a(x).tanh()).tanh()
    return m.c(x)

def calls_itself(m, x, deep=2):
    x = m.b(m.a(x).tanh()).tanh()
    return m(x, deep-1) if deep else m.c(x)

def no_grad(m, x):
    "Teacher and student in one call"
    with torch.no_grad(): teacher = plain(m, x)
    return plain(m, x)-.5*teacher

def hyper(m, x):
    "Computes a weight for a layer"
    w = m.b.weight*m.a(x).mean()
    return m.c(functional_call(m.b, {'weight':w}, (x,)).tanh())

def energy(m, x):
    "Forces: a derivative inside `forward`, of which the loss is differentiated, too"
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(plain(m, x).sum(), x, create_graph=True)[0]

def adapts(m, x):
    "Gradients of weights, which may be switched on inside a call without"
    with torch.enable_grad(): g, = torch.autograd.grad(plain(m, x).sum(), m.b.weight)
    return plain(m, x)+x@g

def tied():
    "Several uses, one in float32, so that the order in which gradients add up can be seen"
    m = net(lambda m,x: plain(m, m.a(x).tanh())+m.a.weight.square().sum())
    m.b.weight = m.a.weight
    return m

def only_biases():
    m = net()
    for o in (m.a,m.b,m.c): o.weight.requires_grad_(False)
    return m

def computed_biases():
    "By a parametrization, of a norm, too, and by hand"
    m = net()
    m.a = nn.Sequential(m.a, nn.LayerNorm(64))
    for o in (m.a[1],m.b): parametrize.register_parametrization(o, 'bias', nn.Softplus())
    m.c.bias = m.c._parameters.pop('bias').detach()+.5
    return m

def was_pruned():
    "For good: the weights are registered after the biases then, of a norm, too"
    m = net()
    m.a = nn.Sequential(m.a, nn.GroupNorm(2, 64))
    for o in (m.a[1],m.b):
        prune.l1_unstructured(o, 'weight', .5)
        prune.remove(o, 'weight')
    return m

def computes_biases(m, x):
    "By hand, in the middle of a call: in place of a parameter, and before one"
    bias = m.b._parameters.pop('bias')
    m.b.bias,m.c.__dict__['bias'] = 2*bias,2*m.c.bias
    res = plain(m, x)
    del m.b.bias,m.c.__dict__['bias']
    m.b.bias = bias
    return res

def test_written_with_autocast_off():
    "What is written through `.data` counts, as the layer casts its weights itself"
    def _zeroes(m, x):
        m.lin.weight.data.zero_()
        with torch.autocast('cpu', enabled=False): return m.lin(x.bfloat16())
    half = half_precision(Does(_zeroes, lin=nn.Linear(8,8,bias=False)), bf16)
    for _ in range(3):
        half.model.lin.weight.data.fill_(1.)
        with half: assert not half.model(torch.ones(2,8)).any()

def in_float64():
    m = net(lambda m,x: m.c(m.b(m.a(x).tanh().double()).float().tanh()))
    m.b.double()
    return m

uses = plain,frozen,repeated,calls_itself,no_grad,hyper,energy,adapts,computes_biases
changed = tied,in_float64,only_biases,computed_biases,was_pruned
models = {f.__name__:f for f in (*changed,*[functools.wraps(f)(partial(net, f)) for f in uses])}
models['norm_without_weights'] = lambda: net(b=nn.GroupNorm(2, 64, affine=False))

@pytest.mark.parametrize('name', models)
def test_same_as_autocast(name):
    check(models[name], tol=.05, inference=name not in ('energy','adapts')) # which compute gradients

def penalty(model, x):
    "A gradient penalty"
    x = x.clone().requires_grad_()
    out = model(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean()+(g.norm(dim=1)-1).square().mean()).backward()

def two_calls(model, x): (model(x).square().mean()+model(2*x).abs().mean()).backward()

def changed_between(model, x):
    "A weight is changed between two calls of the model in a batch"
    backward(model, x)
    with torch.no_grad(): model.b.weight.mul_(.5)
    backward(model, x)
    with torch.no_grad(): model.b.weight.mul_(2)

def replaced_between(model, x):
    backward(model, x)
    own,model.b.weight = model.b.weight,nn.Parameter(model.b.weight.detach()*.5)
    backward(model, x)
    model.b.weight = own

def to_one_weight(model, x): model.b.weight.grad, = torch.autograd.grad(model(x).square().mean(), model.b.weight)

@pytest.mark.parametrize('run', [penalty,two_calls,changed_between,replaced_between,to_one_weight])
def test_batches(run): check(net, run, tol=.05)

@pytest.mark.parametrize('f', ['grad','vmap','jacrev','jacfwd','functional_call'])
def test_torch_func(f):
    model,x = net(),data()
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

def block():
    "Has a scale of its own, and makes a time of the one that it is given"
    def _forward(m, x, t):
        t = t[:,None]*1000
        return x+m.scale*m.lin(m.norm(x))+m.embed((t*torch.linspace(.1, 1, 64)).sin())
    return Does(_forward, norm=nn.RMSNorm(64), lin=nn.Linear(64,64), embed=nn.Linear(64,64), scale=torch.rand(64)+.5)

def modules(m, block): return block
def functions(m, block): return lambda x,t: block(x+m.pos, t)*m.pos[:]

def stack(kind=modules, once=False, **kwargs):
    "Blocks, or one several times, in a model with a position of its own; with `kwargs` they are checkpointed"
    def _forward(m, x):
        x,t = m.first(x)+m.pos,x[:,0].sigmoid()
        for o in m.blocks:
            f = kind(m, o)
            x = checkpoint(f, x, t, **kwargs) if kwargs else f(x, t)
        return m.head(x)
    torch.manual_seed(1)
    blocks = nn.ModuleList([block()]*3 if once else [block() for _ in range(3)])
    return Does(_forward, pos=torch.randn(64), first=nn.Linear(64,64), blocks=blocks, head=nn.Linear(64,1))

@pytest.mark.parametrize('once', [False,True])
@pytest.mark.parametrize('reentrant', [True,False])
@pytest.mark.parametrize('kind', [modules,functions])
def test_checkpointing(kind, reentrant, once):
    "Modules and functions, also a block that is called several times: the bits of a run without, in each batch"
    def run(**kwargs):
        model = stack(kind, once, **kwargs)
        return grads(model, half_precision(model, bf16))
    assert same(run(use_reentrant=reentrant), run())

def products(ctx, op, *args, **kwargs):
    "Those of matrices are kept, and the rest is computed again"
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

@pytest.mark.parametrize('kind', [modules,functions])
def test_selective_checkpointing(kind):
    "Computes the same operations again, so no copy is taken there; layers elsewhere are cast at once, as ever"
    def run(**kwargs):
        model = stack(kind, **kwargs)
        with Casts() as casts: found = grads(model, half_precision(model, bf16))
        return found,max(casts.together, default=0)
    found,together = run(use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, products))
    assert same(found, run()[0]) and together==4 # weights and biases of `first` and `head`

class Scale(torch.autograd.Function):
    "A product, as libraries write it"
    @staticmethod
    @torch.amp.custom_fwd(device_type='cpu')
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x*w
    @staticmethod
    @torch.amp.custom_bwd(device_type='cpu')
    def backward(ctx, g):
        x,w = ctx.saved_tensors
        return g*w,(g*x).sum(0)

again = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
def twice(f, *args): return reentrant(lambda *args: 1*reentrant(f, *args), *args)
def sums_and_products(x, w): return (x*w+w).sin()

@pytest.mark.parametrize('how', [again,reentrant,twice])
@pytest.mark.parametrize('f', [sums_and_products,Scale.apply])
@pytest.mark.parametrize('view', [noop,lambda w: w[:]])
def test_checkpointed_arguments(f, how, view):
    """An own parameter, or a view, that is given to a part that is computed again is one there, too

    But where it isn't reentrant, a function with a gradient of its own gets back its parameter as autocast has it."""
    def run(how):
        model = net(lambda m,x: m.c(how(f, m.a(x), view(m.w))), w=torch.linspace(.5, 1.5, 64))
        return grads(model, half_precision(model, bf16))
    got,want = run(how),run(lambda f,*args: f(*args))
    if how is again and f==Scale.apply: assert all(close(o, want[0][k], .01) for k,o in got[0].items())
    else: assert same(got, want)

class Reverse(torch.autograd.Function):
    "Half of a reversible block: keeps no activations, and computes again outside of autocast"
    @staticmethod
    def forward(ctx, x, f):
        ctx.f,ctx.x = f,x.detach()
        return f(x)
    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad(),torch.autocast('cpu', enabled=False): ctx.f(ctx.x.requires_grad_()).backward(g)
        return ctx.x.grad,None

def test_reversible():
    "A layer that is given half precision outside of autocast computes in it, to the same bits"
    def run(b):
        model = net(lambda m,x: m.c(b(m.b, m.a(x))))
        model.b = nn.Sequential(model.b, nn.RMSNorm(64))
        return grads(model, half_precision(model, bf16))
    assert same(run(lambda f,x: Reverse.apply(x, f)), run(lambda f,x: f(x)))

def ddp_grads(f, uses, **kwargs):
    "Has the second layer of a model that computes `f` a gradient, in each batch?"
    model,res = net(f),[]
    ddp,half = DistributedDataParallel(model, **kwargs),unmeasured(model, bf16)
    for model.use in uses:
        model.zero_grad()
        with half: ddp(data()).square().mean().backward()
        res.append(model.b.weight.grad is not None)
    return res

def test_ddp_unused(one_process):
    "DDP's own error, not gradients of zeros"
    with pytest.raises(RuntimeError, match='Expected to have finished reduction'): ddp_grads(branches, [False]*3)

def checkpointed(m, x): return m.c(checkpoint(m.b, m.a(x), use_reentrant=True))

@pytest.mark.parametrize('f,kwargs,used', [(branches,dict(find_unused_parameters=True),False),(checkpointed,{},True)])
def test_ddp(f, kwargs, used, one_process):
    "What isn't used has no gradient, if DDP looks for it; what is checkpointed isn't counted twice"
    assert ddp_grads(f, [used]*3, **kwargs)==[used]*3

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

core = 'cast.py','ways.py','own.py','modules.py','turn_on','turn_off','_whole'
others = 'own.py','half.py'

@pytest.mark.parametrize('where,each', [(core,17),(others,3)], ids=['core','others'])
def test_interrupted(where, each):
    "By Ctrl-C at any line: nothing is left, and the next batch has the numbers that it would have had"
    model,x = stack(),data()
    half = half_precision(model, bf16)
    want = grads(model, half)[0]
    def batch():
        with half: backward(model, x)
    n = 1
    while interrupted(batch, n, *where):
        assert_plain(model, n)
        assert same(grads(model, half, times=1)[0], want), n
        n += each
    assert n>32*each
