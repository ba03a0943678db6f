"What only a CUDA device can show: its kernels, its memory, and when the host waits for it"
import gc,warnings
from contextlib import contextmanager
from functools import cache,partial

import pytest
import torch
from fastai.basics import DataLoader,DataLoaders,Learner,MSELossFlat,load_learner,noop,set_seed
from fastai.callback.core import Callback
from fastai.optimizer import Adam,OptimWrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_callbacks.all import *
from mp_callbacks.master import ForwardWrapper,half_norm,norm_modules

pytestmark = pytest.mark.cuda
modes = 'to_fp16 to_bf16 to_native_fp16 to_native_bf16'.split()
halves = [torch.float16,torch.bfloat16]

class Everything(nn.Module):
    "One of each: convolution, batch, group and layer norm, attention, recurrence, a float32 table, a recomputed block"
    def __init__(self, d=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3,d,3,stride=2,padding=1), nn.BatchNorm2d(d), nn.ReLU(), nn.Conv2d(d,d,3,padding=1), nn.GroupNorm(4,d), nn.GELU())
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

class Pairs(list):
    def new_empty(self): return Pairs() # `export` leaves the data behind

def get_learner(model=None, cbs=None, bs=32, n=256, **kwargs):
    set_seed(1)
    x = torch.randn(n,3,16,16)
    y = x.mean((1,2,3))[:,None]*20
    dls = DataLoaders.from_dsets(Pairs(zip(x,y)), Pairs(zip(x,y)), bs=bs, device='cuda', num_workers=0)
    learn = Learner(dls, (Everything if model is None else model)(), loss_func=MSELossFlat(), lr=3e-3, cbs=cbs, **kwargs)
    learn.logger,learn.create_mbar = noop,False
    return learn

def healthy(learn):
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32}
    assert not torch.is_autocast_enabled('cuda') and not any(isinstance(vars(m).get('forward'), ForwardWrapper) for m in learn.model.modules())
    assert all(p is q for p,q in zip(learn.model.parameters(), (p for pg in learn.opt.param_lists for p in pg)))

@cache
def float32_loss():
    learn = get_learner().to_fp32()
    learn.fit(8)
    return learn.validate()[0]

@pytest.mark.parametrize('mode', modes)
def test_learns_like_float32(mode):
    learn = getattr(get_learner(), mode)()
    first = learn.validate()[0]
    learn.fit(8)
    last = learn.validate()[0]
    healthy(learn)
    assert last<first*.5 and last<float32_loss()*1.5+.02, (first,last,float32_loss())

@pytest.mark.parametrize('flat', [False,True])
def test_flat_is_exact(flat, tmp_path):
    def weights(flat):
        learn = get_learner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768,33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33,1))).to_bf16(flat_master=flat)
        learn.fit(2)
        return torch.cat([p.detach().flatten() for p in learn.model.parameters()])
    assert torch.equal(weights(flat), weights(False))

@pytest.mark.parametrize('dtype', halves)
@pytest.mark.parametrize('kind', norm_modules)
def test_half_input_meets_float32_norm(kind, dtype):
    "Whether the kernel takes it or the wrapper does, and the result is right either way"
    args = {nn.GroupNorm:(4,16), nn.LayerNorm:(16,), nn.RMSNorm:(16,), nn.LocalResponseNorm:(2,)}.get(kind, (16,))
    shape = (8,16) if kind in (nn.LayerNorm,nn.RMSNorm,nn.BatchNorm1d) else (8,16,4) if kind is nn.InstanceNorm1d else (8,16,4,4,4) if '3d' in kind.__name__ else (8,16,4,4)
    torch.manual_seed(0)
    m,x = nn.Sequential(nn.Identity(), kind(*args)).cuda(),torch.randn(shape, device='cuda')
    m.append(nn.Linear(1,1).cuda()) # something to lend
    norm = m[1]
    seen = []
    norm.register_forward_hook(lambda m,i,o: seen.append(o))
    ref = norm(x)
    with MasterWeights(nn.ModuleList(m), dtype) as w:
        res = norm(x.to(dtype).requires_grad_())
        res.float().sum().backward()
    assert res.dtype==dtype
    torch.testing.assert_close(res.float(), ref, atol=5e-2, rtol=5e-2)
    assert all(p.dtype==p.grad.dtype==torch.float32 for p in norm.parameters())

