"""Norms in mixed precision: what they save for the backward pass, how exact and how fast they are, and how large the loss may be made

Each norm of a model computes in one of several ways, whatever `half_norm` would decide:
float32: from a float32 copy of its input; as it is: under autocast, with float32 weights; rounded: outside autocast, its weights rounded for the call; lent: with half-precision copies of its weights;
exact: as rounded with a kernel that computes in float32 inside, emulated, so that neither its bytes nor its time count. That is what rounded should be on a GPU.
Errors are relative to float64, with the weights of the model after some steps of training in float32. Then each kind of norm alone, on inputs that are hard for it.
`--tiny`: toy sizes, to see that it works."""
import copy
from bisect import bisect_left
from unittest.mock import patch

import torch
from torch import nn

from common import *
from models import *
from mp_callbacks import master
from mp_callbacks.master import MasterWeights,batch_norm_modules,half_norm,is_norm

ways = 'float32','as it is','rounded','lent','exact'

class ConvGN(nn.Module):
    "Convolution, group norm and GELU, again and again"
    def __init__(self, width, layers, n_out):
        super().__init__()
        dims = [3, *[width*2**i for i in range(layers)]]
        self.body = nn.Sequential(*[nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.GroupNorm(4, o), nn.GELU()) for i,o in zip(dims,dims[1:])])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dims[-1], n_out))
    def forward(self, x): return self.head(self.body(x))

def with_rms(model):
    "`model` with an RMSNorm for each LayerNorm"
    for m in list(model.modules()):
        for n,o in m.named_children():
            if isinstance(o, nn.LayerNorm): setattr(m, n, nn.RMSNorm(o.normalized_shape))
    return model

def tasks(dev, tiny):
    if tiny:
        vit,gpt = lambda: ViT(8, 4, 16, 32, 2, 1, 5),lambda: GPT(20, 8, 16, 32, 2, 1)
        return [Task('vit', vit, (3,8,8), 5, 2), Task('gpt', gpt, (8,), 20, 2), Task('gpt-rms', lambda: with_rms(gpt()), (8,), 20, 2), Task('conv-gn', lambda: ConvGN(4, 2, 5), (3,8,8), 5, 2)]
    if dev=='cuda':
        vit,gpt,b = lambda: ViT(224, 16, 768, 3072, 12, 12, 1000),lambda: GPT(50304, 512, 768, 3072, 12, 12),64
        return [Task('vit-base', vit, (3,224,224), 1000, 32), Task('gpt-124M', gpt, (512,), 50304, 8), Task('gpt-124M-rms', lambda: with_rms(gpt()), (512,), 50304, 8),
                Task('conv-gn', lambda: ConvGN(64, 4, 100), (3,128,128), 100, b), Task('conv-bn', lambda: conv(64, 4, 100), (3,128,128), 100, b)]
    vit,gpt = lambda: ViT(32, 4, 128, 512, 4, 4, 100),lambda: GPT(1000, 128, 128, 512, 4, 4)
    return [Task('vit', vit, (3,32,32), 100, 32), Task('gpt', gpt, (128,), 1000, 16), Task('gpt-rms', lambda: with_rms(gpt()), (128,), 1000, 16),
            Task('conv-gn', lambda: ConvGN(16, 3, 100), (3,32,32), 100, 64), Task('conv-bn', lambda: conv(16, 3, 100), (3,32,32), 100, 64)]

def masters(model, way, dtype):
    "`MasterWeights` with all norms in one `way`, those with running statistics as ever"
    norms,half = {n:m for n,m in model.named_modules() if is_norm(n, m) and not isinstance(m, batch_norm_modules)},str(dtype).removeprefix('torch.')
    if way=='float32': return MasterWeights(model, dtype, {n:f'c=f32,o={half}' for n,m in model.named_modules() if is_norm(n, m)})
    if way=='lent':    return MasterWeights(model, dtype, {n:f'c={half}' for n in norms})
    def _forced(m, *args): return half_norm(m, *args) if isinstance(m, batch_norm_modules) else 'rounded' if way=='exact' else way
    with patch.object(master, 'half_norm', _forced), patch.object(master, 'rounded_norm_forward', exact_forward if way=='exact' else master.rounded_norm_forward): return MasterWeights(model, dtype)

