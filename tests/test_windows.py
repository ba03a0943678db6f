"Steps of several batches, and what changes between them: the precision, the optimizer, the parameters, the buffers"
from copy import deepcopy
from functools import partial

import pytest
from fastai.callback.training import GradientAccumulation
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

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
@pytest.mark.parametrize('first,to', some)
def test_switch_while_accumulating(first, to):
    "The gradients of before and after the switch add up as if there had been one precision, and momentum stays"
    def _trained(first, to):
        # 4 batches of 16: the second step's gradients come from both epochs
        cbs = [GradientAccumulation(40),Switch(precisions[to])]
        return trained(mlp(), precisions[first], lambda o: o.fit(2, cbs=cbs), opt_func=partial(SGD, mom=.9))
    assert_same_way(_trained(first, to), _trained('float32', 'float32'))

@pytest.mark.parametrize('then', ['float32','fp16'])
def test_switched_on_in_a_fit(then):
    "and there are gradients left at its end, which the next fit finds as plain fastai's would be"
    def _trained(on, then):
        cbs = [GradientAccumulation(10**6),Switch(precisions[on], 'before_epoch')]
        return trained(mlp(), noop, lambda o: o.fit(1, cbs=cbs), precisions[then], lambda o: o.fit(1))
    assert_same_way(_trained('native_fp16', then), _trained('float32', 'float32'))

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_gradients_from_before_a_fit(mode):
    "Count in its first step, as in plain fastai"
    def _by_hand(learn):
        x,y = learn.dls.one_batch()
        (F.mse_loss(learn.model(x), y)*20).backward()
    def _trained(to): return trained(mlp(), to, _by_hand, lambda o: o.fit(1))
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

class Ends(Callback):
    "Ends each batch when its step was made, before the optimizer clears gradients"
    order = 80
    def after_step(self): raise CancelBatchException

@pytest.mark.parametrize('opt', [SGD,partial(OptimWrapper, opt=torch.optim.SGD)], ids=['fastai','torch'])
@pytest.mark.parametrize('mode', modes)
def test_batch_ends_after_step(mode, opt):
    "The gradients of a step that was made don't count in the next one"
    def _trained(*cbs):
        learn = modes[mode](get_learner(Net(), opt_func=opt, lr=.05))
        learn.fit(2, cbs=cbs)
        assert all(p.grad is None for p in learn.model.parameters())
        return flat(weights(learn))
    assert torch.equal(_trained(Ends()), _trained())

class Replaces(Callback):
    "Another model in the first batch, whose forward pass fails"
    def __init__(self, model): self.model = model
    def before_batch(self): self.learn.model = self.model

@pytest.mark.parametrize('mode', modes)
def test_replaced_model_fails(mode):
    "It is an ordinary model afterwards, as the one before it"
    class Broken(Net):
        def forward(self, x): raise RuntimeError('as asked')
    before,broken = Net(),Broken()
    learn = modes[mode](get_learner(before))
    with pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=Replaces(broken))
    assert not [m for model in (before,broken) for m in model.modules() if 'forward' in vars(m)]

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

@pytest.mark.parametrize('mode,how,accumulate', [('fp16','group',16), ('bf16','new',16), ('native_fp16','new',40)])
def test_parameters_join(mode, how, accumulate):
    "They move as far as in float32"
    def _trained(to):
        opt = partial(OptimWrapper, opt=torch.optim.SGD) if how=='group' else SGD
        return trained(Net(), to, lambda o: o.fit(3, cbs=Join(how)), opt_func=opt, splitter=head_only,
                       cbs=GradientAccumulation(accumulate))
    assert_same_way(_trained(modes[mode]), _trained(noop), .05)

@pytest.mark.parametrize('mode,bad', [('fp16',0), ('bf16',1), ('native_fp16',2)])
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

# --- Buffers and copies

class Table(nn.Module):
    "Shares a buffer with another one like it"
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(8,8)
        self.register_buffer('table', table)
    def forward(self, x): return x+self.lin(x)*self.table

@pytest.mark.parametrize('mode,view', [('fp16',False), ('bf16',True), ('native_fp16',True)])
def test_shared_buffer(mode, view):
    "A skipped step puts it back, and it is still shared; one of inference mode, which nobody can write, is replaced"
    table = torch.linspace(.5, 1.5, 8)
    t = table.clone()
    model = nn.Sequential(Table(t), Table(t[:] if view else t), nn.Linear(8,1))
    with torch.inference_mode(): model.register_buffer('fixed', torch.arange(3.).expand(2,3))
    learn = modes[mode](get_learner(model, lr=.01))
    learn.fit(2, cbs=InfiniteAt(1))
    assert skipped(learn)==1 and torch.equal(t, table) and model.fixed.tolist()==[[0,1,2]]*2
    assert all(model[i].table.data_ptr()==t.data_ptr() for i in range(2))

class Copies(Callback):
    "A copy of the learner in a fit, without this callback"
    order = 50
    def after_epoch(self):
        learn = self.learn
        learn.remove_cb(self)
        self.twin = deepcopy(learn)
        learn.add_cb(self)

@pytest.mark.parametrize('flat_master', [False,True])
def test_copies_of_a_learner(flat_master):
    "A copy trains as the first one"
    learn = get_learner(lr=.01).to_bf16(flat_master=flat_master)
    learn.fit(1, cbs=(cb := Copies()))
    for o in (learn,cb.twin):
        o.opt.clear_state()
        o.fit(1)
    assert torch.equal(flat(weights(learn)), flat(weights(cb.twin)))
