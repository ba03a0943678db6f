"Odd models, data and arguments through real learners: the right result or a clear error, and the learner as it was"
import json,re,subprocess,sys
from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass,fields
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import cloudpickle,learners,pytest
from fastai.callback import fp16
from fastai.torch_core import TensorBase,TensorImage
from torch.utils.checkpoint import CheckpointError,checkpoint
from mp_callbacks.flat import flat_step
from mp_callbacks.grads import prepare_grads
from learners import *
from machines import Fake
from mp_callbacks.devices import pretend

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates', 'ignore:load_learner')

half_dtype = {o: torch.float16 if 'fp16' in o else torch.bfloat16 for o in modes}
nan,inf = float('nan'),float('inf')

each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_fp16')))
each_call = pytest.mark.parametrize('call', calls)

def state(learn): return [p for p in learn.model.parameters()],weights(learn),list(learn.cbs)

def unchanged(learn, before, named=True):
    """Has `learn` the same parameters, weights and callbacks (each under its name, if they are `named` apart) as when
    `state` was taken?"""
    ps,ws,cbs = before
    assert all(p is q for p,q in zip(learn.model.parameters(), ps, strict=True))
    assert all(torch.equal(p, w) and p.dtype==w.dtype for p,w in zip(ps, ws, strict=True))
    assert all(a is b for a,b in zip(learn.cbs, cbs, strict=True))
    if named: assert all(getattr(learn, cb.name) is cb and cb.learn is learn for cb in cbs)
    assert [n for n,m in learn.model.named_modules() if 'forward' in vars(m)]==[]

def trains(learn):
    "Does a fit change all trainable weights, finitely, and leave them float32?"
    before = weights(learn)
    learn.fit(2)
    for p,w in zip(learn.model.parameters(), before, strict=True):
        assert not torch.equal(p, w) and p.isfinite().all() and p.dtype==torch.float32

# --- Models

class NoParameters(nn.Module):
    def forward(self, x): return x[:,:1]

class Integers(nn.Module):
    "Its only parameter is not floating"
    def __init__(self):
        super().__init__()
        self.n = nn.Parameter(torch.tensor([1]), requires_grad=False)
    def forward(self, x): return x[:,:1]*self.n

unfit = dict(none=NoParameters, integers=Integers, half=lambda: mlp().half(), bfloat16=lambda: mlp().bfloat16())

@each_call
@pytest.mark.parametrize('model', unfit)
def test_unfit_model(model, call):
    "A model without float32 parameters is refused at the call, whether or not they could be made float32"
    learn = get_learner(unfit[model]())
    before = state(learn)
    match = r'has no float32 parameters \(.*call model.float\(\) first, or use to_fp32'
    with pytest.raises(ValueError, match=match): getattr(learn, call)()
    unchanged(learn, before)

@pytest.mark.parametrize('call', calls[:2])
def test_double_model(call):
    "Masters are float32: a float64 model is refused, unless a part of it is float32"
    learn = get_learner(mlp().double())
    with pytest.raises(ValueError, match='float64.*call model.float'): getattr(learn, call)()
    class Cast(nn.Module):
        def forward(self, x): return x.double()
    learn = getattr(get_learner(nn.Sequential(nn.Linear(8,8), Cast(), nn.Linear(8,1).double())), call)()
    learn.fit(1)
    assert [p.dtype for p in learn.model.parameters()]==[torch.float32]*2+[torch.float64]*2

def test_lazy_model():
    "A model that doesn't know its shapes yet"
    learn = get_learner(nn.Sequential(nn.LazyLinear(4), nn.GELU(), nn.LazyLinear(1)))
    before = list(learn.cbs)
    with pytest.raises(ValueError, match='Call it once on a batch'): learn.to_fp16()
    assert list(learn.cbs)==before
    learn.model(numbers()[0])
    trains(modes['fp16'](learn))

@each_call
def test_offloaded_model(call):
    "has no numbers to train"
    cpu_offload = pytest.importorskip('accelerate').cpu_offload
    learn = get_learner(cpu_offload(mlp(), torch.device('cpu')) or mlp())
    before = list(learn.cbs)
    with pytest.raises(ValueError, match=r"0.weight is on the device 'meta', without numbers.*cpu_offload"):
        getattr(learn, call)()
    assert list(learn.cbs)==before

@each_mode
def test_frozen_parts(mode):
    "Parameters that aren't trained are neither changed nor given gradients"
    model = mlp()
    for p in model[0].parameters(): p.requires_grad_(False)
    learn = modes[mode](get_learner(model))
    before = weights(learn)
    learn.fit(1)
    assert [torch.equal(p, w) for p,w in zip(model.parameters(), before)]==[True]*2+[False]*4
    assert all(p.grad is None for p in model[0].parameters())

