"""What a fault in one of two processes does to the other, to the files, and to the run that continues from them

The processes train as `examples/distributed.py` does. They are real, and so are the faults: signals, a write that the
system ends in the middle, data that don't come. The file takes long because each fault needs new
processes, and one that hangs its time-out."""
import runpy,signal
from datetime import timedelta

import torch.distributed as dist
from interpreters import launch
from learners import *

try: import resource
except ImportError: pytest.skip('needs limits of the size of files', allow_module_level=True)
pytest.importorskip('accelerate', reason='needs the distributed extra')

script = root/'examples/distributed.py'
epochs = 3
timeout,patience = 60,2 # seconds that gloo waits, and that it waits for a rank that is going to hang
ctx = get_context(start_method)

def load_example(): return SimpleNamespace(**runpy.run_path(str(script))) # which is `sys.argv[0]` meanwhile

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

class DataFault(Fault):
    "Call `f` on `rank` while it reads the fourth batch of the second epoch"
    def before_fit(self):
        dl,create_item = self.dls.train,self.dls.train.create_item
        dl.create_item = lambda i: (self.now(), create_item(i))[1]

faults = dict( # name -> what to call, where and on which rank, and what that rank has in its log; rank 0 saves
    raises_in_batch = (Fault,     fail,         'after_pred',   1, 'ValueError.*as asked'),
    raises_in_data  = (DataFault, fail,         'after_item',   1, 'ValueError.*as asked'),
    hangs_in_data   = (DataFault, hang,         'after_item',   1, ''),
    interrupted     = (Fault,     interrupt,    'after_loss',   0, 'KeyboardInterrupt'),
    killed          = (Fault,     kill,         'before_batch', 1, ''),
    killed_in_save  = (Fault,     die_in_write, 'after_batch',  0, ''),
    full_disk       = (Fault,     fill_disk,    'after_batch',  0, 'Checkpoint.*after_train'))

def spoil(learn):
    "A batch of rank 1 overflows, and both skip it: the checkpoint has a scale that has moved"
    if rank_distrib()==1: learn.xb = (learn.x*torch.inf,)

def train(resume, fault, wait=0):
    example = load_example()
    cbs = [*L(fault),On('before_batch', spoil, at=[1]),*([example.WaitForAll(wait)] if wait else [])]
    return example.train('fp16', epochs, 128, 1e-2, 'no', resume, cbs)

def work(rank, path, seconds, *args):
    os.chdir(path)
    log = os.open(f'{rank}.txt', os.O_WRONLY|os.O_CREAT|os.O_TRUNC)
    for o in (1,2): os.dup2(log, o)
    env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    os.environ.update({k:str(v) for k,v in env.items()})
    torch.set_num_threads(1)
    dist.init_process_group('gloo', f'file://{path}/init', timedelta(seconds=seconds), rank=rank, world_size=2)
    torch.save(weights(train(*args)), f'{rank}.pt')
    dist.barrier() # in PyTorch 2.6, to destroy the group may wait forever for a thread that holds its last tensor
    dist.destroy_process_group()

def run(path, resume=False, fault=None, *args):
    "Exit codes and logs of both ranks. One that hangs is killed after the other has ended."
    (path/'init').unlink(missing_ok=True)
    hangs = fault and fault.f is hang
    seconds = patience if hangs else timeout
    ps = [ctx.Process(target=work, args=(rank, path, seconds, resume, fault, *args)) for rank in range(2)]
    for p in ps: p.start()
    for rank,p in enumerate(ps):
        if not (hangs and fault.rank==rank): p.join(timeout)
    codes = [p.exitcode for p in ps] # None for one that is still there
    for p in ps: p.kill(), p.join()
    return codes,[(path/f'{rank}.txt').read_text() for rank in range(2)]

def load(path): return torch.load(path, weights_only=False)

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "Folder of a run without a fault"
    path = tmp_path_factory.mktemp('whole')
    codes,logs = run(path)
    assert codes==[0,0], logs
    return path

gone = r'Connection closed by peer|Connection reset by peer'

def fault_run(path, name, says=gone, *args):
    "Both ranks end, the one without the fault with an error that `says` why"
    kind,f,event,rank,own = faults[name]
    codes,logs = run(path, False, kind(f, event, rank), *args)
    assert codes[1-rank]==1 and codes[rank]!=0, (codes,logs)
    assert re.search(own, logs[rank], re.S), logs[rank]
    assert re.search(says, logs[1-rank]), logs[1-rank]

@pytest.mark.parametrize('name', [slow_unless(o=='killed_in_save', o) for o in faults])
def test_rank_ends(name, tmp_path, whole):
    """The other rank notices at once, as its connection is closed; one that waits, after the time-out of the group

    No file is half-written, and a restart from the last checkpoint ends with the same bits."""
    fault_run(tmp_path, name, 'Timed out waiting|Application timeout' if name.startswith('hangs') else gone)
    first,last = 'models/digits_0.pth',f'models/digits_{epochs-1}.pth'
    assert [o.stem for o in tmp_path.glob('models/digits_*.pth')]==['digits_0']
    assert same(load(tmp_path/first), load(whole/first))
    codes,logs = run(tmp_path, True)
    assert codes==[0,0], logs
    assert same(load(tmp_path/last), load(whole/last)) # weights, buffers, optimizer with the loss scale
    for o in ('0.pt','1.pt'): assert same(load(tmp_path/o), load(whole/'0.pt')), o

@pytest.mark.slow
def test_late_rank_is_named(tmp_path):
    "By the example's `WaitForAll`: rank 0 names all that don't come"
    fault_run(tmp_path, 'killed', 'Ranks 1 failed to pass', patience)

accelerate = '-m accelerate.commands.launch --multi_gpu --num_processes 2'.split()

@pytest.mark.slow
def test_example(tmp_path):
    "Trains, one process prints, and one process can load what was saved; the page on several GPUs runs it by torchrun"
    res = launch([*accelerate, str(script), '--precision', 'fp16', '--send', 'bf16', '--epochs', '2'], tmp_path)
    assert res.returncode==0, res.stdout
    found = re.findall(r'^accuracy ([.\d]+)$', res.stdout, re.M)
    assert len(found)==1 and float(found[0])>.85 and '\n46 steps, none skipped' in res.stdout, res.stdout
    example = load_example()
    learn = Learner(example.get_dls(64), example.get_model(), CrossEntropyLossFlat(), metrics=accuracy, path=tmp_path)
    learn.to_fp16().load('digits_1')
    assert learn.mixed_precision.loss_scale>1024
    with learn.no_bar(), learn.no_logging(): assert abs(learn.validate()[1]-float(found[0]))<1e-3
