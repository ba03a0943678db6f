"""Own parameters: rounded where they meet half precision in a sum or a product, plain for everybody else

And modules in float32: nothing that they pass on, write or attach is lost."""
import torch._dynamo
from torch._dynamo.utils import counters
from torch.func import functional_call,grad,jacrev,vmap
from learners import *
from mp_callbacks.core.own import OwnParameter

def float32(model): return nullcontext()
def close(got, want, tol=.02): return (got.float()-want.float()).norm()<=tol*want.float().norm()

def meets(f, *shape): return Does(lambda m,x: f(x, m.w), w=torch.rand(shape)+.5)

def meet(around, f, *shape, trained=True):
    "What `f` of an activation and a parameter returns, the same without gradients, and the parameter's gradient"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8,32), meets(f, *shape))
    seen,w = returned(model[1]),model[1].w.requires_grad_(trained)
    with around(model):
        model(x := numbers(shape[0] if shape==(32,32) else 4)[0])
        if seen[0].is_floating_point(): seen[0].float().square().sum().backward()
        without_gradients(model, x)
    assert len(seen)==5 and all(same(o.detach(), seen[0].detach()) for o in seen)
    assert w.grad is None or type(w.grad) is torch.Tensor and w.grad.dtype==f32
    return seen[0].detach(),w.grad

def rounding(f):
    "`f` with a rounded parameter"
    return lambda x,w: f(x, w.bfloat16())

def rounds(f, *shape, by_hand=None):
    "Is it what comes of a parameter that is rounded by hand, to the bit, and near float32's?"
    got,want = meet(half, f, *shape),meet(autocast, by_hand or rounding(f), *shape)
    assert got[0].dtype==bf16 and same(got, want)
    assert close(got[0], meet(float32, f, *shape)[0])

def as_autocast(f, *shape): assert same(meet(half, f, *shape), meet(autocast, f, *shape))

products = dict(
    mul        = lambda x,w: x*w,
    rmul       = lambda x,w: w*x,
    function   = lambda x,w: torch.mul(w, x),
    keyword    = lambda x,w: torch.mul(x, other=w),
    method     = lambda x,w: x.mul(w),
    multiply   = lambda x,w: x.multiply(w),
    quotient   = lambda x,w: x/w,
    rdiv       = lambda x,w: w/(x.abs()+1),
    **{o:(lambda x,w,o=o: getattr(torch, o)(x, w)) for o in ('div','divide','true_divide')},
    lerp       = lambda x,w: torch.lerp(x, 2*x, w))
sums = dict(
    add        = lambda x,w: x+w,
    radd       = lambda x,w: w+x,
    function   = lambda x,w: torch.add(w, x),
    alpha      = lambda x,w: torch.add(x, w, alpha=2),
    method     = lambda x,w: x.add(w),
    sub        = lambda x,w: x-w,
    minus      = lambda x,w: w-x,
    **{o:(lambda x,w,o=o: getattr(torch, o)(x, w)) for o in ('subtract','rsub')},
    where      = lambda x,w: torch.where(x>0, x, w),
    where_not  = lambda x,w: torch.where(x>0, w, x),
    method_too = lambda x,w: x.where(x>0, w),
    addcmul    = lambda x,w: torch.addcmul(w, x, x))
joins = dict( # of parameters as large as the activation
    class_token = lambda x,w: torch.cat([w[None,:1].expand(len(x), -1, -1), x[:,None]], 1), # as in a ViT
    cat        = lambda x,w: torch.cat([w,x]),
    columns    = lambda x,w: torch.cat((x,w), dim=1),
    keyword    = lambda x,w: torch.cat(tensors=[x,w]),
    **{o:(lambda x,w,o=o: getattr(torch, o)([x,w])) for o in ('concat','concatenate')},
    stack      = lambda x,w: torch.stack([w,x], 1))

