"""Mixed precision on a GPU: time per step and peak memory, the cost of a step, host syncs, and the evaluation of MPX

One process, variants in turns, medians. `python bench/gpu.py` takes at most --minutes, and again only what is not in the csv file yet.
`--tiny` is the same with toy sizes on a CPU: it shows that the script works, its numbers mean nothing."""
import argparse,tempfile,warnings
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode
from common import *
from models import *

hand = [Variant('hand', 'fused', o) for o in ('fp32','tf32','autocast-fp16','autocast-bf16','bf16')]
fused = [Variant('fastai', 'fused', o) for o in ('fp32','tf32','autocast-fp16','autocast-bf16')]+[Variant('ours', 'fused', o) for o in ('autocast-fp16','autocast-bf16','fp16','bf16')]
plain = [Variant('fastai', 'fastai', o) for o in ('fp32','autocast-fp16','autocast-bf16','fp16')]+[Variant('ours', 'fastai', o) for o in ('autocast-fp16','autocast-bf16','fp16','bf16')]
flat = [Variant('fastai', 'flat', 'fp16'), Variant('ours', 'flat', 'fp16'), Variant('ours', 'flat', 'bf16')]
every = hand+fused+plain+flat
in_mpx = [v for v in hand+fused if v.loop=='hand' and v.precision in ('fp32','tf32','autocast-bf16') or v.loop=='ours']+[Variant('fastai', 'fused', 'fp32')]

# The paper gives neither depth, heads nor patches: those of its repository (patches of 4) and of ViT-Base are used
cifar = Task('vit-256-800',   lambda: ViT(32, 4, 256, 800, 8, 12, 100), (3,32,32), 100, 256)
base  = Task('vit-base',      lambda: ViT(224, 16, 768, 3072, 12, 12, 1000), (3,224,224), 1000, 64)
gpt   = Task('gpt-124M',      lambda: GPT(50304, 512, 768, 3072, 12, 12), (512,), 50304, 8)
res   = Task('resnet50',      lambda: resnet(50, 1000), (3,224,224), 1000, 64)
nhwc  = Task('resnet50-nhwc', lambda: resnet(50, 1000), (3,224,224), 1000, 64, True)
mlps  = Task('mlp-8x2048',    lambda: mlp(2048, 8, 1000), (2048,), 1000, 2048)
big   = Task('mlp-24x2048',   lambda: mlp(2048, 24, 2048), (2048,), 2048, 64)
small = Task('mlp-4x256',     lambda: mlp(256, 4, 10), (256,), 10, 64)
sizes = {cifar:(1024,256,64,512,128), base:(256,64,16,128,32)}

def shrink():
    global base,sizes,cifar,gpt,res,nhwc,mlps,big,small
    base,cifar = (Task(n, lambda: ViT(8, 4, 16, 32, 2, 1, 5), (3,8,8), 5, 2) for n in ('vit-base','vit-256-800'))
    gpt,mlps = Task('gpt-tiny', lambda: GPT(20, 8, 16, 32, 2, 1), (8,), 20, 2),Task('mlp-tiny', lambda: mlp(8, 3, 5), (8,), 5, 4)
    res,nhwc = (Task(n, lambda: conv(4, 2, 5), (3,8,8), 5, 2, n=='conv-nhwc') for n in ('conv-tiny','conv-nhwc'))
    big = small = mlps
    sizes = {cifar:(4,2), base:(2,)}

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
        if self.cuda: self.seen.update('/'.join(Path(o.filename).parts[-2:])+f':{o.lineno}' for o in self.log if 'synchronizing' in str(o.message))

    def rows(self, n): yield 'syncs',sum(self.seen.values())/n,'; '.join(f'{c/n:g}x {k}' for k,c in self.seen.most_common(6))

def copy_gbs(dev, n):
    "Measured bandwidth: bytes read and written by a copy of `n` float32 numbers, in GB/s"
    x,y,clock,res = torch.ones(n, device=dev),torch.empty(n, device=dev),Clock(None, dev),[]
    for _ in range(6):
        with clock:
            for _ in range(10): y.copy_(x)
        res.append(clock.ms/10)
    return 8*n/median(res[1:])/1e6

def floor_bytes(precision):
    "Bytes per parameter that Adam must move after a backward pass: weight and two averages in and out, gradient in. Mixed precision looks at the gradient before, and writes copies, if it has them."
    if precision in ('fp32','tf32'): return 24+4
    return 24+2*4 if precision.startswith('autocast') else 24+2*2+2

