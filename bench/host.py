"""What a step costs the host, which a GPU waits for if the batch is small

The models are a ViT, a GPT and 240 weights, so narrow that arithmetic is nothing. The time is that of the thread, which
other work on the machine changes least, in turns in one process. It is split where fastai's events are:

- forward: from `before_batch` to `after_loss`, with the casts of weights and the loss
- backward: from there to `after_backward`, with the loss scale, and the gradients in float32
- check: from there to the end of `before_step`: unscaling, looking for inf and nan, clipping
- optimizer: AdamW(fused=True), or fastai's Adam
- between: all else, such as clearing gradients and fastai's recorder

`operations` is how many PyTorch dispatches in a step. Where there is a GPU, the same models run on it, too. They give
it so little work that it waits for the host, so the time of a step by the clock, `step_ms`, is what the step costs the
host. `kernels` is how many the GPU is given in a step, and `syncs` how often the host waits for it, as PyTorch's
profiler sees them."""
from collections import Counter
from time import thread_time_ns

from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from torch.profiler import ProfilerActivity,profile
from torch.utils._python_dispatch import TorchDispatchMode

from common import *
from loops import Hand,Variant,build
from models import GPT,Task,ViT,Weights

stages = 'forward','backward','check','optimizer','between'

class Laps(Clock):
    "CPU microseconds of this thread per step, for each of the `stages`"
    us,last = Counter(),0 # of the turn that is running

    @classmethod
    def lap(cls, stage):
        now = thread_time_ns()
        cls.us[stage],cls.last = cls.us[stage]+(now-cls.last)/1e3,now

    def __enter__(self):
        super().__enter__()
        Laps.us,Laps.last = Counter(),thread_time_ns()

    def __exit__(self, *args):
        Laps.lap('between')
        super().__exit__(*args)
        self.us = Laps.us

    def rows(self, n):
        yield 'step_us',sum(self.us.values())/n,''
        for o in stages: yield f'{o}_us',self.us[o]/n,''

class TimedHand(Hand):
    "A loop without a library, which clips as the others do"
    def __call__(self, batches):
        for x,y in batches:
            Laps.lap('between')
            self.push()
            loss = self.scaler.scale(self.forward(x, y))
            Laps.lap('forward')
            loss.backward()
            self.pull()
            Laps.lap('backward')
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.masters, 1.)
            Laps.lap('check')
            self.step()
            Laps.lap('optimizer')
            self.opt.zero_grad()

class First(Callback):
    order = -100
    def before_batch(self): Laps.lap('between')
    def after_backward(self): Laps.lap('backward')
    def after_step(self): Laps.lap('optimizer')

class Last(Callback):
    order = 100
    def after_loss(self): Laps.lap('forward')
    def before_step(self): Laps.lap('check')

class Operations(TorchDispatchMode):
    "Counts what PyTorch dispatches"
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))

def per_step(count, loop, batch):
    "The `count` of a run, per step of `loop`, without what a fit does once"
    one,three = count(lambda: loop([batch])),count(lambda: loop([batch]*3))
    return [(b-a)/2 for a,b in zip(one, three)]

def operations(run):
    "How many are dispatched"
    with Operations() as counted: run()
    return [counted.n]

def of_gpu(events):
    "How many kernels and waits there are in pairs of (name, on the GPU?) from the profiler"
    kernels = [name for name,on_gpu in events if on_gpu and not name.startswith(('Memcpy','Memset'))]
    waits = [name for name,on_gpu in events if not on_gpu and name.startswith('cuda') and name.endswith('Synchronize')]
    return [len(kernels),len(waits)]

def profiled(run):
    "How many kernels the GPU is given, and how often the host waits for it"
    with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as prof: run()
    return of_gpu([(o.name,o.device_type==torch.autograd.DeviceType.CUDA) for o in prof.events()])

def build_timed(v, model):
    "The loop that `v` names, around `model`, which clips and tells `Laps`"
    if v.loop=='hand':
        return TimedHand(v, model, lambda ps: torch.optim.AdamW(ps, lr=1e-9, fused=True))
    res = build(v, model)
    res.learn.add_cbs([First(),Last()])
    if v.loop=='fastai': res.learn.add_cb(GradientClip(1.))
    else: res.learn.mixed_precision.clip = 1.
    return res

