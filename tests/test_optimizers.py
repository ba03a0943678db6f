"""Optimizers of any kind, also several, train as in float32; they see no numbers of ours, which their files have

Learners that load these files in their own way get the loss scale back."""
import pytest
from learners import *
from states import *
from fastai.learner import load_model
from mp_callbacks.step import read_state

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')
each_mode = pytest.mark.parametrize('mode', modes)
each_fp16 = pytest.mark.parametrize('mode', ['fp16','fp16_static','native_fp16'])

# --- Our numbers

class StrictStep:
    "A stepper as fastxtend's jitted ones: it takes what it knows"
    def __call__(self, p, lr, wd, do_wd=True, force_train=None): p.data.add_(p.grad.data, alpha=-lr)

def strict(params, lr, **kwargs): return Optimizer(params, [StrictStep()], lr=lr, wd=0.)

@each_mode
def test_steppers_see_no_numbers_of_ours(mode, tmp_path):
    "They are there before the step and after it, in files and after an error"
    learn = modes[mode](get_learner(opt_func=strict, path=tmp_path, lr=1e-3))
    seen = []
    class Look(Callback):
        order = 100
        def before_step(self): seen.append(read_state(self.learn.opt))
        def after_step(self): seen.append(read_state(self.learn.opt))
    learn.fit(1, cbs=Look())
    assert len(seen)==8 and all(o.keys()>={'steps','skips'} for o in seen)
    assert [o['steps'] for o in seen]==[0,1,1,2,2,3,3,4]
    learn.save('now')
    assert read_state(modes[mode](get_learner(opt_func=strict, path=tmp_path)).load('now').opt)==seen[-1]
    class Fails(StrictStep):
        def __call__(self, p, **kwargs): raise KeyboardInterrupt
    learn.opt.cbs = L(Fails())
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert read_state(learn.opt)==seen[-1]

class Own(Learner):
    "A learner that loads in its own way"
    def load(self, file, device=None, **kwargs):
        if self.opt is None: self.create_opt()
        load_model(self.path/self.model_dir/f'{file}.pth', self.model, self.opt, device=device, **kwargs)
        return self

def of_class(cls, learn):
    learn.__class__ = cls
    return learn

@pytest.mark.parametrize('mode', ['to_fp16','to_native_fp16'])
def test_own_load(mode, tmp_path):
    "The scale comes back, after `load` as after `lr_find`, and if the call comes after `load`"
    def _new(): return of_class(Own, get_learner(path=tmp_path))
    def _state(learn): return learn.mixed_precision.state
    learn = getattr(_new(), mode)()
    learn.fit(1, cbs=InfiniteAt(1))
    state = _state(learn)
    assert state.skips==0 and state.steps==4
    learn.save('a')
    assert _state(getattr(_new(), mode)().load('a'))==state
    assert _state(getattr(_new().load('a'), mode)())==state
    learn.lr_find(show_plot=False, num_it=20, end_lr=1e6)
    assert _state(learn)==state

def test_own_load_replaces():
    "A subclass may load what it likes how it likes, the model as well"
    class Replaces(Learner):
        def load(self, *, name='best'): self.model,self.loaded = mlp(),name
    learn = of_class(Replaces, get_learner()).to_bf16()
    learn.load(name='x')
    assert learn.loaded=='x' and learn.opt is None
    before = weights(learn)
    learn.fit(1)
    assert not any(map(torch.equal, weights(learn), before))

# --- Unlike the others

class Wrapped:
    "An optimizer around another that isn't a `torch.optim.Optimizer`, as `schedulefree.ScheduleFreeWrapper`"
    def __init__(self, params, lr=1e-3, **kwargs): self.base = torch.optim.SGD(params, lr=lr)
    @property
    def param_groups(self): return self.base.param_groups
    @property
    def state(self): return self.base.state
    def step(self, closure=None): return self.base.step(closure)
    def zero_grad(self, set_to_none=True): self.base.zero_grad(set_to_none)
    def state_dict(self): return self.base.state_dict()
    def load_state_dict(self, state): self.base.load_state_dict(state)

@each_mode
def test_optimizer_of_another_class(mode, tmp_path):
    "It trains, is saved and loaded, and looks don't count as steps"
    def opt(params, **kwargs): return OptimWrapper(params, Wrapped, **kwargs)
    learn = modes[mode](get_learner(opt_func=opt, path=tmp_path))
    before = weights(learn)
    learn.fit(1)
    if mode=='fp16': learn.find_nonfinite(), learn.precision_report(), learn.precision_plan()
    assert learn.mixed_precision.state.steps==4 and not any(map(torch.equal, weights(learn), before))
    learn.save('now')
    assert modes[mode](get_learner(opt_func=opt, path=tmp_path)).load('now').mixed_precision.state.steps==4

