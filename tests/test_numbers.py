"""Numbers that mustn't be rounded: offsets, energies, states, positions, times and log-determinants in ordinary models

Each model is computed in float32, under autocast and in half precision: its errors are autocast's, up to rounding."""
from contextlib import nullcontext

import pytest
from torch.utils.checkpoint import checkpoint
from learners import *
from states import without_gradients

pytestmark = pytest.mark.filterwarnings('ignore:None of the inputs have requires_grad')

bf16,f32 = torch.bfloat16,torch.float32

def autocast(model): return torch.autocast('cpu', bf16, cache_enabled=False)
def half(model): return half_precision(model, bf16)

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

class Then(nn.Module):
    "A model around a module, as most are"
    def __init__(self, inner): super().__init__(); self.inner = inner
    def forward(self, *args): return self.inner(*args)

# --- Series around 280: reversible instance normalization

class RevIN(nn.Module):
    "As PatchTST has it: keeps mean and deviation of its input, and puts them back"
    def __init__(self, n):
        super().__init__()
        self.weight,self.bias = nn.Parameter(torch.ones(n,1)*1.1),nn.Parameter(torch.zeros(n,1)+.1)
    def forward(self, x, back=False):
        if back: return (x-self.bias)/self.weight*self.std+self.mean
        self.mean,self.std = x.mean(-1, keepdim=True).detach(),x.std(-1, keepdim=True).detach()
        return (x-self.mean)/self.std*self.weight+self.bias

class PatchTST(nn.Module):
    def __init__(self):
        super().__init__()
        self.revin,self.embed,self.pos = RevIN(3),nn.Linear(4,32),nn.Parameter(torch.randn(8,32)*.1)
        self.head = nn.Linear(8*32,8)
    def forward(self, x):
        x = self.revin(x)
        x = self.embed(x.unflatten(-1, (8,4)))+self.pos
        return self.revin(self.head(F.gelu(x).flatten(2)), back=True)

class Normalize(nn.Module):
    def __init__(self): super().__init__(); self.gain = nn.Parameter(torch.ones(3,1))
    def forward(self, x):
        mean,std = x.mean(-1, keepdim=True),x.std(-1, keepdim=True)
        return (x-mean)/std*self.gain,mean,std

class Denorm(nn.Module):
    def __init__(self): super().__init__(); self.gain = nn.Parameter(torch.ones(3,1))
    def forward(self, x, mean, std): return x/self.gain*std+mean

class Deviations(nn.Module):
    "Passes mean and deviation on"
    def __init__(self): super().__init__(); self.norm,self.body,self.denorm = Normalize(),mlp(32, 8),Denorm()
    def forward(self, x):
        x,*stats = self.norm(x)
        return self.denorm(self.body(x), *stats)

series = 280+5*normals(16, 3, 32)

# --- Energies around -1000: offsets per species

class Energies(nn.Module):
    "As SchNet: an energy of each atom that a network finds, and one of its species"
    def __init__(self, shift):
        super().__init__()
        self.emb,self.body = nn.Embedding(8,32),mlp(32, 1)
        offsets = -1030.57-13.3*torch.arange(8.)
        self.shift = shift(offsets)
    def forward(self, z): return (self.body(self.emb(z))+self.shift(z)).squeeze(-1).sum(-1)

class Table(nn.Embedding):
    "A subclass, as people write it"

def reference(cls):
    def _make(offsets):
        res = cls(8, 1)
        with torch.no_grad(): res.weight.copy_(offsets[:,None])
        return res
    return _make

class Shift(nn.Module):
    "Scales and shifts that are parameters"
    def __init__(self, offsets):
        super().__init__()
        self.shift,self.scale = nn.Parameter(offsets),nn.Parameter(torch.ones(8))
    def forward(self, z): return self.scale[z][...,None]*self.shift[z][...,None]

class OneShift(nn.Module):
    "One for all, in the shape of the others"
    def __init__(self, offsets): super().__init__(); self.shift = nn.Parameter(offsets[:1])
    def forward(self, z): return self.shift.expand(z.numel()).view(*z.shape, 1)

class ShiftsInside(nn.Module):
    "A parameter that is added to what the layers return"
    def __init__(self):
        super().__init__()
        self.emb,self.body,self.shift = nn.Embedding(8,32),mlp(32, 1),nn.Parameter(torch.tensor([-1030.57]))
    def forward(self, z): return (self.body(self.emb(z))+self.shift.expand(*z.shape, 1)).squeeze(-1).sum(-1)

