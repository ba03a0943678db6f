"""What changes in the middle of a fit: precision, optimizer, parameters, copies of the learner, while gradients are accumulated for a step to come or a batch has no step at all"""
from copy import copy,deepcopy
from functools import partial

import pytest
from fastai.callback.training import GradientAccumulation
from learners import *
from mp_callbacks.master import BufferSnapshot

pytestmark = pytest.mark.filterwarnings('ignore')

half = [o for o in modes if o!='alone']
def fused(ps, **kwargs): return OptimWrapper(ps, torch.optim.AdamW, fused=True, **kwargs)

def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8,16), nn.Tanh(), nn.Linear(16,1))
def way(learn, start): return flat(weights(learn))-start

class Switch(Callback):
    "Another precision after the first epoch, or before it"
    def __init__(self, to, event='after_epoch'): self.to = to; setattr(self, event, self.go)
    def go(self):
        if self.epoch==0: self.to(self.learn)

precisions = dict(float32=lambda o: o.to_fp32(), **{k:modes[k] for k in ('fp16','bf16','native_fp16','native_bf16')})

def close(learn, want, start, tol=.02): assert (way(learn, start)-want).norm()<tol*want.norm(), (way(learn, start).norm(), want.norm())

@pytest.mark.parametrize('to', precisions)
@pytest.mark.parametrize('first', precisions)
def test_switch_while_accumulating(first, to):
    "The gradients of before and after the switch add up as if there had been one precision"
    def _way(first, to):
        learn = precisions[first](get_learner(plain(), opt_func=SGD, lr=.05))
        start = flat(weights(learn))
        learn.fit(2, cbs=[GradientAccumulation(40),Switch(precisions[to])]) # 4 batches of 16: the second step's gradients come from both epochs
        return learn,start
    learn,start = _way('float32','float32')
    want = way(learn, start)
    close(*_way(first, to)[:1], want, start)

@pytest.mark.parametrize('then', precisions)
def test_switched_on_in_a_fit(then):
    "and there are gradients left at its end, which the next fit finds as plain fastai's would be"
    def _way(on, then):
        learn = get_learner(plain(), opt_func=SGD, lr=.05)
        start = flat(weights(learn))
        learn.fit(1, cbs=[GradientAccumulation(10**6),Switch(on, 'before_epoch')])
        precisions[then](learn).fit(1)
        return learn,start
    learn,start = _way(lambda o: o, 'float32')
    close(_way(precisions['native_fp16'], then)[0], way(learn, start), start)

def test_overflow_before_a_switch():
    "Gradients that aren't finite are nothing to hand on"
    class Spoil(Callback):
        def after_loss(self):
            if self.training and self.epoch==0 and self.iter==3: self.learn.loss_grad = self.learn.loss_grad*float('inf')
    learn = precisions['native_fp16'](get_learner(mlp(True), opt_func=SGD, lr=.05))
    learn.fit(2, cbs=[GradientAccumulation(40),Switch(precisions['float32']),Spoil()])
    assert all(o.isfinite().all() for o in learn.model.state_dict().values())

