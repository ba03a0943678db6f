"What the scripts here share: how loops are measured, and the files with the results"
import argparse,csv,gc,os,platform,subprocess,sys,tempfile
from datetime import datetime
from pathlib import Path
from time import perf_counter

import fastai,torch
import pandas as pd

import mp_callbacks
from loops import bf16,build,fp16

def steps_taken(loop):
    "How many steps the optimizer took: a skipped one doesn't count"
    opt = getattr(loop.opt, 'opt', loop.opt)
    return int(next((s['step'] for s in opt.state.values() if 'step' in s), 0))

def sync(dev):
    if torch.device(dev).type=='cuda': torch.cuda.synchronize()

class Clock:
    "Milliseconds per step, from here to when the device has finished"
    def __init__(self, dev): self.dev = dev
    def __enter__(self): sync(self.dev); self.start = perf_counter()
    def __exit__(self, *_): sync(self.dev); self.ms = (perf_counter()-self.start)*1e3
    def rows(self, n): yield 'step_ms',self.ms/n,''

class Batches:
    """One batch, on the device already, `warm` times and then `n` times inside `probe`

    So neither loading data nor starting a fit is measured."""
    def __init__(self, batch, warm, n, probe): self.batch,self.warm,self.n,self.probe = batch,warm,n,probe
    def __len__(self): return self.warm+self.n
    def __iter__(self):
        for _ in range(self.warm): yield self.batch
        with self.probe:
            for _ in range(self.n): yield self.batch

def steps_in(turn, ms): return max(2, min(50, round(turn*1e3/ms)))

def set_tf32(on): torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on

class Running:
    "The loop of variant `v`, warmed up, whose turns are as many steps as take `seconds`"
    def __init__(self, v, task, data, dev, seconds, build=build):
        self.dev,self.data,self.seconds,self.steps = dev,data,seconds,v.loop!='bare'
        self.loop = build(v, task.model(dev))
        self.choose_steps(6)

    def choose_steps(self, warm=1):
        "Choose how many steps a turn has, by two of them, after `warm` others"
        clock = Clock(self.dev)
        self.loop(Batches(self.data, warm, 2, clock))
        self.n = steps_in(self.seconds, clock.ms/2)

    def turn(self, probe):
        "Rows of (metric, value, note)"
        taken,seen = steps_taken(self.loop),probe(self.dev)
        self.loop(Batches(self.data, 2, self.n, seen))
        yield from seen.rows(self.n)
        skipped = self.n+2-steps_taken(self.loop)+taken
        if skipped and self.steps: yield 'skipped',skipped,''

def explained(e):
    "The metric and the note of a row for the exception `e`"
    what = 'oom' if isinstance(e, torch.OutOfMemoryError) else 'error'
    return what,' '.join(f'{type(e).__name__}: {e}'.split())[:300]

def take_turns(task, variants, dev, batch=None, probe=Clock, turns=5, seconds=60, turn=.25, build=build):
    """Measure `variants` in turns with a `probe`: rows of (variant, turn, metric, value, note)

    A turn before the first is to warm up and to see how many steps take `turn` seconds; the first also measures memory.
    A variant that can't run says why, and the others continue."""
    data,loops,own = task.data(dev, batch),{},{}
    cuda,end = torch.device(dev).type=='cuda',perf_counter()+seconds
    allocated = torch.cuda.memory_allocated if cuda else lambda: 0
    if cuda: # so that nobody pays for the workspaces of the matrix products
        torch.cuda.empty_cache()
        for o in (torch.float32,fp16,bf16):
            x = torch.ones(64, 64, device=dev, dtype=o, requires_grad=True)
            (x@x).sum().backward()
    for i in range(turns+1):
        for v in variants:
            if i and v not in loops: continue
            set_tf32(v.precision=='tf32')
            if cuda: gc.collect() # a Learner is full of cycles
            before = allocated()
            try:
                if not i:
                    loop = Running(v, task, data, dev, turn, build)
                    if cuda: gc.collect()
                    own[v],loops[v] = allocated()-before,loop
                    continue
                if cuda: torch.cuda.reset_peak_memory_stats()
                for row in loops[v].turn(probe): yield v,i,*row
                if i==1: yield v,i,'parameters',sum(p.numel() for p in loops[v].loop.model.parameters()),''
                if cuda and i==1: yield v,i,'peak_mb',(torch.cuda.max_memory_allocated()-before+own[v])/2**20,''
            except Exception as e:
                loop,(what,note) = loops.pop(v, None),explained(e)
                yield v,i,what,0,note
                del loop,e
        if not i: # else the collector would look through the other loops in each one's turn
            gc.collect()
            gc.freeze()
        if i>=2 and perf_counter()>end: break
    gc.unfreeze()

