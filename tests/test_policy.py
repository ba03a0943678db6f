"""`keep`, and the table of what comes of it: each module that is called computes in the way and dtype that it names

Norms compute within rounding of float64, and layers whose weights are computed from others follow float32."""
from fnmatch import fnmatch

from torch.nn.utils import prune
from learners import *
from machines import machine,pretend
from mp_callbacks.core import devices
from mp_callbacks.core.ways import Way,batch_norms,is_norm

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates', 'ignore:enable_nested_tensor')

def attention(n):
    "Adds up, multiplies and has a parameter, outside the layers that it is made of"
    def _forward(m, x):
        q,k,v = m.qkv(m.norm(x)).chunk(3, -1)
        return x+m.gamma*m.out((q@k.transpose(1,2)).softmax(-1)@v)
    return Does(_forward, norm=nn.LayerNorm(n), qkv=nn.Linear(n,3*n), out=nn.Linear(n,n), gamma=torch.ones(n))

def seq(**kwargs): return nn.Sequential(OrderedDict(kwargs))

models = dict(
    mlp         = lambda: seq(body=seq(a=nn.Linear(8,16), norm=nn.LayerNorm(16), act=nn.GELU(), b=nn.Linear(16,16)),
                              head=nn.Linear(16,1)),
    conv        = lambda: seq(image=nn.Unflatten(1, (1,2,4)),
                              body=seq(conv=nn.Conv2d(1,4,3,padding=1,bias=False), bn=nn.BatchNorm2d(4), act=nn.ReLU(),
                                       conv2=nn.Conv2d(4,4,1)),
                              flat=nn.Flatten(), head=nn.Linear(32,1)),
    transformer = lambda: seq(tok=Does(lambda m,x: (x*3).long().clamp(-4,3)+4), emb=nn.Embedding(8,16),
                              own=attention(16), layer=nn.TransformerEncoderLayer(16, 2, 16, 0., batch_first=True),
                              mean=Does(lambda m,x: x.mean(1)), head=nn.Linear(16,1)))

def model(name):
    torch.manual_seed(3)
    return models[name]()

def floats(o):
    "Floating tensors in `o`"
    return [t for t in leaves(o) if isinstance(t, Tensor) and t.is_floating_point()]

@contextmanager
def watched(model):
    "Name -> what each call of that module was given and returned"
    seen = {}
    def note(n, m, args, out): seen.setdefault(n, []).append((floats(args),floats(out)))
    hooks = [m.register_forward_hook(partial(note, n)) for n,m in model.named_modules()]
    yield seen
    for o in hooks: o.remove()

def policy(net, half, keep=()): return half_precision(net, half, keep).policy()
def computes(net, half, keep=()): return policy(net, half, keep).set_index('module').compute.to_dict()
def short(dtype): return str(dtype).removeprefix('torch.')

def agrees(table, seen, net, half):
    "Is what the `table` says what has been `seen`?"
    rows,mods = table.set_index('module'),dict(net.named_modules())
    def rounded(o): return torch.equal(o, o.to(half).to(o.dtype))
    assert rows.index.is_unique and [*rows.index]==[n for n in mods if n in rows.index]
    assert {n for n,m in mods.items() if any(True for _ in m.parameters(recurse=False))}<={*rows.index}
    for n,r in rows.iterrows():
        m = mods[n]
        assert (r['kind'],r['size'])==(type(m).__name__,sum(p.numel() for p in m.parameters(recurse=False)))
        for given,out in seen.get(n, []):
            dtypes = {o.dtype for o in out}
            if r['way']=='float32': assert dtypes<={f32} and not (r['size'] and any(map(rounded, out))), n
            elif is_norm(n, m): assert dtypes=={o.dtype for o in given}, n
            else: assert all(map(rounded, out)), n # inside a module that is kept they are float32

