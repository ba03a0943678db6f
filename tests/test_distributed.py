"""`DistributedDataParallel` and FSDP2 in every precision, in two or four processes on this machine

A case runs in all processes and returns numbers, flags and tensors. The test compares bit for bit what ranks have to
agree on. All cases of a group run in the same processes, because starting them takes seconds. The file takes long
because its cases train one after the other, in two processes that share the cores.

Taken over from the tests of PyTorch: from `torch/testing/_internal/distributed/distributed_test.py`
`test_ddp_native_mixed_precision_*` and `test_ddp_native_mixed_precision_ignored_params`; from
`test/distributed/algorithms/ddp_comm_hooks/test_ddp_hooks.py` `test_ddp_comm_hook_fp16compress_hook`; from
`test/distributed/_composable/fsdp` `test_gradient_scaler` of `test_fully_shard_grad_scaler.py` and
`test_clip_grad_norm_1d` of `test_fully_shard_clip_grad_norm_.py`. They say there what DDP's own mixed precision and
`GradScaler` have to do, and here what ours has to."""
import os,time,traceback,warnings
from contextlib import contextmanager,nullcontext
from datetime import timedelta
from unittest.mock import patch as patched

import pytest,torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastai.distributed import DistributedDL
from learners import *
from mp_callbacks.step import read_state
from mp_callbacks.dtypes import half_dtypes
from mp_callbacks.fp8 import Fp8
from mp_callbacks.grads import prepare_grads
from states import *

checkpointing = dict(none=None, reentrant=True, not_reentrant=False)
precisions = [o for o in modes if o!='fp16_static']
modes = {**modes, 'fp8': lambda learn, **kwargs: learn.to_fp8(emulate=True, **kwargs)}

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

def rows(rank, n=64):
    "Other rows on each rank"
    x,y = numbers(n*dist.get_world_size())
    return x[rank*n:][:n],y[rank*n:][:n]

def rank_after_rank(n, bs=16):
    "Order of `n` rows if each rank has its share in batches of `bs`: all first batches, all second ones, and so on"
    return torch.arange(n).view(dist.get_world_size(),-1,bs).transpose(0,1).reshape(-1)

def state(model): return {k:v.clone() for k,v in model.state_dict().items()}
def params(model): return {n:p.detach().clone() for n,p in model.named_parameters()}

# --- The engines: DDP by hand, DDP by fastai (Accelerate), FSDP2

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

def fastai_ctx(learn, **ddp):
    "As in a script for `torchrun` or `accelerate launch`. `SyncBatchNorm` doesn't work on a CPU."
    from accelerate import DistributedDataParallelKwargs
    return learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**ddp)])

def shard(model, **kwargs):
    from torch.distributed.fsdp import fully_shard
    mesh = dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),))
    for o in (*model.blocks, model): fully_shard(o, mesh=mesh, **kwargs)
    return model

def adamw(params, **kwargs): return OptimWrapper(params, opt=torch.optim.AdamW, **kwargs)

class Spoil(Callback):
    "Spoil batch `i` of the last rank"
    def __init__(self, rank, i=2): self.last,self.i = rank==dist.get_world_size()-1,i
    def before_batch(self):
        if self.training and self.last and self.train_iter==self.i: self.learn.xb = (self.xb[0]*torch.inf,)

fails = Callback(before_step=raises(RuntimeError('as asked')))

# --- Cases: each is called in all processes, with its rank

def loop(rank, dtype, reentrant, copies=True, compiled=False):
    "A loop by hand; the third batch of the last rank is spoiled"
    model = DistributedDataParallel(Net(checkpointing[reentrant]))
    if compiled: model = torch.compile(model, backend='eager')
    half,opt = half_precision(model, dtype, keep='head', copies=copies),torch.optim.AdamW(model.parameters(), 1e-2)
    (x,y),scale,res = rows(rank),2.**10 if dtype==torch.float16 else 1.,[]
    for i in range(5):
        xb = x[i*8:i*8+8]*(torch.inf if (i,rank)==(2,dist.get_world_size()-1) else 1)
        before = state(model)
        with half: (F.mse_loss(model(xb), y[i*8:i*8+8])*scale).backward()
        stats = prepare_grads(model.parameters(), scale, clip=1.)
        if stats.finite: opt.step()
        else: model.load_state_dict(before) # the statistics of the batch norm
        opt.zero_grad()
        res.append((stats.finite, stats.norm if stats.finite else None))
    return dict(same=(params(model),res), flags=[o for o,_ in res], want=[True,True,False,True,True],
                dtypes={p.dtype for p in model.parameters()})

def through_learner(rank, mode, reentrant):
    "Two epochs with a model that is wrapped, an exception after them, and one more"
    model = DistributedDataParallel(Net(checkpointing[reentrant]))
    learn = get_learner(model, as_dls(*rows(rank)), cbs=Spoil(rank))
    own = [*learn.model.parameters()]
    modes[mode](learn)
    learn.fit(2)
    log = learn.precision_recorder.log
    with learn.no_bar(), pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=fails)
    learn.fit(1)
    assert identical(learn.model.parameters(), own)
    assert_plain(learn.model)
    res = params(learn.model),[*log.norm[log.finite]],read_state(learn.opt)
    return dict(same=res, flags=[*log.finite], want=[True,True,False,True]+[True]*4, dtypes={p.dtype for p in own},
                own=learn.recorder.losses[0].item())