species = torch.arange(48).view(8,6)%8

# --- A state around 300

class Cell(nn.Module):
    "A step of an explicit Euler method"
    def __init__(self): super().__init__(); self.rate,self.f = nn.Parameter(torch.full((16,), .5)),mlp(16, 16)
    def forward(self, state): return state+.01*self.rate*self.f((state-300)/10)

class Euler(nn.Module):
    def __init__(self): super().__init__(); self.cell = Cell()
    def forward(self, state):
        for _ in range(40): state = self.cell(state)
        return state

# --- Positions

class Waves(nn.Module):
    "Of distances or positions, without parameters"
    def forward(self, d): return (d[...,None]*torch.linspace(1, 20, 32)).sin()

class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain,self.waves,self.lin = nn.Parameter(torch.ones(32)),Waves(),nn.Linear(32,16)
    def forward(self, pos): return self.lin(self.waves(pos.squeeze(-1)*.1)*self.gain)

class Twice(nn.Module):
    "Encodes the positions that it is given, then those that it predicts"
    def __init__(self): super().__init__(); self.encode,self.head,self.last = Encode(),nn.Linear(16,1),nn.Linear(16,1)
    def forward(self, pos): return self.last(self.encode(pos+self.head(self.encode(pos))))

class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain,self.waves,self.body = nn.Parameter(torch.ones(32)),Waves(),mlp(32, 1)
    def forward(self, pos):
        d = (pos[:,:,None]-pos[:,None]+.1).square().sum(-1).sqrt()
        return self.body(self.waves(d)*self.gain).sum((1,2,3))

class Forces(nn.Module):
    "Derivatives of an energy by positions"
    def __init__(self): super().__init__(); self.energy = Distances()
    def forward(self, pos):
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            return torch.autograd.grad(self.energy(pos).sum(), pos, create_graph=True)[0]

class EGNN(nn.Module):
    "Moves points along their differences"
    def __init__(self):
        super().__init__()
        self.scale,self.edge,self.move = nn.Parameter(torch.ones(1)*.1),mlp(1, 16),nn.Linear(16,1)
    def forward(self, pos):
        diff = pos[:,:,None]-pos[:,None]
        d2 = diff.square().sum(-1, keepdim=True)
        return pos+(diff/(d2.sqrt()+1)*self.move(self.edge(d2))*self.scale).mean(2)

class Layers(nn.Module):
    def __init__(self, cls, n=2): super().__init__(); self.layers = nn.ModuleList([cls() for _ in range(n)])
    def forward(self, *args):
        x,*rest = args
        for o in self.layers: x = o(x, *rest)
        return x

# --- Times

class Embeds(nn.Module):
    def __init__(self, n=32): super().__init__(); self.lin,self.n = nn.Linear(n,n),n
    def forward(self, t): return self.lin((t*torch.linspace(.1, 1, self.n)).sin())

class Times(nn.Module):
    "Makes a time from 0 to 1000 of one from 0 to 1, and passes it on, packed as people do"
    packs = dict(tensor=lambda t: t, tuple=lambda t: (t,), dict=lambda t: {'t':t}, data=lambda t: Data(t),
                 frozen=lambda t: Frozen(t, [t]))
    reads = dict(tensor=lambda o: o, tuple=lambda o: o[0], dict=lambda o: o['t'], data=lambda o: o.a,
                 frozen=lambda o: o.b[0])
    def __init__(self, pack='tensor'):
        super().__init__()
        self.gain,self.pack = nn.Parameter(torch.ones(32)),pack
    def forward(self, x, t): return x*self.gain,self.packs[self.pack](t*1000)

class Block(nn.Module):
    "Gives the time to a module inside"
    def __init__(self):
        super().__init__()
        self.gain,self.lin,self.embed = nn.Parameter(torch.ones(32)),nn.Linear(32,32),Embeds()
    def forward(self, x, t):
        t = t*1000
        return x+self.gain*self.lin(x)+self.embed(t[:,None] if t.dim()==1 else t)