@each_mode
def test_outside_the_optimizer(mode):
    "Gradients of parameters that no optimizer holds are not scaled, and a batch that overflows leaves nothing in them"
    def run(mode, poisoned, cbs):
        cbs = [*map(InfiniteAt, poisoned),*cbs]
        learn = get_learner(opt_func=SGD, lr=.05, splitter=lambda m: [params(m[-1])], cbs=cbs)
        if mode: modes[mode](learn)
        learn.fit(1)
        return learn.model[0].weight.grad,learn.model[-1].weight.detach()
    def off(a, b): return ((a-b).norm()/b.norm()).item()
    for cbs in ((), (GradientClip(1.),)):
        (g,w),(g32,w32) = run(mode, (), cbs),run(None, (), cbs)
        assert off(g, g32)<.05 and off(w, w32)<.05
        g,w = run(mode, (1,), cbs)
        assert g.isfinite().all() and off(w, w32)<.5 # three steps are almost four

@each_mode
def test_outside_without_backward(mode):
    "Where another callback has left out the backward pass, such gradients stay as they are"
    class Skip(Callback):
        order = 0
        def before_backward(self):
            if self.iter>=2: raise CancelBackwardException
    def run(mode):
        learn = get_learner(opt_func=SGD, splitter=lambda m: [params(m[-1])], cbs=Skip())
        if mode: modes[mode](learn)
        learn.fit(1)
        return learn.model[0].weight.grad
    g,g32 = run(mode),run(None)
    assert ((g-g32).norm()/g32.norm()).item()<.05

# --- Devices and data

@each_mode
def test_no_device(mode):
    "dls that name no device: that of the model counts"
    learn = get_learner(dls=get_dls(device=None))
    assert learn.dls.device is None
    trains(modes[mode](learn))

@each_mode
def test_plain_lists(mode):
    "Any iterable that has a length will do for dls"
    batches = [(x[None],y[None]) for x,y in zip(*numbers(8))]
    learn = get_learner(dls=DataLoaders(batches, batches))
    trains(modes[mode](learn))
    assert math.isfinite(learn.validate()[0])

@each_call
def test_unsupported_device(call):
    learn = get_learner()
    before = state(learn)
    learn.dls._device = torch.device('meta')
    match = r"device=meta doesn't compute in .* Use learn.to_fp32\(\)"
    with pytest.raises(ValueError, match=match): getattr(learn, call)()
    unchanged(learn, before)
    learn.dls._device = torch.device('cpu')
    trains(learn)

@each_mode
def test_unsupported_device_later(mode):
    "The data may move after the call, to a device that can't: then the fit refuses, before anything has changed"
    learn = modes[mode](get_learner())
    before = state(learn)
    t4 = pretend(Fake('cuda', 'Tesla T4', (7,5)))
    with t4, pytest.raises(ValueError, match="device=cpu doesn't compute in"): learn.fit(1)
    unchanged(learn, before)

@pytest.mark.cuda
@pytest.mark.results
@each_mode
def test_moved(mode):
    "The data may move from one device to another between two fits: half precision moves with it"
    learn = modes[mode](get_learner())
    for device in ('cpu', 'cuda', 'cpu'):
        learn.dls.to(torch.device(device))
        learn.model.to(device)
        learn.create_opt()
        seen = set()
        hook = learn.model[0].register_forward_hook(lambda m,i,o: seen.add((o.device.type, o.dtype)))
        learn.fit(1)
        hook.remove()
        assert seen=={(device, half_dtype[mode])}

# --- Arguments

bad = dict( # call -> argument -> values
    to_fp16 = dict(loss_scale=[0,-1.,nan,'auto'], max_loss_scale=[0,-2.,inf,nan,'2**24',None,.5],
                   min_loss_scale=[0,2.**25,'low'], div_factor=[1,.5,inf,None], scale_wait=[0,-1,1.5,True],
                   clip=[0,-1.,nan,inf,'1',True], headroom=[-1.,31,nan,'2',True], max_skips=[0,1.5,None,True],
                   keep=[3,None,'head*',[3]]),
    to_bf16 = dict(clip=[0,nan], max_skips=[-1,'9'], keep=[1.,('*.nothing',)]),
    to_native_fp16 = dict(init_scale=[0,inf,'x',2.**25], growth_factor=[1.,'x'], backoff_factor=[1.,0,2],
                          growth_interval=[0,2.5], min_loss_scale=[-1,2.**17], max_loss_scale=[0,2.], max_skips=[0]),
    to_native_bf16 = dict(max_skips=[0,'many']))

def wrong_case(call, name, value, end='', **others):
    return pytest.param(call, name, value, others, id=f'{call}-{name}={value!r}{end}')

wrong = [wrong_case(call, k, v) for call,args in bad.items() for k,vs in args.items() for v in vs]
# a scale that is to move doesn't need the one that doesn't, and yet says what is wrong with it
wrong += [wrong_case('to_fp16', 'loss_scale', o, '-static', dynamic=False) for o in bad['to_fp16']['loss_scale']]

