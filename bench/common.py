"What the scripts here share: how loops are measured, and the files with the results"
import argparse,csv,gc,os,platform,sys,tempfile
from datetime import datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import fastai,torch
import pandas as pd
from fastai.callback.core import Callback

import mp_callbacks
from loops import Variant,bf16,build,fp16

def steps_taken(loop):
    "How many steps the optimizer took: a skipped one doesn't count"
    opt = getattr(loop.opt, 'opt', loop.opt)
    return int(next((s['step'] for s in opt.state.values() if 'step' in s), 0))

def sync(dev):
    if torch.device(dev).type=='cuda': torch.cuda.synchronize()

class Clock:
    "Milliseconds per step, from here to when the device has finished"
    def __init__(self, loop, dev): self.dev = dev
    def __enter__(self): sync(self.dev); self.start = perf_counter()
    def __exit__(self, *_): sync(self.dev); self.ms = (perf_counter()-self.start)*1e3
    def rows(self, n): yield 'step_ms',self.ms/n,''

class Batches:
    "One batch, on the device already, `warm` times and then `n` times inside `probe`. So neither loading data nor starting a fit is measured."
    def __init__(self, batch, warm, n, probe): self.batch,self.warm,self.n,self.probe = batch,warm,n,probe
    def __len__(self): return self.warm+self.n
    def __iter__(self):
        for _ in range(self.warm): yield self.batch
        with self.probe:
            for _ in range(self.n): yield self.batch

