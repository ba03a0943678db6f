"The formulas of the page on scale, against what processes hold in memory and hand to collectives"
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook,bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy,fully_shard

from mp_callbacks.look.plan import plan_memory
from ranks import *

def formulas():
    "The functions that the page defines"
    res = {}
    for source in cells_of('explanations/scale.ipynb', 'code'):
        if source.startswith('def '): exec(source, res)
    return res['memory'],res['messages']

memory,messages = formulas()

def make():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64,64) for _ in range(4)])

def held(opt):
    "Bytes of parameters, their gradients and optimizer state on this rank"
    def _local(t): return t.to_local() if hasattr(t, 'to_local') else t
    params = [p for g in opt.param_groups for p in g['params']]
    states = [o for s in opt.state.values() for o in s.values() if isinstance(o, torch.Tensor) and o.ndim]
    return sum(_local(t).nbytes for p in params for t in (p,p.grad))+sum(_local(t).nbytes for t in states)

def step(model, opt, rules=True):
    "Bytes that this process hands to collectives, by kind"
    half,sent = half_precision(model, torch.bfloat16, rules=rules),Counter()
    def _count(func, args, res):
        name = func.__name__.partition('.')[0]
        if func.namespace=='c10d' and name in ('allreduce_','_allgather_base_','_reduce_scatter_base_'):
            # the whole message: what is gathered into, what is reduced
            sent[name] += sum(t.nbytes for t in L(args[name=='_reduce_scatter_base_']))
    with Operations(_count):
        with half: model(torch.ones(8,64)).mean().backward()
        opt.step()
    return sent

def measured(rank, path):
    "For each way to train together the bytes that the process holds, and those of messages"
    res,reduced,all_reduce = {},[],dist.all_reduce
    def _counted(tensor, *args, **kwargs):
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)
    for name,hook in dict(ddp=allreduce_hook, ddp_bf16=bf16_compress_hook).items():
        model = DistributedDataParallel(make())
        model.register_comm_hook(None, hook)
        opt = torch.optim.Adam(model.parameters())
        reduced.clear()
        with patched.object(dist, 'all_reduce', _counted): step(model, opt) # which PyTorch's hooks call
        res[name] = held(opt),sum(reduced)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for name,policy in dict(fsdp=MixedPrecisionPolicy(), fsdp_policy=policy).items():
        model = make()
        for m in (*model, model): fully_shard(m, mp_policy=policy)
        opt = torch.optim.Adam(model.parameters())
        sent = step(model, opt, rules=False)
        res[name] = held(opt),sent
    if rank==0: torch.save(res, path)

@pytest.mark.skipif(not fsdp2_runs, reason=no_fsdp2)
@pytest.mark.parametrize('world', crossed([1,2,4], fast=lambda o: o==2))
def test_processes(world, tmp_path):
    "States per process, and the messages of a step, whose share (N-1)/N is sent by a ring"
    run_cases(tmp_path, [partial(measured, path=tmp_path/'res')], world)
    res = torch.load(tmp_path/'res', weights_only=False)
    n,ring = sum(p.numel() for p in make().parameters()),(world-1)/world
    assert res['ddp'][0]==memory(n, 1, False, False, 0) # DDP's buffer of 4 bytes per parameter is its own
    assert 2*ring*res['ddp'][1]==messages(n, world, False)
    assert 2*ring*res['ddp_bf16'][1]==messages(n, world, False, gradient=2)
    for name,weight in dict(fsdp=4, fsdp_policy=2).items():
        held,sent = res[name]
        assert held==pytest.approx(memory(n, world, True, False, 0), rel=.01) # padding
        if world==1: continue # nothing is sent
        assert sent['_allgather_base_']==pytest.approx(2*weight*n, rel=.01)
        assert ring*sum(sent.values())==pytest.approx(messages(n, world, True, weight), rel=.01)

def test_plan():
    "One process, against `plan_memory`: copies of weights are saved, and counted among the activations there"
    model = make()
    opt = torch.optim.Adam(model.parameters(), fused=True)
    plan = plan_memory(model, lambda n: model(torch.ones(n,64)).mean(), opt, 1)
    row,n = plan.table.loc['to_bf16']*2**20,sum(p.numel() for p in model.parameters())
    without = row.activations-2*n
    got = row.weights+row.gradients+row.optimizer+row.activations
    assert got==pytest.approx(memory(n, 1, False, True, without), rel=.01) and without<.2*n