@pytest.mark.parametrize('call,name,value,others', wrong)
def test_bad_argument(call, name, value, others):
    "The error comes at the call, with the value and a way out, and what was on stays on"
    learn = get_learner().to_native_bf16()
    before = state(learn)
    with pytest.raises((ValueError,TypeError)) as e: getattr(learn, call)(**{name:value, **others})
    while isinstance(value, (list,tuple)): value, = value
    assert any(repr(o) in str(e.value) for o in (value, float(value) if isinstance(value, int) else value)), e.value
    assert re.search(r'\w\. \w', str(e.value)), e.value
    unchanged(learn, before)

def test_unknown_argument():
    learn = get_learner()
    before = state(learn)
    for call in calls:
        with pytest.raises(TypeError, match='unexpected keyword'): getattr(learn, call)(loss_scael=2)
    unchanged(learn, before)

@pytest.mark.parametrize('kind', [ModelToHalf, lambda dtype: NativeMixedPrecision(dtype=dtype)],
                         ids='ModelToHalf NativeMixedPrecision'.split())
@pytest.mark.parametrize('dtype', [torch.float32, torch.int8, 'float8', 16, None])
def test_bad_dtype(kind, dtype):
    with pytest.raises(ValueError, match=re.escape(str(dtype))): kind(dtype)

without_effect = [
    ('to_fp16', dict(loss_scale='torch', scale_wait=100), r"Use DynamicLossScale\.preset\('torch', period=100\)"),
    ('to_fp16', dict(loss_scale='torch', max_loss_scale=2.**12), 'max_loss_scale=4096.0'),
    ('to_fp16', dict(loss_scale='torch', min_loss_scale=8.), 'min_loss_scale=8.0'),
    ('to_fp16', dict(loss_scale='torch', div_factor=4.), 'factor=4.0'),
    ('to_fp16', dict(loss_scale='torch', dynamic=False), 'Leave it out'),
    ('to_fp16', dict(loss_scale=DynamicLossScale(), max_loss_scale=8.), 'Set max_loss_scale=8.0 in that loss scale'),
    ('to_fp16', dict(loss_scale=1024., dynamic=False, scale_wait=100), 'beside dynamic=False'),
    ('to_fp16', dict(loss_scale=1024., dynamic=False, headroom=3.), 'beside dynamic=False'),
    ('to_native_fp16', dict(init_scale='torch', growth_interval=100), 'period=100'),
    ('to_native_fp16', dict(init_scale=DynamicLossScale(), backoff_factor=.25), 'backoff=0.25')]

@pytest.mark.parametrize('call,kwargs,match', without_effect)
def test_without_effect(call, kwargs, match):
    "An error that says what to write instead, and the learner is as before"
    learn = get_learner()
    with pytest.raises(ValueError, match=match): getattr(learn, call)(**kwargs)
    assert not hasattr(learn, 'mixed_precision')

@pytest.mark.parametrize('callback', [MixedPrecision,NativeMixedPrecision])
def test_subclass_with_options_of_its_own(callback):
    class Preset(callback):
        def __init__(self): super().__init__('torch')
    assert Preset().initial==DynamicLossScale.preset('torch')

def test_static_scale_of_a_dynamic_one():
    "Code written for fastai runs, as there, but with a warning"
    with pytest.warns(UserWarning, match='loss_scale=128 has no effect beside dynamic'): get_learner().to_fp16(128.)

# --- Errors with a way out

has_notes = pytest.mark.skipif(not hasattr(Exception, 'add_note'), reason='Exceptions have notes since Python 3.11')

class Masks(nn.Module):
    "Has no parameters, and a number that float16 can't hold"
    def forward(self, x): return x.masked_fill(x>1, -1e9).softmax(-1)

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_note_about_a_module_without_parameters(mode):
    "names it, and `keep` is the cure"
    def _fit(keep): modes[mode](get_learner(nn.Sequential(nn.Linear(8,8), Masks(), nn.Linear(8,1))), keep=keep).fit(1)
    with pytest.raises(RuntimeError, match='without overflow') as e: _fit(())
    note, = e.value.__notes__
    assert note.startswith('In 1 (Masks), with its operations in half precision: ')
    assert note.endswith("keep='1' computes it in float32.")
    _fit('1')

@has_notes
class Filled(nn.Module):
    "Masks as much code does"
    def forward(self, x): return x.masked_fill(x>0, -1e9)

ways_out = dict(double=(lambda: nn.Linear(8,1), lambda x: x.double(), r'use x\.float\(\)'),
                mask=(lambda: nn.Sequential(nn.Linear(8,1), Filled()), lambda x: x,
                      r'torch\.finfo\(x\.dtype\)\.min.* use to_bf16'),
                device=(lambda: Breaks('CUDA error: an illegal memory access; half'), lambda x: x, None))

class Breaks(nn.Linear):
    "An error of the device, which surfaces in an innocent module"
    def __init__(self, text): super().__init__(8, 1); self.text = text
    def forward(self, x): raise RuntimeError(self.text)

