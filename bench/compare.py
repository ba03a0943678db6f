"""Pairs of training loops on a CPU, in one thread: is ours as fast as it should be?

Ours with copies beside ours with autocast, ours beside a loop written by hand, ours beside fastai's own, and with
`--against PATH` ours beside the package in another checkout, in a second process. Loops take turns. What is measured is
the CPU time of a step, which depends less on other work on the machine than the time that passes. What is in the csv
file already is not measured again."""
import json
from subprocess import PIPE,Popen
from time import process_time

from common import *
from loops import Variant
from models import Task,ViT,Weights,linears,mlp

full = dict(mlp     = Task('mlp',     lambda: mlp(1024, 6, 1024),                (1024,),   1024, 256),
            vit     = Task('vit',     lambda: ViT(32, 4, 192, 768, 3, 6, 10),    (3,32,32), 10, 16),
            linears = Task('linears', lambda: linears(8, 120),                   (8,),      8, 16),
            weights = Task('weights', lambda: Weights(240, 416),                 (1,),      2, 1))
tiny = dict(mlp     = Task('mlp',     lambda: mlp(8, 3, 5),                      (8,),      5, 4),
            vit     = Task('vit',     lambda: ViT(8, 4, 16, 32, 2, 1, 5),        (3,8,8),   5, 2),
            linears = Task('linears', lambda: linears(8, 3),                     (8,),      8, 2),
            weights = Task('weights', lambda: Weights(5, 10),                    (1,),      2, 1))

def fused(loop, precision): return Variant(loop, 'fused', precision)

def each(precision): return [fused(o, precision) for o in ('ours','hand','fastai')]

copies,bare = fused('ours', 'bf16'),fused('bare', 'fp32')
bf16_loops = ours_bf16,_,_           = each('autocast-bf16')
fp16_loops = ours_fp16,_,fastai_fp16 = each('autocast-fp16')
loops = dict(mlp=[copies,*bf16_loops,*fp16_loops], vit=[copies], linears=[copies],
             weights=[ours_fp16,fastai_fp16,bare])

def pairs(task, ms, other):
    "(case, ms of ours, ms of the other, how many times as long ours may take), from the medians `ms` of `task`"
    if task=='mlp':
        if other: yield f'MLP 6×1024, bf16 copies: this code, and {other.loop}',ms[copies],ms[other],1.03
        yield 'MLP 6×1024, bf16: copies, and autocast',ms[copies],ms[ours_bf16],1.08
        for name,same,check in (('fp16',fp16_loops,'with GradScaler'),('bf16',bf16_loops,'without a check')):
            ours,hand,fastai = [ms[o] for o in same] # fastai-hand is what a `Learner` takes
            yield f"MLP 6×1024, {name}: autocast less fastai's own time, and by hand {check}",ours-fastai+hand,hand,1.05
    elif task=='vit': yield f'ViT 192×6, bf16 copies: this code, and {other.loop}',ms[copies],ms[other],1.03
    elif task=='linears': yield f'120 × Linear(8,8), bf16 copies: this code, and {other.loop}',ms[copies],ms[other],1.03
    else:
        case = "240 tensors, float16 autocast, a step without forward and backward: ours, and fastai's"
        yield case,ms[ours_fp16]-ms[bare],ms[fastai_fp16]-ms[bare],1.2

class CpuClock:
    "CPU milliseconds of this process"
    def __enter__(self): self.start = process_time()
    def __exit__(self, *_): self.ms = (process_time()-self.start)*1e3

def serve(tasks):
    "Take the turns that stdin asks for: a line with the task, the variant and the number of steps"
    torch.set_num_threads(1)
    print(Path(mp_callbacks.__file__).parent.parent, flush=True)
    current,built = None,{}
    for task,v,n in map(json.loads, sys.stdin):
        v,clock = Variant(*v),CpuClock()
        if task!=current:
            gc.unfreeze()
            current,built,data = task,{},tasks[task].data('cpu')
        if v not in built:
            built[v] = build(v, tasks[task].model('cpu'))
            gc.collect()
            gc.freeze() # else the collector would look through the other loops in each one's turn
        built[v](Batches(data, 2, n, clock))
        print(clock.ms/n, flush=True)

class Worker:
    "A process of this script with the package of the checkout at `path`"
    def __init__(self, path, options):
        python_path = os.pathsep.join([str(path), *os.environ.get('PYTHONPATH', '').split(os.pathsep)])
        self.process = Popen([sys.executable, '-W', 'ignore', __file__, '--serve', *options], stdin=PIPE, stdout=PIPE,
                             text=True, env={**os.environ, 'PYTHONPATH':python_path})
        found = Path(self._read()).resolve()
        if found!=path: raise SystemExit(f'{path} has no package mp_callbacks: the one in {found} was imported.')

    def _read(self):
        if line := self.process.stdout.readline(): return line.strip()
        raise SystemExit('The process that measures has ended, with the error above.')

    def turn(self, *args):
        print(json.dumps(args), file=self.process.stdin, flush=True)
        return float(self._read())

def measure(task, sides, turns, turn):
    "Rows of (variant, turn, metric, value, note) of the `sides`, which are (name in the results, variant, worker)"
    n = {name: steps_in(turn, worker.turn(task, v, 3)) for name,v,worker in sides}
    for i in range(1, turns+1):
        for name,v,worker in sides if i%2 else sides[::-1]: yield name,i,'cpu_ms',worker.turn(task, v, n[name]),''

def main():
    p = arguments(__doc__)
    p.set_defaults(threads=1)
    p.add_argument('--against', type=Path, help='folder of another checkout')
    p.add_argument('--only', nargs='*', default=list(full), help=f'what to measure [{" ".join(full)}]')
    p.add_argument('--turns', type=int, default=31, help='how many turns every loop has [31]')
    p.add_argument('--turn', type=float, default=.4, help='how many seconds one lasts [0.4]')
    p.add_argument('--serve', action='store_true', help=argparse.SUPPRESS)
    if '--serve' in sys.argv: return serve(tiny if p.parse_args().tiny else full)
    args,_,results = start(p, 'compare_cpu')
    options = ['--tiny']*args.tiny
    here,there = Worker(Path(__file__).resolve().parent.parent, options),None
    if args.against:
        there,rev = Worker(args.against.resolve(), options),commit(args.against)
        results.about = results.about.replace(str(args.against), rev) # the same on any machine
        other = Variant(rev, copies.opt, copies.precision)
    how = dict(turns=1, turn=.001) if args.tiny else dict(turns=args.turns, turn=args.turn)
    for name,task in (tiny if args.tiny else full).items():
        sides = [(v,v,here) for v in loops[name]]
        if not there and name in ('vit','linears'): continue
        if there and copies in loops[name]: sides.append((other,copies,there))
        if name in args.only: results.measure('compare', name, task.batch, measure(name, sides, **how))
    rows = []
    for name,df in results.read().groupby('case', sort=False):
        ms = df.groupby(['loop','opt','precision'], sort=False).value.median()
        ms = {Variant(*i):o for i,o in ms.items()}
        other = next((v for v in ms if v.loop not in ('ours','hand','fastai','bare')), None)
        rows += [(case, a, b, a/b, most) for case,a,b,most in pairs(name, ms, other)]
    df = pd.DataFrame(rows, columns=['case','ours','other','ratio','at most']).set_index('case')
    results.write('Ours and others, CPU milliseconds per step', [markdown(df)])
    print(df.to_string())

if __name__=='__main__': main()
