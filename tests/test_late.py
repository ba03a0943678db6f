"""A fused optimizer that finds out by itself whether to step, and a host that learns it a step late: everything is, to the bit, as if the host had waited"""
import gc,os,pickle,subprocess,sys,warnings,weakref
from functools import wraps
from pathlib import Path

import pytest
from fastai.callback.training import GradientAccumulation,GradientClip
from torch.optim.optimizer import register_optimizer_step_pre_hook
from mp_callbacks.grads import LateStats
from faults import *
from faults import fused_adam

pytestmark = pytest.mark.filterwarnings('ignore')

def optimizer(kind, **kwargs): return lambda params, **kw: OptimWrapper(params, kind, fused=True, **kw, **kwargs)
optimizers = dict(adam=fused_adam, adamw=optimizer(torch.optim.AdamW, amsgrad=True), sgd=optimizer(torch.optim.SGD), momentum=optimizer(torch.optim.SGD, momentum=.9))
late_modes = {**{k:v for k,v in modes.items() if 'flat' not in k and 'late' not in k and 'clip' not in k}, 'classic': lambda learn: learn.to_fp16(headroom=None, max_loss_scale=2.**14, scale_wait=3), 'nonzero': lambda learn: learn.to_fp16('apex_hysteresis'),
              'growing': lambda learn: learn.to_native_fp16(2.**12, growth_interval=3, growth_factor=4., backoff_factor=.25)}

class Spoil(Callback):
    "Overflow in some batches: in the gradients, or in everything"
    order = -50
    def __init__(self, at): self.at,self.n = at,0
    def before_batch(self):
        self.now = self.training and self.n in self.at
        if self.training: self.n += 1
        if self.now and self.n%2: self.learn.xb = (self.xb[0]*float('inf'),)
    def after_loss(self):
        if self.now: self.learn.loss_grad = self.learn.loss_grad*float('inf')

def twins(mode, cbs=(), n=1, opt='adam', **kwargs):
    "The same learner twice, fitted; the second one may be late"
    res = []
    for may in (False,True):
        learn = get_learner(mlp(True), opt_func=optimizers[opt], lr=1e-3, **kwargs)
        late_modes[mode](learn)
        learn.mixed_precision.may_be_late = may
        for _ in range(n): learn.fit(2, cbs=[cb() for cb in cbs])
        res.append(learn)
    return res

def check(waited, late):
    assert same(everything(waited), everything(late))
    assert waited.precision_recorder.log.equals(late.precision_recorder.log)
    assert repr(waited.recorder.values)==repr(late.recorder.values) # nan is not nan
    assert repr([*map(float, waited.recorder.losses)])==repr([*map(float, late.recorder.losses)])
    assert not {'found_inf','grad_scale'}&set(vars(late.opt.opt))

def was_late(learn): return isinstance(learn.step_stats, LateStats)

@pytest.mark.parametrize('at', [(),(1,),(2,3),(7,),(0,4,5,6)], ids=str)
@pytest.mark.parametrize('opt', optimizers)
@pytest.mark.parametrize('mode', late_modes)
def test_same(mode, opt, at):
    "Weights, buffers, the optimizer's state, the scale, the log: with overflows in no step, the first of all, the last of an epoch, several in a row"
    a,b = twins(mode, [partial(Spoil, at)], n=2, opt=opt)
    check(a, b)
    assert (was_late(b) or mode=='fp16' and 6 in at) and not was_late(a) and skipped(b)>=2*len(at) # after an overflow, what headroom there is must be known

@pytest.mark.parametrize('mode', [lambda learn: learn.to_bf16(clip=.05), lambda learn: learn.to_native_fp16(3e3, growth_interval=3, growth_factor=1.7)], ids=['clip','scale'])
def test_about_the_same(mode):
    "The kernel divides where `prepare_grads` multiplies: bits may differ unless the divisor is a power of two"
    res = []
    for may in (False,True):
        mode(learn := get_learner(mlp(True), opt_func=fused_adam, lr=1e-3))
        learn.mixed_precision.may_be_late = may
        learn.fit(2, cbs=Spoil((3,)))
        res.append(learn)
    a,b = res
    assert was_late(b) and skipped(a)==skipped(b)==1
    if learn.mixed_precision.clip: assert (a.precision_recorder.log.norm.drop(3)>.05).all()
    assert a.precision_recorder.log.scale.equals(b.precision_recorder.log.scale)
    assert apart(b, a, flat(weights(get_learner(mlp(True)))))<1e-4

