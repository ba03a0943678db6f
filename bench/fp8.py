"""FP8: kernels beside emulation, products, training steps, losses, what the report sees, host syncs

On a GPU that has FP8, everything; `--only report` also runs on a CPU, emulated, and decides how `precision_report()`
judges layers. `--tiny` is all of it with toy sizes, emulated on a CPU. Parts: kernels, products, steps, losses, report,
syncs."""
import pydoc_data.topics
from functools import partial
from statistics import mean,stdev

import torch.nn.functional as F
from fastai.basics import CrossEntropyLossFlat,DataLoaders,set_seed
from fastai.callback.schedule import Learner
from fastai.optimizer import OptimWrapper
from torch import nn

import loops
from common import *
from gpu import Syncs
from loops import Variant,emulated
from models import GPT,Task,ViT
from mp_callbacks.core.fp8 import Fp8,fp8_linear,fp8_recipes
from mp_callbacks.look.fp8_report import Fp8Report,measure_fp8
from mp_callbacks.core.half import half_precision

recipes = [*fp8_recipes]
shapes = [(12608,768,3072), (12608,3072,768), (12608,1024,4096), (16384,2048,8192), (16384,8192,2048),
          (16384,4096,4096), (12600,1024,4096)] # rows, in, out: of ViT-B, ViT-L and a GPT
# The last one's rows are no multiple of 16
fp8_only = lambda recipe: Variant('ours', 'fused', f'fp8-{recipe}')

# --- Products

def factors(rows, n_in, n_out, dev):
    gen = torch.Generator(dev).manual_seed(0)
    def _new(*shape): return torch.randn(*shape, device=dev, dtype=bf16, generator=gen)
    return _new(rows,n_in).requires_grad_(),_new(n_out,n_in).requires_grad_(),_new(rows,n_out)

def products(linear, x, weight, grad):
    "Result and gradients"
    x.grad = weight.grad = None
    res = linear(x, weight)
    res.backward(grad)
    return res.detach(),x.grad,weight.grad

def kernels(shape, dev):
    "Relative difference of the kernels' numbers from emulation, and from float32"
    x,weight,grad = factors(*shape, dev)
    exact = products(F.linear, *[t.detach().float().requires_grad_() for t in (x,weight)], grad.float())
    for recipe in recipes:
        linears = [partial(fp8_linear, recipe=recipe, emulate=o) for o in (emulated(dev),True)]
        got,want = (products(o, x, weight, grad) for o in linears)
        for name,*ts in zip(('output','input','weight'), got, want, exact):
            a,b,c = [t.float() for t in ts]
            yield fp8_only(recipe),1,f'{name}: to emulation',((a-b).norm()/b.norm()).item(),''
            yield fp8_only(recipe),1,f'{name}: to float32',((a-c).norm()/c.norm()).item(),''

def torchao_linear(recipe):
    "torchao's module, as a function; None if it isn't installed"
    try: from torchao.float8.float8_linear import Float8LinearConfig,Float8Linear
    except ImportError: return
    def _linear(x, weight):
        config = Float8LinearConfig.from_recipe_name(recipe)
        module = Float8Linear.from_float(nn.Linear(1, 1, bias=False, device='meta'), config)
        module.weight = nn.Parameter(weight.detach())
        return module(x)
    return _linear

def compiled(f): return torch.compile(f, backend=loops.backend)

def product_times(shape, dev, turns, recipes=recipes):
    "Milliseconds of forward and backward pass, in turns"
    x,weight,grad = factors(*shape, dev)
    timed = {Variant('eager', '', 'bf16'):F.linear, Variant('compiled', '', 'bf16'):compiled(F.linear)}
    for recipe in recipes:
        linear = partial(fp8_linear, recipe=recipe, emulate=emulated(dev))
        timed[Variant('eager', '', f'fp8-{recipe}')] = linear
        timed[Variant('compiled', '', f'fp8-{recipe}')] = compiled(linear)
        if emulated(dev): continue # its emulation is a test's
        if theirs := torchao_linear(recipe): timed[Variant('torchao', '', f'fp8-{recipe}')] = compiled(theirs)
    for i in range(turns+1):
        for v,linear in timed.items():
            n = 20 if i else 2
            clock = Clock(dev)
            with clock:
                for _ in range(n): products(linear, x, weight, grad)
            if i: yield v,i,'step_ms',clock.ms/n,''

# --- Training