def table(df, base=('hand','fused','fp32')):
    "Medians, and how many times less than `base`"
    res,bad = pivot(df),df[df.metric.isin(['oom','error'])].groupby(['loop','opt','precision'], sort=False)
    for k,name in dict(step_ms='time', peak_mb='memory').items():
        if k in res and base in res.index: res[f'{name} ratio'] = res.loc[base,k]/res[k]
    if 'syncs' in res: res['where'] = df[df.metric=='syncs'].groupby(['loop','opt','precision']).note.first()
    res['note'] = ''
    for k,o in bad: res.loc[k,'note'] = f'{o.metric.iloc[0]}: {o.note.iloc[0]}'
    return res.drop(columns=['parameters','oom','error'], errors='ignore')

def plot_mpx(df, path):
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt
    for case,o in df.groupby('case'):
        fig,axs = plt.subplots(1, 2, figsize=(10,4))
        for ax,metric,label in zip(axs, ('peak_mb','step_ms'), ('peak memory (MB)','time per step (ms)')):
            o[o.metric==metric].pivot_table(index='size', columns=['loop','precision'], values='value', aggfunc='median').plot(ax=ax, marker='o', xlabel='batch size', ylabel=label) \
                if (o.metric==metric).any() else ax.set(title=f'no {label} here')
        fig.suptitle(f'{case}: full and mixed precision')
        fig.savefig(path.with_name(f'{path.stem}_{case}.png'), dpi=100, bbox_inches='tight')
        plt.close(fig)

def report(results):
    df,parts = results.read(),[f'Made by `python bench/gpu.py` from {results.path.name}, which also names machine, versions and date.\n']
    for (part,case,size),o in df.groupby(['part','case','size'], sort=False):
        if part=='copy': parts.append(f'Bandwidth of a copy: {o.value.median():.0f} GB/s, read and written together.\n'); continue
        t = table(o)
        if part=='step':
            n,gbs = o[o.metric=='parameters'].value.max(),df[df.part=='copy'].value.median()
            t.insert(0, 'floor_ms', [floor_bytes(i[2])*n/gbs/1e6 for i in t.index])
            t.insert(1, 'over floor', t.overhead_ms/t.floor_ms)
            size = f'{n/1e6:.0f} million parameters'
        parts.append(markdown(t, f'## {part}: {case}, {size}\n'))
    results.path.with_suffix('.md').write_text('\n'.join([*(l for l in results.path.read_text().splitlines() if l.startswith('# ')), '', *parts]))
    if (df.part=='mpx').any(): plot_mpx(df[df.part=='mpx'], results.path)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', help='folder for the results [bench/results; with --tiny a temporary one]')
    p.add_argument('--minutes', type=float, default=8, help='start nothing that may take longer [8]')
    p.add_argument('--only', nargs='*', default=['copy','step','syncs','train','mpx'], help='parts [copy step syncs train mpx]')
    p.add_argument('--tiny', action='store_true', help='toy sizes, on a CPU too')
    args = p.parse_args()
    dev,end = 'cuda' if torch.cuda.is_available() else 'cpu',perf_counter()+60*args.minutes
    if dev=='cpu' and not args.tiny: raise SystemExit('There is no CUDA device here. Use --tiny to see whether this script works, and bench/train.py to measure a CPU.')
    if args.tiny: shrink(); torch.set_num_threads(1)
    out = Path(args.out or (tempfile.mkdtemp() if args.tiny else Path(__file__).parent/'results'))
    results,few = Results(out/'gpu.csv'),dict(turns=2, turn=.001) if args.tiny else {}
    groups = [('train',t,t.batch,every,{}) for t in (base,gpt)]+[('step',big,big.batch,every,dict(probe=Phases, turns=3)), ('syncs',small,small.batch,every,dict(probe=Syncs, turns=1))]
    groups += [('train',t,t.batch,every,{}) for t in (res,mlps)]+[('mpx',t,b,in_mpx,dict(turns=3)) for i in range(9) for t,bs in sizes.items() for b in bs[i:i+1]]+[('train',nhwc,nhwc.batch,every,{})]
    if 'copy' in args.only: results.measure('copy', 'float32', 10**5 if args.tiny else 10**8, [(Variant('','',''),0,'copy_gbs',copy_gbs(dev, 10**5 if args.tiny else 10**8),'')])
    for part,task,batch,variants,how in groups:
        left = end-perf_counter()
        if part not in args.only: continue
        if left<(1 if args.tiny else 30): print(f'no time left for {part} {task.name} {batch}: run this again'); continue
        results.measure(part, task.name, batch, compare(task, variants, dev, batch, seconds=min(left-15, 40), **{**how,**few}))
        report(results)
    print(out)

if __name__=='__main__': main()
