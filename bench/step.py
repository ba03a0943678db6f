"""What a training step costs beside forward and backward, by the number of parameters and of the tensors they come in

The model here computes nothing: it casts its weights if autocast would, and its backward pass writes gradients that were made before. From the time of a step, that of
forward, loss and backward alone in the same dtype is taken off. The rest is what the loop costs: copies and casts of weights, checks, the optimizer, and its Python.
`--tiny`: toy sizes, to see that it works."""
import torch
from torch import nn

from common import *
from loops import Hand
from models import Task
from peers import build_any,peer_variants

class Constant(torch.autograd.Function):
    "No forward pass to speak of, and a backward pass that only writes its results"
    @staticmethod
    def forward(ctx, x, consts, *ps):
        ctx.consts = consts(ps)
        return x.new_zeros(len(x), 2)

    @staticmethod
    def backward(ctx, g): return None,None,*torch._foreach_mul(ctx.consts, g[0,0].to(ctx.consts[0].dtype)) # with another dtype CUDA would need a kernel for each

class Weights(nn.Module):
    "A model of `n` parameters with `size` numbers each"
    def __init__(self, n, size):
        super().__init__()
        self.consts = {}
        for i in range(n): self.register_parameter(f'p{i}', nn.Parameter(torch.randn(size)))

    def _consts(self, ps):
        if ps[0].dtype not in self.consts: self.consts[ps[0].dtype] = [torch.full_like(p, 1e-3) for p in ps]
        return self.consts[ps[0].dtype]

    def forward(self, x):
        ps,dev = list(self._parameters.values()),x.device.type
        if torch.is_autocast_enabled(dev) and ps[0].dtype!=(half := torch.get_autocast_dtype(dev)): ps = [p.to(half) for p in ps]
        return Constant.apply(x, self._consts, *ps)

class Bare(Hand):
    "Forward, loss and backward, and nothing else"
    def __init__(self, v, model):
        super().__init__(v, model, lambda ps: torch.optim.SGD(ps, lr=0.))
        self.ps = list(self.net.parameters())
    def push(self): pass
    def grad_opt(self, loss):
        loss.backward()
        for p in self.ps: p.grad = None

def build_here(v, model): return Bare(v, model) if v.loop=='bare' else build_any(v, model)

bare = [Variant('bare', '', o) for o in ('fp32','fp16','bf16')]
half,auto = ('autocast-fp16','autocast-bf16','fp16','bf16'),('autocast-fp16','autocast-bf16')
measured = [Variant(loop, opt, o) for loop,opt,ps in (('hand','fused',('fp32',*half)), ('hand','fastai',('fp32',)), ('fastai','fused',('fp32',*auto)), ('ours','fused',half), ('fastai','fastai',('fp32',*auto,'fp16')),
            ('ours','fastai',half), ('fastai','flat',('fp16',)), ('ours','flat',('fp16','bf16')), ('ours','flat-fused',('fp16','bf16'))) for o in ps]

def table(df, gbs):
    "Milliseconds per step beside forward and backward, the least that memory allows, and the parts"
    steps,parts = df[df.part=='step'],df[df.part=='phases']
    res = medians(steps)
    n,bare_ms = res.parameters.max(),{i[2]:o for i,o in res.step_ms.items() if i[0]=='bare'}
    res = res.drop(index='bare', level=0)
    res['cost_ms'] = [o-bare_ms.get(i[2], bare_ms['fp32']) for i,o in res.step_ms.items()]
    res['floor_ms'] = [floor_bytes(i[2])*n/gbs/1e6 for i in res.index]
    res = res[['cost_ms','floor_ms','step_ms','quartiles']]
    return res.join(medians(parts)[['push_ms','pull_ms','check_ms','opt_ms','after_ms','record_ms','zero_grad_ms']]) if len(parts) else res

def main():
    p = arguments(__doc__)
    p.add_argument('--tensors', nargs='*', type=int, default=[10,60,240,1000,2000], help='numbers of tensors, 10^5 numbers in all')
    p.add_argument('--elements', nargs='*', type=int, help='numbers of numbers, in 240 tensors [10^4, 10^6, 10^7, and on a GPU 10^8, which takes about 70 GB]')
    p.add_argument('--turns', type=int, default=5)
    p.add_argument('--turn', type=float, default=.3, help='how many seconds one lasts [0.3]')
    args,dev,results = start(p, 'step_{dev}')
    elements = [10**4,10**6,10**7]+[10**8]*(dev=='cuda') if args.elements is None else args.elements
    sizes,n_copy = [(n,10**5) for n in args.tensors]+[(240,n) for n in elements],10**5 if args.tiny else 10**8 if dev=='cuda' else 10**7
    if args.tiny: sizes = [(2,100),(5,100)]
    how = dict(turns=1, turn=.001) if args.tiny else dict(turns=args.turns, turn=args.turn, seconds=3600)
    results.measure('copy', 'float32', n_copy, ((Variant('','',''),0,'copy_gbs',copy_gbs(dev, n_copy),'') for _ in range(1)))
    for n,total in sizes:
        task = Task(f'{n} tensors', lambda: Weights(n, max(1, total//n)), (1,), 2, 1)
        results.measure('step', task.name, total, compare(task, bare+measured+peer_variants(dev), dev, build=build_here, **how))
        results.measure('phases', task.name, total, compare(task, measured, dev, probe=Phases, build=build_here, **{**how,'turns':1}))
    df = results.read()
    gbs,text = df[df.part=='copy'].value.median(),[]
    for (case,size),o in df[df.part!='copy'].groupby(['case','size'], sort=False): text += [f'## {case}, {size} numbers\n', markdown(table(o, gbs))]
    results.write('The cost of a step', [f'A copy moves {gbs:.0f} GB/s, read and written together.\n', *text])
    plot(df[df.part=='step'], results.path)

def plot(df, path):
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt
    fig,ax = plt.subplots(figsize=(8,5))
    df = df[df['size']==df['size'].mode()[0]]
    cost = {int(case.split()[0]):table(o, 1.).cost_ms for case,o in df.groupby('case')}
    for i in next(iter(cost.values())).index:
        if i[2] in ('fp32','fp16','autocast-fp16'): ax.plot(sorted(cost), [cost[n].get(i) for n in sorted(cost)], marker='o', ls={'fused':':'}.get(i[1], '-'), label=' '.join(i))
    ax.set(xscale='log', yscale='log', xlabel=f'tensors, {df["size"].iloc[0]:g} numbers in all', ylabel='ms per step beside forward and backward')
    ax.legend(fontsize='x-small', ncol=2)
    fig.savefig(path.with_suffix('.png'), dpi=100, bbox_inches='tight')

if __name__=='__main__': main()
