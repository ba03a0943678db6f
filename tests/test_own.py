"""Own parameters: rounded where they meet half precision in a sum or a product, plain for everybody else

And modules in float32: nothing that they pass on, write or attach is lost."""
import torch._dynamo
from torch._dynamo.utils import counters
from torch.func import functional_call,grad,jacrev,vmap
from learners import *
from mp_callbacks.core.own import OwnParameter

def float32(model): return nullcontext()
def counted(model):
    "As `half`, for tests that count the model's calls, or look into each"
    return unmeasured(model, bf16)
def close(got, want, tol=.02): return (got.float()-want.float()).norm()<=tol*want.float().norm()

def meets(f, *shape): return Does(lambda m,x: f(x, m.w), w=torch.rand(shape)+.5)

class OwnLinear(nn.Linear):
    def forward(self, x): return F.linear(x, self.weight)+self.bias

def test_whose():
    """Own parameters are those of modules with a `forward` of their own, but for norms and what is kept in float32

    And of PyTorch's attention on a CPU, which takes no fast path then: what it does with them is no sum or product."""
    ones = torch.ones(8)
    model = Does(lambda m,x: m.lin(x)+m.own, own=ones, f64=ones.double(), list=nn.ParameterList([ones]),
                 dict=nn.ParameterDict(dict(a=ones)), lin=nn.Linear(8,8), layer=OwnLinear(8,8), norm=nn.LayerNorm(8),
                 mine=type('MyNorm', (Does,), {})(noop, weight=ones), attend=nn.MultiheadAttention(8, 2),
                 emb=nn.Embedding(4, 8), kept=OwnLinear(8,8))
    params = dict(model.named_parameters())
    with half(model, keep='kept'):
        own = {k for k,p in model.named_parameters() if type(p) is OwnParameter}
        assert own=={'own','list.0','dict.a','layer.weight','layer.bias','attend.in_proj_weight','attend.in_proj_bias'}
        assert identical(model.parameters(), params.values())
        assert all(isinstance(p, nn.Parameter) for p in params.values())
    assert {type(p) for p in model.parameters()}=={nn.Parameter}

def test_tied():
    "A weight that a layer has, too"
    grads = {}
    for around in (float32,autocast,half):
        torch.manual_seed(0)
        lin = nn.Linear(8,8)
        model = Does(lambda m,x: m.lin(x)*m.w[0]@m.w, lin=lin, w=lin.weight)
        for _ in range(2): grads[around] = flat(batch(model, numbers(4)[0], around)[1:])
    assert close(grads[half], grads[float32], .03) and close(grads[half], grads[autocast], .03)

def meets_many(m, x):
    "As the `forward` of a block: a sum, a product, a join, and one of a list"
    x = x+m.pos[0,:1].expand(len(x),-1)
    x,y = torch.cat([x,m.gamma*m.lin(m.norm(x))]).chunk(2)
    return x+y+m.bias[0]
def block(): return Does(meets_many, pos=torch.randn(1,8,32), gamma=torch.rand(32), norm=nn.LayerNorm(32),
                         lin=nn.Linear(32,32), bias=nn.ParameterList([torch.rand(32)]))

def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,32), block(), nn.GELU(), block(), nn.Linear(32,1))

def test_modes():
    "Training, validation and predictions compute the same numbers from the same weights, also in the first call"
    model,x = blocks(),numbers(4)[0]
    for first in (torch.enable_grad,torch.no_grad,torch.inference_mode):
        with half(model):
            outs = []
            for mode in (first,torch.enable_grad,torch.no_grad,torch.inference_mode,torch.enable_grad):
                with mode(): outs.append(model.train(mode is torch.enable_grad)(x).clone())
        assert all(o.equal(outs[0]) for o in outs) and not outs[0].equal(model(x))

def test_steps_inside():
    "An optimizer that steps inside the `with` does what it does outside"
    def run(inside):
        model,x = blocks(),numbers(4)[0]
        around,opt = half(model),torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(3):
            with around:
                model(x).square().sum().backward()
                if inside: opt.step()
            if not inside: opt.step()
            opt.zero_grad()
        return [*model.parameters()]
    assert same(run(True), run(False))

