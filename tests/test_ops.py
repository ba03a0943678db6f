"""What our part of a step asks of PyTorch and of Python does not grow with the number of parameters

Our part is everything but forward, backward and an optimizer that steps on each parameter."""
import gc,sys
from collections import Counter

import pytest,torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from learners import *
from fastai.optimizer import Adam
from test_syncs import casts

class Ops(TorchDispatchMode):
    "Counts operations. One that lays tensors side by side, in C++, may take a view of each."
    def __init__(self): super().__init__(); self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func)!='aten.view.default': self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))

class Calls:
    "Counts calls of functions written in Python"
    def __init__(self): self.calls = Counter()
    def __enter__(self):
        gc.disable() # others are called back when it runs
        sys.setprofile(self._event)
    def __exit__(self, *_):
        sys.setprofile(None)
        gc.enable()
    def _event(self, frame, event, arg):
        if event=='call' and not frame.f_globals.get('__name__', '').startswith('torch._dynamo'): # which notes whenever a tensor of an earlier test is freed
            self.calls[frame.f_code.co_qualname if hasattr(frame.f_code, 'co_qualname') else frame.f_code.co_name] += 1

class Many(nn.Module):
    "`n` parameters, all used"
    def __init__(self, n):
        super().__init__()
        self.ps = nn.ParameterList([torch.randn(8) for _ in range(n)])
    def forward(self, x): return (x*torch.stack([*self.ps]).sum(0)).sum(1, keepdim=True)

events = 'before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch'.split()

def count(n, mode, counter, opt_func=Adam, opt=False, **kwargs):
    "What `counter` sees of our part of some steps in the middle of a fit; with `opt`, of the optimizer's, too"
    torch.manual_seed(0)
    learn = get_learner(Many(n), opt_func=opt_func)
    modes[mode](learn, **kwargs)
    learn.create_opt()
    on = [False]
    def _watch(obj, name, until=lambda: True):
        f = getattr(obj, name)
        def _f(*args, **kwargs):
            if not on[0] or not until(): return f(*args, **kwargs)
            with counter: return f(*args, **kwargs)
        _f.may_be_late = True # it counts, and changes nothing
        if not isinstance(obj, Callback): vars(obj)[name] = _f
        else: object.__setattr__(obj, '__class__', type(type(obj).__name__, (type(obj),), {name:staticmethod(_f), '__module__':type(obj).__module__})) # in the callback itself it would count as somebody else's
    ours = [cb for cb in learn.cbs if isinstance(cb, (ModelToHalf,PrecisionCallback))]
    for cb in ours:
        for o in events:
            if hasattr(type(cb), o): _watch(cb, o)
    _watch(next(cb for cb in ours if isinstance(cb, PrecisionCallback)), '_zero_grad')
    if opt: _watch(learn, '_step')
    steps = iter(range(100))
    before = learn.one_batch
    def _one_batch(i, b):
        on[0] = next(steps)>=4 # the first ones gather
        before(i, b)
    _one_batch.may_be_late,learn.one_batch = True,_one_batch
    with learn.no_bar(): learn.fit(2)
    return learn

@pytest.mark.parametrize('mode,kwargs', [('fp16',{}), ('fp16',dict(clip=1.)), ('bf16',{}), ('native_fp16',{}), ('native_bf16',{}), ('alone',{})])
def test_operations(mode, kwargs):
    "As many operations for 200 parameters as for 20"
    if not casts(): pytest.skip('PyTorch is too old')
    few,many = Ops(),Ops()
    for n,ops in ((20,few),(200,many)): count(n, mode, ops, **kwargs)
    assert few.ops==many.ops and few.ops.total()

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_operations_flat(mode):
    "With flat tensors that is true of the optimizer, too"
    if not casts(): pytest.skip('PyTorch is too old')
    few,many = Ops(),Ops()
    for n,ops in ((20,few),(200,many)): count(n, mode, ops, opt=True, flat_master=True)
    assert few.ops==many.ops and few.ops['aten.addcdiv_.default']
    assert not any('_foreach' in k for k in few.ops if k not in ('aten._foreach_copy_.default',))

@pytest.mark.parametrize('mode,kwargs', [('fp16',{}), ('bf16',{}), ('fp16',dict(flat_master=True)), ('native_bf16',{}), ('alone',{})])
def test_calls(mode, kwargs):
    "Nor does a function of ours run for each parameter"
    few,many = Calls(),Calls()
    for n,calls in ((20,few),(200,many)): count(n, mode, calls, opt=bool(kwargs), **kwargs)
    assert few.calls==many.calls and few.calls.total()

class Stranger(Callback):
    "Not one of fastai's or ours, so everything is looked at"
    def __init__(self, f=noop): self.f = f
    def after_batch(self):
        if self.training: self.f(self.learn)

moves = dict(
    weight        = lambda p: setattr(p, 'data', p.data*.9),
    no_gradient   = lambda p: setattr(p, 'grad', None),
    new_gradient  = lambda p: setattr(p, 'grad', torch.ones_like(p)),
    moved_gradient= lambda p: setattr(p.grad, 'data', p.grad.data+1.),
    gradient      = lambda p: p.grad.add_(1.),
    hook          = lambda p: p.register_hook(lambda g: g*2),
    late_hook     = lambda p: p.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad*2)),
    frozen        = lambda p: p.requires_grad_(False))

class Moves(nn.Module):
    "A model whose own code does something to its real parameters in some batches"
    def __init__(self, how):
        super().__init__()
        self.net,self.n,self.how = mlp(),0,moves[how]
    def forward(self, x):
        self.n += 1
        if self.n in (3,6): self.how(self.real[2])
        return self.net(x)