class Saved(torch.autograd.graph.saved_tensors_hooks):
    "The dtypes of the tensors that autograd saves meanwhile, and how many numbers they have"
    def __init__(self):
        self.seen = []
        super().__init__(lambda t: (self.seen.append((t.dtype,t.numel())), t)[1], lambda t: t)
    def __enter__(self): super().__enter__(); return self

half_kinds = [nn.LayerNorm,nn.GroupNorm]+[nn.RMSNorm]*hasattr(torch.ops.aten, '_fused_rms_norm') # before, an RMS norm was composed of other operations

@pytest.mark.parametrize('dtype', halves)
@pytest.mark.parametrize('kind', half_kinds)
def test_norm_saves_no_float32_copy(kind, dtype):
    "A layer, group or RMS norm adds up in float32 whatever it reads, so it reads half precision; weights are real, and so are their gradients, without a loss of range or of long sums"
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Linear(64,64), kind(*((4,64) if kind is nn.GroupNorm else (64,))), nn.Linear(64,64)).cuda(),torch.randn(8192,64, device='cuda')*20
    assert half_norm(net[1], 'cuda', dtype)=='rounded' and half_norm(nn.BatchNorm1d(64), 'cuda', dtype)=='as it is'
    net.double()(x.double()).mean().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.float().zero_grad()
    real = dict(net[1]._parameters)
    with MasterWeights(net, dtype):
        with Saved() as saved: y = net(x)
        (y.mean()*2.**10).backward()
    assert not [o for o in saved.seen if o[0]==torch.float32 and o[1]>=x.numel()]
    assert all(net[1]._parameters[n] is p and p.grad.dtype==torch.float32 for n,p in real.items())
    for p,o in zip(net.parameters(), want): assert (p.grad/2**10-o).norm()<.05*o.norm()
    net.zero_grad()
    with MasterWeights(net, dtype, {'1':f'c=f32,o={dtype}'}):
        with Saved() as saved: net(x)
    assert [o for o in saved.seen if o[0]==torch.float32 and o[1]>=x.numel()] # the other way

@pytest.mark.parametrize('dtype', halves)
@pytest.mark.parametrize('kind', half_kinds)
def test_small_numbers_in_a_norm(kind, dtype):
    "What is added to the variance is as small as in float32"
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Identity(), kind(*((4,64) if kind is nn.GroupNorm else (64,))), nn.Linear(64,64)).cuda(),torch.randn(64,64, device='cuda')*.03
    seen = []
    net[1].register_forward_hook(lambda m,i,o: seen.append(o.detach().double()))
    x = x.to(dtype)
    net[1].double()(x.double())
    net.float()
    with MasterWeights(net, dtype): net(x)
    assert (seen[1]-seen[0]).norm()<torch.finfo(dtype).eps*seen[0].norm()

def test_norm_keeps_float32_input():
    net = nn.Sequential(nn.Linear(4,8), nn.LayerNorm(8), nn.Linear(8,1)).cuda()
    with torch.no_grad(): net[0].weight.mul_(1e6)
    x = torch.randn(5,4, device='cuda')
    ref = net(x)
    with MasterWeights(net, torch.float16, keep=(nn.LayerNorm,'0')): res = net(x)
    torch.testing.assert_close(res, ref, atol=1e-2, rtol=1e-2)

@contextmanager
def counting_syncs():
    res = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('warn')
    try:
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            yield res
            res += [str(w.message) for w in ws if 'synchronizing CUDA operation' in str(w.message)]
    finally: torch.cuda.set_sync_debug_mode('default')

@pytest.mark.parametrize('clip', [None,1.])
def test_prepare_grads_waits_once(clip):
    ps = [nn.Parameter(torch.randn(10, device='cuda', dtype=d)) for d in (torch.float32,torch.float16,torch.float32,torch.bfloat16)]
    for p in ps: p.grad = torch.ones_like(p)
    with counting_syncs() as syncs: prepare_grads(ps, 2., clip)
    assert len(syncs)==1

def late_and_read(mode, n=3, **kwargs):
    "What was recorded with the loss on the device, and without"
    res = []
    for late in (True,False):
        learn = getattr(get_learner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.ReLU(), nn.Linear(8,1)), **kwargs), mode)(loss_on_device=late)
        learn.fit(n)
        o = learn.recorder
        res.append(([x.item() for x in o.losses],[list(x) for x in o.values],o.iters,learn.smooth_loss.item()))
        assert type(o).__name__=='Recorder' and {x.device.type for x in o.losses}=={'cpu'}
    return res