class Timed(nn.Module):
    def __init__(self, call, pack=None):
        super().__init__()
        self.call,self.pack,self.first,self.last = call,pack,nn.Linear(8,32),nn.Linear(32,4)
        self.times = Times(pack) if pack else Block()
        if pack: self.embed = Embeds()
    def inner(self, x, t):
        if not self.pack: return self.times(x, t)
        x,t = self.times(x, t)
        t = Times.reads[self.pack](t)
        return x+self.embed(t[:,None] if t.dim()==1 else t)
    def forward(self, x, t):
        x = self.first(x)
        if self.call=='inside': x = checkpoint(self.inner, x, t, use_reentrant=True)
        elif self.call=='itself': x = checkpoint(self.times, x, t, use_reentrant=True)
        else: x = self.inner(x, t)
        return self.last(x)

class BlockInside(nn.Module):
    "Checkpoints what it gives the time that it makes"
    def __init__(self):
        super().__init__()
        self.gain,self.lin,self.embed = nn.Parameter(torch.ones(32)),nn.Linear(32,32),Embeds()
    def forward(self, x, t):
        t = t*1000
        return x+self.gain*self.lin(x)+checkpoint(self.embed, t[:,None]+0*x[:,:1], use_reentrant=True)

class TimedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first,self.block,self.last = nn.Linear(8,32),BlockInside(),nn.Linear(32,4)
    def forward(self, x, t): return self.last(self.block(self.first(x), t))

# --- Log-determinants

class Coupling(nn.Module):
    "A part of a flow: scales of its own add to the log-determinant"
    def __init__(self, flip):
        super().__init__()
        self.flip,self.net,self.log_scale = flip,mlp(32, 64),nn.Parameter(torch.linspace(.5, 1.2, 64))
    def forward(self, x, logdet):
        a,b = x.chunk(2, 1)
        if self.flip: a,b = b,a
        s,t = self.net(a).tanh().chunk(2, 1)
        s,b = .1*s,b*(.1*s).exp()+t
        x = torch.cat([b,a] if self.flip else [a,b], 1)
        return x*self.log_scale.exp()*.4,logdet+self.log_scale.sum()+s.float().sum(1)

class Flow(nn.Module):
    def __init__(self): super().__init__(); self.parts = nn.ModuleList([Coupling(i%2) for i in range(32)])
    def forward(self, x):
        logdet = torch.zeros(len(x))
        for o in self.parts: x,logdet = o(x, logdet)
        return logdet

# --- The table

points = 50+normals(4, 5, 3)
x,t = normals(8, 8),torch.linspace(.1, 1, 8)+2**-12
table = dict( # name -> model, arguments, how much is a large error, and whether it computes in inference mode
    patchtst      = (PatchTST,                                 [series], 5),
    deviations    = (Deviations,                               [series], 5),
    energies      = (lambda: Energies(reference(nn.Embedding)),[species], 1),
    energies_sub  = (lambda: Energies(reference(Table)),       [species], 1),
    shifts        = (lambda: Energies(Shift),                  [species], 1),
    one_shift     = (lambda: Energies(OneShift),               [species], 1),
    shift_inside  = (ShiftsInside,                             [species], 1),
    euler         = (Euler,                                    [300+10*normals(8, 16)], 1),
    encoder       = (Twice,                                    [50*normals(64, 1)], 1),
    forces        = (Forces,                                   [3*normals(2, 6, 3)], 1, False),
    egnn          = (lambda: Then(Layers(EGNN, 3)),            [points], 1),
    time          = (lambda: Timed('plain'),                   [x,t], 1),
    time_again    = (lambda: Timed('itself'),                  [x,t], 1),
    time_column   = (lambda: Timed('itself'),                  [x,t[:,None]], 1),
    time_inside   = (TimedInside,                              [x,t], 1),
    flow          = (Flow,                                     [normals(8, 64)], 1),
    **{f'time_{pack}_{call}':(lambda pack=pack,call=call: Timed(call, pack), [x,t], 1)
       for pack in Times.packs for call in ('plain','inside')},
    time_packed_column = (lambda: Timed('inside', 'tuple'),    [x,t[:,None]], 1))

class ActNorm(nn.Module):
    "As in flows: returns a log-determinant, too"
    def __init__(self, n):
        super().__init__()
        self.logs,self.bias = nn.Parameter(normals(n)*.1),nn.Parameter(normals(n))
    def forward(self, x, logdet): return x*self.logs.exp()+self.bias,logdet+self.logs.sum()*1024

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin,self.norms = nn.Linear(8,32),nn.ModuleList([ActNorm(32) for _ in range(8)])
    def forward(self, x):
        x,logdet = self.lin(x),torch.full((len(x),), 1700.)
        for o in self.norms: x,logdet = o(x, logdet)
        return logdet

