"""Loops in processes of their own, several for each

How long a step takes on a CPU may depend on what its process allocated before: glibc gives memory at the end of its heap
back to the system, and each page of it that is asked for again is a page fault. So a median of one process says little."""
import json,resource
from subprocess import PIPE,Popen
from time import process_time

from common import *
from loops import Variant,build
from peers import build_any

class ProcessClock(Clock):
    "Also CPU milliseconds of this process, and page faults without a disk, per step"
    def __enter__(self):
        self.cpu,self.faults = process_time(),resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        super().__enter__()

    def __exit__(self, *_):
        super().__exit__()
        self.cpu = (process_time()-self.cpu)*1e3
        self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt-self.faults

    def rows(self, n):
        yield from super().rows(n)
        yield 'cpu_ms',self.cpu/n,''
        yield 'faults',self.faults/n,''

def options(p, processes):
    "Add the options of scripts that measure so to those of `arguments`"
    p.add_argument('--processes', type=int, default=processes, help=f'how many every loop has [{processes}]')
    p.add_argument('--serve', help=argparse.SUPPRESS)
    return p

def serve(args, tasks):
    "Be the process of the loop in `args.serve`: for each line from stdin take a turn, and print its rows"
    case,v,turn = json.loads(args.serve)
    if args.threads or args.tiny: torch.set_num_threads(args.threads or 1)
    task,v,dev,failed = tasks[case],Variant(*v),'cuda' if torch.cuda.is_available() else 'cpu',None
    try: loop = Running(v, task, task.data(dev), dev, turn, build_any)
    except Exception as e: failed = explained(e)
    print(json.dumps(str(Path(mp_callbacks.__file__).parent.parent)), flush=True)
    for _ in sys.stdin:
        rows = [(failed[0],0,failed[1])] if failed else [*loop.turn(ProcessClock)]
        print(json.dumps(rows), flush=True)

class Worker:
    "A process of the script that runs, with the package of the checkout at `path`"
    def __init__(self, case, v, turn, args, path):
        cmd = [sys.executable, '-W', 'ignore', sys.argv[0], '--serve', json.dumps([case, v, turn])]
        if args.tiny: cmd.append('--tiny')
        if args.threads: cmd += ['--threads', str(args.threads)]
        python_path = os.pathsep.join([str(path), *os.environ.get('PYTHONPATH', '').split(os.pathsep)])
        self.process = Popen(cmd, stdin=PIPE, stdout=PIPE, text=True, env={**os.environ, 'PYTHONPATH':python_path})
        self.path = path

    def wait(self):
        "Wait until the loop has warmed up"
        found = Path(self._read()).resolve()
        if found!=self.path: raise SystemExit(f'{self.path} has no package mp_callbacks: {found} has been imported.')

    def _read(self):
        if line := self.process.stdout.readline(): return json.loads(line)
        raise SystemExit('The process that measures has ended, with the error above.')

    def turn(self):
        print(file=self.process.stdin, flush=True)
        return self._read()

    def end(self):
        self.process.stdin.close()
        self.process.wait()

def in_processes(case, sides, args, turns, turn):
    """Measure the `sides`, which are (name in the results, variant, path of a checkout): rows of (name, number of the
    process, metric, value, note)

    One process of each takes turns with the others, then the next one of each, and so on. A row is the median of the
    turns of one process."""
    for i in range(1, args.processes+1):
        workers = {name:Worker(case, v, turn, args, path) for name,v,path in sides}
        for o in workers.values(): o.wait()
        rows = []
        for j in range(turns):
            for name,worker in [*workers.items()][::-1 if j%2 else 1]: rows += [(name,*o) for o in worker.turn()]
        for o in workers.values(): o.end()
        df = pd.DataFrame(rows, columns=['name','metric','value','note'])
        for (name,metric,note),o in df.groupby(['name','metric','note'], sort=False):
            yield Variant(*name),i,metric,o.value.median(),note