def three_fits(rank, mode, engine, net={}, ddp={}, cbs=(), compiled=False, opt_func=Adam, **kwargs):
    "Three fits, with an overflow on one rank in each"
    model,cbs = Net(**net),[Spoil(rank),*[GradientAccumulation(o) for o in cbs]]
    by_hand = engine=='hand'
    if by_hand: model = DistributedDataParallel(model, **ddp)
    if compiled: model = torch.compile(model, backend='eager')
    dls = as_dls(*rows(rank)) if by_hand else as_dls(*numbers(64*dist.get_world_size()))
    learn = modes[mode](get_learner(model, dls, cbs=cbs, opt_func=opt_func), **kwargs)
    with nullcontext() if by_hand else torchrun(rank), nullcontext() if by_hand else fastai_ctx(learn, **ddp):
        learn.fit(1)
        learn.fit_one_cycle(1)
        learn.fit(1)
    log = learn.precision_recorder.log
    res = params(learn.model),[*log.finite],[*log.norm[log.finite]],read_state(learn.opt)
    return dict(same=res, flags=sum(log.skipped)>0, want=True)

def whole_batch(rank, mode, engine):
    "Three fits, and the same in one process with the rows of all in each batch"
    n,world = 64,dist.get_world_size()
    x,y = numbers(n*world)
    def _fit(model, dls, mode, ctx=nullcontext):
        learn = get_learner(model, dls, opt_func=adamw)
        if mode!='float32': modes[mode](learn)
        with ctx(learn): learn.fit(1); learn.fit_one_cycle(1); learn.fit(1)
        return learn
    if engine=='fastai':
        with torchrun(rank): several = _fit(Net(norm=nn.LayerNorm), as_dls(x, y), mode, fastai_ctx)
    else:
        model = Net(norm=nn.LayerNorm)
        model = DistributedDataParallel(model) if engine=='hand' else shard(model)
        several = _fit(model, as_dls(*rows(rank, n)), mode)
    order = rank_after_rank(n*world)
    def _one(mode): return _fit(Net(norm=nn.LayerNorm), as_dls(x[order], y[order], 16*world), mode)
    def _weights(learn):
        return flat([p.full_tensor() if hasattr(p, 'full_tensor') else p for p in opt_params(learn)])
    got,one,float32 = _weights(several),_weights(_one(mode)),_weights(_one('float32'))
    way = float32-flat([*Net(norm=nn.LayerNorm).parameters()])
    def _off(a, b): return ((a-b).norm()/way.norm()).item()
    return dict(same=got, off=_off(got, one), rounding=_off(one, float32))

def gradients(rank, reentrant, copies=True):
    "Of one batch: with DDP the mean over the ranks, so nearly what one process has with the rows of all"
    (x,y),(xs,ys) = rows(rank, 16),numbers(16*dist.get_world_size())
    model = DistributedDataParallel(Net(checkpointing[reentrant]).eval())
    with half_precision(model, torch.bfloat16, copies=copies): F.mse_loss(model(x), y).backward()
    plain = Net().eval()
    F.mse_loss(plain(xs), ys).backward()
    got,want = (flat([p.grad for p in o.parameters()]) for o in (model,plain))
    return dict(same=got, off=((got-want).norm()/want.norm()).item(), rounding=.05)

def fine_tuned(rank, mode):
    "`fine_tune` first trains the head alone; fastai wraps the model again for each fit"
    def _groups(m): return [[*o.parameters()] for o in (nn.ModuleList([m.inp,m.bn]),m.blocks,m.head)]
    dls = as_dls(*numbers(64*dist.get_world_size()))
    learn = modes[mode](get_learner(Net(), dls, splitter=_groups))
    start = params(learn.model)
    with torchrun(rank), fastai_ctx(learn):
        learn.fine_tune(1)
        tuned = params(learn.model)
        learn.freeze()
        learn.fit(1)
    last,n = params(learn.model),'blocks.0.a.weight'
    assert not same(start[n], tuned[n]) and same(tuned[n], last[n])
    assert not same(tuned['head.weight'], last['head.weight'])
    return dict(same=(last,read_state(learn.opt)))

def predictions(rank, mode):
    "`validate` and `get_preds`: all get the predictions of all, in fastai's order, and they are those of one process"
    x,y = numbers(64*dist.get_world_size())
    learn = modes[mode](get_learner(Net(), as_dls(x, y)))
    with torchrun(rank), fastai_ctx(learn):
        learn.fit(1)
        for b in learn.model.buffers(): dist.broadcast(b, 0) # each rank has statistics of its own
        valid,(preds,targs) = learn.validate(),learn.get_preds()
    alone = learn.get_preds()
    order = rank_after_rank(len(y))
    assert torch.equal(targs, y[order]) and torch.allclose(preds, alone[0][order], atol=1e-5)
    assert preds.dtype==torch.float32 and abs(valid[0]-learn.validate()[0])<1e-5
    return dict(same=(preds,valid))

