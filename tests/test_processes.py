"""What one of several processes does alone, and what becomes of the others

The cases run as those of `test_distributed.py`: all in the same processes, and ranks have to agree bit for bit. Random
lives are in `walk.py`.

The file takes long because its processes start anew, and import fastai."""
import gc,json,re,weakref
from contextlib import nullcontext

import pytest,torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from learners import *
from states import *
from test_distributed import Net,Softmax,adamw,as_dls,check,fastai_ctx,fsdp2_runs,no_fsdp2,numbers,params,rows
from test_distributed import run,shard,torchrun

halves = [o for o in modes if o!='fp16_static']

def sgd(params, **kwargs): return SGD(params, mom=0., **kwargs)

def agreed(learn):
    "What all ranks must have the same of"
    return params(learn.model),precision_state(learn)

# --- Each process fits alone, then all together

class SpoilRank(Callback):
    "An infinite batch, the second of training, on `rank` only"
    def __init__(self, rank): self.mine = rank==dist.get_rank()
    def before_batch(self):
        if self.training and self.mine and self.train_iter==1: self.learn.xb = (self.x*torch.inf,)

def alone_first(rank, mode, engine):
    "Rank 1 alone fits, and skips a step; then all train together, with the loss scale and the counters of rank 0"
    learn = modes[mode](get_learner(Net(norm=nn.LayerNorm), as_dls(*numbers(128)), opt_func=sgd))
    if rank==1: learn.fit(1, cbs=SpoilRank(1))
    assert len(precision_state(learn))>1 and (learn.opt is None)==(rank==0)
    with torchrun(rank):
        if engine=='fastai':
            with fastai_ctx(learn): learn.fit(2, cbs=SpoilRank(0))
        else:
            learn.model = DistributedDataParallel(learn.model)
            learn.fit(2, cbs=SpoilRank(0))
    assert precision_state(learn)['steps']==2*len(learn.dls.train)//(2 if engine=='fastai' else 1)
    return dict(same=agreed(learn))

def resumed_late(rank, mode):
    "A fit that starts in a later epoch begins with one state, too"
    learn = modes[mode](get_learner(Net(norm=nn.LayerNorm), as_dls(*numbers(128)), opt_func=sgd))
    if rank==1: learn.fit(1, cbs=SpoilRank(1))
    with torchrun(rank), fastai_ctx(learn): learn.fit(2, start_epoch=1)
    assert precision_state(learn)['steps']==len(learn.dls.train)//2
    return dict(same=agreed(learn))

# --- Rescue

def overflowing(rank, wrap, callback=None, **kwargs):
    "A learner of which only rank 1 sees batches that float16 can't compute"
    torch.manual_seed(0)
    x,y = rows(rank)
    net = wrap(nn.Sequential(nn.Linear(8,16), Softmax(), nn.Linear(16,1)))
    learn = get_learner(net, as_dls(x*(1 if rank==1 else .01), y), opt_func=adamw, cbs=callback)
    learn.to_fp16(rescue=True, **kwargs).mixed_precision.warn_skips = 6
    return learn

class Average(Callback):
    "What a callback may do instead of `DistributedDataParallel`"
    def after_backward(self):
        for p in self.model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()

def replicated(model):
    from torch.distributed._composable.replicate import replicate
    return replicate(model)

def not_rescued(rank, how):
    "Without `DistributedDataParallel` nobody can be asked: none is rescued, and the warning says so"
    learn = overflowing(rank, *((replicated,) if how=='replicate' else (noop,Average())), max_skips=8)
    with pytest.warns(UserWarning) as told, pytest.raises(FloatingPointError): learn.fit(5)
    text = "rescue=True does not keep ['1'] in float32" if how=='callback' else 'waits for all processes'
    assert any(text in str(o.message) for o in told)==(rank==1 or how=='replicate')
    return dict(same=agreed(learn), flags=learn.mixed_precision.state.rescued, want=())

def rescued_in_group(rank):
    "The processes of a group ask each other, and nobody else"
    groups = [dist.new_group([i]) for i in range(dist.get_world_size())]
    learn = overflowing(rank, lambda m: DistributedDataParallel(m, process_group=groups[rank]))
    learn.fit(3)
    return dict(same=True, flags=learn.mixed_precision.state.rescued, want=(('1',6),) if rank==1 else ())

def infinite_losses(rank):
    "Only rank 1 has infinite losses, with finite gradients: it warns, and waits for no answer of the other"
    class Infinite(Callback):
        order = -20
        def after_loss(self):
            if rank==1: self.learn.loss,self.learn.loss_grad = self.loss+torch.inf,self.loss_grad+torch.inf
    torch.manual_seed(0)
    learn = get_learner(DistributedDataParallel(Net()), as_dls(*rows(rank)), opt_func=adamw, cbs=Infinite())
    learn.to_fp16(rescue=True).mixed_precision.warn_skips = 6
    told = pytest.warns(UserWarning, match='The loss of 6 steps in a row was not finite') if rank==1 else nullcontext()
    with told: learn.fit(4)
    return dict(same=params(learn.model))