class RevNorm(nn.Module):
    "Normalizes, and puts mean and deviation back"
    def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x, mode):
        if mode=='norm': self.mean,self.std = x.mean(1, keepdim=True),x.std(1, keepdim=True)
        return (x-self.mean)/self.std*self.weight if mode=='norm' else x/self.weight*self.std+self.mean

class Reversed(nn.Module):
    def __init__(self): super().__init__(); self.norm,self.lin = RevNorm(),nn.Linear(8,8)
    def forward(self, x): return self.norm(self.lin(self.norm(x, 'norm')), 'denorm')

class Crf(nn.Module):
    "The partition function as torchcrf computes it, of 20 labels"
    def __init__(self, n=20):
        super().__init__()
        self.emit,self.start,self.pairs = nn.Linear(8,n),nn.Parameter(normals(n)),nn.Parameter(normals(n,n))
    def forward(self, x):
        e = self.emit(x)
        score = self.start+e[:1]
        for o in e[1:].repeat(8, 1)[:,None]:
            score = (score[:,:,None]+self.pairs+o[:,None]).logsumexp(1)
        return score.logsumexp(1)

table.update(actnorm=(Flow, [x], 1), revnorm=(Reversed, [normals(8,8)*5+300], 1), crf=(Crf, [x], 1))

@pytest.mark.parametrize('name', table)
def test_table(name):
    "No worse than twice autocast, and the same in training, validation and inference mode"
    auto,ours = errors(*table[name])
    assert ours<=2*auto+.004, (auto,ours)

# --- Numbers that can be said beforehand

def constant(n, value):
    "A layer that returns a number, whatever it is given"
    res = nn.Linear(8, n)
    nn.init.zeros_(res.weight)
    nn.init.constant_(res.bias, value)
    return res

class Adds(nn.Module):
    "A layer and a lookup"
    def __init__(self, n, value):
        super().__init__()
        self.lin,self.emb = constant(n, .5),nn.Embedding(4, n)
        nn.init.constant_(self.emb.weight, value)
    def forward(self, x, i): return self.lin(x)+self.emb(i)

def call(model, *args):
    "What it returns, in the dtype that it has inside"
    seen = []
    hook = model.register_forward_hook(lambda m,args,out: seen.append(out.detach()))
    with half(model := Then(model)): model(*args)
    hook.remove()
    return seen[0]

def test_reference_energies():
    "Lookups of single numbers stay float32, those of rows are rounded"
    i = torch.tensor([1])
    energy,rows = (call(Adds(n, -1030.57), x[:1], i) for n in (1,32))
    assert energy.dtype==f32 and (energy+1030.07).abs().max()<1e-3
    assert rows.dtype==bf16 and rows.equal(torch.full((1,32), .5, dtype=bf16)+torch.tensor(-1030.57).bfloat16())
    for n,dtype in ((1,f32),(15,f32),(16,bf16),(32,bf16)):
        emb = nn.Embedding(4, n)
        assert call(emb, i).equal(emb(i).to(dtype))

class Standard(nn.Module):
    "Puts mean and deviation back"
    def __init__(self, kind, n):
        super().__init__()
        for k,v in dict(mean=1013., std=8.).items():
            if kind=='parameter': setattr(self, k, nn.Parameter(torch.full((n,), v)))
            else: self.register_buffer(k, torch.full((n,), v))
    def forward(self, x): return x*self.std+self.mean

@pytest.mark.parametrize('name', 'Standard Denorm DeNorm UnNorm InvNorm Renorm denorm InverseNorm Denormalize'.split())
@pytest.mark.parametrize('kind', ['parameter','buffer'])
def test_denormalized(name, kind):
    "What is named for undoing a norm is none: it returns numbers of the size of the data, of which none is rounded"
    for n in (1,3):
        undo = type(name, (Standard,), {})(kind, n)
        model = Then(nn.Sequential(constant(n, .125), undo))
        with half(model): assert model(x).equal(torch.full((8,n), 1014.))
        assert call(nn.Sequential(constant(n, .125), undo), x).dtype==f32

def test_norms_are_norms():
    "By their names, still"
    for name in 'T5Norm LlamaRMSNorm Norm GroupNorm32 LayerNorm2d ActNorm BatchRenorm PreNorm NodeNorm'.split():
        model = nn.Sequential(constant(1, .125), type(name, (Standard,), {})('parameter', 1))
        assert half_precision(model, bf16).policy().set_index('module').way['1']=='float32 norm'