def exact_forward(device_type, dtype, module, forward, x):
    "Weights and their gradients are rounded, and all else is float32"
    real = dict(module._parameters)
    module._parameters.update({n:p.to(dtype).float() for n,p in real.items() if p is not None})
    try: return master.kept_forward(device_type, dtype, True, forward, x)
    finally: module._parameters.update(real)

class Saved:
    "Bytes that autograd saves meanwhile, each storage once, without parameters"
    def __init__(self, params): self.known = {p.untyped_storage().data_ptr() for p in params}
    def __enter__(self):
        self.seen = {}
        def _pack(t): # holding on to the tensor, so that its address isn't used again
            if (o := t.untyped_storage()).data_ptr() not in self.known: self.seen[o.data_ptr()] = t,o.nbytes()
            return t
        self.hooks = torch.autograd.graph.saved_tensors_hooks(_pack, lambda t: t)
        self.hooks.__enter__()
        return self
    def __exit__(self, *ex): self.hooks.__exit__(*ex)
    @property
    def bytes(self): return sum(n for _,n in self.seen.values())

def off(a, b): return ((a.double()-b.double()).norm()/b.double().norm()).item()
def flat(ts): return torch.cat([t.detach().double().flatten() for t in ts])

class Norms:
    "A model, its batch, and what float64 says of them"
    def __init__(self, task, dev, steps):
        self.dev,self.model,(self.x,self.y) = dev,task.model(dev),task.data(dev)
        opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(steps): loss_func(self.model(self.x), self.y).backward(); opt.step(); opt.zero_grad()
        names = {n:m for n,m in self.model.named_modules() if is_norm(n, m)}
        self.norms = {id(p) for m in names.values() for p in m.parameters()}
        ref,x = copy.deepcopy(self.model).double(),self.x.double() if self.x.is_floating_point() else self.x
        self.pred = ref(x)
        self.loss = loss_func(self.pred, self.y)
        self.loss.backward()
        self.grads = [p.grad for p in ref.parameters()]
        self.pred,self.loss = self.pred.detach(),self.loss.detach()

    def step(self, w, scale):
        "The gradients, as they are, and prediction and loss"
        self.model.zero_grad()
        with w:
            pred = self.model(self.x)
            loss = loss_func(pred, self.y)
            (loss*scale).backward()
        return [p.grad for p in self.model.parameters()],pred.detach(),loss.detach()

    def finite(self, w, scale): return all(o.isfinite().all() for o in self.step(w, scale)[0])

    def rows(self, v):
        w,params = masters(self.model, v.loop, v.dtype),list(self.model.parameters())
        with w, Saved([*params, *w.copies]) as saved: self.model(self.x)
        if v.loop!='exact': yield 'saved_mb',saved.bytes/2**20
        k = 0
        if v.dtype==fp16:
            k = 7+bisect_left(range(8, 24), True, key=lambda k: not self.finite(w, 2.**k))
            yield 'log2_max_scale',k
        scale = 2.**max(k-3, 0)
        grads,pred,loss = self.step(w, scale)
        grads = [g.double()/scale for g in grads]
        yield 'loss_err',off(loss, self.loss)
        yield 'pred_err',off(pred, self.pred)
        yield 'grad_err',off(flat(grads), flat(self.grads))
        mine = [i for i,p in enumerate(params) if id(p) in self.norms]
        yield 'norm_grad_err',off(flat(grads[i] for i in mine), flat(self.grads[i] for i in mine))

def variants(precisions): return [Variant(way, '', o) for o in precisions for way in ways]
def failure(e): return 'error',0,' '.join(f'{type(e).__name__}: {e}'.split())[:120] # such as that there is no kernel for it here

def errors(task, dev, precisions, steps):
    norms = Norms(task, dev, steps)
    for v in variants(precisions):
        try:
            for metric,value in norms.rows(v): yield v,1,metric,value,''
        except RuntimeError as e: yield v,1,*failure(e)

def times(task, dev, precisions, turns):
    "Forward and backward, in turns, the first of them to warm up"
    model,(x,y),clock = task.model(dev),task.data(dev),Clock(None, dev)
    ws = {v:masters(model, v.loop, v.dtype) for v in variants(precisions) if v.loop!='exact'}
    for i in range(turns+1):
        for v,w in list(ws.items()):
            try:
                with clock, w: loss_func(model(x), y).backward()
                if i: yield v,i,'step_ms',clock.ms,''
            except RuntimeError: del ws[v] # the errors say why

# --- One norm alone

