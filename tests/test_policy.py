"Rules for each module, and the table of what comes of them: it says what really happens in training"
import random,sys
from fnmatch import fnmatch
from collections import OrderedDict

import pandas as pd,pytest
from torch.nn.utils import prune
from learners import *
from mp_callbacks import jmp,master
from mp_callbacks.master import float32_rnns,half_norm,rounded_norm_forward
from test_inputs import state,trains,unchanged

pytestmark = [pytest.mark.filterwarnings('ignore:float16 on a CPU'), pytest.mark.filterwarnings('ignore:enable_nested_tensor')]

f16,bf16,f32 = torch.float16,torch.bfloat16,torch.float32
each_call = pytest.mark.parametrize('call,half', [('to_fp16',f16), ('to_bf16',bf16)])

# --- Models

class Image(nn.Module):
    def forward(self, x): return x.view(-1,1,2,4)

class Tokens(nn.Module):
    def forward(self, x): return (x*3).long().clamp(-4,3)+4

class Mean(nn.Module):
    def forward(self, x): return (x[0] if isinstance(x, tuple) else x).mean(1)

class Attention(nn.Module):
    "Adds up, multiplies and has a parameter, outside the layers that it is made of"
    def __init__(self, n):
        super().__init__()
        self.norm,self.qkv,self.out,self.gamma = nn.LayerNorm(n),nn.Linear(n,3*n),nn.Linear(n,n),nn.Parameter(torch.ones(n))
    def forward(self, x):
        q,k,v = self.qkv(self.norm(x)).chunk(3, -1)
        return x+self.gamma*self.out((q@k.transpose(1,2)).softmax(-1)@v)

def seq(**kwargs): return nn.Sequential(OrderedDict(kwargs))

models = dict(
    mlp         = lambda: seq(body=seq(a=nn.Linear(8,16), norm=nn.LayerNorm(16), act=nn.GELU(), b=nn.Linear(16,16)), head=nn.Linear(16,1)),
    conv        = lambda: seq(image=Image(), body=seq(conv=nn.Conv2d(1,4,3,padding=1,bias=False), bn=nn.BatchNorm2d(4), act=nn.ReLU(), conv2=nn.Conv2d(4,4,1)), flat=nn.Flatten(), head=nn.Linear(32,1)),
    transformer = lambda: seq(tok=Tokens(), emb=nn.Embedding(8,8), own=Attention(8), layer=nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True), mean=Mean(), head=nn.Linear(8,1)),
    lstm        = lambda: seq(tok=Tokens(), emb=nn.Embedding(8,8), body=nn.LSTM(8,8,batch_first=True), mean=Mean(), norm=nn.LayerNorm(8), head=nn.Linear(8,1)))

def model(name):
    torch.manual_seed(3)
    return models[name]()

def floats(o): return [t for t in (o if isinstance(o, (tuple,list)) else [o]) for t in (floats(t) if isinstance(t, (tuple,list)) else [t]) if isinstance(t, torch.Tensor) and t.is_floating_point()]

def watch(model):
    "Name -> the dtypes of parameters, inputs and outputs at each call of a module in training, and the hooks to be removed"
    seen = {}
    def note(n):
        def _f(m, i, o):
            if m.training: seen.setdefault(n, []).append(tuple({t.dtype for t in floats(ts)} for ts in (list(m._parameters.values()), i, o)))
        return _f
    return seen,[m.register_forward_hook(note(n)) for n,m in model.named_modules()]

def agrees(table, seen, model):
    "Is what the `table` says what has been `seen`?"
    rows = {o.module:o for o in table}
    assert list(rows)==[n for n,_ in model.named_modules() if n in rows] and len(rows)==len(table)
    assert {n for n,m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}<=rows.keys()
    for n,calls in seen.items():
        if n not in rows: continue
        r,m = rows[n],model.get_submodule(n)
        assert (r.kind,r.size)==(type(m).__name__,sum(p.numel() for p in m.parameters(recurse=False)))
        for weights,given,out in calls:
            assert weights=={r.compute} if r.params else not weights, n
            if r.output: assert out<={r.output}, n
            elif is_norm(n, m): assert out==given, n
    return rows

