"""`DistributedDataParallel` in every precision: ranks agree bit for bit, and train as one process does

Also what one rank does alone, and what becomes of the others: an overflow, a fit, a question to the doctor, an
exception. The page about several GPUs promises it. The file takes long because its cases train one after the other, in
two processes that share the cores."""
from mp_callbacks.core.processes import single_process
from mp_callbacks.learner.opt_state import read_state
from ranks import *
from sick_models import Softmax,net
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

case = partial
precisions = [o for o in modes if o!='fp16_static']
modes = with_fp8

def agreed(learn): agree(params(learn.model), read_state(learn.opt))

def loop(rank, dtype):
    "`prepare_grads` in a loop by hand: a batch that overflows on one rank is skipped by all"
    model = DistributedDataParallel(Net())
    half,opt = half_precision(model, dtype, keep='head'),torch.optim.AdamW(model.parameters(), 1e-2)
    (x,y),scale,log = rows(rank),2.**10 if dtype==f16 else 1.,[]
    for i in range(5):
        xb,before = x[i*8:i*8+8]*(torch.inf if (i,rank)==(2,1) else 1),deepcopy(model.state_dict())
        with half: (F.mse_loss(model(xb), y[i*8:i*8+8])*scale).backward()
        stats = prepare_grads(model.parameters(), scale, clip=1.)
        if stats.finite: opt.step()
        else: model.load_state_dict(before) # the statistics of the batch norm
        opt.zero_grad()
        log.append((stats.finite, stats.norm if stats.finite else None))
    assert [o for o,_ in log]==[True,True,False,True,True]
    agree(params(model), log)

def own_steps(rank, dtype=torch.float16, net=Net, spoiled=2, **kwargs):
    "`TrainingSteps` in a loop by hand: what overflows on one rank is skipped by all"
    torch.manual_seed(0)
    model,(x,y) = DistributedDataParallel(net()),rows(rank)
    if spoiled is None and rank==0: x = x*.01 # and so float16 can compute it
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    steps = TrainingSteps(model, opt, dtype, clip=1., compute_loss=mse_of, **kwargs)
    for i in range(8):
        xb,yb = x[i*8:i*8+8]*(torch.inf if (i,rank)==(spoiled,1) else 1),y[i*8:i*8+8]
        if i==5: # DDP forgets an interrupted backward pass
            hook = next(model.parameters()).register_hook(raises(KeyError()))
            with pytest.raises(KeyError), steps.batch(xb, yb): steps.backward(mse_of(model, xb, yb))
            hook.remove()
        with steps.batch(xb, yb): steps.backward(mse_of(model, xb, yb))
        finite = steps.make().finite
        if spoiled is not None: assert finite==(i!=spoiled), i
    assert finite and {p.dtype for p in model.parameters()}=={torch.float32}
    agree(params(model), steps.state_dict(), steps.rescued)
    return steps

def own_rescue(rank):
    "What one rank can't compute is kept in float32 by all"
    assert own_steps(rank, net=partial(net, Softmax), spoiled=None, rescue=True, warn_skips=3).rescued==[('1',3)]

def trained(rank, mode, engine, net={}, ddp={}, accumulate=None, compiled=False, then=None, opt_func=Adam, **kwargs):
    """Two fits, with a batch in each that overflows on one rank: all skip it, and make the same steps

    Also if the precision is changed to `then` between them."""
    model,cbs,by_hand = Net(**net),[Spoil(),*([GradientAccumulation(accumulate)] if accumulate else [])],engine=='hand'
    if by_hand: model = DistributedDataParallel(model, **ddp)
    if compiled: model = torch.compile(model, backend='eager')
    learn = get_learner(model, as_dls(*(rows(rank) if by_hand else all_rows())), cbs=cbs, opt_func=opt_func)
    modes[mode](learn, **kwargs)
    own = [*learn.model.parameters()]
    with together(learn, rank, engine, **ddp):
        learn.fit(1)
        if then: modes[then](learn)
        learn.fit_one_cycle(1)
    assert identical(learn.model.parameters(), own)
    assert_plain(getattr(learn.model, '_orig_mod', learn.model)) # without torch.compile's wrapper
    log = log_of(learn)
    assert [*log.finite]==[True,True,False,True]*2 if not accumulate else log.skipped.any()
    agreed(learn)
    agree([*log.finite], [*log.norm[log.finite]])
    if by_hand: differ(learn.recorder.losses[0]) # as they have other rows