class Net(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(1); self.body,self.head = nn.Linear(8,8),nn.Linear(8,1)
    def forward(self, x): return self.head(torch.tanh(self.body(x)))

def head_only(model): return [list(model.head.parameters())]

class Join(Callback):
    "Gradual unfreezing: the body joins the optimizer after the first epoch"
    def __init__(self, how): self.how = how
    def before_epoch(self):
        if self.epoch!=1: return
        if self.how=='group': return self.opt.opt.add_param_group(dict(params=list(self.model.body.parameters()), lr=.05))
        self.learn.splitter = trainable_params
        self.learn.create_opt()
        self.opt.set_hypers(lr=.05)

@pytest.mark.parametrize('accumulate', [1,40])
@pytest.mark.parametrize('how', ['group','new','new_flat'])
@pytest.mark.parametrize('mode', ['fp16','bf16','native_fp16','native_bf16'])
def test_parameters_join(mode, how, accumulate):
    "They move as far as in float32"
    if how=='new_flat' and 'native' in mode: pytest.skip('nothing flat')
    def _go(mode):
        opt = partial(OptimWrapper, opt=torch.optim.SGD) if how=='group' else SGD
        learn = get_learner(Net(), opt_func=opt, lr=.05, splitter=head_only)
        start = flat(weights(learn))
        if mode: modes[mode](learn, **(dict(flat_master=True) if how=='new_flat' else {}))
        if accumulate>1: learn.add_cb(GradientAccumulation(accumulate))
        learn.fit(3, cbs=Join(how))
        return learn,start
    learn,start = _go('')
    close(_go(mode)[0], way(learn, start), start, .05)

@pytest.mark.parametrize('mode', ['to_fp16','to_bf16'])
def test_flat_and_another_optimizer(mode):
    "which has parameters that the first one hadn't: their gradients are looked at, too"
    class Bad(Callback):
        def after_backward(self):
            if self.epoch==2 and self.iter==1: self.model.body.weight.grad[0,0] = float('nan')
    learn = getattr(get_learner(Net(), opt_func=SGD, lr=.05, splitter=head_only), mode)(flat_master=True)
    learn.fit(3, cbs=[Join('new'),Bad()])
    assert skipped(learn)==1 and all(p.isfinite().all() for p in learn.model.parameters())

class Table(nn.Module):
    "Shares a buffer with another one like it"
    def __init__(self, table): super().__init__(); torch.manual_seed(1); self.lin = nn.Linear(8,8); self.register_buffer('table', table)
    def forward(self, x): return x+self.lin(x)*self.table

@pytest.mark.parametrize('view', [False,True])
@pytest.mark.parametrize('mode', [o for o in half if 'flat' not in o])
def test_shared_buffer(mode, view):
    "A skipped step puts it back once, also where the device decides"
    class Bad(Callback):
        def after_backward(self):
            if self.epoch==1 and self.iter==1: self.model[0].lin.weight.grad[0,0] = float('inf')
    table,res = torch.linspace(.5,1.5,8),[]
    for may in (False,True):
        t = table.clone()
        learn = modes[mode](get_learner(nn.Sequential(Table(t), Table(t[:] if view else t), nn.Linear(8,1)), opt_func=fused, lr=.01)) # the last is seeded by the one before
        learn.mixed_precision.may_be_late = may
        learn.fit(3, cbs=Bad())
        assert torch.equal(t, table) and skipped(learn)==1
        res.append(learn.model.state_dict())
    assert all(map(torch.equal, res[0].values(), res[1].values()))

class Wide(Callback):
    "One batch of numbers that float16 can't hold"
    order = -50
    def before_batch(self):
        if self.training and self.epoch==0 and self.iter==3: self.learn.xb = (self.xb[0]*3e5,)

class LeavesOut(Callback):
    "What users write"
    def __init__(self, event): setattr(self, event, self.go)
    def go(self):
        if self.training and not self.loss.isfinite(): raise CancelBatchException if hasattr(self, 'after_loss') else CancelBackwardException

class Sees(Callback):
    def before_validate(self): assert all(b.isfinite().all() for b in self.model.buffers())

@pytest.mark.parametrize('cb', [partial(GradientAccumulation, 10**6), partial(LeavesOut, 'after_loss'), partial(LeavesOut, 'before_backward')], ids=['accumulates','cancel_batch','cancel_backward'])
@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_overflow_in_a_batch_without_step(mode, cb):
    "Batch norm forgets it before anybody validates, and in any case in the end"
    learn = modes[mode](get_learner(mlp(True), opt_func=SGD, lr=.01))
    learn.fit(2, cbs=[cb(),Wide(),Sees()])
    assert all(b.isfinite().all() for b in learn.model.buffers())
    stats = [b.clone() for b in learn.model.buffers() if b.is_floating_point()]
    assert any((b!=0).any() and (b!=1).any() for b in stats) # other batches have been counted

class Copies(Callback):
    order = 50
    def __init__(self, event): setattr(self, event, self.go)
    def go(self):
        learn = self.learn
        learn.remove_cb(self)
        try: self.twin = deepcopy(learn)
        finally: learn.add_cb(self)

@pytest.mark.parametrize('opt', [Adam,ranger])
@pytest.mark.parametrize('kwargs', [{},dict(flat_master=True),dict(master='split')], ids=str)
def test_copies_of_a_learner(kwargs, opt):
    "From between two batches, one that trains on like the first. In the middle of one there are no real weights to be had, and that is said."
    learn = get_learner(plain(), lr=.01, opt_func=opt).to_bf16(**kwargs)
    learn.fit(1, cbs=(cb := Copies('after_epoch')))
    learn.opt.clear_state()
    cb.twin.opt.clear_state()
    for o in (cb.twin.opt,getattr(cb.twin.opt, 'opt', cb.twin.opt)): assert not {'step','zero_grad'}&set(vars(o))
    for o in (learn,cb.twin): o.fit(1)
    assert torch.equal(flat(weights(learn)), flat(weights(cb.twin)))
    with pytest.raises(RuntimeError, match='In the middle of a batch'): learn.fit(1, cbs=Copies('before_batch'))
    learn.fit(1)

@pytest.mark.parametrize('flat_master', [False,True])
def test_prediction_in_a_batch(flat_master):
    "of a weight with gaps, which a flat step closes: it finds the copies as they are, and they keep their gradients"
    class Gaps(nn.Module):
        def __init__(self): super().__init__(); self.lin,self.w = nn.Linear(8,8),nn.Parameter(torch.randn(8,2)[:,::2])
        def forward(self, x): return self.lin(x)@self.w
    class Predicts(Callback):
        order = 5
        def after_loss(self):
            if not self.training: return
            own = {k:vars(self.learn)[k] for k in ('dl','xb','yb','pred','loss','loss_grad','training','iter','n_iter')} # fastai's get_preds leaves others
            preds.append(self.learn.get_preds(dl=self.dls.valid)[0])
            vars(self.learn).update(own)
            self.model.train()
    preds,res = [],[]
    for cbs in ([],[Predicts()]):
        set_seed(1)
        learn = get_learner(Gaps(), opt_func=SGD, lr=.01).to_bf16(flat_master=flat_master)
        learn.fit(2, cbs=cbs)
        res.append(flat(weights(learn)))
    assert torch.equal(*res) and all(o.isfinite().all() and o.abs().max()<1e3 for o in preds)

class Masked(nn.Module):
    "Fills a buffer with -inf when it is first called, as models with a causal mask do"
    def __init__(self):
        super().__init__()
        self.lin,self.bn,self.mask = nn.Linear(8,8),nn.BatchNorm1d(8),nn.Module()
        self.mask.register_buffer('table', torch.zeros(8,8))
    def forward(self, x):
        if not self.mask.table.isinf().any(): self.mask.table.copy_(torch.full((8,8), -torch.inf).triu(1))
        return self.bn(self.lin(x))[:,:1]

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_infinity_on_purpose(mode):
    "is nothing for other modules to forget their statistics for"
    learn = modes[mode](get_learner(Masked(), opt_func=SGD, lr=.01))
    learn.fit(1, cbs=GradientAccumulation(10**6))
    assert learn.model.bn.num_batches_tracked==4

def test_mend_waits_once():
    learn = get_learner(nn.Sequential(*[nn.BatchNorm1d(8) for _ in range(9)]))
    snapshot = BufferSnapshot(learn.model)
    snapshot.take()
    learn.model(torch.randn(4,8))
    with SyncAuditor(pretend=True) as audit: snapshot.mend()
    assert len(audit.syncs)==1 and learn.model[8].num_batches_tracked==1
    learn.model[3].running_var[0] = torch.nan
    snapshot.mend()
    assert [int(o.num_batches_tracked) for o in learn.model]==[1]*3+[0]+[1]*5

def test_empty_optimizer():
    "Gradients of parameters that no optimizer has aren't scaled, not even where it has none at all"
    norms = []
    for to in (lambda o: o, lambda o: o.to_native_fp16(1024.)):
        learn = to(get_learner(plain(), opt_func=SGD, splitter=lambda m: [[]]))
        learn.fit(1)
        norms.append(torch.cat([p.grad.flatten() for p in learn.model.parameters()]).norm().item())
    assert norms[1]==pytest.approx(norms[0], rel=.02)

class Pretrained(nn.Module):
    "A frozen table that is a buffer, too"
    def __init__(self):
        super().__init__()
        self.register_buffer('table', torch.linspace(-1,1,80).view(10,8))
        self.emb,self.lin = nn.Embedding.from_pretrained(self.table),plain()
    def forward(self, x): return self.lin(x+self.emb(x[:,0].abs().long()%10))

@pytest.mark.parametrize('splitter', [lambda m: [list(m.parameters())], lambda m: [[m.emb.weight,*m.lin[0].parameters()],[m.emb.weight,*m.lin[2].parameters()]]], ids=['once','twice'])
def test_flat_with_frozen_table(splitter):
    "What isn't trained isn't moved: it may share memory, and be in two groups"
    res = []
    for flat_master in (False,True):
        learn = get_learner(Pretrained(), splitter=splitter).to_bf16(flat_master=flat_master)
        learn.fit(2)
        assert learn.model.table.data_ptr()==learn.model.emb.weight.data_ptr()
        res.append(flat(weights(learn)))
    assert torch.equal(*res)

def test_shallow_copy():
    "has the same parts, as in fastai"
    class Copies(Callback):
        order = 50
        def after_pred(self): seen.append(copy(self.learn).opt is self.opt)
        def after_epoch(self): seen.append(copy(self.learn).opt is self.opt)
    seen = []
    get_learner().to_bf16(flat_master=True).fit(1, cbs=Copies())
    assert seen and all(seen)

@pytest.mark.parametrize('mode', modes)
def test_gradients_by_hand(mode):
    "from before a fit whose first batch is left out: the next fit finds them"
    class Leaves(Callback):
        order = -100
        def before_batch(self): raise CancelFitException
    def _go(to):
        learn = to(get_learner(plain(), opt_func=SGD, lr=.05))
        start = flat(weights(learn))
        x,y = learn.dls.one_batch()
        (F.mse_loss(learn.model(x), y)*20).backward()
        learn.fit(1, cbs=Leaves())
        learn.fit(1)
        return learn,start
    learn,start = _go(lambda o: o)
    close(_go(modes[mode])[0], way(learn, start), start)
