"""Where promises broke: threads, stand-ins in any order, copies and pickles, modules that change their own weights,
optimizers unlike the others"""
import pickle,sys,threading,weakref
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from importlib.util import find_spec

import pytest,torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from mp_callbacks import dtypes,jmp,mpx
from mp_callbacks.precision import PrecisionCallback
from mp_callbacks.step import read_state
from mp_callbacks.functional import train_step
from mp_callbacks.modules import StandIn,named_modules,parameter_name
from learners import *
from states import assert_plain,identical

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')
bf16 = torch.bfloat16

def as_before(model, params):
    "Does `model` have the very parameters `params`, and nothing of ours?"
    assert_plain(model)
    assert identical(model.parameters(), params)

# --- Threads

def in_threads(*fs):
    "Call all `fs` at the same time, and return their errors"
    errors = []
    def _call(f):
        try: f()
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=_call, args=(f,)) for f in fs]
    for o in threads: o.start()
    for o in threads: o.join()
    return errors

class Own(nn.Module):
    "Parameters of its own, and modules with more inside"
    def __init__(self):
        super().__init__()
        self.gain,self.lin,self.norm = nn.Parameter(torch.ones(64)),nn.Linear(64,64),nn.RMSNorm(64)
    def forward(self, x): return x+self.gain*self.norm(self.lin(x))

@pytest.fixture
def switching(monkeypatch):
    "Threads that take turns as often as they can"
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)

@pytest.mark.parametrize('grads', ['one','both'])
def test_threads(grads, switching):
    """Two threads in one `with`: each call computes what it computes alone, gradients included, and the parameters stay
    for a third thread that looks"""
    torch.manual_seed(0)
    model,x = nn.Sequential(*[o for _ in range(3) for o in (nn.Linear(64,64), Own())]),torch.randn(8,64)
    params,half = [*model.parameters()],half_precision(model, bf16)
    with half:
        want = model(x)
        grad = torch.autograd.grad(want.sum(), params)
    def predict():
        with torch.no_grad():
            for _ in range(60): assert torch.equal(model(x), want)
    def train():
        for _ in range(40): assert all(map(torch.equal, torch.autograd.grad(model(x).sum(), params), grad))
    def look():
        for _ in range(60): assert identical(model.parameters(), params)
    with half: errors = in_threads(predict if grads=='one' else train, train, look)
    assert errors==[] and not half.cast.calls
    as_before(model, params)

def test_each_thread_has_its_own_with(switching):
    model,x = nn.Sequential(nn.Linear(64,64), Own()),torch.randn(8,64)
    params = [*model.parameters()]
    def call(half):
        def _call():
            for _ in range(30):
                with half, torch.no_grad(): assert model(x).dtype==torch.float32
        return _call
    one = half_precision(model, bf16)
    for halves in ([one,one], [one,half_precision(model, bf16)]):
        assert in_threads(*map(call, halves))==[]
        as_before(model, params)

@pytest.mark.parametrize('call', ['to_bf16','to_fp16'])
def test_predictions_while_a_learner_trains(call, switching):
    learn = getattr(get_learner(nn.Sequential(*[nn.Linear(8,8) for _ in range(7)], nn.Linear(8,1))), call)()
    alone = getattr(get_learner(deepcopy(learn.model)), call)()
    params,stop,x = [*learn.model.parameters()],threading.Event(),torch.randn(4,8)
    def predict():
        with torch.no_grad():
            while not stop.is_set(): assert learn.model(x).isfinite().all()
    def fit():
        try: learn.fit(6)
        finally: stop.set()
    errors = in_threads(fit, predict)
    # A call that began before a batch did may fail, see "Limits" of half_precision; the training never does
    assert not [e for e in errors if 'dtype' not in str(e)]
    as_before(learn.model, params)
    alone.fit(6)
    assert all(map(torch.equal, weights(learn), weights(alone)))
    assert all(id(p) in map(id, params) for ps in learn.opt.param_lists for p in ps)

# --- Stand-ins, copies, pickles

@pytest.mark.parametrize('first,last', [(0,1),(1,0)])
def test_off_in_any_order(first, last):
    model,x = nn.Sequential(nn.Linear(4,4), nn.Linear(4,1)),torch.ones(2,4)
    params,plain = [*model.parameters()],model(x)
    halves = half_precision(model, bf16),half_precision(model, torch.float16)
    for _ in range(2):
        for o in halves: o.install()
        assert all(o.installed for o in halves) and not torch.equal(model(x), plain)
        halves[first].remove()
        with half_precision(deepcopy(model), halves[last].dtype) as alone: want = alone.model(x)
        assert torch.equal(model(x), want) and halves[last].installed and not halves[first].installed
        halves[last].remove()
        as_before(model, params)
        assert torch.equal(model(x), plain)

