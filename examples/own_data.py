"""Several processes, and each reads its own part of the data

    torchrun --nproc-per-node 2 examples/own_data.py

For data that one process can't read whole, such as files that each process has on its own disk. Without `distrib_ctx`,
which would split the part again. Prints each part, and that all processes end with the same weights."""
import sys
import torch.distributed as dist
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from mp_callbacks.all import *

def my_part(rank, n):
    "Images and labels that process `rank` of `n` reads: here every `n`th"
    x,y = load_digits(return_X_y=True)
    return tensor(x[rank::n]/16).float(),tensor(y[rank::n])

if 'RANK' not in os.environ:
    print('Start it with: torchrun --nproc-per-node 2 examples/own_data.py', file=sys.stderr)
    sys.exit(2)
gpu = torch.cuda.is_available()
device = torch.device('cuda', int(os.environ['LOCAL_RANK'])) if gpu else torch.device('cpu')
if gpu: torch.cuda.set_device(device)
dist.init_process_group('nccl' if gpu else 'gloo')
rank,n = dist.get_rank(),dist.get_world_size()

items = [*zip(*my_part(rank, n))]
print(f'process {rank} of {n} has {len(items)} items')
smallest = torch.tensor(len(items), device=device)
dist.all_reduce(smallest, dist.ReduceOp.MIN)
items = items[:smallest] # each process must make the same number of steps, or the others wait for it
cut = len(items)*5//6
set_seed(rank) # another order of the items in each process
dls = DataLoaders.from_dsets(items[:cut], items[cut:], bs=32, num_workers=0, device=device)

set_seed(42) # the same weights in each process
model = DistributedDataParallel(nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,10)).to(device))
learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy).to_fp16()
with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(5, 1e-2)
learn.save('digits') # only the first process writes

weights = torch.cat([p.detach().flatten() for p in model.parameters()])
of_all = [torch.empty_like(weights) for _ in range(n)]
dist.all_gather(of_all, weights) # every process takes part
acc = learn.final_record[-1] # fastai takes the mean over all processes that torchrun has started
if rank==0: print(f'accuracy {acc:.2f}, weights are equal: {all(torch.equal(o, weights) for o in of_all)}')
del learn,model # else a thread of gloo may abort this process at its end
dist.destroy_process_group()
