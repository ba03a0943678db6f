"""Numbers that mustn't be rounded: offsets, energies, states, positions, times and log-determinants in ordinary models

Each model is computed in float32, under autocast and in half precision: its errors are autocast's, up to rounding."""
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore:None of the inputs have requires_grad')

def normals(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

def outputs(make, args, around, inference):
    "What a model returns in a batch of training, without gradients, and in training again"
    torch.manual_seed(0)
    model,res = make(),[]
    around = around(model)
    for train in (True,False,True):
        with around:
            if train: (out := model(*args)).float().square().mean().backward()
            res += [out] if train else without_gradients(model, *args, inference=inference)
    return torch.stack([o.detach().float() for o in res])

def errors(make, args, unit, inference=True):
    "The largest of autocast, and of half precision, in `unit`s"
    full,auto,ours = (outputs(make, args, o, inference) for o in (lambda m: nullcontext(),autocast,half))
    assert ours.isfinite().all() and all(o.equal(ours[0]) for o in ours), 'not the same without gradients'
    return [((o-full).abs().max()/unit).item() for o in (auto,ours)]

def mlp(n, out, hidden=32): return nn.Sequential(nn.Linear(n,hidden), nn.GELU(), nn.Linear(hidden,out))

def revin(n):
    "Reversible instance normalization, as PatchTST has it: keeps mean and deviation of its input, and puts them back"
    def _forward(m, x, back=False):
        if back: return (x-m.bias)/m.weight*m.std+m.mean
        m.mean,m.std = x.mean(-1, keepdim=True).detach(),x.std(-1, keepdim=True).detach()
        return (x-m.mean)/m.std*m.weight+m.bias
    return Does(_forward, weight=torch.ones(n,1)*1.1, bias=torch.zeros(n,1)+.1)

def around_line(): return Does(lambda m,x: m.norm(m.lin(m.norm(x)), back=True), norm=revin(1), lin=nn.Linear(8,8))

def patchtst():
    def _forward(m, x):
        x = m.embed(m.revin(x).unflatten(-1, (8,4)))+m.pos
        return m.revin(m.head(F.gelu(x).flatten(2)), back=True)
    return Does(_forward, revin=revin(3), embed=nn.Linear(4,32), pos=torch.randn(8,32)*.1, head=nn.Linear(8*32,8))

class Denorm(Does): "Named as people name what undoes a norm"

def deviations():
    "Passes mean and deviation on"
    def _norm(m, x):
        mean,std = x.mean(-1, keepdim=True),x.std(-1, keepdim=True)
        return (x-mean)/std*m.gain,mean,std
    def _forward(m, x):
        x,*stats = m.norm(x)
        return m.denorm(m.body(x), *stats)
    denorm = Denorm(lambda m,x,mean,std: x/m.gain*std+mean, gain=torch.ones(3,1))
    return Does(_forward, norm=Does(_norm, gain=torch.ones(3,1)), body=mlp(32, 8), denorm=denorm)

series = 280+5*normals(16, 3, 32)

class Table(nn.Embedding): "A subclass, as people write it"

shifts = dict( # modules that return the energy of a species, of what they are for eight
    energies      = lambda o: nn.Embedding.from_pretrained(o[:,None], freeze=False),
    energies_sub  = lambda o: Table.from_pretrained(o[:,None], freeze=False),
    shifts        = lambda o: Does(lambda m,z: (m.scale[z]*m.shift[z])[...,None], shift=o, scale=torch.ones(8)),
    one_shift     = lambda o: Does(lambda m,z: m.shift.expand(z.numel()).view(*z.shape, 1), shift=o[:1]),
    shift_inside  = lambda o: o[:1]) # a parameter that is added to what the layers return

def energies(shift):
    "As SchNet: an energy of each atom that a network finds, and one of its species, around -1000"
    def _forward(m, z):
        shift = m.shift.expand(*z.shape, 1) if isinstance(m.shift, nn.Parameter) else m.shift(z)
        return (m.body(m.emb(z))+shift).squeeze(-1).sum(-1)
    shift = shifts[shift](-1030.57-13.3*torch.arange(8.))
    return Does(_forward, emb=nn.Embedding(8,32), body=mlp(32, 1), shift=shift)

species = torch.arange(48).view(8,6)%8

def euler():
    "40 steps of an explicit Euler method, of a state around 300"
    def _step(m, state): return state+.01*m.rate*m.f((state-300)/10)
    return nn.Sequential(*[Does(_step, rate=torch.full((16,), .5), f=mlp(16, 16))]*40)

def waves(): return Does(lambda m,d: (d[...,None]*torch.linspace(1, 20, 32)).sin()) # of distances or positions

def encoder():
    "Encodes the positions that it is given, then those that it predicts"
    def _encode(m, pos): return m.lin(m.waves(pos.squeeze(-1)*.1)*m.gain)
    encode = Does(_encode, gain=torch.ones(32), waves=waves(), lin=nn.Linear(32,16))
    return Does(lambda m,pos: m.last(m.encode(pos+m.head(m.encode(pos)))), encode=encode, head=nn.Linear(16,1),
                last=nn.Linear(16,1))

def forces():
    "Derivatives of an energy by positions"
    def _energy(m, pos):
        d = (pos[:,:,None]-pos[:,None]+.1).square().sum(-1).sqrt()
        return m.body(m.waves(d)*m.gain).sum((1,2,3))
    def _forward(m, pos):
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            return torch.autograd.grad(m.energy(pos).sum(), pos, create_graph=True)[0]
    return Does(_forward, energy=Does(_energy, gain=torch.ones(32), waves=waves(), body=mlp(32, 1)))

def egnn():
    "Moves points along their differences"
    def _move(m, pos):
        diff = pos[:,:,None]-pos[:,None]
        d2 = diff.square().sum(-1, keepdim=True)
        return pos+(diff/(d2.sqrt()+1)*m.move(m.edge(d2))*m.scale).mean(2)
    def _layer(): return Does(_move, scale=torch.tensor([.1]), edge=mlp(1, 16), move=nn.Linear(16,1))
    return nn.Sequential(_layer(), _layer(), _layer())

def embeds(n=32): return Does(lambda m,t: m.lin((t*torch.linspace(.1, 1, n)).sin()), lin=nn.Linear(n,n))
def column(t): return t[:,None] if t.dim()==1 else t

packs = dict( # how people pass a time on, and read it
    tensor = (noop,                     noop),
    tuple  = (lambda t: (t,),           lambda o: o[0]),
    dict   = (lambda t: {'t':t},        lambda o: o['t']),
    data   = (Data,                     lambda o: o.a),
    frozen = (lambda t: Frozen(t, [t]), lambda o: o.b[0]))

def block(again=False):
    "Gives the time that it makes to a module inside, which it computes `again` in the backward pass"
    def _forward(m, x, t):
        t = column(t*1000)
        t = checkpoint(m.embed, t+0*x[:,:1], use_reentrant=True) if again else m.embed(t)
        return x+m.gain*m.lin(x)+t
    return Does(_forward, gain=torch.ones(32), lin=nn.Linear(32,32), embed=embeds())

def timed(call, pack=None, again=False):
    "A `block` between layers, or one that returns, packed, a time from 0 to 1000 that it makes of one from 0 to 1"
    def _inner(m, x, t):
        if not pack: return m.times(x, t)
        x,t = m.times(x, t)
        return x+m.embed(column(packs[pack][1](t)))
    def _forward(m, x, t):
        x = m.first(x)
        if call=='inside': x = checkpoint(_inner, m, x, t, use_reentrant=True)
        elif call=='itself': x = checkpoint(m.times, x, t, use_reentrant=True)
        else: x = _inner(m, x, t)
        return m.last(x)
    times = Does(lambda m,x,t: (x*m.gain, packs[pack][0](t*1000)), gain=torch.ones(32)) if pack else block(again)
    return Does(_forward, first=nn.Linear(8,32), times=times, embed=embeds(), last=nn.Linear(32,4))

def coupling(flip):
    "A part of a flow: scales of its own add to the log-determinant"
    def _forward(m, x, logdet):
        a,b = x.chunk(2, 1)
        if flip: a,b = b,a
        s,t = m.net(a).tanh().chunk(2, 1)
        s,b = .1*s,b*(.1*s).exp()+t
        x = torch.cat([b,a] if flip else [a,b], 1)
        return x*m.log_scale.exp()*.4,logdet+m.log_scale.sum()+s.float().sum(1)
    return Does(_forward, net=mlp(32, 64), log_scale=torch.linspace(.5, 1.2, 64))

def actnorm():
    "Returns a log-determinant, too"
    def _forward(m, x, logdet): return x*m.logs.exp()+m.bias,logdet+m.logs.sum()*1024
    return Does(_forward, logs=normals(32)*.1, bias=normals(32))

def flow(parts, logdet=0., first=noop):
    def _forward(m, x):
        x,res = first(x),torch.full((len(x),), logdet)
        for o in m.parts: x,res = o(x, res)
        return res
    return Does(_forward, parts=nn.ModuleList(parts), first=first)

def crf(n=20):
    "The partition function as torchcrf computes it, of the scores of `n` labels"
    def _forward(m, x):
        e = m.emit(x)
        score = m.start+e[:1]
        for o in e[1:].repeat(8, 1)[:,None]: score = (score[:,:,None]+m.pairs+o[:,None]).logsumexp(1)
        return score.logsumexp(1)
    return Does(_forward, emit=nn.Linear(8,n), start=normals(n), pairs=normals(n,n))

points = 50+normals(4, 5, 3)
x,t = normals(8, 8),torch.linspace(.1, 1, 8)+2**-12
table = dict( # name -> model, arguments, how much is a large error, and whether it computes in inference mode
    patchtst    = (patchtst,                        [series], 5),
    deviations  = (deviations,                      [series], 5),
    revnorm     = (around_line,                     [normals(8,8)*5+300], 1),
    **{name:(partial(energies, name),               [species], 1) for name in shifts},
    euler       = (euler,                           [300+10*normals(8, 16)], 1),
    encoder     = (encoder,                         [50*normals(64, 1)], 1),
    forces      = (forces,                          [3*normals(2, 6, 3)], 1, False),
    egnn        = (egnn,                            [points], 1),
    time        = (partial(timed, 'plain'),         [x,t], 1),
    time_again  = (partial(timed, 'itself'),        [x,t], 1),
    time_column = (partial(timed, 'itself'),        [x,column(t)], 1),
    time_inside = (partial(timed, 'plain', again=True), [x,t], 1),
    **{f'time_{pack}_{call}':(partial(timed, call, pack), [x,t], 1) for pack in packs for call in ('plain','inside')},
    time_packed_column = (partial(timed, 'inside', 'tuple'), [x,column(t)], 1),
    flow        = (lambda: flow([coupling(i%2) for i in range(32)]), [normals(8, 64)], 1),
    actnorm     = (lambda: flow([actnorm() for _ in range(8)], 1700., nn.Linear(8,32)), [x], 1),
    crf         = (crf,                             [x], 1))

@pytest.mark.parametrize('name', table)
def test_table(name):
    "No worse than twice autocast, and the same in training, validation and inference mode"
    auto,ours = errors(*table[name])
    assert ours<=2*auto+.004, (auto,ours)

def constant(n, value):
    "A layer that returns a number, whatever it is given"
    res = nn.Linear(8, n)
    nn.init.zeros_(res.weight)
    nn.init.constant_(res.bias, value)
    return res

def adds(n, value):
    "A layer and a lookup"
    emb = nn.Embedding(4, n)
    nn.init.constant_(emb.weight, value)
    return Does(lambda m,x,i: m.lin(x)+m.emb(i), lin=constant(n, .5), emb=emb)

def call(model, *args):
    "What it returns, in the dtype that it has inside"
    seen = returned(model)
    with half(Does(lambda m,*args: m.inner(*args), inner=model)) as o: o.model(*args)
    return seen[0].detach()

def test_reference_energies():
    "Lookups of single numbers stay float32, those of rows are rounded"
    i = torch.tensor([1])
    energy,rows = (call(adds(n, -1030.57), x[:1], i) for n in (1,32))
    assert energy.dtype==f32 and (energy+1030.07).abs().max()<1e-3
    assert rows.dtype==bf16 and rows.equal(torch.full((1,32), .5, dtype=bf16)+torch.tensor(-1030.57).bfloat16())
    for n,dtype in ((1,f32),(15,f32),(16,bf16),(32,bf16)):
        for emb in (nn.Embedding(4, n),nn.EmbeddingBag(4, n)):
            assert call(emb, i[None]).equal(emb(i[None]).to(dtype))

@pytest.mark.parametrize('name', 'Standard Denorm DeNorm UnNorm InvNorm Renorm denorm InverseNorm Denormalize'.split())
@pytest.mark.parametrize('kind', [nn.Parameter,nn.Buffer])
def test_denormalized(name, kind):
    "What is named for undoing a norm is none: it returns numbers of the size of the data, of which none is rounded"
    for n in (1,3):
        model = nn.Sequential(constant(n, .125), type(name, (Does,), {})(lambda m,x: x*m.std+m.mean))
        model[1].mean,model[1].std = (kind(torch.full((n,), v)) for v in (1013.,8.))
        with half(model): assert model(x).equal(torch.full((8,n), 1014.))
        assert call(model, x).dtype==f32