def whole_batch(rank, mode, engine, **net):
    "Two fits end where those of one process end that has the rows of all in each batch"
    n,world = 48,dist.get_world_size()
    x,y = all_rows(n)
    def _fit(model, dls, mode, engine='one'):
        learn = get_learner(model, dls, opt_func=adamw)
        if mode!='float32': modes[mode](learn)
        with together(learn, rank, engine): learn.fit(1); learn.fit_one_cycle(1)
        return flat(whole(learn))
    wrap = dict(hand=DistributedDataParallel, fsdp2=shard).get(engine, noop)
    data = (x,y) if engine=='fastai' else rows(rank, n)
    several = _fit(wrap(layer_normed(**net)), as_dls(*data), mode, engine)
    order = in_their_order(n*world)
    def _one(mode): return _fit(layer_normed(), as_dls(x[order], y[order], 16*world), mode)
    one,float32 = _one(mode),_one('float32')
    way = (float32-flat([*layer_normed().parameters()])).norm()
    agree(several)
    assert (several-one).norm()<=max((one-float32).norm(), 1e-5*way)

def in_their_order(n, bs=16):
    "Order of `n` rows if each rank has its share in batches of `bs`: all first batches, all second ones, and so on"
    return torch.arange(n).view(dist.get_world_size(),-1,bs).transpose(0,1).reshape(-1)

def fine_tuned(rank, mode):
    "`fine_tune` first trains the head alone; fastai wraps the model again for each fit"
    def _groups(m): return [[*o.parameters()] for o in (nn.ModuleList([m.inp,m.bn]),m.blocks,m.head)]
    learn = modes[mode](get_learner(Net(), as_dls(*all_rows()), splitter=_groups))
    start = params(learn.model)
    with together(learn, rank):
        learn.fine_tune(1)
        tuned = params(learn.model)
        learn.freeze()
        learn.fit(1)
    last,n = params(learn.model),'blocks.0.a.weight'
    assert not same(start[n], tuned[n]) and same(tuned[n], last[n])
    assert not same(tuned['head.weight'], last['head.weight'])
    agreed(learn)

def predictions(rank, mode):
    "`validate` and `get_preds`: all get the predictions of all, in fastai's order, and they are those of one process"
    x,y = all_rows()
    learn = modes[mode](get_learner(Net(), as_dls(x, y)))
    with together(learn, rank):
        learn.fit(1)
        for b in learn.model.buffers(): dist.broadcast(b, 0) # each rank has statistics of its own
        valid,(preds,targs) = learn.validate(),learn.get_preds()
    alone,order = learn.get_preds(),in_their_order(len(y))
    assert torch.equal(targs, y[order]) and torch.allclose(preds, alone[0][order], atol=1e-5)
    assert preds.dtype==torch.float32 and abs(valid[0]-learn.validate()[0])<1e-5
    agree(preds, valid)

def saved(rank, mode):
    "Rank 0 writes, all read, and training goes on bit for bit"
    def _new(): return modes[mode](get_learner(layer_normed(), as_dls(*all_rows()), path=Path()))
    (learn,other),writes,write = (_new(),_new()),[],torch.save
    def _save(*args, **kwargs): writes.append(1); write(*args, **kwargs)
    with patched('torch.save', _save):
        with together(learn, rank):
            fitted(learn, 2).save('m')
            learn.fit(1)
        with together(other, rank):
            assert read_state(other.load('m').opt)['steps']==2*64//16
            other.fit(1, reset_opt=False)
    assert len(writes)==(rank==0)
    assert same(params(learn.model), params(other.model)) and read_state(learn.opt)==read_state(other.opt)
    agreed(other)

# --- What is sent

def accumulated(rank, spoiled=None, dtype=torch.bfloat16):
    "Two batches under `no_sync`, and one that sends: an overflow before it is in the sum, and so on both ranks"
    model,(x,y),grads = DistributedDataParallel(Net().eval()),rows(rank, 24),[]
    half = half_precision(model, dtype, keep='head')
    for i in range(3):
        xb = x[i*8:i*8+8]*(torch.inf if (i,rank)==(spoiled,1) else 1)
        with half, model.no_sync() if i<2 else nullcontext(): F.mse_loss(model(xb), y[i*8:i*8+8]).backward()
        grads.append(model.module.inp.weight.grad.clone())
    differ(grads[1])
    stats = prepare_grads(model.parameters(), clip=1.)
    assert stats.finite==(spoiled is None)
    if stats.finite: agree(grads[2], params(model), stats.norm, [p.grad for p in model.parameters()])

