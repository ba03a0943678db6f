"""Learners whose numbers go wrong, each in its own way, and what is to be said of each"""
from typing import Callable,NamedTuple

from learners import *

class Sick(NamedTuple):
    "A learner with a problem, and what is to be said of it"
    make:Callable # Makes the learner, in float32
    where:str # `Finding.where`
    module:str='' # `Finding.module`
    precision:bool=False # Is half precision the cause? Then in float16 only.

def learner(model, change=noop, **kwargs):
    "A learner of `model`, with data that `change` has changed"
    x,y = numbers(64)
    change((x,y))
    return get_learner(model, as_dls(x, y), **kwargs)

def net(*inner, n=16):
    "A net with the modules that the functions `inner` make"
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, n), *[f() for f in inner], nn.Linear(n, 1))

def linear(): return nn.Linear(16, 16)

class Attention(nn.Module):
    "Attention of tokens whose logits are above 65504 before they are divided"
    def __init__(self, n=4, factor=1e3):
        super().__init__()
        self.n,self.factor = n,factor
        self.q,self.k,self.v = [nn.Linear(n, n) for _ in range(3)]
    def forward(self, x):
        tokens = x.unflatten(-1, (-1,self.n))
        logits = (self.q(tokens)*self.factor)@(self.k(tokens)*self.factor).mT
        return ((logits/self.factor**2).softmax(-1)@self.v(tokens)).flatten(-2)

class Softmax(nn.Module):
    "Written without the trick of subtracting the maximum"
    def forward(self, x):
        x = (x*20).exp()
        return x/x.sum(-1, keepdim=True)

class SmallVariance(nn.Module):
    "Divides by a deviation whose square is too small for float16"
    def forward(self, x):
        x = x*1e-4
        return (x-x.mean(-1, keepdim=True))/x.var(-1, keepdim=True).sqrt()

class Overflows(nn.Linear):
    "Float16 ends before what it returns is divided"
    def forward(self, x): return super().forward(x)*1e6/1e6

class Growing(nn.Module):
    "Its numbers double every third batch, between two layers"
    def __init__(self, n=16):
        super().__init__()
        self.up,self.down = nn.Linear(n, n),nn.Linear(n, n)
        self.register_buffer('factor', torch.ones(()))
    def forward(self, x):
        if self.training: self.factor *= 2**(1/3)
        return self.down(self.up(x)*self.factor)/self.factor

class LossInside(nn.Sequential):
    "Returns the loss, of targets in the thousands"
    def forward(self, x): return (super().forward(x)-1000).pow(2).mean()

class Categories(nn.Embedding):
    "Looks up a row for each number; one row is nan"
    def forward(self, x): return super().forward(x.abs().mul(3).long().clamp(0, 9)).flatten(1)

def categories():
    torch.manual_seed(1)
    model = nn.Sequential(Categories(10, 4), nn.Linear(32, 1))
    nn.init.constant_(model[0].weight[3], math.nan)
    return model

def set_to(value, i):
    def _change(xy): xy[i][20] = value
    return _change

def fails(learn, epochs=30):
    "The error that training ends with"
    with pytest.raises(FloatingPointError) as e: learn.fit(epochs)
    return str(e.value)

sgd = partial(OptimWrapper, opt=torch.optim.SGD)
sick = dict(
    attention     = Sick(lambda: learner(net(Attention)),                                  'forward', '1', True),
    softmax       = Sick(lambda: learner(net(Softmax)),                                    'forward', '1', True),
    variance      = Sick(lambda: learner(net(SmallVariance)),                              'forward', '1', True),
    growing       = Sick(lambda: learner(net(Growing)),                                    'forward', '1', True),
    loss_inside   = Sick(lambda: learner(LossInside(*net()), loss_func=lambda loss, y: loss), 'forward', '',  True),
    embedding     = Sick(lambda: learner(categories()),                                      'weights', '0'),
    inf_in_batch  = Sick(lambda: learner(net(), set_to(math.inf, 0)),                        'inputs'),
    nan_label     = Sick(lambda: learner(net(), set_to(math.nan, 1)),                        'targets'),
    learning_rate = Sick(lambda: learner(net(linear), opt_func=sgd, lr=1e4),       'training'))
healthy = dict(
    mlp        = lambda: learner(mlp()),
    batch_norm = lambda: learner(mlp(norm=True)),
    layer_norm = lambda: learner(net(lambda: nn.LayerNorm(16), nn.GELU, linear)),
    attention  = lambda: learner(net(lambda: Attention(factor=1.))))
