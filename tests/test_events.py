"The calls of callbacks while a precision is on, against fastai's own: the same ones, in the same order, whatever is done to them"
import sys
from unittest import mock

import pytest
from fastai.callback.core import event
from fastai.learner import Learner
from learners import *
from mp_callbacks import callback

events = [o for o in vars(event) if o.startswith(('before_','after_'))]
log = []
pytestmark = pytest.mark.filterwarnings('ignore:float16 on a CPU')

def note(cb, name): log.append((type(cb).__name__,cb.order,name,bool(cb.learn.training) if hasattr(cb.learn, 'training') else None))

class Notes(Callback):
    "Writes down all its events"
    def __init__(self, order): self.order = order
for o in events: setattr(Notes, o, lambda self, o=o: note(self, o))

class Some(Callback):
    "Only two, the second in the object itself"
    def __init__(self): self.before_step = lambda: note(self, 'before_step')
    def before_batch(self): note(self, 'before_batch')

class Catches(Callback):
    def __call__(self, event_name): note(self, event_name)

class Answers(Callback):
    "Has every attribute that it is asked for"
    def __getattr__(self, k):
        if k in events: return lambda: note(self, k)
        return super().__getattr__(k)

class Ordered(Callback):
    "Comes first from the third batch on"
    order = 70
    def before_batch(self): note(self, 'before_batch')
    def after_batch(self):
        if self.training and self.iter==2: self.order = -70

class Brings(Callback):
    "Adds a callback in the middle of an event, and removes it in a later one"
    order = 1
    def before_batch(self):
        if self.training and self.iter==2: self.other = Notes(2); self.learn.add_cb(self.other)
    def after_backward(self):
        if self.iter==4: self.learn.remove_cb(self.other)

class Rests(Callback):
    "Does nothing for the rest of the fit"
    def after_batch(self): note(self, 'after_batch'); self.run = False

class Validates(Callback):
    run_train = False
    def after_batch(self): note(self, 'after_batch')

class Stops(Callback):
    order = 5
    def before_batch(self):
        if self.training and self.iter==1: raise StopIteration('asked')
    def after_loss(self):
        if self.training and self.iter==3: raise CancelBatchException

class Asked(nn.Module):
    "A model with a method that is called like an event, which fastai calls for each callback that has none"
    def __init__(self): super().__init__(); self.inner = mlp()
    def forward(self, x): return self.inner(x)
    def after_pred(self): log.append('model')

class Answering(Asked):
    "A model that finds attributes in its own way"
    after_pred = property() # not that one
    def __getattr__(self, k):
        if k=='after_loss': return lambda: log.append('model')
        return super().__getattr__(k)

class Delegates(Callback):
    "Looks for events in an object of its own"
    _default = 'inner'
    def __init__(self): self.inner = Other()
class Other:
    def __getattr__(self, k):
        if k in events: return lambda: log.append(k)
        raise AttributeError(k)

class Overrides(Learner):
    def _call_one(self, event_name): log.append(event_name); super()._call_one(event_name)

class Shows(Learner):
    def before_loss(self): log.append('learner')
    def after_loss(self): log.append('learner')

def mlp(): return nn.Sequential(nn.Linear(8,4), nn.Linear(4,1))

def seen(call, mode, cbs=(), model=mlp, cls=Learner, then=None):
    "What is written down in two fits, with events that come by `call`"
    log.clear()
    set_seed(0)
    learn = get_learner(model())
    learn.__class__ = cls
    modes[mode](learn)
    learn.add_cbs([Notes(50), *(o() for o in cbs), Notes(-1), Notes(50)])
    with mock.patch.object(Learner, '__call__', call), learn.no_bar(), learn.no_logging():
        for _ in range(2): learn.fit(1)
        if then: then(learn)
    return [*log, [p.tolist() for p in learn.model.parameters()]]

@pytest.mark.parametrize('mode', ['bf16','native_bf16','fp16'])
@pytest.mark.parametrize('case', [dict(), *(dict(cbs=[o]) for o in (Some,Catches,Answers,Delegates,Ordered,Brings,Rests,Validates,Stops)), dict(cbs=[Brings,Stops,Some,Ordered]), dict(model=Asked), dict(model=Answering), dict(cls=Overrides), dict(cls=Shows),
                                  dict(then=lambda learn: learn(['before_epoch','after_epoch']))], ids=lambda o: '-'.join(getattr(v, '__name__', None) or '-'.join(c.__name__ for c in v) for v in o.values()) or 'plain')
def test_same_calls(case, mode):
    ours,theirs = seen(Learner.__call__, mode, **case),seen(Learner.__call__.plain, mode, **case)
    assert len(ours)>100 and ours==theirs

def calls_in_vain(learn):
    "How often in a fit a callback is called that has no method for the event"
    n = 0
    def _count(frame, kind, _): # `Callback.__call__` itself can't be replaced: that is a reason to call all
        nonlocal n
        if kind!='call' or frame.f_code is not Callback.__call__.__code__: return
        name = frame.f_locals['event_name']
        n += name!='after_fit' and not hasattr(type(frame.f_locals['self']), name)
    with learn.no_bar(), learn.no_logging():
        sys.setprofile(_count)
        try: learn.fit(1)
        finally: sys.setprofile(None)
    return n

