"""Pairs of training loops on a CPU, in one thread: is ours as fast as it should be?

`to_bf16` beside `to_native_bf16`, ours beside a loop written by hand, ours beside fastai's own, and with
`--against PATH` ours beside the package in another checkout. Each loop has several processes of its own, and takes
turns with the others. What is measured is the CPU time of a step, which depends less on other work on the machine than
the time that passes, and its page faults. What is in the csv file already is not measured again."""
from processes import *
from models import Task,ViT,Weights,linears,mlp

def tasks(mlp, mlp_adam, vit, linears, weights):
    res = [Task('mlp', *mlp), Task('mlp-fp16', *mlp), Task('mlp-adam', *mlp_adam), Task('vit', *vit),
           Task('linears', *linears), Task('weights', *weights)]
    return {o.name:o for o in res}

full = tasks(mlp      = (lambda: mlp(1024, 6, 1024),             (1024,),   1024, 256),
             mlp_adam = (lambda: mlp(1024, 6, 10),               (1024,),   10,   512),
             vit      = (lambda: ViT(32, 4, 192, 768, 3, 6, 10), (3,32,32), 10,   16),
             linears  = (lambda: linears(8, 120),                (8,),      8,    16),
             weights  = (lambda: Weights(240, 416),              (1,),      2,    1))
tiny = tasks(mlp      = (lambda: mlp(8, 3, 5),                   (8,),      5,    4),
             mlp_adam = (lambda: mlp(8, 3, 5),                   (8,),      5,    4),
             vit      = (lambda: ViT(8, 4, 16, 32, 2, 1, 5),     (3,8,8),   5,    2),
             linears  = (lambda: linears(8, 3),                  (8,),      8,    2),
             weights  = (lambda: Weights(5, 10),                 (1,),      2,    1))

def fused(loop, precision): return Variant(loop, 'fused', precision)

def each(precision): return [fused(o, precision) for o in ('ours','hand','fastai')]

half,bare = fused('ours', 'bf16'),fused('bare', 'fp32')
bf16_loops = ours_bf16,_,fastai_bf16 = each('autocast-bf16')
fp16_loops = ours_fp16,_,fastai_fp16 = each('autocast-fp16')
adam_loops = [Variant(*o) for o in (('ours','fastai','bf16'), ('ours','fastai','autocast-bf16'),
                                    ('fastai','fastai','autocast-bf16'))]
loops = {'mlp':[half,*bf16_loops], 'mlp-fp16':fp16_loops, 'mlp-adam':adam_loops, 'vit':[half],
         'linears':[half,ours_bf16], 'weights':[ours_fp16,fastai_fp16,ours_bf16,fastai_bf16,bare]}
# Whose first loop is compared with that of another checkout
against = {'mlp':'MLP 6×1024', 'mlp-adam':"MLP 6×1024, fastai's Adam", 'vit':'ViT 192×6', 'linears':'120 × Linear(8,8)'}

def pairs(task, ms, other):
    "(case, ms of ours, ms of the other, how many times as long ours may take), from the medians `ms` of `task`"
    def _less_fastai(loops, name, check, most):
        ours,hand,fastai = [ms[o] for o in loops] # fastai-hand is what a `Learner` takes
        return f"MLP 6×1024, {name}: autocast less fastai's own time, and by hand {check}",ours-fastai+hand,hand,most
    if other: yield f'{against[task]}, `to_bf16`: this code, and {other.loop}',ms[loops[task][0]],ms[other],1.03
    if task=='mlp':
        yield 'MLP 6×1024: `to_bf16`, and `to_native_bf16`',ms[half],ms[ours_bf16],1.08
        yield _less_fastai(bf16_loops, 'bf16', 'without a check', 1.1)
    elif task=='mlp-fp16': yield _less_fastai(fp16_loops, 'fp16', 'with GradScaler', 1.05)
    elif task=='mlp-adam':
        for v,name in zip(adam_loops, ('to_bf16','to_native_bf16')):
            yield f"MLP 6×1024, fastai's Adam: `{name}`, and fastai's autocast",ms[v],ms[adam_loops[2]],1.05
    elif task=='linears': yield '120 × Linear(8,8): `to_bf16`, and `to_native_bf16`',ms[half],ms[ours_bf16],1.1
    elif task=='weights':
        for name,ours,fastai in (('float16',ours_fp16,fastai_fp16),('bfloat16',ours_bf16,fastai_bf16)):
            case = f"240 tensors, {name} autocast, a step without forward and backward: ours, and fastai's"
            yield case,ms[ours]-ms[bare],ms[fastai]-ms[bare],1.1

def main():
    p = options(arguments(__doc__), 5)
    p.set_defaults(threads=1)
    p.add_argument('--against', type=Path, help='folder of another checkout')
    p.add_argument('--only', nargs='*', default=list(full), help=f'what to measure [{" ".join(full)}]')
    p.add_argument('--turns', type=int, default=9, help='how many turns every process has [9]')
    p.add_argument('--turn', type=float, default=.3, help='how many seconds one lasts [0.3]')
    if '--serve' in sys.argv: return serve(args := p.parse_args(), tiny if args.tiny else full)
    args,_,results = start(p, 'compare_cpu')
    sizes = tiny if args.tiny else full
    here = Path(__file__).resolve().parent.parent
    if args.against:
        rev = commit(args.against)
        results.about = results.about.replace(str(args.against), rev) # the same on any machine
    how = dict(turns=1, turn=.001) if args.tiny else dict(turns=args.turns, turn=args.turn)
    for name,task in sizes.items():
        sides = [(v,v,here) for v in loops[name]]
        if args.against and name in against:
            first = loops[name][0]
            sides.append((first._replace(loop=rev),first,args.against.resolve()))
        if name in args.only and len(sides)>1:
            results.measure('compare', name, task.batch, in_processes(name, sides, args, 'cpu', **how))
    rows,text = [],[]
    for name,df in results.read().groupby('case', sort=False):
        ms = df[df.metric=='cpu_ms'].groupby(['loop','opt','precision'], sort=False).value.median()
        ms = {Variant(*i):o for i,o in ms.items()}
        other = next((v for v in ms if v.loop not in ('ours','hand','fastai','bare')), None)
        rows += [(case, a, b, a/b, most) for case,a,b,most in pairs(name, ms, other)]
        text += [f'## {name}\n', markdown(by_process(df[df.metric!='step_ms'], 'cpu_ms'))]
    df = pd.DataFrame(rows, columns=['case','ours','other','ratio','at most']).set_index('case')
    results.write('Ours and others, CPU milliseconds per step', [markdown(df), *text], 'several processes')
    print(df.to_string())

if __name__=='__main__': main()
