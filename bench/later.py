"""After the first batch: what is learned, loaded or larger later, and is half precision as exact as autocast then?

In each case the first batch doesn't show what later ones do: numbers that grow while they are learned, weights that are
loaded after a first step, gradients of zero, short sequences before long ones, layers that initialise themselves, and
noise from a module's own generator. Each trains in a learner and in a loop: in float32, under autocast (in the learner
`to_native_fp16` and its like), by our rules without a measure, and with it; with several seeds, which decide weights,
data and batches, the same in each precision. What is compared is the validation loss in the precision that was trained
in, or the error beside float32: of a gradient or an update, relative to its norm, or of predictions, in pixels.

And false alarms: which modules are named in ten epochs of the five tasks of quality.py, and of families of models of
timm, torchvision and transformers, chosen by a seed among those that families.py could measure, after 40 steps with
Adam on fresh batches, in which the measures before the first step and before step 32 have been made? Inputs and targets
are random, so there is always something to learn, and no model is better than another."""
import random,warnings
from contextlib import nullcontext

import numpy as np
from fastai.basics import *
from torch.nn import functional as F

from common import *
from loops import Loaders,Variant
from mp_callbacks.core.training_steps import TrainingSteps

dtypes = dict(bfloat16=bf16, float16=fp16)
ways = 'fp32','autocast','rules','measured'

# --- A training in a precision

class Trained:
    "A `model` in a precision: `way` and `dtype`. Parameters outside of `net` have a learning rate of their own."
    def __init__(self, model, way, dtype, compute_loss=F.l1_loss, opt=torch.optim.Adam):
        self.model,self.way,self.dtype,self.loss_func = model,way,dtype,compute_loss
        self.begin(opt)

    def groups(self, model):
        "Parameters of our own, and those of `net`"
        named = [*model.named_parameters()]
        return [[p for k,p in named if k.startswith('net')==o] for o in (False,True)]

    def compute_loss(self, model, x, y): return self.loss_func(model(x).float(), y)

    def loss(self, x, y):
        "The loss of a batch, as a validation has it"
        self.model.eval()
        with torch.no_grad(),self.context(): return self.compute_loss(self.model, x, y).item()

    def predict(self, x):
        self.model.eval()
        with torch.no_grad(),self.context(): return self.model(x).float()

    def gradient(self, x, y, context):
        "Of all parameters, as one vector; the second one, as the first casts nothing ahead"
        self.model.train()
        for _ in range(2):
            self.model.zero_grad()
            with context: self.compute_loss(self.model, x, y).backward()
        res = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.requires_grad])
        self.model.zero_grad()
        return res

    def gradient_error(self, x, y):
        "How far the gradient is from float32's, from the same weights"
        full = self.gradient(x, y, nullcontext())
        return ((self.gradient(x, y, self.context())-full).norm()/full.norm()).item()

class InLearner(Trained):
    def begin(self, opt):
        self.learn = Learner(Loaders('cpu'), self.model, loss_func=lambda pred, y: self.loss_func(pred.float(), y),
                             opt_func=partial(OptimWrapper, opt=opt), splitter=self.groups)
        name = 'fp16' if self.dtype==fp16 else 'bf16'
        if self.way=='autocast': getattr(self.learn, f'to_native_{name}')()
        elif self.way!='fp32': getattr(self.learn, f'to_{name}')(measure=self.way=='measured')

    def train(self, batches, lrs):
        self.learn.dls[0] = batches
        with self.learn.no_bar(),self.learn.no_logging(): self.learn.fit(1, lr=lrs)

    def context(self): return self.learn.mixed_precision.half if self.way!='fp32' else nullcontext()