@pytest.mark.parametrize('name', sums)
def test_sums(name):
    """Of as many numbers as fill a row, and not of fewer: these may be offsets, energies or degrees, in which rounding
    would take away more than it saves"""
    for many in ((32,),(4,32),(1,4,32)): rounds(sums[name], *many)
    for few in ((1,),(4,1)): as_autocast(sums[name], *few)
    assert meet(half, sums[name], 32, trained=False)[0].dtype==bf16

@pytest.mark.parametrize('name', products)
def test_products(name):
    "However few numbers: each stands for a whole row, as LayerScale and gates do"
    for shape in ((32,),(4,32),(1,),(4,1)): rounds(products[name], *shape)

@pytest.mark.parametrize('name', joins)
def test_joins(name): rounds(joins[name], 4, 32)

views = dict(
    none        = lambda w: w[None],
    all         = lambda w: w[:],
    slice       = lambda w: w[:4],
    row         = lambda w: w[1],
    dots        = lambda w: w[...,:32],
    view        = lambda w: w.view(2,2,32).view(4,32),
    view_as     = lambda w: w.view_as(w).reshape_as(w),
    reshape     = lambda w: w.reshape(-1).reshape(4,32),
    function    = lambda w: torch.unsqueeze(torch.reshape(w, (4,32)), 0),
    narrow      = lambda w: w.narrow(0,0,4),
    select      = lambda w: w.select(0,1),
    expand      = lambda w: w[:1].expand(4,-1),
    expand_as   = lambda w: w[:1].expand_as(w),
    broadcast   = lambda w: torch.broadcast_to(w[0], (4,32)),
    unsqueeze   = lambda w: w.unsqueeze(0),
    squeeze     = lambda w: w[None].squeeze(0),
    permute     = lambda w: w.permute(1,0).movedim(0,1),
    transpose   = lambda w: w.transpose(0,1).contiguous().swapaxes(0,1),
    flatten     = lambda w: w.flatten().unflatten(0, (4,32)),
    repeat      = lambda w: w[:1].repeat(2,1).tile(2,1),
    interpolate = lambda w: F.interpolate(w[None,:,:16], size=32, mode='linear'),
    itself      = lambda w: w.float().contiguous().to('cpu'),
    keyword     = lambda w: torch.unsqueeze(input=w, dim=0),
    squeezed    = lambda w: torch.squeeze(input=w, dim=0))

@pytest.mark.parametrize('name', views)
def test_views(name):
    "Are what they are views of, or its numbers in another shape or number"
    v = views[name]
    rounds(lambda x,w: x+v(w), 4, 32, by_hand=lambda x,w: x+v(w).bfloat16())
    rounds(lambda x,w: v(w)*x, 4, 32, by_hand=lambda x,w: v(w).bfloat16()*x)

rows = torch.arange(4)
computed = dict(
    index        = lambda w: w[rows],
    list         = lambda w: w[[0,1,2,3]],
    mask         = lambda w: w[rows>=0],
    column       = lambda w: w[:,rows[:1]],
    lookup       = lambda w: F.embedding(rows, w),
    index_select = lambda w: w.index_select(0, rows),
    detach       = lambda w: w.detach(),
    data         = lambda w: w.data,
    clone        = lambda w: w.clone(),
    exp          = lambda w: w.exp(),
    times        = lambda w: 2*w,
    minus        = lambda w: 1-w,
    sum          = lambda w: w.sum(0),
    split        = lambda w: w.split(2)[0].sum()+torch.split(w, [1,3])[1].sum(),
    copied       = lambda w: torch.zeros(4,32).copy_(w))

@pytest.mark.parametrize('name', computed)
def test_computed(name):
    "What is indexed, detached or computed from a parameter is an ordinary float32 tensor"
    v = computed[name]
    as_autocast(lambda x,w: x+v(w), 4, 32)
    as_autocast(lambda x,w: v(w)*x, 4, 32)

