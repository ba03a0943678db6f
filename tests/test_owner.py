"""What owners and modules in float32 round, and what not: nothing that they pass on, write or attach is lost

An owner is a module of somebody's with a parameter of its own, see `mp_callbacks.ways`."""
import pytest
from learners import *

bf16,f32 = torch.bfloat16,torch.float32

# --- What an owner rounds

class Gives(nn.Module):
    "Returns what it is given"
    def forward(self, *args): return args

class Diffusion(nn.Module):
    "Parameters of its own; gives a part what it was given, what it has computed, and a scalar"
    def __init__(self, owns):
        super().__init__()
        self.lin,self.gives = nn.Linear(8,8),Gives()
        if owns=='parameter': self.pos = nn.Parameter(torch.randn(8))
        else: self.pos = nn.ParameterList([torch.randn(8)])
    def forward(self, x, t):
        pos = self.pos if isinstance(self.pos, nn.Parameter) else self.pos[0]
        x = self.lin(x)+pos
        assert x.dtype==pos.dtype==f32
        return *self.gives(x, t, x.mean()),x

class Inside(nn.Module):
    def __init__(self, *args): super().__init__(); self.own,self.head = Diffusion(*args),nn.Linear(8,1)
    def forward(self, x, t): return self.own(x, t),self.head(x)

@pytest.mark.parametrize('owns', ['parameter','list'])
def test_rounded(owns):
    """What an owner gives to modules inside it and what it returns is rounded, but for scalars and what it was given

    In a model that is one, the result isn't rounded; nor in one that is kept in float32."""
    net,x,t,seen = Inside(owns),torch.randn(4,8),torch.tensor([1+2**-12], requires_grad=True),{}
    for m in (net.own,net.own.gives): m.register_forward_hook(lambda m,args,out: seen.update({m:out}))
    half,alone = half_precision(net, bf16),half_precision(net.own, bf16)
    for _ in range(2):
        with half: net(x, t)
        for given in seen.values():
            assert [o.dtype for o in given[:3]]==[bf16,f32,f32]
            assert torch.equal(given[1], t) and not torch.equal(given[2], given[2].bfloat16().float())
        with alone: res = net.own(x, t)
        assert not torch.equal(res[3], res[3].bfloat16().float())
    with half_precision(net, bf16, keep='own'): net(x, t)
    assert {o.dtype for o in seen[net.own]}=={f32}

# --- What it passes on keeps its meaning

class Fills(nn.Module):
    "Writes into what it is given"
    def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    def forward(self, y): y.mul_(2).add_(self.layer(y.detach()))

class Owner(nn.Module):
    "Adds a position of its own, and lets a module inside write into the sum"
    def __init__(self): super().__init__(); self.pos,self.inner = nn.Parameter(torch.ones(8)),Fills()
    def forward(self, x):
        y = x+self.pos
        self.inner(y)
        return y

class Remembers(nn.Module):
    "As fastai's `SequentialEx` and `MergeLayer`"
    def __init__(self): super().__init__(); self.gain = nn.Parameter(torch.ones(8))
    def forward(self, x):
        y = x*self.gain
        y.orig = x
        return y

class Merges(nn.Module):
    def forward(self, x): return x+x.orig

class Times(nn.Module):
    "Time steps from 0 to 1000 that an owner has computed from those it was given, as in flow matching"
    def __init__(self):
        super().__init__()
        self.pos,self.layer,self.embed = nn.Parameter(torch.ones(8)),nn.Linear(8,8),Gives()
    def forward(self, x): return self.layer(x+self.pos)*self.embed(x.abs().clamp(max=1)*1000)[0].sin()

class Attend(nn.Module):
    def __init__(self): super().__init__(); self.q,self.k = nn.Linear(8,8),nn.Linear(8,8)
    def forward(self, x, mask): return (self.q(x)@self.k(x).T+mask).softmax(-1)@x

class Masked(nn.Module):
    "Some rows may look at nothing, as with left padding"
    def __init__(self): super().__init__(); self.pos,self.attend = nn.Parameter(torch.ones(8)),Attend()
    def forward(self, x):
        mask = torch.full((len(x),len(x)), -1e9).triu(1)
        mask[0] = -1e9
        return self.attend(x+self.pos, mask)

