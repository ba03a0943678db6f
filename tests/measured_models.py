"""Models in which a rule rounds numbers that matter, and autocast doesn't: small ones, each with data to train on

`rows[name]()` returns a model, inputs and targets of as many items, after `torch.manual_seed`. The loss is the mean
square. Those in `convolves` have a convolution, which CPUs compute in float16 hundreds of times slower at best."""
import torch
from torch import nn

class Lookup(nn.Module):
    "Features of items that nobody trains, looked up and normalized"
    def __init__(self, table):
        super().__init__()
        n = table.shape[1]
        self.table,self.norm,self.head = nn.Embedding.from_pretrained(table),nn.BatchNorm1d(n),nn.Linear(n,1)
    def forward(self, i): return self.head(self.norm(self.table(i)))

class Bag(Lookup):
    "The same with the means of several items"
    def __init__(self, table):
        super().__init__(table)
        self.table = nn.EmbeddingBag.from_pretrained(table, mode='mean')

class Pairs(nn.Module):
    "The distance of two items whose vectors are trained"
    def __init__(self, vectors):
        super().__init__()
        self.vectors = nn.Embedding.from_pretrained(vectors, freeze=False)
    def forward(self, i): return self.distance(*self.vectors(i[:,:2]).unbind(1))[:,None]

class Poincare(Pairs):
    "Distances in the Poincaré ball, near its boundary"
    def distance(self, u, v):
        room = (1-u.square().sum(1))*(1-v.square().sum(1))
        return torch.acosh(1+2*(u-v).square().sum(1)/room+1e-6)

class Lorentz(Pairs):
    "Distances on the hyperboloid, far from its lowest point"
    def distance(self, u, v):
        heights = (1+u.square().sum(1)).sqrt()*(1+v.square().sum(1)).sqrt()
        return torch.acosh((heights-(u*v).sum(1)).clamp(min=1+1e-6))

class TransE(Pairs):
    "Head plus relation minus tail, of vectors that are nearly the same"
    def __init__(self, vectors, relations):
        super().__init__(vectors)
        self.relations = nn.Embedding.from_pretrained(relations, freeze=False)
    def forward(self, i):
        head,tail = self.vectors(i[:,:2]).unbind(1)
        return 50*(head+self.relations(i[:,2])-tail).square().sum(1, keepdim=True)

class Leaky(nn.Module):
    "A state that decays by a learned factor near 1, and begins like the activations"
    def __init__(self, n=16):
        super().__init__()
        self.enter,self.leave,self.decay = nn.Linear(1,n),nn.Linear(n,1),nn.Parameter(torch.linspace(.99,.9995,n))
    def forward(self, x):
        x = self.enter(x)
        state = torch.zeros_like(x[:,0])
        for o in x.unbind(1): state = self.decay*state+o
        return self.leave(state/x.shape[1])

class Points(nn.Module):
    "Points of reference in pixels, and an offset"
    def __init__(self, n=24):
        super().__init__()
        self.points = nn.Parameter(torch.rand(n,2)*90+150)
        self.offset = nn.Sequential(nn.Linear(2,16), nn.Tanh(), nn.Linear(16,2*n))
    def forward(self, x): return (self.points+self.offset(x).unflatten(1, (-1,2))).flatten(1)

class Bounded(nn.Linear):
    "A layer whose weight is computed whenever it is read: its class is changed when it is there already"
    weight = property(lambda self: self._parameters['weight'].mul(4).tanh())

class Masked(nn.Module):
    "A convolution of what was before: a mask is written through `.data` in each call, as in many a PixelCNN"
    def __init__(self):
        super().__init__()
        self.conv,self.leave = nn.Conv1d(1,8,3,padding=1),nn.Conv1d(8,1,1)
    def forward(self, x):
        self.conv.weight.data[:,:,1:].zero_()
        return self.leave(self.conv(x).tanh())

class ImageUnNorm(nn.Module):
    "The inverse of a normalization, named like a norm"
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer('mean', torch.tensor([mean]))
        self.register_buffer('std', torch.tensor([std]))
    def forward(self, x): return x*self.std+self.mean

