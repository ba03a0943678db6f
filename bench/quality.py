"""Does it learn as well? Small models trained to the end in each precision, with many seeds

The tasks are made of data that ships with libraries: scikit-learn's digits, wine, breast cancer and diabetes, and the
text of Python's documentation. A seed decides initial weights, order of batches and dropout, the same in each
precision; the split into training and validation data is always the same. The row `nudged` is float32 with each initial
weight moved to the next number of float32: the difference that any other rounding makes.

What is compared is the final validation loss, as the learner computes it, in its precision. The margin, chosen before
the measurement: a precision counts as equivalent if its mean difference to float32, seed by seed, is smaller than half
the standard deviation of float32's losses over the seeds, by two one-sided tests (5 %). A run that ends in nan or in an
error is a failure of its precision.

Left out are float16 in models with convolutions where the device only emulates it, FP8 in models without a layer that
can have it, and `keep=nn.Embedding` in models without embeddings. FP8 is emulated where the device has none. fastai's
own callbacks run as in loops.py. Sizes, epochs and learning rates were tried with other seeds, 1000 and 1001."""
import pydoc_data.topics,re,warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import isfinite
from multiprocessing import get_context
from typing import Callable,NamedTuple

import torch.nn.functional as F
from fastai.basics import *
from fastai.callback.rnn import rnn_cbs
from fastai.callback.schedule import *
from fastai.layers import ConvLayer,LinBnDrop
from fastai.metrics import Dice,accuracy,mae
from fastai.tabular.model import TabularModel
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import get_text_classifier
from sklearn.datasets import load_breast_cancer,load_diabetes,load_digits,load_wine
from torch import nn

from common import *
from equivalence import compare,forest
from loops import FastaiNative,Variant,emulated
from mp_callbacks.devices import support
from mp_callbacks.fp8 import Fp8
from mp_callbacks.half import half_precision
from models import GPT,Transformer

# --- Data

def loaders(train, valid, bs, dev):
    "Batches of the tensors `train` in a new order each epoch, and of `valid`"
    def _dl(tensors, **kwargs):
        tensors = [o.to(dev) for o in tensors]
        def _batch(idxs): return tuple(o[idxs] for o in tensors)
        return DataLoader(n=len(tensors[0]), bs=bs, indexed=True, device=dev, create_item=noop, create_batch=_batch,
                          retain=noop, **kwargs)
    return DataLoaders(_dl(train, shuffle=True, drop_last=True), _dl(valid), device=dev)

def split(*tensors, valid=.3):
    "Random rows for training and for validation, always the same ones"
    idxs = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(0))
    n = round(valid*len(idxs))
    return [[o[i] for o in tensors] for i in (idxs[n:],idxs[:n])]

def rows_of(load):
    "Standardized columns and targets of a dataset of scikit-learn"
    x,y = load(return_X_y=True)
    return torch.tensor((x-x.mean(0))/x.std(0), dtype=torch.float32),torch.tensor(y)

def digits():
    x,y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1,1,8,8)/8-1,torch.tensor(y)

def noisy_digits():
    "Digits of 16 by 16 pixels under noise, and which pixels are the digit's"
    x = F.interpolate(digits()[0], scale_factor=2, mode='bilinear')
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return x+noise,(x[:,0]>0).long()

