"""Does it learn as well? Small models trained in each precision, and with defects that must be found, with many seeds

The tasks are made of data that ships with libraries: scikit-learn's digits, wine, breast cancer and diabetes, and the
text of Python's documentation. A seed decides initial weights, order of batches and dropout, the same in each
precision; the split into training and validation data is always the same. The row `nudged` is float32 with each initial
weight moved to the next number of float32: the difference that any other rounding makes.

What is compared is the final validation loss, as the learner computes it, in its precision, less that of float32 with
the same seed. The rule, written down before the measurement: a precision is equivalent if the mean difference over 12
seeds lies within 0.5 % of float32's mean loss, by two one-sided t tests of 5 %. Otherwise it is higher or lower if
the interval of 95 % doesn't contain zero, and else unclear. A run that ends in nan or in an error is a failure of its
precision.

Positive controls are float32 with a defect: weights rounded to bfloat16 after each step, so that there are no master
weights; every tenth step lost; a learning rate of 1.1 and 1.3 times; noise of 30 % of each gradient's norm. And
float16 without a loss scale. The method finds a defect if its verdict is higher or lower.

Tasks, sizes, epochs and learning rates were chosen so that most of these defects show, in float32 with other seeds,
from 1000. So the runs are short: a model that would still learn a lot tells a tenth of the steps apart. Before
the margin was fixed, the script ran once in all precisions with --tiny: three tasks, two seeds and one epoch.

Left out are FP8 in models without a layer that can have it, and `keep=nn.Embedding` in models without embeddings. FP8
is emulated where the device has none."""
import pydoc_data.topics,warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache,partial
from math import isfinite
from multiprocessing import get_context
from typing import Callable,NamedTuple

from fastai.basics import *
from fastai.callback.schedule import *
from fastai.layers import LinBnDrop
from fastai.metrics import accuracy,mae
from fastai.tabular.model import TabularModel
from sklearn.datasets import load_breast_cancer,load_diabetes,load_digits,load_wine
from torch import nn

from common import *
from equivalence import compare,forest
from loops import Variant,emulated
from mp_callbacks.core.fp8 import Fp8
from mp_callbacks.core.half import half_precision
from models import GPT

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

@cache
def digits():
    x,y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1,1,8,8)/8-1,torch.tensor(y)