def saved(rank, mode, path):
    "Rank 0 writes, all read, and training goes on bit for bit"
    def _new(): return modes[mode](get_learner(Net(norm=nn.LayerNorm), as_dls(*numbers(128)), path=Path(path)))
    learn,writes = _new(),[]
    write = torch.save
    with torchrun(rank), patched('torch.save', lambda *args, **kwargs: (writes.append(1), write(*args, **kwargs))):
        with fastai_ctx(learn):
            learn.fit(2)
            learn.save(f'm-{mode}')
            learn.fit(1)
        other = _new()
        with fastai_ctx(other):
            other.load(f'm-{mode}')
            assert read_state(other.opt)['steps']==2*64//16
            other.fit(1, reset_opt=False)
    assert len(writes)==(rank==0)
    assert same(params(learn.model), params(other.model)) and read_state(learn.opt)==read_state(other.opt)
    return dict(same=(params(other.model),read_state(other.opt)))

def found_lr(rank, mode, path):
    "`lr_find` by hand, where each process saves and loads its own file"
    learn = get_learner(DistributedDataParallel(Net()), as_dls(*rows(rank)), path=Path(path)/f'{rank}')
    modes[mode](learn).fit(1)
    before = params(learn.model),read_state(learn.opt)
    learn.lr_find(num_it=8, stop_div=False, show_plot=False)
    assert same(before, (params(learn.model),read_state(learn.opt)))
    learn.fit(1)
    return dict(same=(params(learn.model),read_state(learn.opt)))

# --- What a rank can decide alone

def accumulate(rank, spoiled=None):
    "Two batches under `no_sync`, and one that sends: gradients are the same on both ranks after the last only"
    model,(x,y),seen,finite = DistributedDataParallel(Net().eval()),rows(rank, 24),[],[]
    half = half_precision(model, torch.bfloat16)
    for i in range(3):
        xb = x[i*8:i*8+8]*(torch.inf if (i,rank)==(spoiled,1) else 1)
        with half, model.no_sync() if i<2 else nullcontext(): F.mse_loss(model(xb), y[i*8:i*8+8]).backward()
        seen.append(model.module.inp.weight.grad.clone())
        finite.append(bool(seen[-1].isfinite().all()))
    if spoiled is None: return dict(same=seen[2], own=seen[1])
    # the overflow is in the sum that is sent, so both skip the step
    assert finite==([True,False,False] if rank else [True,True,False])
    return dict(same=prepare_grads(model.parameters()).finite, flags=finite[2], want=False)

def statistics(rank, mode):
    "Of a batch norm: each rank has those of its own rows, and the next forward pass starts from those of rank 0"
    learn = get_learner(DistributedDataParallel(Net()), as_dls(*rows(rank)), cbs=Spoil(rank, 3))
    modes[mode](learn).fit(1, cbs=SkipValid())
    own = learn.model.module.bn.running_mean.clone()
    assert own.isfinite().all() # the skipped batch has left no trace
    seen = []
    handle = learn.model.module.bn.register_forward_pre_hook(lambda m, args: seen.append(m.running_mean.clone()))
    learn.fit(1, cbs=SkipValid())
    handle.remove()
    return dict(same=(params(learn.model),seen[0]), own=own, flags=skipped(learn), want=2)

class SkipValid(Callback):
    def before_validate(self): raise CancelValidException

def unreduced(rank, mode):
    """Of `test_ddp_native_mixed_precision_ignored_params`: a parameter that DDP leaves alone is a copy in each process

    An overflow in it is one rank's alone: that rank skips a step that the others take, with weights that are no longer
    the same, as in PyTorch."""
    net = Net(norm=nn.LayerNorm)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ['head.weight'])
    learn = get_learner(DistributedDataParallel(net), as_dls(*rows(rank)))
    modes[mode](learn)
    count = []
    def _hook(g): count.append(1); return g*torch.inf if (rank,len(count))==(1,2) else g
    net.head.weight.register_hook(_hook)
    learn.fit(1, cbs=SkipValid())
    flags = [*map(bool, learn.precision_recorder.log.finite)]
    assert flags==[True,rank!=1,True,True]
    return dict(same=len(flags), own=(net.head.weight.detach().clone(),net.inp.weight.detach().clone()))

def told(rank, mode, sharded=False):
    "Skips in a row: all warn and stop at the same step; the rank that has the bad batch says so, others send there"
    model = Net()
    model = shard(model) if sharded else DistributedDataParallel(model)
    always = Callback(before_batch=lambda cb: setattr(cb.learn, 'xb', (cb.xb[0]*(torch.inf if rank==1 else 1),)))
    learn = get_learner(model, as_dls(*rows(rank)), cbs=always, opt_func=adamw)
    modes[mode](learn, max_skips=5)
    learn.mixed_precision.warn_skips = 3
    with pytest.warns(UserWarning, match='3 steps in a row'), pytest.raises(FloatingPointError) as e: learn.fit(2)
    text = 'another process' if not sharded else 'waits for all processes'
    assert ('The inputs of this batch have inf or nan' if rank==1 else text) in str(e.value)
    learn.remove_cb(always)
    learn.fit(1) # and training can go on
    return dict(same=read_state(learn.opt), flags=read_state(learn.opt)['steps'], want=5+4)

