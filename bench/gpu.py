"""Mixed precision on a GPU: time per step and peak memory, compiled models, FP8, host syncs, and the evaluation of MPX

One process, variants in turns, medians. `python bench/gpu.py` takes at most --minutes; run again, it measures only what
is not in the csv file yet. `--tiny` is the same with toy sizes, on a CPU too."""
import warnings
from collections import Counter

import matplotlib; matplotlib.use('agg')
import matplotlib.pyplot as plt
from torch.utils._python_dispatch import TorchDispatchMode

import loops
from common import *
from loops import Variant,emulated
from models import GPT,Task,ViT,conv,mlp,resnet

def of(loop, opt, *precisions): return [Variant(loop, opt, o) for o in precisions]

full,auto,copies = ('fp32','tf32'),('autocast-fp16','autocast-bf16'),('fp16','bf16')
every = [*of('hand', 'fused', *full, *auto, *copies), *of('fastai', 'fused', *full, *auto),
         *of('ours', 'fused', *auto, *copies), *of('fastai', 'fastai', 'fp32', *auto, 'fp16'),
         *of('ours', 'fastai', *auto, *copies), *of('fastai', 'flat', 'fp16')]
in_mpx = [*of('hand', 'fused', *full, 'autocast-bf16'), *of('fastai', 'fused', 'fp32'),
          *of('ours', 'fused', *auto, *copies)]
in_compiled = [*of('hand', 'fused', *full), *of('ours', 'fused', *auto, *copies),
               *of('compiled', 'fused', *auto, *copies)]
in_cast = [*of('ours', 'fused', *copies), *of('singly', 'fused', *copies)]
fp8 = [*of('ours', 'fused', 'fp8-tensorwise'), *of('compiled', 'fused', 'fp8-tensorwise')]

def tiny_tasks():
    "`tasks` with toy sizes"
    base,cifar = (Task(n, lambda: ViT(8, 4, 16, 32, 2, 1, 5), (3,8,8), 5, 2) for n in ('vit-base','vit-256-800'))
    res = Task('resnet50', lambda: conv(4, 2, 5), (3,8,8), 5, 2)
    mlps = Task('mlp', lambda: mlp(8, 3, 5), (8,), 5, 4)
    return base,cifar,Task('gpt', lambda: GPT(20, 8, 16, 32, 2, 1), (8,), 20, 2),res,mlps,mlps,mlps

def tasks():
    "The models"
    # The paper on MPX gives neither depth, heads nor patches: these are ViT-Base's, and patches of 4 as in its code.
    return (Task('vit-base',    lambda: ViT(224, 16, 768, 3072, 12, 12, 1000), (3,224,224), 1000, 64),
            Task('vit-256-800', lambda: ViT(32, 4, 256, 800, 8, 12, 100), (3,32,32), 100, 256),
            Task('gpt-124M',    lambda: GPT(50304, 512, 768, 3072, 12, 12), (512,), 50304, 8),
            Task('resnet50',    lambda: resnet(50, 1000), (3,224,224), 1000, 64),
            Task('mlp-8x2048',  lambda: mlp(2048, 8, 1000), (2048,), 1000, 2048),
            Task('mlp-24x2048', lambda: mlp(2048, 24, 2048), (2048,), 2048, 64),
            Task('mlp-4x256',   lambda: mlp(256, 4, 10), (256,), 10, 64))

def groups(tiny, dev):
    "What to measure, the telling ones first: part, task, batch size, variants, options of `take_turns`"
    base,cifar,gpt,res,mlps,big,small = tiny_tasks() if tiny else tasks()
    sizes = {base:(2,), cifar:(4,2)} if tiny else {base:(256,64,16,128,32), cifar:(1024,256,64,512,128)}
    mpx = [('mpx',t,b,in_mpx,dict(turns=3)) for i in range(5) for t,bs in sizes.items() for b in bs[i:i+1]]
    def train(t): return 'train',t,t.batch,every,{}
    # FP8 is emulated only to see that this works
    def compiled(t): return 'compiled',t,t.batch,in_compiled+fp8*(tiny or not emulated(dev)),dict(turns=3, seconds=120)
    def cast(t): return 'cast',t,4,in_cast,dict(turns=3) # so few that each launch counts
    return [train(base), train(gpt), compiled(gpt), cast(base), cast(gpt), ('step',big,big.batch,every,dict(turns=3)),
            ('syncs',small,small.batch,every,dict(probe=Syncs, turns=1)), train(res), train(mlps), *mpx,
            train(res._replace(name='resnet50-nhwc', channels_last=True))]

class Reads(TorchDispatchMode):
    "Count how often a number is read out of a tensor"
    def __init__(self):
        super().__init__()
        self.seen = Counter()
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if f is torch.ops.aten._local_scalar_dense.default: self.seen['read'] += 1
        return f(*args, **(kwargs or {}))