all_rules = dict( # a dict has None for half precision
    default = (),
    body    = (nn.LayerNorm,is_norm,'body*','own','layer'),
    half    = {'*':None},
    islands = {'*':'f32', '*.a':None, '*.conv2':None, '*qkv':None, '*.linear1':None, 'emb':None, 'head':None})
some = [('to_bf16',bf16,k) for k in all_rules]+[('to_fp16',f16,'islands')]

@pytest.mark.parametrize('name', models)
@pytest.mark.parametrize('call,half,keep', some)
def test_table_is_true(name, call, half, keep):
    """What every module returns is what the table has said before, and says after

    In training and validation, in predictions, and in inference mode."""
    keep,net = all_rules[keep],model(name)
    names = [n for n,_ in net.named_modules()]
    fitting = [k for k in keep if not isinstance(k, str) or any(fnmatch(n, k) for n in names)]
    keep = {k:keep[k] or half for k in fitting} if isinstance(keep, dict) else fitting
    learn = ask_nothing(getattr(get_learner(net), call)(keep=keep))
    table = learn.mixed_precision.policy()
    def predict():
        with learn.mixed_precision.half, torch.inference_mode(): return net(numbers()[0])
    for call in (lambda: learn.fit(1), lambda: learn.get_preds(reorder=False), predict):
        with watched(net) as seen: call()
        assert seen.keys()>={*names}-{'layer.self_attn.out_proj'} # used without being called
        agrees(table, seen, net, half)
    assert torch.equal(predict(), learn.get_preds(reorder=False)[0])
    assert learn.mixed_precision.policy().equals(table)
    assert_plain(net)

def test_reads_well():
    "One of each"
    net = seq(emb=nn.Embedding(9,16), ids=nn.Embedding(9,8), own=attention(8), bn=nn.BatchNorm1d(8), rms=nn.RMSNorm(8),
              mine=sums_in_half('T5Norm'), rnn=nn.LSTM(8,8), act=nn.GELU(), head=nn.Linear(8,1))
    with pretend(machine('AVX2')): table = policy(net, 'bf16', {'head':'f32'})
    assert [*table.columns]==['module','kind','size','params','way','compute','why']
    layer = 'layer','bfloat16','cast with all others'
    assert [*table.itertuples(index=False, name=None)]==[
        ('emb',      'Embedding',   144,'float32', 'lookup',      'bfloat16','rows are rounded'),
        ('ids',      'Embedding',   72, 'float32', 'float32',     'float32', 'rows of fewer than 16 numbers'),
        ('own',      'Does',        8,  'float32', 'own parameters','bfloat16','rounded where they meet activations'),
        ('own.norm', 'LayerNorm',   16, 'float32', 'float32 norm','float32', 'CPU kernel is inexact'),
        ('own.qkv',  'Linear',      216,'float32', *layer),
        ('own.out',  'Linear',      72, 'float32', *layer),
        ('bn',       'BatchNorm1d', 16, 'float32', 'autocast',    'bfloat16','kernel takes float32 weights'),
        ('rms',      'RMSNorm',     8,  'float32', 'norm',        'bfloat16','kernel adds up in float32'),
        ('mine',     'T5Norm',      8,  'float32', 'float32 norm','float32', 'a norm with a forward of its own'),
        ('rnn',      'LSTM',        576,'float32', 'float32',     'float32', 'no bfloat16 LSTM on this CPU'),
        ('head',     'Linear',      9,  'float32', 'float32',     'float32', 'keep')]