# --- The table

each_model = pytest.mark.parametrize('name', models)
all_rules = dict(
    default = lambda h: is_norm,
    nothing = lambda h: (),
    named   = lambda h: (is_norm,'head'),
    body    = lambda h: (nn.LayerNorm,'body*','own','layer'),
    half    = lambda h: {'*': f'p=f32,c={h}'},
    full    = lambda h: {'*': 'c=f32', 'head': f'c={h}'},
    islands = lambda h: {'*': 'c=f32', '*.a': f'c={h}', '*.conv2': f'c={h},o=f32', '*qkv': f'c={h},o=f32', '*.linear1': f'c={h},o=f32', 'emb': f'c={h}', 'head': f'c={h}'},
    outputs = lambda h: {'head': f'c=f32,o={h}', 'body*': f'c={h},o=f32', '*norm*': f'c=f32,o=f32', 'emb': f'c={h},o=f32'})

@each_call
@each_model
@pytest.mark.parametrize('keep', all_rules)
def test_table_is_true(name, call, half, keep):
    "Weights and outputs of every module in a step are what the table has said before, and says after"
    keep = all_rules[keep]('bf16' if half==bf16 else 'f16')
    net = model(name)
    names = [n for n,_ in net.named_modules()]
    def fits(k): return not isinstance(k, str) or any(fnmatch(n, k) for n in names) and not (k=='body*' and half==f16 and isinstance(getattr(net, 'body', None), nn.LSTM)) # refused, see below
    if not callable(keep): keep = {k:v for k,v in keep.items() if fits(k)} if isinstance(keep, dict) else tuple(filter(fits, keep))
    learn = getattr(get_learner(net), call)(keep=keep)
    table = learn.model_to_half.policy()
    assert {type(o) for o in table}=={ModulePolicy}
    seen,hooks = watch(learn.model)
    learn.fit(1)
    for h in hooks: h.remove()
    assert seen.keys()>={n for n,_ in learn.model.named_modules()}-{'layer.self_attn.out_proj'} # used without being called
    rows = agrees(table, seen, learn.model)
    assert rows[''].output==f32 and seen[''][0][2]=={f32}
    assert learn.model_to_half.policy()==table
    assert {p.dtype for p in learn.model.parameters()}=={f32} and not any('forward' in vars(m) for m in learn.model.modules())

@each_call
def test_trains(call, half):
    "With every kind of rule at once, and reaches what float32 reaches"
    rules = {'body': 'c=f32', 'body.b': f'p=f32,c={half},o=f32', '*norm': Policy(compute_dtype=half, output_dtype=half)}
    learn,plain = modes[call[3:]](get_learner(model('mlp'), lr=1e-3), keep=rules),get_learner(model('mlp'), lr=1e-3)
    trains(learn)
    plain.fit(2)
    assert apart(learn, plain, flat(model('mlp').parameters()))<.1

@each_call
def test_rule_is_keep(call, half):
    "A rule with c=f32 is the same as a name in keep=, to the bit"
    a,b = (getattr(get_learner(model('mlp')), call)(keep=o) for o in ((is_norm,'head'), {'head':'p=f32,c=f32'}))
    for o in (a,b): o.fit(2)
    assert all(map(torch.equal, weights(a), weights(b)))
    reasons = [[(r.module,r.why) for r in o.model_to_half.policy() if r.compute==f32] for o in (a,b)]
    assert reasons==[[('body.norm','normalisation'), ('head','named by keep')], [('body.norm','normalisation'), ('head',"rule 'head'")]]