def compressed(rank, dtype, hook):
    "Gradients that PyTorch's hook sends in half precision are the same on all ranks, and close to those in float32"
    (x,y),got = rows(rank, 16),[]
    for h in (None, getattr(default_hooks, hook)):
        model = DistributedDataParallel(layer_normed())
        if h: model.register_comm_hook(None, h)
        with half_precision(model, dtype): F.mse_loss(model(x), y).backward()
        got.append(flat([p.grad for p in model.parameters()]))
    agree(got)
    assert 0<(got[0]-got[1]).norm()/got[0].norm()<=(2.**-8 if hook.startswith('bf16') else 2.**-11)

def told(rank, mode, wrap=DistributedDataParallel, others='another process'):
    "All warn and stop at the same step; the rank that has the bad batch says so, and `others` send there"
    learn = get_learner(wrap(Net()), as_dls(*rows(rank)), opt_func=adamw)
    modes[mode](learn, max_skips=5, warn_skips=3)
    always = On('before_batch', lambda learn: setattr(learn, 'xb', (learn.x*(torch.inf if rank==1 else 1),)))
    with pytest.warns(UserWarning, match='3 steps in a row'), pytest.raises(FloatingPointError) as e:
        learn.fit(2, cbs=always)
    assert ('The inputs of this batch have inf or nan' if rank==1 else others) in str(e.value)
    learn.fit(1) # and training can go on
    assert read_state(learn.opt)['steps']==5+4
    agree(read_state(learn.opt))

def overflowing(rank, wrap=DistributedDataParallel, callback=None, **kwargs):
    "A learner of which only rank 1 sees batches that float16 can't compute"
    x,y = rows(rank)
    learn = get_learner(wrap(net(Softmax)), as_dls(x*(1 if rank==1 else .01), y), opt_func=adamw, cbs=callback)
    learn.to_fp16(rescue=True, warn_skips=6, **kwargs)
    return learn

def rescued(rank, alone=False):
    "Both keep the module from the same step on; the processes of a group ask each other, and nobody else"
    groups = [dist.new_group([i]) for i in range(dist.get_world_size())] if alone else [None]*dist.get_world_size()
    learn = fitted(overflowing(rank, partial(DistributedDataParallel, process_group=groups[rank])), 5)
    assert learn.mixed_precision.state.rescued==(() if alone and rank==0 else (('1',6),))
    if not alone: agree(params(learn.model), read_state(learn.opt), [*learn.mixed_precision.policy().why])

def not_rescued(rank):
    "Where a callback does what `DistributedDataParallel` does nobody can be asked: none is rescued, a warning says so"
    def _average(learn):
        for p in learn.model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
    learn = overflowing(rank, noop, On('after_backward', _average), max_skips=8)
    with pytest.warns(UserWarning) as warned, pytest.raises(FloatingPointError): learn.fit(5)
    assert any("rescue=True does not keep ['1'] in float32" in str(o.message) for o in warned)==(rank==1)
    assert learn.mixed_precision.state.rescued==()
    # each has measured a batch of its own
    agree(params(learn.model), {k:o for k,o in precision_state(learn).items() if not k.startswith('measured')})

def scale_kept(rank, wrap=DistributedDataParallel, kept=True):
    "A loss that is infinite on one rank says nothing of the scale of all; where nobody can be asked the scale shrinks"
    model,(x,y) = wrap(layer_normed()),rows(rank, 32)
    steps = TrainingSteps(model, torch.optim.AdamW(model.parameters()), loss_scale=DynamicLossScale(2.**10))
    for i,(xb,yb) in enumerate(zip(x.split(8), y.split(8))):
        if (i,rank)==(2,1): xb = xb*1e6
        with steps.batch(xb, yb): steps.backward(F.mse_loss(model(xb), yb))
        if wrap is noop:
            for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()
        assert steps.make().finite==(i!=2)
    assert steps.loss_scale==2.**(10 if kept else 9)
    agree(steps.state_dict())

# --- What a rank may do alone

looks = dict(find_nonfinite={}, precision_plan={}, precision_report=dict(batches=1))

def asked(rank, engine):
    "One rank may ask alone, or all may, each about its own rows"
    x,y = rows(rank)
    if rank==1: x[40] = torch.inf
    model = DistributedDataParallel(Net()) if engine=='hand' else Net()
    learn = get_learner(model, as_dls(x, y), opt_func=adamw).to_bf16()
    with torchrun(rank), together(learn, rank, engine):
        learn.fit(1)
        with stays(params, learn.model):
            if rank==0:
                for f,options in looks.items(): getattr(learn, f)(**options)
            found = learn.find_nonfinite()
            assert (found.where=='inputs') if rank==1 else str(found).startswith('All 4 batches of dls.train and')
            if rank==1:
                with pytest.raises(ValueError, match='find_nonfinite'): learn.precision_report()
        assert type(learn.dls.train) is not DistributedDL

