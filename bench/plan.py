"""How good `plan_memory` is: plans made on a CPU, beside the peaks that `gpu.py` measured on a GPU

Takes the rows of bench/results/gpu.csv in float32, with autocast and of `to_bf16`. Prints a Markdown table.
With --checkpoints the plans are those of `memory=`, beside what is counted in fits of small models on this CPU, and
beside the processor's time of a step without a limit."""
import argparse,warnings
from functools import partial
from time import process_time

import pandas as pd,torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam,OptimWrapper
from torch import nn

from common import Path,command,machine,markdown
from gpu import tasks
from models import GPT,Task,ViT,loss_func,mlp,resnet
from mp_callbacks.all import *
from mp_callbacks.core.dtypes import leaves
from mp_callbacks.look.checkpointing import share_left
from mp_callbacks.look.plan import LiveBytes,plan_memory

results = Path(__file__).parent/'results'/'gpu.csv'
opts = dict(fused  = lambda params, **kwargs: OptimWrapper(params, torch.optim.AdamW, fused=True, **kwargs),
            fastai = lambda params: Adam(params, 1e-3, wd=.01))
# (optimizer, precision and loop in the csv file) -> precision in the plan
compared = {('fused','fp32','fastai'):'float32', ('fused','autocast-bf16','ours'):'to_native_bf16',
            ('fused','bf16','ours'):'to_bf16', ('fastai','fp32','fastai'):'float32'}

def plan(task, opt):
    model = task.model('cpu')
    def compute_loss(n):
        x,y = task.data('cpu', n)
        return loss_func(model(x), y)
    return plan_memory(model, compute_loss, opts[opt]([*model.parameters()]), task.batch)

def convs(depth=6, dim=32):
    "Convolutions and batch norms of one width"
    def _block(): return nn.Sequential(nn.Conv2d(dim, dim, 3, 1, 1, bias=False), nn.BatchNorm2d(dim), nn.ReLU())
    blocks = [_block() for _ in range(depth)]
    return nn.Sequential(nn.Conv2d(3, dim, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, 10))

small = [Task('vit', lambda: ViT(32, 4, 96, 384, 3, 6, 10), (3,32,32), 10, 64),
         Task('gpt', lambda: GPT(500, 64, 64, 256, 2, 6), (64,), 500, 64),
         Task('convs', convs, (3,32,32), 10, 64),
         Task('xresnet18', partial(resnet, 18, 10), (3,64,64), 10, 64),
         Task('mlp', lambda: mlp(256, 16, 256), (256,), 256, 4096)]

def learner(task, memory, steps=3):
    "One that has been fitted, so that its plan is made, and its optimizer has its state"
    dls = DataLoaders([task.data('cpu')]*steps, [], device='cpu')
    learn = Learner(dls, task.model('cpu'), loss_func, opts['fused'])
    learn.logger,learn.create_mbar = (lambda *args: None),False
    learn.remove_cb(learn.progress).to_bf16(memory=memory).fit(1)
    return learn

def counted(learn):
    "MB that tensors take at most in a fit"
    batches,state = leaves([*learn.dls.train]),leaves([*learn.opt.opt.state.values()])
    there = [*learn.model.parameters(),*learn.model.buffers(),*batches,*state]
    with LiveBytes() as live:
        for t in there:
            if isinstance(t, torch.Tensor): live.add(t)
        learn.fit(1)
    return max(live.log)/2**20

def seconds(learn):
    "Of the processor"
    start = process_time()
    learn.fit(1)
    return process_time()-start

def checkpoints(names):
    "A row for each model and limit"
    for task in small:
        if task.name not in names: continue
        free = learner(task, None)
        most = counted(free)
        for share in (.8,.6,.4,.2):
            learn = learner(task, share*most/2**10/(1-share_left))
            peak,plan = counted(learn),learn.mixed_precision.budget.plan
            planned,n = plan.peak*2**10,len(plan.checkpoints.segments)
            turns = [(seconds(learn),seconds(free)) for _ in range(3)] # the shortest, as other programs run, too
            ms = [min(o) for o in zip(*turns)]
            yield (task.name, task.batch, round(most,1), round(share*most,1), round(planned,1), round(peak,1),
                   f'{planned/peak-1:+.1%}', f'{n} of {plan.blocks}', f'{plan.time:.2f}', f'{ms[0]/ms[1]:.2f}',
                   '' if plan.fits else 'no')
            if not plan.fits: break

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [o.name for o in tasks()]
    p.add_argument('--only', nargs='*', default=names, help=f'models [{" ".join(names)}]')
    p.add_argument('--checkpoints', nargs='*', choices=[o.name for o in small], help='plans of memory= [all]')
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.checkpoints is not None:
        warnings.filterwarnings('ignore')
        rows = [*checkpoints(args.checkpoints or [o.name for o in small])]
        cols = ['model','batch size','MB without','wanted','planned','counted','error','blocks','time planned',
                'time','fits']
        print(f'{command()} | {machine()}\n')
        return print(markdown(pd.DataFrame(rows, columns=cols).set_index('model')))
    df = pd.read_csv(results, comment='#', keep_default_na=False)
    df = df[(df.metric=='peak_mb') & df.case.isin(args.only)]
    peaks = df.groupby(['case','opt','precision','loop','size'], sort=False).value.max()
    models,plans,rows = {o.name:o for o in tasks()},{},[]
    for (case,opt,precision,loop,size),peak in peaks.items():
        if (opt,precision,loop) not in compared: continue
        if (case,opt) not in plans: plans[case,opt] = plan(models[case], opt)
        name = compared[opt,precision,loop]
        planned = plans[case,opt]._replace(items=int(size)).table.peak[name]
        rows.append((case, size, opt, name, planned, peak, f'{planned/peak-1:+.1%}'))
    print(f'{command()} | {machine()}\n')
    cols = ['model','batch size','optimizer','precision','planned MB','measured MB','error']
    print(markdown(pd.DataFrame(rows, columns=cols).set_index('model')))

if __name__=='__main__': main()
