"""Train a small net on scikit-learn's digits, in one process or in several

    python examples/distributed.py --precision fp16
    torchrun --nproc-per-node 2 examples/distributed.py --precision fp16
    accelerate launch --multi_gpu --num_processes 2 examples/distributed.py --precision fp16

All three work without a GPU, too. (`accelerate launch --cpu` would start one process only.) After a failure
continue from the last epoch with `--resume`."""
import torch.distributed as dist
from datetime import timedelta
from accelerate.utils import DDPCommunicationHookType,DistributedDataParallelKwargs
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
    dist.broadcast(t, rank)
    return t.tolist()

class WaitForAll(Callback):
    "Before each batch, wait up to `seconds` for the other ranks, and name those that are missing."
    def __init__(self, seconds): self.timeout = timedelta(seconds=seconds)
    def before_fit(self): self.group = num_distrib()>1 and dist.new_group(timeout=self.timeout, backend='gloo')
    def before_batch(self):
        if self.group: dist.monitored_barrier(self.group, self.timeout, wait_all_ranks=True)

class Checkpoint(Callback):
    "Save each epoch, never as an incomplete file, and set the seed of each epoch, so that a resumed run repeats it"
    order = 20 # after the precision callback's `after_train`
    def before_epoch(self):
        set_seed(self.epoch)
        getattr(self.dls.train, 'dl', self.dls.train).rng.seed(self.epoch) # or that of a `DistributedDL`
    def after_train(self):
        if rank_distrib(): return
        file = self.learn.save('unfinished')
        file.replace(file.with_stem(f'digits_{self.epoch}'))

def get_dls(bs):
    x,y = load_digits(return_X_y=True)
    items = list(zip(tensor(x/16).float(), tensor(y)))
    return DataLoaders.from_dsets(items[:1500], items[1500:], bs=bs, num_workers=0)

def get_model(): return nn.Sequential(LinBnDrop(64, 128, act=nn.ReLU()), LinBnDrop(128, 10, bn=False, p=.1))

def train(precision, epochs, bs, lr, send, resume, cbs):
    set_seed(42)
    gpu = torch.cuda.is_available()
    if gpu: torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))
    learn = Learner(get_dls(bs), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    getattr(learn, f'to_{precision}')()
    files,start = (learn.path/learn.model_dir).glob('digits_*.pth'),0
    if resume and (newest := max(files, key=os.path.getmtime, default=None)):
        learn.load(newest.stem)
        start = int(newest.stem.split('_')[1])+1
    ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(send))
    # NCCL on GPUs, else gloo, for which PyTorch has no `SyncBatchNorm`
    with learn.distrib_ctx(cpu=not gpu, sync_bn=gpu, kwargs_handlers=[ddp]), learn.no_bar():
        learn.fit_one_cycle(epochs, lr, cbs=[Checkpoint(),*L(cbs)], start_epoch=start)
    return learn

@call_parse
def main(
    precision:str='bf16', # bf16, fp16, native_bf16, native_fp16 or fp32
    epochs:int=5, # Number of epochs
    bs:int=32, # Batch size of each process
    lr:float=1e-2, # Learning rate
    send:str='no', # Dtype to send gradients in: bf16, fp16, or no for their own
    wait:int=60, # Seconds to wait for a rank before an error names it
    resume:store_true=False, # Continue from the newest checkpoint in models, if there is one?
):
    "Train on scikit-learn's digits, in as many processes as `torchrun` or `accelerate launch` starts"
    learn = train(precision, epochs, bs, lr, send, resume, WaitForAll(wait))
    with learn.no_bar(), learn.no_logging(): acc = learn.validate()[1] # every rank takes part
    teardown_distrib() # gloo's threads may abort a process as it exits, and more often without this
    if rank_distrib(): return
    print(f'accuracy {acc:.3f}')
    if precision!='fp32': print(learn.precision_recorder.summary())
