"The models that are measured, and batches of random numbers for them"
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

def mlp(dim, layers, n_out): return nn.Sequential(*[m for _ in range(layers-1) for m in (nn.Linear(dim, dim), nn.ReLU())], nn.Linear(dim, n_out))

def conv(width, layers, n_out):
    "Convolution, batch norm and ReLU, again and again: the image halves and the channels double each time"
    dims = [3, *[width*2**i for i in range(layers)]]
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()) for i,o in zip(dims,dims[1:])],
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dims[-1], n_out))

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
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1,2).flatten(2))
        return x + self.mlp(self.norm2(x))

class Transformer(nn.Module):
    "What a ViT and a GPT have in common. `embed` and `head` make the difference."
    def __init__(self, embed, tokens, dim, hidden, heads, depth, causal):
        super().__init__()
        self.embed,self.pos = embed,nn.Parameter(torch.randn(tokens, dim)*.02)
        self.blocks,self.norm = nn.Sequential(*[Block(dim, hidden, heads, causal) for _ in range(depth)]),nn.LayerNorm(dim)

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
        return (x.contiguous(memory_format=torch.channels_last) if self.channels_last else x),ints(batch)
