"""Gradient accumulation, skipped steps, and what changes in a fit: precision, optimizer, parameters. And copies."""
from copy import deepcopy
from functools import partial

import pytest
from fastai.callback.training import GradientAccumulation
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

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

def close(learn, want, start, tol=.02):
    got = way(learn, start)
    assert (got-want).norm()<tol*want.norm(), (got.norm(), want.norm())

@pytest.mark.parametrize('first,to', [(o,p) for o in precisions for p in precisions if o!=p])
def test_switch_while_accumulating(first, to):
    "The gradients of before and after the switch add up as if there had been one precision"
    def _way(first, to):
        learn = precisions[first](get_learner(plain(), opt_func=SGD, lr=.05))
        start = flat(weights(learn))
        # 4 batches of 16: the second step's gradients come from both epochs
        learn.fit(2, cbs=[GradientAccumulation(40),Switch(precisions[to])])
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

class Net(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(1); self.body,self.head = nn.Linear(8,8),nn.Linear(8,1)
    def forward(self, x): return self.head(torch.tanh(self.body(x)))

def head_only(model): return [list(model.head.parameters())]

class Fails(Callback):
    "An infinite backward pass, and then an error"
    order = 30
    def after_pred(self): self.learn.pred = self.pred*float('inf')
    def after_backward(self): raise RuntimeError('as asked')

@pytest.mark.parametrize('mode', modes)
def test_error_leaves_no_gradients(mode):
    "Neither the optimizer's, nor those of parameters that the splitter leaves out"
    learn = modes[mode](get_learner(Net(), splitter=head_only))
    with pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=Fails())
    assert all(p.grad is None for p in learn.model.parameters())
    learn.fit(1)
    assert learn.precision_recorder.log.finite.all()

class Join(Callback):
    "Gradual unfreezing: the body joins the optimizer after the first epoch"
    def __init__(self, how): self.how = how
    def before_epoch(self):
        if self.epoch!=1: return
        body = list(self.model.body.parameters())
        if self.how=='group': return self.opt.opt.add_param_group(dict(params=body, lr=.05))
        self.learn.splitter = trainable_params
        self.learn.create_opt()
        self.opt.set_hypers(lr=.05)

@pytest.mark.parametrize('accumulate', [1,40])
@pytest.mark.parametrize('how', ['group','new','new_flat'])
@pytest.mark.parametrize('mode', crossed(['fp16','bf16','native_fp16','native_bf16'], fast=lambda o: o!='native_bf16'))
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
    def _bad(cb):
        if cb.epoch==2 and cb.iter==1: cb.model.body.weight.grad[0,0] = float('nan')
    learn = getattr(get_learner(Net(), opt_func=SGD, lr=.05, splitter=head_only), mode)(flat_master=True)
    learn.fit(3, cbs=[Join('new'),Callback(after_backward=_bad)])
    assert skipped(learn)==1 and all(p.isfinite().all() for p in learn.model.parameters())

class Table(nn.Module):
    "Shares a buffer with another one like it"
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(8,8)
        self.register_buffer('table', table)
    def forward(self, x): return x+self.lin(x)*self.table

@pytest.mark.parametrize('view', [False,True])
@pytest.mark.parametrize('mode', modes)
def test_shared_buffer(mode, view):
    "A skipped step puts it back, and it is still shared"
    def _bad(cb):
        if cb.epoch==1 and cb.iter==1: cb.model[0].lin.weight.grad[0,0] = float('inf')
    table = torch.linspace(.5,1.5,8)
    t = table.clone()
    learn = modes[mode](get_learner(nn.Sequential(Table(t), Table(t[:] if view else t), nn.Linear(8,1)), lr=.01))
    learn.fit(3, cbs=Callback(after_backward=_bad))
    assert torch.equal(t, table) and skipped(learn)==1
    assert all(learn.model[i].table.data_ptr()==t.data_ptr() for i in range(2))