kinds = {'LayerNorm': (lambda: nn.LayerNorm(64), (4096,64)), 'GroupNorm': (lambda: nn.GroupNorm(4,64), (256,64,16)), 'RMSNorm': (lambda: nn.RMSNorm(64, eps=1e-6), (4096,64)),
         'BatchNorm1d': (lambda: nn.BatchNorm1d(64), (4096,64)), 'InstanceNorm1d': (lambda: nn.InstanceNorm1d(64), (64,64,64))}
hard = {'plain': lambda x: x, 'large mean': lambda x: x*.1+30, 'large': lambda x: x.clamp(-3,3)*1e4, 'tiny': lambda x: x*1e-4}
calls = 'float32','as it is','outside autocast','rounded'

def call(way, m, x, dev, dtype):
    if way=='float32':  return master.kept_forward(dev, dtype, True, m.forward, x)
    if way=='as it is':
        with torch.autocast(dev, dtype): return m(x)
    if way=='outside autocast': return m(x)
    return master.rounded_norm_forward(dev, dtype, m, m.forward, x)

def alone(kind, how, dev, precisions, few):
    make,shape = kinds[kind]
    gen = torch.Generator().manual_seed(0)
    if few: shape = (8,*shape[1:])
    x,g = hard[how](torch.randn(shape, generator=gen)),torch.rand(shape, generator=gen)
    for v in [Variant(way, '', o) for o in precisions for way in calls]:
        d = v.dtype
        x_,g_ = x.to(d),g.to(d)
        def run(m, x, g, f):
            x = x.clone().requires_grad_()
            with Saved(m.parameters()) as saved: y = f(m, x)
            (y*g).sum().backward()
            return [('y_err',y.detach().cpu()),('x_grad_err',x.grad.cpu())]+[(f'{n}_grad_err',p.grad.cpu()) for n,p in m.named_parameters()],saved.bytes/x.numel()
        want,_ = run(make().double(), x_.double(), g_.double(), lambda m,x: m(x))
        if v.loop=='rounded' and kind in ('BatchNorm1d','InstanceNorm1d'): continue # never
        try: got,saved = run(make().to(dev), x_.to(dev), g_.to(dev), lambda m,x: call(v.loop, m, x, dev, d))
        except RuntimeError as e: yield v,1,*failure(e); continue
        for (metric,a),(_,b) in zip(got,want): yield v,1,metric,off(a,b)/torch.finfo(d).eps,''
        yield v,1,'saved_bytes',saved,''
        yield v,1,'default',half_norm(make(), dev, d)==v.loop,''

def main():
    p = arguments(__doc__)
    p.add_argument('--turns', type=int, default=15)
    p.add_argument('--steps', type=int, default=10, help='of training in float32 before anything is measured [10]')
    p.add_argument('--only', nargs='*', default=['model','time','alone'], help='parts [model time alone]; none: write the tables again')
    args,dev,results = start(p, 'norms_{dev}')
    both,turns,steps = ('fp16','bf16'),1 if args.tiny else args.turns,1 if args.tiny else args.steps
    for task in tasks(dev, args.tiny):
        precisions = both if dev=='cuda' or args.tiny or not task.name.startswith('conv') else ('bf16',) # float16 convolutions take too long on a CPU
        if 'model' in args.only: results.measure('model', task.name, task.batch, errors(task, dev, precisions, steps))
        if 'time'  in args.only: results.measure('time', task.name, task.batch, times(task, dev, precisions if dev=='cuda' or args.tiny else ('bf16',), turns))
    for kind in kinds if 'alone' in args.only else []:
        for how in hard: results.measure('alone', kind, how, alone(kind, how, dev, both, args.tiny))
    report(results)

def report(results):
    df,text = results.read(),[]
    df['part'] = df.part.replace('time', 'model')
    for (part,case,size),o in df.groupby(['part','case','size'], sort=False):
        t = medians(o).droplevel('opt')
        if 'step_ms' in t: t.insert(t.columns.get_loc('step_ms')+1, 'of float32', [ms/t.step_ms['float32',p] for (_,p),ms in t.step_ms.items()])
        what = f'batch size {size}' if part=='model' else f'{size}: errors in units of the spacing of numbers near 1, bytes for each number of the input, and which way is the default'
        text += [f'## {case}, {what}\n', markdown(t.sort_index(level='precision', sort_remaining=False))]
    results.write('Norms in mixed precision', text)

if __name__=='__main__': main()
