"The models that are measured, and batches of random numbers for them"
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

def mlp(dim, layers, n_out):
    hidden = [m for _ in range(layers-1) for m in (nn.Linear(dim, dim), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(dim, n_out))

def linears(dim, layers):
    "Many small modules, with orthogonal weights so that neither numbers nor gradients vanish"
    res = nn.Sequential(*[nn.Linear(dim, dim) for _ in range(layers)])
    for m in res: nn.init.orthogonal_(m.weight)
    return res

def conv(width, layers, n_out):
    "Convolution, batch norm and ReLU, again and again: the image halves and the channels double each time"
    dims = [3, *[width*2**i for i in range(layers)]]
    def _layer(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
    body = [_layer(i, o) for i,o in zip(dims,dims[1:])]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dims[-1], n_out))

def resnet(layers, n_out):
    from fastai.vision.models import xresnet
    return getattr(xresnet, f'xresnet{layers}')(n_out=n_out)

class Block(nn.Module):
    "Attention and an MLP, each after a LayerNorm and around a shortcut"
    def __init__(self, dim, hidden, heads, causal):
        super().__init__()
        self.heads,self.causal = heads,causal
        self.norm1,self.qkv,self.proj = nn.LayerNorm(dim),nn.Linear(dim, 3*dim),nn.Linear(dim, dim)
        self.norm2,self.mlp = nn.LayerNorm(dim),nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        q,k,v = self.qkv(self.norm1(x)).unflatten(-1, (3,self.heads,-1)).permute(2,0,3,1,4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1,2).flatten(2)
        x = x + self.proj(attended)
        return x + self.mlp(self.norm2(x))

class Transformer(nn.Module):
    "What a ViT and a GPT have in common. `embed` and `head` make the difference."
    def __init__(self, embed, tokens, dim, hidden, heads, depth, causal):
        super().__init__()
        self.embed,self.pos = embed,nn.Parameter(torch.randn(tokens, dim)*.02)
        self.blocks = nn.Sequential(*[Block(dim, hidden, heads, causal) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, x): return self.head(self.norm(self.blocks(self.tokens(x)+self.pos)))

class ViT(Transformer):
    "Patches, and a class token"
    def __init__(self, size, patch, dim, hidden, heads, depth, n_out):
        super().__init__(nn.Conv2d(3, dim, patch, patch), (size//patch)**2+1, dim, hidden, heads, depth, causal=False)
        self.cls,self.out = nn.Parameter(torch.randn(1, 1, dim)*.02),nn.Linear(dim, n_out)

    def tokens(self, x):
        x = self.embed(x).flatten(2).transpose(1,2)
        return torch.cat([self.cls.to(x.dtype).expand(len(x), -1, -1), x], 1)
    def head(self, x): return self.out(x[:,0])

class GPT(Transformer):
    "Words, and the embedding again as the last layer"
    def __init__(self, vocab, length, dim, hidden, heads, depth):
        super().__init__(nn.Embedding(vocab, dim), length, dim, hidden, heads, depth, causal=True)
        nn.init.normal_(self.embed.weight, std=.02)

    def tokens(self, x): return self.embed(x)
    def head(self, x): return F.linear(x, self.embed.weight)

@cache
def _consts(n, size, dtype, device):
    "Gradients of `n` parameters; no module holds them, as its half-precision tensors would be cast after each call"
    return [torch.full((size,), 1e-3, dtype=dtype, device=device) for _ in range(n)]

class Constant(torch.autograd.Function):
    "No forward pass to speak of, and a backward pass that only writes its results"
    @staticmethod
    def forward(ctx, x, *ps):
        ctx.consts = _consts(len(ps), len(ps[0]), ps[0].dtype, ps[0].device)
        return x.new_zeros(len(x), 2)

    @staticmethod
    def backward(ctx, g):
        g = g[0,0].to(ctx.consts[0].dtype) # with another dtype CUDA would need a kernel for each
        return None,*torch._foreach_mul(ctx.consts, g)

class Weights(nn.Module):
    "`n` parameters with `size` numbers each, and nothing to compute; under autocast they are cast"
    def __init__(self, n, size):
        super().__init__()
        for i in range(n): self.register_parameter(f'p{i}', nn.Parameter(torch.randn(size)))

    def forward(self, x):
        ps,dev = list(self._parameters.values()),x.device.type
        half = torch.get_autocast_dtype(dev) if torch.is_autocast_enabled(dev) else ps[0].dtype
        if ps[0].dtype!=half: ps = [p.to(half) for p in ps]
        return Constant.apply(x, *ps)

def loss_func(pred, y): return F.cross_entropy(pred.flatten(0, -2), y.flatten())

class Task(NamedTuple):
    name:str
    make:object           # () -> model
    shape:tuple           # of one input: an image, numbers, or as many words
    n_out:int             # classes, or words
    batch:int             # inputs in a batch
    channels_last:bool=False

    def model(self, dev):
        "The same random weights each time, made where they are wanted"
        torch.manual_seed(0)
        with torch.device(dev): model = self.make()
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def data(self, dev, batch=None):
        gen,batch = torch.Generator(dev).manual_seed(0),batch or self.batch
        def ints(*shape): return torch.randint(self.n_out, shape, device=dev, generator=gen)
        if self.name.startswith('gpt'): return ints(batch, *self.shape),ints(batch, *self.shape)
        x = torch.randn(batch, *self.shape, device=dev, generator=gen)
        if self.channels_last: x = x.contiguous(memory_format=torch.channels_last)
        return x,ints(batch)