makes = dict(fills=Owner, times=Times, mask=Masked, attributes=lambda: nn.Sequential(Remembers(), Merges()))

@pytest.mark.parametrize('dtype', [bf16,torch.float16])
@pytest.mark.parametrize('kind', makes)
def test_passed_on(kind, dtype):
    "Errors are those of autocast, up to rounding"
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Identity(), makes[kind]()),numbers(16)[0]
    want = model(x).detach()
    with torch.autocast('cpu', dtype): auto = model(x).detach().float()
    with half_precision(model, dtype): got = model(x).detach()
    error = [((o-want).norm()/want.norm()).item() for o in (auto,got)]
    assert error[1]<=3*max(error[0], torch.finfo(dtype).eps), error

# --- Modules in float32: casts stand in for what they were given

class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first,self.act,self.last = nn.Linear(8,8),nn.ReLU(inplace=True),nn.Linear(8,1)
    def forward(self, x):
        x = self.first(x)
        self.act(x)
        return self.last(x)

class Attaches(nn.Module):
    def __init__(self): super().__init__(); self.body,self.act,self.end = nn.Linear(8,8),nn.GELU(),Merges()
    def forward(self, x):
        y = self.body(x)
        y.orig = y
        return self.end(y)

class Pops(nn.Module):
    "Takes from a list and writes into a dict, as decoders do with skip connections"
    def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    def forward(self, skips, seen):
        x = self.layer(skips.pop())
        seen['out'],seen['n'] = x,seen['n']+1
        return x

class Skips(nn.Module):
    def __init__(self): super().__init__(); self.down,self.up,self.last = nn.Linear(8,8),Pops(),Pops()
    def forward(self, x):
        skips,seen = [x,self.down(x)],dict(n=0, x=self.down(x))
        first,own = skips[0],seen['x']
        self.up(skips, seen)
        y = seen['out']
        skips.append(y)
        self.last(skips, seen)
        assert (len(skips),seen['n'],[*seen])==(1,2,['n','x','out']) and skips[0] is first and seen['x'] is own
        return y+seen['out']+skips[0]

@pytest.mark.parametrize('kind,keep', [(Writes,'act'), (Attaches,Merges), (Attaches,nn.GELU), (Skips,('up','last'))])
def test_kept(kind, keep):
    "What a module in float32 writes, takes out of a container or puts into it arrives; attributes go through a cast"
    torch.manual_seed(1)
    model,x = kind(),numbers(16)[0]
    want = model(x).detach()
    with half_precision(model, bf16, keep): assert (model(x)-want).norm()<=.02*want.norm()

def test_kept_leaves_containers_alone():
    "What the caller has in a list or dict, nested too, is the same tensors, with what was written into them"
    seen = []
    class Sums(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
        def forward(self, features, more):
            res = self.layer(features[0]+more['rest'][0])
            with torch.no_grad(): more['rest'][1].fill_(2)
            return res
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.body,self.end = nn.Linear(8,8),Sums()
        def forward(self, x):
            y,z = self.body(x),self.body(-x)
            features,more = [y],dict(rest=[z,torch.zeros_like(z)])
            res = self.end(features, more)
            seen.append((features[0] is y, more['rest'][0] is z, y.dtype, more['rest'][1].unique().tolist()))
            return res
    model = Net()
    with half_precision(model, bf16, 'end'): model(numbers(16)[0]).sum().backward()
    assert seen==[(True,True,bf16,[2.])]

def test_standardized_convolution():
    "A layer with a `_conv_forward` of its own computes with float32 weights, as under autocast"
    class Standardized(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            assert weight.dtype==f32
            return super()._conv_forward(x, (weight-weight.mean())/weight.std(), bias)
    model = nn.Sequential(Standardized(3,4,3))
    half = half_precision(model, bf16)
    for _ in range(3):
        with half: model(torch.ones(1,3,8,8)).sum().backward()
    assert half.ways['0'].name!='layer'