class InLoop(Trained):
    def begin(self, opt):
        self.opt = opt([dict(params=o, lr=0.) for o in self.groups(self.model)], lr=0.)
        self.scaler = torch.amp.GradScaler('cpu', 2.**10, enabled=self.way=='autocast' and self.dtype==fp16)
        self.steps = None
        if self.way in ('rules','measured'):
            self.steps = TrainingSteps(self.model, self.opt, self.dtype, compute_loss=self.compute_loss,
                                       measure=self.way=='measured')

    def train(self, batches, lrs):
        self.model.train()
        for group,lr in zip(self.opt.param_groups, lrs): group['lr'] = lr
        for o in batches: (self.our_step if self.steps else self.plain_step)(*o)

    def our_step(self, x, y):
        with self.steps.batch(x, y): self.steps.backward(self.compute_loss(self.model, x, y))
        self.steps.make()

    def plain_step(self, x, y):
        with self.context(): loss = self.compute_loss(self.model, x, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def context(self):
        if self.steps: return self.steps.half
        return torch.autocast('cpu', self.dtype) if self.way=='autocast' else nullcontext()

# --- Data and models

places = 32 # numbers in pixels that are predicted

def pixels(n=32, at=600., least=200.):
    "Functions of random inputs around places in pixels: a batch of `n` items"
    gen = torch.Generator().manual_seed(0) # these places and functions, always
    w,place = torch.randn(32, places, generator=gen),torch.rand(places, generator=gen)*at+least
    x = torch.randn(n, 32)
    return x,place+2*torch.tanh(x@w/5)

def net(n_out=places): return nn.Sequential(nn.Linear(32,64), nn.ReLU(), nn.Linear(64,n_out))

class Points(nn.Module):
    "Places that are learned from zeros"
    def __init__(self): super().__init__(); self.net,self.ref = net(),nn.Parameter(torch.zeros(places))
    def forward(self, x): return self.ref+self.net(x)

class Table(nn.Module):
    "The same as an embedding: a row of places for each kind of input, from zeros, or behind gates that begin small"
    def __init__(self, gate=None):
        super().__init__()
        self.net,self.place = net(),nn.Embedding(4, places)
        if gate is None: nn.init.zeros_(self.place.weight)
        self.gate = 1. if gate is None else nn.Parameter(torch.full((places,), gate))
    def forward(self, x): return self.gate*self.place((x[:,0]>0).long()+2*(x[:,1]>0).long())+self.net(x)

class Distance(nn.Module):
    "How much nearer a triple of a graph is than one that was made up (TransE)"
    def __init__(self):
        super().__init__()
        self.entity,self.relation = nn.Embedding(50,32),nn.Embedding(5,32)
        with torch.no_grad():
            self.entity.weight.mul_(.02).add_(1.)
            self.relation.weight.mul_(.02)
    def distance(self, h, r, t): return (self.entity(h)+self.relation(r)-self.entity(t)).norm(dim=-1)
    def forward(self, x): return self.distance(*x[:,:3].T)-self.distance(*x[:,:2].T, x[:,3])

class Times(nn.Module):
    "Waves of times, which are read from a table: an embedding rounds those above 256"
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding.from_pretrained(torch.arange(512.)[:,None].repeat(1, 16))
        self.wave,self.out = nn.Parameter(torch.rand(16)+.5),nn.Linear(16,1)
    def forward(self, x): return self.out(torch.sin(self.time(x)*self.wave)).mean(1)

class Flag: ready = False

class Whitens(nn.Module):
    "Scales by its first batch, and remembers in an object that it has"
    def __init__(self):
        super().__init__()
        self.scale,self.state,self.net = nn.Parameter(torch.ones(8)),Flag(),nn.Linear(8,1)
    def forward(self, x):
        if not self.state.ready:
            with torch.no_grad(): self.scale.copy_(1/x.float().std(0))
            self.state.ready = True
        return self.net(x*self.scale)

class Noise(nn.Module):
    "Multiplies by noise of a generator of its own"
    def __init__(self, kind):
        super().__init__()
        self.layers,self.kind = nn.Sequential(nn.Linear(32,64), nn.GELU(), nn.Linear(64,1)),kind
        self.own = dict(torch=torch.Generator().manual_seed(1), numpy=np.random.default_rng(1),
                        python=random.Random(1))[kind]
    def forward(self, x):
        noise = dict(torch=lambda o: torch.randn(x.shape, generator=o), python=lambda o: o.gauss(0, 1),
                     numpy=lambda o: torch.tensor(o.normal(size=x.shape)).float())[self.kind](self.own)
        return self.layers(x*(1+noise))

# --- The cases: functions of how to train, which return what is compared

# steps, and learning rates of the parameters outside of `net` and of `net`
phases = (320,(8.,1e-3)),(192,(.3,1e-3)),(192,(.01,3e-4))

def learned(make, trained, **kwargs):
    "The validation loss after places were learned"
    o = trained(make())
    for n,lrs in phases: o.train([pixels(**kwargs) for _ in range(n)], lrs)
    return o.loss(*pixels(256, **kwargs))

def weights_of(make):
    "Weights that float32 has learned from the same beginning; the random numbers are as before"
    with torch.random.fork_rng():
        o = InLoop(make(), 'fp32', None)
        for n,lrs in phases: o.train([pixels() for _ in range(n)], lrs)
        return o.model.state_dict()

def loaded(make, trained):
    "The validation loss of weights that were loaded after a first step, and trained on"
    weights,o = weights_of(make),trained(make())
    o.train([pixels()], (.01,3e-4))
    o.model.load_state_dict(weights)
    o.train([pixels() for _ in range(64)], (.01,3e-4))
    return o.loss(*pixels(256))

def warmed_up(make, trained):
    "The largest error of predictions, in pixels, of weights that were loaded after a first call"
    weights,o,(x,_) = weights_of(make),trained(make()),pixels()
    o.predict(x)
    o.model.load_state_dict(weights)
    found = o.predict(x)
    with torch.no_grad(): return (found-o.model(x)).abs().max().item()

def hinge(trained):
    "The error of a gradient after a first batch in which nothing was within the margin"
    def _batch(margin): return torch.stack([torch.randint(o, (16,)) for o in (50,5,50,50)], 1),torch.full((16,), margin)
    o = trained(Distance(), compute_loss=lambda pred, y: F.relu(y+pred).mean(), opt=torch.optim.SGD)
    o.train([_batch(-10.), *[_batch(.05) for _ in range(3)]], (.1,.1))
    return o.gradient_error(*_batch(.05))

def long_sequences(trained):
    "The error of a gradient with sequences of 512, after short ones"
    def _batch(n): return torch.randint(n, (16,n)),torch.randn(16, 1)
    o = trained(Times(), compute_loss=F.mse_loss, opt=torch.optim.SGD)
    o.train([_batch(n) for n in (16,16,512,512)], (1e-3,1e-3))
    return o.gradient_error(*_batch(512))

def initialised(trained):
    "The validation loss of a layer that takes its scale from its first batch"
    def _batch(): x = torch.randn(16,8)*100; return x,x[:,:1]/100
    o = trained(Whitens(), compute_loss=F.mse_loss, opt=torch.optim.SGD)
    o.train([_batch() for _ in range(50)], (0.,.01))
    return o.loss(*_batch())

def noise(kind, trained):
    "The error of the first update beside float32's, from the same noise"
    x,moved = torch.randn(64,32),[]
    for make in (partial(InLoop, way='fp32', dtype=None),trained):
        torch.manual_seed(2)
        model = Noise(kind)
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        o = make(model, compute_loss=F.mse_loss, opt=torch.optim.SGD)
        o.train([(x,x[:,:1])], (.1,.1))
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()])-before)
    return ((moved[1]-moved[0]).norm()/moved[0].norm()).item()

