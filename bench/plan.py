"""How good `plan_memory` is: plans made on a CPU, beside the peaks that `gpu.py` measured on a GPU

Takes the rows of bench/results/gpu.csv in float32, with autocast and of `to_bf16`. Prints a Markdown table."""
import argparse

import pandas as pd,torch
from fastai.optimizer import Adam,OptimWrapper

from common import Path,command,machine,markdown
from gpu import tasks
from models import loss_func
from mp_callbacks.look.plan import plan_memory

results = Path(__file__).parent/'results'/'gpu.csv'
opts = dict(fused  = lambda params: OptimWrapper(params, torch.optim.AdamW, fused=True),
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

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [o.name for o in tasks()]
    p.add_argument('--only', nargs='*', default=names, help=f'models [{" ".join(names)}]')
    args = p.parse_args()
    torch.set_num_threads(1)
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