def test_rule_is_keep():
    "A rule with float32 is the same as a name, to the bit; the last rule decides"
    names,rules = ('body.norm','head'),{'body.norm':'f32', 'head':f32}
    a,b = (fitted(get_learner(model('mlp')).to_bf16(keep=o)) for o in (names, rules))
    assert same_weights(a, b)
    table = a.mixed_precision.policy()
    assert table.equals(b.mixed_precision.policy()) and table.why.to_list()==['cast with all others','keep']*2
    def dtypes(keep): return computes(model('mlp'), bf16, keep)
    assert dtypes({'body':'f32', 'body.b':'bf16'})['body.b']=='bfloat16'
    assert dtypes({'body.b':'bf16', 'body':'f32'})['body.b']=='float32'
    assert dtypes({'*':'bf16', 'body.norm':'f32'})['body.norm']=='float32'
    assert dtypes({'body':'bf16'})==dict.fromkeys(['body.a','body.norm','body.b','head'], 'bfloat16')
    assert dtypes({})==dtypes(())

def test_refused():
    "With what is wrong and a way out; what is no name of modules is in the cells of the notebook"
    with pytest.raises(ValueError, match='nothing is left.*Keep less'): half_precision(model('conv'), f16, '*')

@pytest.mark.parametrize('half', [f16,bf16])
def test_what_stays_float32_anyway(half):
    "A wide pattern that reaches a parametrization, or a layer without a kernel: the table says why they don't follow"
    net = seq(rnn=nn.LSTM(8,8), bn=nn.BatchNorm1d(8),
              lin=nn.utils.parametrizations.orthogonal(nn.Linear(8,8)), head=nn.Linear(8,1))
    def rows(): return {r.module:(r.why,r.compute) for r in policy(net, half, {'*':str(half)}).itertuples()}
    with pretend(machine('AVX2')): assert rows()['rnn']==(f'no {short(half)} LSTM on this CPU','float32')
    with pretend(machine('AVX512-BF16')): # here autocast casts, if the device can
        assert rows()['rnn'][1]==('bfloat16' if half==bf16 else 'float32')
    assert rows()['lin.parametrizations.weight']==('parametrization','float32')
    assert rows()['bn']==('kernel takes float32 weights',short(half)) and rows()['head'][1]==short(half)

@pytest.mark.parametrize('make', [lambda: nn.LayerNorm(4), lambda: nn.Linear(4,4), lambda: nn.LSTM(4,4)])
def test_only_a_layer(make):
    "A model that is one module returns float32, and is as it was afterwards"
    net = make()
    with half_precision(net, bf16): res = net(torch.ones(2,4))
    assert {o.dtype for o in floats(res)}=={f32} and 'forward' not in vars(net)
    assert policy(net, bf16).module.to_list()==['']

norms = [(nn.BatchNorm2d,(16,),(32,16,8,8)), (nn.InstanceNorm2d,(16,1e-5,.1,True,True),(32,16,8,8)),
         (nn.GroupNorm,(4,16),(32,16,8,8)), (nn.RMSNorm,(64,),(4096,64)), (nn.LayerNorm,(64,),(4096,64)),
         ('timm.layers.LayerNorm',(64,),(4096,64)), ('timm.layers.LayerNorm2d',(16,),(32,16,8,8)),
         ('timm.layers.GroupNorm',(16,4),(32,16,8,8)), ('timm.layers.GroupNorm1',(16,),(32,16,8,8)),
         ('timm.layers.RmsNorm',(64,),(4096,64)), ('timm.layers.RmsNorm2d',(16,),(32,16,8,8)),
         ('torchvision.models.convnext.LayerNorm2d',(16,),(32,16,8,8))]

def norm_of(kind, args, half):
    "A norm, whose class may be a name, with weights that half precision holds"
    if isinstance(kind, str):
        module,_,name = kind.rpartition('.')
        kind = getattr(pytest.importorskip(module), name)
    norm = kind(*args)
    with torch.no_grad():
        for p in norm.parameters(): p.copy_((torch.rand_like(p)+.5).to(half))
    return norm