@pytest.mark.parametrize('bad', [0,1,2])
@pytest.mark.parametrize('mode', modes)
def test_overflow_in_a_window(mode, bad):
    "Three batches make a step. If one of them overflows, all three leave no trace, batch norm's statistics included."
    def _run(bad):
        x,y = numbers(144)
        batches = [*zip(x.split(16), y.split(16))]
        if bad is None: del batches[3:6]
        else: batches[3+bad] = torch.full((16,8), float('inf')),y[:16]
        learn = modes[mode](get_learner(mlp(True), dls=DataLoaders(batches, batches[:1])))
        learn.fit(1, cbs=GradientAccumulation(48))
        return learn
    learn,want = _run(bad),_run(None)
    assert list(learn.precision_recorder.log.finite)==[True,False,True]
    for k,v in want.model.state_dict().items(): assert torch.equal(v, learn.model.state_dict()[k]), k

class Copies(Callback):
    "A copy of the learner, without this callback"
    order = 50
    def __init__(self, event): setattr(self, event, self.go)
    def go(self):
        learn = self.learn
        learn.remove_cb(self)
        try: self.twin = deepcopy(learn)
        finally: learn.add_cb(self)

@pytest.mark.parametrize('opt', [Adam,ranger])
@pytest.mark.parametrize('kwargs', [{},dict(flat_master=True)], ids=str)
def test_copies_of_a_learner(kwargs, opt):
    "A copy trains like the first one"
    learn = get_learner(plain(), lr=.01, opt_func=opt).to_bf16(**kwargs)
    learn.fit(1, cbs=(cb := Copies('after_epoch')))
    for o in (learn,cb.twin):
        o.opt.clear_state()
        o.fit(1)
    assert torch.equal(flat(weights(learn)), flat(weights(cb.twin)))

def test_empty_optimizer():
    "Gradients of parameters that no optimizer has aren't scaled, not even where it has none at all"
    norms = []
    for to in (lambda o: o, lambda o: o.to_native_fp16(1024.)):
        learn = to(get_learner(plain(), opt_func=SGD, splitter=lambda m: [[]]))
        learn.fit(1)
        norms.append(torch.cat([p.grad.flatten() for p in learn.model.parameters()]).norm().item())
    assert norms[1]==pytest.approx(norms[0], rel=.02)

@pytest.mark.parametrize('mode', modes)
def test_gradients_by_hand(mode):
    "from before a fit whose first batch is left out: the next fit finds them"
    leaves = Callback(before_batch=raises(CancelFitException))
    leaves.order = -100
    def _go(to):
        learn = to(get_learner(plain(), opt_func=SGD, lr=.05))
        start = flat(weights(learn))
        x,y = learn.dls.one_batch()
        (F.mse_loss(learn.model(x), y)*20).backward()
        learn.fit(1, cbs=leaves)
        learn.fit(1)
        return learn,start
    learn,start = _go(lambda o: o)
    close(_go(modes[mode])[0], way(learn, start), start)

# --- Unfinished steps

@pytest.mark.parametrize('mode', ['bf16','native_fp16'])
def test_overflow_in_an_unfinished_step(mode):
    "The last batch of the epoch overflows, and its step doesn't come: validation sees statistics from before the step"
    learn = get_learner(norm=True, cbs=[GradientAccumulation(48),InfiniteAt(3)])
    modes[mode](learn).fit(1)
    assert all(b.isfinite().all() for b in learn.model.buffers()) and np.isfinite(learn.recorder.values[-1][1])
    assert not any(p.grad is not None for p in learn.model.parameters())

def test_load_after_an_unfinished_step(tmp_path):
    "A skipped step restores what was loaded, and not what an unfinished step of an earlier fit remembers"
    learn = get_learner(norm=True, path=tmp_path, cbs=GradientAccumulation(48)).to_bf16()
    norm,seen = learn.model[1],[]
    norm.running_mean.fill_(7.)
    learn.save('good')
    norm.running_mean.fill_(0.)
    learn.fit(1) # a step of three batches, and one batch more
    learn.load('good')
    see = Callback(after_cancel_step=lambda cb: seen.append(norm.running_mean.clone()))
    learn.fit(1, cbs=[InfiniteAt(0),see])
    assert torch.equal(seen[0], torch.full_like(seen[0], 7.))
