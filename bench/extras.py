"""What extras of a step cost the host: the search for tensors of nobody, and `PrecisionRecorder(tensors=…)`

The models are those of `host.py`, which compute nothing, and 240 tensors with 10^7 numbers in all. The time is that of
the thread, in turns in one process.

- search: `search_us` is what it takes, in each batch, to find the tensors outside the model that the loss leads to,
  from the loss to the predictions; `all_us` what it takes to look at all of the graph, as in an epoch's first batch
- tensors: a turn has 100 steps, so `PrecisionRecorder(tensors=100)` measures the parameters in one of them"""
from time import thread_time
from timeit import timeit

from fastai.callback.core import Callback

from common import *
from host import Laps,build_timed,tasks
from loops import Variant
from models import Task,Weights
from mp_callbacks.core.backward import other_leaves
from mp_callbacks.core.grads import reached_leaves

class Search(Callback):
    "Microseconds of a search, from the loss to the predictions and in all of the graph, before each backward pass"
    order = -101 # before `Laps` takes its time
    def before_fit(self): self.found = []
    def before_backward(self):
        steps,loss,batch = self.mixed_precision.steps,self.learn.loss_grad,(self.learn.xb,self.learn.yb)
        params = steps.params()
        def _search(): other_leaves(loss, batch, steps.predictions(), params, steps._expects_leaves)
        _search() # the first of an epoch looks at all
        self.found.append([timeit(f, timer=thread_time, number=20)/20*1e6 for f in (
            _search, lambda: reached_leaves(loss))])

def search(task, turns, steps):
    "Rows of (variant, turn, metric, value, note), with the time of a step in the same turn"
    for v in [Variant('ours', 'fused', o) for o in ('fp16','bf16')]:
        loop,data = build_timed(v, task.model('cpu')),task.data('cpu')
        for i in range(turns+1): # the first is to warm up
            loop(Batches(data, 2, steps, took := Laps('cpu')))
            with loop.learn.added_cbs(looked := Search()): loop([data]*10)
            if not i: continue
            yield v,i,*next(took.rows(steps))
            for metric,xs in zip(('search_us','all_us'), zip(*looked.found)): yield v,i,metric,pd.Series(xs).median(),''

def tensors(task, turns, steps):
    "As `search`, of steps with a recorder that measures none of `steps`, one, or each of a tenth as many"
    loops,data = {},task.data('cpu')
    for n in (None,steps,1):
        loops[f'tensors={n}'] = loop = build_timed(Variant('ours', 'fused', 'bf16'), task.model('cpu'))
        loop.learn.precision_recorder.tensors = n
    for i in range(turns+1):
        for name,loop in loops.items():
            gc.collect() # a Learner is full of cycles
            n = max(1, steps//10) if name=='tensors=1' else steps
            loop(Batches(data, 2, n, took := Laps('cpu')))
            if i: yield Variant(name, 'fused', 'bf16'),i,*next(took.rows(n))

def ratios(df, metric, other_metric='step_us', other_loop=None):
    "Median over the turns of `metric` over the `other_metric` of the same turn, for each loop and precision"
    took = df.set_index(['turn','metric','loop','precision']).value
    keys = df[['loop','precision']].drop_duplicates().itertuples(index=False)
    return {tuple(k):(took.xs((metric,*k), level=[1,2,3])
                      /took.xs((other_metric,other_loop or k[0],k[1]), level=[1,2,3])).median() for k in keys}

def main():
    p = arguments(__doc__)
    p.set_defaults(threads=1)
    p.add_argument('--turns', type=int, default=7, help='how many turns every loop has [7]')
    args,_,results = start(p, 'extras_cpu')
    sizes,turns,steps = (tasks(1, 5),1,3) if args.tiny else (tasks(12, 240),args.turns,100)
    many = (5,100) if args.tiny else (240,10**7)
    large = Task(f'{many[0]} tensors', lambda: Weights(many[0], many[1]//many[0]), (1,), 2, 1)
    for o in sizes: results.measure('search', o.name, o.batch, search(o, turns, steps))
    for o in [*sizes,large]: results.measure('tensors', o.name, o.batch, tensors(o, turns, steps))
    df,text = results.read(),[]
    for (part,case),o in df.groupby(['part','case'], sort=False):
        table = medians(o, of='step_us').drop(columns='skipped', errors='ignore')
        against = dict(metric='search_us') if part=='search' else dict(metric='step_us', other_loop='tensors=None')
        table['of a step'] = [ratios(o, **against)[k[0],k[2]] for k in table.index]
        text += [f'## {part}: {case}\n', markdown(table)]
    results.write('What extras cost the host in a step', text)

if __name__=='__main__': main()