def diabetes():
    "Sex and decade of life as categories, the other columns, and the standardized progression of the disease"
    x = load_diabetes(scaled=False).data
    cats = torch.tensor([x[:,1]-1,x[:,0]//10]).long().T
    xs,y = rows_of(load_diabetes)
    return cats,xs[:,2:],((y-y.mean())/y.std()).float()[:,None]

def characters(length, n_train, n_valid):
    "Passages of Python's documentation, each with the characters that follow; those for validation from its end"
    text = torch.tensor(list(' '.join(pydoc_data.topics.topics.values()).encode('ascii', 'replace')))
    passages = text[:len(text)//(length+1)*(length+1)].view(-1,length+1)
    return [(o[:,:-1],o[:,1:]) for o in (passages[:n_train],passages[-n_valid:])]

def topics(length, n_topics, n_words):
    "Passages of the longest topics of Python's documentation as numbers of words (0: a rare one), and their topics"
    texts = [re.findall(r'\w+|[^\w\s]', o) for o in pydoc_data.topics.topics.values()]
    texts = sorted(texts, key=len)[-n_topics:]
    common = [o for o,_ in Counter(w for o in texts for w in o).most_common(n_words-2)]
    numbers = {o:i+2 for i,o in enumerate(common)} # 1 is fastai's padding
    passages = [torch.tensor([numbers.get(w, 0) for w in o])[:len(o)//length*length].view(-1,length) for o in texts]
    return torch.cat(passages),torch.cat([torch.full((len(o),), i) for i,o in enumerate(passages)])

# --- Models

def mlp(n_in, n_out, hidden=64):
    sizes = [n_in,hidden,hidden]
    layers = [LinBnDrop(i, o, bn=False, p=.1, act=nn.ReLU(), lin_first=True) for i,o in zip(sizes,sizes[1:])]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden, n_out))

def conv(n_out, group_norm=False):
    def _layer(i, o, stride):
        if not group_norm: return ConvLayer(i, o, stride=stride)
        layer = ConvLayer(i, o, stride=stride, norm_type=None, act_cls=None)
        return nn.Sequential(layer, nn.GroupNorm(4, o), nn.ReLU())
    body = nn.Sequential(_layer(1, 16, 1), _layer(16, 32, 2), _layer(32, 64, 2))
    return nn.Sequential(body, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, n_out)))

class PatchViT(Transformer):
    "A transformer on patches of 2 by 2 pixels, which a linear layer embeds"
    def __init__(self, dim=32, n_out=10):
        super().__init__(nn.Linear(4, dim), 16, dim, 2*dim, 4, 2, causal=False)
        self.out = nn.Linear(dim, n_out)
    def tokens(self, x): return self.embed(F.unfold(x, 2, stride=2).transpose(1,2))
    def head(self, x): return self.out(x.mean(1))

class UNet(nn.Module):
    "Down twice, up twice, and shortcuts between"
    def __init__(self, width=8):
        super().__init__()
        sizes = 1,width,2*width,4*width
        self.down = nn.ModuleList(ConvLayer(i, o, stride=1+(i>1)) for i,o in zip(sizes,sizes[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i,o in ((2*width,4*width), (width,2*width)))
        self.join = nn.ModuleList(ConvLayer(2*o, o) for o in (2*width,width))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        levels = []
        for layer in self.down: levels.append(x := layer(x))
        for up,join,level in zip(self.up, self.join, levels[-2::-1]): x = join(torch.cat([up(x),level], 1))
        return self.head(x)

# --- Tasks

def classifier(dls, model, **kwargs):
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def digits_task(model, dev): return classifier(loaders(*split(*digits()), 32, dev), model())

def vit_task(dev): return digits_task(PatchViT, dev)

def gpt_task(dev): return classifier(loaders(*characters(16, 3200, 200), 16, dev), GPT(128, 16, 32, 128, 4, 2))

def lstm_task(dev):
    config = dict(emb_sz=64, n_hid=64, n_layers=2)
    model = get_text_classifier(AWD_LSTM, 1000, 8, config=config, drop_mult=.5)
    return classifier(loaders(*split(*topics(20, 8, 1000)), 32, dev), model, cbs=rnn_cbs())

def diabetes_task(dev):
    model = TabularModel([(2,4), (8,8)], 8, 1, [64,32], ps=.1)
    return Learner(loaders(*split(*diabetes()), 32, dev), model, loss_func=MSELossFlat(), metrics=mae)

class NoCategories(TabularModel):
    def forward(self, x): return super().forward(None, x)

def cancer_task(dev):
    return classifier(loaders(*split(*rows_of(load_breast_cancer)), 32, dev), NoCategories([], 30, 2, [64,32], ps=.1))

def wine_task(dev): return classifier(loaders(*split(*rows_of(load_wine)), 16, dev), mlp(13, 3))

def unet_task(dev):
    dls = loaders(*split(*noisy_digits()), 32, dev)
    return Learner(dls, UNet(), loss_func=CrossEntropyLossFlat(axis=1), metrics=Dice())

def halves(model): return [params(model[0]),params(model[1])]

def fine_tune_task(dev):
    "A ConvNet that knows 0 to 4, in float32, learns 5 to 9 with a new head"
    x,y = digits()
    def _dls(new): return loaders(*split(x[(y>4)==new], y[(y>4)==new]%5), 32, dev)
    learn = classifier(_dls(False), conv(5), splitter=halves)
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(1, 3e-3)
    model = nn.Sequential(learn.model[0], conv(5)[1])
    return classifier(_dls(True), model, splitter=halves)

class Task(NamedTuple):
    learner:Callable      # device -> `Learner` in float32
    epochs:int
    lr:float
    fit:Callable=Learner.fit_one_cycle

tasks = dict(
    mlp       = Task(partial(digits_task, partial(mlp, 64, 10)), 6, 3e-3),
    conv_bn   = Task(partial(digits_task, partial(conv, 10)), 5, 3e-3),
    conv_gn   = Task(partial(digits_task, partial(conv, 10, group_norm=True)), 6, 3e-3),
    vit       = Task(vit_task, 4, 1e-2),
    gpt       = Task(gpt_task, 2, 5e-3),
    lstm      = Task(lstm_task, 3, 1e-2),
    diabetes  = Task(diabetes_task, 12, 3e-3),
    cancer    = Task(cancer_task, 10, 3e-3),
    wine      = Task(wine_task, 15, 3e-3),
    unet      = Task(unet_task, 3, 3e-3),
    fine_tune = Task(fine_tune_task, 4, 1e-2, Learner.fine_tune))

# --- Precisions

def nudge(learn):
    "Move each weight to the next number of float32"
    with torch.no_grad():
        for p in learn.model.parameters(): p.copy_(p.nextafter(torch.full_like(p, torch.inf)))

def theirs(mode): return lambda learn: learn.add_cb(FastaiNative(mode))
def to_fp8(learn): learn.to_fp8(emulate=emulated(learn.dls.device))
def ours(precision): return Variant('ours', 'fastai', precision)
def of_fastai(precision): return Variant('fastai', 'fastai', precision)

ways = {
    of_fastai('fp32'):             noop,
    of_fastai('fp32, nudged'):     nudge,
    ours('bf16'):                  Learner.to_bf16,
    ours('bf16, embeddings kept'): partial(Learner.to_bf16, keep=nn.Embedding),
    ours('autocast-bf16'):         Learner.to_native_bf16,
    of_fastai('autocast-bf16'):    theirs('bf16'),
    ours('fp16'):                  Learner.to_fp16,
    ours('autocast-fp16'):         Learner.to_native_fp16,
    of_fastai('autocast-fp16'):    theirs('fp16'),
    ours('fp8-tensorwise'):        to_fp8}

def has(model, *kinds): return any(isinstance(m, kinds) for m in model.modules())

def can_fp8(model):
    try: half_precision(model, torch.bfloat16, fp8=Fp8('tensorwise', emulate=True))
    except ValueError: return False # no layer can have it
    return True

def fits(v, learn):
    "Is there something to see for variant `v` of `learn`?"
    if 'kept' in v.precision: return has(learn.model, nn.Embedding)
    if 'fp8' in v.precision: return can_fp8(learn.model)
    convolutions = has(learn.model, nn.Conv2d, nn.ConvTranspose2d)
    return not ('fp16' in v.precision and convolutions and support(learn.dls.device, 'float16')=='emulated')

# --- Measurement

class Skips(Callback):
    "How many steps there were, and how many of them were skipped"
    def __init__(self): self.steps = self.skipped = 0
    def after_step(self): self.steps += 1 # also of a skipped one
    def after_cancel_step(self): self.skipped += 1

def train(task, v, learn, epochs):
    "Rows of (metric, value, note)"
    skips = Skips()
    learn.add_cb(skips)
    with learn.no_bar(),learn.no_logging(): task.fit(learn, epochs, task.lr)
    *_,loss,metric = learn.recorder.values[-1]
    learn.remove_cbs([FastaiNative,Skips])
    if v.loop=='ours': learn.to_fp32()
    with learn.no_bar(),learn.no_logging(): of_weights = learn.validate()[0]
    if not isfinite(loss): raise FloatingPointError(f'the validation loss is {loss}')
    yield 'loss',loss,''
    yield 'metric',metric,learn.metrics[0].name
    yield 'loss in float32',of_weights,'' # of the same weights
    yield 'skipped',skips.skipped,f'of {skips.steps} steps'

def close_autocast(learn):
    "After an exception fastai's callback would leave it open, and no later run would learn"
    for cb in learn.cbs:
        left_open = isinstance(cb, FastaiNative) and torch.is_autocast_enabled(learn.dls.device.type)
        if left_open: cb.autocast.__exit__(None, None, None)

def run(name, seed, dev, epochs):
    "Rows of (variant, turn, metric, value, note) of all precisions with a seed"
    torch.set_num_threads(1)
    warnings.filterwarnings('ignore')
    task,rows = tasks[name],[]
    for v,change in ways.items():
        set_seed(seed)
        learn = task.learner(torch.device(dev))
        if not fits(v, learn): continue
        change(learn)
        set_seed(seed) # dropout and order of batches
        try: rows += [(v,1,*row) for row in train(task, v, learn, epochs or task.epochs)]
        except Exception as e:
            rows.append((v, 1, explained(e)[0], 0, explained(e)[1]))
            close_autocast(learn)
    return rows

def result(future): yield from future.result()

def main():
    p = arguments(__doc__)
    p.add_argument('--tasks', nargs='+', choices=tasks, default=[*tasks], help='tasks [all]')
    p.add_argument('--seeds', type=int, help='how many seeds [24; with --tiny 2]')
    p.add_argument('--device', help='where to train [CUDA where there is one]')
    p.add_argument('--workers', type=int, default=2, help='processes, each with one thread [2]')
    torch.set_num_threads(1)
    args,dev,results = start(p, 'quality_{dev}')
    seeds = args.seeds or (2 if args.tiny else 24)
    missing = [(o,seed) for seed in range(seeds) for o in args.tasks if not results.has('quality', o, seed)]
    with ProcessPoolExecutor(args.workers, get_context('spawn')) as pool:
        futures = {o:pool.submit(run, *o, dev, 1 if args.tiny else None) for o in missing}
        for (name,seed),future in futures.items(): results.measure('quality', name, seed, result(future))
    df = results.read()
    df = df[df.case.isin(args.tasks)]
    forest(compare(df)).savefig(results.path.with_suffix('.png'), dpi=150)
    columns,text = 'float32 sd mean difference low high p failed verdict'.split(),[]
    for metric,title in dict(loss='Validation loss', metric='Metric').items():
        text += [f'\n## {title}\n', markdown(compare(df, metric)[columns])]
    results.write('Does it learn as well?', text, of='all seeds', kind='means')

if __name__=='__main__': main()