def test_off_below_somebody_elses_function():
    "It stays there and calls through; the next `with` computes in half precision again, and also comes off"
    model,x,seen = nn.Sequential(nn.Linear(4,4), nn.Linear(4,1)),torch.ones(2,4),[]
    plain,half = model(x),half_precision(model, bf16)
    model[0].register_forward_hook(lambda m,a,res: seen.append(res.dtype))
    with half:
        old = model.forward
        model.forward = theirs = lambda x: old(x)
        model(x)
    for _ in range(3):
        assert torch.equal(model(x), plain) and vars(model)['forward'] is theirs
        with half: model(x)
    assert seen==[bf16]+[torch.float32,bf16]*3
    model.forward = old # put back, as who wraps a function does
    assert torch.equal(model(x), plain)
    with half: assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain) and 'forward' not in vars(model)

def test_a_with_in_another_thread_around_batches():
    """It ends in the middle of a batch, or begins there and outlasts it: each goes on as it was, and afterwards the
    model is float32"""
    for begins,ends in (('before_fit','after_batch'), ('before_fit','after_loss'), ('after_loss','after_fit'),
                        ('before_fit','after_fit')):
        learn = get_learner().to_bf16()
        params,half,seen = [*learn.model.parameters()],learn.mixed_precision.autocast,[]
        learn.model[0].register_forward_hook(lambda m,a,res: seen.append(res.dtype))
        elsewhere = ThreadPoolExecutor(1)
        class Other(Callback):
            order = -50
            def __call__(self, name):
                if name==begins and not hasattr(self, 'begun'): self.begun = elsewhere.submit(half.__enter__).result()
                if name==ends and not hasattr(self, 'ended'): self.ended = elsewhere.submit(half.__exit__).result()
        with elsewhere: learn.fit(1, cbs=Other())
        assert {*seen}=={bf16} and not half.installed, (begins,ends)
        as_before(learn.model, params)

def test_entered_and_left_by_a_callback_that_fails():
    "What a batch has opened is closed when an error ends it"
    learn = get_learner().to_bf16()
    params = [*learn.model.parameters()]
    class Enters(Callback):
        def after_loss(self):
            self.learn.mixed_precision.autocast.__enter__()
            raise RuntimeError('as asked')
    with pytest.raises(RuntimeError, match='as asked'): learn.fit(1, cbs=Enters())
    as_before(learn.model, params)

def test_interrupted_while_it_begins(monkeypatch):
    "Ctrl-C between two stand-ins: nothing stays on, now or after the next `with`"
    model = nn.Sequential(nn.Linear(4,4), nn.Linear(4,1))
    half,own,calls_ = half_precision(model, bf16),StandIn.install,[]
    def install(self):
        calls_.append(self)
        if len(calls_)==2: raise KeyboardInterrupt
        return own(self)
    monkeypatch.setattr(StandIn, 'install', install)
    with pytest.raises(KeyboardInterrupt), half: pass
    assert not half.installed
    as_before(model, [*model.parameters()])
    with half: model(torch.ones(2,4))
    as_before(model, [*model.parameters()])

def test_a_class_that_is_changed():
    "As by `@patch` in a notebook: after the call, the new `forward` computes"
    class Mine(nn.Linear): pass
    model,x = nn.Sequential(Mine(4,4)),torch.ones(2,4)
    half = half_precision(model, bf16)
    with half: model(x)
    Mine.forward = lambda self, x: x*0
    with half: assert not model(x).any()
    as_before(model, [*model.parameters()])