class FlatSGD(torch.optim.SGD):
    "Gradients are views of one buffer, which `zero_grad` sets to zero and `step` steps on"
    def __init__(self, params, lr=.05):
        params = [*params]
        super().__init__(params, lr=lr)
        self.flat = torch.zeros(sum(p.numel() for p in params))
        for p,g in zip(params, self.flat.split([p.numel() for p in params])): p.grad = g.view_as(p)
    def zero_grad(self, set_to_none=False): self.flat.zero_()
    @torch.no_grad()
    def step(self):
        for o in self.param_groups:
            for p,g in zip(o['params'], self.flat.split([p.numel() for p in o['params']])): p -= o['lr']*g.view_as(p)

@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_bf16')))
@pytest.mark.parametrize('kwargs', [dict(opt_func=partial(OptimWrapper, opt=FlatSGD), lr=.05),
                                    dict(loss_func=ScaledLoss, cbs=StepLoss)], ids=['one_buffer','of_the_loss'])
def test_follows_float32(mode, kwargs):
    "Gradients in one buffer stay there; parameters of the loss have an optimizer of their own"
    def _learner():
        new = {k:o() if isinstance(o, type) else o for k,o in kwargs.items()}
        learn = get_learner(**new)
        learn.params = [*learn.model.parameters(),*getattr(learn.loss_func, 'parameters', list)()]
        return learn
    learn,full = modes[mode](_learner()),_learner()
    start = flat(full.params)
    for o in (learn,full): o.fit(3)
    got,want = flat(learn.params)-start,flat(full.params)-start
    assert (got-want).norm()<.05*want.norm() and abs(got[-1]/want[-1]-1)<.05

def in_backward(model, lr):
    "PyTorch's tutorial: an optimizer for each parameter, which steps as soon as the gradient is there"
    opts = {p:torch.optim.SGD([p], lr=lr) for p in model.parameters()}
    def _step(p): opts[p].step(); opts[p].zero_grad()
    for p in model.parameters(): p.register_post_accumulate_grad_hook(_step)

@each_fp16
def test_optimizer_in_the_backward_pass(mode):
    "With a loss scale an error that names both ways out; the first of them works"
    learn = modes[mode](get_learner(mlp()))
    in_backward(learn.model, 1e-3)
    with pytest.raises(RuntimeError, match='loss scale of .*to_bf16.*after the backward pass'): learn.fit(1)
    learn = get_learner(mlp()).to_bf16()
    in_backward(learn.model, 1e-3)
    before = weights(learn)
    learn.fit(1)
    assert not any(map(torch.equal, weights(learn), before))
    assert all(p.isfinite().all() for p in learn.model.parameters())

@each_fp16
def test_no_gradients_because_the_backward_pass_was_cancelled(mode):
    "is no error"
    cancel = Callback(before_backward=raises(CancelBackwardException))
    cancel.order = 200
    modes[mode](get_learner()).fit(1, cbs=cancel)

@each_mode
def test_second_optimizer(mode):
    """Gradients that a callback's own optimizer uses are checked with the others; the norm is that of the learner's
    optimizer"""
    model = mlp()
    head,norms = [*model[-1].parameters()],[]
    learn = get_learner(model, splitter=lambda m: [[p for l in m[:-1] for p in l.parameters()]])
    class Second(Callback):
        order = 20
        def before_fit(self): self.opt2 = torch.optim.SGD(head, lr=1e-3)
        def after_step(self): self.opt2.step(); self.opt2.zero_grad()
    class Spoil(Callback):
        order = 5
        def before_step(self):
            own = [p.grad for ps in self.learn.opt.param_lists for p in ps]
            norms.append(torch.stack([g.norm() for g in own]).norm().item())
            if self.iter==1: head[0].grad[0,0] = float('inf')
    modes[mode](learn)
    before = [p.detach().clone() for p in head]
    learn.fit(1, cbs=[Second(),Spoil()])
    log = learn.precision_recorder.log
    assert [*log.skipped]==[False,True,False,False] and [*log.culprit]==['','4.weight','','']
    assert all(p.isfinite().all() for p in model.parameters()) and not any(map(torch.equal, head, before))
    assert learn.step_stats.norm==pytest.approx(norms[-1], rel=1e-4)