others = dict(
    float      = lambda x,w: x.float()+w,
    alone      = lambda x,w: w[0]*w,
    scalar     = lambda x,w: x.mean()+w,
    greater    = lambda x,w: x>w,
    equal      = lambda x,w: w==x,
    pow        = lambda x,w: (x.abs()+1)**w,
    clamp      = lambda x,w: x.clamp(max=w),
    max        = lambda x,w: torch.max(x, w),
    number     = lambda x,w: x+w[0,0],
    matmul     = lambda x,w: x@w,
    rmatmul    = lambda x,w: w.T@x.T,
    einsum     = lambda x,w: torch.einsum('bi,io->bo', x, w),
    linear     = lambda x,w: F.linear(x, w, w[0]),
    baddbmm    = lambda x,w: torch.baddbmm(w[None], x[None], w[None]),
    layer_norm = lambda x,w: F.layer_norm(x, (32,), w[0], w[1]),
    softplus   = lambda x,w: x*F.softplus(w),
    mse        = lambda x,w: F.mse_loss(x, w),
    # PyTorch rounds the result to the dtype of the activation, so the parameter needs no rounding before
    **{f'{f.__name__}_{n}':(lambda x,w,f=f,n=n: f(x.clone(), w[0,:n])) for n in (1,32)
       for f in (operator.iadd,operator.isub,operator.imul,Tensor.add_,Tensor.sub_,Tensor.mul_)},
    written    = lambda x,w: x.clone().copy_(w),
    # one number in another shape is one number
    expand     = lambda x,w: x+w[0,:1].expand(32,32),
    expand_as  = lambda x,w: x+w[0,:1].expand_as(x),
    tile       = lambda x,w: x+w[0,:1].repeat(32,32),
    cat        = lambda x,w: torch.cat([x[:,:15],w[:1,:15]]),
    # what is larger than the activation is none: distances to prototypes, scores of pairs of labels that a CRF adds up
    pairs      = lambda x,w: x[:,None]+w[:4],
    prototypes = lambda x,w: x[:,None]-w,
    scores     = lambda x,w: w+x[0,:1],
    outer      = lambda x,w: x[:,:1]*w[0])

@pytest.mark.parametrize('name', others)
def test_others(name):
    "All other functions are left to autocast: comparisons, products of matrices, norms, losses"
    as_autocast(others[name], 32, 32)

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
    assert {o.dtype for o in run(half)}=={f32} and same(run(half), run(autocast))

def class_and_dtype(around, f):
    "What `f` returns for an image of fastai's"
    model = nn.Sequential(nn.Linear(8,32), meets(f, 32, 32))
    seen = returned(model[1])
    with around(model): model(TensorImage(numbers(32)[0]))
    return type(seen[0]),seen[0].dtype

rounded = {f'{kind}_{k}':f for kind,fs in dict(sum=sums, product=products, join=joins).items() for k,f in fs.items()}

@pytest.mark.parametrize('name', [*rounded,*(o for o in others if o not in ('alone','baddbmm','equal'))])
def test_class_of_an_activation(name):
    "What is an image for fastai stays one where it meets a parameter, or a view of one, and what isn't rounded, too"
    f = {**others, **rounded}[name]
    want = (TensorImage,bf16) if name in rounded else class_and_dtype(autocast, f)
    for v in (noop,lambda w: w[:]): assert class_and_dtype(half, lambda x,w: f(x, v(w)))==want

@pytest.mark.parametrize('name', ['expand_as','view_as','reshape_as'])
def test_shape_of_an_image(name):
    "A view in the shape of an image of fastai's is one of the parameter: rounded, unless it has a few numbers"
    def _f(x, w): return getattr(w, name)(x)+x
    assert class_and_dtype(half, _f)==(TensorImage,bf16)
    def _few(x, w): return w[0,:1].expand_as(x)+x
    assert class_and_dtype(half, _few)==class_and_dtype(autocast, _few)
    def _of_image(x, w): return getattr(x, name)(w)
    assert class_and_dtype(half, _of_image)==class_and_dtype(autocast, _of_image)

ids,chosen = torch.tensor([0,2]),torch.tensor([True,False,True,False])
rows_of = ids[:,None].expand(2,32)

def put(index): return lambda x,w: (x.__setitem__(index, w), x)[1]