def replayed(rank, mode):
    "Each process writes a file of its own batch, and computes it again alone"
    x,y = rows(rank)
    if rank==1: x[40] = torch.inf
    learn = modes[mode](get_learner(DistributedDataParallel(Net()), as_dls(x, y), opt_func=adamw), replay='nights')
    learn.fit(1)
    file, = Path('nights').glob(f'*_rank{rank}.pt')
    if rank==0:
        with stays(params, learn.model): found = learn.replay(file)
        assert found.same and found.finding.where=='nothing'
    dist.barrier()
    if rank==1: assert learn.replay(file).same and learn.replay(file).finding.where=='inputs'

def asked_gathers(rank):
    "A loss that gathers: an error before anything waits, also if one process asks alone"
    def _gathering(pred, y):
        loss = F.mse_loss(pred, y)
        dist.all_reduce(loss.detach())
        return loss
    learn = get_learner(DistributedDataParallel(Net()), as_dls(*rows(rank)), loss_func=_gathering).to_bf16()
    learn.fit(1)
    for f,options in looks.items() if rank==0 else ():
        told = pytest.raises(RuntimeError, match='allreduce_ waits for all processes')
        with stays(params, learn.model), told: getattr(learn, f)(**options)
    learn.fit(1)
    agree(params(learn.model))

def refused(rank):
    "Inside `single_process` what would wait for the other process is an error, and nothing is sent"
    x = torch.full((2,), float(rank))
    with single_process(nn.Linear(1,1)), pytest.raises(RuntimeError, match='allreduce_ waits for all processes'):
        dist.all_reduce(x)
    assert (x==rank).all()

def measured(rank, mode):
    "What the first batch of one process shows counts for all: the table of the other one is harmless"
    torch.manual_seed(0)
    table = torch.cat([torch.randn(40,24),1990+5*torch.randn(40,24)])
    model = nn.Sequential(nn.Embedding.from_pretrained(table), nn.BatchNorm1d(24), nn.Linear(24,1))
    x = 40*rank+torch.arange(64)%40
    learn,seen = get_learner(DistributedDataParallel(model), as_dls(x, torch.randn(64,1)), opt_func=SGD),[]
    def _look(cb): seen.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    learn = fitted(modes[mode](learn), 9, On('after_backward', _look))
    assert learn.mixed_precision.state.measured.names==('0',) and learn.mixed_precision.half.ways['0'].why=='measured'
    assert learn.mixed_precision.state.measured.steps==(0,32) and len(seen)==36
    agree(seen, learn.mixed_precision.state.measured)

def alone_first(rank, mode, engine, start_epoch=0):
    """Rank 1 alone fits, and skips a step; then all train together, with the loss scale and the counters of rank 0

    Also if the common fit starts in a later epoch."""
    sgd = partial(SGD, mom=0.) # momentum would stay different
    learn = modes[mode](get_learner(layer_normed(), as_dls(*numbers(128)), opt_func=sgd))
    if rank==1: learn.fit(1, cbs=Spoil(1, 1))
    assert len(precision_state(learn))>1 and (learn.opt is None)==(rank==0)
    if engine=='hand': learn.model = DistributedDataParallel(learn.model)
    with torchrun(rank), together(learn, rank, engine):
        learn.fit(2, start_epoch=start_epoch, cbs=[] if start_epoch else Spoil(0, 1))
    assert precision_state(learn)['steps']==(2-start_epoch)*len(learn.dls.train)//(2 if engine=='fastai' else 1)
    agree(params(learn.model), precision_state(learn))

ends = {o.__name__:o for o in (RuntimeError,CancelFitException,CancelBackwardException)} # they can't be pickled

def interrupted(rank, mode, event, engine, end='RuntimeError'):
    """A fit ends early, by an error or a cancel in its second batch: a look is about the batches, the next fit trains

    Rank 0 collects garbage, the other has its wrapper as long as anything refers to it."""
    by_hand,hooks,e = engine=='hand',[],ends[end]('as asked')
    net,dls = layer_normed(),as_dls(*(rows(rank, 32) if by_hand else numbers(64))) # two batches each
    learn = get_learner(DistributedDataParallel(net) if by_hand else net, dls, opt_func=adamw)
    if mode!='float32': modes[mode](learn)
    def _spoil(learn): hooks.append(net.blocks[0].a.weight.register_hook(raises(e)))
    cb = Now('after_loss', _spoil) if event=='in_backward' else Now(event, raises(e), order=15)
    told = pytest.raises(RuntimeError, match='as asked') if end=='RuntimeError' else nullcontext()
    gc.disable()
    try:
        with torchrun(rank):
            with together(learn, rank, engine), told: learn.fit(1, cbs=cb)
            for o in hooks: o.remove()
            if rank==0: gc.collect()
            assert 'are finite' in str(learn.find_nonfinite())
            with together(learn, rank, engine): learn.fit(1)
    finally: gc.enable()
    agree(params(learn.model), mode!='float32' and precision_state(learn))

