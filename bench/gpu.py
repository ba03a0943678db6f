"""Mixed precision on a GPU: time per step and peak memory, the cost of a step, host syncs, and the evaluation of MPX

One process, variants in turns, medians. `python bench/gpu.py` takes at most --minutes, and again only what is not in the csv file yet.
`--tiny` is the same with toy sizes on a CPU: it shows that the script works, its numbers mean nothing."""
import warnings
from collections import Counter

import matplotlib; matplotlib.use('agg')
import matplotlib.pyplot as plt
from torch.utils._python_dispatch import TorchDispatchMode

from common import *
from models import *

hand = [Variant('hand', 'fused', o) for o in ('fp32','tf32','autocast-fp16','autocast-bf16','fp16','bf16')]
fused = [Variant('fastai', 'fused', o) for o in ('fp32','tf32','autocast-fp16','autocast-bf16')]+[Variant('ours', 'fused', o) for o in ('autocast-fp16','autocast-bf16','fp16','bf16')]
plain = [Variant('fastai', 'fastai', o) for o in ('fp32','autocast-fp16','autocast-bf16','fp16')]+[Variant('ours', 'fastai', o) for o in ('autocast-fp16','autocast-bf16','fp16','bf16')]
flat = [Variant('fastai', 'flat', 'fp16'), Variant('ours', 'flat', 'fp16'), Variant('ours', 'flat', 'bf16')]
every = hand+fused+plain+flat
compact = [v for v in hand+fused if v.precision in ('fp32','autocast-bf16','bf16') and v.loop!='fastai']+[Variant('ours', 'fused', o) for o in ('bf16-split','bf16-kahan','bf16-stochastic','fp16-kahan')]
in_mpx = [v for v in hand+fused if v.loop=='hand' and v.precision in ('fp32','tf32','autocast-bf16') or v.loop=='ours']+[Variant('fastai', 'fused', 'fp32')]

def groups(tiny):
    "What to measure, the telling ones first: part, task, batch size, variants, options of `compare`"
    if tiny:
        base,cifar = (Task(n, lambda: ViT(8, 4, 16, 32, 2, 1, 5), (3,8,8), 5, 2) for n in ('vit-base','vit-256-800'))
        gpt,mlps   = Task('gpt', lambda: GPT(20, 8, 16, 32, 2, 1), (8,), 20, 2),Task('mlp', lambda: mlp(8, 3, 5), (8,), 5, 4)
        res,nhwc   = (Task(n, lambda: conv(4, 2, 5), (3,8,8), 5, 2, n=='resnet50-nhwc') for n in ('resnet50','resnet50-nhwc'))
        big,small,sizes = mlps,mlps,{base:(2,), cifar:(4,2)}
    else: # the paper on MPX gives neither depth, heads nor patches: these are ViT-Base's, and patches of 4 as in its repository
        cifar = Task('vit-256-800',   lambda: ViT(32, 4, 256, 800, 8, 12, 100), (3,32,32), 100, 256)
        base  = Task('vit-base',      lambda: ViT(224, 16, 768, 3072, 12, 12, 1000), (3,224,224), 1000, 64)
        gpt   = Task('gpt-124M',      lambda: GPT(50304, 512, 768, 3072, 12, 12), (512,), 50304, 8)
        res   = Task('resnet50',      lambda: resnet(50, 1000), (3,224,224), 1000, 64)
        nhwc  = res._replace(name='resnet50-nhwc', channels_last=True)
        mlps  = Task('mlp-8x2048',    lambda: mlp(2048, 8, 1000), (2048,), 1000, 2048)
        big   = Task('mlp-24x2048',   lambda: mlp(2048, 24, 2048), (2048,), 2048, 64)
        small = Task('mlp-4x256',     lambda: mlp(256, 4, 10), (256,), 10, 64)
        sizes = {base:(256,64,16,128,32), cifar:(1024,256,64,512,128)}
    mpx = [('mpx',t,b,in_mpx,dict(turns=3)) for i in range(5) for t,bs in sizes.items() for b in bs[i:i+1]]
    def train(*ts): return [('train',t,t.batch,every,{}) for t in ts]
    return [*train(base, gpt), ('step',big,big.batch,every,dict(probe=Phases, turns=3)), ('syncs',small,small.batch,every,dict(probe=Syncs, turns=1)), ('memory',big,big.batch,compact,dict(turns=2)), ('memory',gpt,gpt.batch,compact,dict(turns=2)), *train(res, mlps), *mpx, *train(nhwc)]

