"""What a fault in one of two processes does to the other, to the files, and to the run that continues from them

The processes train as `examples/distributed.py` does. They are real, and so are the faults: signals, a write that the
system ends in the middle, data that don't come. Gloo sends, with a time-out of `seconds`."""
import functools,importlib.util,os,re,signal,subprocess,sys,time
from datetime import timedelta
from multiprocessing import get_context

import pytest,torch
import torch.distributed as dist

from learners import *

try: import resource
except ImportError: pytest.skip('needs limits of the size of files', allow_module_level=True)
pytest.importorskip('accelerate', reason='needs the distributed extra')

here = Path(__file__).resolve().parent
seconds,epochs = 2,3
ctx = get_context('forkserver') # it imports once, and each process is a fork of it
ctx.set_forkserver_preload('fastai.callback.all fastai.distributed mp_callbacks.all sklearn.datasets torch._dynamo'.split())

def load_example():
    spec = importlib.util.spec_from_file_location('distributed_example', here.parent/'examples/distributed.py')
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod

# --- Faults

def fail(): raise ValueError('as asked')
def interrupt(): signal.raise_signal(signal.SIGINT)
def kill(): signal.raise_signal(signal.SIGKILL)
def hang(): time.sleep(600)
def fill_disk(): resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,resource.RLIM_INFINITY))
def die_in_write():
    "The system ends this process when one of its files grows beyond 20 kB"
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    fill_disk()

class Fault(Callback):
    "Call `f` on `rank` in `event` of the third batch of the second epoch"
    def __init__(self, f, event, rank):
        store_attr()
        setattr(self, event, self.now)
    def now(self):
        if rank_distrib()==self.rank and self.epoch==1 and self.iter==2 and self.training: self.f()

class LateFault(Fault): order = 20 # after the check of the gradients

class FaultyData(Fault):
    "Call `f` on `rank` while it reads the fourth batch of the second epoch"
    def before_fit(self): self.dls.train.after_item.add(Transform(self.item))
    def item(self, x):
        self.now()
        return x

faults = dict( # name -> what to call and where, and what the rank that does it has in its log
    raises_in_batch    = (Fault,      fail,         'after_pred',   'ValueError.*as asked'),
    raises_before_step = (LateFault,  fail,         'before_step',  'ValueError.*as asked'), # after the gradients' check
    raises_in_data     = (FaultyData, fail,         'after_item',   'ValueError.*as asked'),
    hangs_in_data      = (FaultyData, hang,         'after_item',   ''),
    interrupted        = (Fault,      interrupt,    'after_loss',   'KeyboardInterrupt'),
    killed             = (Fault,      kill,         'before_batch', ''),
    killed_in_save     = (Fault,      die_in_write, 'after_batch',  ''),
    full_disk          = (Fault,      fill_disk,    'after_batch',  'Checkpoint.*after_train'))
in_save = 'killed_in_save','full_disk' # rank 0 saves

class Spoil(Callback):
    "The second batch of rank 1 overflows, and both skip it: the checkpoint has a scale that has moved"
    def before_batch(self):
        if self.training and rank_distrib()==1 and (self.epoch,self.iter)==(0,1): self.learn.xb = (self.xb[0]*torch.inf,)

# --- Processes

def train(precision, resume, fault, wait=0, save=None):
    example = load_example()
    if save: example.Checkpoint.after_train = save
    cbs = [Spoil(),*L(fault),*([example.WaitForAll(wait)] if wait else [])]
    return example.train(precision, epochs, 128, 1e-2, resume, cbs)

def work(rank, path, *args):
    os.chdir(path)
    log = os.open(f'{rank}.txt', os.O_WRONLY|os.O_CREAT|os.O_TRUNC)
    for o in (1,2): os.dup2(log, o)
    env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    os.environ.update({k:str(v) for k,v in env.items()})
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{path}/init', timedelta(seconds=seconds), rank=rank, world_size=2)
    torch.save(weights(train(*args)), f'{rank}.pt')

def run(path, precision, resume=False, fault=None, *args):
    "Exit codes and logs of both ranks. If the one with the fault hangs, it is killed after the other has ended."
    (path/'init').unlink(missing_ok=True)
    ps = [ctx.Process(target=work, args=(rank, path, precision, resume, fault, *args)) for rank in range(2)]
    for p in ps: p.start()
    for rank,p in enumerate(ps):
        if not (fault and fault.rank==rank and fault.f is hang): p.join(60)
    codes = [p.exitcode for p in ps] # None for one that is still there
    for p in ps: p.kill(), p.join()
    return codes,[(path/f'{rank}.txt').read_text() for rank in range(2)]

def load(path): return torch.load(path, weights_only=False)

def same(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple,L)): return len(a)==len(b) and all(map(same, a, b))
    return a==b

# --- Tests

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "Precision -> folder of a run without a fault"
    @functools.cache
    def _run(precision):
        path = tmp_path_factory.mktemp(precision)
        codes,logs = run(path, precision)
        assert codes==[0,0], logs
        return path
    return _run

def check(path, whole, name, precision='fp16', rank=1, says=r'Connection (closed|reset) by peer|Read error', **kwargs):
    "The other rank ends with an error that `says` why, no file is half-written, and a restart ends with the same bits"
    kind,f,event,own = faults[name]
    if name in in_save: rank = 0
    (codes,logs),whole = run(path, precision, False, kind(f, event, rank), *kwargs.values()),whole(precision)
    assert codes[1-rank]==1 and codes[rank]!=0, (codes,logs)
    assert re.search(own, logs[rank], re.S), logs[rank]
    assert re.search(says, logs[1-rank]), logs[1-rank]
    assert [o.stem for o in path.glob('models/digits_*.pth')]==['digits_0']
    first,last = 'models/digits_0.pth',f'models/digits_{epochs-1}.pth'
    assert same(load(path/first), load(whole/first))
    codes,logs = run(path, precision, True)
    assert codes==[0,0], logs
    assert same(load(path/last), load(whole/last)) # weights, buffers, optimizer with the loss scale
    for o in ('0.pt','1.pt'): assert same(load(path/o), load(whole/'0.pt')), o

ends = [o for o in faults if o!='hangs_in_data']
precisions = 'fp16 bf16 native_fp16 native_bf16 fp32'.split()

@pytest.mark.parametrize('name,precision,rank', crossed(ends, precisions, [1,0], fast=lambda n,p,r: p=='fp16' and r==1))
def test_rank_ends(name, precision, rank, tmp_path, whole):
    "The other rank notices at once, by a connection that is closed"
    check(tmp_path, whole, name, precision, rank)

@pytest.mark.parametrize('rank', [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rank_hangs(rank, tmp_path, whole):
    "The other rank notices after the time-out of the process group, but not which rank is late"
    check(tmp_path, whole, 'hangs_in_data', rank=rank, says=f'Timed out waiting {seconds*1000}ms')

@pytest.mark.parametrize('name', ['hangs_in_data','raises_in_data','killed'])
@pytest.mark.parametrize('rank', [1, pytest.param(0, marks=pytest.mark.slow)])
def test_late_rank_is_named(name, rank, tmp_path, whole):
    "By the barrier before each batch: rank 0 names all that don't come, the others name rank 0"
    says = 'Ranks 1 failed to pass monitoredBarrier' if rank else 'rank 0'
    check(tmp_path, whole, name, rank=rank, says=says, wait=1)