def synced(rank, mode):
    "`SyncBatchNorm`, for which PyTorch needs a GPU: both processes share one, and send by gloo"
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(Net()).cuda())
    learn = fitted(modes[mode](get_learner(model, as_dls(*rows(rank)).cuda(), cbs=Spoil())), 2)
    log = log_of(learn)
    with pytest.raises(RuntimeError, match='waits for all processes'): learn.find_nonfinite()
    assert [*log.finite]==[True,True,False,True]+[True]*4
    if not mode.startswith('native'): assert 'SyncBatchNorm' in learn.mixed_precision.state.measured.why
    # its statistics are those of both, unlike those of `BatchNorm`
    agree(params(model), model.module.bn.running_mean.clone(), [*log.norm[log.finite]])

# --- Which cases run

options = [dict(clip=.1, then='native_fp16'), dict(accumulate=32), dict(net=dict(reentrant=False)),
           dict(compiled=True), dict(net=dict(drop=True), ddp=dict(find_unused_parameters=True)),
           dict(flat_master=True),
           # `zero_grad` of fastai's own optimizers doesn't take gradients that are views
           dict(ddp=dict(gradient_as_bucket_view=True), opt_func=adamw)]
ways = itertools.cycle([('bf16','fastai'), ('fp16','hand'), ('native_bf16','hand'), ('native_fp16','fastai'),
                        ('fp8','hand')])

quick = [
    case(loop, dtype=bf16), case(own_steps), case(own_rescue), case(scale_kept),
    case(accumulated), case(accumulated, spoiled=1, dtype=f16),
    case(trained, mode='fp16', engine='hand', net=dict(reentrant=True)),
    case(whole_batch, mode='fp16', engine='fastai'), case(saved, mode='native_fp16'), case(predictions, mode='bf16'),
    case(told, mode='fp16'), case(asked, engine='fastai'), case(refused),
    case(alone_first, mode='fp16', engine='fastai'),
    case(interrupted, mode='fp16', event='after_loss', engine='fastai')]
slow = [
    case(loop, dtype=f16), case(own_steps, dtype=bf16), case(scale_kept, wrap=noop, kept=False),
    *[case(trained, mode=m, engine=e, **o) for o,(m,e) in zip(options, ways)],
    *[case(whole_batch, mode=m, engine=e) for m,e in
      [('float32','hand'), ('native_fp16','hand'), ('native_bf16','fastai')]],
    case(whole_batch, mode='bf16', engine='hand', reentrant=False),
    case(whole_batch, mode='fp8', engine='hand', reentrant=True),
    case(measured, mode='fp16'),
    case(fine_tuned, mode='native_bf16'), case(saved, mode='bf16'), case(told, mode='bf16'),
    case(compressed, dtype=torch.float16, hook='bf16_compress_hook'),
    case(compressed, dtype=torch.bfloat16, hook='fp16_compress_hook'), case(asked, engine='hand'), case(asked_gathers),
    case(replayed, mode='bf16'),
    case(rescued), case(rescued, alone=True), case(not_rescued),
    case(alone_first, mode='native_fp16', engine='hand'),
    case(alone_first, mode='fp16', engine='fastai', start_epoch=1),
    case(interrupted, mode='native_fp16', event='in_backward', engine='fastai'),
    case(interrupted, mode='float32', event='in_backward', engine='hand'),
    case(interrupted, mode='bf16', event='before_step', engine='fastai', end='CancelFitException'),
    case(interrupted, mode='fp16', event='before_backward', engine='hand', end='CancelBackwardException')]
four = [case(trained, mode='native_bf16', engine='hand', net=dict(reentrant=False)),
        case(whole_batch, mode='fp16', engine='fastai')]

@in_groups(quick, slow, four)
def test_ranks_are_equal(tmp_path, cases, world): run_cases(tmp_path, cases, world)

@pytest.mark.cuda
@pytest.mark.results
def test_synced_batch_norm(tmp_path): run_cases(tmp_path, [case(synced, mode=m) for m in precisions])
