"""`DistributedDataParallel` and FSDP2 in every precision, in two processes on this machine

A case runs in both processes and returns numbers, flags and tensors. The test compares bit for bit what ranks have to
agree on. All cases of a group run in one pair of processes, because starting one takes seconds."""
import traceback,warnings
from contextlib import nullcontext
from datetime import timedelta

import pytest,torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from learners import *
from mp_callbacks.callback import read_state
from mp_callbacks.dtypes import half_dtypes
from mp_callbacks.grads import prepare_grads

world = 2
checkpointing = dict(none=None, reentrant=True, not_reentrant=False)
precisions = [o for o in modes if o!='fp16_static']

class Block(nn.Module):
    def __init__(self): super().__init__(); self.norm,self.a,self.b = nn.LayerNorm(16),nn.Linear(16,32),nn.Linear(32,16)
    def forward(self, x): return x+self.b(F.gelu(self.a(self.norm(x))))

class Net(nn.Module):
    "Two blocks, checkpointed if `reentrant` isn't None, and a batch norm"
    def __init__(self, reentrant=None):
        torch.manual_seed(3)
        super().__init__()
        self.inp,self.bn,self.head = nn.Linear(8,16),nn.BatchNorm1d(16),nn.Linear(16,4)
        self.blocks = nn.ModuleList([Block(),Block()])
        self.reentrant = reentrant
    def forward(self, x):
        x = self.bn(self.inp(x))
        for b in self.blocks: x = b(x) if self.reentrant is None else checkpoint(b, x, use_reentrant=self.reentrant)
        return self.head(x).sum(1, keepdim=True)

def rows(rank, n=64):
    "Other rows on each rank"
    x,y = numbers(n*world)
    return x[rank::world],y[rank::world]

def state(model): return {k:v.clone() for k,v in model.state_dict().items()}
def params(model): return {n:p.detach().clone() for n,p in model.named_parameters()}

# --- Cases: each is called in both processes, with its rank

def loop(rank, dtype, reentrant, copies=True, compiled=False):
    "A loop by hand; the third batch of rank 1 is spoiled"
    model = DistributedDataParallel(Net(checkpointing[reentrant]))
    if compiled: model = torch.compile(model, backend='eager')
    half,opt = half_precision(model, dtype, keep='head', copies=copies),torch.optim.AdamW(model.parameters(), 1e-2)
    (x,y),scale,res = rows(rank),2.**10 if dtype==torch.float16 else 1.,[]
    for i in range(5):
        xb = x[i*8:i*8+8]*(torch.inf if (i,rank)==(2,1) else 1)
        before = state(model)
        with half: (F.mse_loss(model(xb), y[i*8:i*8+8])*scale).backward()
        stats = prepare_grads(model.parameters(), scale, clip=1.)
        if stats.finite: opt.step()
        else: model.load_state_dict(before) # the statistics of the batch norm
        opt.zero_grad()
        res.append((stats.finite, stats.norm if stats.finite else None))
    return dict(same=(params(model),res), flags=[o for o,_ in res], dtypes={p.dtype for p in model.parameters()})

class Spoil(Callback):
    "Spoil the third batch of rank 1"
    def __init__(self, rank): self.rank = rank
    def before_batch(self):
        if self.training and self.train_iter==2 and self.rank==1: self.learn.xb = (self.xb[0]*torch.inf,)

def through_learner(rank, mode, reentrant, **kwargs):
    "Two epochs with a model that is wrapped, an exception after them, and one more"
    x,y = rows(rank)
    items = [*zip(x, y)]
    dls = DataLoaders.from_dsets(items, items, bs=16, device='cpu', num_workers=0, shuffle=False)
    model = DistributedDataParallel(Net(checkpointing[reentrant]))
    learn = get_learner(model, dls, cbs=Spoil(rank), loss_func=MSELossFlat())
    own = [*learn.model.parameters()]
    modes[mode](learn, **kwargs)
    learn.fit(2)
    log = learn.precision_recorder.log
    with learn.no_bar(), pytest.raises(RuntimeError, match='as asked'):
        learn.fit(1, cbs=Callback(before_step=lambda cb: (_ for _ in ()).throw(RuntimeError('as asked'))))
    learn.fit(1)
    assert all(p is q and p.dtype==torch.float32 for p,q in zip(learn.model.parameters(), own, strict=True))
    assert not [n for n,m in learn.model.named_modules() if 'forward' in vars(m)]
    same = params(learn.model),[*log.norm[log.finite]],read_state(learn.opt)
    return dict(same=same, flags=[*log.finite], dtypes={p.dtype for p in own}, own=learn.recorder.losses[0].item())

def gradients(rank, reentrant, copies=True):
    "Of one batch: with DDP the mean over the ranks, so nearly what one process has with the rows of both"
    (x,y),(xs,ys) = rows(rank, 16),numbers(16*world)
    model = DistributedDataParallel(Net(checkpointing[reentrant]).eval())
    with half_precision(model, torch.bfloat16, copies=copies): F.mse_loss(model(x), y).backward()
    plain = Net().eval()
    F.mse_loss(plain(xs), ys).backward()
    got,want = (flat([p.grad for p in o.parameters()]) for o in (model,plain))
    return dict(same=got, off=((got-want).norm()/want.norm()).item())

