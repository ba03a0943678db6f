"""What only a CUDA device can show: its kernels, its memory, and when the host waits for it

Tests marked `results` look at numbers that the device has computed."""
from functools import cache

from learners import *
from mp_callbacks.core.fp8 import fp8_linear,fp8_recipes
from mp_callbacks.core.modules import named_modules
from machines import machine,pretend
from test_policy import norm_errors,norm_of,norms

pytestmark = pytest.mark.cuda
results = pytest.mark.results

@cache
def computes():
    "Does the device compute, or does its driver only answer the calls?"
    return (torch.ones(2, device='cuda')+1).tolist()==[2,2]

@pytest.fixture(autouse=True)
def answers(request):
    """Where nothing is computed, tests of `results` are skipped. The others are told what an H100 can do, which is else
    found out by computing."""
    if not torch.cuda.is_available() or computes(): yield
    elif request.node.get_closest_marker('results'): pytest.skip('needs what a device computes')
    else:
        with pretend(machine('H100')): yield

class Everything(nn.Module):
    "One of each: convolution, batch, group and layer norm, attention, recurrence, a float32 table, a recomputed block"
    def __init__(self, d=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3,d,3,stride=2,padding=1), nn.BatchNorm2d(d), nn.ReLU(),
                                  nn.Conv2d(d,d,3,padding=1), nn.GroupNorm(4,d), nn.GELU())
        self.attn = nn.TransformerEncoderLayer(d, 4, 64, dropout=0., batch_first=True, norm_first=True)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d,64), nn.ReLU(), nn.Linear(64,d))
        self.head = nn.Linear(d, 1)
        self.register_buffer('table', torch.linspace(.5,1.5,d))

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1,2)
        x = self.attn(x*self.table)
        x = self.rnn(x)[0]
        x = x + checkpoint(self.mlp, x, use_reentrant=False)
        return self.head(x.mean(1))

def flattened(*layers): return nn.Sequential(nn.Flatten(), *layers)
def layer_normed(): return flattened(nn.Linear(768,64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64,1))

fused_adamw = partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True))

def get_learner(model=Everything, cbs=None, bs=32, n=256, **kwargs):
    set_seed(1)
    x = torch.randn(n,3,16,16)
    y = x.mean((1,2,3))[:,None]*20
    dls = DataLoaders.from_dsets([*zip(x,y)], [*zip(x,y)], bs=bs, device='cuda', num_workers=0)
    learn = Learner(dls, model(), loss_func=MSELossFlat(), cbs=cbs, **{'lr':3e-3, **kwargs})
    learn.logger,learn.create_mbar = noop,False
    return learn

def healthy(learn):
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32}
    assert not torch.is_autocast_enabled('cuda')
    assert not any('forward' in vars(m) for m in named_modules(learn.model).values())
    assert all(p is q for p,q in zip(learn.model.parameters(), (p for pg in learn.opt.param_lists for p in pg)))

@cache
def float32_loss():
    return fitted(get_learner().to_fp32(), 8).validate()[0]

@results
@pytest.mark.parametrize('mode', calls)
def test_learns_like_float32(mode):
    learn = getattr(get_learner(), mode)()
    first = learn.validate()[0]
    learn.fit(8)
    last = learn.validate()[0]
    healthy(learn)
    assert last<first*.5 and last<float32_loss()*1.5+.02, (first,last,float32_loss())

@results
def test_steps_at_once():
    "All but in the last place, as one by one"
    def _model(): return flattened(nn.Linear(768,33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33,1))
    a,b = [flat(weights(fitted(get_learner(_model, opt_func=o).to_bf16(), 2))) for o in (Adam,one_by_one(Adam))]
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)

@results
@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
@pytest.mark.parametrize('kind,args,shape', norms)
def test_norm_kernels(kind, args, shape, dtype):
    "With half-precision input, and weights as the rules say, they are within rounding of float64"
    row,errors = norm_errors(norm_of(kind, args, dtype).cuda(), shape, dtype)
    assert row.compute!='float32' and all(e<torch.finfo(dtype).eps for e in errors.values()), errors

class CountSyncs(Callback):
    "Syncs in each training batch: with the data on the device, those of fastai and ours"
    def before_fit(self):
        self.counts,own = [],type(self.learn).one_batch
        def one_batch(i, b):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode('warn')
            try:
                with warnings.catch_warnings(record=True) as ws:
                    warnings.simplefilter('always')
                    own(self.learn, i, b)
            finally: torch.cuda.set_sync_debug_mode('default')
            if self.training: self.counts.append(sum('synchronizing CUDA operation' in str(o.message) for o in ws))
        self.learn.one_batch = one_batch
    def after_fit(self): del self.learn.one_batch

