"Optimizers of any kind, also several, train as in float32; they see no numbers of ours, which their files have"
import pytest
from learners import *
from states import *
from mp_callbacks.step import read_state

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')
each_mode = pytest.mark.parametrize('mode', modes)

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

def in_backward(model, lr):
    "PyTorch's tutorial: an optimizer for each parameter, which steps as soon as the gradient is there"
    opts = {p:torch.optim.SGD([p], lr=lr) for p in model.parameters()}
    def _step(p): opts[p].step(); opts[p].zero_grad()
    for p in model.parameters(): p.register_post_accumulate_grad_hook(_step)

@pytest.mark.parametrize('mode', ['fp16','fp16_static','native_fp16'])
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

@each_mode
def test_second_optimizer(mode):
    "Gradients that a callback's own optimizer uses are checked with the others"
    model = mlp()
    head = [*model[-1].parameters()]
    learn = get_learner(model, splitter=lambda m: [[p for l in m[:-1] for p in l.parameters()]])
    class Second(Callback):
        order = 20
        def before_fit(self): self.opt2 = torch.optim.SGD(head, lr=1e-3)
        def after_step(self): self.opt2.step(); self.opt2.zero_grad()
    class Spoil(Callback):
        order = 5
        def before_step(self):
            if self.iter==1: head[0].grad[0,0] = float('inf')
    modes[mode](learn)
    before = [p.detach().clone() for p in head]
    learn.fit(1, cbs=[Second(),Spoil()])
    log = learn.precision_recorder.log
    assert [*log.skipped]==[False,True,False,False] and [*log.culprit]==['','4.weight','','']
    assert all(p.isfinite().all() for p in model.parameters()) and not any(map(torch.equal, head, before))