class Looks(Callback):
    order = 30
    def before_step(self): pass
class Waits(Callback):
    def after_cancel_step(self): pass

@pytest.mark.parametrize('cb', [GradientClip,Looks,Waits])
def test_who_must_know(cb):
    "Others that look at the gradients before the step, or want to hear of one that is skipped: then the host waits"
    a,b = twins('native_fp16', [partial(Spoil, (2,)),cb])
    assert not was_late(b)
    check(a, b)

def test_what_must_be_known():
    "Hidden states, an error in place of a lower scale, an optimizer that isn't fused, sparse gradients, parameters that the optimizer hasn't"
    def late(learn, mode='native_fp16'):
        late_modes[mode](learn).fit(1)
        return was_late(learn)
    class Remembers(nn.Sequential):
        def reset(self): pass
    def some(model): return model[2:].parameters()
    assert late(get_learner(opt_func=fused_adam))
    assert not late(get_learner(Remembers(*mlp()), opt_func=fused_adam))
    assert not late(get_learner(opt_func=lambda ps,**kw: OptimWrapper(ps, torch.optim.Adam, **kw)))
    assert not late(get_learner(opt_func=fused_adam, splitter=some))
    learn = get_learner(opt_func=fused_adam).to_fp16('deepspeed')
    learn.fit(1)
    assert not was_late(learn)

def test_with_the_loss_on_the_device():
    "Then nobody waits at all, see test_syncs.py; and everything is still the same"
    res = []
    for may in (False,True):
        learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3).to_native_fp16(2.**12, growth_interval=3, loss_on_device=may)
        learn.mixed_precision.may_be_late = may
        learn.fit(2, cbs=Spoil((1,2,7)))
        learn.fit(1, cbs=Spoil((0,)))
        res.append(learn)
    check(*res)
    assert was_late(res[1]) and skipped(res[1])==4

def test_accumulates():
    a,b = twins('native_fp16', [partial(Spoil, (5,)), partial(GradientAccumulation, 32)])
    check(a, b)
    assert was_late(b) and skipped(b)==1

class Asks(Callback):
    "What is the scale now? Then the host knows before the next step."
    def after_batch(self): self.learn.mixed_precision.loss_scale
class Keeps(Callback):
    def after_batch(self): self.learn.mixed_precision.precision_state()
class First(Callback):
    "What are the weights after the first step? It is a good one; only then can the next be late."
    def before_fit(self): self.weights = None
    def after_batch(self):
        if self.weights is None: self.weights = flat(weights(self.learn))

@pytest.mark.parametrize('cb', [Callback,Asks,Keeps])
@pytest.mark.parametrize('mode', ['native_fp16','fp16'])
def test_max_skips(mode, cb):
    "The same words, but a step later; no weight has changed, and the learner goes on to live"
    said,start = [],flat(weights(get_learner(mlp(True))))
    for may in (False,True):
        learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3)
        learn.to_native_fp16(max_skips=5) if mode=='native_fp16' else learn.to_fp16(headroom=None, max_loss_scale=2.**12, max_skips=5)
        learn.mixed_precision.may_be_late = may
        learn.fit(1)
        with pytest.raises(FloatingPointError) as e: learn.fit(3, cbs=[Spoil(range(1,100)),cb(),first := First()])
        after = first.weights
        said.append((str(e.value), len(learn.precision_recorder.rows), learn.mixed_precision.loss_scale, learn.mixed_precision._skips))
        assert torch.equal(flat(weights(learn)), after) and not torch.equal(after, start)
        learn.fit(1)
        assert not torch.equal(flat(weights(learn)), after)
    assert said[0]==said[1]

class Huge(Callback):
    "Skip all steps after the second, and let the model see huge numbers in one of them"
    order = -50
    def __init__(self, nth): self.nth,self.n = nth,0
    def before_batch(self):
        if not self.training: return
        self.n += 1
        if self.n==self.nth: self.learn.xb = (self.xb[0]+1e9,)
    def after_loss(self):
        if self.training and self.n>2: self.learn.loss_grad = self.learn.loss_grad*float('inf')