@pytest.mark.skipif(sys.version_info<(3,11), reason='notes are new in Python 3.11')
@pytest.mark.parametrize('kind', ways_out)
def test_way_out(kind):
    "The note says what helps, and an error of the device has none"
    make,change,match = ways_out[kind]
    model = make()
    with pytest.raises(RuntimeError) as caught, half_precision(model, torch.float16): model(change(torch.ones(2,8)))
    notes = ' '.join(getattr(caught.value, '__notes__', []))
    assert re.search(match, notes) if match else not notes

@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_no_note_about_other_errors(mode):
    class Breaks(nn.Module):
        def forward(self, x): return x.view(7)
    for layer,keep in ((Breaks(),()), (Masks(),()), (Breaks(),'1')):
        learn = modes[mode](get_learner(nn.Sequential(nn.Linear(8,8), layer)), keep=keep)
        with pytest.raises(RuntimeError) as e: learn.fit(1)
        assert bool(getattr(e.value, '__notes__', ()))==isinstance(layer, Masks)

class Penalty(Callback):
    "Asks for gradients before the backward pass, in the precision of the model or outside of it"
    def __init__(self, inside): self.inside = inside
    def after_loss(self):
        if not self.training: return
        with self.learn.mixed_precision.autocast if self.inside else nullcontext():
            grads = torch.autograd.grad(self.learn.loss_grad, [*self.model.parameters()], retain_graph=True)
        assert all(o.isfinite().all() for o in grads)

@has_notes
@pytest.mark.parametrize('mode', [o for o in modes if o!='fp16_static'])
def test_gradients_through_checkpoints(mode):
    "An error says how to compute them"
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8,8))
            self.head = nn.Linear(8,1)
        def forward(self, x): return self.head(checkpoint(self.body, x, use_reentrant=False))
    def _fit(inside): modes[mode](get_learner(Checkpointed()), keep=nn.GELU).fit(1, cbs=Penalty(inside))
    with pytest.raises(CheckpointError) as e: _fit(False)
    assert 'with learn.mixed_precision.autocast:' in e.value.__notes__[0]
    _fit(True)

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_optimizer_with_a_closure(mode):
    learn = modes[mode](get_learner(opt_func=partial(OptimWrapper, opt=torch.optim.LBFGS)))
    with pytest.raises(TypeError, match='closure') as e: learn.fit(1)
    assert e.value.__notes__==["LBFGS computes the loss several times in a step, and asks for a function that does so. "
                               "fastai's Learner passes none, in float32 either. Use an optimizer without a closure."]

# --- Predictions of every structure

@dataclass
class ModelOutput(OrderedDict):
    "As in transformers: a dict, and its items are attributes too"
    a:Any=None
    b:Any=None
    c:Any=None
    def __post_init__(self):
        for o in fields(self):
            if getattr(self, o.name) is not None: self[o.name] = getattr(self, o.name)
    def __getitem__(self, k): return dict(self.items())[k] if isinstance(k, str) else tuple(self.values())[k]
    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        super().__setattr__(k, v)
    def __setattr__(self, k, v):
        if k in self.keys() and v is not None: super().__setitem__(k, v)
        super().__setattr__(k, v)
    def __delitem__(self, *args, **kwargs): raise Exception('not in a ModelOutput')
    def pop(self, *args, **kwargs): raise Exception('not in a ModelOutput')
    def update(self, *args, **kwargs): raise Exception('not in a ModelOutput')
    def __reduce__(self):
        f,_,*rest = super().__reduce__()
        return f,tuple(getattr(self, o.name) for o in fields(self)),*rest

n = torch.tensor([1,2])
aside = []
def leave(res):
    "Return `res`, and leave the prediction where the loss looks for it"
    def _make(p): aside[:] = [p]; return res
    return _make,lambda o: aside[0].float()

structures = dict( # from a prediction, and back to it
    tensor      = (lambda p: p,                               lambda o: o),
    tuple       = (lambda p: (p, None, 3, 'word', n),         lambda o: o[0]),
    list        = (lambda p: [True, p, 2.5],                  lambda o: o[1]),
    dict        = (lambda p: dict(a=p, b=None, c='word'),     lambda o: o['a']),
    ordered     = (lambda p: OrderedDict(b=1, a=p),           lambda o: o['a']),
    L           = (lambda p: L(p, None),                      lambda o: o[0]),
    named       = (lambda p: Named(p, None),                  lambda o: o.a),
    data        = (lambda p: Data(p, 'word'),                 lambda o: o.a),
    frozen      = (lambda p: Frozen(p, n),                    lambda o: o.a),
    output      = (lambda p: ModelOutput(a=p, c=(p,p)),       lambda o: (o.a+o['a']+o[0]+o.c[1])/4),
    subclass    = (lambda p: TensorBase(p),                   lambda o: o.as_subclass(torch.Tensor)),
    image       = (lambda p: (TensorImage(p), 1),             lambda o: o[0].as_subclass(torch.Tensor)),
    builtin     = (lambda p: p.max(1, keepdim=True),          lambda o: o.values),
    nested      = (lambda p: [dict(a=(Data(Named(p, [None])),),), 3], lambda o: o[0]['a'][0].a.a),
    object      = (lambda p: (p, SimpleNamespace(x=1)),       lambda o: o[0]),
    same_twice  = (lambda p: (p, p),                          lambda o: (o[0]+o[1])/2),
    none        = leave(None),
    number      = leave(3),
    word        = leave('word'))

