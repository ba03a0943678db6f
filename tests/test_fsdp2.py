"""FSDP2 (`fully_shard`) in every precision: shards are skipped, clipped, saved and loaded as the whole model is

Also what is refused, and what an exception in the middle of a batch leaves. The page about several GPUs promises it.
Taken over from the tests of PyTorch, `test/distributed/_composable/fsdp`: `test_gradient_scaler` of
`test_fully_shard_grad_scaler.py`, `test_clip_grad_norm_1d` of `test_fully_shard_clip_grad_norm_.py`."""
from ranks import *
from torch.distributed.fsdp import FSDPModule,FullyShardedDataParallel,MixedPrecisionPolicy
from test_distributed import case,modes,scale_kept,told,whole_batch

pytestmark = pytest.mark.skipif(not fsdp2_runs, reason=no_fsdp2)

def new_learner(rank, mode, model=None, options={}, **kwargs):
    model = shard(layer_normed()) if model is None else model
    return modes[mode](get_learner(model, as_dls(*rows(rank)), **{'opt_func':adamw, **kwargs}), **options)

def trained(rank, mode, net={}, opt_func=adamw, policy=False, accumulate=None, **kwargs):
    "A batch that overflows on one rank is skipped by all; the state of the optimizer stays in parts"
    own = MixedPrecisionPolicy(torch.float16 if 'fp16' in mode else torch.bfloat16, torch.float32)
    cbs = [Spoil(),*([GradientAccumulation(accumulate)] if accumulate else [])]
    model = shard(Net(**net), **(dict(mp_policy=own) if policy else {}))
    learn = fitted(new_learner(rank, mode, model, kwargs, cbs=cbs, opt_func=opt_func), 2)
    log,first = log_of(learn),learn.opt.param_lists[0][0]
    state = (learn.opt.opt if opt_func is adamw else learn.opt).state[first]
    sizes = {o.to_local().numel() for o in state.values() if hasattr(o, 'to_local')}
    assert sizes=={first.numel()//dist.get_world_size()}
    assert all(p.dtype==torch.float32 for p in whole(learn))
    assert [*log.finite]==[True,True,False,True]+[True]*4 if not accumulate else log.skipped.any()
    agree(whole(learn), [*log.norm[log.finite]])
    known = learn.mixed_precision.state.measured
    if mode in ('fp16','bf16'): assert 'with fully_shard (FSDP2)' in known.why

def validated_first(rank, mode):
    "A forward pass without a backward pass leaves gathered parameters behind: an optimizer made then wouldn't train"
    learn = new_learner(rank, mode, shard(Net()))
    before = [p.full_tensor() for p in learn.model.parameters()]
    learn.validate()
    learn.fit(1)
    after = [p.full_tensor() for p in learn.model.parameters()]
    assert not any(map(same, before, after))
    agree(after)

def grad_scaler(rank):
    "After an inf in one shard no state changes, and the scale shrinks"
    learn = fitted(new_learner(rank, 'native_fp16', options=dict(init_scale=2.)), 0) # makes the optimizer
    ps = learn.opt.param_lists[0]
    before = [p.to_local().clone() for p in ps]
    def _spoil(learn):
        if rank==1: ps[0].grad.to_local()[0,0] = torch.inf
    learn.fit(1, cbs=[On('before_step', _spoil, 9),On('after_batch', raises(CancelFitException))]) # before the check
    assert same(before, [p.to_local() for p in ps]) and not learn.opt.opt.state
    assert learn.mixed_precision.loss_scale==1

def clipped(rank, clip=.01):
    "Norm, largest and clipped gradients are those of the whole model, whose single output is on rank 0 alone"
    x,y = rows(rank, 16)
    nets = [layer_normed(),layer_normed()]
    for o in nets: o.head = nn.Linear(16, 1)
    nets[1].load_state_dict(nets[0].state_dict())
    one,parts = DistributedDataParallel(nets[0]),shard(nets[1])
    for o in (one,parts): F.mse_loss(o(x), y).backward()
    amax = max([p.grad.abs().max().item() for p in one.parameters()])
    norm = nn.utils.clip_grad_norm_(one.parameters(), clip)
    stats = prepare_grads(parts.parameters(), clip=clip, amax=True)
    got,want = flat([p.grad.full_tensor() for p in parts.parameters()]),flat([p.grad for p in one.parameters()])
    assert norm>clip and abs(stats.norm-norm.item())<1e-5*stats.norm and abs(stats.amax-amax)<1e-5*amax
    assert (got-want).norm()<1e-5*want.norm()
    agree(stats.norm, stats.amax)

def of_page(name):
    "The code on the page about several GPUs that has `name` in it"
    text = '\n'.join(cells_of('howto/several_gpus.ipynb', 'markdown'))
    res, = [o for o in re.findall(r'^```python\n(.*?)^```', text, re.S|re.M) if name in o]
    return res

def checkpointed(rank, mode, before=False):
    """The code of the page: a new learner goes on bit for bit, with the scale and the counters of the file

    The optimizer was made `before` the precision was chosen, or after. An ordinary model can have the weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions,get_model_state_dict
    def _new():
        learn = get_learner(shard(layer_normed()), as_dls(*rows(rank)), opt_func=adamw, cbs=Spoil(at=1))
        if before: learn.create_opt()
        return modes[mode](learn)
    save,load = of_page('dcp.save').split('# in a new run\n')
    if before: load = load.replace('learn.create_opt()\n', '')
    learn,other = _new(),_new()
    learn.fit(2)
    names = dict(learn=learn)
    exec(save, names)
    learn.fit(1)
    exec(load, dict(names, learn=other))
    assert precision_state(other)['steps']==8
    other.fit(1)
    assert same(whole(other), whole(learn)) and precision_state(other)==precision_state(learn)
    agree(whole(other), precision_state(other))
    state = get_model_state_dict(learn.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank==0: layer_normed().load_state_dict(state)

def refused(rank, mode):
    "A look at a batch would wait for processes that don't look, and a file would have one part; FSDP1"
    learn = new_learner(rank, mode, shard(Net()))
    for f in (learn.find_nonfinite,learn.precision_report):
        with pytest.raises(RuntimeError, match='waits for all processes'): f()
    for f in (learn.save,learn.export):
        with pytest.raises(ValueError, match=f'learn.{f.__name__} would write one part'): f('part')
    learn.fit(1)
    agree(whole(learn))
    fsdp1 = FullyShardedDataParallel(Net(), device_id=torch.device('cpu'))
    with pytest.raises(ValueError, match='flat shards'): half_precision(fsdp1, torch.bfloat16)

def recovers():
    "Can this PyTorch forget a batch that was interrupted? If not, there is a warning: see `interrupted_before`"
    return hasattr(FSDPModule, 'reset_iter_state')

def unsent(rank, mode):
    "Those of every second batch only are sent, others are kept back; with a loss scale an error, the next fit trains"
    learn,other = [new_learner(rank, mode, cbs=GradientAccumulation(32)) for _ in range(2)]
    send = On('before_batch', lambda learn: learn.model.set_requires_gradient_sync(learn.iter%2==1), 5)
    if 'fp16' in mode:
        told = nullcontext() if recovers() else pytest.warns(UserWarning, match="doesn't recover")
        with told, pytest.raises(RuntimeError, match=r'gradient_sync\(False\) keeps the gradients back'):
            learn.fit(1, cbs=send)
        if not recovers(): return # what was kept back is still there
        learn.model.set_requires_gradient_sync(True)
    learn.fit(1, cbs=[] if 'fp16' in mode else send)
    other.fit(1)
    assert all(torch.allclose(a, b, atol=1e-6) for a,b in zip(whole(learn), whole(other)))
    agree(whole(learn))

def interrupted(rank, mode, where, backward=True):
    "The next fit trains all parameters"
    if not recovers(): return
    learn,hooks,fails = new_learner(rank, mode),[],raises(RuntimeError('as asked'))
    def _spoil(learn):
        inside = learn.model.get_submodule(where)
        hooks.append((inside.register_full_backward_pre_hook if backward else inside.register_forward_pre_hook)(fails))
    for cb in (Callback(before_batch=fails), Now('before_batch', _spoil)): # before its first batch, in its second
        with learn.no_bar(), pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=cb)
    hooks[0].remove()
    before = whole(learn)
    learn.fit(1)
    assert not any(map(same, before, whole(learn)))
    agree(whole(learn))

def interrupted_before(rank):
    "A PyTorch that can't mend that: a warning"
    learn,stop = new_learner(rank, 'bf16'),Now('after_loss', raises(RuntimeError('as asked')))
    with pytest.MonkeyPatch.context() as m, pytest.warns(UserWarning, match="doesn't recover"):
        m.delattr(FSDPModule, 'reset_iter_state', raising=False)
        with pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=stop)
    assert all(hasattr(p, 'full_tensor') for p in learn.model.parameters()) # each process has its part again

# --- Which cases run

told = case(told, wrap=shard, others='each forward pass waits for all')
quick = [case(trained, mode='fp16'), case(clipped), case(refused, mode='bf16'), case(grad_scaler),
         case(unsent, mode='fp16'), case(told, mode='native_fp16'), case(scale_kept, wrap=shard),
         case(interrupted_before)]
slow = [
    case(whole_batch, mode='native_fp16', engine='fsdp2'), case(whole_batch, mode='bf16', engine='fsdp2'),
    case(trained, mode='native_fp16', clip=.1), case(trained, mode='bf16', accumulate=32),
    case(trained, mode='native_bf16', net=dict(reentrant=True)), case(trained, mode='fp8', net=dict(reentrant=False)),
    case(trained, mode='native_bf16', opt_func=Adam), case(trained, mode='bf16', opt_func=Adam, flat_master=True),
    case(trained, mode='native_bf16', policy=True, net=dict(norm=nn.LayerNorm)),
    case(trained, mode='fp16', max_loss_scale=2.**24), # which measures the headroom
    case(validated_first, mode='fp16'),
    case(unsent, mode='bf16'), case(checkpointed, mode='native_fp16'), case(checkpointed, mode='fp16', before=True),
    case(interrupted, mode='native_bf16', where='head'), case(interrupted, mode='bf16', where='blocks.1.a'),
    case(interrupted, mode='fp16', where='blocks.1', backward=False)]
four = [case(trained, mode='native_bf16'), case(clipped), case(whole_batch, mode='fp16', engine='fsdp2')]

@in_groups(quick, slow, four)
def test_shards(tmp_path, cases, world): run_cases(tmp_path, cases, world)