@cache
def diabetes():
    "Sex and decade of life as categories, the other columns, and the standardized progression of the disease"
    x = load_diabetes(scaled=False).data
    cats = torch.tensor([x[:,1]-1,x[:,0]//10]).long().T
    xs,y = rows_of(load_diabetes)
    return cats,xs[:,2:],((y-y.mean())/y.std()).float()[:,None]

@cache
def characters(length, n_train, n_valid):
    "Passages of Python's documentation, each with the characters that follow; those for validation from its end"
    text = torch.tensor(list(' '.join(pydoc_data.topics.topics.values()).encode('ascii', 'replace')))
    passages = text[:len(text)//(length+1)*(length+1)].view(-1,length+1)
    return [(o[:,:-1],o[:,1:]) for o in (passages[:n_train],passages[-n_valid:])]

# --- Models

def mlp(n_in, n_out, hidden=64):
    sizes = [n_in,hidden,hidden]
    layers = [LinBnDrop(i, o, bn=False, p=.1, act=nn.ReLU(), lin_first=True) for i,o in zip(sizes,sizes[1:])]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden, n_out))

# --- Tasks

def classifier(dls, model, **kwargs):
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

def mlp_task(dev): return classifier(loaders(*split(*digits()), 32, dev), mlp(64, 10))

def gpt_task(dev): return classifier(loaders(*characters(16, 960, 100), 16, dev), GPT(128, 16, 32, 128, 4, 1))

def diabetes_task(dev):
    model = TabularModel([(2,4), (8,8)], 8, 1, [64,32], ps=.1)
    return Learner(loaders(*split(*diabetes()), 32, dev), model, loss_func=MSELossFlat(), metrics=mae)

class NoCategories(TabularModel):
    def forward(self, x): return super().forward(None, x)

def cancer_task(dev):
    return classifier(loaders(*split(*rows_of(load_breast_cancer)), 32, dev), NoCategories([], 30, 2, [64,32], ps=.1))

def wine_task(dev): return classifier(loaders(*split(*rows_of(load_wine)), 16, dev), mlp(13, 3))

class Task(NamedTuple):
    learner:Callable # device -> `Learner` in float32
    epochs:int
    lr:float

tasks = dict(
    mlp      = Task(mlp_task, 3, 3e-3),
    wine     = Task(wine_task, 8, 3e-3),
    cancer   = Task(cancer_task, 5, 3e-3),
    diabetes = Task(diabetes_task, 6, 3e-4),
    gpt      = Task(gpt_task, 1, 2e-3))

# --- Precisions

def nudge(learn):
    "Move each weight to the next number of float32"
    with torch.no_grad():
        for p in learn.model.parameters(): p.copy_(p.nextafter(torch.full_like(p, torch.inf)))

class NoMasters(Callback):
    "Weights that have only the digits of bfloat16"
    def after_step(self):
        with torch.no_grad():
            for p in self.model.parameters(): p.copy_(p.bfloat16())

class LostSteps(Callback):
    "Every tenth step doesn't happen"
    steps = 0
    def before_step(self):
        self.steps += 1
        if self.steps%10==0: raise CancelStepException

class Noise(Callback):
    "Normal noise on each gradient, of 30 % of its norm"
    def __init__(self): self.generators = {} # of its own: dropout and order of batches stay the same
    def before_step(self):
        for p in self.model.parameters():
            dev,g = p.device,p.grad
            if dev not in self.generators: self.generators[dev] = torch.Generator(dev).manual_seed(0)
            noise = torch.randn(g.shape, device=dev, generator=self.generators[dev])
            g += .3*g.norm()/g.numel()**.5*noise

class Faster(Callback):
    "Multiply the learning rate that the schedule has set"
    def __init__(self, factor): self.factor = factor
    def before_step(self):
        for o in self.opt.hypers: o['lr'] *= self.factor

def to_fp8(learn): learn.to_fp8(emulate=emulated(learn.dls.device))
def ours(precision): return Variant('ours', 'fastai', precision)
def of_fastai(precision): return Variant('fastai', 'fastai', precision)
def control(defect): return Variant('control', 'fastai', defect)

ways = {
    of_fastai('fp32'):                     noop,
    of_fastai('fp32, nudged'):             nudge,
    ours('bf16'):                          Learner.to_bf16,
    ours('bf16, embeddings kept'):         partial(Learner.to_bf16, keep=nn.Embedding),
    ours('autocast-bf16'):                 Learner.to_native_bf16,
    ours('fp16'):                          Learner.to_fp16,
    ours('autocast-fp16'):                 Learner.to_native_fp16,
    ours('fp8-tensorwise'):                to_fp8,
    control('no master weights'):          lambda learn: learn.add_cb(NoMasters()),
    control('every tenth step lost'):      lambda learn: learn.add_cb(LostSteps()),
    control('30 % gradient noise'):        lambda learn: learn.add_cb(Noise()),
    control('learning rate × 1.1'):        lambda learn: learn.add_cb(Faster(1.1)),
    control('learning rate × 1.3'):        lambda learn: learn.add_cb(Faster(1.3)),
    control('float16 without loss scale'): partial(Learner.to_fp16, loss_scale=1, dynamic=False)}

def has(model, *kinds): return any(isinstance(m, kinds) for m in model.modules())

def can_fp8(model):
    try: half_precision(model, torch.bfloat16, fp8=Fp8('tensorwise', emulate=True))
    except ValueError: return False # no layer can have it
    return True

def fits(v, learn):
    "Is there something to see for variant `v` of `learn`?"
    if 'kept' in v.precision: return has(learn.model, nn.Embedding)
    return 'fp8' not in v.precision or can_fp8(learn.model)

# --- Measurement

class Skips(Callback):
    "How many steps there were, and how many of them were skipped"
    def __init__(self): self.steps = self.skipped = 0
    def after_step(self): self.steps += 1 # also of a skipped one
    def after_cancel_step(self): self.skipped += 1

def train(task, learn, epochs):
    "Rows of (metric, value, note)"
    skips = Skips()
    learn.add_cb(skips)
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(epochs, task.lr)
    *_,loss,metric = learn.recorder.values[-1]
    learn.to_fp32()
    with learn.no_bar(),learn.no_logging(): of_weights = learn.validate()[0]
    if not isfinite(loss): raise FloatingPointError(f'the validation loss is {loss}')
    yield 'loss',loss,''
    yield 'metric',metric,learn.metrics[0].name
    yield 'loss in float32',of_weights,'' # of the same weights
    yield 'skipped',skips.skipped,f'of {skips.steps} steps'

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
        try: rows += [(v,1,*row) for row in train(task, learn, epochs or task.epochs)]
        except Exception as e: rows.append((v, 1, explained(e)[0], 0, explained(e)[1]))
    return rows

def result(future): yield from future.result()

def main():
    p = arguments(__doc__)
    p.add_argument('--tasks', nargs='+', choices=tasks, default=[*tasks], help='tasks [all]')
    p.add_argument('--seeds', type=int, help='how many seeds [12; with --tiny 2]')
    p.add_argument('--device', help='where to train [CUDA where there is one]')
    p.add_argument('--workers', type=int, default=2, help='processes, each with one thread [2]')
    torch.set_num_threads(1)
    args,dev,results = start(p, 'quality_{dev}')
    seeds = args.seeds or (2 if args.tiny else 12)
    missing = [(o,seed) for seed in range(seeds) for o in args.tasks if not results.has('quality', o, seed)]
    with ProcessPoolExecutor(args.workers, get_context('spawn')) as pool:
        futures = {o:pool.submit(run, *o, dev, 1 if args.tiny else None) for o in missing}
        for (name,seed),future in futures.items(): results.measure('quality', name, seed, result(future))
    df = results.read()
    df = df[df.case.isin(args.tasks)]
    res = compare(df)
    forest(res).savefig(results.path.with_suffix('.png'), dpi=150)
    columns = 'float32 sd margin mean difference low high p failed verdict'.split()
    text = ['The margin is in the unit of the loss, the difference in percent of its mean in float32.\n',
            markdown(res[columns])]
    results.write('Does it learn as well?', text, of='all seeds', kind='means')

if __name__=='__main__': main()
