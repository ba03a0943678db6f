"""What a training step costs beside forward and backward, by the number of parameters and of the tensors they come in

The model here computes nothing: it casts its weights if autocast would, and its backward pass writes gradients that
were made before. `cost_ms` is the time of a step less that of forward, loss and backward alone in the same dtype:
copies and casts of weights, checks, the optimizer, and the Python of the loop."""
from common import *
from loops import Variant
from models import Task,Weights
from peers import build_any,peer_variants

def of(loop, opt, *precisions): return [Variant(loop, opt, o) for o in precisions]

auto,copies = ('autocast-fp16','autocast-bf16'),('fp16','bf16')
bare = of('bare', '', 'fp32', *copies)
fused = [*of('hand', 'fused', 'fp32', *auto, *copies), *of('fastai', 'fused', 'fp32', *auto),
         *of('ours', 'fused', *auto, *copies)]
adam = [*of('hand', 'fastai', 'fp32'), *of('fastai', 'fastai', 'fp32', *auto, 'fp16'),
        *of('ours', 'fastai', *auto, *copies), *of('fastai', 'flat', 'fp16')]

def table(df):
    "Milliseconds per step beside forward and backward"
    alone = df[(df.loop=='bare') & (df.metric=='step_ms')].groupby('precision').value.median()
    df = df[df.loop!='bare'].copy()
    steps = df.metric=='step_ms'
    df.loc[steps,'value'] -= df.precision.map(alone).fillna(alone['fp32'])[steps]
    df.loc[steps,'metric'] = 'cost_ms'
    return medians(df, of='cost_ms')

def main():
    p = arguments(__doc__)
    p.add_argument('--tensors', nargs='*', type=int, default=[10,60,240,1000],
                   help='numbers of tensors, with 10^5 numbers in all [10 60 240 1000]')
    p.add_argument('--elements', nargs='*', type=int,
                   help='numbers in all, in 240 tensors [10^7; on a GPU 10^8 too, in about 70 GB]')
    p.add_argument('--turns', type=int, default=15, help='how many turns every loop has [15]')
    p.add_argument('--turn', type=float, default=.1, help='how many seconds one lasts [0.1]')
    args,dev,results = start(p, 'step_{dev}')
    elements = [10**7]+[10**8]*(dev=='cuda') if args.elements is None else args.elements
    sizes = [(n,10**5) for n in args.tensors]+[(240,n) for n in elements]
    how = dict(turns=args.turns, turn=args.turn, seconds=3600)
    if args.tiny: sizes,how = [(2,100),(5,100)],dict(turns=1, turn=.001)
    for n,total in sizes:
        task = Task(f'{n} tensors', lambda: Weights(n, max(1, total//n)), (1,), 2, 1)
        turns = take_turns(task, bare+fused+adam+peer_variants(dev), dev, build=build_any, **how)
        results.measure('step', task.name, total, turns)
    df,text = results.read(),[]
    for (case,size),o in df.groupby(['case','size'], sort=False):
        text += [f'## {case}, {size} numbers\n', markdown(table(o))]
    results.write('The cost of a step', text)
    plot(df, results.path)

def plot(df, path):
    import matplotlib; matplotlib.use('agg')
    import matplotlib.pyplot as plt
    fig,ax = plt.subplots(figsize=(8,5))
    size = df['size'].mode()[0]
    cost = {int(case.split()[0]):table(o).cost_ms for case,o in df[df['size']==size].groupby('case')}
    ns = sorted(cost)
    for i in cost[ns[0]].index:
        if i[2] not in ('fp32','fp16','autocast-fp16'): continue
        ax.plot(ns, [cost[n].get(i) for n in ns], marker='o', ls=':' if i[1]=='fused' else '-', label=' '.join(i))
    ax.set(xscale='log', yscale='log', xlabel=f'tensors, {size:g} numbers in all',
           ylabel='ms per step beside forward and backward')
    ax.legend(fontsize='x-small', ncol=2)
    fig.savefig(path.with_suffix('.png'), dpi=100, bbox_inches='tight')

if __name__=='__main__': main()