def move_state(learn):
    "What a stranger may do to the optimizer's state"
    for p in learn.opt.all_params().itemgot(0)[:2]:
        for k,v in learn.opt.state[p].items():
            if isinstance(v, torch.Tensor): v.data = v.data*.5

def trained(flat, mode='fp16', model=None, cbs=None, **kwargs):
    learn = get_learner(model() if model else mlp(), cbs=cbs() if cbs else None)
    if model: object.__setattr__(learn.model, 'real', [*learn.model.parameters()])
    modes[mode](learn, flat_master=flat, **kwargs)
    with learn.no_bar(): learn.fit(2); learn.fit(1)
    return weights(learn)

@pytest.mark.parametrize('mode', ['fp16','bf16','alone'])
@pytest.mark.parametrize('kwargs', [{}, *[dict(model=partial(Moves, o)) for o in moves], dict(clip=.1), dict(cbs=lambda: [Stranger()]), dict(cbs=lambda: [Stranger(move_state)]), dict(cbs=lambda: [GradientAccumulation(32)]),
                                    dict(cbs=lambda: [GradientClip(.1)])], ids=['',*moves,'clip','stranger','state','accumulated','clipped'])
def test_whoever_looks(mode, kwargs):
    "The same bits, whether steps are flat or not, and whoever changes what between them"
    assert all(map(torch.equal, trained(True, mode, **kwargs), trained(False, mode, **kwargs)))

def test_stranger_comes_and_goes():
    "What a callback has done before it went is seen"
    def _run(flat):
        learn = get_learner()
        learn.to_fp16(flat_master=flat, max_loss_scale=2.**10)
        class Once(Stranger):
            def after_batch(self):
                if self.training and self.train_iter==6: move_state(self.learn); self.learn.remove_cb(self)
        learn.add_cb(Once())
        learn.fit(3)
        return weights(learn)
    assert all(map(torch.equal, _run(True), _run(False)))

class Clears(Learner):
    "Forgets the optimizer's state between two batches of a fit, without any callback"
    def one_batch(self, i, b):
        if self.training and self.train_iter==5: self.opt.clear_state()
        super().one_batch(i, b)

@pytest.mark.parametrize('how', ['class','instance','hook'])
def test_state_cleared_by_others(how):
    "A learner of another class, a function put into a callback of fastai's, a hook of the model's: what they do to the optimizer counts"
    def _run(flat):
        learn = get_learner()
        if how=='class': learn.__class__ = Clears
        learn.to_bf16(flat_master=flat)
        def _clear(*_):
            if learn.training and learn.train_iter==5: learn.opt.clear_state()
        if how=='instance': object.__setattr__(learn.train_eval, 'before_batch', _clear)
        if how=='hook': learn.model[0].register_forward_pre_hook(_clear)
        learn.fit(3)
        return weights(learn)
    assert all(map(torch.equal, _run(True), _run(False)))

def by_metric(learn, f): learn.metrics = [lambda *_: (f(), 0.)[1]]
def by_loss(learn, f): own = learn.loss_func; learn.loss_func = lambda *args: (f(), own(*args))[1]
def by_hook(learn, f): learn.model.register_forward_hook(lambda *_: f())
def by_batch(learn, f): own = learn.one_batch; learn.one_batch = lambda *args: (f(), own(*args))[1]
def by_step(learn, f): own = learn._step; learn._step = lambda: (f(), own())[1]
def by_model(learn, f): learn.model.before_step = f
def by_calls(learn, f):
    class Own(Learner):
        def _call_one(self, event_name):
            super()._call_one(event_name)
            if event_name=='before_step': f()
    learn.__class__ = Own
def by_callback(learn, f): learn.add_cb(Callback(before_step=lambda _: f()))

@pytest.mark.parametrize('move', [False,True], ids=['replaced','moved'])
@pytest.mark.parametrize('how', [by_metric,by_loss,by_hook,by_batch,by_step,by_model,by_calls,by_callback])
def test_others_replace_the_state(how, move):
    "Tensors, or their memory, wherever that code is"
    ends = []
    for flat_master in (False,True):
        learn = get_learner().to_bf16(flat_master=flat_master)
        def reset():
            for s in learn.opt.state.values():
                if 'grad_avg' not in s: continue
                if move: s['grad_avg'].data = torch.ones_like(s['grad_avg'])
                else:    s['grad_avg'] = torch.ones_like(s['grad_avg'])
        how(learn, reset)
        learn.fit(3)
        ends.append(weights(learn))
    assert all(map(torch.equal, *ends)) and flat(ends[0]).isfinite().all()

@pytest.mark.parametrize('event', ['before_step','after_step','after_cancel_step'])
@pytest.mark.parametrize('who', ['learn','model','callback','patched'])
def test_others_replace_gradients_once(who, event, monkeypatch):
    "In one batch in the middle, when nobody has done so before; also after a step that was skipped"
    ends = []
    for flat_master in (False,True):
        learn = get_learner().to_bf16(flat_master=flat_master)
        def overflow(cb):
            if cb.training and cb.train_iter==6 and event=='after_cancel_step': cb.learn.loss_grad = cb.loss_grad*float('inf')
        learn.add_cb(Callback(after_loss=overflow))
        def halve(*_):
            if learn.training and learn.train_iter==6:
                for p in learn.model.parameters(): p.grad = p.grad.nan_to_num(1., 1., 1.)*.5
        if who=='patched': monkeypatch.setattr(Recorder, event, halve, raising=False)
        elif who=='callback': learn.add_cb(Callback(**{event:halve}))
        else: object.__setattr__({'learn':learn, 'model':learn.model}[who], event, halve)
        learn.fit(3)
        ends.append(weights(learn))
    assert all(map(torch.equal, *ends))
