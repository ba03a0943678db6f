"Steps of several batches, and what changes between them: the precision, the optimizer, the parameters, the buffers"
from copy import deepcopy
from functools import partial

import pytest
from fastai.callback.training import GradientAccumulation
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8,16), nn.Tanh(), nn.Linear(16,1))

class Switch(Callback):
    "Another precision in `event` of the first epoch"
    def __init__(self, to, event='after_epoch'): self.to = to; setattr(self, event, self.go)
    def go(self):
        if self.epoch==0: self.to(self.learn)

precisions = dict(float32=lambda o: o.to_fp32(), **{k:modes[k] for k in ('fp16','bf16','native_fp16','native_bf16')})

def trained(model, first, *fits, **kwargs):
    "A learner, `first` in this precision, and how far it has come from where it was, after these fits"
    learn = first(get_learner(model, opt_func=kwargs.pop('opt_func', SGD), lr=.05, **kwargs))
    start = flat(weights(learn))
    for f in fits: f(learn)
    return learn,flat(weights(learn))-start

def assert_same_way(ours, full, tol=.02):
    "Do both of `trained` come the same way?"
    (_,got),(_,want) = ours,full
    assert (got-want).norm()<tol*want.norm(), (got.norm(), want.norm())

some = [('fp16','float32'),('float32','native_fp16'),('native_fp16','bf16'),('native_bf16','fp16')]
both = [slow_unless((o,p) in some, o, p) for o in precisions for p in precisions if o!=p]
each_switch = pytest.mark.parametrize('first,to', both)

@each_switch
def test_switch_while_accumulating(first, to):
    "The gradients of before and after the switch add up as if there had been one precision"
    def _trained(first, to):
        # 4 batches of 16: the second step's gradients come from both epochs
        cbs = [GradientAccumulation(40),Switch(precisions[to])]
        return trained(plain(), precisions[first], lambda o: o.fit(2, cbs=cbs))
    assert_same_way(_trained(first, to), _trained('float32', 'float32'))

@pytest.mark.parametrize('then', ['float32','fp16'])
def test_switched_on_in_a_fit(then):
    "and there are gradients left at its end, which the next fit finds as plain fastai's would be"
    def _trained(on, then):
        cbs = [GradientAccumulation(10**6),Switch(precisions[on], 'before_epoch')]
        return trained(plain(), noop, lambda o: o.fit(1, cbs=cbs), precisions[then], lambda o: o.fit(1))
    assert_same_way(_trained('native_fp16', then), _trained('float32', 'float32'))

@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))
def test_gradients_by_hand(mode):
    "from before a fit whose first batch is left out: the next fit finds them"
    leaves = Callback(before_batch=raises(CancelFitException))
    leaves.order = -100
    def _by_hand(learn):
        x,y = learn.dls.one_batch()
        (F.mse_loss(learn.model(x), y)*20).backward()
    def _trained(to): return trained(plain(), to, _by_hand, lambda o: o.fit(1, cbs=leaves), lambda o: o.fit(1))
    assert_same_way(_trained(modes[mode]), _trained(noop))

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

joins = [('fp16','group',16),('bf16','new_flat',40),('native_fp16','new',40),('fp16','new_flat',16)]
@pytest.mark.parametrize('mode,how,accumulate', [
    slow_unless((m,h,n) in joins, m, h, n) for m in ('fp16','bf16','native_fp16','native_bf16')
    for h in ('group','new','new_flat') for n in (16,40) if h!='new_flat' or 'native' not in m])
def test_parameters_join(mode, how, accumulate):
    "They move as far as in float32"
    def _trained(to):
        opt = partial(OptimWrapper, opt=torch.optim.SGD) if how=='group' else SGD
        first = partial(to, flat_master=True) if how=='new_flat' and to is not noop else to
        return trained(Net(), first, lambda o: o.fit(3, cbs=Join(how)), opt_func=opt, splitter=head_only,
                       cbs=GradientAccumulation(accumulate))
    assert_same_way(_trained(modes[mode]), _trained(noop), .05)

class Table(nn.Module):
    "Shares a buffer with another one like it"
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(8,8)
        self.register_buffer('table', table)
    def forward(self, x): return x+self.lin(x)*self.table

@pytest.mark.parametrize('view', [False,True])
@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))
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

@pytest.mark.parametrize('mode,bad', crossed(modes, [0,1,2], fast=lambda mode,bad: mode=='fp16' or bad==1))
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

@pytest.mark.parametrize('opt,flat_master', [(Adam,False),(Adam,True),(ranger,True)])
def test_copies_of_a_learner(opt, flat_master):
    "A copy that was made in a fit trains like the first one"
    twins = []
    learn = get_learner(plain(), lr=.01, opt_func=opt).to_bf16(flat_master=flat_master)
    learn.fit(1, cbs=Now('after_epoch', lambda o: twins.append(deepcopy(o))))
    twins.append(learn)
    for o in twins:
        o.opt.clear_state()
        o.fit(1)
    assert torch.equal(*[flat(weights(o)) for o in twins])

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