def test_autocast_off():
    "Where its author has switched autocast off, nothing is rounded, nor in the backward pass of a function of his own"
    seen = []
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            ctx.w = w
            return x*w
        @staticmethod
        def backward(ctx, g):
            x,w = ctx.saved_tensors
            seen.extend([x*w,x*ctx.w])
            return g*w,(g*x).sum(0)
    def _careful(m, x):
        with torch.autocast('cpu', enabled=False): seen.extend([x*m.w,x+m.w[:]])
        return Scale.apply(x, m.w)
    def run(around):
        torch.manual_seed(0)
        seen.clear()
        model = nn.Sequential(nn.Linear(8,32), Does(_careful, w=torch.rand(32)+.5))
        batch(model, numbers(4)[0], around)
        return [o.detach() for o in seen]
    assert {o.dtype for o in run(counted)}=={f32} and same(run(counted), run(autocast))

nodes = dict( # where libraries put hooks
    expand_as  = lambda p: p.expand_as(p).grad_fn.next_functions[0][0], # apex, Horovod and others
    view_as    = lambda p: p.view_as(p).grad_fn.next_functions[0][0], # PyTorch
    index      = lambda p: p[None].grad_fn.next_functions[0][0])

@pytest.mark.parametrize('name', [*nodes,'multi_grad'])
def test_hooks_of_accumulators(name):
    "Of the node that adds up the gradient of a parameter run, also if they are made inside the `with`"
    model,x = nn.Sequential(nn.Linear(8,32), block()),numbers(4)[0]
    called,own = [],[p for m in (model[1],model[1].bias) for p in m.parameters(recurse=False)]
    with half(model):
        assert {*map(type, own)}=={OwnParameter}
        if name=='multi_grad': torch.autograd.graph.register_multi_grad_hook(own, called.extend)
        else:
            accumulators = [*map(nodes[name], own)]
            for o in accumulators: o.register_hook(lambda *args: called.append(args))
        model(x).sum().backward()
    assert len(called)==len(own)==3

def tensors(o):
    "All in `o`, also as parameters of a module"
    if isinstance(o, torch.Tensor): return [o]
    if isinstance(o, nn.Module): return [*o.parameters()]
    if isinstance(o, (Data,Frozen)): return tensors([o.a,o.b])
    return [t for x in (o.values() if isinstance(o, dict) else o) for t in tensors(x)]

def by_file(o):
    torch.save(o, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)

@pytest.mark.parametrize('how', [deepcopy,copy,by_pickle,by_file])
def test_copies(how):
    "Of modules, parameters, state and views, in the middle of a call too, are plain; a pickle doesn't name our classes"
    found,model = [],nn.Sequential(nn.Linear(8,32), block(), nn.Linear(32,1))
    def look(m, *_):
        if m is not model[1]: return
        with torch.no_grad():
            for o in (m.pos,m.state_dict(),nn.ParameterList([m.pos]),m.pos[0],m.gamma.detach(),[m.gamma]):
                found.append(how(o))
        if how is not copy: found.append(how(m)) # which shares its parameters
    hook = nn.modules.module.register_module_forward_hook(look) # of all modules, so that a pickle doesn't have it
    try:
        with counted(model):
            model(numbers(4)[0])
            look(model[1])
    finally: hook.remove()
    assert len(found)==(12 if how is copy else 14)
    assert {type(t) for o in found for t in tensors(o)}=={nn.Parameter,torch.Tensor}
    forwards = [vars(m).get('forward') for o in found if isinstance(o, nn.Module) for m in o.modules()]
    assert not any('mp_callbacks' in type(o).__module__ for o in forwards)
    assert b'mp_callbacks.core.own' not in pickle.dumps(found)

@pytest.mark.skipif(torch.__version__<'2.8', reason='torch.export of PyTorch before 2.8 takes no function as `forward`')
def test_exported_inside():
    "With plain parameters, and as under autocast"
    model,x = blocks(),numbers(4)[0]
    with half(model): exported = torch.export.export(model, (x,))
    assert {type(p) for p in exported.state_dict.values()}<={nn.Parameter,torch.Tensor}
    assert close(exported.module()(x), model(x), .05)
    torch.export.save(exported, file := io.BytesIO())
    assert b'mp_callbacks' not in file.getvalue()
    assert_plain(model)