def reported(rank, mode):
    "`precision_report` is about this process's rows, and sends nothing"
    learn = modes[mode](get_learner(DistributedDataParallel(Net(norm=nn.LayerNorm)), as_dls(*rows(rank))))
    report = learn.precision_report(batches=2)
    assert report.error<.05
    learn.fit(1)
    return dict(same=params(learn.model), own=report.error)

looks = dict(find_nonfinite=lambda learn: learn.find_nonfinite(), precision_plan=lambda learn: learn.precision_plan(),
             precision_report=lambda learn: learn.precision_report(batches=2))

def spoil_rows(rank, bad):
    "Loaders of this rank's rows; one of rank `bad` is inf"
    x,y = rows(rank)
    if rank==bad: x[40] = torch.inf
    return as_dls(x, y)

def asked(rank, engine):
    "One rank may ask alone, or all may, between fits with several processes, and after one that was interrupted"
    def _fit(): # `distrib_ctx` ends a fit; here its processes ask inside it
        learn.fit(1)
        before = params(learn.model)
        if rank==0:
            for f in looks.values(): f(learn)
        found = learn.find_nonfinite()
        assert (found.where=='inputs') if bad else str(found)=='All 4 batches of dls.train are finite.'
        if bad:
            with pytest.raises(ValueError, match='find_nonfinite'): learn.precision_report()
        assert type(learn.dls.train) is not DistributedDL and same(params(learn.model), before)
        with learn.no_bar(), pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=fails)
        learn.find_nonfinite()

    bad = rank==1
    model = Net()
    if engine=='hand': model = DistributedDataParallel(model)
    learn = get_learner(model, spoil_rows(rank, 1), opt_func=adamw).to_bf16()
    with torchrun(rank):
        if engine=='hand': _fit()
        else:
            with fastai_ctx(learn): _fit()
    return dict(same=len(learn.dls.train))

def asked_gathers(rank):
    "A loss that gathers: an error before anything waits, also if one process asks alone"
    def _gathering(pred, y):
        loss = F.mse_loss(pred, y)
        dist.all_reduce(loss.detach())
        return loss
    learn = get_learner(DistributedDataParallel(Net()), as_dls(*rows(rank)), loss_func=_gathering).to_bf16()
    learn.fit(1)
    before = params(learn.model)
    if rank==0:
        for f in looks.values():
            with pytest.raises(RuntimeError, match='allreduce_ waits for all processes'): f(learn)
    assert same(params(learn.model), before)
    learn.fit(1)
    return dict(same=params(learn.model))

class Softmax(nn.Module):
    "Overflows float16 where `x` is large"
    def forward(self, x): x = (x*20).exp(); return x/x.sum(-1, keepdim=True)

def rescued(rank, mode):
    "Only rank 1 sees batches that float16 can't compute; both keep the module from the same step on"
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8,16), Softmax(), nn.Linear(16,1)))
    x,y = rows(rank)
    learn = get_learner(net, as_dls(x*(1 if rank==1 else .01), y), opt_func=adamw)
    modes[mode](learn, rescue=True)
    learn.mixed_precision.warn_skips = 6
    learn.fit(5)
    cb = learn.mixed_precision
    res = params(learn.model),read_state(learn.opt),[*cb.policy().why]
    return dict(same=res, flags=cb.state.rescued, want=(('1',6),))

def as_torchao(rank, recipe):
    "FP8 with torchao's products in place of ours: the same bits"
    import test_fp8
    linear,*_ = test_fp8.torchao(recipe)
    def _train():
        net,(x,y) = DistributedDataParallel(Net(norm=nn.LayerNorm)),rows(rank)
        half,opt = half_precision(net, torch.bfloat16, fp8=Fp8(recipe, emulate=True)),adamw(net.parameters(), lr=1e-2)
        for i in range(20):
            with half: F.mse_loss(net(x[i%4*16:][:16]), y[i%4*16:][:16]).backward()
            opt.step()
            opt.zero_grad()
        return params(net)
    ours = _train()
    with patched('mp_callbacks.fp8.fp8_linear', side_effect=linear) as called: theirs = _train()
    assert called.called and same(ours, theirs)
    return dict(same=ours)

# --- Of PyTorch's tests

class Own(nn.Module):
    "The model of `test_ddp_native_mixed_precision`: looks at the dtypes it computes in, and has a frozen parameter"
    def __init__(self, dtype):
        super().__init__()
        self.m,self.dtype = nn.Linear(1, 5),dtype
        self.register_buffer('buffer', torch.randn(1, 2))
        self.p = nn.Parameter(torch.randn(10, 5), requires_grad=False)
        self.m.register_forward_hook(self._look)
    def _look(self, m, args, out): assert out.dtype==self.dtype
    def forward(self, x): return self.m(x)+self.p

