"""Run fastai's own notebooks in mixed precision, and compare them cell by cell with plain fastai

    python tests/fastai_notebooks.py PATH [--only 13a_learner …] [--precision to_bf16 …]

PATH is the folder `nbs` of a copy of fastai's repository; nothing is written there. Each notebook runs once with plain
fastai, and once per precision with every learner in that precision. `import` only imports `mp_callbacks.all`: a cell
that fails then, and passes without, makes the exit status 1. In the other precisions a new failure is not always wrong:
some cells count callbacks, or compare predictions with float32 at a tight tolerance.

Exported cells are skipped: the names of the installed module stand in for them. Downloaded data is replaced by small
random data, and pretrained weights by random ones. Cells that fail with plain fastai don't count.

Last run with fastai 2.8.12 and the notebooks of fastai 2.8.8, on a CPU: 653 cells pass with plain fastai, and all with
`import`. 10 fail in `to_bf16`, 2 in `to_native_bf16`, and of 602 cells 7 in `to_fp16` and 1 in `to_native_fp16`. They
compare half precision with float32 at float32's tolerance, look at a scaled gradient in a hook, or add fastai's own
mixed precision to ours, which is refused."""
import argparse,json,os,random,re,shutil,signal,subprocess,sys
from collections import defaultdict
from contextlib import redirect_stderr,redirect_stdout
from functools import wraps
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

precisions = ['import','to_bf16','to_native_bf16','to_fp16','to_native_fp16']
trains     = re.compile(r'(1[2-9]|2[01]|3[2-7]|4[0-5])[a-z]?_') # optimizer, callbacks, learners, by number
images     = re.compile(r'15a_|18a_|19_|21_') # float16 convolutions take minutes on a CPU
skipped    = re.compile(r'^\s*#\s*\|?\s*(export|eval:\s*false)|nbdev_export|notebook2script|^\s*[!%]\s*pip', re.M)
cell_limit,notebook_limit = 60,600 # seconds

class TooSlow(BaseException): "Not an `Exception`, which a cell could catch"

def write_data(path, name):
    "Write random data with the files and columns of fastai's data set `name` to folder `path`"
    import numpy as np,pandas as pd
    from PIL import Image
    rng = np.random.default_rng(0)
    def _image(fn, *size, high=256):
        (path/fn).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(high, size=size, dtype=np.uint8)).save(path/fn)
    def _texts(n): return [' '.join(rng.choice(['the','film','is','good','bad','and','long'], 60)) for _ in range(n)]
    path.mkdir(parents=True)
    if name=='mnist_tiny':
        for i in range(100): _image(f"{('train','valid')[i%5==0]}/{('3','7')[i%2]}/{i}.png", 28, 28)
    elif name=='oxford-iiit-pet':
        for i in range(100): _image(f"images/{('Birman','beagle')[i%2]}_{i}.jpg", 48, 48, 3)
    elif name=='camvid_tiny':
        (path/'codes.txt').write_text('Sky\nRoad\nVoid\n')
        for i in range(100):
            _image(f'images/{i}.png', 32, 32, 3)
            _image(f'labels/{i}_P.png', 32, 32, high=3)
    elif name=='imdb_sample':
        df = pd.DataFrame(dict(label=['positive','negative']*100, text=_texts(200), is_valid=[False]*160+[True]*40))
        df.to_csv(path/'texts.csv', index=False)
    elif name.startswith('wikitext'):
        for o in ('train','test'): pd.DataFrame(_texts(100)).to_csv(path/f'{o}.csv', index=False, header=False)
    elif name=='adult_sample':
        n,kinds = 10200,dict(sex=[' Male',' Female'], race=[' White',' Black',' Other'], salary=['<50k','>=50k'])
        for o in ('workclass','education','marital-status','occupation','relationship'): kinds[o] = [' a',' b',' c']
        df = pd.DataFrame({k:rng.choice(v, n) for k,v in kinds.items()})
        for o in ('age','fnlwgt','education-num','hours-per-week'): df[o] = rng.integers(16, 90, n)
        df.loc[::50, 'education-num'] = np.nan
        df.to_csv(path/'adult.csv', index=False)
    elif name=='movie_lens_sample':
        df = pd.DataFrame({k:rng.integers(1, v, 2000) for k,v in dict(userId=100, movieId=100, rating=6).items()})
        df.to_csv(path/'ratings.csv', index=False)
    elif name.startswith('wt103'):
        for o in ('pth','pkl'): (path/f'random.{o}').touch()
    else: raise FileNotFoundError(f'no synthetic data for {name}')

