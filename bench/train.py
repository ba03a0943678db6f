"""Time per training step of small models, on a CPU or a GPU: plain loops, fastai, Lightning, Accelerate and ours

Variants in turns in one process, medians. What is in the csv file already is not measured again. `--tiny`: toy sizes, to see that it works."""
from common import *
from models import *
from peers import build_any,peer_variants

tasks = [Task('mlp',       lambda: mlp(1024, 6, 10),                (1024,),   10, 512),
         Task('conv',      lambda: conv(64, 4, 10),                 (3,64,64), 10, 64),
         Task('conv-nhwc', lambda: conv(64, 4, 10),                 (3,64,64), 10, 64, True),
         Task('vit',       lambda: ViT(32, 4, 128, 512, 4, 4, 10),  (3,32,32), 10, 64),
         Task('gpt',       lambda: GPT(1000, 64, 128, 512, 4, 4),   (64,),     1000, 64)]
tiny  = [Task('mlp',       lambda: mlp(8, 3, 5),                    (8,),      5, 4),
         Task('conv',      lambda: conv(4, 2, 5),                   (3,8,8),   5, 2),
         Task('gpt',       lambda: GPT(20, 8, 16, 32, 2, 1),        (8,),      20, 2)]

def variants(precisions, dev, late):
    "Everything, in `precisions`: fp16, bf16, or both; if the loss comes `late`, also without that"
    half = [k+o for o in precisions for k in ('autocast-','')]
    def of(loop, opt, *ps): return [Variant(loop, opt, o) for o in ps]
    auto = [o for o in half if o.startswith('autocast')]
    return [v for opt in ('fastai','fused') for v in of('hand', opt, 'fp32', *half)+of('fastai', opt, 'fp32', *auto)+of('ours', opt, *half)] + \
           of('ours', 'flat', *precisions)+(of('fastai', 'fastai', 'fp16')+of('fastai', 'flat', 'fp16') if 'fp16' in precisions else [])+(of('ours-loss-read', 'fused', *half) if late else [])+peer_variants(dev)

def table(df):
    """Medians; how many times faster than fastai in fp32 with the same optimizer; and the time, less what fastai itself takes, over that of the plain loop in the same precision

    What fastai itself takes is its time in fp32 less that of the plain loop in fp32."""
    res,ms = medians(df).drop(columns='parameters', errors='ignore'),df[df.metric=='step_ms'].groupby(['loop','opt','precision']).value.median().to_dict()
    def _get(loop, opt, precision): return ms.get((loop, opt.replace('flat', 'fastai'), precision), float('nan'))
    def _over(loop, opt, precision):
        fastai = _get('fastai', opt, 'fp32')-_get('hand', opt, 'fp32') if loop.startswith(('fastai','ours')) else 0
        return (ms.get((loop,opt,precision), float('nan'))-fastai)/_get('hand', opt, precision)
    res.insert(1, 'times faster', [_get('fastai', i[1], 'fp32')/ms.get(i, float('nan')) for i in res.index])
    res.insert(2, 'over plain loop', [_over(*i) for i in res.index])
    return res

def main():
    p = arguments(__doc__)
    p.add_argument('--only', nargs='*', help='names of models [mlp conv conv-nhwc vit gpt]')
    p.add_argument('--fp16', action='store_true', help='float16 on a CPU too, where convolutions in it are some hundred times slower')
    p.add_argument('--turns', type=int, default=5, help='how many turns every loop has [5]')
    p.add_argument('--turn', type=float, default=1, help='how many seconds one lasts [1]')
    args,dev,results = start(p, 'train_{dev}')
    how = dict(turns=1, turn=.001) if args.tiny else dict(turns=args.turns, turn=args.turn, seconds=3600)
    vs = variants(['fp16','bf16'] if dev=='cuda' or args.fp16 else ['bf16'], dev, late=dev=='cuda' or args.tiny)
    for t in tiny if args.tiny else tasks:
        if args.only is None or t.name in args.only: results.measure('train', t.name, t.batch, compare(t, vs, dev, build=build_any, **how))
    results.write('Training small models', [s for (_,case,size),o in results.read().groupby(['part','case','size'], sort=False) for s in (f'## {case}, batch size {size}\n', markdown(table(o)))])

if __name__=='__main__': main()