cases = {
    'points from zeros to pixels':           partial(learned, Points),
    'a table from zeros to pixels':          partial(learned, Table),
    'levels from 0 to 280':                  partial(learned, Table, at=280., least=0.),
    'a table behind gates of 1e-5':          partial(learned, partial(Table, 1e-5)),
    'points, loaded after a step':           partial(loaded, Points),
    'a table, loaded after a step':          partial(loaded, Table),
    'predictions, loaded after a call':      partial(warmed_up, Points),
    'a hinge that is satisfied at first':    hinge,
    'short sequences, then long ones':       long_sequences,
    'a layer that initialises itself':       initialised,
    **{f"noise of {o}'s own generator":      partial(noise, o) for o in ('torch','numpy','python')}}
loops = dict(learner=InLearner, loop=InLoop)

# --- False alarms

def named(measured):
    "Rows of (metric, value, note) of what was measured: names, and where"
    at = ' '.join(map(str, measured.steps))
    yield 'named',len(measured.names),measured.why or ' '.join(o or 'the-model-itself' for o in measured.names)
    yield 'measures',len(measured.steps),at

def task(name, epochs=10):
    "Rows of (variant, turn, metric, value, note) of a task of quality.py"
    import quality
    torch.manual_seed(0)
    learn = quality.tasks[name].learner(torch.device('cpu')).to_bf16()
    with learn.no_bar(),learn.no_logging(): learn.fit(epochs, quality.tasks[name].lr)
    for row in named(learn.mixed_precision.state.measured): yield Variant('learner','','measured'),1,*row

def shuffled(o):
    "Tensors in any structure of arguments, with their numbers in another order"
    if isinstance(o, torch.Tensor): return o.flatten()[torch.randperm(o.numel())].view_as(o)
    if isinstance(o, dict): return {k:shuffled(v) for k,v in o.items()}
    return type(o)(map(shuffled, o)) if isinstance(o, (list,tuple)) else o