class Graphs(nn.Module):
    "Sums of nodes into zeros of float32, which take no half precision"
    def __init__(self, n=16):
        super().__init__()
        self.enter,self.own,self.leave = nn.Linear(6,n),nn.Parameter(torch.ones(n)),nn.Linear(n,1)
    def forward(self, x):
        nodes = (self.enter(x)*self.own).tanh().flatten(0,1)
        of = torch.arange(len(x)).repeat_interleave(x.shape[1])
        return self.leave(torch.zeros(len(x),nodes.shape[1]).index_add_(0, of, nodes))

n_items = 512

def mlp(*layers, n_in=8): return nn.Sequential(nn.Linear(n_in,16), *layers, nn.Linear(16,1))

def of_table(kind, mean, spread, n=80, width=24):
    "Targets that depend on how far the features of an item are from the mean"
    off = torch.randn(n,width)
    i = torch.randint(n, (n_items,) if kind is Lookup else (n_items,4))
    seen = off[i] if kind is Lookup else off[i].mean(1)*2
    return kind(mean+spread*off),i,(seen[:,:4].sum(1, keepdim=True)/2).tanh()

def of_pairs(kind, vectors, moved, *more):
    "Targets by other vectors than those that training begins with"
    i = torch.randint(len(vectors), (n_items,3))
    if more: i[:,2] %= len(more[0])
    i[:,1] = torch.where(i[:,0]==i[:,1], (i[:,1]+1)%len(vectors), i[:,1])
    return kind(moved, *more),i,kind(vectors, *more)(i).detach()

def of_length(vectors, lengths): return vectors/vectors.norm(dim=1, keepdim=True)*lengths[:,None]

def poincare(n=40):
    vectors,lengths = torch.randn(n,20),torch.linspace(.7,.97,n)
    return of_pairs(Poincare, of_length(vectors, lengths), of_length(vectors+.2*torch.randn(n,20), lengths))

def lorentz(n=40):
    vectors,lengths = torch.randn(1,20)+.3*torch.randn(n,20),torch.linspace(3.,9.,n)
    return of_pairs(Lorentz, of_length(vectors, lengths), of_length(vectors+.1*torch.randn(n,20), lengths))

def transe(n=40):
    vectors,relations = 2*torch.randn(1,20)+.03*torch.randn(n,20),.03*torch.randn(4,20)
    return of_pairs(TransE, vectors, vectors+.01*torch.randn(n,20), relations)

def leaky(length=150):
    x = torch.randn(n_items,length,1)+torch.randn(n_items,1,1)
    weights = .998**torch.arange(length).flip(0)
    return Leaky(),x,(x[...,0]*weights).mean(1, keepdim=True)

def points():
    x,model = torch.randn(n_items,2),Points()
    return model,x,model.points.detach().flatten()+x.sin().repeat(1,24)

def bounded():
    x,layer = torch.randn(n_items,8),nn.Linear(16,16)
    layer.__class__ = Bounded
    return mlp(layer, nn.Tanh()),x,x[:,:2].prod(1, keepdim=True).tanh()

def masked():
    x = torch.randn(n_items,1,20)
    return Masked(),x,x.roll(1, 2).tanh()

def unnorm():
    x = torch.randn(n_items,8)
    return mlp(nn.Tanh()).append(ImageUnNorm(1013., 8.)),x,1013+8*x[:,:1].tanh()

def graphs():
    x = torch.randn(n_items,5,6)
    return Graphs(),x,x[...,:2].prod(2).sum(1, keepdim=True)

rows = { # what the model is -> function: a model, inputs, targets
    'years before a batch norm':   lambda: of_table(Lookup, 1990., 5.),
    'prices around 100,000':       lambda: of_table(Lookup, 1e5, 1e3),
    'bags of amounts around 1000': lambda: of_table(Bag, 1000., 5.),
    'Poincaré ball':               poincare,
    'Lorentz model':               lorentz,
    'TransE, close vectors':       transe,
    'learned decay near 1':        leaky,
    'points in pixels':            points,
    'weight is a property':        bounded,
    'mask through .data':          masked,
    'UnNorm, a norm by name':      unnorm,
    'sums into float32 zeros':     graphs}
convolves = {'mask through .data'}