def norm_errors(norm, shape, half):
    "Its row of the table, and name -> difference to float64, relative to its norm, of output and gradients"
    device,saved = next(norm.parameters()).device,[]
    x,grad = (torch.randn(shape)*20+1).to(device, half),torch.randn(shape).to(device, half)
    x[::2] *= 2**-10 # so small that what is added to the variance counts
    exact,net,y = deepcopy(norm).double(),seq(before=nn.Identity(), norm=deepcopy(norm)),x.double().requires_grad_()
    seen = returned(net.norm)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype,t.numel())) or t, noop)
    with unmeasured(net, half) as o:
        with keep: net(x.requires_grad_())
        seen[0].backward(grad)
    composite = isinstance(norm, nn.RMSNorm) or type(norm).__name__.startswith('Rms') # as PyTorch has it on a CPU
    assert (f32,x.numel()) not in saved or composite or o.policy().way[0]=='float32 norm'
    assert seen[0].dtype==half and {p.grad.dtype for p in net.parameters()}=={f32}
    exact(y).backward(grad.double())
    def results(norm, x, out): return dict(output=out, input=x.grad, **{n:p.grad for n,p in norm.named_parameters()})
    got,want = results(net.norm, x, seen[0]),results(exact, y, exact(y))
    return o.policy().iloc[0],{k:((got[k].double()-o).norm()/o.norm()).item() for k,o in want.items()}

@pytest.mark.parametrize('half', [f16,bf16])
@pytest.mark.parametrize('kind,args,shape', norms)
def test_norms(kind, args, shape, half, monkeypatch):
    "With half-precision input they are within rounding of float64, by the way that is best for their kernel"
    norm,eps = norm_of(kind, args, half),torch.finfo(half).eps
    layer = isinstance(norm, nn.LayerNorm)
    row,errors = norm_errors(norm, shape, half)
    assert all(e<eps/2 for e in errors.values()), errors
    assert row.way==('float32 norm' if layer else 'autocast' if isinstance(norm, batch_norms) else 'norm')
    if not layer: return
    monkeypatch.setattr(devices, 'inexact_kernels', {}) # as on CUDA
    row,errors = norm_errors(norm, shape, half)
    assert row.way=='norm' and errors['output']<eps/2 and errors['input']<eps/2
    assert max(errors['weight'], errors['bias'])>4*eps, 'LayerNorm could compute in half precision on a CPU, too'

@pytest.mark.parametrize('dtype', [f32,f16])
def test_norm_half_before(dtype):
    "Its parameters, in bfloat16 before, meet an input in the dtype that it has"
    norm,x = norm_of(nn.LayerNorm, (16,), bf16).bfloat16(),torch.randn(4,16).to(dtype)
    net = seq(norm=norm, lin=nn.Linear(16,1))
    seen,want = returned(net.norm),F.layer_norm(x, (16,), *[p.to(dtype) for p in norm.parameters()])
    with unmeasured(net, bf16), torch.no_grad(): net(x)
    assert seen[0].dtype==dtype and seen[0].equal(want)

def sums_in_half(name):
    "A norm of eight numbers, as people write it, without float32"
    def _norm(m, x): return x*(x.pow(2).mean(-1, keepdim=True)+1e-6).rsqrt()*m.weight
    return type(name, (Does,), {})(_norm, weight=torch.ones(8))

norm_names = 'T5Norm LlamaRMSNorm Norm GroupNorm32 LayerNorm2d ActNorm BatchRenorm PreNorm NodeNorm'.split()

@pytest.mark.parametrize('name,big', [('Scaler',False), *((o,True) for o in norm_names)])
def test_norms_by_name(name, big):
    """A module that is named like a norm computes in float32, so that its squares don't overflow; its output has the
    dtype of its input"""
    net = seq(a=nn.Linear(8,8), norm=sums_in_half(name), head=nn.Linear(8,1))
    with torch.no_grad(): net.a.weight.mul_(1000)
    seen = returned(net.norm)
    with unmeasured(net, f16): net(torch.randn(4,8)).sum().backward()
    assert seen[0].dtype==f16 and is_norm('norm', net.norm)==big
    assert (computes(net, f16)['norm']=='float32')==big and (seen[0].abs().mean()>.5)==big