def syncs_per_batch(mode, opt={}, cbs=(), **kwargs):
    b = torch.randn(32,3,16,16, device='cuda'),torch.randn(32,1, device='cuda')
    learn = get_learner(cbs=[cb := CountSyncs(),*cbs], **opt)
    getattr(learn, mode)(**kwargs)
    def _dl(batches): return DataLoader(batches, bs=None, num_workers=0, device='cuda')
    learn.dls = DataLoaders(_dl([b]*8), _dl([b]))
    learn.fit(2)
    return cb.counts[-6:]

fused = dict(opt_func=fused_adamw)
low = dict(headroom=None, max_loss_scale=1024.) # no step is skipped, which would wait once more
plain = [('to_fp16',low),('to_bf16',{}),('to_native_fp16',dict(init_scale=1024.)),('to_native_bf16',{})]
searching = [('to_fp16',{}),('to_fp16',dict(clip=1.))] # a scale, which waits once more until a gradient isn't zero
cases = [*[(*o,opt) for o in plain for opt in ({},fused)], ('to_bf16',dict(flat_master=True),{}),
         *[pytest.param(*o, opt, marks=results) for o in searching for opt in ({},fused)]]

@pytest.mark.parametrize('mode,kwargs,opt', cases)
def test_one_host_sync_per_step(mode, kwargs, opt):
    "Ours and fastai's together, as in float32: its Recorder gets the number that the check has read"
    base,ours = syncs_per_batch('to_fp32', opt),syncs_per_batch(mode, opt, **kwargs)
    assert ours==base==[1]*6

@pytest.mark.parametrize('mode', calls)
def test_host_syncs_of_others(mode):
    "`TerminateOnNaNCallback` reads the loss twice, and waits no more; between the batches of a step fastai reads it"
    kwargs = dict(plain)[mode]
    def _syncs(cb): return syncs_per_batch('to_fp32', fused, [cb]),syncs_per_batch(mode, fused, [cb], **kwargs)
    assert _syncs(TerminateOnNaNCallback())==([3]*6,[1]*6)
    assert _syncs(GradientAccumulation(64))==([1]*6,[1]*6)

def recurrent():
    "Two layers, both ways, for rows, each with 3 channels of 16"
    return Does(lambda m, x: m.head(m.rnn(x.transpose(1,2).flatten(2))[0].mean(1)),
                rnn=nn.LSTM(48, 32, 2, batch_first=True, bidirectional=True), head=nn.Linear(64,1))

@pytest.mark.parametrize('mode', calls)
def test_recurrent_layers_compute_in_what_they_should(mode):
    "Autocast makes them float16 whatever it was asked for: beside bfloat16 they are float32"
    learn,seen = ask_nothing(getattr(get_learner(recurrent), mode)()),[] # the measure has a pass in float32, too
    learn.model.rnn.register_forward_hook(lambda m,args,res: seen.append(res[0].dtype))
    learn.fit(1)
    assert {*seen}=={torch.float16 if 'fp16' in mode else torch.float32}

@pytest.mark.parametrize('norm', [nn.LayerNorm,nn.RMSNorm])
def test_norms_keep_what_they_are_given(norm):
    "For the backward pass: of 2 bytes for each number autocast keeps a copy of 4; of an RMSNorm since PyTorch 2.12."
    net,x = nn.Sequential(nn.Linear(64,64), norm(64), nn.Linear(64,64)).cuda(),torch.ones(16, 64, device='cuda')
    def kept(around):
        found = set()
        def pack(t):
            if t.shape==x.shape: found.add(t.dtype)
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, noop), around: net(x)
        return found
    assert kept(unmeasured(net, bf16))=={bf16}
    new = norm is nn.LayerNorm or tuple(map(int, torch.__version__.split('.')[:2]))>=(2,12)
    assert kept(torch.autocast('cuda', bf16))=={bf16,*[f32]*new}

def test_half_saves_memory():
    "A transformer without batch norm: half the activations, and no float32 copies of them"
    def _deep():
        "An image as 128 tokens"
        def _block(): return nn.TransformerEncoderLayer(256, 4, 1024, dropout=0., batch_first=True, norm_first=True)
        tokens,mean = Lambda(lambda x: x[:,None].expand(-1,128,-1)),Lambda(lambda x: x.mean(1))
        return flattened(nn.Linear(768,256), tokens, *[_block() for _ in range(6)], mean, nn.Linear(256,1))
    peak = {}
    for mode in ('to_fp32','to_bf16'):
        learn = getattr(get_learner(_deep, bs=64, n=128), mode)()
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1)
        peak[mode] = torch.cuda.max_memory_allocated()
        del learn
    assert peak['to_bf16']<.8*peak['to_fp32'], peak

class Graphs:
    "In a `with`: how often CUDA's graphs were recorded and replayed"
    def __init__(self, monkeypatch):
        self.recorded = self.replayed = 0
        def _count(cls, method, name):
            f = getattr(cls, method)
            def _f(*args): setattr(self, name, getattr(self, name)+1); return f(*args)
            monkeypatch.setattr(cls, method, _f)
        _count(torch.cuda.graph, '__enter__', 'recorded')
        _count(torch.cuda.CUDAGraph, 'replay', 'replayed')

