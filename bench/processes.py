"""Loops in processes of their own, several for each

How long a step takes on a CPU may depend on what its process allocated before: glibc gives memory at the end of its
heap back to the system, and each page of it that is asked for again is a page fault. So a median of one process says
little.

In a round, a new Python process imports everything, and each loop gets a fork of it. Python's random hashes make the
heap of each round another one."""
import json,multiprocessing,resource
from subprocess import PIPE,Popen
from time import process_time

from common import *
from loops import Variant
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

def run_loop(connection, task, v, dev, turn):
    "In a process of its own: warm up the loop of `v`, choose the steps of a turn, and take one for each message"
    try:
        loop = Running(v, task, task.data(dev), dev, turn, build_any)
        connection.send('warm')
        connection.recv()
        loop.choose_steps() # by now no other loop runs
        while True:
            connection.send([*loop.turn(ProcessClock)])
            connection.recv()
    except Exception as e:
        what,note = explained(e)
        while True:
            connection.send([(what,0,note)])
            connection.recv()

def serve(args, tasks):
    """Be the process of a round: fork one for each loop in `args.serve`, and pass on the turns of those in stdin

    Nothing may use CUDA before: a fork of a process that does can't."""
    case,dev,turn,*loops = json.loads(args.serve)
    if args.threads or args.tiny: torch.set_num_threads(args.threads or 1)
    fork,connections = multiprocessing.get_context('fork'),[]
    gc.freeze() # else each fork's collector would copy what they share
    for v in loops:
        here,there = fork.Pipe()
        fork.Process(target=run_loop, args=(there, tasks[case], Variant(*v), dev, turn), daemon=True).start()
        there.close() # else it stays open when the fork has ended
        connections.append(here)
    for o in connections: o.recv()
    print(json.dumps(str(Path(mp_callbacks.__file__).parent.parent)), flush=True)
    for i in map(int, sys.stdin):
        connections[i].send('turn')
        print(json.dumps(connections[i].recv()), flush=True)

class Round:
    "A process of the script that runs, with the package of the checkout at `path`, and forks of it for `loops`"
    def __init__(self, case, dev, turn, loops, args, path):
        cmd = [sys.executable, '-W', 'ignore', sys.argv[0], '--serve', json.dumps([case, dev, turn, *loops])]
        if args.tiny: cmd.append('--tiny')
        if args.threads: cmd += ['--threads', str(args.threads)]
        python_path = os.pathsep.join([str(path), os.environ.get('PYTHONPATH', '')])
        self.process = Popen(cmd, stdin=PIPE, stdout=PIPE, text=True, env={**os.environ, 'PYTHONPATH':python_path})
        found = Path(self._read()).resolve()
        if found!=path: raise SystemExit(f'{path} has no package mp_callbacks: {found} has been imported.')

    def _read(self):
        if line := self.process.stdout.readline(): return json.loads(line)
        raise SystemExit('The process that measures has ended, with the error above.')

    def turn(self, i):
        print(i, file=self.process.stdin, flush=True)
        return self._read()

    def end(self):
        self.process.stdin.close()
        self.process.wait()

def in_processes(case, sides, args, dev, turns, turn):
    """Measure the `sides` on `dev`: rows of (name, number of the process, metric, value, note)

    A side is (name in the results, variant, path of a checkout). In each round every side has a process, and takes
    turns with the others. A row is the median of the turns of one process."""
    for i in range(1, args.processes+1):
        loops = {path:[v for _,v,o in sides if o==path] for *_,path in sides}
        rounds = {path:Round(case, dev, turn, vs, args, path) for path,vs in loops.items()}
        rows = []
        for j in range(turns):
            for name,v,path in sides[::-1 if j%2 else 1]:
                rows += [(name,*o) for o in rounds[path].turn(loops[path].index(v))]
        for o in rounds.values(): o.end()
        df = pd.DataFrame(rows, columns=['name','metric','value','note'])
        for (name,metric,note),o in df.groupby(['name','metric','note'], sort=False):
            yield Variant(*name),i,metric,o.value.median(),note