def test_idle_ones_are_not_called():
    learn = get_learner(mlp()).to_native_bf16()
    assert calls_in_vain(learn)==0
    assert calls_in_vain(learn.to_fp32())>100

def test_all_calls_are_watched():
    "Who replaces `Callback.__call__`, to watch, sees each call"
    def watched(mode):
        n,call = [],Callback.__call__
        def _count(self, event_name): n.append(event_name); return call(self, event_name)
        learn = modes[mode](get_learner(mlp())) if mode else get_learner(mlp())
        learn.add_cb(Notes(3))
        with mock.patch.object(Callback, '__call__', _count), learn.no_bar(), learn.no_logging(): learn.fit(1)
        return [n.count(o)/len(learn.cbs) for o in ('before_batch','before_step','after_pred')]
    assert watched('native_bf16')==watched(None)

def test_names_that_are_ours_alone():
    "A callback that isn't ours may have a `during_fit` or a `last_look` of its own, in any precision"
    class Own(Callback):
        during_epoch = 3
        def during_fit(self): return 1
        def during_batch(self): return 1
        def last_look(self): return 1
    for mode in (None,'fp16','native_bf16'):
        learn = get_learner(mlp(), cbs=Own())
        if mode: modes[mode](learn)
        learn.fit(1)

def test_missing_event():
    learn = get_learner(mlp()).to_native_bf16()
    with pytest.raises(Exception, match='missing before_lunch'): learn('before_lunch')

def test_error_names_the_callback():
    class Fails(Callback):
        def before_step(self): raise KeyError('lost')
    with pytest.raises(KeyError, match='Exception occured in `Fails` when calling event `before_step`'): get_learner(mlp()).to_native_bf16().fit(1, cbs=Fails())

class Plain(nn.Module):
    "`before_batch` is somewhere in it, or isn't"
    def __init__(self, put=noop): super().__init__(); put(self)
class Method(Plain):
    def before_batch(self): pass
class Missing(Plain):
    @property
    def before_batch(self): return self.nowhere
class Failing(Plain):
    @property
    def before_batch(self): raise RuntimeError('as asked')
class Found(Plain):
    def __getattr__(self, k): return noop if k=='before_batch' else super().__getattr__(k)
class Given(Plain):
    def __getattribute__(self, k): return noop if k=='before_batch' else super().__getattribute__(k)
class Hidden(Method):
    def __getattribute__(self, k): return self.nowhere if k=='before_batch' else super().__getattribute__(k)
class Slotted(Plain): __slots__ = 'before_batch'
class OfItsKind(Plain, metaclass=type('Kind', (type,), dict(before_batch=1))): pass
class Bare: __slots__ = ()
class Duck:
    "No module, but it has all of one's methods that are asked for"
    def __init__(self, net): self.net = net
    def __call__(self, x): return self.forward(x)
    def forward(self, x): return self.net(x)
    training = property(lambda self: self.net.training)
for o in 'parameters named_parameters buffers named_buffers modules named_modules children named_children train eval zero_grad state_dict load_state_dict requires_grad_ to apply'.split():
    setattr(Duck, o, lambda self, *args, o=o, **kwargs: getattr(self.net, o)(*args, **kwargs))

models = dict(none=None, function=noop, bare=Bare(), duck=Duck(nn.Linear(1,1)), plain=Plain(), method=Method(), missing=Missing(), found=Found(), given=Given(), hidden=Hidden(), slotted=Slotted(), of_its_kind=OfItsKind(),
              attribute=Plain(lambda m: setattr(m, 'before_batch', noop)), module=Plain(lambda m: setattr(m, 'before_batch', nn.Linear(1,1))), no_module=Plain(lambda m: m.register_module('before_batch', None)),
              parameter=Plain(lambda m: setattr(m, 'before_batch', nn.Parameter(torch.ones(1)))), buffer=Plain(lambda m: m.register_buffer('before_batch', torch.ones(1))),
              data_parallel=nn.DataParallel(Method()), scripted=torch.jit.trace(nn.Linear(1,1), torch.ones(1)))

@pytest.mark.parametrize('name', models)
def test_models_that_answer(name):
    "Whether a model has something by the name of an event is found out as `hasattr` does, only faster"
    assert [callback._has(models[name], k) for k in ('before_batch','after_step')]==[hasattr(models[name], k) for k in ('before_batch','after_step')]

def test_models_that_fail():
    with pytest.raises(RuntimeError, match='as asked'): callback._has(Failing(), 'before_batch')

@pytest.mark.parametrize('mode', modes)
def test_model_that_is_no_module(mode):
    learn = modes[mode](get_learner(Duck(mlp())))
    before = learn.validate()[0]
    learn.fit(2)
    assert learn.validate()[0]<before