def sketch(o):
    "The structure of `o`: its classes, and dtypes and shapes of its tensors"
    if isinstance(o, torch.Tensor): return type(o),o.dtype,tuple(o.shape)
    if isinstance(o, dict): return type(o),{k:sketch(v) for k,v in o.items()}
    if isinstance(o, (tuple,list,L)): return type(o),[sketch(v) for v in o]
    if isinstance(o, (Data,Frozen)): return type(o),[sketch(getattr(o, f.name)) for f in fields(o)]
    return type(o),str(o)

class Structured(nn.Module):
    "Returns what `make` makes of its prediction"
    def __init__(self, make):
        super().__init__()
        self.layers,self.make,self.dtypes = mlp(),make,set()
    def forward(self, x):
        res = self.layers(x)
        self.dtypes.add(res.dtype)
        return self.make(res)

class Loss:
    "A loss that finds the prediction with `get`, and remembers what it was given"
    def __init__(self, get): self.get,self.seen = get,[]
    def __call__(self, pred, y):
        self.seen.append(sketch(pred))
        return F.mse_loss(self.get(pred), y)

@lru_cache(None)
def seen_by_loss(structure, mode):
    "What the loss is given in an epoch, and the weights at its end"
    make,get = structures[structure]
    learn = get_learner(Structured(make), loss_func=Loss(get), opt_func=SGD, lr=.05)
    if mode: modes[mode](learn)
    learn.fit(1)
    assert learn.model.dtypes=={half_dtype[mode] if mode else torch.float32}
    return learn.loss_func.seen,flat(weights(learn))

@pytest.mark.parametrize('mode,structure', crossed(modes, structures, fast=lambda mode,structure: mode=='fp16'))
def test_predictions(mode, structure):
    "They reach the loss in float32, in the classes that the model made, and gradients find their way back"
    (seen,w),(seen32,w32) = seen_by_loss(structure, mode),seen_by_loss(structure, None)
    assert seen==seen32 and len(seen)==8
    assert (w-w32).norm()/w32.norm()<1e-3

@each_mode
def test_other_dtypes(mode):
    "What the model makes float64, complex, integer or bool stays so"
    def make(p):
        q = p.detach()
        return p.double(),q.float().to(torch.complex64),q.long(),q>0,q.half(),q.bfloat16()
    learn = get_learner(Structured(make), loss_func=Loss(lambda o: o[0].float()))
    modes[mode](learn)
    trains(learn)
    kept = [torch.float64,torch.complex64,torch.int64,torch.bool]
    assert {tuple(o[1] for o in s[1]) for s in learn.loss_func.seen}=={(*kept, torch.float32, torch.float32)}

@each_mode
def test_loss_in_float32(mode):
    "The loss is computed outside autocast: a product of 300 and 300 does not overflow in it"
    seen = []
    def loss(p, y):
        big = torch.full((2,2), 300., device=p.device)@torch.full((2,2), 300., device=p.device)
        seen.append((p.dtype, big.dtype, big.isfinite().all().item(), torch.is_autocast_enabled(p.device.type)))
        return F.mse_loss(p, y)
    learn = modes[mode](get_learner(loss_func=loss))
    learn.fit(1)
    assert set(seen)=={(torch.float32, torch.float32, True, False)}

# --- Inputs of every structure

class Reader(nn.Module):
    "Finds its input with `get`, and remembers what it was given"
    def __init__(self, get):
        super().__init__()
        self.layers,self.get,self.seen = mlp(),get,[]
    def forward(self, *args):
        self.seen.append(sketch(args))
        return self.layers(self.get(*args))

big = torch.tensor([1e5,1e-8]) # float16 can hold neither
inputs = dict( # from rows of numbers, and back
    tensor  = (lambda x: (x,),                                lambda x: x),
    several = (lambda x: (x, n, n>1, big, x.double()),        lambda x,*_: x),
    none    = (lambda x: (None, x, 'word', 3, 2.5),           lambda _,x,*__: x),
    tuple   = (lambda x: ((x, None, 7),),                     lambda t: t[0]),
    list    = (lambda x: ([big, x],),                         lambda t: t[1]),
    dict    = (lambda x: (dict(x=x, n=n, s='word'),),         lambda d: d['x']),
    ordered = (lambda x: (OrderedDict(s='word', x=x),),       lambda d: d['x']),
    data    = (lambda x: (Data(x, big),),                     lambda o: o.a),
    image   = (lambda x: (TensorImage(x),),                   lambda x: x.as_subclass(torch.Tensor)),
    half    = (lambda x: (x.half(),),                         lambda x: x.float()),
    int     = (lambda x: ((x*4).long(),),                     lambda x: x.float()))