def ddp_native(rank, dtype, view, to_none):
    "`test_ddp_native_mixed_precision_*`: computes in half precision; gradients are float32, and the same"
    torch.manual_seed(rank)
    x = torch.randn(10, 1)
    net,seen = DistributedDataParallel(Own(dtype), gradient_as_bucket_view=view),[]
    for _ in range(6):
        with half_precision(net, dtype): loss = net(x).sum()
        loss.backward()
        for n,p in net.named_parameters():
            assert p.dtype==torch.float32 and (p.grad is None)==(n=='module.p')
            if p.grad is None: continue
            assert p.grad.dtype==torch.float32
            seen.append(p.grad.clone())
        net.zero_grad(set_to_none=to_none)
    return dict(same=seen)

def compressed(rank, dtype, hook):
    "`test_ddp_comm_hook_fp16compress_hook`: gradients sent in half precision are close to those sent in float32"
    (x,y),got = rows(rank, 16),[]
    for h in (None, getattr(default_hooks, hook)):
        model = DistributedDataParallel(Net(norm=nn.LayerNorm))
        if h: model.register_comm_hook(None, h)
        with half_precision(model, dtype): F.mse_loss(model(x), y).backward()
        got.append(flat([p.grad for p in model.parameters()]))
    off = ((got[0]-got[1]).norm()/got[0].norm()).item()
    assert off>0
    return dict(same=got, off=off, rounding=2.**-8 if hook.startswith('bf16') else 2.**-11)

def too_large(rank):
    "Scaled gradients that overflow in the hook's float16: all ranks skip, and the scale shrinks until they don't"
    model = DistributedDataParallel(Net(norm=nn.LayerNorm))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    learn = get_learner(model, as_dls(*rows(rank))).to_native_fp16(init_scale=2.**24)
    learn.fit(4)
    flags = [*map(bool, learn.precision_recorder.log.finite)]
    assert not flags[0] and flags[-1] and learn.mixed_precision.loss_scale<2**24
    return dict(same=(params(model),flags,read_state(learn.opt)))

def grad_scaler(rank, has_inf):
    "`test_gradient_scaler` of FSDP2: after an inf in one shard no state changes, and the scale shrinks"
    learn = get_learner(shard(Net(norm=nn.LayerNorm)), as_dls(*rows(rank)), opt_func=adamw)
    learn.to_native_fp16(init_scale=2.)
    learn.fit(0) # makes the optimizer
    before = [p.to_local().clone() for p in learn.opt.param_lists[0]]
    def _spoil(cb):
        if has_inf and rank==1: learn.opt.param_lists[0][0].grad.to_local()[0,0] = torch.inf
    def _end(cb): raise CancelFitException
    spoil = Callback(before_step=_spoil, after_batch=_end)
    spoil.order = 9 # before the check
    learn.fit(1, cbs=spoil)
    after = [p.to_local() for p in learn.opt.param_lists[0]]
    assert same(before, after)==has_inf and (len(learn.opt.opt.state)==0)==has_inf
    scale = learn.mixed_precision.loss_scale
    return dict(same=scale, flags=scale, want=1. if has_inf else 2.)

def clip_shards(rank, clip=.01):
    "`test_clip_grad_norm_1d` of FSDP2: norm and clipped gradients are those of the whole model, with empty shards, too"
    x,y = rows(rank, 16)
    whole,model = DistributedDataParallel(Net(norm=nn.LayerNorm)),shard(Net(norm=nn.LayerNorm))
    for o in (whole,model): F.mse_loss(o(x), y).backward()
    amax = max([p.grad.abs().max().item() for p in whole.parameters()])
    norm = nn.utils.clip_grad_norm_(whole.parameters(), clip)
    stats = prepare_grads(model.parameters(), clip=clip, amax=True)
    got,want = flat([p.grad.full_tensor() for p in model.parameters()]),flat([p.grad for p in whole.parameters()])
    assert norm>clip and abs(stats.norm-norm.item())<1e-5*stats.norm and abs(stats.amax-amax)<1e-5*amax
    return dict(same=(stats.norm,stats.amax), off=((got-want).norm()/want.norm()).item(), rounding=1e-5)

def empty_shard(rank):
    "A bias of one number is whole on rank 0 and empty elsewhere"
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(nn.Linear(3, 1), mesh=dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),)))
    model(torch.ones(2, 3)*5).sum().backward()
    stats = prepare_grads(model.parameters(), amax=True)
    return dict(same=stats.norm, flags=stats.amax, want=10.)

# --- FSDP2

def validated_first(rank, mode):
    "A forward pass without a backward pass leaves gathered parameters behind: an optimizer made then wouldn't train"
    learn = modes[mode](get_learner(shard(Net()), as_dls(*rows(rank)), opt_func=adamw))
    before = [p.full_tensor() for p in learn.model.parameters()]
    learn.validate()
    learn.fit(1)
    after = [p.full_tensor() for p in learn.model.parameters()]
    assert not any(same(a, b) for a,b in zip(before, after))
    return dict(same=after)

