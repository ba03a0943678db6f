"""What a call costs beside autocast where calls are short: predictions in a loop, masks, own parameters in a loop

- predictions: eight layers of 1,024, batch 1, without gradients, many calls in one `with`, `us` for each call
- masks: a training step of `TrainingSteps` for twelve small layers with a mask of bools each, and without masks
- own: a training step of a narrow model that ends with a loop of some operations with its own parameters: by our rules
  (`measure=False`), as measured, and under autocast alone. `most_operations` of `mp_callbacks.core.measure` follows it.
- measures: what a comparison with autocast takes of the time of a training step, of a small ViT with few items and many

CPU time of the process, in turns in one process, in one thread; medians."""
from contextlib import nullcontext
from time import process_time

from common import *
from loops import Variant
from models import ViT
from mp_callbacks.core.half import half_precision
from mp_callbacks.core.measure import first_items,most_operations
from mp_callbacks.core.training_steps import TrainingSteps
from torch import nn
from torch.nn import functional as F

def turns(runs, n, warm=3):
    "Rows of (variant, turn, metric, value, note): microseconds of the functions in the dict `runs`, in turns"
    for i in range(1-warm, n+1):
        for v,run in runs.items():
            begin = process_time()
            run()
            if i>0: yield v,i,'us',(process_time()-begin)*1e6,''

def many(model, x, around, times):
    "A function that calls `model` as many `times` in one `with`"
    @torch.no_grad()
    def _calls():
        with around:
            for _ in range(times): model(x)
    return _calls

def predictions(n, width=1024, depth=8, times=100):
    "As `turns`: `times` calls in one `with`"
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    x = torch.randn(1, width)
    around = {Variant('ours','','bf16'):half_precision(model, bf16, measure=False),
              Variant('ours','','autocast-bf16'):half_precision(model, bf16, rules=False),
              Variant('hand','','autocast-bf16'):torch.autocast('cpu', bf16), Variant('hand','','fp32'):nullcontext()}
    for v,i,metric,us,note in turns({v:many(model, x, o, times) for v,o in around.items()}, n):
        yield v,i,metric,us/times,note

class Masked(nn.Linear):
    "A layer with a mask that it doesn't use"
    def __init__(self, width, mask):
        super().__init__(width, width)
        if mask: self.register_buffer('mask', torch.ones(mask, mask, dtype=torch.bool).tril())

def step_of(model, x):
    "A function that makes a training step"
    opt = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    steps = TrainingSteps(model, opt, bf16)
    def _step():
        with steps.batch(): steps.backward(model(x).square().mean())
        steps.make()
    return _step

def masks(n, mask=2048, width=64, depth=12):
    x = torch.randn(8, width)
    def _model(mask): return nn.Sequential(*[Masked(width, mask) for _ in range(depth)])
    return turns({Variant(f'{name} masks','fused','bf16'):step_of(_model(size), x)
                  for name,size in (('with',mask),('without',0))}, n)

class Recurrence(nn.Module):
    "Layers, and a loop of `count` operations with own parameters, four in a step"
    def __init__(self, count, width=64):
        super().__init__()
        self.count = count
        layers = [(nn.Linear(width, width),nn.LayerNorm(width),nn.GELU()) for _ in range(4)]
        self.body = nn.Sequential(*[o for layer in layers for o in layer])
        self.a,self.b,self.g,self.c = [nn.Parameter(torch.randn(width)*.1) for _ in range(4)]

    def forward(self, x):
        z = self.body(x)
        for _ in range(self.count//4): z = torch.tanh(z*self.a+self.b)*self.g+self.c
        return z

def batch_of(model, x, half, grad=True):
    def _batch():
        with half, torch.set_grad_enabled(grad):
            loss = model(x).square().mean()
            if grad: loss.backward()
    return _batch

def own(count, n):
    "As `turns`: forward and backward pass"
    torch.manual_seed(0)
    model,x = Recurrence(count),torch.randn(8, 64)
    measured = half_precision(model, bf16)
    measured.measure(lambda: model(x).square().mean())
    ways = dict(rules=half_precision(model, bf16, measure=False), measured=measured,
                autocast=half_precision(model, bf16, rules=False))
    return turns({Variant('ours',k,'bf16'):batch_of(model, x, o) for k,o in ways.items()}, n)

def measures(items, n, blocks):
    "As `turns`: a step with so many `items`, and a comparison with autocast, which computes 16 of them, or half"
    torch.manual_seed(0)
    model = ViT(32, 8, 64, 256, 4, blocks, 10)
    x,y = torch.randn(items, 3, 32, 32),torch.arange(items)%10
    opt = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    def compute_loss(model, x, y): return F.cross_entropy(model(x), y)
    steps,half = TrainingSteps(model, opt, bf16),half_precision(model, bf16)
    def _step():
        with steps.batch(x, y): steps.backward(compute_loss(model, x, y))
        steps.make()
    part = first_items((x, y))
    def _measure(): half.measure(lambda: compute_loss(model, *part))
    return turns({Variant(k,'fused','bf16'):o for k,o in dict(step=_step, measure=_measure).items()}, n)

counts = 0,4,8,16,32,64,128,256,800

def tables(df):
    "Texts: medians of each part, and ratios"
    us = df[df.metric=='us'].groupby(['part','size','loop','opt','precision'], sort=False).value.median()
    call = us['predictions'].droplevel(['size','opt']).rename('us').to_frame()
    call['of autocast'] = call.us/call.us['hand','autocast-bf16']
    masked = us['masks'].droplevel(['size','opt','precision']).rename('us').to_frame()
    masked['of the step without'] = masked.us/masked.us['without masks']
    loops = us['own'].droplevel(['loop','precision']).unstack()
    ratios = pd.DataFrame({'by our rules':loops.rules/loops.autocast, 'measured':loops.measured/loops.autocast})
    ratios['rules, of those of no loop'] = ratios['by our rules']/ratios['by our rules'].iloc[0]
    ratios = ratios.rename_axis('operations')
    asks = us['measures'].droplevel(['opt','precision']).unstack()
    asks = (asks.measure/asks.step).rename('steps').to_frame().rename_axis('items')
    text = [('Predictions, a call', call), ('Masks, a step', masked), ('Own parameters in a loop, of autocast', ratios),
            ('Measures, in steps', asks)]
    return [o for title,t in text for o in (f'## {title}\n', markdown(t.round(3)))]

def main():
    p = arguments(__doc__)
    p.set_defaults(threads=1)
    p.add_argument('--turns', type=int, default=60, help='how many each has [60]')
    args,_,results = start(p, 'beside_autocast_cpu')
    n,small = (2,dict(width=8, times=2)) if args.tiny else (args.turns,{})
    results.measure('predictions', 'mlp 8x1024', 1, predictions(n, **small))
    results.measure('masks', '12 layers of 64', 8, masks(n, 16 if args.tiny else 2048))
    for count in counts[:2] if args.tiny else counts: results.measure('own', 'recurrence', count, own(count, n))
    blocks = 1 if args.tiny else 12
    for items in (4,64): results.measure('measures', 'vit', items, measures(items, n, blocks))
    text = [*tables(results.read()), f'most_operations is {most_operations}.']
    results.write('Calls beside autocast', text, of='turns')
    print('\n'.join(text))

if __name__=='__main__': main()