def giving(pack):
    "Returns and keeps views of what is its own"
    def _forward(m, x):
        m.last,m.more = m.w[:4],dict(a=[m.w.view(-1)])
        m.register_buffer('now', m.w.detach()[0], persistent=False)
        return pack(m.lin(x), m.w[:4], m.w)
    return Does(_forward, lin=nn.Linear(8,8), w=torch.rand(8,8))

packs = dict(tensor=lambda x,v,w: v, tuple=lambda *o: o, list=lambda *o: [*o], dict=lambda x,v,w: dict(x=x, v=[v,w]),
             named=lambda x,v,w: Named(x, v), data=lambda x,v,w: Data(x, (v,)), frozen=lambda x,v,w: Frozen(v, {'w':w}))

@pytest.mark.parametrize('name', packs)
def test_returned_and_kept(name):
    "What the model returns is plain, and after the `with` so is what its modules keep; a parameter is itself"
    for inside in (False,True):
        model = gives = giving(packs[name])
        if inside: model = nn.Sequential(gives)
        with half(model):
            res = model(numbers(4)[0])
            found = tensors(res)
            assert {type(o) for o in found if o is not gives.w}=={torch.Tensor} and {o.dtype for o in found}=={f32}
        assert {type(o) for o in tensors([res,gives.last,gives.more,gives.now])}<={torch.Tensor,nn.Parameter}
        assert any(o is gives.w for o in found)==(name not in ('tensor','named','data'))
        for o in (gives.last,*gives.more['a']): assert b'mp_callbacks' not in pickle.dumps(o)

@pytest.mark.parametrize('other', ['model','part','same','later','installed'])
@pytest.mark.parametrize('last_first', [True,False])
def test_two(other, last_first):
    "Two on one model, or on a part of it: nobody takes off what another one has put on, in either order"
    model,x = blocks(),numbers(4)[0]
    a = counted(model)
    with a: want = model(x)
    b = dict(model=counted(model), part=counted(model[3]), same=a).get(other) # a layer rounds what the part returns
    enter,leave = (partial(a.hold,0),partial(a.release,0)) if other=='installed' else (a.__enter__,a.__exit__)
    enter()
    b = b or counted(model)
    b.__enter__()
    assert model(x).equal(want)
    on = [(a,leave),(b,b.__exit__)]
    on.pop(-1 if last_first else 0)[1]()
    if on[0][0].model is model: assert model(x).equal(want)
    else: assert isinstance(model[3].pos, OwnParameter)
    on[0][1]()
    assert_plain(model)

def test_moved_to_another_module():
    "Parameters of modules that were replaced meanwhile, and of the new ones, are plain, too"
    model,x = blocks(),numbers(4)[0]
    mine = half(model)
    with mine:
        model(x)
        old,model[1] = model[1],block()
        model(x)
    assert_plain(model)
    assert_plain(old)
    with mine: assert isinstance(model[1].pos, OwnParameter) and type(old.pos) is nn.Parameter
    mine.hold(0)
    del model[3]
    mine.release(0)
    assert_plain(model)

def writing(write):
    "Calls `write` with itself and a mean of activations"
    def _forward(m, x):
        x = m.lin(x)
        with torch.no_grad(): write(m, x.mean(0))
        return x*m.w
    torch.manual_seed(0)
    return Does(_forward, lin=nn.Linear(8,32), w=torch.rand(32)+.5)

def iadd_own(m, x): m.w += x

def taken(m):
    w = m.w
    del m.w
    return w

