"""What tests with several processes share: a model, data, the ways to train together, and how cases run

A case is a function of the rank. It runs in all processes, and compares what ranks have by `agree` and `differ`. All
cases of a test run in the same processes, each in a new folder, because processes take seconds to start. After an error
no other case runs, as the other ranks wait for the one that has failed."""
import traceback
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp

from fastai.distributed import DistributedDL
from learners import *

def everywhere(x):
    "`x` of all ranks, in a list"
    res = [None]*dist.get_world_size()
    dist.all_gather_object(res, x)
    return res

def agree(*xs):
    "Assert that all ranks have the same `xs`, bit for bit"
    first,*others = everywhere(xs)
    assert all(same(first, o) for o in others), 'ranks differ'

def differ(x):
    "Assert that each other rank has another `x` than the first"
    first,*others = everywhere(x)
    assert not any(same(first, o) for o in others), 'ranks have the same'

class Block(nn.Module):
    def __init__(self): super().__init__(); self.norm,self.a,self.b = nn.LayerNorm(16),nn.Linear(16,32),nn.Linear(32,16)
    def forward(self, x): return x+self.b(F.gelu(self.a(self.norm(x))))

class Net(nn.Module):
    "Two blocks, checkpointed if `reentrant` isn't None, and a norm; odd batches may leave the first block out"
    def __init__(self, reentrant=None, norm=nn.BatchNorm1d, drop=False):
        torch.manual_seed(3)
        super().__init__()
        self.inp,self.bn,self.head = nn.Linear(8,16),norm(16),nn.Linear(16,4)
        self.blocks = nn.ModuleList([Block(),Block()])
        self.reentrant,self.drop,self.calls = reentrant,drop,0
    def forward(self, x):
        x = self.bn(self.inp(x))
        if self.drop: self.calls += 1
        for b in self.blocks[self.calls%2:]:
            x = b(x) if self.reentrant is None else checkpoint(b, x, use_reentrant=self.reentrant)
        return self.head(x).sum(1, keepdim=True)

def layer_normed(**kwargs): return Net(norm=nn.LayerNorm, **kwargs)

def all_rows(n=64): return numbers(n*dist.get_world_size())

def rows(rank, n=64):
    "Other rows on each rank"
    return [o[rank*n:][:n] for o in all_rows(n)]

def params(model): return {n:p.detach().clone() for n,p in model.named_parameters()}
def whole(learn): return [p.full_tensor() if hasattr(p, 'full_tensor') else p for p in opt_params(learn)]
def adamw(params, **kwargs): return OptimWrapper(params, opt=torch.optim.AdamW, **kwargs)

def Spoil(rank=1, at=2):
    "An infinite training batch, number `at`, on `rank` only"
    return InfiniteAt(*[at]*(rank==dist.get_rank()))

# --- Ways to train together: DDP by hand, DDP by fastai (Accelerate), FSDP2

@contextmanager
def torchrun(rank):
    "Environment as `torchrun` sets it. fastai, which broadcasts indices on a GPU, does it on the CPU here."
    def _broadcast(self, idxs, rank):
        t = torch.tensor(idxs)
        dist.broadcast(t, rank)
        return t.tolist()
    env = dict(RANK=rank, WORLD_SIZE=dist.get_world_size(), LOCAL_RANK=rank, MASTER_ADDR='127.0.0.1', MASTER_PORT=1)
    with patched.dict(os.environ, {k:str(v) for k,v in env.items()}):
        with patched.object(DistributedDL, '_broadcast', _broadcast): yield

@contextmanager
def together(learn, rank, engine='fastai', **ddp):
    """Where processes train `learn` together: in fastai's context, as in a script for `torchrun` or `accelerate launch`

    Or anywhere, if the model does it. `SyncBatchNorm` doesn't work on a CPU."""
    if engine!='fastai': return (yield)
    from accelerate import DistributedDataParallelKwargs
    options = DistributedDataParallelKwargs(**ddp)
    with torchrun(rank), learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=[options]): yield

def mesh(): return dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),))

def shard(model, **kwargs):
    from torch.distributed.fsdp import fully_shard
    for o in (*model.blocks, model): fully_shard(o, mesh=mesh(), **kwargs)
    return model

def shown(case): return f"{case.func.__name__}({', '.join(f'{k}={v}' for k,v in case.keywords.items())})"

def work(rank, world, path, cases):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    wait = timedelta(seconds=60)
    dist.init_process_group('gloo', init_method=f'file://{path}/init', timeout=wait, rank=rank, world_size=world)
    for i,case in enumerate(cases):
        os.makedirs(f'{path}/{i}', exist_ok=True)
        os.chdir(f'{path}/{i}')
        try: case(rank)
        except Exception:
            (path/f'error{rank}').write_text(f'{shown(case)}\n{traceback.format_exc()}')
            break
    dist.destroy_process_group()

def run_cases(path, cases, world=2):
    "Run each of `cases`, a `partial`, in `world` processes"
    mp.start_processes(work, (world,path,cases), nprocs=world, start_method=start_method)
    errors = [f'Rank {o.name[-1]}: {o.read_text()}' for o in sorted(path.glob('error*'))]
    if errors: pytest.fail('\n'.join(errors), pytrace=False)

def in_groups(quick, slow, four):
    "Parametrize a test by `cases`, and `world`, the number of processes"
    return pytest.mark.parametrize('cases,world', [
        pytest.param(quick, 2, id='quick'), pytest.param(slow, 2, id='slow', marks=pytest.mark.slow),
        pytest.param(four, 4, id='four', marks=pytest.mark.slow)])