@pytest.mark.parametrize('again', [deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize('inside', [False,True])
def test_copied_and_pickled(again, inside):
    half = half_precision(nn.Sequential(nn.Linear(2,2), nn.Linear(2,1)), bf16, keep='1', copies=True)
    with half if inside else half_precision(nn.Linear(1,1)): other = again(half)
    assert other.model is not half.model and other.settings.keys()==half.settings.keys() and other.keep=='1'
    assert other.policy().equals(half.policy())
    x = torch.ones(2,2)
    with half: want = half.model(x)
    with other: assert torch.equal(other.model(x), want)
    as_before(half.model, [*half.model.parameters()])
    assert not any(isinstance(vars(m).get('forward'), StandIn) for m in other.model.modules())
    third = again(half_precision(nn.Linear(2,2), bf16))
    third.install()
    assert third.installed and third.model(x).dtype==torch.float32
    third.remove()

def test_replace_carries_all_settings():
    class Mine(half_precision):
        def __init__(self, model, dtype=torch.float16, keep=(), copies=True, extra=None):
            self.extra = extra
            super().__init__(model, dtype, keep, copies)
    half = Mine(mlp(), bf16, extra='kept')
    for o in (half.replace(keep='0'), half.keeping(['0']), deepcopy(half)):
        assert type(o) is Mine and o.extra=='kept' and o.dtype==bf16
    assert half.keeping(['0']).ways['0'].why=='keep'!=half.ways['0'].why

# --- Names that `keep` takes

@pytest.fixture
def ddp():
    "`DistributedDataParallel` in this process alone"
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel
    torch.distributed.destroy_process_group()

def checkpointed(model): return nn.Sequential(*map(checkpoint_wrapper, model))

class Masks(nn.Linear):
    "Masks with float32's least number, which half precision can't hold, as DeBERTa's attention does"
    def forward(self, x): return super().forward(x).masked_fill(x>1, torch.finfo(torch.float32).min)

@pytest.mark.parametrize('wrap', ['none','checkpoint','ddp','both'])
def test_advice_under_wrappers(wrap, ddp):
    "What can't be computed in half precision has a note, with a name that `keep` takes, and that helps"
    def make():
        model = nn.Sequential(nn.Linear(4,4), Masks(4,1))
        for f in dict(none=[], checkpoint=[checkpointed], ddp=[ddp], both=[checkpointed,ddp])[wrap]: model = f(model)
        return model
    model,other,x = make(),make(),torch.ones(2,4)
    with half_precision(model, bf16), pytest.raises(RuntimeError, match='without overflow') as e: model(x)
    if hasattr(e.value, 'add_note'): # Python 3.11
        note, = e.value.__notes__
        assert note.startswith('In 1 (Masks)') and "keep='1' computes it in float32" in note
    with half_precision(other, bf16, keep='1'): other(x).sum().backward()

def test_an_error_is_freed():
    "It holds nothing once it is handled: checkpointing's hooks end when the frames of its traceback go"
    model,x = nn.Sequential(nn.Linear(4,4), Masks(4,1)),torch.ones(2,4)
    gone = weakref.ref(x)
    try:
        with half_precision(model, bf16): model(x)
    except RuntimeError: del x
    assert gone() is None

def test_names_of_culprits(ddp):
    "Those that `keep` takes, in the record, in warnings and in what the doctor finds"
    model = ddp(checkpointed(nn.Sequential(nn.Linear(8,8), nn.Linear(8,1))))
    assert [*named_modules(model)]==['','0','1'] and parameter_name(model, [*model.parameters()][-1])=='1.bias'
    learn = get_learner(model).to_bf16(max_skips=4)
    class Spoil(Callback):
        order = 5
        def before_step(self): [*self.model.parameters()][-1].grad.fill_(float('nan'))
    with pytest.raises(FloatingPointError, match='The gradient of 1.bias was the first'): learn.fit(1, cbs=Spoil())
    assert {*learn.precision_recorder.log.culprit}=={'1.bias'}
    with torch.no_grad(): [*model.parameters()][0].fill_(float('nan'))
    assert learn.find_nonfinite().module=='0'

# --- Modules that change their parameters

class Clamped(nn.Linear):
    "Keeps its weights small"
    def forward(self, x):
        with torch.no_grad(): self.weight.clamp_(-.2, .2)
        return super().forward(x)

class MaxNorm(nn.Conv1d):
    "As EEGNet's convolutions: a norm that no filter exceeds"
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=.5)
        return super().forward(x[...,None])[...,0]

class Replaces(nn.Linear):
    "Has another parameter from now on"
    def forward(self, x):
        self.weight = nn.Parameter(self.weight.detach().clamp(-.2, .2))
        return super().forward(x)

class Swaps(nn.Module):
    "Two parameters in turns"
    def __init__(self, *args): super().__init__(); self.a,self.b = (nn.Parameter(torch.rand(8)+i) for i in range(2))
    def forward(self, x):
        self.a,self.b = self.b,self.a
        return x*self.a

class Counts(nn.Linear):
    "Counts its calls in a parameter that is frozen"
    def __init__(self, *args): super().__init__(*args); self.count = nn.Parameter(torch.zeros(1), requires_grad=False)
    def forward(self, x):
        self.count += 1
        return super().forward(x)/self.count

class Codebook(nn.Embedding):
    "Rows that follow the inputs next to them, in place of which they are returned"
    def __init__(self, *args): super().__init__(4, 8); self.weight.requires_grad_(False)
    def forward(self, x):
        nearest = torch.cdist(x.detach().float(), self.weight).argmin(1)
        for i in nearest.unique(): self.weight.data[i].lerp_(x.detach()[nearest==i].float().mean(0), .5)
        return x+(super().forward(nearest)-x).detach()

class Generates(nn.Linear):
    "A hypernetwork: computes the weights of a layer from the batch"
    def __init__(self, *args): super().__init__(8, 64)
    def forward(self, x): return F.linear(x, super().forward(x.mean(0)).view(8,8))

@pytest.mark.parametrize('kind', [Clamped,MaxNorm,Replaces,Swaps,Counts,Codebook,Generates])
def test_changed_parameters(kind):
    "What a module does to its parameters is kept, with gradients and without, and gradients are near float32's"
    def run(half):
        torch.manual_seed(0)
        extra = (1,) if kind is MaxNorm else ()
        model,x = nn.Sequential(nn.Linear(8,8), kind(8, 8, *extra), nn.Linear(8,1)),torch.randn(16,8)
        around,seen = half_precision(model, bf16) if half else nullcontext(),[]
        for i in range(4):
            with around, torch.set_grad_enabled(i!=2):
                loss = model(x).square().mean()
                if i!=2: loss.backward()
            seen += [(n,p.detach().clone(),p.grad) for n,p in model.named_parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None: p -= .1*p.grad
            model.zero_grad()
        assert_plain(model)
        return seen
    for (n,p,g),(_,want,grad) in zip(run(True), run(False), strict=True):
        assert (p-want).norm()<=.01*want.norm(), n
        assert g is grad is None or (g-grad).norm()<=.05*grad.norm(), n

# --- Structures, devices, scales

class Bag(MutableMapping):
    "A mapping without `__copy__`"
    def __init__(self, **items): self.items_ = items
    def __getitem__(self, k): return self.items_[k]
    def __setitem__(self, k, v): self.items_[k] = v
    def __delitem__(self, k): del self.items_[k]
    def __iter__(self): return iter(self.items_)
    def __len__(self): return len(self.items_)

def test_cast_leaves_a_mapping_alone():
    bag = Bag(x=torch.ones(2), deep=Bag(y=torch.ones(2)), n=torch.arange(2))
    res = dtypes.cast_tree(bag, bf16)
    assert bag['x'].dtype==bag['deep']['y'].dtype==torch.float32 and type(res['deep']) is Bag
    assert res['x'].dtype==res['deep']['y'].dtype==bf16 and res['n'] is bag['n']

def test_at_max_is_one_word():
    for k in ('at_max','at_min'):
        with pytest.raises(ValueError, match=f"{k}='clip\\+keep' must be one of"): DynamicLossScale(**{k:'clip+keep'})
    assert DynamicLossScale(refill='finite+backoff')

def test_headroom_with_empty_parameters():
    params = dict(w=torch.zeros(0))
    class Sgd:
        def update(self, grads, state, params): return {k:-g for k,g in grads.items()},state
    step = train_step(lambda p,x: (p['w'].sum()+x.sum()), Sgd(), torch.float16)
    res = step(params, (), DynamicLossScale(2.**10, headroom=6.), torch.ones(2))
    assert res.finite and res.scale.loss_scale>2**10

@pytest.mark.parametrize('make,get', [
    (lambda: mpx.DynamicLossScaling(.5, 1., period=2), lambda o: o.loss_scaling),
    (lambda: jmp.DynamicLossScale(.5, period=2, min_loss_scale=1.), lambda o: o.loss_scale)])
def test_scale_below_its_floor(make, get):
    "Accepted, as by MPX and JMP, and raised at the next overflow"
    s = make()
    def after(*flags): return get(reduce(lambda s,finite: s.adjust(finite), flags, s))
    assert [after(), after(True), after(True, True), after(False), after(False, False)]==[.5,.5,1.,1.,1.]

# --- Optimizers

class StrictStep:
    "A stepper as fastxtend's jitted ones: it takes what it knows"
    def __call__(self, p, lr, wd, do_wd=True, force_train=None): p.data.add_(p.grad.data, alpha=-lr)

def strict(params, lr, **kwargs): return Optimizer(params, [StrictStep()], lr=lr, wd=0.)

@pytest.mark.parametrize('mode', modes)
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

@pytest.mark.skipif(not find_spec('fastxtend'), reason='needs fastxtend')
@pytest.mark.parametrize('name', ['adam','sgd','lamb','adan','ranger','larc'])
def test_fastxtend(name):
    import fastxtend.optimizer.all as fx
    get_learner(opt_func=getattr(fx, name)(jit=True)).to_bf16().fit(1)

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

def schedule_free(params, **kwargs):
    from schedulefree import ScheduleFreeWrapper
    opt = ScheduleFreeWrapper(torch.optim.SGD(params, lr=1e-3), momentum=.9)
    opt.train()
    return opt

@pytest.mark.parametrize('kind', [Wrapped, pytest.param(schedule_free, marks=pytest.mark.skipif(
    not find_spec('schedulefree'), reason='needs schedulefree'))])
@pytest.mark.parametrize('mode', modes)
def test_optimizer_of_another_class(kind, mode, tmp_path):
    def opt(params, **kwargs): return OptimWrapper(params, kind, **kwargs)
    learn = modes[mode](get_learner(opt_func=opt, path=tmp_path))
    before = weights(learn)
    learn.fit(2)
    assert learn.mixed_precision.state.steps==8 and not any(map(torch.equal, weights(learn), before))
    learn.find_nonfinite(), learn.precision_report(), learn.precision_plan()
    assert learn.mixed_precision.state.steps==8
    learn.save('now')
    assert modes[mode](get_learner(opt_func=opt, path=tmp_path)).load('now').mixed_precision.state.steps==8

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

@pytest.mark.parametrize('mode', ['fp16','fp16_static','native_fp16'])
def test_no_gradients_because_the_backward_pass_was_cancelled(mode):
    class Cancel(Callback):
        order = 200
        def before_backward(self): raise CancelBackwardException
    modes[mode](get_learner(mlp())).fit(1, cbs=Cancel())

@pytest.mark.parametrize('mode', modes)
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
    learn.fit(2, cbs=[Second(),Spoil()])
    log = learn.precision_recorder.log
    assert [*log.skipped]==[False,True,False,False]*2 and [*log.culprit]==['','4.weight','','']*2
    assert all(p.isfinite().all() for p in model.parameters()) and not any(map(torch.equal, head, before))
    assert learn.step_stats.norm==pytest.approx(norms[-1], rel=1e-4)

def test_recommends_a_call_of_the_same_dtype():
    for call,want in dict(to_native_bf16='to_bf16', to_native_fp16='to_fp16').items():
        match = rf'learn\.{want}\(flat_master=…\)'
        with pytest.raises(TypeError, match=match): getattr(get_learner(), call)(flat_master=True)

# --- Reading changes nothing

def test_reading_the_scale(tmp_path):
    learn = get_learner(path=tmp_path).to_fp16()
    learn.fit(1)
    learn.save('now')
    other = get_learner(path=tmp_path).to_fp16().load('now')
    cb = other.mixed_precision
    before = dict(vars(cb)),dict(other.opt.hypers[0])
    assert cb.loss_scale==learn.mixed_precision.loss_scale and cb.state==learn.mixed_precision.state
    assert (dict(vars(cb)),dict(other.opt.hypers[0]))==before

def test_subclasses_are_told_what_to_define():
    cb = PrecisionCallback(StaticLossScale())
    with pytest.raises(NotImplementedError): cb.half_dtype
    with pytest.raises(NotImplementedError): cb.new_half(nn.Linear(1,1))

def test_one_half_precision_for_a_call(monkeypatch):
    "A call makes one, and the fit uses it"
    made = []
    own = half_precision.__init__
    def _init(self, *args, **kwargs): made.append(self); own(self, *args, **kwargs)
    monkeypatch.setattr(half_precision, '__init__', _init)
    for call in calls:
        made.clear()
        learn = getattr(get_learner(), call)()
        learn.fit(1)
        assert made==[learn.mixed_precision.half]