@pytest.mark.parametrize('cb', [Callback,Asks])
@pytest.mark.parametrize('nth', [9,10,11])
def test_looks_at_its_own_batch(nth, cb):
    "Eight steps in a row were skipped, the tenth is the last of them: what was in its batch? The host hears of it when it has another batch already."
    said = []
    for may in (False,True):
        learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3).to_native_fp16()
        learn.mixed_precision.may_be_late = may
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(3, cbs=[Huge(nth),cb()])
        assert was_late(learn)==may and skipped(learn)==10
        said.append([m for o in caught if 'in a row' in (m := str(o.message))])
    assert said[0]==said[1] and len(said[0])==(nth==10)

def test_says_so_at_the_end_of_an_epoch():
    learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3).to_native_fp16(max_skips=2)
    learn.fit(1)
    with pytest.raises(FloatingPointError, match='2 steps in a row'): learn.fit(1, cbs=Spoil((2,3)))

class Stops(Callback):
    "Keeps `before_step` from the callbacks behind it, as `StopIteration` does in fastai"
    order = 5
    def before_step(self): raise StopIteration('asked')

def test_event_kept_from_us():
    "Then the optimizer gets unscaled gradients all the same, and only if they are finite"
    a,b = twins('native_fp16', [partial(Spoil, (2,5)),Stops])
    check(a, b)
    assert skipped(b)==2

class Forgets(Callback):
    order = 90
    def after_batch(self):
        if self.training and self.iter==1: self.opt.clear_state()

class Warms(Callback):
    "Momentum from the second step on"
    def before_batch(self): self.opt.set_hyper('mom', .9 if self.train_iter>1 else 0.)

@pytest.mark.parametrize('cb', [Forgets,Warms])
@pytest.mark.parametrize('opt', ['momentum','adam'])
def test_state_made_anew(opt, cb):
    "in the middle of a fit, in a step that is skipped: that leaves none behind which nobody has filled"
    if cb is Warms and opt=='adam': pytest.skip('its state is always there')
    a,b = twins('bf16', [partial(Spoil, (2,)),cb], opt=opt)
    check(a, b)
    assert skipped(b)==1 and was_late(b)

def test_hooks_of_the_optimizer():
    "find unscaled gradients, in each step"
    norms = []
    for may in (False,True):
        learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3).to_native_fp16(2.**10)
        learn.mixed_precision.may_be_late = may
        learn.create_opt()
        learn.opt.opt.register_step_pre_hook(lambda opt,*_: norms.append(opt.param_groups[0]['params'][0].grad.norm().item()))
        learn.fit(1)
    assert len(norms)==8 and norms[:4]==norms[4:]

def clipped(params):
    "What a user may do between the check and the kernel"
    params = list(params)
    seen.append(nn.utils.clip_grad_norm_(params, .1).item())

def own_wrapper(learn):
    class Own(OptimWrapper):
        def step(self, closure=None): clipped(learn.model.parameters()); self.opt.step(closure)
    learn.opt.__class__ = Own
def own_step_of_wrapper(learn): learn.opt.step = lambda *a: (clipped(learn.model.parameters()), learn.opt.opt.step())
def own_optimizer(learn):
    class Own(type(learn.opt.opt)):
        def step(self, closure=None): clipped(learn.model.parameters()); return super().step(closure)
    learn.opt.opt.__class__ = Own
def own_learner(learn):
    class Own(Learner):
        def _step(self): clipped(self.model.parameters()); super()._step()
    learn.__class__ = Own
def sometimes(learn):
    class Own(Learner):
        def _step(self): super()._step() if self.iter%2 else self.opt.step()
    learn.__class__ = Own
def own_loop(learn):
    class Own(Learner):
        def _do_grad_opt(self):
            self._with_events(self._backward, 'backward', CancelBackwardException)
            def _clipped_step(): clipped(self.model.parameters()); self._step()
            self._with_events(_clipped_step, 'step', CancelStepException)
            self.opt.zero_grad()
    learn.__class__ = Own
