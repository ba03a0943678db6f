"""Time per training step of small models, on a CPU or a GPU: plain loops, fastai, Lightning, Accelerate and ours

Each variant has several processes of its own, and takes turns with the others. What is in the csv file already is not
measured again."""
from processes import *
from models import GPT,Task,ViT,conv,mlp
from peers import peer_variants

tasks = [Task('mlp',       lambda: mlp(1024, 6, 10),                (1024,),   10, 512),
         Task('conv',      lambda: conv(64, 4, 10),                 (3,64,64), 10, 64),
         Task('conv-nhwc', lambda: conv(64, 4, 10),                 (3,64,64), 10, 64, True),
         Task('vit',       lambda: ViT(32, 4, 128, 512, 4, 4, 10),  (3,32,32), 10, 64),
         Task('gpt',       lambda: GPT(1000, 64, 128, 512, 4, 4),   (64,),     1000, 64)]
tiny  = [Task('mlp',       lambda: mlp(8, 3, 5),                    (8,),      5, 4),
         Task('conv',      lambda: conv(4, 2, 5),                   (3,8,8),   5, 2),
         Task('gpt',       lambda: GPT(20, 8, 16, 32, 2, 1),        (8,),      20, 2)]

def variants(precisions, dev):
    "Every loop and optimizer, in `precisions`: fp16, bf16, or both"
    auto = [f'autocast-{o}' for o in precisions]
    half = [*auto, *precisions]
    def of(loop, opt, *ps): return [Variant(loop, opt, o) for o in ps]
    res = []
    for opt in ('fastai','fused'):
        res += of('hand', opt, 'fp32', *half)+of('fastai', opt, 'fp32', *auto)+of('ours', opt, *half)
    if 'fp16' in precisions: res += of('fastai', 'fastai', 'fp16')+of('fastai', 'flat', 'fp16')
    return res+peer_variants(dev)

def table(df):
    """Medians; the time, less what fastai itself takes, over that of the plain loop in the same precision; and how many
    times faster than fastai in fp32 with the same optimizer

    What fastai itself takes is its time in fp32 less that of the plain loop in fp32."""
    res = by_process(df[df.metric!='cpu_ms'], 'step_ms')
    ms = res.step_ms.to_dict()
    def _get(*i): return ms.get(i, float('nan'))
    def _ratios(loop, opt, precision):
        like = opt.replace('flat', 'fastai')
        of_fastai = _get('fastai', like, 'fp32')-_get('hand', like, 'fp32') if loop in ('fastai','ours') else 0
        t = _get(loop, opt, precision)
        return (t-of_fastai)/_get('hand', like, precision),_get('fastai', like, 'fp32')/t
    over,faster = zip(*(_ratios(*i) for i in res.index))
    res.insert(2, 'over plain loop', over)
    res.insert(3, 'times faster', faster)
    return res

def main():
    p = options(arguments(__doc__), 3)
    p.add_argument('--only', nargs='*', help='names of models [mlp conv conv-nhwc vit gpt]')
    p.add_argument('--loops', nargs='*', help='which loops [hand fastai ours, and the others that are installed]')
    p.add_argument('--fp16', action='store_true',
                   help='float16 on a CPU too, where convolutions are some hundred times slower')
    p.add_argument('--turns', type=int, default=5, help='how many turns every process has [5]')
    p.add_argument('--turn', type=float, default=.3, help='how many seconds one lasts [0.3]')
    if '--serve' in sys.argv: return serve(args := p.parse_args(), {t.name:t for t in (tiny if args.tiny else tasks)})
    args,dev,results = start(p, 'train_{dev}')
    sizes,here = tiny if args.tiny else tasks,Path(__file__).resolve().parent.parent
    how = dict(turns=1, turn=.001) if args.tiny else dict(turns=args.turns, turn=args.turn)
    vs = variants(['fp16','bf16'] if dev=='cuda' or args.fp16 else ['bf16'], dev)
    sides = [(v,v,here) for v in vs if args.loops is None or v.loop in args.loops]
    for t in sizes:
        if args.only is not None and t.name not in args.only: continue
        results.measure('train', t.name, t.batch, in_processes(t.name, sides, args, dev, **how))
    text = []
    for (case,size),o in results.read().groupby(['case','size'], sort=False):
        text += [f'## {case}, batch size {size}\n', markdown(table(o))]
    results.write('Training small models', text, 'several processes')

if __name__=='__main__': main()