def arguments(doc):
    "The options that all scripts have"
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', help='folder for the results [bench/results; with --tiny a temporary one]')
    p.add_argument('--tiny', action='store_true', help='toy sizes, to see that it works: the numbers mean nothing')
    p.add_argument('--threads', type=int, help="PyTorch's CPU threads [as many as it likes; with --tiny 1]")
    return p

def start(p, name):
    "Parse, and open the results: arguments, device, `Results`"
    args = p.parse_args()
    dev = getattr(args, 'device', None) or ('cuda' if torch.cuda.is_available() else 'cpu')
    if threads := args.threads or args.tiny: torch.set_num_threads(int(threads))
    out = Path(args.out or (tempfile.mkdtemp() if args.tiny else Path(__file__).parent/'results'))
    return args,dev,Results(out/f'{name.format(dev=dev)}{"_tiny"*args.tiny}.csv')

def git(path, *args):
    "What git says in the folder `path`; '' if it isn't a checkout"
    return subprocess.run(['git', '-C', str(path), *args], capture_output=True, text=True).stdout.strip()

def commit(path):
    "Commit of the checkout at `path`, and whether its package has been changed since"
    changed = ' with changes' if git(path, 'status', '--porcelain', 'mp_callbacks') else ''
    return git(path, 'rev-parse', '--short', 'HEAD')+changed

def clocks():
    "Clocks of the GPU now and at most, its limit of power, and the driver, as nvidia-smi says; '' if it doesn't"
    fields = 'clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,driver_version'
    cmd = ['nvidia-smi', f'--id={torch.cuda.current_device()}', f'--query-gpu={fields}', '--format=csv,noheader']
    try: seen = subprocess.run(cmd, capture_output=True, text=True, check=True).stdout.strip().split(', ')
    except (OSError,subprocess.CalledProcessError): return ''
    return ', SM {} of {}, memory {} of {}, {}, driver {}'.format(*seen)

def machine():
    "Where this runs, and on what versions"
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((o.split(':')[1].strip() for o in lines if o.startswith('model name')), '')
    gpu = f'{torch.cuda.get_device_name()} (CUDA {torch.version.cuda}{clocks()}), ' if torch.cuda.is_available() else ''
    where = f'{gpu}{cpu or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads'
    libs = ', '.join(f'{o.__name__} {o.__version__}' for o in (torch,fastai,mp_callbacks))
    return f'{where}; Python {platform.python_version()}, {libs} {commit(Path(__file__).parent.parent)}'.strip()

def command():
    "The command, without the folder for the results"
    args = sys.argv[1:]
    if '--out' in args: del args[(i := args.index('--out')):i+2]
    return ' '.join(['python', f'bench/{Path(sys.argv[0]).name}', *args])