def own_events(learn, name='__call__'):
    def _clipped(self, event_name):
        getattr(Learner, name)(self, event_name)
        if event_name=='before_step': clipped(self.model.parameters())
    learn.__class__ = type('Own', (Learner,), {name:_clipped})
def own_call(learn): own_events(learn, '_call_one')
def own_with(learn):
    plain = learn._with_events
    def _clipped(f, *args, **kwargs): plain((lambda: (clipped(learn.model.parameters()), f())) if args[0]=='step' else f, *args, **kwargs)
    learn._with_events = _clipped
def own_batch(learn):
    plain = learn._do_one_batch
    def _batch():
        if not learn.training: return plain()
        learn.pred = learn.model(*learn.xb)
        learn('after_pred')
        learn.loss_grad = learn.loss_func(learn.pred.float(), *learn.yb)
        learn.loss = learn.loss_grad.clone()
        learn('after_loss')
        learn._with_events(learn._backward, 'backward', CancelBackwardException)
        def _clipped_step(): clipped(learn.model.parameters()); learn._step()
        learn._with_events(_clipped_step, 'step', CancelStepException)
        learn.opt.zero_grad()
    learn._do_one_batch = _batch
class OwnWrapper(OptimWrapper):
    def __getattr__(self, k): return (lambda *a: (clipped(p for pg in self.opt.param_groups for p in pg['params']), self.opt.step())) if k=='step' else super().__getattr__(k)
def answering_wrapper(learn): learn.opt.__class__ = OwnWrapper
def counting_hook(learn): learn.opt.opt.register_step_post_hook(lambda *_: seen.append(next(learn.model.parameters()).grad.norm().item()))
def own_step(learn):
    plain = learn._step
    learn._step = lambda: (clipped(learn.model.parameters()), plain())
def learners_event(learn):
    class Own(Learner):
        def before_step(self): clipped(self.model.parameters())
    learn.__class__ = Own
def models_event(learn): learn.model.before_step = lambda: clipped(learn.model.parameters())
class Catches(Callback):
    order = 20
    def __call__(self, event_name):
        if event_name=='before_step': clipped(self.model.parameters())
class Answers(Callback):
    order = 20
    def __getattr__(self, k):
        if k=='before_step': return lambda: clipped(self.model.parameters())
        return super().__getattr__(k)
def catches(learn): learn.add_cb(Catches())
def answers(learn): learn.add_cb(Answers())
def clock(learn):
    plain = learn._step
    def _timed(): seen.append(0); plain()
    _timed.may_be_late,learn._step = True,_timed

@pytest.mark.parametrize('between', [own_wrapper,own_step_of_wrapper,answering_wrapper,own_optimizer,counting_hook,own_learner,sometimes,own_loop,own_call,own_events,own_with,own_batch,own_step,learners_event,models_event,catches,answers,clock], ids=lambda o: o.__name__)
@pytest.mark.parametrize('opt', ['adam','momentum'])
def test_code_in_between(between, opt):
    "It finds unscaled gradients, and nothing steps on others; only a clock that says so doesn't make the host wait"
    global seen
    ends = []
    for may in (False,True):
        seen = []
        learn = get_learner(mlp(True), opt_func=optimizers[opt], lr=1e-3).to_native_fp16(2.**10)
        learn.mixed_precision.may_be_late = may
        learn.fit(1)
        between(learn)
        learn.fit(2, cbs=Spoil((6,)))
        ends.append((learn, seen))
    (a,in_a),(b,in_b) = ends
    check(a, b)
    assert skipped(b)==1 and was_late(b)==(between is clock)
    if between is clock: assert len(in_b)==8
    elif between is not sometimes: assert repr(in_a)==repr(in_b) and len(in_a)>=7 # nan is not nan

@pytest.mark.parametrize('opt', ['adam','momentum'])
@pytest.mark.parametrize('mode', ['native_fp16','fp16'])
def test_twice_in_a_group(mode, opt):
    "The kernel would unscale a parameter that the optimizer has twice, twice"
    a,b = twins(mode, opt=opt, splitter=lambda m: [[*m.parameters(), m[0].weight]])
    check(a, b)
    assert not was_late(b)

