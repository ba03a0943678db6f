"Optimizers of any kind, also several, train as in float32; they see no numbers of ours, which their files have"
from learners import *
from mp_callbacks.learner.opt_state import read_state
from test_inputs import trains

each_mode = pytest.mark.parametrize('mode', modes)

def strict_step(p, lr, wd, do_wd=True, force_train=None): p.data.add_(p.grad.data, alpha=-lr)
def strict(params, lr, **kwargs):
    "With a stepper as fastxtend's jitted ones: it takes what it knows"
    return Optimizer(params, [strict_step], lr=lr, wd=0.)

@each_mode
def test_steppers_see_no_numbers_of_ours(mode, tmp_path):
    "They are there before the step and after it, in files and after an error"
    seen = []
    def look(learn): seen.append(read_state(learn.opt))
    learn = fitted(in_mode(mode, opt_func=strict, path=tmp_path, lr=1e-3), 1,
                   On('before_step', look, 100), On('after_step', look, 100))
    assert len(seen)==8 and all(o.keys()>={'steps','skips'} for o in seen)
    assert [o['steps'] for o in seen]==[0,1,1,2,2,3,3,4]
    learn.save('now')
    saved = read_state(in_mode(mode, opt_func=strict, path=tmp_path).load('now').opt)
    if saved.get('measured'): saved['measured']['weights'] = None # a checksum, which the file has
    assert saved==seen[-1]
    learn.opt.cbs = L(raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert read_state(learn.opt)==seen[-1]

class Wrapped(GetAttr):
    "An optimizer around another that isn't a `torch.optim.Optimizer`, as `schedulefree.ScheduleFreeWrapper`"
    _default = 'base'
    def __init__(self, params, lr=1e-3, **kwargs): self.base = torch.optim.SGD(params, lr=lr)
    def step(self, closure=None): return self.base.step(closure)

@each_mode
def test_optimizer_of_another_class(mode, tmp_path):
    "It trains, is saved and loaded, and looks don't count as steps"
    def opt(params, **kwargs): return OptimWrapper(params, Wrapped, **kwargs)
    learn = in_mode(mode, opt_func=opt, path=tmp_path)
    trains(learn)
    if mode=='fp16': learn.find_nonfinite(), learn.precision_report(), learn.precision_plan()
    learn.save('now')
    loaded = in_mode(mode, opt_func=opt, path=tmp_path).load('now')
    assert learn.mixed_precision.state.steps==loaded.mixed_precision.state.steps==8

def in_backward(model, lr):
    "PyTorch's tutorial: an optimizer for each parameter, which steps as soon as the gradient is there"
    opts = {p:torch.optim.SGD([p], lr=lr) for p in model.parameters()}
    def _step(p): opts[p].step(); opts[p].zero_grad()
    for p in model.parameters(): p.register_post_accumulate_grad_hook(_step)

@pytest.mark.parametrize('mode', ['fp16','fp16_static','native_fp16'])
def test_optimizer_in_the_backward_pass(mode):
    "With a loss scale an error that names both ways out; the first of them works"
    learn,other = in_mode(mode),in_mode('bf16')
    for o in (learn,other): in_backward(o.model, 1e-3)
    with pytest.raises(RuntimeError, match='loss scale of .*to_bf16.*after the backward pass'): learn.fit(1)
    trains(other)

@each_mode
def test_second_optimizer(mode):
    "Gradients that a callback's own optimizer uses are checked with the others"
    model = mlp()
    head = [*model[-1].parameters()]
    learn = get_learner(model, splitter=lambda m: [[p for l in m[:-1] for p in l.parameters()]])
    opt2 = torch.optim.SGD(head, lr=1e-3)
    def step(learn): opt2.step(); opt2.zero_grad()
    before = [p.detach().clone() for p in head]
    log = log_of(fitted(modes[mode](learn), 1, On('after_step', step, 20), overflow(1, layer=-1)))
    assert [*log.skipped]==[False,True,False,False] and [*log.culprit]==['','4.weight','','']
    assert all(p.isfinite().all() for p in model.parameters()) and not any(map(torch.equal, head, before))