class Results:
    """A csv file in which every measurement is a row, written as soon as it is made

    Above the rows are comments with the command, the machine and the versions. A group was measured in turns in one
    run, so that its numbers may be compared. An interrupted group is measured again: its first rows no longer count."""
    keys = ['part','case','size']
    cols = ['run',*keys,'loop','opt','precision','turn','metric','value','note']

    def __init__(self, path):
        self.path,self.run,self.begun = Path(path),datetime.now().strftime('%Y-%m-%d %H:%M:%S'),False
        self.about = f'{self.run} | {command()} | {machine()}'
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, *row):
        new = not self.path.exists()
        with self.path.open('a', newline='') as f:
            if not self.begun: f.write(f'# {self.about}\n'+(','.join(self.cols)+'\n' if new else ''))
            self.begun = True
            csv.writer(f).writerow([self.run, *row[:-2], f'{row[-2]:.5g}', str(row[-1]).replace('#', '')])

    def measure(self, part, case, size, rows):
        "Write what `rows` yields, (variant, turn, metric, value, note), unless this group is there already"
        if self.has(part, case, size):
            print(f'{part} {case} {size}: in {self.path.name} already', flush=True)
            return
        start = perf_counter()
        for v,*row in rows: self.add(part, case, size, *v, *row)
        self.add(part, case, size, '', '', '', 0, 'done', perf_counter()-start, '')
        print(f'{part} {case} {size}: {perf_counter()-start:.0f} s', flush=True)

    def has(self, *group):
        df = self._read()
        return (df.metric.eq('done') & df[self.keys].astype(str).eq([*map(str, group)]).all(axis=1)).any()

    def write(self, name, text, of='turns in one run', kind='medians'):
        "Commands, machines and versions, and below them `text` with a `kind` of averages `of` something, as Markdown"
        about = [o.replace('# ', '- ', 1) for o in self.path.read_text().splitlines() if o.startswith('# ')]
        what = f'Every measurement is in {self.path.name}. The tables show {kind} of {of}.'
        self.path.with_suffix('.md').write_text('\n'.join([f'# {name}\n', *about, f'\n{what}\n', *text]))
        print(self.path.with_suffix('.md'))

    def _read(self):
        if not self.path.exists(): return pd.DataFrame(columns=self.cols)
        return pd.read_csv(self.path, comment='#', keep_default_na=False)

    def read(self):
        "The rows of the groups that are complete"
        df = self._read()
        done = df.loc[df.metric=='done', ['run',*self.keys]].drop_duplicates(self.keys, keep='last')
        return df[df.metric!='done'].merge(done)

def by_process(df, of):
    "As `medians`, of rows that are one process each: instead of quartiles, what `of` and the page faults were in each"
    res = medians(df, of)
    def _each(metric):
        values = df[df.metric==metric].groupby(['loop','opt','precision']).value
        return values.agg(lambda o: ', '.join(map(_show, sorted(o)))).reindex(res.index)
    res['quartiles'] = _each(of)
    if 'faults' in res: res['faults'] = _each('faults')
    return res.rename(columns=dict(quartiles='in each process', faults='page faults'))

def medians(df, of='step_ms'):
    "One row per variant, in the order of the file: median of each metric, quartiles of `of`, and what went wrong"
    index = ['loop','opt','precision']
    res = df.pivot_table(index=index, columns='metric', values='value', aggfunc='median', sort=False)
    res = res.reindex(pd.MultiIndex.from_frame(df[index].drop_duplicates()))
    if of in res:
        q = df[df.metric==of].groupby(index).value.quantile([.25,.75]).unstack().reindex(res.index)
        shown = ['' if a!=a else f'{a:.3g} to {b:.3g}' for a,b in q.itertuples(index=False)]
        res.insert(res.columns.get_loc(of)+1, 'quartiles', shown)
    notes = df[df.note!=''].groupby(index).note.first()
    if len(notes): res['note'] = notes
    return res.drop(columns=['oom','error','parameters'], errors='ignore')

def _show(o):
    if o is None or o!=o: return ''
    return str(o) if not isinstance(o, float) else f'{o:.0f}' if abs(o)>=1000 else f'{o:.3g}'

def markdown(df):
    "`df` with its index as a Markdown table"
    df = df.reset_index()
    rows = [df.columns, ['---']*df.shape[1], *df.itertuples(index=False)]
    return '\n'.join('| '+' | '.join(map(_show, o))+' |' for o in rows)+'\n'