def test_wrapped_class(monkeypatch):
    "Nor when somebody has put a function around the step of all optimizers of a class, and it says that it is PyTorch's"
    norms,plain = [],torch.optim.Adam.step
    @wraps(plain)
    def _step(self, *args):
        norms.append(self.param_groups[0]['params'][0].grad.norm().item())
        return plain(self, *args)
    monkeypatch.setattr(torch.optim.Adam, 'step', _step)
    a,b = twins('native_fp16')
    check(a, b)
    assert _step.__module__=='torch.optim.adam' and len(norms)==16 and norms[:8]==norms[8:] and not was_late(b)

def test_hooks_of_all_optimizers():
    norms = []
    hook = register_optimizer_step_pre_hook(lambda opt,*_: norms.append(opt.param_groups[0]['params'][0].grad.norm().item()))
    try: a,b = twins('native_fp16')
    finally: hook.remove()
    check(a, b)
    assert len(norms)==16 and norms[:8]==norms[8:] and not was_late(b)

def test_patched_before_us():
    "Who changes fastai's loop before this package is imported is between check and step as well"
    code = """if True:
        import sys,warnings
        warnings.simplefilter('ignore')
        import torch
        from fastai.basics import *
        own = Learner._step
        def _step(self): seen.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), .1).item()); own(self)
        Learner._step = _step
        from learners import *
        from mp_callbacks.grads import LateStats
        def fused(ps, **kw): return OptimWrapper(ps, torch.optim.SGD, fused=True, **kw)
        ends = []
        for may in (False,True):
            seen = []
            learn = get_learner(opt_func=fused).to_native_fp16(2.**10)
            learn.mixed_precision.may_be_late = may
            learn.fit(1)
            ends.append(seen)
        assert ends[0]==ends[1] and len(seen)==4 and not isinstance(learn.step_stats, LateStats), ends
        """
    subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parent, env={**os.environ, 'PYTHONPATH':os.pathsep.join(sys.path)}, check=True)

class Mine(PrecisionRecorder):
    "A subclass of one of ours that can be late, which can't"
    def after_cancel_step(self): heard.append(self.step_stats.step)

@pytest.mark.parametrize('says', [False,True])
def test_subclass_must_know(says):
    global heard
    ends = []
    for may in (False,True):
        heard = []
        learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3).to_native_fp16(2.**10)
        learn.mixed_precision.may_be_late = may
        learn.add_cb(type('Says', (Mine,), dict(may_be_late=True))() if says else Mine())
        learn.fit(1, cbs=Spoil((2,)))
        ends.append(heard)
    assert ends==[[2],[] if says else [2]] and was_late(learn)==says

def test_callback_without_order():
    class Duck:
        name,learn = 'duck',None
        def __call__(self, event_name): pass
    for mode in ('native_fp16','bf16'): late_modes[mode](get_learner(opt_func=fused_adam)).fit(1, cbs=[Duck()])

class Clears(Callback):
    "Clears the optimizer's state, in place"
    order = 90
    def after_batch(self):
        if self.training and self.iter==1: self.forget(self.opt.opt.state)

@pytest.mark.parametrize('forget', [lambda state: state.clear(), lambda state: [o.clear() for o in state.values()]], ids=['all','each'])
@pytest.mark.parametrize('opt', optimizers)
def test_forgotten_state(opt, forget):
    "What would be made anew by a step that is skipped is waited for: a momentum would be of whatever was in memory"
    def cb(): cb = Clears(); cb.forget = forget; return cb
    a,b = twins('native_fp16', [cb, partial(Spoil, (2,))], opt=opt)
    check(a, b)
    assert skipped(b)==1

def test_frees_the_state():
    "After a fit nothing of ours keeps the optimizer's state"
    learn = twins('native_fp16')[1]
    state = weakref.ref(next(iter(learn.opt.opt.state.values()))['exp_avg'])
    learn.opt = None
    gc.collect()
    assert state() is None

class CopiesAll(Callback):
    order = 90
    def after_batch(self):
        if self.training and self.epoch==0 and self.iter==2:
            cb = self.learn.mixed_precision
            learn,cb.learn = cb.learn,None
            try: self.copy = pickle.loads(pickle.dumps(cb))
            finally: cb.learn = learn