class Syncs:
    "Where and how often the host waits for the device. On a CPU, where it never does: how often it reads a number out of a tensor."
    def __init__(self, loop, dev): self.cuda = torch.device(dev).type=='cuda'
    def __enter__(self):
        self.seen,counter = Counter(),self
        if not self.cuda:
            class Reads(TorchDispatchMode):
                def __torch_dispatch__(self, f, types, args=(), kwargs=None):
                    if f is torch.ops.aten._local_scalar_dense.default: counter.seen['read'] += 1
                    return f(*args, **(kwargs or {}))
            self.mode = Reads()
        else: self.mode = warnings.catch_warnings(record=True)
        self.log = self.mode.__enter__()
        if self.cuda: warnings.simplefilter('always'); torch.cuda.set_sync_debug_mode('warn')

    def __exit__(self, *ex):
        if self.cuda: torch.cuda.set_sync_debug_mode('default')
        self.mode.__exit__(*ex)
        if self.cuda: self.seen.update('/'.join(Path(o.filename).parts[-2:])+f':{o.lineno}' for o in self.log if 'called a synchronizing' in str(o.message))

    def rows(self, n): yield 'syncs',sum(self.seen.values())/n,'; '.join(f'{c/n:g}x {k}' for k,c in self.seen.most_common(6))

def table(df, base=('hand','fused','fp32'), of='step_ms'):
    "Medians, and how many times less time and memory than `base`"
    res = medians(df, of).drop(columns='parameters', errors='ignore')
    for k,name in (('step_ms','times faster'),('peak_mb','times smaller')):
        if k in res: res.insert(res.columns.get_loc(k)+1, name, res.loc[base,k]/res[k])
    return res

def plot_mpx(df, path):
    for case in df.case.unique():
        fig,axs = plt.subplots(1, 2, figsize=(11,4))
        for ax,metric,label in zip(axs, ('peak_mb','step_ms'), ('peak memory (MB)','time per step (ms)')):
            o = df[(df.case==case) & (df.metric==metric)]
            for (loop,precision),d in o.groupby(['loop','precision'], sort=False): d.groupby('size').value.median().plot(ax=ax, marker='o', label=f'{loop} {precision}')
            ax.set(xlabel='batch size', ylabel=label, ylim=(0,None))
        axs[1].legend(fontsize='small')
        fig.suptitle(f'{case}: full and mixed precision')
        fig.savefig(path.with_name(f'{path.stem}_{case}.png'), dpi=100, bbox_inches='tight')
        plt.close(fig)

def plot_train(df, path):
    cases = df.case.unique()
    fig,axs = plt.subplots(1, len(cases), figsize=(2+3*len(cases),6), sharey=True, squeeze=False)
    for ax,case in zip(axs[0], cases):
        t = table(df[df.case==case])['times faster'][::-1]
        ax.barh([' '.join(o) for o in t.index], t.fillna(0), color=[dict(hand='tab:gray', fastai='tab:blue', ours='tab:orange')[o[0]] for o in t.index])
        ax.set(title=case, xlabel='times faster than hand fp32')
    fig.savefig(path.with_name(f'{path.stem}_train.png'), dpi=100, bbox_inches='tight')
    plt.close(fig)

def report(results):
    df = results.read()
    res = []
    for (part,case,size),o in df.groupby(['part','case','size'], sort=False):
        if part=='copy': res.append(f'A copy moves {o.value.median():.0f} GB/s, read and written together.\n'); continue
        t,what = table(o, of='overhead_ms' if part=='step' else 'step_ms'),f'batch size {size}'
        if part=='step':
            n,gbs = o[o.metric=='parameters'].value.max(),df[df.part=='copy'].value.median()
            t.insert(0, 'floor_ms', [floor_bytes(i[2])*n/gbs/1e6 for i in t.index])
            t.insert(1, 'over floor', t.overhead_ms/t.floor_ms)
            what = f'{n/1e6:.0f} million parameters: milliseconds outside forward, loss and backward'
        res += [f'## {part}: {case}, {what}\n', markdown(t)]
    results.write('Mixed precision on a GPU', res)
    for part,plot in dict(train=plot_train, mpx=plot_mpx).items():
        if (df.part==part).any(): plot(df[df.part==part], results.path)

def main():
    p = arguments(__doc__)
    p.add_argument('--minutes', type=float, default=8, help='start nothing that may take longer [8]')
    p.add_argument('--only', nargs='*', default=['copy','step','syncs','memory','train','mpx'], help='parts [copy step syncs memory train mpx]; none: write tables and plots again')
    args,dev,results = start(p, 'gpu')
    if dev=='cpu' and args.only and not args.tiny: raise SystemExit('There is no CUDA device here. Use --tiny to see whether this script works, and bench/train.py to measure a CPU.')
    end,n_copy,few = perf_counter()+60*args.minutes,10**5 if args.tiny else 10**8,dict(turns=1, turn=.001) if args.tiny else {}
    if 'copy' in args.only: results.measure('copy', 'float32', n_copy, ((Variant('','',''),0,'copy_gbs',copy_gbs(dev, n_copy),'') for _ in range(1)))
    for part,task,batch,variants,how in groups(args.tiny):
        left = end-perf_counter()
        if part not in args.only: continue
        if left<(1 if args.tiny else 30): print(f'no time left for {part} {task.name} {batch}: run this again'); continue
        results.measure(part, task.name, batch, compare(task, variants, dev, batch, seconds=min(left-15, 40), **{**how,**few}))
    report(results)

if __name__=='__main__': main()