def after_steps(library, names, n=40):
    "Rows of (precision, metric, value, note) of a family after `n` steps"
    import families
    name,model,inputs = families.small_model(library, names)
    args,kwargs,_ = families.in_float32(model, inputs)
    def _loss(model, args, kwargs, seed):
        outs = [o for o in families.tensors(model(*args, **kwargs)) if o.requires_grad]
        gen = torch.Generator().manual_seed(seed)
        return sum(F.mse_loss(o.float(), torch.randn(o.shape, generator=gen)) for o in outs)
    steps = TrainingSteps(model, torch.optim.Adam(model.parameters(), 1e-3), bf16, compute_loss=_loss)
    for i in range(n):
        batch = shuffled(args),shuffled(kwargs),i
        with steps.batch(*batch): steps.backward(_loss(model, *batch))
        steps.make()
    for row in named(steps.state.measured): yield 'measured',*row

def some_families(n):
    "Pairs of a library and a family that could be measured in a first batch, by a seed"
    df = pd.read_csv(Path(__file__).parent/'results/measured_families_cpu.csv', comment='#', keep_default_na=False)
    could = df[df.metric=='named'][['part','case']].drop_duplicates().sort_values(['part','case'])
    return [*could.sample(n, random_state=0).itertuples(index=False, name=None)]

def run_families(n, seconds, results):
    import families
    makes = {o:getattr(families, f'{o}_families')() for o in families.libraries}
    families.transformers_model('GPT2Model') # what it imports then, each fork would import again
    for library,name in some_families(n):
        rows = families.in_a_process(after_steps, library, makes[library][name], nullcontext(), seconds)
        results.measure('families', f'{library} {name}', '', rows)

def alarms(df):
    "How many trainings were measured, of how many a module is named, and of which"
    rows = {}
    for part,o in df[df.part!='later'].groupby('part', sort=False):
        found = o[(o.metric=='named') & ((o.value>0) | (o.note==''))] # a note without a name is why it wasn't measured
        bad = found[found.value>0]
        rows[part] = {'trainings':o.case.nunique(), 'measured':len(found), 'named':len(bad),
                      'which':', '.join(f'{a}: {b}' for a,b in zip(bad.case, bad.note)) or 'none',
                      'measures, each':o[o.metric=='measures'].value.median()}
    return pd.DataFrame(rows).T.rename_axis('part')

def run(case, dtype, seeds):
    "Rows of (variant, seed, metric, value, note)"
    for name,loop in loops.items():
        for way in ways:
            for seed in range(seeds):
                torch.manual_seed(seed)
                yield Variant(name,'',way),seed,'result',case(partial(loop, way=way, dtype=dtype)),''

def table(df):
    "A row for each case and dtype, in each loop: medians of each precision, and autocast's smallest and largest"
    keys = ['case','size','loop']
    df = df[df.metric=='result']
    res = df.pivot_table(index=keys, columns='precision', values='value', aggfunc='median', sort=False)
    spread = df[df.precision=='autocast'].groupby(keys, sort=False).value.agg(['min','max'])
    res['seeds of autocast'] = [f'{a:.3g} to {b:.3g}' for a,b in spread.reindex(res.index).itertuples(index=False)]
    return res[['fp32','autocast','seeds of autocast','rules','measured']]

def main():
    p = arguments(__doc__)
    parts = ['later','tasks','families']
    p.add_argument('--parts', nargs='*', choices=parts, default=parts, help='parts [all]')
    p.add_argument('--only', nargs='*', choices=cases, default=[*cases], help='cases of the part `later` [all]')
    p.add_argument('--families', type=int, default=100, help='how many families [100]')
    p.add_argument('--seconds', type=int, default=120, help='seconds that a family may take [120]')
    p.add_argument('--seeds', type=int, default=3, help='how many seeds [3]')
    torch.set_num_threads(1)
    args,_,results = start(p, 'later_cpu')
    warnings.filterwarnings('ignore')
    if args.tiny: globals()['phases'] = [(2,lrs) for _,lrs in phases]
    for name in args.only if 'later' in args.parts else ():
        for dtype in dtypes: results.measure('later', name, dtype, run(cases[name], dtypes[dtype], args.seeds))
    if 'tasks' in args.parts:
        for name in ('mlp','wine','cancer','diabetes','gpt'):
            results.measure('tasks', name, '', task(name, 1 if args.tiny else 10))
    if 'families' in args.parts: run_families(1 if args.tiny else args.families, args.seconds, results)
    df = results.read()
    later = df.part=='later'
    text = [markdown(table(df))] if later.any() else []
    if not later.all(): text += ['\n## False alarms\n', markdown(alarms(df))]
    results.write('After the first batch', text, of='all seeds')

if __name__=='__main__': main()
