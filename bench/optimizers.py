"""What a step of fastai's Adam costs: one parameter after the other, at once, and beside it PyTorch's fused AdamW

Steps alone, in turns, without forward and backward pass. `cpu_ms` is the CPU time of the process."""
from contextlib import nullcontext
from time import process_time

from common import *
from fastai.optimizer import Adam,OptimWrapper
from loops import Variant
from mp_callbacks.learner.optimizers import steps_at_once
from mp_callbacks.learner.precision import keep_freed_memory

def vit(n, depth=12):
    "Shapes of a vision transformer of width `n`"
    block = [(n,),(n,),(3*n,n),(3*n,),(n,n),(n,),(n,),(n,),(4*n,n),(4*n,),(n,4*n),(n,)]
    return [*block*depth,(n,),(n,),(10,n),(10,)]

few   = {f'{n} tensors':[(64,)]*n for n in (10,100,250,500,1000)}
cases = few|{'vit, width 64':vit(64), 'vit, width 256':vit(256), '240 of 1024':[(1024,)]*240,
             '240 of 16384':[(16384,)]*240, 'mlp 6x1024':[(1024,1024),(1024,)]*6}

def fused(ps, lr): return OptimWrapper(ps, torch.optim.AdamW, fused=True, lr=lr)
loops = {Variant('fastai','fastai','fp32'):Adam, Variant('ours','fastai','fp32'):Adam,
         Variant('fastai','fused','fp32'):fused}

def make_opt(opt_func, shapes, dev):
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(o, device=dev)) for o in shapes]
    for p in ps: p.grad = torch.randn_like(p)
    return opt_func(ps, lr=1e-3)

def turns(shapes, dev, n, warm=2):
    "Rows of (variant, turn, metric, value, note)"
    opts = {v:make_opt(f, shapes, dev) for v,f in loops.items()}
    for i in range(1-warm, n+1):
        for v,opt in opts.items():
            sync(dev)
            begin = process_time()
            with steps_at_once(opt) if v.loop=='ours' else nullcontext(): opt.step()
            sync(dev)
            if i>0: yield v,i,'cpu_ms',(process_time()-begin)*1e3,''

def table(df):
    "Median milliseconds, and what share of fastai's own step they are"
    ms = df[df.metric=='cpu_ms'].groupby(['case','loop','opt'], sort=False).value.median().unstack(['loop','opt'])
    own = ms['fastai','fastai']
    cols = {"fastai's Adam":own, 'at once':ms['ours','fastai'], 'share':ms['ours','fastai']/own,
            'AdamW(fused=True)':ms['fastai','fused']}
    return pd.DataFrame(cols).rename_axis('case').reset_index()

def main():
    p = arguments(__doc__)
    p.add_argument('--only', nargs='*', help='names of cases [all]')
    p.add_argument('--turns', type=int, default=60, help='how many steps each has [60]')
    args,dev,results = start(p, 'optimizers_{dev}')
    keep_freed_memory() # as a fit does
    chosen = {k:v for k,v in cases.items() if not args.only or k in args.only}
    if args.tiny: chosen,args.turns = {'2 tensors':[(2,)]*2},2
    for name,shapes in chosen.items():
        results.measure('step', name, sum(torch.Size(o).numel() for o in shapes), turns(shapes, dev, args.turns))
    df = table(results.read()).round(3)
    results.write("A step of fastai's optimizers", [markdown(df.set_index('case'))], of='steps, in turns')

if __name__=='__main__': main()