variants = [Variant(loop, opt, precision) for dtype in ('fp16','bf16') for loop,opt,precision in (
    ('hand','fused',f'autocast-{dtype}'), ('hand','fused',dtype), ('fastai','fused',f'autocast-{dtype}'),
    ('ours','fused',f'autocast-{dtype}'), ('ours','fused',dtype), ('singly','fused',dtype),
    ('fastai','fastai',f'autocast-{dtype}'), ('ours','fastai',f'autocast-{dtype}'), ('ours','fastai',dtype))]

def tasks(depth, n):
    return [Task('vit', lambda: ViT(8, 4, 8, 16, 2, depth, 10), (3,8,8), 10, 2),
            Task('gpt', lambda: GPT(100, 8, 8, 16, 2, depth), (8,), 100, 2),
            Task(f'{n} weights', lambda: Weights(n, 8), (1,), 2, 1)]

def measure(task, turns, turn):
    "Rows of (variant, turn, metric, value, note)"
    yield from take_turns(task, variants, 'cpu', probe=Laps, turns=turns, seconds=3600, turn=turn, build=build_timed)
    for v in variants:
        loop = build_timed(v, task.model('cpu'))
        loop([task.data('cpu')]*2) # the first batch looks at more
        yield v,1,'operations',*per_step(operations, loop, task.data('cpu')),''

def by_clock(task, turns, turn):
    "As `measure`, the time of a step on a GPU"
    return take_turns(task, variants, 'cuda', turns=turns, seconds=3600, turn=turn, build=build_timed)

def launches(task):
    "As `measure`, of the work that a GPU is given"
    for v in variants:
        loop,batch = build_timed(v, task.model('cuda')),task.data('cuda')
        loop([batch]*2)
        for metric,value in zip(('kernels','syncs'), per_step(profiled, loop, batch)): yield v,1,metric,value,''

# What, the loop that is ours, the other one, and the most that their ratio should be
fused,adam = ('fused','autocast-{}'),('fastai','autocast-{}') # fastai's Adam
goals = [("native, and fastai's autocast",                  ('ours',*fused),        ('fastai',*fused), 1.05),
         ("half precision, and autocast by hand",           ('ours','fused','{}'),  ('hand',*fused),   1.),
         ("half precision, and native",                     ('ours','fused','{}'),  ('ours',*fused),   1.),
         ("half precision, and without the one cast",       ('ours','fused','{}'),  ('singly','fused','{}'), 1.),
         ("with fastai's Adam, and fastai's autocast",      ('ours','fastai','{}'), ('fastai',*adam),  .9),
         ("native with fastai's Adam, and fastai's autocast", ('ours',*adam),       ('fastai',*adam),  .9)]

def ratios(df, metric):
    """A row for each model, dtype and goal: the median of the `metric` of ours over that of the other

    Beside a loop by hand, ours is less what a `Learner` takes: the difference between autocast in fastai and by
    hand."""
    took,rows = df[df.metric==metric].groupby(['case','loop','opt','precision'], sort=False).value.median(),[]
    for case in took.index.unique('case'):
        for dtype in ('fp16','bf16'):
            def _took(loop, opt, precision): return took[case,loop,opt,precision.format(dtype)]
            fastais = _took('fastai', *fused)-_took('hand', *fused)
            for what,ours,other,most in goals:
                rows.append((case, dtype, what, (_took(*ours)-fastais*(other[0]=='hand'))/_took(*other), most))
    return pd.DataFrame(rows, columns=['model','dtype','ours, and the other','ratio','at most']).set_index('model')

def main():
    p = arguments(__doc__)
    p.set_defaults(threads=1)
    p.add_argument('--turns', type=int, default=15, help='how many turns every loop has [15]')
    args,_,results = start(p, 'host_{dev}')
    sizes,how = (tasks(1, 5),(1,.01)) if args.tiny else (tasks(12, 240),(args.turns,.2))
    for task in sizes:
        results.measure('host', task.name, task.batch, measure(task, *how))
        if torch.cuda.is_available():
            results.measure('clock', task.name, task.batch, by_clock(task, *how))
            results.measure('gpu', task.name, task.batch, launches(task))
    df = results.read()
    text = ['## Ratios\n', markdown(ratios(df, 'step_us'))]
    if 'step_ms' in {*df.metric}: text += ['## Ratios on the GPU\n', markdown(ratios(df, 'step_ms'))]
    for case,o in df.groupby('case', sort=False):
        shown = ['step_us', *[f'{s}_us' for s in stages], 'operations', 'step_ms', 'kernels', 'syncs']
        text += [f'## {case}\n', markdown(medians(o, of='step_us').filter(shown))]
    results.write("The host's cost of a step", text)
    print('\n'.join(text))

if __name__=='__main__': main()