writes = dict(
    add         = lambda m,x: m.w.add_(x),
    iadd        = iadd_own,
    average     = lambda m,x: m.w.mul_(.9).add_(x, alpha=.1), # as teachers and codebooks have it
    mul         = lambda m,x: m.w.mul_(1+x),
    div         = lambda m,x: m.w.div_(1+x),
    sub         = lambda m,x: m.w.sub_(x),
    addcmul     = lambda m,x: m.w.addcmul_(x, x),
    lerp        = lambda m,x: m.w.lerp_(x.float(), .5),
    out         = lambda m,x: torch.add(x, 1, out=m.w),
    copy        = lambda m,x: m.w.copy_(x),
    clamp       = lambda m,x: m.w.clamp_(-.9, .9),
    data        = lambda m,x: m.w.data.mul_(1.5),
    assign_data = lambda m,x: setattr(m.w, 'data', m.w.data*1.5),
    set_slice   = lambda m,x: m.w.__setitem__(slice(16), x[:16]),
    set_view    = lambda m,x: m.w[:16].mul_(x[:16]),
    replace     = lambda m,x: setattr(m, 'w', nn.Parameter(m.w.detach()*1.5)),
    new         = lambda m,x: setattr(m, 'extra', nn.Parameter(m.w*2)),
    delete      = lambda m,x: m.register_parameter('w', taken(m)),
    to_buffer   = lambda m,x: setattr(m, 'w', taken(m).detach()),
    freeze      = lambda m,x: m.w.requires_grad_(False),
    toggle      = lambda m,x: m.w.requires_grad_(not m.w.requires_grad),
    attribute   = lambda m,x: setattr(m.w, 'tag', 1))

@pytest.mark.parametrize('name', writes)
def test_written(name):
    "In the middle of a call: the model computes with it, and keeps it, as under autocast, and no gradient is lost"
    def run(around):
        model,x = writing(writes[name]),numbers(4)[0]
        around,first,seen = around(model),model.w,[]
        for _ in range(2):
            model.zero_grad()
            with around: (res := model(x).float()).square().sum().backward()
            grads = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]
            seen.append([res.detach(),*grads])
        assert_plain(model)
        assert type(first) is nn.Parameter
        kinds = {k:(type(p),p.requires_grad,getattr(p, 'tag', 0)) for k,p in model.named_parameters()}
        return seen,kinds,model.state_dict()
    (got,kinds,state),(want,want_kinds,want_state) = run(counted),run(autocast)
    assert kinds==want_kinds and state.keys()==want_state.keys()
    assert all(close(state[k], want_state[k]) for k in state)
    assert all(close(a, b, .03) for g,w in zip(got, want) for a,b in zip(g, w, strict=True))

transforms = dict( # of torch.func, inside `forward`
    functional_call = lambda m,x: functional_call(m, {k:2*p for k,p in m.named_parameters()}, (x,)),
    same_parameters = lambda m,x: functional_call(m, dict(m.named_parameters()), (x,)),
    vmap            = lambda m,x: vmap(m)(x),
    vmap_layer      = lambda m,x: vmap(m.lin)(x),
    vmap_own        = lambda m,x: vmap(lambda o: o*m.w[:]+m.w)(x),
    vmap_weights    = lambda m,x: vmap(lambda w: (x*w).sum(0))(m.w.expand(4,32)),
    grad            = lambda m,x: grad(lambda o: m(o).square().sum())(x),
    grad_layer      = lambda m,x: grad(lambda o: m.lin(o).square().sum())(x),
    grad_of_weights = lambda m,x: grad(lambda p: functional_call(m, p, (x,)).sum())(dict(m.named_parameters()))['w']+x,
    jacrev_layer    = lambda m,x: jacrev(m.lin)(x[0]),
    vmap_of_grad    = lambda m,x: vmap(grad(lambda o: m(o).square().sum()))(x))

@pytest.mark.parametrize('name', transforms)
def test_transforms(name):
    "The same numbers in each call, those of autocast up to rounding"
    def _net():
        torch.manual_seed(0)
        inner = Does(lambda m,x: m.lin(x)*m.w+m.w, lin=nn.Linear(32,32), w=torch.rand(32)+.5)
        def _forward(m, x):
            x = m.first(x)
            return m.inner(x)+transforms[name](m.inner, x).sum(0) # the layers inside compute both ways
        return Does(_forward, first=nn.Linear(8,32), inner=inner)
    x = numbers(4)[0]
    want,auto = (batch(_net(), x, o) for o in (float32,autocast))
    mine = half(model := _net())
    first,*later = [batch(model, x, mine) for _ in range(3)]
    for o in later: assert same(o, first)
    errors = [max(map(off, o, want)) for o in (first,auto)]
    assert errors[0]<=3*errors[1], errors