def sharded(rank, mode, net={}, opt_func=adamw, policy=False, cbs=(), **kwargs):
    "FSDP2 trains and skips; the norm is that of the whole gradient, and the state of the optimizer stays in parts"
    from torch.distributed.fsdp import MixedPrecisionPolicy
    own = MixedPrecisionPolicy(torch.float16 if 'fp16' in mode else torch.bfloat16, torch.float32)
    model = shard(Net(**net), **(dict(mp_policy=own) if policy else {}))
    cbs = [Spoil(rank),*[GradientAccumulation(o) for o in cbs]]
    learn = get_learner(model, as_dls(*rows(rank)), cbs=cbs, opt_func=opt_func)
    modes[mode](learn, **kwargs)
    learn.fit(2)
    log = learn.precision_recorder.log
    states = learn.opt.opt.state if opt_func is adamw else learn.opt.state
    first = learn.opt.param_lists[0][0]
    sizes = {k:v.to_local().numel() for k,v in states[first].items() if hasattr(v, 'to_local')}
    assert {*sizes.values()}=={first.numel()//dist.get_world_size()}
    weights = [p.full_tensor() for p in opt_params(learn)]
    assert all(p.dtype==torch.float32 for p in weights)
    n = len(log.finite)
    return dict(same=(weights,[*log.norm[log.finite]]), flags=[*log.finite],
                want=[True,True,False,True]+[True]*4 if not cbs[1:] else [*log.finite])

def checkpointed(rank, mode, path):
    "PyTorch's state-dict functions carry weights, optimizer and loss scale, and training goes on bit for bit"
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions,get_model_state_dict
    from torch.distributed.checkpoint.state_dict import get_state_dict,set_state_dict
    def _new(): return modes[mode](get_learner(shard(Net(norm=nn.LayerNorm)), as_dls(*rows(rank)), opt_func=adamw))
    def _state(learn): return dict(zip(('model','opt'), get_state_dict(learn.model, learn.opt.opt)))
    learn,file = _new(),Path(path)/f'dcp-{mode}'
    learn.fit(2)
    dcp.save(_state(learn), checkpoint_id=file)
    learn.fit(1)
    other = _new()
    other.create_opt() # and its loss scale
    loaded = _state(other)
    dcp.load(loaded, checkpoint_id=file)
    set_state_dict(other.model, other.opt.opt, model_state_dict=loaded['model'], optim_state_dict=loaded['opt'])
    assert read_state(other.opt)['steps']==8
    other.fit(1, reset_opt=False)
    got,want = ([p.full_tensor() for p in opt_params(o)] for o in (other,learn))
    assert same(got, want) and read_state(learn.opt)==read_state(other.opt)
    with pytest.raises(ValueError, match='get_state_dict'): learn.save('m')
    whole = get_model_state_dict(learn.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank==0: Net(norm=nn.LayerNorm).load_state_dict(whole) # an ordinary model takes it
    return dict(same=(got,read_state(other.opt)))

def no_look(rank, mode):
    "A look at a batch would wait for processes that don't look"
    learn = modes[mode](get_learner(shard(Net()), as_dls(*rows(rank)), opt_func=adamw))
    for f in (learn.find_nonfinite,learn.precision_report):
        with pytest.raises(RuntimeError, match='waits for all processes'): f()
    for f in (learn.save,learn.export):
        with pytest.raises(ValueError, match=f'learn.{f.__name__} would write one part'): f('part')
    learn.fit(1)
    return dict(same=[p.full_tensor() for p in opt_params(learn)])

def fsdp1(rank):
    "Is refused"
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(Net(), device_id=torch.device('cpu'))
    with pytest.raises(ValueError, match='flat shards'): half_precision(model, torch.bfloat16)
    return dict(same=True)

def synced(rank, mode):
    "`SyncBatchNorm`, for which PyTorch needs a GPU: both processes share one, and send by gloo"
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Net()).cuda())
    learn = get_learner(model, as_dls(*rows(rank)).cuda(), cbs=Spoil(rank))
    modes[mode](learn)
    learn.fit(2)
    log = learn.precision_recorder.log
    with pytest.raises(RuntimeError, match='waits for all processes'): learn.find_nonfinite()
    # its statistics are those of both, unlike those of `BatchNorm`
    return dict(same=(params(model),model.module.bn.running_mean.clone(),[*log.norm[log.finite]]), flags=[*log.finite],
                want=[True,True,False,True]+[True]*4)

# --- Processes