@pytest.mark.parametrize('norm,way', [(sums_in_half('T5Norm'),'autocast'), (nn.LayerNorm(8),'norm')])
def test_norms_kept_in_half_precision(norm, way):
    "By a kernel of PyTorch's if there is one, which may be inexact; else as autocast decides"
    net = seq(a=nn.Linear(8,8), norm=norm, head=nn.Linear(8,1))
    rows = [half_precision(net, bf16, keep).policy().set_index('module').loc['norm'] for keep in ((), dict(norm=bf16))]
    assert rows[0].way=='float32 norm' and [*rows[1][['way','why']]]==[way,'keep']

@pytest.mark.parametrize('norm', [nn.LayerNorm(8),nn.GroupNorm(2,8),nn.RMSNorm(8),nn.BatchNorm1d(8)])
def test_norm_keeps_float32_input(norm):
    "What a kept module returns may be out of float16's range"
    net = seq(big=nn.Linear(4,8), norm=norm, head=nn.Linear(8,1))
    with torch.no_grad(): net.big.weight.mul_(1e6)
    x = torch.randn(5,4)
    ref = net(x)
    with half_precision(net, f16, keep='big'): res = net(x)
    assert torch.allclose(res, ref, atol=1e-2)

def with_head(layer): return nn.Sequential(layer, nn.GELU(), nn.Linear(16,1))

made = dict(
    spectral_norm  = lambda: with_head(torch.nn.utils.spectral_norm(nn.Linear(8,16))),
    weight_norm    = lambda: with_head(torch.nn.utils.weight_norm(nn.Linear(8,16))),
    self_attention = lambda: nn.Sequential(nn.Linear(8,16), nn.Unflatten(1, (8,2)), SelfAttention(8), nn.Flatten(),
                                           nn.Linear(16,1)),
    parametrized   = lambda: with_head(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8,16))),
    pruned         = lambda: with_head(prune.l1_unstructured(nn.Linear(8,16), 'weight', .5)),
    max_norm       = lambda: nn.Sequential(Does(lambda m,x: (x*2).long()%8), nn.Embedding(8, 4, max_norm=.1),
                                           nn.Flatten(), nn.Linear(32,1)))

@pytest.mark.filterwarnings('ignore:.*(weight_norm|spectral_norm).*:FutureWarning')
@pytest.mark.parametrize('mode,kind', crossed(['fp16','bf16','native_bf16'], made, fast=lambda mode,_: mode=='bf16'))
def test_made_weights(mode, kind):
    "A layer whose weight is computed from others, or changed, in the forward pass follows float32"
    def run(mode):
        torch.manual_seed(0)
        learn = in_mode(mode, made[kind](), opt_func=SGD, lr=.05)
        return way(learn, 2),learn
    (want,_),(got,learn) = run(None),run(mode)
    assert (got-want).norm()<.05*want.norm()
    if kind=='max_norm': assert learn.model[1].weight.detach().norm(dim=1).min()<.2 # those used have changed for good

class Rounded(Way):
    "A way of one's own"
    name,calls = 'rounded',0
    def around(self, half, module, forward, args, kwargs):
        self.calls += 1
        return forward(*args, **kwargs)

@pytest.mark.parametrize('call', ['to_fp16','to_bf16'])
def test_way_of_ones_own(call):
    "One argument of the calls; the table and the report know it, and so does a copy"
    way = Rounded('mine')
    learn = getattr(get_learner(), call)(way=lambda name, m: way if isinstance(m, nn.GELU) else None)
    fitted(ask_nothing(learn))
    assert way.calls==2*2*4 # two activations, in training and validation
    table = learn.mixed_precision.policy()
    assert list(table.way).count('rounded')==2 and {*table.why[table.way=='rounded']}=={'mine'}
    learn.precision_report(batches=1)
    learn.mixed_precision.half.keeping(['0'])
    assert way.calls>16