@pytest.mark.parametrize('name', ['vmap_layer','grad_layer'])
def test_layer_in_a_transform(name):
    "That is only called inside one: in the dtype of autocast from the first call on"
    x,seen = numbers(4)[0],{}
    for around in (autocast,counted):
        torch.manual_seed(0)
        model = Does(lambda m,x: transforms[name](m, m.first(x)), first=nn.Linear(8,32), lin=nn.Linear(32,32))
        calls,mine = returned(model.lin),around(model)
        outs = [batch(model, x, mine if around is counted else around) for _ in range(3)]
        assert same(outs[1], outs[0]) and same(outs[2], outs[0])
        seen[around] = [(o.dtype,o.shape) for o in calls],outs[0]
    assert seen[counted][0]==seen[autocast][0]
    assert close(flat(seen[counted][1]), flat(seen[autocast][1]), .01)

compiled = dict(
    whole    = lambda m: torch.compile(m, backend='eager', fullgraph=True),
    in_place = lambda m: (m.compile(backend='eager', fullgraph=True), m)[1],
    part     = lambda m: nn.Sequential(m[0], torch.compile(m[1:], backend='eager', fullgraph=True)),
    blocks   = lambda m: ([o.compile(backend='eager') for o in (m[1],m[3])], m)[1])

@pytest.mark.parametrize('kind', compiled)
def test_compiled(kind):
    "Without breaks, and nothing is compiled again after the first batch of training and of validation"
    torch._dynamo.reset()
    counters.clear()
    model,x,graphs = compiled[kind](blocks()),numbers(4)[0],[]
    mine,want,auto = half(model),batch(blocks(), x, float32),batch(blocks(), x, autocast)
    for _ in range(3):
        got = batch(model, x, mine)
        with mine, torch.no_grad(): assert close(model(x), got[0], 1e-6)
        graphs.append(counters['stats']['unique_graphs'])
    assert graphs[0]==graphs[-1]>0 and not counters['graph_break'] and not counters['recompiles']
    assert off(flat(got), flat(want))<=3*off(flat(auto), flat(want))
    assert {type(p) for p in model.parameters()}=={nn.Parameter}

def inplace():
    def _forward(m, x):
        x = m.first(x)
        m.act(x)
        return m.last(x)
    return Does(_forward, first=nn.Linear(8,8), act=nn.ReLU(inplace=True), last=nn.Linear(8,1))

def attaches():
    def _forward(m, x):
        y = m.body(x)
        y.orig = y
        return m.end(y)
    return Does(_forward, body=nn.Linear(8,8), act=nn.GELU(), end=Does(lambda m,x: x+x.orig))

def skips():
    """Its parts take from a list and write into a dict, nested too, as decoders do with skip connections

    What the caller has there is the same tensors, with what was written into them."""
    def _pop(m, skips, seen):
        x = m.layer(skips.pop()+seen['more'][0])
        seen['out'],seen['n'] = x,seen['n']+1
        with torch.no_grad(): seen['more'][1].fill_(2)
        return x
    def _forward(m, x):
        y,zeros = m.down(x),m.down(x)*0
        skips,seen = [x,y],dict(n=0, x=y, more=[y,zeros])
        m.up(skips, seen)
        out = seen['out']
        skips.append(out)
        m.last(skips, seen)
        assert (len(skips),seen['n'],[*seen])==(1,2,['n','x','more','out'])
        assert skips[0] is x and seen['x'] is seen['more'][0] is y and seen['more'][1] is zeros and zeros.eq(2).all()
        return out+seen['out']+skips[0]
    up,last = (Does(_pop, layer=nn.Linear(8,8)) for _ in range(2))
    return Does(_forward, down=nn.Linear(8,8), up=up, last=last)

@pytest.mark.parametrize('make,keep', [(inplace,'act'), (attaches,'end'), (attaches,nn.GELU), (skips,('up','last'))])
def test_kept(make, keep):
    "What a module in float32 writes, takes out of a container or puts into it arrives; attributes go through a cast"
    torch.manual_seed(1)
    model,x = make(),numbers(16)[0]
    want = model(x).detach()
    with half_precision(model, bf16, keep):
        res = model(x)
        res.sum().backward()
    assert close(res, want)