def test_last_rule_decides():
    def dtypes(keep): return {o.module:(o.compute,o.output) for o in effective_policy(model('mlp'), bf16, keep) if o.params}
    assert dtypes({'body':'c=f32', 'body.b':'c=bf16'})['body.b']==(bf16,bf16)
    assert dtypes({'body.b':'c=bf16', 'body':'c=f32'})['body.b']==(f32,f32)
    assert dtypes({'body':'c=bf16,o=f32'})=={'body.a':(bf16,bf16), 'body.norm':(bf16,bf16), 'body.b':(bf16,bf16), 'head':(bf16,bf16)} # inside, compute; the output is that of body alone
    assert dtypes({'body.*':'c=bf16,o=f32'})['body.a']==(bf16,f32)
    assert dtypes({'*':'c=bf16', 'body.norm':'c=f32'})['body.norm']==(f32,f32)
    assert dtypes({'*.a':'o=f32'})['body.a']==(f32,f32) # as in JMP: compute follows params
    assert dtypes({'head':' params = float32 , compute = bfloat16 '})['head']==(bf16,bf16)
    assert dtypes({'head':jmp.get_policy('c=full')})==dtypes({'head':Policy()})==dtypes({'head':'full'})
    assert dtypes({})==dtypes(is_norm)

def test_half_norm_computes_in_half():
    "In the copies, on half-precision inputs, outside autocast; its gradients are float32"
    learn,inside = get_learner(model('mlp')).to_bf16(keep={'body.norm':'c=bf16'}),[]
    norm = learn.model.body.norm
    plain = nn.LayerNorm.forward
    def forward(self, x):
        inside.append((x.dtype, self.weight.dtype, torch.is_autocast_enabled('cpu')))
        return plain(self, x)
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(nn.LayerNorm, 'forward', forward)
        learn.fit(1)
    assert set(inside)=={(bf16,bf16,False)}
    assert norm.weight.dtype==f32

def test_kept_norm_answers_in_full():
    "A norm that a rule keeps with o=f32 has not rounded what it returns"
    net,x = seq(a=nn.Linear(8,8), norm=nn.LayerNorm(8), head=nn.Linear(8,1)),torch.randn(4,8)
    seen = []
    net.norm.register_forward_hook(lambda m,i,o: seen.append(o))
    for keep in (is_norm, {'norm':'c=f32'}):
        with MasterWeights(net, bf16, keep): net(x).sum().backward()
    assert (seen[0].dtype,seen[1].dtype)==(bf16,f32) and not torch.equal(seen[1], seen[1].bfloat16().float())

# --- Norms that read half-precision input