@pytest.mark.parametrize('every', [0.,.2])
@pytest.mark.parametrize('mode', modes)
def test_late_loss_is_the_same(mode, every, monkeypatch):
    "To the last bit, with copies that come while the device works"
    monkeypatch.setattr(LateNumbers, 'every', every)
    late,read = late_and_read(mode)
    assert late==read

def test_late_numbers_come():
    late,x = LateNumbers(),torch.arange(10., device='cuda')
    late.every = 0.
    with counting_syncs() as syncs:
        for i in range(10): late.put(x[i], i); late.poll()
        for _ in range(2000):
            late.poll()
            if not late.waiting: break
            x.sum()
    assert not syncs
    late.wait()
    assert [(o.item(),i) for o,i in late.ready]==[(i,i) for i in range(10)]

def test_late_numbers_are_pinned_and_not_early():
    "What isn't there yet isn't taken"
    late,x = LateNumbers(),torch.ones((), device='cuda')
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9) # cycles: half a second
    late.put(x*2)
    late.poll()
    assert late._copy[0].is_pinned()
    late.poll()
    assert not late.ready and len(late.waiting)==1
    torch.cuda.synchronize()
    late.poll()
    assert late.ready[0][0].item()==2

@pytest.mark.parametrize('mode', modes)
def test_recorder_does_not_wait(mode):
    "In a whole fit with a progress bar, its record and the bar wait for their first number and at the end of an epoch"
    b = torch.randn(32,3,16,16, device='cuda'),torch.randn(32,1, device='cuda')
    learn = getattr(get_learner(), mode)()
    learn.dls = DataLoaders(DataLoader([b]*16, bs=None, num_workers=0, device='cuda'), DataLoader([b]*4, bs=None, num_workers=0, device='cuda'))
    learn.fit(1)
    with SyncAuditor() as audit: learn.fit(2)
    theirs = [o for o in audit.syncs if o.callback.endswith(('Recorder','Progress','ProgressCallback')) and o.callback!='PrecisionRecorder']
    assert len(theirs)<=1+2*3, audit

class CountSyncs(LeanCallback):
    "Syncs in each training batch: with the data on the device, those of fastai and ours"
    order = -200
    def before_fit(self): self.counts = []
    @contextmanager
    def during_batch(self):
        with counting_syncs() as syncs: yield
        if self.training: self.counts.append(len(syncs))

def syncs_per_batch(mode, opt={}, **kwargs):
    b = torch.randn(32,3,16,16, device='cuda'),torch.randn(32,1, device='cuda')
    learn = get_learner(cbs=(cb := CountSyncs()), **opt)
    getattr(learn, mode)(**kwargs)
    learn.dls = DataLoaders(DataLoader([b]*8, bs=None, num_workers=0, device='cuda'), DataLoader([b], bs=None, num_workers=0, device='cuda'))
    learn.fit(2)
    return cb.counts[-6:]

@pytest.mark.parametrize('mode,kwargs', [(m,{}) for m in modes]+[('to_fp16',dict(clip=1.)),('to_bf16',dict(flat_master=True))])
def test_one_host_sync_per_step(mode, kwargs):
    base,ours = syncs_per_batch('to_fp32'),syncs_per_batch(mode, loss_on_device=False, **kwargs)
    assert all(o-b<=1 for o,b in zip(ours,base)), (ours,base) # fastai's Recorder moves the loss
    late = syncs_per_batch(mode, **kwargs)
    assert all(o<=1 for o in late[:-1]), late # the last of an epoch waits for the losses

@pytest.mark.parametrize('mode,kwargs', [(m,{}) for m in modes if m!='to_fp16']+[('to_fp16',dict(headroom=None, max_loss_scale=2.**10)),('to_bf16',dict(clip=1.))])
def test_no_host_sync_with_a_fused_optimizer(mode, kwargs):
    fused = dict(opt_func=lambda ps,**kw: OptimWrapper(ps, torch.optim.Adam, fused=True, **kw))
    base,ours = syncs_per_batch('to_fp32', fused),syncs_per_batch(mode, fused, loss_on_device=False, **kwargs)
    assert ours==base, (ours,base)
    late = syncs_per_batch(mode, fused, **kwargs)
    assert late[:-1]==[0]*5 and late[-1]<=1, late # nobody waits, but in the last batch of an epoch for the losses