# --- After a fit that has ended early

class StopAt(Callback):
    "End the fit in the second batch of training"
    order = 15
    def __init__(self, event, e):
        self.e = e
        setattr(self, event, self.stop)
    def stop(self):
        if self.training and self.train_iter==1: raise self.e

def ended_early(rank, mode, event):
    "fastai's wrapper is gone, also where the garbage collector doesn't run, and the next fit trains"
    learn = modes[mode](get_learner(Net(norm=nn.LayerNorm), as_dls(*numbers(128)), opt_func=adamw))
    wrappers = []
    see = Callback(before_train=lambda cb: wrappers.append(weakref.ref(cb.learn.model)))
    gc.disable()
    try:
        with torchrun(rank), fastai_ctx(learn):
            learn.fit(1, cbs=[see,StopAt(event, CancelFitException())])
            assert wrappers[0]() is None
            if rank==0: gc.collect()
            assert 'are finite' in str(learn.find_nonfinite())
            learn.fit(2)
            assert wrappers[0]() is None
    finally: gc.enable()
    return dict(same=agreed(learn))

cancels = {o.__name__:o for o in (CancelFitException,CancelBatchException,CancelBackwardException)}

def interrupted(rank, mode, event, engine, cancel=None):
    "fastai leaves the model wrapped; a look is about the batches, and the next fit trains"
    by_hand,hooks,e = engine=='hand',[],cancels[cancel]() if cancel else RuntimeError('as asked')
    net,dls = Net(norm=nn.LayerNorm),as_dls(*(rows(rank, 32) if by_hand else numbers(64))) # two batches each
    learn = get_learner(DistributedDataParallel(net) if by_hand else net, dls, opt_func=adamw)
    if mode!='float32': modes[mode](learn)
    def _spoil(learn): hooks.append(net.blocks[0].a.weight.register_hook(raises(e)))
    cb = Now('after_loss', _spoil) if event=='in_backward' else StopAt(event, e)
    def _ctx(): return nullcontext() if by_hand else fastai_ctx(learn)
    told = nullcontext() if cancel else pytest.raises(RuntimeError, match='as asked')
    with torchrun(rank):
        with _ctx(), told: learn.fit(1, cbs=cb)
        for o in hooks: o.remove()
        if rank==0: gc.collect()
        assert 'are finite' in str(learn.find_nonfinite())
        with _ctx(): learn.fit(1)
    return dict(same=(params(learn.model),mode!='float32' and precision_state(learn)))

# --- FSDP2

def parts(learn): return [p.full_tensor() for p in opt_params(learn)]

def sharded(rank, mode, cbs=None):
    return modes[mode](get_learner(shard(Net(norm=nn.LayerNorm)), as_dls(*rows(rank)), opt_func=adamw, cbs=cbs))

def interrupted_shards(rank, mode, where, backward):
    "After an exception in the middle of a batch the next fit trains all parameters"
    learn,hooks = sharded(rank, mode),[]
    fails = raises(RuntimeError('as asked'))
    def _spoil(learn):
        inside = learn.model.get_submodule(where)
        hook = inside.register_full_backward_pre_hook if backward else inside.register_forward_pre_hook
        hooks.append(hook(fails))
    for cb in (Callback(before_batch=fails), Now('before_batch', _spoil)): # before its first batch, in its second
        with learn.no_bar(), pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=cb)
    hooks[0].remove()
    before = parts(learn)
    learn.fit(1)
    after = parts(learn)
    assert not any(same(a, b) for a,b in zip(before, after))
    return dict(same=after)

def interrupted_before(rank):
    "A PyTorch that can't mend that: a warning"
    from torch.distributed.fsdp import FSDPModule
    learn,reset = sharded(rank, 'bf16'),FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        with pytest.warns(UserWarning, match="doesn't recover"), pytest.raises(RuntimeError, match='as asked'):
            learn.fit(1, cbs=StopAt('after_loss', RuntimeError('as asked')))
    finally: FSDPModule.reset_iter_state = reset
    return dict(same=True)

def ignored(rank, mode):
    "Parameters that `fully_shard` leaves alone are whole; the recorder measures both kinds"
    from torch.distributed.fsdp import fully_shard
    model,mesh = Net(norm=nn.LayerNorm),dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),))
    for o in model.blocks: fully_shard(o, mesh=mesh)
    with torch.no_grad(): model.head.weight[0,0] = 7.
    fully_shard(model, mesh=mesh, ignored_params={*model.head.parameters()})
    learn = modes[mode](get_learner(model, as_dls(*rows(rank)), opt_func=adamw))
    learn.fit(1)
    assert learn.precision_recorder.first_weight==7
    return dict(same=[*learn.precision_recorder.log.finite])

