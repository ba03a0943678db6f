"""Training in several processes, with `DistributedDataParallel`: weak scaling, and whether communication overlaps

Each process has a batch of its own, of the same size, so perfect scaling takes the same time per step with one process
and with several. Loops take turns within one run: plain PyTorch, fastai's own callbacks, and ours. On GPUs the backend
is NCCL with one process per GPU, else gloo with one thread per process.

The second part asks when DDP sends: for each precision, the share of the backward pass that has gone when the first
bucket of gradients is ready, and when the last one is."""
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from time import perf_counter

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common import *
from loops import Variant
from models import Task,ViT,loss_func,mlp
from mp_callbacks.core.half import half_precision

full = [Task('mlp', lambda: mlp(1024, 6, 1024),                (1024,),   1024, 256),
        Task('vit', lambda: ViT(32, 4, 192, 768, 3, 6, 10),    (3,32,32), 10,   16)]
tiny = [Task('mlp', lambda: mlp(8, 3, 5),                      (8,),      5,    4)]
variants = [Variant(loop, 'fused', precision) for loop,precision in [
    ('hand','fp32'), ('fastai','fp32'), ('hand','autocast-bf16'), ('fastai','autocast-bf16'), ('ours','autocast-bf16'),
    ('ours','bf16')]]
bucket_mb = 4 # a weight of the MLP; PyTorch's default of 25 would send all of these models at once

def wrapped(model): return DistributedDataParallel(model, bucket_cap_mb=bucket_mb)

def same(n):
    "The number that rank 0 has"
    res = [n]
    dist.broadcast_object_list(res)
    return res[0]

def measure(task, dev, turns, turn):
    "Rows of (variant, turn, metric, value, note) for each loop"
    data,loops,clock = task.data(dev),{v:build(v, wrapped(task.model(dev))) for v in variants},Clock(dev)
    n = {}
    for v,loop in loops.items():
        loop(Batches(data, 2, 2, clock))
        n[v] = same(steps_in(turn, clock.ms/2))
    for i in range(1, turns+1):
        for v in variants if i%2 else variants[::-1]:
            dist.barrier()
            loops[v](Batches(data, 1, n[v], clock))
            for row in clock.rows(n[v]): yield v,i,*row

def sent(task, dev, turns):
    "Rows of (variant, turn, metric, value, note): shares of the backward pass that have gone when a bucket is ready"
    (x,y),ready = task.data(dev),[]
    def _hook(group, bucket):
        ready.append(perf_counter())
        return allreduce_hook(group, bucket)
    for name,copies in dict(fp32=None, **{'autocast-bf16':False, 'bf16':True}).items():
        model = wrapped(task.model(dev))
        model.register_comm_hook(None, _hook)
        half = nullcontext() if copies is None else half_precision(model, bf16, rules=copies)
        for i in range(turns+2): # DDP sorts its buckets after the first
            with half:
                loss = loss_func(model(x), y)
                sync(dev)
                ready.clear()
                start = perf_counter()
                loss.backward()
                sync(dev)
                end = perf_counter()
            if i<2: continue
            for metric,at in (('first',ready[0]),('last',ready[-1])):
                yield Variant('bare', '', name),i-1,metric,(at-start)/(end-start),f'{len(ready)} buckets'

def work(rank, world, path, args):
    "One process: measures, and rank 0 sends the rows to a file"
    cuda = torch.cuda.is_available()
    if cuda: torch.cuda.set_device(rank)
    dev = torch.device('cuda', rank) if cuda else torch.device('cpu')
    torch.set_num_threads(1)
    init = dict(init_method=f'file://{path}/init{world}', rank=rank, world_size=world)
    dist.init_process_group('nccl' if cuda else 'gloo', timeout=timedelta(minutes=5), **init)
    turns,turn = (2,.001) if args.tiny else (args.turns,args.turn)
    rows = []
    for task in tiny if args.tiny else full:
        rows.append((('scaling', task.name, world),[*measure(task, dev, turns, turn)]))
        if world>1: rows.append((('overlap', task.name, world),[*sent(task, dev, turns)]))
    if rank==0: torch.save(rows, f'{path}/rows{world}')
    dist.destroy_process_group()

def tables(df):
    "One table per model for scaling, and one for the overlap"
    for case,o in df[df.part=='scaling'].groupby('case', sort=False):
        ms = o.pivot_table(index=['loop','precision'], columns='size', values='value', aggfunc='median', sort=False)
        res = ms.rename(columns=lambda n: f'{n} process{"es"*(n>1)}, ms')
        res['scaling'] = ms[1]/ms[ms.columns[-1]]
        hand = ms[ms.columns[-1]].xs('hand')
        res['over plain loop'] = [ms[ms.columns[-1]][k]/hand.get(k[1], hand['autocast-bf16']) for k in ms.index]
        yield f'## {case}: time per step\n\n{markdown(res)}'
    o = df[df.part=='overlap']
    res = o.pivot_table(index=['case','precision'], columns='metric', values='value', aggfunc='median', sort=False)
    res['buckets'] = o.groupby(['case','precision']).note.first().str.removesuffix(' buckets')
    res.columns = ['first bucket ready','last bucket ready','buckets']
    yield f'## Share of the backward pass that has gone when gradients are sent\n\n{markdown(res)}'

def main():
    p = arguments(__doc__)
    p.add_argument('--turns', type=int, default=11, help='how many turns every loop has [11]')
    p.add_argument('--turn', type=float, default=.5, help='how many seconds one lasts [0.5]')
    p.add_argument('--processes', type=int, default=2, help='how many, beside one [2]')
    args,_,results = start(p, 'distributed_{dev}')
    for world in (1,args.processes):
        with tempfile.TemporaryDirectory() as path:
            # a fork needn't import again, but can't use a GPU
            kind = 'fork' if sys.platform=='linux' and not torch.cuda.is_available() else 'spawn'
            mp.start_processes(work, (world,path,args), nprocs=world, start_method=kind)
            groups = torch.load(f'{path}/rows{world}', weights_only=False)
        for group,rows in groups: results.measure(*group, rows)
    results.write('Several processes', [*tables(results.read())])

if __name__=='__main__': main()
