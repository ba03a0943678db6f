"""FSDP2: train, save and resume with torch.distributed.checkpoint

    torchrun --nproc-per-node 2 examples/fsdp2.py

Each process has a part of each weight, of its gradient and of the optimizer's state, and saves its part. Prints that a
learner that loads them ends with the weights of the one that went on. On a CPU this needs PyTorch 2.9."""
import sys
import torch.distributed as dist,torch.distributed.checkpoint as dcp
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict,set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from mp_callbacks.all import *

if 'RANK' not in os.environ:
    print('Start it with: torchrun --nproc-per-node 2 examples/fsdp2.py', file=sys.stderr)
    sys.exit(2)
gpu = torch.cuda.is_available()
if gpu: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
device = torch.device('cuda' if gpu else 'cpu')
dist.init_process_group('nccl' if gpu else 'gloo')
rank,n = dist.get_rank(),dist.get_world_size()
mesh = init_device_mesh(device.type, (n,))

def get_learner():
    x,y = load_digits(return_X_y=True)
    items = [*zip(tensor(x/16).float(), tensor(y))]
    train,valid = items[:1500][rank::n],items[1500:1796][rank::n] # each process its own part
    dls = DataLoaders.from_dsets(train, valid, bs=32, num_workers=0, device=device)
    set_seed(42) # the same weights in each process
    model = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,10)).to(device)
    for layer in model[0],model[2],model: fully_shard(layer, mesh=mesh)
    adam = partial(OptimWrapper, opt=torch.optim.AdamW) # fastai's own optimizers have no state dict that dcp can read
    return Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy, opt_func=adam).to_fp16()

def state(learn): return dict(zip(('model','opt'), get_state_dict(learn.model, learn.opt.opt)))

def train(learn, epoch):
    learn.dls.train.rng.seed(epoch) # the same batches each time
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)

learn = get_learner()
train(learn, 0)
dcp.save(state(learn), checkpoint_id='checkpoint') # with the loss scale, which is in the optimizer
train(learn, 1)

resumed = get_learner()
resumed.create_opt() # before `state`, as only what the optimizer has is loaded; so call `to_fp16` before, too
saved = state(resumed)
dcp.load(saved, checkpoint_id='checkpoint')
set_state_dict(resumed.model, resumed.opt.opt, model_state_dict=saved['model'], optim_state_dict=saved['opt'])
scale = resumed.mixed_precision.loss_scale
train(resumed, 1)

pairs = zip(learn.model.parameters(), resumed.model.parameters())
same = all([torch.equal(a.full_tensor(), b.full_tensor()) for a,b in pairs]) # every process takes part
if rank==0:
    print(f'part of the first weight: {tuple(learn.model[0].weight.to_local().shape)}, loaded scale: {scale:g}')
    print('weights are equal:', same)
del learn,resumed,saved # else a thread of gloo may abort this process at its end
dist.destroy_process_group()