class _Kernel(torch.autograd.Function):
    "A layer norm as on CUDA: one dtype for all that it reads and writes, float32 inside, and the input is saved as it came"
    @staticmethod
    def forward(ctx, x, w, b, eps):
        if not x.dtype==w.dtype==b.dtype: raise RuntimeError(f'expected scalar type {x.dtype} but found {w.dtype}')
        ctx.wide = torch.float64 if x.dtype==torch.float64 else torch.float32
        y,mean,rstd = torch.native_layer_norm(x.to(ctx.wide), w.shape, w.to(ctx.wide), b.to(ctx.wide), eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y.to(x.dtype)
    @staticmethod
    def backward(ctx, g):
        x,w,b,mean,rstd = ctx.saved_tensors
        gs = torch.ops.aten.native_layer_norm_backward(g.to(ctx.wide), x.to(ctx.wide), w.shape, mean, rstd, w.to(ctx.wide), b.to(ctx.wide), [True]*3)
        return *[o.to(x.dtype) for o in gs],None

class AsOnCuda(nn.LayerNorm):
    def forward(self, x): return _Kernel.apply(x, self.weight, self.bias, self.eps)

class SumsInHalf(nn.LayerNorm):
    def forward(self, x): x = x-x.mean(-1, keepdim=True); return x*(x.pow(2).mean(-1, keepdim=True)+self.eps).rsqrt()*self.weight.to(x.dtype)+self.bias.to(x.dtype)

class SavesFloat32(nn.LayerNorm):
    def forward(self, x):
        wide = x.double() if x.dtype==torch.float64 else x.float()
        return nn.functional.layer_norm(wide, self.normalized_shape, self.weight.to(wide.dtype), self.bias.to(wide.dtype), self.eps).to(x.dtype)

@pytest.fixture
def norm_kinds(monkeypatch):
    for o in (AsOnCuda,SumsInHalf,SavesFloat32): monkeypatch.setitem(master._samples, o, master._samples[nn.LayerNorm])

class Saved(torch.autograd.graph.saved_tensors_hooks):
    "Bytes that autograd saves meanwhile, each storage once"
    def __init__(self):
        self.seen = {}
        def _pack(t): self.seen[t.untyped_storage().data_ptr()] = t; return t
        super().__init__(_pack, lambda t: t)
    def __enter__(self): super().__enter__(); return self
    @property
    def bytes(self): return sum(t.untyped_storage().nbytes() for t in self.seen.values())

@pytest.mark.parametrize('half', [f16,bf16])
def test_how_a_norm_is_called(half, norm_kinds):
    "As it is, if that is as good; with rounded weights, if the kernel wants them; never at the price of float16's range, of long sums, or of a float32 copy"
    ways = {o:half_norm(o(8), 'cpu', half) for o in (AsOnCuda,SumsInHalf,SavesFloat32)}
    assert ways=={AsOnCuda:'rounded', SumsInHalf:'float32', SavesFloat32:'float32'}
    assert half_norm(nn.GroupNorm(2,8), 'cpu', half)=='as it is' and half_norm(nn.Linear(8,8), 'cpu', half)=='float32'
    for o in (nn.BatchNorm1d(8),nn.BatchNorm2d(8),nn.InstanceNorm2d(8,track_running_stats=True)): assert half_norm(o, 'cpu', half)!='rounded'

def tower(norm, n=64): return nn.Sequential(nn.Linear(n,n), *[o for _ in range(4) for o in (norm(n),nn.Linear(n,n))])

@each_call
def test_norm_saves_no_copy(call, half, norm_kinds):
    "Of the bytes for the backward pass, two for each number that a norm reads, and four only if a rule says so; and the gradients are as good"
    torch.manual_seed(0)
    net,x = tower(AsOnCuda),torch.randn(2048,64)
    net.double()(x.double()).square().sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.float()
    def run(keep):
        net.zero_grad()
        with MasterWeights(net, half, keep):
            with Saved() as saved: y = net(x)
            (y.square().sum()/1024).backward()
        assert {p.grad.dtype for p in net.parameters()}=={f32}
        return saved.bytes,max(((p.grad*1024-o).norm()/o.norm()).item() for p,o in zip(net.parameters(), want))
    (few,off),(many,ref) = run(is_norm),run({str(i):f'c=f32,o={half}' for i in (1,3,5,7)})
    assert abs(many-few-4*2*x.numel())<4*2048
    assert off<1.5*ref<.1

@each_call
def test_table_of_rounded_norms(call, half, norm_kinds):
    "The table says that the weights are rounded, and the kernel gets them so; the model has its own before and after, trained in float32"
    net = seq(a=nn.Linear(8,16), norm=AsOnCuda(16), b=nn.Linear(16,16), full=seq(c=nn.Linear(16,16), norm=AsOnCuda(16)), head=nn.Linear(16,1))
    learn,inside = getattr(get_learner(net), call)(keep=(is_norm,'full')),[]
    rows = {o.module:o for o in learn.model_to_half.policy()}
    assert rows['norm'][3:]==(f32,half,None,'normalisation, weights rounded for the call') and rows['full.norm'][3:]==(f32,f32,None,'normalisation')
    real,before = dict(net.norm.named_parameters()),net.norm.weight.detach().clone()
    class Watch(Callback):
        def before_step(self): assert net.norm.weight.grad.dtype==f32 and net.norm.weight.grad.any()
    forward = AsOnCuda.forward
    def watched(self, x):
        if self.training: inside.append((self is net.norm, x.dtype, self.weight.dtype, torch.is_autocast_enabled('cpu')))
        return forward(self, x)
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(AsOnCuda, 'forward', watched)
        learn.fit(1, cbs=Watch())
    assert set(inside)=={(True,half,half,False), (False,f32,f32,False)}
    assert all(p is real[n] for n,p in net.norm.named_parameters()) and not torch.equal(net.norm.weight, before)

def test_norm_keeps_float32_input(norm_kinds):
    "What a kept module answers may be out of float16's range"
    net = seq(big=nn.Linear(4,8), norm=AsOnCuda(8), head=nn.Linear(8,1))
    with torch.no_grad(): net.big.weight.mul_(1e6)
    x = torch.randn(5,4)
    ref = net(x)
    with MasterWeights(net, f16, keep=(is_norm,'big')): res = net(x)
    assert torch.allclose(res, ref, atol=1e-2)

def test_interrupted_norm():
    "Between whichever two lines, it has its own weights afterwards"
    norm,x = nn.LayerNorm(8),torch.randn(4,8).bfloat16()
    code,real = rounded_norm_forward.__code__,dict(norm._parameters)
    def interrupted(k):
        n = 0
        def trace(frame, event, arg):
            nonlocal n
            if frame.f_code is not code: return
            n += event=='line'
            if n==k: sys.settrace(None); raise KeyboardInterrupt
            return trace
        before = sys.gettrace()
        sys.settrace(trace)
        try: rounded_norm_forward('cpu', bf16, norm, norm.forward, x)
        except KeyboardInterrupt: return True
        finally: sys.settrace(before)
    ks = [k for k in range(1,20) if (interrupted(k), [norm._parameters[n] is p for n,p in real.items()])==(True,[True,True])]
    assert len(ks)>5 and ks==list(range(1,len(ks)+1)) and not interrupted(len(ks)+1)
    assert not torch.is_autocast_enabled('cpu')

# --- What can't be had

bad = [({'nothing.*':'c=f32'},                 ValueError, r"'nothing.\*' matches no module. The model has image"),
       ({'head':'f16'},                        ValueError, r"'p=f16,c=f16,o=f16'} has torch.float16 parameters.* Use 'p=f32,c=float16'"),
       ({'head':torch.bfloat16},               ValueError, 'has torch.bfloat16 parameters'),
       ({'head':'c=bf16'},                     ValueError, r"computes in torch.bfloat16, but the copies and autocast are float16. Use c=f32 or c=float16"),
       ({'head':Policy(compute_dtype='f64')},  ValueError, 'computes in torch.float64.* Use c=f32'),
       ({'head':'c=f16,o=f64'},                ValueError, 'returns torch.float64.* Use o=f32 or o=float16'),
       ({'head':'c=f32,o=bf16'},               ValueError, 'returns torch.bfloat16.* Use o=f32 or o=float16'),
       ({'head':'compte=f32'},                 ValueError, 'no known part'),
       ({'head':'c=float7'},                   ValueError, 'is not a dtype'),
       ({'head':None},                         ValueError, 'is not a dtype'),
       ({'body.bn':'c=f16'},                   ValueError, r'BatchNorm2d stays float32 \(batch norm\). Leave this rule out'),
       ({'*':'c=f32'},                         ValueError, 'nothing is left'),
       ({nn.Linear:'c=f32'},                   TypeError,  'name patterns for its keys.* Name the module'),
       ([is_norm, {'head':'c=f32'}],           TypeError,  'A dict of rules stands alone')]

@pytest.mark.parametrize('keep,error,match', bad)
def test_refused(keep, error, match):
    "At the call, with what is wrong and a way out; and the learner is as it was"
    for before in ('to_bf16','to_native_bf16','to_fp32'):
        learn = getattr(get_learner(model('conv')), before)()
        was = state(learn)
        with pytest.raises(error, match=match): learn.to_fp16(keep=keep)
        unchanged(learn, was)
    with pytest.raises(error, match=match): MasterWeights(learn.model, f16, keep)
    with pytest.raises(error, match=match): effective_policy(learn.model, f16, keep)
    unchanged(learn, was)

def test_halved_after_the_call():
    "In float16 a gradient that is divided by the scale may become zero, so the fit doesn't begin; without a scale it does"
    learn = get_learner().to_native_fp16()
    learn.model[2].half()
    with pytest.raises(ValueError, match='2.weight is in float16.*model.float'): learn.fit(1)
    learn.model[2].requires_grad_(False)
    learn.mixed_precision.check(learn) # frozen ones have no gradients
    learn.model[2].requires_grad_(True)
    learn.to_native_fp16(enabled=False)
    learn.mixed_precision.check(learn)

def test_what_stays_float32_anyway(monkeypatch):
    "A wide pattern that reaches a batch norm, a parametrization, a recurrent layer in float16 on a CPU: the table says why they don't follow"
    net = seq(rnn=nn.LSTM(8,8,batch_first=True), mean=Mean(), bn=nn.BatchNorm1d(8), lin=nn.utils.parametrizations.orthogonal(nn.Linear(8,8)), head=nn.Linear(8,1))
    why = {o.module:(o.why,o.compute) for o in effective_policy(net, f16, {'*':'c=f16'})}
    assert [why[o] for o in ('rnn','bn','lin.parametrizations.weight')]==[('recurrent, no float16 on a CPU',f32), ('batch norm',f32), ('parametrization',f32)]
    assert why['lin']==why['head']==("rule '*'",f16)
    assert {o.module:o.compute for o in effective_policy(net, bf16, {'*':'c=bf16'})}['rnn']==bf16
    for k in ('rnn','bn','lin.*'):
        with pytest.raises(ValueError, match='stays float32'): effective_policy(net, f16, {k:'c=f16'})
    with monkeypatch.context() as m:
        m.setitem(float32_rnns, ('cpu',bf16), 'as on CUDA')
        assert {o.module:(o.why,o.compute) for o in effective_policy(net, bf16, {'*':'c=bf16'})}['rnn']==('as on CUDA',f32)
    seen,hooks = watch(net)
    with MasterWeights(net, bf16, {'*':'c=bf16'}): net(torch.randn(4,3,8)).sum().backward()
    agrees(effective_policy(net, bf16, {'*':'c=bf16'}), seen, net)

def test_odd_parameters():
    "Only float32 parameters are copied; of the others the table says so"
    net = seq(f64=nn.Linear(2,2).double(), bf16=nn.Linear(2,2).bfloat16(), f32=nn.Linear(2,2))
    net.register_parameter('count', nn.Parameter(torch.tensor([1,2]), requires_grad=False))
    rows = {o.module:o[2:] for o in effective_policy(net, f16)}
    assert rows=={'': (2,torch.int64,None,f32,'only float32 is copied'), 'f64': (6,torch.float64,torch.float64,None,'only float32 is copied'),
                  'bf16': (6,bf16,f16,None,'only float32 is copied'), 'f32': (6,f32,f16,f16,'')}

def test_only_a_layer():
    "A model that is one module has all that stands in for its `forward` taken away again"
    for net,keep in ((nn.LayerNorm(4),()), (nn.LayerNorm(4),{'':'c=bf16'}), (nn.Linear(4,4),{'*':'c=bf16'})):
        with MasterWeights(net, bf16, keep): assert net(torch.ones(2,4)).dtype==f32 and net.weight.dtype==bf16
        assert 'forward' not in vars(net) and net.weight.dtype==f32
        assert [(o.module,o.compute,o.output) for o in effective_policy(net, bf16, keep)]==[('',bf16,f32)]

def test_tied():
    "A weight may be half precision in one place and float32 in another, and gets its gradient from both"
    net = seq(emb=nn.Embedding(6,8), mid=nn.Linear(8,8), out=nn.Linear(8,6,bias=False))
    net.out.weight = net.emb.weight
    ids = torch.tensor([1,2])
    net(ids).pow(2).sum().backward()
    want = net.emb.weight.grad.clone()
    net.zero_grad()
    with MasterWeights(net, bf16, {'out':'c=f32'}):
        assert (net.emb.weight.dtype,net.out.weight.dtype)==(bf16,f32)
        net(ids).pow(2).sum().backward()
    assert (net.emb.weight.grad-want).norm()<.05*want.norm()

def test_random_rules():
    "Whatever the rules: the table is true, gradients are float32 and near those of float32, and the model is as it was"
    rng = random.Random(0)
    def layer(depth):
        if depth and rng.random()<.4: return nn.Sequential(*[layer(depth-1) for _ in range(rng.randint(1,3))])
        return rng.choice([lambda: nn.Linear(8,8), lambda: nn.Linear(8,8), lambda: nn.LayerNorm(8), lambda: nn.BatchNorm1d(8), nn.GELU, lambda: nn.RMSNorm(8)])()
    x,n = numbers()[0],0
    for _ in range(60):
        net = nn.Sequential(nn.Linear(8,8), *[layer(2) for _ in range(3)])
        names = [o for o,_ in net.named_modules()]
        rules = {rng.choice([rng.choice(names), rng.choice(names)+'*', '*', '?', '*.?']): rng.choice(['c=f32','c=bf16','c=f32,o=bf16','c=bf16,o=f32']) for _ in range(rng.randint(1,4))}
        try: table = effective_policy(net, bf16, rules)
        except ValueError as e:
            assert any(o in str(e) for o in ('nothing is left', 'stays float32', 'matches no module'))
            continue
        n += 1
        net(x).sum().backward()
        want,grads = [p.grad.clone() for p in net.parameters()],[]
        net.zero_grad()
        seen,hooks = watch(net)
        with MasterWeights(net, bf16, rules):
            res = net(x)
            res.sum().backward()
        for h in hooks: h.remove()
        agrees(table, seen, net)
        assert res.dtype==f32 and not any('forward' in vars(m) for m in net.modules()) and not torch.is_autocast_enabled('cpu')
        assert all(p.dtype==p.grad.dtype==f32 for p in net.parameters())
        assert (flat([p.grad for p in net.parameters()])-flat(want)).norm()<=.2*flat(want).norm()+1
    assert n>20

# --- Reading it

def test_between_batches():
    "In a batch the model has copies, and the table would be one of those"
    class Ask(Callback):
        order = 0 # before the copies are given back
        def after_pred(self): self.learn.model_to_half.policy()
    learn = get_learner(cbs=Ask()).to_bf16()
    with pytest.raises(RuntimeError, match='Ask for the policy between batches'): learn.fit(1)
    assert len(learn.model_to_half.policy())==4

def test_reads_well():
    table = effective_policy(model('mlp'), f16, {'head':'c=f32'})
    assert repr(table).splitlines()==[
        'module     kind        size  params   compute  output   why',
        '           Sequential     0           float16  float32',
        'body.a     Linear       144  float32  float16  float16',
        'body.norm  LayerNorm     32  float32  float32           normalisation',
        'body.b     Linear       272  float32  float16  float16',
        "head       Linear        17  float32  float32  float32  rule 'head'"]
    html = table._repr_html_()
    assert html.count('<tr>')==len(table)+1 and html.count('<td>')==7*len(table) and '<td>rule &#x27;head&#x27;</td>' in html
    assert list(pd.DataFrame(table).columns)==list(ModulePolicy._fields)
    assert table[1]==('body.a','Linear',144,f32,f16,f16,'')
    assert effective_policy(model('mlp'), 'f16', {'head':'c=f32'})==table

def test_exported(tmp_path):
    "Rules go with the learner into its file"
    learn = get_learner(model('mlp'), path=tmp_path).to_bf16(keep={'head':Policy()})
    learn.fit(1)
    learn.export('x.pkl')
    other = load_learner(tmp_path/'x.pkl')
    assert not any('forward' in vars(m) for m in other.model.modules()) and {p.dtype for p in other.model.parameters()}=={f32}

@pytest.mark.parametrize('half', [f16,bf16])
def test_functional(half):
    "The functions on `torch.func` follow the same rules: the same gradients as with copies that are lent"
    rules = {'body': 'c=f32', 'body.b': f'c={half},o=f32', '*norm': f'c={half}', 'head': f'c={half},o=f32'}
    net,(x,y) = model('mlp'),numbers()
    def loss(net, x): return (net(x)-y).pow(2).mean()
    seen,hooks = watch(net)
    res = value_and_grad(loss, half, keep=rules, copies=True)(net, x)
    for h in hooks: h.remove()
    for n,calls in seen.items(): # parameters are not the module's own here
        if (o := {r.module:r.output for r in effective_policy(net, half, rules)}.get(n)): assert calls[0][2]=={o}, n
    with MasterWeights(net, half, rules): value = loss(net, x); value.backward()
    assert torch.equal(res.value, value.detach())
    assert all(torch.equal(res.grads[n], p.grad) for n,p in net.named_parameters())
    alone = nn.LayerNorm(8)
    value_and_grad(lambda m, x: m(x).pow(2).sum(), half, keep={'':f'c={half}'})(alone, x)
    assert 'forward' not in vars(alone)

# --- Weights that are not a module's own parameters

made = dict(
    spectral_norm  = lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(8,16)), nn.GELU(), nn.Linear(16,1)),
    weight_norm    = lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(8,16)), nn.GELU(), nn.Linear(16,1)),
    spectral_conv  = lambda: nn.Sequential(nn.Unflatten(1, (1,8)), ConvLayer(1, 4, ndim=1, norm_type=NormType.Spectral), nn.Flatten(), nn.Linear(32,1)),
    weight_conv    = lambda: nn.Sequential(nn.Unflatten(1, (1,8)), ConvLayer(1, 4, ndim=1, norm_type=NormType.Weight), nn.Flatten(), nn.Linear(32,1)),
    self_attention = lambda: nn.Sequential(nn.Linear(8,16), nn.Unflatten(1, (8,2)), SelfAttention(8), nn.Flatten(), nn.Linear(16,1)),
    parametrized   = lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8,16)), nn.GELU(), nn.Linear(16,1)),
    pruned         = lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(8,16), 'weight', .5), nn.GELU(), nn.Linear(16,1)),
    max_norm       = lambda: nn.Sequential(Indices(), nn.Embedding(8, 4, max_norm=.1), nn.Flatten(), nn.Linear(32,1)))

class Indices(nn.Module):
    "Numbers to what they are indices of"
    def forward(self, x): return (x*2).long()%8

@pytest.mark.filterwarnings('ignore:.*(weight_norm|spectral_norm).*:FutureWarning')
@pytest.mark.parametrize('kind', made)
@pytest.mark.parametrize('mode', ['fp16','bf16','native_bf16'])
def test_made_weights(mode, kind):
    "A layer whose weight is computed from others, or changed, in the forward pass follows float32"
    def run(mode):
        torch.manual_seed(0)
        learn = get_learner(made[kind](), opt_func=SGD, lr=.05)
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        learn.fit(3)
        return start,learn
    (start,ref),(_,learn) = run(None),run(mode)
    assert apart(learn, ref, start)<.05
    if kind=='max_norm': assert learn.model[1].weight.detach().norm(dim=1).min()<.2 # those that were used have been changed, for good
