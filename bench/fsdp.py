"""Memory of a step with FSDP2: `to_bf16` and `to_native_bf16` beside FSDP2's own `MixedPrecisionPolicy`

    python bench/fsdp.py [--processes 2]

Prints a table: bytes per parameter above the shards of parameters and optimizer state, which are always there, at the
end of the forward pass and at the peak of forward and backward. They are the profiler's memory events on a CPU, where
`fully_shard` gathers weights as on a GPU. The model is 24 residual blocks of two linear layers. What is gathered when
depends on the timing of threads, so that the table has medians of 15 steps."""
import argparse,gc,tempfile,time
from contextlib import nullcontext

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy,fully_shard
from torch.profiler import ProfilerActivity,profile

from common import *
from mp_callbacks.core.half import half_precision

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up,self.down = nn.Linear(width, 4*width),nn.Linear(4*width, width)
    def forward(self, x): return x+self.down(self.up(x).relu())

ways = {'float32':(None,False), 'to_bf16':(True,False), 'to_native_bf16':(False,False),
        'MixedPrecisionPolicy':(None,True), 'to_native_bf16 and the policy':(False,True)}

def measure(copies, policy, width=256, depth=24, bs=16):
    "Bytes per parameter after the forward pass, and at the peak"
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(depth)])
    kwargs = dict(mp_policy=MixedPrecisionPolicy(bf16, torch.float32)) if policy else {}
    for m in (*model, model): fully_shard(m, **kwargs)
    opt,x = torch.optim.AdamW(model.parameters()),torch.randn(bs, width)
    half = nullcontext() if copies is None else half_precision(model, bf16, rules=copies)
    def _step():
        with half:
            loss = model(x).float().square().mean()
            forward = time.time_ns()
            loss.backward()
        return forward
    for _ in range(2): # the first steps make optimizer state and buffers
        _step()
        opt.step()
        opt.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof: forward = _step()
    now,kept,peak = 0,0,0
    for e in sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if e.name()!='[memory]': continue
        now += e.nbytes()
        peak = max(peak, now)
        if e.start_ns()<forward: kept = now
    n = sum(p.numel() for p in model.parameters())
    return kept/n,peak/n

def work(rank, world, path):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{path}/init', rank=rank, world_size=world)
    res = {name:[*pd.DataFrame([measure(*o) for _ in range(15)]).median()] for name,o in ways.items()}
    if rank==0:
        df = pd.DataFrame(res, ['after the forward pass','peak']).T.rename_axis('way')
        print(f'\n{markdown(df)}\nBytes per parameter. `python bench/fsdp.py`: {machine()}, {world} processes, gloo.')
    dist.destroy_process_group()

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--processes', type=int, default=2, help='how many [2]')
    world = p.parse_args().processes
    with tempfile.TemporaryDirectory() as path: mp.spawn(work, (world,path), nprocs=world)