def work(rank, world, path, cases):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    res,file = {},f'file://{path}/init'
    dist.init_process_group('gloo', init_method=file, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for name,(f,kwargs) in cases.items():
        start = time.perf_counter()
        if 'path' in f.__code__.co_varnames[:f.__code__.co_argcount]: kwargs = dict(kwargs, path=path)
        try: res[name] = f(rank, **kwargs)
        except Exception: res[name] = traceback.format_exc()
        if os.environ.get('TIMES') and rank==0: print(f'{time.perf_counter()-start:6.2f} {name}', flush=True)
        if isinstance(res[name], str): break # the others wait for it
    torch.save(res, f'{path}/{rank}.pt')
    dist.destroy_process_group()

def run(path, cases, world=2):
    "What the `cases` return: name -> a list with one dict per rank"
    mp.start_processes(work, (world,str(path),cases), nprocs=world, start_method=start_method)
    ranks = [torch.load(path/f'{i}.pt', weights_only=False) for i in range(world)]
    return {k:[o.get(k, 'not run, after an error') for o in ranks] for k in cases}

def check(results):
    "All ranks are done with each case, and agree"
    for k,ranks in results.items():
        for o in ranks: assert isinstance(o, dict), f'{k}: {o}'
        a = ranks[0]
        for i,b in enumerate(ranks):
            assert same(a['same'], b['same']), k
            if 'dtypes' in b: assert b['dtypes']=={torch.float32}, k
            if 'own' in b and i: assert not same(a['own'], b['own']), k # ranks had other rows
            if 'off' in b: assert b['off']<=max(b['rounding'], 1e-5), (k,b['off'],b['rounding'])
            if 'flags' in b: assert b['flags']==b['want'], (k,b['flags'],b['want'])

turns = in_turns(precisions, reversed(checkpointing))
options = dict(
    clip=dict(clip=.1), accumulation=dict(cbs=[32]), reentrant=dict(net=dict(reentrant=True)),
    not_reentrant=dict(net=dict(reentrant=False)), compiled=dict(compiled=True),
    unused=dict(net=dict(drop=True), ddp=dict(find_unused_parameters=True)),
    # `zero_grad` of fastai's own optimizers doesn't take gradients that are views
    views=dict(ddp=dict(gradient_as_bucket_view=True), opt_func=adamw))

def fits(engine, mode, names, **kwargs):
    return {f'{mode} {engine} {n}': (three_fits, dict(mode=mode, engine=engine, **options[n], **kwargs)) for n in names}

def against_one(*engines, modes=('float32',*precisions)):
    each = [(m,o) for o in engines for m in modes]
    return {f'{m} {o} whole batch': (whole_batch, dict(mode=m, engine=o)) for m,o in each}

ddp = dict(
    **{f'loop {c}': (loop, dict(dtype=torch.bfloat16, reentrant=c)) for c in checkpointing},
    **{f'{p} {c}': (through_learner, dict(mode=p, reentrant=c)) for p,c in turns.items()},
    **{f'gradients {c} {o}': (gradients, dict(reentrant=c, copies=o)) for c in checkpointing for o in (True,False)},
    **against_one('hand', modes=['fp16']), **against_one('fastai', modes=['native_bf16']),
    **fits('fastai', 'fp16', ['clip','accumulation','views']), **fits('hand', 'bf16', ['unused']),
    fp16_flat=(three_fits, dict(mode='fp16', engine='fastai', flat_master=True)),
    fine_tune=(fine_tuned, dict(mode='fp16')), predictions=(predictions, dict(mode='bf16')),
    saved=(saved, dict(mode='native_fp16')), found_lr=(found_lr, dict(mode='fp16')),
    fp8=(through_learner, dict(mode='fp8', reentrant='none')))
alone = dict(
    accumulate=(accumulate, {}), spoiled_window=(accumulate, dict(spoiled=1)),
    statistics=(statistics, dict(mode='fp16')), unreduced=(unreduced, dict(mode='bf16')),
    asked_fastai=(asked, dict(engine='fastai')), asked_gathers=(asked_gathers, {}), fsdp1=(fsdp1, {}),
    told=(told, dict(mode='fp16')), reported=(reported, dict(mode='bf16')),
    **{f'ddp_native {d} {v} {z}': (ddp_native, dict(dtype=d, view=v, to_none=z))
       for d in half_dtypes for v in (True,False) for z in (True,False)},
    **{f'{d} {h}': (compressed, dict(dtype=d, hook=h)) for d in half_dtypes
       for h in ('fp16_compress_hook','bf16_compress_hook')},
    too_large=(too_large, {}))
fsdp2 = dict(
    **{f'sharded {p}': (sharded, dict(mode=p)) for p in precisions}, **against_one('fsdp2'),
    **{f'grad_scaler {o}': (grad_scaler, dict(has_inf=o)) for o in (True,False)},
    clip_shards=(clip_shards, {}), empty_shard=(empty_shard, {}),
    headroom=(sharded, dict(mode='fp16', max_loss_scale=2.**24)),
    **{f'sharded {p} Adam': (sharded, dict(mode=p, opt_func=Adam)) for p in ('fp16','native_bf16')},
    **{f'sharded {p} policy': (sharded, dict(mode=p, policy=True, net=dict(norm=nn.LayerNorm)))
       for p in ('native_fp16','native_bf16')},
    **{f'{p} checkpointed': (checkpointed, dict(mode=p)) for p in ('fp16','native_fp16')},
    validated_first=(validated_first, dict(mode='fp16')), no_look=(no_look, dict(mode='bf16')),
    told_sharded=(told, dict(mode='bf16', sharded=True)), **{'sharded fp8': (sharded, dict(mode='fp8'))})
slow = dict(
    **{f'loop {d} {c}': (loop, dict(dtype=d, reentrant=c)) for d in half_dtypes for c in checkpointing},
    **{f'{p} {c}': (through_learner, dict(mode=p, reentrant=c)) for p in (*precisions,'fp8') for c in checkpointing},
    **against_one('hand','fastai'), **fits('hand', 'fp8', ['accumulation']),
    **{f'{p} flat': (three_fits, dict(mode=p, engine='fastai', flat_master=True)) for p in ('fp16','bf16')},
    asked_hand=(asked, dict(engine='hand')), rescued=(rescued, dict(mode='fp16')), **fits('fastai', 'fp8', options),
    **{f'fp8 {f.__name__}': (f, dict(mode='fp8')) for f in (saved,predictions,checkpointed)},
    **{f'sharded fp8 {c}': (sharded, dict(mode='fp8', net=dict(reentrant=r))) for c,r in checkpointing.items()},
    **{'fp8 whole batch': (whole_batch, dict(mode='fp8', engine='hand'))},
    **{f'loop {d} autocast': (loop, dict(dtype=d, reentrant='none', copies=False)) for d in half_dtypes},
    **{f'loop compiled {c}': (loop, dict(dtype=torch.bfloat16, reentrant=c, compiled=True)) for c in checkpointing},
    **{k:v for o,ps in (('hand',('fp16','native_bf16')), ('fastai',('bf16','native_fp16'))) for p in ps
       for k,v in fits(o, p, options).items()},
    **{f'{p} hand flat': (three_fits, dict(mode=p, engine='hand', flat_master=True)) for p in ('fp16','bf16')},
    **{f'{p} {f.__name__}': (f, dict(mode=p)) for p in precisions
       for f in (fine_tuned,predictions,saved,found_lr,statistics,told,reported,checkpointed,no_look)},
    **{f'{p} told sharded': (told, dict(mode=p, sharded=True)) for p in precisions},
    **{f'sharded {p} {c}': (sharded, dict(mode=p, net=dict(reentrant=r))) for p in precisions
       for c,r in checkpointing.items()},
    **{f'sharded {p} clip': (sharded, dict(mode=p, clip=.1)) for p in precisions},
    **{f'sharded {p} accumulation': (sharded, dict(mode=p, cbs=[32])) for p in precisions},
    **{f'sharded {p} flat': (sharded, dict(mode=p, opt_func=Adam, flat_master=True)) for p in ('fp16','bf16')})
four = dict(
    **{f'{p} not_reentrant': (through_learner, dict(mode=p, reentrant='not_reentrant')) for p in precisions},
    **against_one('hand','fastai','fsdp2', modes=['fp16','native_bf16']),
    **{f'sharded {p}': (sharded, dict(mode=p)) for p in precisions},
    clip_shards=(clip_shards, {}), empty_shard=(empty_shard, {}))

some_fsdp2 = {k:fsdp2[k] for k in ('sharded fp16','sharded native_bf16','sharded fp8','fp16 checkpointed',
                                   'empty_shard','told_sharded')}
quick = {**ddp,**alone,**some_fsdp2}
slow = {k:v for k,v in {**fsdp2,**slow}.items() if k not in quick}

of_fsdp2 = sharded,grad_scaler,clip_shards,empty_shard,checkpointed,validated_first,no_look
def needs_fsdp2(f, kwargs): return f in of_fsdp2 or kwargs.get('sharded') or kwargs.get('engine')=='fsdp2'

def runnable(cases): return {k:v for k,v in cases.items() if fsdp2_runs or not needs_fsdp2(*v)}

@pytest.mark.skipif(not fsdp2_runs, reason=no_fsdp2)
def test_fsdp2_is_tested(): assert {*some_fsdp2}<={*runnable(quick)}

groups = [pytest.param(runnable(o), n, marks=m) for o,n,m in
          [(quick,2,()), (slow,2,pytest.mark.slow), (four,4,pytest.mark.slow)]]

@pytest.mark.parametrize('cases,world', groups, ids=['quick','slow','four'])
def test_ranks_are_equal(tmp_path, cases, world):
    "Ranks have the same bits, also after an overflow on one of them: all skip that step"
    check(run(tmp_path, cases, world))

@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['tensorwise','rowwise'])
def test_torchao(tmp_path, recipe):
    "FP8 in two processes has the bits of torchao"
    import test_fp8
    test_fp8.torchao(recipe) # or skip
    check(run(tmp_path, dict(as_torchao=(as_torchao, dict(recipe=recipe)))))

@pytest.mark.cuda
@pytest.mark.results
def test_synced_batch_norm(tmp_path):
    check(run(tmp_path, {p:(synced, dict(mode=p)) for p in precisions}))