written = dict( # rows of an activation
    mask           = put(chosen),
    rows           = put(ids),
    list           = put([0,2]),
    tuple          = put((ids,slice(None))),
    put            = lambda x,w: x.put(ids, w[0,:2]),
    index_put      = lambda x,w: x.index_put((ids,), w),
    index_put_     = lambda x,w: x.index_put_((ids,), w, accumulate=True),
    index_add      = lambda x,w: x.index_add(0, ids, w),
    function       = lambda x,w: torch.index_add(x, 0, ids, source=w),
    keywords       = lambda x,w: torch.index_add(input=x, dim=0, index=ids, source=w),
    index_add_     = lambda x,w: x.index_add_(0, ids, w, alpha=.5),
    index_copy_    = lambda x,w: x.index_copy_(0, ids, w),
    scatter        = lambda x,w: x.scatter(0, rows_of, w),
    scatter_       = lambda x,w: x.scatter_(0, rows_of, src=w),
    scatter_add    = lambda x,w: x.scatter_add(0, rows_of, w),
    scatter_reduce = lambda x,w: x.scatter_reduce(0, rows_of, w, 'amax'),
    masked_scatter = lambda x,w: x.masked_scatter(chosen[:,None], w),
    view           = lambda x,w: put(chosen)(x, w[1].expand(2,-1)))

@pytest.mark.parametrize('name', written)
def test_written_into_an_activation(name):
    "Mask tokens and prompts: into what may be float32 under autocast. PyTorch casts nothing there."
    f = written[name]
    rounds(lambda x,w: f(x.clone(), w), 2, 32, by_hand=rounding(lambda x,w: f(x.clone(), w)))
    as_autocast(lambda x,w: f(x.float(), w), 2, 32)

def test_written_at_an_index():
    "Of an image of fastai's: a tuple there doesn't mean the same as a list"
    def write(x, w):
        x = x.clone()
        x[0,1] = w
        return x
    model,x = meets(write, 4),TensorImage(torch.zeros(2,3,4))
    with half(model): res = model(x)
    assert type(res) is TensorImage and same(res, model(x))

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
        with half(model):
            model(numbers(4)[0])
            look(model[1])
    finally: hook.remove()
    assert len(found)==(12 if how is copy else 14)
    assert {type(t) for o in found for t in tensors(o)}=={nn.Parameter,torch.Tensor}
    forwards = [vars(m).get('forward') for o in found if isinstance(o, nn.Module) for m in o.modules()]
    assert not any('mp_callbacks' in type(o).__module__ for o in forwards)
    assert b'mp_callbacks.core.own' not in pickle.dumps(found)

def test_texts():
    "`repr` is that of a parameter"
    model = block()
    def texts():
        some = model.pos,model.gamma,model.gamma.data,model.gamma.detach()[:2]
        return [*map(repr, some),str(model.gamma),f'{model.gamma}']
    with half(model): inside = texts()
    assert inside==texts()

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
    a = half(model)
    with a: want = model(x)
    b = dict(model=half(model), part=half(model[3]), same=a).get(other) # a layer rounds what the part returns
    enter,leave = (partial(a.hold,0),partial(a.release,0)) if other=='installed' else (a.__enter__,a.__exit__)
    enter()
    b = b or half(model)
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
    (got,kinds,state),(want,want_kinds,want_state) = run(half),run(autocast)
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
    for around in (autocast,half):
        torch.manual_seed(0)
        model = Does(lambda m,x: transforms[name](m, m.first(x)), first=nn.Linear(8,32), lin=nn.Linear(32,32))
        calls,mine = returned(model.lin),around(model)
        outs = [batch(model, x, mine if around is half else around) for _ in range(3)]
        assert same(outs[1], outs[0]) and same(outs[2], outs[0])
        seen[around] = [(o.dtype,o.shape) for o in calls],outs[0]
    assert seen[half][0]==seen[autocast][0]
    assert close(flat(seen[half][1]), flat(seen[autocast][1]), .01)

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
    with unmeasured(model, bf16, keep):
        res = model(x)
        res.sum().backward()
    assert close(res, want)