class Unsent(Callback):
    "Send the gradients of every second batch only"
    order = 5
    def before_batch(self):
        if self.training: self.model.set_requires_gradient_sync(self.iter%2==1)

def unsent(rank, mode):
    "Gradients that aren't sent are kept back; with a loss scale that is an error, and the next fit trains"
    learn,other = [sharded(rank, mode, [*cbs,GradientAccumulation(32)]) for cbs in ([Unsent()],[])]
    if 'fp16' in mode:
        with pytest.raises(RuntimeError, match=r'gradient_sync\(False\) keeps the gradients back'): learn.fit(1)
        learn.remove_cb(Unsent)
        learn.model.set_requires_gradient_sync(True)
    for o in (learn,other): o.fit(1)
    assert all(torch.allclose(a, b, atol=1e-6) for a,b in zip(parts(learn), parts(other)))
    return dict(same=parts(learn))

page = Path(__file__).resolve().parent.parent/'nbs/howto/several_gpus.ipynb'

def of_page(name):
    "The code on the page about several GPUs that has `name` in it"
    cells = json.loads(page.read_text(encoding='utf-8'))['cells']
    text = '\n'.join(''.join(o['source']) for o in cells if o['cell_type']=='markdown')
    res, = [o for o in re.findall(r'^```python\n(.*?)^```', text, re.S|re.M) if name in o]
    return res

def checkpointed(rank, mode, path, how):
    """The code of the page: a new learner goes on bit for bit, with the scale and the counters of the file

    `how` the optimizer was made: before the precision, or after."""
    def _new():
        learn = get_learner(shard(Net(norm=nn.LayerNorm)), as_dls(*rows(rank)), opt_func=adamw, cbs=SpoilRank(1))
        if how=='before': learn.create_opt()
        return modes[mode](learn)
    code = of_page('dcp.save').replace("'checkpoint'", repr(str(Path(path)/f'{mode}-{how}')))
    save,load = code.split('# in a new run\n')
    if how=='before': load = load.replace('learn.create_opt()\n', '')
    learn,other = _new(),_new()
    learn.fit(2)
    names = dict(learn=learn)
    exec(save, names)
    learn.fit(1)
    exec(load, dict(names, learn=other))
    assert precision_state(other)['steps']==8
    other.fit(1)
    assert same(parts(other), parts(learn)) and precision_state(other)==precision_state(learn)
    return dict(same=(parts(other),precision_state(other)))

together = dict(
    **{f'alone_first {m} {e}': (alone_first, dict(mode=m, engine=e)) for m,e in
       [('fp16','fastai'), ('native_fp16','hand'), ('bf16','fastai')]},
    resumed_late=(resumed_late, dict(mode='fp16')),
    **{f'not_rescued {o}': (not_rescued, dict(how=o)) for o in ('callback','replicate')},
    rescued_in_group=(rescued_in_group, {}), infinite_losses=(infinite_losses, {}),
    **{f'ended_early {m} {e}': (ended_early, dict(mode=m, event=e)) for m,e in
       [('fp16','after_pred'), ('native_bf16','after_backward'), ('bf16','after_loss'), ('bf16','before_step')]},
    **{f'interrupted {m} {e} {o}': (interrupted, dict(mode=m, event=e, engine=o)) for m,e,o in
       [('fp16','after_loss','fastai'), ('native_fp16','in_backward','fastai'), ('bf16','in_backward','hand'),
        ('native_bf16','after_backward','hand'), ('float32','after_loss','fastai'), ('float32','in_backward','hand')]},
    **{o: (interrupted, dict(mode='fp16', event='before_backward', engine='hand', cancel=o)) for o in cancels})
of_shards = dict(
    **{f'interrupted {m} {o} {b}': (interrupted_shards, dict(mode=m, where=o, backward=b)) for m,o,b in
       [('fp16','blocks.0',True), ('native_bf16','head',True), ('bf16','blocks.1.a',True), ('fp16','blocks.1',False)]},
    interrupted_before=(interrupted_before, {}), ignored=(ignored, dict(mode='bf16')),
    **{f'unsent {m}': (unsent, dict(mode=m)) for m in ('fp16','bf16')},
    **{f'checkpointed {m} {o}': (checkpointed, dict(mode=m, how=o)) for m,o in
       [('fp16','after'), ('native_fp16','after'), ('fp16','before')]})

@pytest.mark.slow
def test_together(tmp_path): check(run(tmp_path, together))

@pytest.mark.slow
@pytest.mark.skipif(not fsdp2_runs, reason=no_fsdp2)
def test_shards(tmp_path): check(run(tmp_path, of_shards))

@pytest.mark.slow
def test_walk():
    "Random lives, see there"
    from walk import main
    main(lives=40, seed=1)