class Phases:
    "Milliseconds that the parts of `loop` take in a step, by the device's own clock where it has one"
    def __init__(self, loop, dev):
        self.cuda,self.marks,self.on = torch.device(dev).type=='cuda',[],False
        for o,name,label in loop.parts():
            f = self._timed(getattr(o, name), label)
            if not isinstance(o, Callback): vars(o)[name] = f
            else: object.__setattr__(o, '__class__', type(type(o).__name__, (type(o),), {name:staticmethod(f), '__module__':type(o).__module__})) # in the callback itself it would count as somebody else's

    def _timed(self, f, label):
        def _f(*args, **kwargs):
            if not self.on: return f(*args, **kwargs)
            start = self._now()
            try: return f(*args, **kwargs)
            finally: self.marks.append((label,start,self._now()))
        _f.may_be_late = True # it looks at no gradients
        return _f

    def _now(self):
        if not self.cuda: return perf_counter()
        e = torch.cuda.Event(enable_timing=True)
        e.record()
        return e

    def __enter__(self): self.marks,self.on = [],True
    def __exit__(self, *_): self.on = False

    def rows(self, n):
        "Each part, summed over a step, the median of the steps; `overhead`: all of a step but forward, loss and backward"
        if self.cuda: torch.cuda.synchronize()
        calls = {}
        for k,a,b in self.marks: calls.setdefault(k, []).append(a.elapsed_time(b) if self.cuda else (b-a)*1e3)
        ms = {k:median(sum(o[i*len(o)//n:(i+1)*len(o)//n]) for i in range(n)) for k,o in calls.items()}
        ms['overhead'] = ms.get('push', 0)+ms.pop('grad_opt')-ms.pop('backward')
        for k,o in ms.items(): yield f'{k}_ms',o,''

def set_tf32(on): torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on

def compare(task, variants, dev, batch=None, probe=Clock, turns=5, seconds=60, turn=.25, build=build):
    """Measure `variants` in turns with a `probe`: rows of (variant, turn, metric, value, note)

    A turn before the first is to warm up and to see how many steps take `turn` seconds; the first also measures memory. A variant that can't run says why, and the others go on."""
    data,loops,probes,n,own = task.data(dev, batch),{},{},{},{}
    cuda,end = torch.device(dev).type=='cuda',perf_counter()+seconds
    allocated = torch.cuda.memory_allocated if cuda else lambda: 0
    if cuda: # so that nobody pays for the workspaces of the matrix products
        torch.cuda.empty_cache()
        for o in (torch.float32,fp16,bf16): x = torch.ones(64, 64, device=dev, dtype=o, requires_grad=True); (x@x).sum().backward()
    for i in range(turns+1):
        for v in variants:
            if i and v not in loops: continue
            set_tf32(v.precision=='tf32')
            if cuda: gc.collect() # a Learner is full of cycles
            before = allocated()
            try:
                if not i:
                    loop,clock = build(v, task.model(dev)),Clock(None, dev)
                    loop(Batches(data, 6, 2, clock))
                    if cuda: gc.collect()
                    n[v],own[v],loops[v],probes[v] = max(2, min(50, round(turn*2e3/clock.ms))),allocated()-before,loop,probe(loop, dev)
                    continue
                if cuda: torch.cuda.reset_peak_memory_stats()
                taken = steps_taken(loops[v])
                loops[v](Batches(data, 2, n[v], probes[v]))
                for row in probes[v].rows(n[v]): yield v,i,*row
                if skipped := n[v]+2-steps_taken(loops[v])+taken: yield v,i,'skipped',skipped,''
                if i==1: yield v,i,'parameters',sum(p.numel() for p in loops[v].model.parameters()),''
                if cuda and i==1: yield v,i,'peak_mb',(torch.cuda.max_memory_allocated()-before+own[v])/2**20,''
            except Exception as e:
                loop = loops.pop(v, None)
                yield v,i,'oom' if isinstance(e, torch.OutOfMemoryError) else 'error',0,' '.join(f'{type(e).__name__}: {e}'.split())[:300]
                del loop,e
        if not i: gc.collect(); gc.freeze() # what belongs to the other loops is nothing for the collector to go through in this one's turn
        if i>=2 and perf_counter()>end: break
    gc.unfreeze()

def copy_gbs(dev, n):
    "Measured bandwidth: bytes read and written by a copy of `n` float32 numbers, in GB/s"
    x,y,clock,res = torch.ones(n, device=dev),torch.empty(n, device=dev),Clock(None, dev),[]
    for _ in range(6):
        with clock:
            for _ in range(10): y.copy_(x)
        res.append(clock.ms/10)
    return 8*n/median(res[1:])/1e6

def floor_bytes(precision):
    "Bytes per parameter that Adam must move after a backward pass: weight and two averages in and out, gradient in. Mixed precision looks at the gradient before, and writes copies, if it has them."
    if precision in ('fp32','tf32'): return 24+4
    return 24+2*4 if precision.startswith('autocast') else 24+2*2+2

def arguments(doc):
    "The options that all scripts have"
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', help='folder for the results [bench/results; with --tiny a temporary one]')
    p.add_argument('--tiny', action='store_true', help='toy sizes, to see that it works: the numbers mean nothing')
    p.add_argument('--threads', type=int, help="PyTorch's CPU threads [as many as it likes; with --tiny 1]")
    return p

def start(p, name):
    "Parse, and open the results: arguments, device, `Results`"
    args,dev = p.parse_args(),'cuda' if torch.cuda.is_available() else 'cpu'
    if threads := args.threads or args.tiny: torch.set_num_threads(int(threads))
    out = Path(args.out or (tempfile.mkdtemp() if args.tiny else Path(__file__).parent/'results'))
    return args,dev,Results(out/f'{name.format(dev=dev)}{"_tiny"*args.tiny}.csv')

def machine():
    "Where this runs, and on what versions"
    cpu = next((o.split(':')[1].strip() for o in Path('/proc/cpuinfo').read_text().splitlines() if o.startswith('model name')), '') if Path('/proc/cpuinfo').exists() else ''
    gpu = f'{torch.cuda.get_device_name()} (CUDA {torch.version.cuda}), ' if torch.cuda.is_available() else ''
    return f'{gpu}{cpu or platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; Python {platform.python_version()}, torch {torch.__version__}, fastai {fastai.__version__}, mp_callbacks {mp_callbacks.__version__}'

def command():
    "The command, without the folder for the results"
    args = sys.argv[1:]
    if '--out' in args: del args[(i := args.index('--out')):i+2]
    return ' '.join(['python', f'bench/{Path(sys.argv[0]).name}', *args])

class Results:
    """A csv file in which every measurement is a row, written as soon as it is made, below a comment with the command, the machine and the versions

    A group is what was measured in turns in one run, so that its numbers may be compared. One that was interrupted is measured again, and its first rows no longer count."""
    keys,cols = ['part','case','size'],['run','part','case','size','loop','opt','precision','turn','metric','value','note']

    def __init__(self, path):
        self.path,self.run,self.begun = Path(path),datetime.now().strftime('%Y-%m-%d %H:%M:%S'),False
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, *row):
        new,about = not self.path.exists(),f'# {self.run} | {command()} | {machine()}\n'
        with self.path.open('a', newline='') as f:
            if not self.begun: f.write(about+(','.join(self.cols)+'\n' if new else '')); self.begun = True
            csv.writer(f).writerow([self.run, *row[:-2], f'{row[-2]:.5g}', str(row[-1]).replace('#', '')])

    def measure(self, part, case, size, rows):
        "Write what `rows` yields, (variant, turn, metric, value, note), unless this group is there already"
        if self.has(part, case, size): return
        start = perf_counter()
        for v,*row in rows: self.add(part, case, size, *v, *row)
        self.add(part, case, size, '', '', '', 0, 'done', perf_counter()-start, '')
        print(f'{part} {case} {size}: {perf_counter()-start:.0f} s', flush=True)

    def has(self, *group): return ((df := self._read()).metric.eq('done') & df[self.keys].astype(str).eq([*map(str, group)]).all(axis=1)).any()

    def write(self, name, text):
        "The commands, machines and versions, and below them `text`, as Markdown"
        about = [o.replace('# ', '', 1) for o in self.path.read_text().splitlines() if o.startswith('# ')]
        self.path.with_suffix('.md').write_text('\n'.join([f'# {name}\n', *(f'- {o}' for o in about), f'\nEvery measurement is in {self.path.name}. What is compared was measured in turns in one process; these are the medians.\n', *text]))
        print(self.path.with_suffix('.md'))

    def _read(self): return pd.read_csv(self.path, comment='#', keep_default_na=False) if self.path.exists() else pd.DataFrame(columns=self.cols)

    def read(self):
        "The rows of the groups that are complete"
        df = self._read()
        done = df.loc[df.metric=='done', ['run',*self.keys]].drop_duplicates(self.keys, keep='last')
        return df[df.metric!='done'].merge(done)

def medians(df, of='step_ms'):
    "One row per variant, in the order of the file: the median of each metric, the quartiles of `of`, and what went wrong"
    index = ['loop','opt','precision']
    rows,res = df.groupby(index, sort=False),df.pivot_table(index=index, columns='metric', values='value', aggfunc='median', sort=False)
    res = res.reindex(pd.MultiIndex.from_tuples(rows.groups, names=index))
    if of in res:
        q = df[df.metric==of].groupby(index).value.quantile([.25,.75]).unstack()
        res.insert(res.columns.get_loc(of)+1, 'quartiles', [f'{q.loc[i,.25]:.3g} to {q.loc[i,.75]:.3g}' if i in q.index else '' for i in res.index])
    notes = df[df.note!=''].groupby(index).note.first()
    if len(notes): res['note'] = notes
    return res.drop(columns=['oom','error'], errors='ignore')

def markdown(df):
    def show(o): return '' if o is None or o!=o else f'{o:.0f}' if isinstance(o, float) and abs(o)>=1000 else f'{o:.3g}' if isinstance(o, float) else str(o)
    df = df.reset_index()
    return '\n'.join('| '+' | '.join(map(show, o))+' |' for o in [df.columns, ['---']*df.shape[1], *df.itertuples(index=False)])+'\n'