def replace_downloads(notebook):
    "Let data and pretrained weights be made here, instead of downloaded"
    import torch
    from fastcore.basics import defaults
    torch.hub.load_state_dict_from_url = lambda *args, **kwargs: None
    load = torch.nn.Module.load_state_dict
    torch.nn.Module.load_state_dict = lambda self, d, *a, **kw: None if d is None else load(self, d, *a, **kw)
    import fastai.data.external as external
    defaults.cpus = 0 # no worker processes
    def _untar_data(url, *args, **kwargs):
        path = Path.cwd()/'data'/Path(url).stem
        if not path.exists(): write_data(path, path.name)
        return path
    external.untar_data = _untar_data
    if 'text' not in notebook: return
    from fastai.text.learner import TextLearner
    TextLearner.load_pretrained = lambda self, *args, **kwargs: self

def set_precision(precision):
    "Let every new `Learner` be in `precision`"
    if precision=='plain': return
    import mp_callbacks.all
    if precision=='import': return
    from fastai.learner import Learner
    init = Learner.__init__
    @wraps(init)
    def _init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        getattr(self, precision)()
    Learner.__init__ = _init

def run_cells(fn, precision, out):
    "Run the notebook at `fn`, and write a line with its number and error, if any, to file `out` after each cell"
    replace_downloads(fn.stem)
    import numpy as np,torch
    from IPython.core.interactiveshell import InteractiveShell
    set_precision(precision)
    shell = InteractiveShell.instance(colors='nocolor', history_length=0)
    def _stop(*_): raise TooSlow(f'more than {cell_limit} s')
    signal.signal(signal.SIGALRM, _stop)
    cells = enumerate(json.loads(fn.read_text())['cells'])
    cells = [(i,''.join(c['source'])) for i,c in cells if c['cell_type']=='code']
    module = re.search(r'^#\s*\|?\s*default_exp\s+(\S+)', '\n'.join(s for _,s in cells), re.M)
    if module: shell.user_ns.update({k:v for k,v in vars(import_module(f'fastai.{module[1]}')).items() if k[:2]!='__'})
    for i,source in cells:
        if skipped.search(source) or not source.strip(): continue
        for o in (random.seed,np.random.seed,torch.manual_seed): o(0)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            signal.alarm(cell_limit)
            res = shell.run_cell(source)
            signal.alarm(0)
        e = res.error_before_exec or res.error_in_exec
        error = None if e is None else f"{type(e).__name__}: {' '.join(str(e).split())[:120]}"
        with out.open('a') as f: print(json.dumps([i,error]), file=f)

def run_notebook(fn, precision):
    "Number -> error, or None, of each cell of the notebook at `fn`, run in a new process and a temporary folder"
    with TemporaryDirectory() as d:
        shutil.copytree(fn.parent, f'{d}/nbs', ignore=shutil.ignore_patterns('*.ipynb'))
        out,env = Path(d)/'cells',dict(os.environ, OMP_NUM_THREADS='1', MPLBACKEND='agg', IPYTHONDIR=f'{d}/ipython')
        cmd = [sys.executable,__file__,fn.parent,'--only',fn.stem,'--precision',precision,'--out',out]
        try: res = subprocess.run(cmd, cwd=f'{d}/nbs', env=env, capture_output=True, text=True, timeout=notebook_limit)
        except subprocess.TimeoutExpired: missing = 'TooSlow: not reached'
        else: missing = f'not reached, the process ended with: {res.stderr[-120:]}'
        lines = out.read_text().splitlines() if out.exists() else []
        return defaultdict(lambda: missing, map(json.loads, lines))

def compare(fns, precisions):
    "Print a table of new failures of the notebooks `fns`, and return those with `import`"
    rows,broken = [],0
    for fn in fns:
        passed = [i for i,e in run_notebook(fn, 'plain').items() if e is None]
        if not passed: continue
        row = [fn.stem,len(passed)]
        for p in precisions:
            if 'fp16' in p and images.match(fn.stem):
                row.append('-')
                continue
            res = run_notebook(fn, p)
            ran = [i for i in passed if not str(res[i]).startswith('TooSlow')]
            new = [i for i in ran if res[i]]
            for i in new: print(f'{fn.stem}, {p}, cell {i}: {res[i]}', flush=True)
            row.append(f'{len(new)} of {len(ran)}')
            if p=='import': broken += len(new)
        rows.append(row)
    print(*['| '+' | '.join(map(str, r))+' |' for r in [['notebook','plain',*precisions], *rows]], sep='\n')
    if not rows: sys.exit('No cell passes with plain fastai.')
    return broken

if __name__=='__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('path', type=Path, help="folder with fastai's notebooks")
    parser.add_argument('--only', nargs='+', help='names of notebooks, without .ipynb')
    parser.add_argument('--precision', nargs='+', default=precisions)
    parser.add_argument('--out', type=Path, help=argparse.SUPPRESS) # a process for one notebook writes its cells here
    args = parser.parse_args()
    fns = sorted(args.path.resolve().glob('*.ipynb'))
    fns = [o for o in fns if (o.stem in args.only if args.only else trains.match(o.stem))]
    if args.out: run_cells(fns[0], args.precision[0], args.out)
    else: sys.exit(compare(fns, args.precision)>0)