compile_ways = dict(wrapped=lambda m,**kw: torch.compile(m, **kw), in_place=lambda m,**kw: (m.compile(**kw), m)[1])

@pytest.mark.parametrize('mode', calls)
@pytest.mark.parametrize('way,how', [('wrapped',dict(backend='cudagraphs')), ('in_place',dict(backend='cudagraphs')),
                                     pytest.param('wrapped', dict(mode='reduce-overhead'), marks=results)])
def test_cuda_graphs(way, how, mode, monkeypatch):
    """One graph for training and one for validation, without breaks and recompiles. What CUDA has recorded of the
    forward and the backward pass, casts of weights included, is replayed in every step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seen = Graphs(monkeypatch)
    learn = getattr(get_learner(lambda: compile_ways[way](layer_normed(), **how), opt_func=fused_adamw), mode)()
    learn.fit(2)
    recorded,replayed = seen.recorded,seen.replayed
    learn.fit(2)
    healthy(learn)
    assert seen.recorded==recorded>=2 and seen.replayed-replayed>=2*8*2
    counts = torch._dynamo.utils.counters
    assert counts['stats']['unique_graphs']==2 and not counts['graph_break'] and not counts['recompiles']

@results
@pytest.mark.parametrize('mode', calls)
def test_cuda_graphs_learn_the_same(mode):
    def _loss(**how):
        torch._dynamo.reset()
        model = (lambda: torch.compile(layer_normed(), **how)) if how else layer_normed
        return fitted(getattr(get_learner(model, opt_func=fused_adamw), mode)(), 4).recorder.values[-1][-1]
    want = _loss()
    assert abs(_loss(mode='reduce-overhead')-want)<.1*want

# --- FP8

has_fp8 = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability()>=(8,9)
needs_fp8 = pytest.mark.skipif(not has_fp8, reason='needs a GPU that multiplies in FP8')
each_recipe = pytest.mark.parametrize('recipe', fp8_recipes)

@results
@needs_fp8
@each_recipe
@pytest.mark.parametrize('shape', [(64,128,256), (37,64,48), (17,33,19)])
def test_fp8_kernels(recipe, shape):
    "Nearly the numbers of the emulation: they round to bfloat16, and add up with fewer bits in the forward pass"
    rows,n_in,n_out = shape
    def _products(emulate):
        gen = torch.Generator('cuda').manual_seed(0)
        def _new(*size): return torch.randn(*size, device='cuda', dtype=torch.bfloat16, generator=gen)
        x,weight,grad = _new(rows,n_in).requires_grad_(),_new(n_out,n_in).requires_grad_(),_new(rows,n_out)
        res = fp8_linear(x, weight, None, recipe, emulate)
        res.backward(grad)
        return [t.float() for t in (res,x.grad,weight.grad)]
    for a,b in zip(_products(False), _products(True)): assert (a-b).norm()<=.01*b.norm()

@results
@needs_fp8
@each_recipe
def test_fp8_learns(recipe):
    learn = get_learner().to_fp8(recipe)
    assert (learn.mixed_precision.policy().way=='fp8').sum()==4
    learn.fit(8)
    healthy(learn)
    assert learn.validate()[0]<float32_loss()*1.5+.02
    assert learn.precision_report().error<.3

@needs_fp8
def test_fp8_waits_for_nothing():
    base,ours = syncs_per_batch('to_bf16', fused),syncs_per_batch('to_fp8', fused)
    assert ours==base

@pytest.mark.skipif(has_fp8, reason='this GPU has FP8')
def test_fp8_is_refused():
    with pytest.raises(ValueError, match="doesn't multiply in FP8"): get_learner().to_fp8()

@results
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_replay(mode, tmp_path):
    "A skipped step computes again to the same bits, with the device's random numbers; a file of a CPU does, too"
    def _make(device='cuda'):
        model = flattened(nn.Linear(768,64), nn.BatchNorm1d(64), nn.Dropout(.5), nn.Linear(64,1))
        learn = get_learner(lambda: model)
        learn.dls.to(device)
        return learn
    def _spoil(learn): learn.loss_grad.register_hook(lambda g: g*math.inf)
    learn = modes[mode](_make(), replay=tmp_path)
    learn.fit(1, cbs=Now('before_backward', _spoil, at=3))
    file, = tmp_path.ls()
    set_seed(5)
    for o in (modes[mode](_make()),learn): assert o.replay(file).same
    if mode!='native_bf16': return
    learn = modes[mode](_make('cpu'), replay=tmp_path/'cpu')
    learn.fit(1, cbs=Now('before_backward', _spoil, at=3))
    file, = (tmp_path/'cpu').ls()
    found = modes[mode](_make()).replay(file)
    assert not found.other_tensors and 'device is ' in str(found)