@lru_cache(None)
def seen_by_model(structure, mode):
    "What the model is given in an epoch, and the weights at its end"
    make,get = inputs[structure]
    batches = [(*make(x), y) for x,y in zip(*(o.split(16) for o in numbers()))]
    learn = get_learner(Reader(get), dls=DataLoaders(batches, batches), opt_func=SGD, lr=.05)
    if mode: modes[mode](learn)
    learn.fit(1)
    return learn.model.seen,flat(weights(learn))

@pytest.mark.parametrize('mode,structure', crossed(modes, inputs, fast=lambda mode,structure: mode=='fp16'))
def test_inputs(mode, structure):
    "They reach the model as they do in float32: no dtype changed, no bit lost"
    (seen,w),(seen32,w32) = seen_by_model(structure, mode),seen_by_model(structure, None)
    assert seen==seen32 and len(seen)==8
    assert (w-w32).norm()/w32.norm()<1e-3

@each_mode
def test_wide_inputs(mode):
    "Columns that float16 can't hold, before a batch norm, as in tabular data: the norm sees every bit"
    x,y = numbers()
    x = x*torch.tensor([1e6,1e-9,1,1,1,1,1,1])
    learn = get_learner(nn.Sequential(nn.BatchNorm1d(8), mlp()), dls=as_dls(x, y))
    modes[mode](learn).fit(1)
    norm = nn.BatchNorm1d(8)
    for o in x.split(16): norm(o)
    assert torch.equal(learn.model[0].running_var, norm.running_var) and norm.running_var[0]>1e11 and skipped(learn)==0

# --- The learner afterwards

@each_mode
def test_afterwards(mode, tmp_path):
    "All that a learner can do, and not one bit of a weight different for it"
    learn = get_learner(norm=True, path=tmp_path)
    modes[mode](learn)
    trains(learn)
    before,loss = state(learn),learn.validate()[0]
    learn.get_preds(with_input=True, with_loss=True, with_decoded=True)
    learn.predict(3)
    learn.validate()
    learn.summary()
    learn.save('here')
    learn.lr_find(show_plot=False, num_it=6)
    unchanged(learn, before)
    trains(learn)
    learn.load('here')
    unchanged(learn, before)
    learn.export()
    unchanged(learn, before)
    preds = learn.to_fp32().get_preds()[0]
    assert abs(learn.validate()[0]/loss-1)<.02
    loaded = load_learner(tmp_path/'export.pkl', cpu=True)
    loaded.remove_cb(ProgressCallback)
    loaded.logger,loaded.create_mbar = noop,False
    assert torch.equal(loaded.get_preds(dl=learn.dls.valid)[0], preds)
    assert not any(isinstance(cb, (PrecisionCallback,ModelToHalf)) for cb in loaded.cbs)

def test_relative_path(tmp_path, monkeypatch):
    "Most learners have the path '.'"
    monkeypatch.chdir(tmp_path)
    learn = get_learner().to_bf16()
    learn.fit(1)
    before = state(learn)
    assert learn.save('here')==Path('models/here.pth') and learn.path==Path('.')
    learn.lr_find(show_plot=False, num_it=6)
    trains(learn)
    learn.load('here')
    unchanged(learn, before)
    assert [o.name for o in (tmp_path/'models').iterdir()]==['here.pth']

@each_call
def test_load_channels_last(call, tmp_path):
    "load_learner(cpu=True) turns precision off in a learner with channels last as well"
    learn = getattr(get_learner(path=tmp_path), call)()
    learn.to_channelslast()
    learn.export()
    assert precisions(load_learner(tmp_path/'export.pkl', cpu=True))==[]

@each_mode
def test_export_inside_a_batch(mode, tmp_path):
    "Nothing of the batch that was going on goes into the file"
    class Now(Callback):
        order = 80
        def after_batch(self):
            if self.training and self.iter==1: self.learn.export()
    learn = modes[mode](get_learner(norm=True, path=tmp_path, cbs=GradientAccumulation(64)))
    recorders = learn.cbs.filter(lambda o: isinstance(o, PrecisionRecorder))
    with learn.removed_cbs(recorders): learn.fit(1, cbs=Now())
    loaded = load_learner(tmp_path/'export.pkl', cpu=False)
    loaded.remove_cbs([ProgressCallback,Now,GradientAccumulation])
    loaded.dls = get_dls()
    loaded.validate()
    assert {p.dtype for p in loaded.model.parameters()}=={torch.float32}
    assert not [n for n,m in loaded.model.named_modules() if 'forward' in vars(m)]
    loaded.fit(1, cbs=InfiniteAt(0))
    assert all(o.isfinite().all() for o in loaded.model.state_dict().values())
    trains(loaded)

@each_mode
@pytest.mark.parametrize('event,training', [('before_step',True), ('after_step',True), ('after_batch',True),
                                            ('after_batch',False)], ids=str)