@pytest.mark.parametrize('mode', modes)
def test_late_is_the_same(mode):
    "To the bit, with steps that are skipped"
    class Spoil(Callback):
        order = -50
        def after_loss(self):
            if self.training and self.train_iter in (3,4,9): self.learn.loss_grad = self.learn.loss_grad*float('inf')
    res = []
    for may in (False,True):
        learn = getattr(get_learner(cbs=Spoil(), opt_func=lambda ps,**kw: OptimWrapper(ps, torch.optim.Adam, fused=True, **kw)), mode)()
        learn.mixed_precision.may_be_late = may
        with torch.backends.cudnn.flags(enabled=True, deterministic=True): learn.fit(2) # it would be disabled otherwise
        res.append(learn)
    a,b = res
    assert a.precision_recorder.log.equals(b.precision_recorder.log)
    assert all(map(torch.equal, a.model.state_dict().values(), b.model.state_dict().values()))

def test_auditor_hears_the_debug_mode():
    x = torch.randn(8, device='cuda', requires_grad=True)
    y = (x*2).sum()
    y.register_hook(lambda g: None if g.item()>0 else g) # in a thread of its own
    before = torch.cuda.get_sync_debug_mode()
    with SyncAuditor() as audit:
        for f in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x.detach().nonzero(), lambda: x.detach()[x.detach()>0], y.backward, lambda: x.detach()+1, lambda: x.detach()[1:].exp()):
            audit.step()
            f()
    assert [n>0 for n in audit.by_step('step')]==[True]*5+[False]*2, audit
    assert [audit.syncs[0].op,audit.syncs[0].seen,audit.syncs[0].function]==['aten._local_scalar_dense','both','<lambda>']
    assert {o.file for o in audit.syncs}=={__file__}
    assert torch.cuda.get_sync_debug_mode()==before

@pytest.mark.parametrize('mode', modes)
def test_auditor_names_the_one_sync_of_ours(mode):
    class Steps(LeanCallback):
        order = -200
        @contextmanager
        def during_batch(self):
            audit.step('train' if self.training else 'valid')
            yield
            audit.step('between')
    learn = getattr(get_learner(), mode)()
    learn.fit(1) # what norms compute in has been tried out then
    learn.add_cb(Steps())
    with SyncAuditor() as audit: learn.fit(1)
    ours = [o for o in audit.syncs if o.name=='train' and o.callback in ('ModelToHalf','MixedPrecision','NativeMixedPrecision','PrecisionRecorder')]
    assert {o.function for o in ours}<={'tensor_norms','norms'} and len(ours)<=audit.names.count('train'), audit

@pytest.mark.parametrize('mode', modes)
def test_out_of_memory_in_the_forward(mode):
    class Greedy(Callback):
        def after_pred(self):
            if self.training and self.train_iter==2: torch.empty(1<<50, device='cuda')
    learn = getattr(get_learner(cbs=Greedy()), mode)()
    with pytest.raises(torch.OutOfMemoryError): learn.fit(1)
    healthy(learn)
    learn.remove_cb(Greedy)
    learn.fit(1)
    healthy(learn)

@pytest.mark.parametrize('mode', modes)
def test_save_load_export_predict(mode, tmp_path):
    learn = getattr(get_learner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.BatchNorm1d(8), nn.Linear(8,1)), path=tmp_path), mode)()
    learn.fit(2)
    learn.save('a')
    before = learn.get_preds()[0]
    other = getattr(get_learner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.BatchNorm1d(8), nn.Linear(8,1)), path=tmp_path), mode)().load('a')
    torch.testing.assert_close(other.get_preds()[0], before)
    assert other.mixed_precision.precision_state()==learn.mixed_precision.precision_state()
    learn.export('e.pkl')
    cpu = load_learner(tmp_path/'e.pkl')
    assert next(cpu.model.parameters()).device.type=='cpu' and {p.dtype for p in cpu.model.parameters()}=={torch.float32}

class Recurrent(nn.Module):
    "Two layers, both ways"
    def __init__(self):
        super().__init__()
        self.rnn,self.head = nn.LSTM(48, 32, 2, batch_first=True, bidirectional=True),nn.Linear(64,1)
    def forward(self, x): return self.head(self.rnn(x.transpose(1,2).flatten(2))[0].mean(1)) # rows, each with 3 channels of 16