def text_data(length, bs, steps, dev):
    "Python's own documentation, as characters"
    data = torch.tensor(list(' '.join(pydoc_data.topics.topics.values()).encode('ascii', 'replace')))
    gen = torch.Generator().manual_seed(0)
    def _pieces(starts): return [(data[i:i+length],data[i+1:i+length+1]) for i in starts.tolist()]
    train = torch.randint(len(data)-len(data)//10-length-1, (bs*steps,), generator=gen)
    valid = torch.arange(len(data)-len(data)//10, len(data)-length-1, length)
    return DataLoaders.from_dsets(_pieces(train), _pieces(valid), bs=bs, shuffle=False, num_workers=0, device=dev)

def train(dls, model, seed, call, lr):
    set_seed(seed)
    adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
    learn = Learner(dls, model(), loss_func=CrossEntropyLossFlat(), opt_func=adamw)
    learn = call(learn)
    with learn.no_bar(),learn.no_logging(): learn.fit_one_cycle(1, lr)
    return learn

def losses(model, dls, dev, seeds):
    "Validation loss of each seed, minus that in bfloat16: mean and its standard error"
    base = [train(dls, model, o, Learner.to_bf16, 1e-3).recorder.values[-1][1] for o in range(seeds)]
    yield Variant('ours', 'fused', 'bf16'),1,'loss',mean(base),''
    for recipe in recipes:
        call = partial(Learner.to_fp8, recipe=recipe, emulate=emulated(dev))
        off = [train(dls, model, o, call, 1e-3).recorder.values[-1][1]-b for o,b in enumerate(base)]
        yield fp8_only(recipe),1,'loss',mean(base)+mean(off),''
        yield fp8_only(recipe),1,'minus bf16',mean(off),''
        if seeds>1: yield fp8_only(recipe),1,'standard error',stdev(off)/seeds**.5,''

# --- What the report sees

def plant(model, factor):
    "One input of a layer becomes `factor` times as large, and its weights as much smaller: the same function"
    block = model.blocks[1]
    with torch.no_grad():
        for p in (block.norm2.weight,block.norm2.bias): p[5] *= factor
        block.mlp[0].weight[:,5] /= factor

def tails(model):
    "Most numbers that the GELUs return are tiny"
    with torch.no_grad():
        for block in model.blocks:
            block.mlp[0].weight *= 4
            block.mlp[0].bias -= 2

changes = {'as it is':lambda model: None, 'GELUs with tails':tails,
           **{f'outlier {o:g}':partial(plant, factor=o) for o in (3e3,3e4,3e5,1/3e3)}}

def seen(model, compute_loss, recipe, dev):
    "What the report says of a batch: errors, and the largest value of each column"
    fp8 = Fp8(recipe, emulated(dev))
    half,report = half_precision(model, bf16, fp8=fp8),Fp8Report(fp8)
    clock = Clock(dev)
    with clock: measure_fp8(report, model, compute_loss, half)
    yield 'fp8 error',report.error
    for name in ('digits_error','bfloat16_error'): yield name.replace('_', ' '),getattr(report, name)
    for name,value in report.table.max().items(): yield name,value
    yield 'taken out',len(report.keep or ())
    yield 'seconds',clock.ms/1e3

def reports(trained, batch, dev):
    state = {k:v.clone() for k,v in trained.state_dict().items()}
    def _loss(): return F.cross_entropy(trained(batch[0]).flatten(0, -2), batch[1].flatten())
    for i,(name,change) in enumerate(changes.items(), 1):
        trained.load_state_dict(state)
        change(trained)
        for recipe in recipes:
            for metric,value in seen(trained, _loss, recipe, dev):
                yield Variant(name, '', f'fp8-{recipe}'),i,metric,value,''

# --- All of it

def variants(tiny):
    "Of a training step"
    if tiny: return [fp8_only('tensorwise'),Variant('compiled', 'fused', 'fp8-rowwise')]
    return [Variant(loop, 'fused', o) for loop in ('ours','compiled')
            for o in ('bf16','autocast-bf16',*[f'fp8-{recipe}' for recipe in recipes])]

def tasks(tiny):
    "Models of a training step, with their batches"
    if tiny: return [Task('gpt', lambda: GPT(20, 8, 32, 64, 2, 2), (8,), 20, 2)]
    return [Task('vit-large', lambda: ViT(224, 16, 1024, 4096, 16, 24, 1000), (3,224,224), 1000, 64),
            Task('gpt-1B',    lambda: GPT(50304, 2048, 2048, 8192, 16, 20), (2048,), 50304, 4)]

def report(results):
    df,text = results.read(),[]
    for (part,case,size),o in df.groupby(['part','case','size'], sort=False):
        text += [f'## {part}: {case}\n', markdown(medians(o))]
    results.write('FP8', text)

def main():
    parts = ['kernels','products','steps','losses','report','syncs']
    p = arguments(__doc__)
    p.add_argument('--only', nargs='*', default=parts, help=f'parts [{" ".join(parts)}]; none: write the tables again')
    args,dev,results = start(p, 'fp8_{dev}')
    if emulated(dev) and not args.tiny and {*args.only}-{'report'}:
        raise SystemExit(f'{dev} has no FP8. Use --only report, which is emulated, or --tiny, to see whether this '
                         'works.')
    few,turns = (dict(turns=1, turn=.001),1) if args.tiny else ({},5)
    if args.tiny: loops.backend = 'aot_eager' # starts at once
    for shape in [(24,32,16)] if args.tiny else shapes:
        name = '×'.join(map(str, shape))
        if 'kernels'  in args.only: results.measure('kernels',  name, 0, kernels(shape, dev))
        if 'products' in args.only:
            times = product_times(shape, dev, turns, recipes[:1] if args.tiny else recipes)
            results.measure('products', name, 0, times)
    for task in tasks(args.tiny):
        def _turns(variants, **kwargs): return take_turns(task, variants, dev, **{**kwargs, **few})
        if 'steps' in args.only: results.measure('steps', task.name, task.batch, _turns(variants(args.tiny)))
        if 'syncs' in args.only:
            results.measure('syncs', task.name, task.batch, _turns([fp8_only('tensorwise')], probe=Syncs, turns=1))
    if 'losses' in args.only:
        length,steps,seeds,size = (8,2,2,(8, 32, 64, 2, 2)) if args.tiny else (512,2000,3,(512, 768, 3072, 12, 12))
        dls = text_data(length, 16, steps, dev)
        results.measure('losses', 'gpt', steps, losses(lambda: GPT(128, *size), dls, dev, seeds))
    if 'report' in args.only:
        steps,size = (2,(8, 32, 64, 2, 2)) if args.tiny else (60,(64, 64, 256, 4, 4))
        dls = text_data(size[0], 16, steps, dev)
        learn = train(dls, lambda: GPT(128, *size), 0, lambda learn: learn, 3e-3)
        results.measure('report', f'GPT after {steps} steps', 16, reports(learn.model, dls.one_batch(), dev))
    report(results)

if __name__=='__main__': main()