def test_model_inside_a_batch(event, training, mode):
    """From the step on, and at the end of a validation batch, who copies or saves the model gets the real weights, and
    no more than a model"""
    class Copy(Callback):
        order = 80
        def __init__(self): setattr(self, event, self._copy)
        def _copy(self):
            if self.training!=training or self.iter!=1: return
            self.got,self.want = deepcopy(self.model),[p.detach().clone() for pg in self.opt.param_lists for p in pg]
    learn = modes[mode](get_learner())
    learn.fit(1, cbs=(cb := Copy()))
    assert all(torch.equal(p, q) and p.dtype==q.dtype for p,q in zip(cb.got.parameters(), cb.want, strict=True))
    assert not [n for n,m in cb.got.named_modules() if 'forward' in vars(m)]

@pytest.fixture(scope='module')
def unpatched(tmp_path_factory):
    """What another process sees of an exported learner: one that imports a little of fastai, or all callbacks, and
    never our patches"""
    path = tmp_path_factory.mktemp('export')
    learn = modes['fp16'](get_learner(norm=True, path=path))
    learn.fit(1)
    cloudpickle.register_pickle_by_value(learners) # so that the other process needn't import it, and with it all ours
    try: learn.export()
    finally: cloudpickle.unregister_pickle_by_value(learners)
    code = '''if True:
        import json,sys,warnings
        warnings.simplefilter('ignore')
        from fastai.learner import load_learner
        def see():
            try:
                learn = load_learner(sys.argv[1])
                learn.logger,learn.create_mbar = lambda *args: None,False
                dtypes = sorted({str(p.dtype) for p in learn.model.parameters()})
                return dict(preds=[learn.predict(i)[2].tolist() for i in (3,4)], dtypes=dtypes)
            except Exception as e: return dict(error=f'{type(e).__name__}: {e}')
        res = dict(little=see())
        from fastai.callback.all import *
        print(json.dumps({**res, 'all':see(), 'patched':'mp_callbacks.learner' in sys.modules}))'''
    res = subprocess.run([sys.executable, '-c', code, str(path/'export.pkl')], capture_output=True, text=True)
    assert res.returncode==0, res.stderr
    return json.loads(res.stdout.splitlines()[-1]),[learn.to_fp32().predict(i)[2].tolist() for i in (3,4)]

@pytest.mark.parametrize('imported', ['little', 'all'])
def test_unpatched_process(imported, unpatched):
    "load_learner needs nothing but that mp_callbacks is installed, and predicts in float32"
    res,preds = unpatched
    assert res[imported]==dict(preds=preds, dtypes=['torch.float32'])

# --- Callbacks added by hand

def test_half_alone():
    "ModelToHalf without MixedPrecision trains nothing, and says so before anything has changed"
    learn = get_learner(cbs=ModelToHalf())
    before = state(learn)
    with pytest.raises(ValueError, match='only together with MixedPrecision'): learn.fit(1)
    unchanged(learn, before)
    trains(learn.to_bf16())

def test_mixed_alone():
    "MixedPrecision is autocast in fastai, and needs ModelToHalf here: the error names both ways out"
    learn = get_learner(cbs=MixedPrecision())
    before = state(learn)
    match = r'needs ModelToHalf: call learn.to_fp16\(\).*use NativeMixedPrecision'
    with pytest.raises(ValueError, match=match): learn.fit(1)
    unchanged(learn, before)
    trains(learn.to_bf16())

@pytest.mark.parametrize('how', ['learner', 'fit'])
def test_both_by_hand(how):
    "ModelToHalf and MixedPrecision through `cbs=` are to_fp16 to the bit, whichever comes first"
    learn = modes['fp16'](get_learner(norm=True))
    learn.fit(2)
    def _mixed(): return MixedPrecision(max_loss_scale=2.**10)
    for cbs in ([ModelToHalf(),_mixed()], [_mixed(),ModelToHalf()]):
        other = get_learner(norm=True, cbs=cbs if how=='learner' else None)
        other.fit(2, cbs=None if how=='learner' else cbs)
        assert all(map(torch.equal, weights(learn), weights(other)))
    if how=='fit': assert not any(isinstance(cb, (PrecisionCallback,ModelToHalf)) for cb in other.cbs)

ours = dict(half=ModelToHalf, half2=lambda: ModelToHalf('bf16'), native=NativeMixedPrecision,
    mixed=lambda: MixedPrecision(max_loss_scale=2.**10), mixed2=lambda: MixedPrecision(dynamic=False))
theirs = dict(amp=fp16.MixedPrecision, amp_bf16=lambda: fp16.MixedPrecision('bf16'),
    non_native=fp16.NonNativeMixedPrecision)
made = {**ours, **theirs}

@pytest.mark.parametrize('names', [
    'mixed mixed2', 'mixed native', 'native mixed', 'native native', 'half mixed native', 'half mixed mixed2',
    'half half2 mixed', 'half native', *(f'{o} {t}' for o in ('mixed', 'native', 'half mixed') for t in theirs),
    'amp mixed'])
def test_two_precisions(names):
    "Are refused when a fit begins, before anything has been converted"
    learn = get_learner()
    for o in names.split(): learn.add_cb(made[o]())
    before = state(learn)
    with pytest.raises(ValueError, match=r'to_fp16\(\)'): learn.fit(1)
    unchanged(learn, before, named=False)
    trains(learn.to_bf16())

