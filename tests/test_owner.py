"""What an owner rounds, and what not: `x+self.pos` is, and a mask, a time step or an attribute isn't lost

An owner is a module of somebody's with a parameter of its own, see `mp_callbacks.ways`."""
import math

import pytest
from learners import *

class Owner(nn.Module):
    "Adds a position of its own, and gives what it has computed to a module inside"
    def __init__(self, inner): super().__init__(); self.pos,self.inner = nn.Parameter(torch.ones(8)),inner
    def forward(self, x):
        y = x+self.pos
        res = self.inner(y)
        return y if res is None else res

class Fills(nn.Module):
    "Writes into what it is given"
    def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    def forward(self, y): y.mul_(2).add_(self.layer(y.detach()))

class InPlace(nn.Module):
    "The caller doesn't look at the result"
    def forward(self, y): F.relu_(y)

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
    def __init__(self): super().__init__(); self.pos,self.layer = nn.Parameter(torch.ones(8)),nn.Linear(8,8)
    def forward(self, x): return self.layer(x+self.pos)*self.embed(x.abs().clamp(max=1)*1000)
class Sine(nn.Module):
    def forward(self, t): return t.sin()
class TimesModel(Times):
    def __init__(self): super().__init__(); self.embed = Sine()

class Masked(nn.Module):
    "Some rows may look at nothing, as with left padding"
    def __init__(self): super().__init__(); self.pos,self.attend = nn.Parameter(torch.ones(8)),Attend()
    def forward(self, x):
        mask = torch.full((len(x),len(x)), -1e9).triu(1)
        mask[0] = -1e9
        return self.attend(x+self.pos, mask)
class Attend(nn.Module):
    def __init__(self): super().__init__(); self.q,self.k = nn.Linear(8,8),nn.Linear(8,8)
    def forward(self, x, mask): return (self.q(x)@self.k(x).T+mask).softmax(-1)@x

makes = dict(fills=lambda: Owner(Fills()), in_place=lambda: Owner(InPlace()), times=TimesModel, mask=Masked,
             attributes=lambda: nn.Sequential(Remembers(), Merges()))

@pytest.mark.parametrize('dtype', [torch.bfloat16,torch.float16])
@pytest.mark.parametrize('kind', makes)
def test_owner(kind, dtype):
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Identity(), makes[kind]()),numbers(16)[0]
    want = model(x).detach()
    with torch.autocast('cpu', dtype): auto = model(x).detach().float()
    with half_precision(model, dtype): got = model(x).detach()
    error = [((o-want).norm()/want.norm()).item() for o in (auto,got)]
    assert error[1]<=3*max(error[0], torch.finfo(dtype).eps), error

def test_kept_module_that_writes():
    "Into what it is given, as in float32"
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first,self.act,self.last = nn.Linear(8,8),nn.ReLU(inplace=True),nn.Linear(8,1)
        def forward(self, x):
            x = self.first(x)
            self.act(x)
            return self.last(x)
    torch.manual_seed(0)
    model,x = Writes(),numbers(16)[0]
    want = model(x)
    with half_precision(model, torch.bfloat16, keep='act'): got = model(x)
    assert (got-want).norm()<=.02*want.norm()

def test_standardized_convolution():
    "A layer with a `_conv_forward` of its own computes with float32 weights, as under autocast"
    class Standardized(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            assert weight.dtype==torch.float32
            return super()._conv_forward(x, (weight-weight.mean())/weight.std(), bias)
    model = nn.Sequential(Standardized(3,4,3))
    half = half_precision(model, torch.bfloat16)
    for _ in range(3):
        with half: model(torch.ones(1,3,8,8)).sum().backward()
    assert half.ways['0'].name!='layer'