def accumulate(rank):
    "Two batches under `no_sync`, and one that sends: gradients are the same on both ranks after the last only"
    model,(x,y),seen = DistributedDataParallel(Net().eval()),rows(rank, 24),[]
    half = half_precision(model, torch.bfloat16)
    for i in range(3):
        with half, model.no_sync() if i<2 else nullcontext(): F.mse_loss(model(x[i*8:i*8+8]), y[i*8:i*8+8]).backward()
        seen.append(model.module.inp.weight.grad.clone())
    return dict(same=seen[2], own=seen[1])

def sharded(rank, mode):
    "FSDP2 trains, and the norm that each rank has is that of the whole gradient"
    from torch.distributed.fsdp import fully_shard
    x,y = rows(rank)
    items = [*zip(x, y)]
    model,mesh = Net(),dist.device_mesh.init_device_mesh('cpu', (world,))
    for o in (*model.blocks, model): fully_shard(o, mesh=mesh)
    dls = DataLoaders.from_dsets(items, items, bs=16, device='cpu', num_workers=0, shuffle=False)
    opt_func = partial(OptimWrapper, opt=torch.optim.AdamW)
    learn = get_learner(model, dls, cbs=Spoil(rank), loss_func=MSELossFlat(), opt_func=opt_func)
    modes[mode](learn)
    learn.fit(2)
    log = learn.precision_recorder.log
    model.reshard() # the last forward pass has gathered the parameters
    return dict(same=([p.full_tensor() for p in model.parameters()], [*log.norm[log.finite]]), flags=[*log.finite])

def fsdp1(rank):
    "Is refused"
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(Net(), device_id=torch.device('cpu'))
    with pytest.raises(ValueError, match='flat shards'): half_precision(model, torch.bfloat16)
    return dict(same=True)

# --- Processes

def work(rank, path, cases):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    res = {}
    file,timeout = f'file://{path}/init',timedelta(seconds=60)
    dist.init_process_group('gloo', init_method=file, rank=rank, world_size=world, timeout=timeout)
    for name,(f,kwargs) in cases.items():
        try: res[name] = f(rank, **kwargs)
        except Exception: res[name] = traceback.format_exc()
    torch.save(res, f'{path}/{rank}.pt')
    dist.destroy_process_group()

def run(path, cases):
    "What the `cases` return: name -> a list with one dict per rank"
    mp.spawn(work, (str(path),cases), nprocs=world)
    ranks = [torch.load(path/f'{i}.pt', weights_only=False) for i in range(world)]
    return {k:[o[k] for o in ranks] for k in cases}

def equal(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys()==b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(equal, a, b))
    return a==b

def check(results):
    "Both ranks are done with each case, and agree"
    for k,ranks in results.items():
        for o in ranks: assert isinstance(o, dict), f'{k}: {o}'
        a,b = ranks
        assert equal(a['same'], b['same']), k
        if 'dtypes' in a: assert a['dtypes']==b['dtypes']=={torch.float32}, k
        if 'own' in a: assert not equal(a['own'], b['own']), k # the ranks had other rows
        if 'off' in a: assert a['off']<.05, k

each = [(p,c) for p in precisions for c in checkpointing]
quick = dict(
    **{f'loop {d} {c}': (loop, dict(dtype=d, reentrant=c)) for d in half_dtypes for c in checkpointing},
    **{f'{p} {c}': (through_learner, dict(mode=p, reentrant=c)) for p,c in each},
    **{f'gradients {c} {o}': (gradients, dict(reentrant=c, copies=o)) for c in checkpointing for o in (True,False)},
    accumulate=(accumulate, {}), fsdp1=(fsdp1, {}))
slow = dict(
    **{f'loop {d} autocast': (loop, dict(dtype=d, reentrant='none', copies=False)) for d in half_dtypes},
    **{f'loop compiled {c}': (loop, dict(dtype=torch.bfloat16, reentrant=c, compiled=True)) for c in checkpointing},
    **{f'{p} clip': (through_learner, dict(mode=p, reentrant='none', clip=.1)) for p in precisions},
    **{f'{p} flat': (through_learner, dict(mode=p, reentrant='none', flat_master=True)) for p in ('fp16','bf16')},
    **{f'sharded {p}': (sharded, dict(mode=p)) for p in precisions})

@pytest.mark.parametrize('cases', [quick, pytest.param(slow, marks=pytest.mark.slow)], ids=['quick','slow'])
def test_ranks_are_equal(tmp_path, cases):
    "After some steps, of which one had an overflow on one rank only: both skip that one, and have the same bits"
    res = run(tmp_path, cases)
    check(res)
    for k,(a,b) in res.items():
        if 'flags' not in a: continue
        want = [True,True,False,True,True] if k.startswith('loop') else [True,True,False,True]+[True]*4
        assert a['flags']==b['flags']==want, k
