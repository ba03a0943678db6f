"What only a CUDA device can show: its kernels, its memory, and when the host waits for it"
import warnings
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from fastai.basics import DataLoader,DataLoaders,Learner,MSELossFlat,load_learner,noop,set_seed
from fastai.callback.core import Callback
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_callbacks.all import *
from mp_callbacks.master import ForwardWrapper,norm_modules

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

class CountSyncs(Callback):
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
    base,ours = syncs_per_batch('to_fp32'),syncs_per_batch(mode, **kwargs)
    assert all(o-b<=1 for o,b in zip(ours,base)), (ours,base)

@pytest.mark.parametrize('mode,kwargs', [(m,{}) for m in modes if m!='to_fp16']+[('to_fp16',dict(headroom=None, max_loss_scale=2.**10)),('to_bf16',dict(clip=1.))])
def test_no_host_sync_with_a_fused_optimizer(mode, kwargs):
    fused = dict(opt_func=lambda ps,**kw: OptimWrapper(ps, torch.optim.Adam, fused=True, **kw))
    base,ours = syncs_per_batch('to_fp32', fused),syncs_per_batch(mode, fused, **kwargs)
    assert ours==base, (ours,base)

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
        learn.mixed_precision.may_wait = may
        with torch.backends.cudnn.flags(deterministic=True): learn.fit(2)
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
    class Steps(Callback):
        order = -200
        @contextmanager
        def during_batch(self):
            audit.step('train' if self.training else 'valid')
            yield
            audit.step('between')
    learn = getattr(get_learner(cbs=Steps()), mode)()
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

@pytest.mark.parametrize('mode', modes)
def test_compiled_model(mode):
    learn = getattr(get_learner(lambda: torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(768,64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64,1)))), mode)()
    learn.fit(2)
    healthy(learn)
    assert learn.recorder.values[-1][0]<learn.recorder.values[0][0]