@each_call
def test_second_for_one_fit(call):
    "Another precision for one fit, through its `cbs`, is refused, and the one that was on is still on"
    learn = getattr(get_learner(), call)()
    before = state(learn)
    with pytest.raises(ValueError, match='both on'): learn.fit(1, cbs=MixedPrecision())
    unchanged(learn, before, named=False) # as in fastai, the name leaves with the second
    trains(learn)

# --- From one precision to the next

class Subclass(fp16.MixedPrecision): "As in somebody's own package"

def fastais(cb): return any(c.__module__==fp16.__name__ for c in type(cb).__mro__)
def precisions(learn): return [o for o in learn.cbs if isinstance(o, (PrecisionCallback,ModelToHalf)) or fastais(o)]

@each_call
def test_nothing_is_left(call):
    "A call replaces what was on, here a subclass of fastai's; and to_fp32 leaves nothing of it"
    learn,plain = get_learner(norm=True, cbs=Subclass()),get_learner(norm=True)
    getattr(learn, call)()
    native = 'native' in call
    assert [type(o) for o in precisions(learn)]==([NativeMixedPrecision] if native else [ModelToHalf,MixedPrecision])
    assert learn.mixed_precision.half_dtype==(torch.float16 if call.endswith('fp16') else torch.bfloat16)
    assert sum(isinstance(cb, PrecisionRecorder) for cb in learn.cbs)==1
    learn.fit(1)
    plain.fit(1)
    learn.to_fp32()
    assert [type(cb) for cb in learn.cbs]==[type(cb) for cb in plain.cbs]
    assert vars(learn).keys()==vars(plain).keys()
    for a,b in zip(*(map(vars, o.model.modules()) for o in (learn,plain)), strict=True):
        assert a.keys()==b.keys() and all(len(a[k])==len(b[k]) for k in a if k.endswith('hooks'))
    for p in learn.model.parameters(): assert p.dtype==torch.float32 and not vars(p) and not p._backward_hooks
    known = {*map(id, learn.model.parameters())}
    assert vars(learn.opt).keys()==vars(plain.opt).keys() and {*map(id, learn.opt.state)}<=known
    trains(learn)

@each_call
def test_twice_is_once(call):
    a,b = getattr(get_learner(), call)(),getattr(getattr(get_learner(), call)(), call)()
    for o in (a,b): o.fit(2)
    assert all(map(torch.equal, weights(a), weights(b)))

@pytest.mark.parametrize('mode,call', crossed(modes, [*calls,'to_fp32'], fast=lambda mode,call: mode=='fp16'))
def test_between_epochs(mode, call):
    "A callback may change the precision in the middle of a fit"
    class Change(Callback):
        order = 80
        def after_epoch(self):
            if self.epoch==0: getattr(self.learn, call)()
    learn = modes[mode](get_learner(cbs=Change()))
    before = weights(learn)
    learn.fit(2)
    assert not any(map(torch.equal, weights(learn), before))
    assert len(precisions(learn))=={'to_fp32':0, 'to_fp16':2, 'to_bf16':2}.get(call, 1)

# --- What stays float32

@pytest.mark.parametrize('call', calls[:2])
def test_keep_all(call):
    learn = get_learner()
    before = state(learn)
    with pytest.raises(ValueError, match='nothing is left.*Keep less'): getattr(learn, call)(keep=nn.Linear)
    def broken(name, module): raise RuntimeError('in keep')
    with pytest.raises(RuntimeError, match='in keep'): getattr(learn, call)(keep=broken)
    unchanged(learn, before)

# --- What is changed between fits

@each_mode
def test_changed_model(mode):
    "Layers may be replaced between two fits: the new ones are treated like the old ones"
    learn = modes[mode](get_learner(norm=True))
    learn.fit(1)
    learn.model[1],learn.model[3] = nn.BatchNorm1d(16),nn.Linear(16,16)
    learn.create_opt()
    before = state(learn)
    learn.fit(1, cbs=InfiniteAt(2))
    assert skipped(learn)==1
    assert all(o.isfinite().all() for o in learn.model.state_dict().values())
    assert not torch.equal(learn.model[3].weight, before[1][4]) and math.isfinite(learn.validate()[0])

@pytest.mark.parametrize('piece', ['prepare_grads','flat_step'])
def test_default_device(piece):
    """A loop by hand may have `torch.set_default_device('cuda')`: what has to be on the CPU stays there

    Here it is 'meta', for a `with`: `set_default_device(None)` doesn't undo all of it, and `get_default_device` of
    PyTorch before 2.10 fails after it."""
    ps = [nn.Parameter(torch.ones(n, device='cpu')) for n in (5,3000)] # few and many numbers are handled differently
    for p in ps: p.grad = torch.ones_like(p)
    with torch.device('meta'):
        if piece=='flat_step': flat_step(Adam(ps, lr=.1))
        norm = prepare_grads(ps, 2., 1.).norm
    assert norm==pytest.approx(3005**.5/2)
