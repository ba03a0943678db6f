"""Models in which our rules round numbers that matter: what do they lose, and is it as under autocast when measured?

The models are those of tests/measured_models.py, with random data. The error is that of the first batch's gradient,
relative to float32's: under autocast, by our rules without a measure, and after it, as a learner makes it in its first
batch; and which modules compute as under autocast then. Inf is an error or a number that isn't finite. The loss is the
mean square, and the validation loss that of the last quarter of the data after a short training with AdamW, computed in
the precision that was trained in, and once more in float32 from the same weights. A seed decides weights, data and
batches, the same in each precision. Float16 has a loss scale of PyTorch, and no convolution, as CPUs emulate it."""
import sys,warnings
from contextlib import nullcontext
from functools import partial
from math import inf,isfinite
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent/'tests'))

from torch.nn import functional as F

from common import *
from loops import Variant
from measured_models import convolves,rows
from mp_callbacks.core.half import half_precision

dtypes = dict(bfloat16=bf16, float16=fp16)
ways = {'fp32':{}, 'autocast':dict(rules=False), 'rules':dict(measure=False), 'measured':dict()}
first_scale = 1024. # of float16

def parts(*tensors):
    "Data for training and for validation"
    n = len(tensors[0])*3//4
    return [o[:n] for o in tensors],[o[n:] for o in tensors]

def loss_of(model, x, y): return F.mse_loss(model(x).float(), y)

def gradient(model, x, y, half, scale):
    "Gradients of all parameters as one vector, from the same parameters in both calls: the first casts nothing ahead"
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with torch.no_grad():
            for p,o in zip(model.parameters(), start): p.copy_(o)
        model.zero_grad()
        with half or nullcontext(): (loss_of(model, x, y)*scale).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return torch.cat([o.flatten() for o in grads])/scale

def or_inf(compute):
    "What `compute` returns, and ''; inf, and the text of its error if it raises one"
    try: res = compute()
    except Exception as e: return inf,explained(e)[1]
    return (res,'') if isfinite(res) else (inf,'')

def batches(n, steps, bs=64):
    for _ in range(steps): yield torch.randint(n, (bs,))

def train(model, x, y, half, scaler, steps, lr):
    "Train in `half` or in float32, with a plain optimizer"
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    for i in batches(len(x), steps):
        with half or nullcontext():
            loss = loss_of(model, x[i], y[i])
            scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

@torch.no_grad()
def validate(model, x, y, half=None):
    model.eval()
    with half or nullcontext(): return loss_of(model, x, y).item()

def named(found):
    "How many modules are named, and which, or why it could not be measured"
    return len(found.names),found.why or ' '.join(o or 'the-model-itself' for o in found.names)

def one(make, dtype, way, seed, steps, lr, exact):
    "Rows of (metric, value, note) of a `way`. The gradient in float32 is kept in the dict `exact`, or taken from it."
    torch.manual_seed(seed)
    model,*data = make()
    (x,y),valid = parts(*data)
    first,half = (x[:64],y[:64]),None if way=='fp32' else half_precision(model, dtype, **ways[way])
    scale = first_scale if half and dtype==fp16 else 1.
    if way=='measured':
        found = half.measure(lambda: loss_of(model, *first), scale)
        yield 'named',*named(found)
        yield 'passes',found.passes,''
    start = {k:o.clone() for k,o in model.state_dict().items()}
    def _error(): return ((gradient(model, *first, half, scale)-exact[seed]).norm()/exact[seed].norm()).item()
    if half: yield 'error of the gradient',*or_inf(_error)
    else: exact[seed] = gradient(model, *first, None, scale)
    model.load_state_dict(start) # batch norms, and models that write their weights
    torch.manual_seed(seed)
    scaler = torch.amp.GradScaler('cpu', first_scale, growth_interval=100, enabled=scale>1)
    failed = or_inf(lambda: train(model, x, y, half, scaler, steps, lr) or 0.)[1]
    for metric,o in {'validation loss':half, 'validation loss in float32':None}.items():
        yield metric,*((inf,failed) if failed else or_inf(partial(validate, model, *valid, o)))

def run(*args, seeds):
    "Rows of (variant, seed, metric, value, note)"
    exact = {}
    for way in ways:
        for seed in range(seeds):
            for row in one(*args[:2], way, seed, *args[2:], exact): yield Variant('ours','',way),seed,*row

def table(df):
    "A row for each model and dtype: errors, names and losses, medians of the seeds"
    def _medians(metric):
        o = df[df.metric==metric].pivot_table(index=['case','size'], columns='precision', values='value', sort=False,
                                              aggfunc='median')
        return o[[k for k in ways if k in o]]
    def _names(o): return ', '.join(dict.fromkeys(' '.join(o).split())) or 'none'
    named = df[df.metric=='named'].groupby(['case','size'], sort=False).note.agg(_names)
    errors,losses = _medians('error of the gradient'),_medians('validation loss')
    return errors.add_prefix('error, ').assign(named=named).join(losses.add_prefix('loss, '))

def main():
    p = arguments(__doc__)
    p.add_argument('--only', nargs='*', choices=rows, default=[*rows], help='models [all]')
    p.add_argument('--seeds', type=int, default=3, help='how many seeds [3]')
    p.add_argument('--steps', type=int, default=300, help='of training [300]')
    p.add_argument('--lr', type=float, default=3e-3, help='learning rate [3e-3]')
    torch.set_num_threads(1)
    args,_,results = start(p, 'measured_cpu')
    warnings.filterwarnings('ignore')
    seeds,steps = (1,3) if args.tiny else (args.seeds,args.steps)
    for name in args.only:
        for dtype in dtypes:
            if dtype=='float16' and name in convolves: continue
            results.measure('measured', name, dtype, run(rows[name], dtypes[dtype], steps, args.lr, seeds=seeds))
    results.write('Measured: gradients and training', [markdown(table(results.read()))], of='all seeds')

if __name__=='__main__': main()