@pytest.mark.parametrize('mode,kwargs', [*((o,{}) for o in modes), ('to_fp16',dict(flat_master=True))])
def test_recurrent_weights_lie_together(mode, kwargs):
    "cuDNN finds them in one piece of memory, in the copies and after a fit, and has nothing to warn about"
    def _places(): return {o.untyped_storage().data_ptr() for o in learn.model.rnn._flat_weights}
    learn,seen = getattr(get_learner(Recurrent), mode)(**kwargs),[]
    hook = learn.model.register_forward_hook(lambda *_: seen.append(len(_places())))
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='RNN module weights are not part of single contiguous chunk')
        learn.fit(2)
        learn.validate()
    hook.remove()
    healthy(learn)
    assert {*seen}=={1}
    learn.model(torch.randn(2,3,16,16, device='cuda')) # a flat step takes them apart, and the next call puts them together
    assert len(_places())==1

@pytest.mark.parametrize('mode', modes)
def test_recurrent_layers_compute_in_what_they_should(mode):
    "Autocast makes them float16 whatever it was asked for: beside bfloat16 they are float32, and bear what float16 can't hold"
    learn,inside = getattr(get_learner(Recurrent), mode)(),[]
    class Spy(nn.LSTM):
        def forward(self, x, hx=None):
            res = super().forward(x, hx)
            inside.append((self.weight_ih_l0.dtype, res[0].dtype))
            return res
    learn.model.rnn.__class__ = Spy
    learn.fit(1)
    want = dict(to_fp16=(torch.float16,torch.float16), to_native_fp16=(torch.float32,torch.float16)).get(mode, (torch.float32,torch.float32))
    assert {*inside}=={want}
    class Huge(Callback):
        def before_batch(self): self.learn.xb = (self.xb[0]*1e6,)
    learn.fit(1, cbs=Huge())
    assert (learn.precision_recorder.log.finite.tail(8)==('bf16' in mode)).all()

@pytest.mark.parametrize('mode', modes)
def test_channels_last(mode):
    learn = getattr(get_learner(lambda: nn.Sequential(nn.Conv2d(3,8,3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,1))), mode)()
    learn.model.to(memory_format=torch.channels_last)
    learn.fit(2)
    assert learn.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    healthy(learn)

def test_half_saves_memory():
    "A transformer without batch norm: half the activations, and no float32 copies of them"
    class Deep(nn.Module):
        def __init__(self): super().__init__(); self.inp,self.blocks,self.out = nn.Linear(768,256),nn.Sequential(*[nn.TransformerEncoderLayer(256,4,1024,dropout=0.,batch_first=True,norm_first=True) for _ in range(6)]),nn.Linear(256,1)
        def forward(self, x): return self.out(self.blocks(self.inp(x.flatten(1))[:,None].expand(-1,128,-1)).mean(1))
    peak = {}
    for mode in ('to_fp32','to_bf16','to_native_bf16'):
        learn = getattr(get_learner(Deep, bs=64, n=128), mode)()
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1)
        peak[mode] = torch.cuda.max_memory_allocated()
        del learn
    assert peak['to_bf16']<.8*peak['to_fp32'], peak

compact = [('to_bf16','split'),('to_bf16','kahan'),('to_bf16','stochastic'),('to_fp16','kahan')]

def big(): return nn.Sequential(nn.Flatten(), nn.Linear(768,2048), *[nn.Linear(2048,2048) for _ in range(8)], nn.Linear(2048,1))

@pytest.mark.parametrize('opt', [Adam, partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True))], ids=['fastai','fused'])
@pytest.mark.parametrize('mode,master', compact)
def test_compact_masters_save_memory(mode, master, opt):
    "Of a model that is nearly all parameters: bytes for each of them at the peak, by CUDA's own count"
    peak = {}
    for k in ('float32',master):
        before = torch.cuda.memory_allocated()
        learn = getattr(get_learner(big, opt_func=opt, lr=1e-4, bs=8, n=32), mode)(master=k)
        torch.cuda.reset_peak_memory_stats()
        learn.fit(2)
        healthy(learn)
        peak[k] = (torch.cuda.max_memory_allocated()-before)/sum(p.numel() for p in learn.model.parameters())
        del learn
        gc.collect()
    assert peak[master]<peak['float32']-1.5, peak