def test_copied_callback():
    "It knows what became of the last step"
    cbs = [CopiesAll(),CopiesAll()]
    it = iter(cbs)
    check(*twins('native_fp16', [partial(Spoil, (2,)), lambda: next(it)]))
    a,b = [(o.copy.loss_scale,o.copy._skips,o.copy._steps) for o in cbs]
    assert a==b==(2.**9,1,3)

class Copies(Callback):
    order = 90
    def after_batch(self):
        if self.training and self.iter==2: self.copy = pickle.loads(pickle.dumps(self.step_stats))

def test_copied_before_it_is_known(monkeypatch):
    "An event of a device can't be pickled"
    class Event:
        def synchronize(self): pass
        def __reduce__(self): raise TypeError('cannot pickle')
    monkeypatch.setattr('mp_callbacks.grads.event_on', lambda device: Event())
    cb = Copies()
    learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3, cbs=cb).to_native_bf16()
    learn.fit(1)
    assert was_late(learn) and isinstance(cb.copy, LateStats) and cb.copy.step==2 and cb.copy.finite

class Asks(Callback):
    "Read what is only known to the device, in each batch"
    order = 90
    def after_batch(self):
        if self.training: self.seen = getattr(self, 'seen', [])+[(self.step_stats.finite, self.step_stats.norm, self.mixed_precision.loss_scale)]

def test_asked():
    "Who asks is told, and nothing is different for it"
    cbs = [Asks(),Asks()]
    it = iter(cbs)
    a,b = twins('growing', [partial(Spoil, (2,5)), lambda: next(it)])
    check(a, b)
    assert repr(cbs[0].seen)==repr(cbs[1].seen) and len(cbs[0].seen)==8 and was_late(b)

class Saves(Callback):
    order = 90
    def after_batch(self):
        if self.training and self.epoch==0 and self.iter==2: self.learn.save('here')

def test_saved_before_it_is_known(tmp_path):
    "in the middle of an epoch, right after a step that was skipped; and resumed"
    a,b = twins('growing', [partial(Spoil, (2,)),Saves], path=tmp_path)
    check(a, b)
    files = []
    for may in (False,True):
        learn = get_learner(mlp(True), opt_func=fused_adam, lr=1e-3, path=tmp_path)
        late_modes['growing'](learn)
        learn.load('here')
        assert learn.mixed_precision.precision_state()['skips']==1
        learn.mixed_precision.may_be_late = may
        learn.fit(1)
        files.append(learn)
    check(*files)

def test_leaves_nothing_behind(tmp_path):
    learn = twins('growing', [partial(Spoil, (7,))], path=tmp_path)[1]
    assert learn.mixed_precision._late is None and learn.step_stats.known is not None
    assert pickle.loads(pickle.dumps(learn.step_stats)).finite is False
    learn.export('x.pkl')
    assert load_learner(tmp_path/'x.pkl').predict(3)[2].isfinite().all()
    learn.to_fp32()
    assert not hasattr(learn, 'step_stats')

@pytest.mark.parametrize('place', [('train',o,order) for o in of_training for order in (-50,80)]+[('train',o,0) for o in code]+[('fit','after_train',-50)], ids=lambda o: '-'.join(map(str, o)))
def test_faults(place, tmp_path):
    "While nobody knows what became of the step before, which was skipped"
    for name in faults:
        ends = []
        for may in (False,True):
            patient = Patient('native_fp16_late', tmp_path)
            patient.learn.mixed_precision.may_be_late = patient.twin.mixed_precision.may_be_late = may
            patient.learn.add_cb(spoil := Spoil((1,)))
            fault,out = patient.suffer(name, place)
            patient.learn.remove_cb(spoil)
            patient.learn.fit(1)
            ends.append((everything(patient.learn), fault.raised is None, type(out)))
            if name=='RuntimeError': patient.cbs = list(patient.learn.cbs); patient.usable((may, name, place))
        assert ends[0][1:]==ends[1][1:], (place, name)
        if place[1]=='step' and name in cancels: continue # out of the optimizer: the gradients stay for the next step, and their verdict was, or was not, counted
        assert same(ends[0][0], ends[1][0]), (place, name)
