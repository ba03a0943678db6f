"""Train a small net on scikit-learn's digits, in one process or in several

    python examples/distributed.py --precision fp16
    torchrun --nproc-per-node 2 examples/distributed.py --precision fp16
    accelerate launch --multi_gpu --num_processes 2 examples/distributed.py --precision fp16

The last two also work without a GPU. (`accelerate launch --cpu` starts one process only.)"""
from fastai.basics import *
from fastai.callback.all import *
from fastai.distributed import *
from fastcore.script import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

@patch
def _broadcast(self:DistributedDL, t, rank):
    "fastai's own asks for a GPU. This takes the device of the model, so that it works on a CPU, too."
    t = tensor(t, device=self.device)
    torch.distributed.broadcast(t, rank)
    return t.tolist()

def get_dls(bs):
    x,y = load_digits(return_X_y=True)
    items = list(zip(tensor(x/16).float(), tensor(y)))
    return DataLoaders.from_dsets(items[:1500], items[1500:], bs=bs, num_workers=0)

def get_model(): return nn.Sequential(LinBnDrop(64, 128, act=nn.ReLU()), LinBnDrop(128, 10, bn=False))

@call_parse
def main(
    precision:str='bf16', # bf16, fp16, native_bf16, native_fp16 or fp32
    epochs:int=5, # Number of epochs
    bs:int=32, # Batch size of each process
    lr:float=1e-2, # Learning rate
    file:str='digits', # Name of the checkpoint
):
    "Train on scikit-learn's digits, in as many processes as `torchrun` or `accelerate launch` starts"
    set_seed(42)
    gpu = torch.cuda.is_available()
    if gpu: torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))
    learn = Learner(get_dls(bs), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    getattr(learn, f'to_{precision}')()
    with learn.no_bar(), learn.distrib_ctx(cpu=not gpu, sync_bn=gpu): # NCCL on GPUs, gloo on a CPU
        learn.fit_one_cycle(epochs, lr)
        learn.save(file) # rank 0 writes
    if rank_distrib(): return
    print(f'accuracy {learn.recorder.values[-1][-1]:.3f}')
    if precision!='fp32': print(learn.precision_recorder.summary())