class Waits(warnings.catch_warnings):
    "Count where the host waits for the device"
    def __init__(self): super().__init__(record=True)
    def __enter__(self):
        self.seen,self.caught = Counter(),super().__enter__()
        warnings.simplefilter('always')
        torch.cuda.set_sync_debug_mode('warn')
    def __exit__(self, *ex):
        torch.cuda.set_sync_debug_mode('default')
        super().__exit__(*ex)
        places = [o for o in self.caught if 'called a synchronizing' in str(o.message)]
        self.seen.update('/'.join(Path(o.filename).parts[-2:])+f':{o.lineno}' for o in places)

class Syncs:
    "How often in a step the host waits for the device. On a CPU, where it never does, how often it reads a number."
    def __init__(self, dev): self.counter = Waits() if torch.device(dev).type=='cuda' else Reads()
    def __enter__(self): self.counter.__enter__()
    def __exit__(self, *ex): self.counter.__exit__(*ex)
    def rows(self, n):
        seen = self.counter.seen
        yield 'syncs',sum(seen.values())/n,'; '.join(f'{c/n:g}x {k}' for k,c in seen.most_common(6))

def table(df):
    """Medians, and how many times less time and memory than a plain loop in fp32. In tf32 it is what float32 takes on a
    GPU where TF32 is allowed, as PyTorch allows it in convolutions only."""
    res = medians(df)
    for k,name,base in (('step_ms','times faster than tf32','tf32'), ('step_ms','times faster','fp32'),
                        ('peak_mb','times smaller','fp32')):
        base = 'hand','fused',base
        if k in res and base in res.index: res.insert(res.columns.get_loc(k)+1, name, res.loc[base,k]/res[k])
    return res

def plot_mpx(df, path):
    for case,o in df.groupby('case'):
        if o['size'].nunique()<2: continue
        fig,axs = plt.subplots(1, 2, figsize=(11,4))
        for ax,metric,label in zip(axs, ('peak_mb','step_ms'), ('peak memory (MB)','time per step (ms)')):
            for (loop,precision),d in o[o.metric==metric].groupby(['loop','precision'], sort=False):
                d.groupby('size').value.median().plot(ax=ax, marker='o', label=f'{loop} {precision}')
            ax.set(xlabel='batch size', ylabel=label, ylim=(0,None))
        axs[1].legend(fontsize='small')
        fig.suptitle(f'{case}: full and mixed precision')
        fig.savefig(path.with_name(f'{path.stem}_{case}.png'), dpi=100, bbox_inches='tight')
        plt.close(fig)

def plot_train(df, path):
    tables = {case:table(o) for case,o in df.groupby('case', sort=False)}
    tables = {case:t for case,t in tables.items() if 'times faster' in t} # else none has run
    if not tables: return
    fig,axs = plt.subplots(1, len(tables), figsize=(2+3*len(tables),6), sharey=True, squeeze=False)
    colors = dict(hand='tab:gray', fastai='tab:blue', ours='tab:orange')
    for ax,(case,t) in zip(axs[0], tables.items()):
        t = t['times faster'][::-1]
        ax.barh([' '.join(o) for o in t.index], t.fillna(0), color=[colors[o[0]] for o in t.index])
        ax.set(title=case, xlabel='times faster than hand fp32')
    fig.savefig(path.with_name(f'{path.stem}_train.png'), dpi=100, bbox_inches='tight')
    plt.close(fig)

def report(results):
    df,text = results.read(),[]
    for (part,case,size),o in df.groupby(['part','case','size'], sort=False):
        t,what = table(o),f'batch size {size}'
        if part=='step':
            n = o[o.metric=='parameters'].value.max()
            if 'peak_mb' in t: t['bytes per parameter'] = t.peak_mb*2**20/n
            what += f', {n/1e6:.0f} million parameters, so that most of a step is not forward and backward'
        text += [f'## {part}: {case}, {what}\n', markdown(t)]
    results.write('Mixed precision on a GPU', text)
    for part,plot in dict(train=plot_train, mpx=plot_mpx).items():
        if (df.part==part).any(): plot(df[df.part==part], results.path)

def main():
    parts = ['train','compiled','cast','step','syncs','mpx']
    p = arguments(__doc__)
    p.add_argument('--minutes', type=float, default=8, help='start nothing that may take longer [8]')
    only = f'parts [{" ".join(parts)}]; none: write tables and plots again'
    p.add_argument('--only', nargs='*', default=parts, help=only)
    args,dev,results = start(p, 'gpu')
    if dev=='cpu' and args.only and not args.tiny:
        raise SystemExit('There is no CUDA device here. Use --tiny to see whether this script works, '
                         'and bench/train.py to measure a CPU.')
    if args.tiny: loops.backend = 'aot_eager' # starts at once
    end,few = perf_counter()+60*args.minutes,dict(turns=1, turn=.001) if args.tiny else {}
    for part,task,batch,variants,how in groups(args.tiny, dev):
        left = end-perf_counter()
        if part not in args.only: continue
        if left<(1 if args.tiny else 30):
            print(f'no time left for {part} {task.name} {batch}: run this again')
            continue
        turns = take_turns(task, variants, dev, batch, **{'seconds':min(left-15, 40), **how, **few})
        results.measure(part, task.name, batch, turns)
    report(results)

if __name__=='__main__': main()