def test_split_masters_are_exact():
    "Bit for bit what float32 masters are, but where a weight is in the middle of two bfloat16 numbers"
    def run(master):
        learn = get_learner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768,33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33,1)), cbs=Ties()).to_bf16(master=master)
        learn.fit(2)
        return torch.cat([p.detach().flatten() for p in learn.model.parameters()]),learn.ties.n
    class Ties(Callback):
        order,n = -100,0
        def before_batch(self): self.n += sum(((p.detach().view(torch.int32)&0xffff)==0x8000).sum().item() for p in self.model.parameters())
    (want,n),(got,_) = run('float32'),run('split')
    assert torch.equal(got, want) if not n else (got-want).norm()<1e-2*want.norm()

@pytest.mark.parametrize('mode,master', compact)
def test_compact_masters_learn(mode, master):
    learn = getattr(get_learner(), mode)(master=master)
    first = learn.validate()[0]
    learn.fit(8)
    last = learn.validate()[0]
    healthy(learn)
    assert last<first*.5 and last<float32_loss()*1.5+.02, (first,last,float32_loss())

@pytest.mark.parametrize('mode,master', compact)
def test_out_of_memory_with_compact_masters(mode, master):
    class Greedy(Callback):
        def after_loss(self):
            if self.training and self.train_iter==2: torch.empty(1<<50, device='cuda')
    learn = getattr(get_learner(cbs=Greedy()), mode)(master=master)
    with pytest.raises(torch.OutOfMemoryError): learn.fit(1)
    healthy(learn)
    learn.remove_cb(Greedy)
    learn.fit(1)
    healthy(learn)
    assert all(p.isfinite().all() for p in learn.model.parameters())

def test_encodings_are_those_of_the_cpu():
    x = torch.cat([torch.randint(-2**31, 2**31, (10**5,)).int().view(torch.float32), torch.tensor([0.,-0.,torch.inf,-torch.inf,torch.nan,1e-40,3.4e38])])
    def same(a, b): return torch.equal(a.cpu().nan_to_num(7.), b.nan_to_num(7.)) if a.is_floating_point() else torch.equal(a.cpu(), b)
    bits = noise_bits(len(x), count=3, seed=2)
    assert same(noise_bits(len(x), count=3, seed=2, device='cuda'), bits)
    assert same(round_stochastic(x.cuda(), bits.cuda()), round_stochastic(x, bits))
    assert all(map(same, split_bits(x.cuda()), split_bits(x))) and same(join_bits(*split_bits(x.cuda())), join_bits(*split_bits(x)))
    for dtype in halves: assert same(join_sum(*split_sum(x.cuda(), dtype)), join_sum(*split_sum(x, dtype)))

@pytest.mark.parametrize('mode', modes)
def test_compiled_model(mode):
    learn = getattr(get_learner(lambda: torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(768,64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64,1)))), mode)()
    learn.fit(2)
    healthy(learn)
    assert learn.recorder.values[-1][0]<learn.recorder.values[0][0]

@pytest.mark.parametrize('mode', modes)
def test_cuda_graphs(mode, monkeypatch):
    "What `torch.compile` has recorded of the forward and the backward pass is replayed in every step: copies stay where they are, and gradients are used up by then"
    count = dict(recorded=0, replayed=0)
    def _counting(f, what):
        def _f(*args): count[what] += 1; return f(*args)
        return _f
    monkeypatch.setattr(torch.cuda.graph, '__enter__', _counting(torch.cuda.graph.__enter__, 'recorded'))
    monkeypatch.setattr(torch.cuda.CUDAGraph, 'replay', _counting(torch.cuda.CUDAGraph.replay, 'replayed'))
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(768,64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64,1))
    def run(make):
        learn = getattr(get_learner(make, opt_func=partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True))), mode)()
        learn.fit(2)
        first = {**count}
        learn.fit(2)
        healthy(learn)
        return learn,first
    want,_ = run(net)
    assert not any(count.values())
    torch._dynamo.reset()
    learn,first = run(lambda: torch.compile(net(), mode='reduce-overhead'))
    assert count['recorded']==first['recorded']>=2 and count['replayed']-first['replayed']>=2*8*2
    a,b = [o.recorder.values[-1][-1] for o in (learn,want)]
    assert abs(a-b)<.1*b, (a,b)
