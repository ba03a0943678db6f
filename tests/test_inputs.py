"Odd models, data, arguments and callbacks: the right result or a clear error, and the learner as it was"
import json,re
from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache
from types import SimpleNamespace

import cloudpickle,learners,pytest
from fastai.callback import fp16
from fastai.torch_core import TensorImage
from torch.utils.checkpoint import CheckpointError,checkpoint
from mp_callbacks.flat import flat_step
from mp_callbacks.grads import prepare_grads
from learners import *
from machines import Fake
from mp_callbacks.devices import pretend
from states import assert_plain

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

def offloaded():
    from accelerate import cpu_offload
    model = mlp()
    return cpu_offload(model, torch.device('cpu')) or model

no_float32 = r'has no float32 parameters \(.*call model.float\(\) first, or use to_fp32'
unfit = dict(
    none      = (nn.Flatten,                                      no_float32),
    half      = (lambda: mlp().half(),                            no_float32),
    double    = (lambda: mlp().double(),                          'float64.*call model.float'),
    lazy      = (lambda: nn.Sequential(nn.LazyLinear(1)),         'Call it once on a batch'),
    offloaded = (offloaded, r"0.weight is on the device 'meta', without numbers.*cpu_offload"))

@each_call
@pytest.mark.parametrize('kind', unfit)
def test_unfit_model(kind, call):
    "A model without float32 parameters, or without numbers, is refused at the call, with a way out"
    make,match = unfit[kind]
    learn = get_learner(make())
    before = list(learn.cbs)
    with pytest.raises(ValueError, match=match): getattr(learn, call)()
    assert list(learn.cbs)==before

@pytest.mark.parametrize('call', calls[:2])
def test_partly_double(call):
    "A part of the model may be float64, and stays so"
    class Cast(nn.Module):
        def forward(self, x): return x.double()
    learn = getattr(get_learner(nn.Sequential(nn.Linear(8,8), Cast(), nn.Linear(8,1).double())), call)()
    learn.fit(1)
    assert [p.dtype for p in learn.model.parameters()]==[torch.float32]*2+[torch.float64]*2

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

# --- Devices and data

@each_mode
def test_plain_lists(mode):
    "Any iterable that has a length will do for dls, which then name no device: that of the model counts"
    batches = [(x[None],y[None]) for x,y in zip(*numbers(8))]
    learn = get_learner(dls=DataLoaders(batches, batches))
    trains(modes[mode](learn))
    assert math.isfinite(learn.validate()[0])

@each_mode
def test_unsupported_device_later(mode):
    "The data may move after the call, to a device that can't: then the fit refuses, before anything has changed"
    learn = modes[mode](get_learner())
    before = state(learn)
    t4 = pretend(Fake('cuda', 'Tesla T4', (7,5)))
    with t4, pytest.raises(ValueError, match="device=cpu doesn't compute in"): learn.fit(1)
    unchanged(learn, before)

@pytest.mark.cuda
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
    to_fp16 = dict(loss_scale=[0,nan,'auto'], max_loss_scale=[0,inf,'2**24',None,.5], min_loss_scale=[0,2.**25,'low'],
                   div_factor=[1,inf,None], scale_wait=[0,1.5,True], clip=[0,nan,'1',True], headroom=[-1.,31,True],
                   max_skips=[0,1.5,nan,'3',None,True], keep=[3,None,'head*',[3]]),
    to_bf16 = dict(clip=[-1.], max_skips=[-1], keep=[('*.nothing',)]),
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
    ('to_fp16', dict(loss_scale='torch', dynamic=False), 'Leave it out'),
    ('to_fp16', dict(loss_scale=DynamicLossScale(), max_loss_scale=8.), 'Set max_loss_scale=8.0 in that loss scale'),
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

class Breaks(nn.Linear):
    "An error of `text`, which of a device surfaces in an innocent module"
    def __init__(self, text): super().__init__(8, 1); self.text = text
    def forward(self, x): raise RuntimeError(self.text)

ways_out = dict( # a layer between two others, a change of its input, and what the note has to say
    double  = (lambda: nn.Linear(8,8), lambda x: x.double(), r'In 1 \(Linear\).* use x\.float\(\)'),
    mask    = (Masks, noop, r"In 1 \(Masks\).*torch\.finfo\(x\.dtype\)\.min.* use to_bf16.*keep='1' computes it in"),
    device  = (lambda: Breaks('CUDA error: an illegal memory access; half'), noop, None),
    another = (lambda: Breaks('shapes do not fit'), noop, None))

@has_notes
@pytest.mark.parametrize('kind', ways_out)
def test_way_out(kind):
    "The note to an error names the module and what helps; an error for another reason has none"
    make,change,match = ways_out[kind]
    model = nn.Sequential(nn.Linear(8,8), make(), nn.Linear(8,1))
    model[1].register_forward_pre_hook(lambda m,args: (change(*args),))
    with pytest.raises(RuntimeError) as caught, half_precision(model, torch.float16): model(torch.ones(2,8))
    notes = ' '.join(getattr(caught.value, '__notes__', []))
    assert re.search(match, notes) if match else not notes

@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_keep_is_a_cure(mode):
    def _learner(): return get_learner(nn.Sequential(nn.Linear(8,8), Masks(), nn.Linear(8,1)))
    with pytest.raises(RuntimeError, match='without overflow'): modes[mode](_learner()).fit(1)
    modes[mode](_learner(), keep='1').fit(1)

class Penalty(Callback):
    "Asks for gradients before the backward pass, in the precision of the model or outside of it"
    def __init__(self, inside): self.inside = inside
    def after_loss(self):
        if not self.training: return
        with self.learn.mixed_precision.autocast if self.inside else nullcontext():
            grads = torch.autograd.grad(self.learn.loss_grad, [*self.model.parameters()], retain_graph=True)
        assert all(o.isfinite().all() for o in grads)

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
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

# --- Predictions and inputs of every structure

n,big = torch.tensor([1,2]),torch.tensor([1e5,1e-8]) # float16 can hold neither of the latter
predictions = dict( # from a prediction, and back to it; more of them in nbs/00_dtypes.ipynb
    tuple  = (lambda p: (p, None, 3, 'word', n),                     lambda o: o[0]),
    dict   = (lambda p: OrderedDict(b=[True,p], a=None),             lambda o: o['b'][1]),
    L      = (lambda p: L(p, None),                                  lambda o: o[0]),
    data   = (lambda p: Data(p, 'word'),                             lambda o: o.a),
    image  = (lambda p: (TensorImage(p), SimpleNamespace(x=1)),      lambda o: o[0].as_subclass(torch.Tensor)),
    max    = (lambda p: p.max(1, keepdim=True),                      lambda o: o.values),
    nested = (lambda p: [dict(a=(Frozen(Named(p, [None])),),), 3],   lambda o: o[0]['a'][0].a.a),
    others = (lambda p: (p.double(), p.to(torch.complex64), p.long(), p>0), lambda o: o[0].float()))
inputs = dict( # the same for rows of numbers
    several = (lambda x: (None, x, n, n>1, big, x.double(), 'word', 3), lambda _,x,*__: x),
    list    = (lambda x: ([big, (x, None)],),                           lambda t: t[1][0]),
    dict    = (lambda x: (dict(x=x, n=n, s='word'),),                   lambda d: d['x']),
    data    = (lambda x: (Data(TensorImage(x), big),),                  lambda o: o.a.as_subclass(torch.Tensor)),
    half    = (lambda x: (x.half(),),                                   lambda x: x.float()),
    int     = (lambda x: ((x*4).long(),),                               lambda x: x.float()))

def sketch(o):
    "The structure of `o`: its classes, and dtypes and shapes of its tensors"
    if isinstance(o, torch.Tensor): return type(o),o.dtype,tuple(o.shape)
    if isinstance(o, dict): return type(o),{k:sketch(v) for k,v in o.items()}
    if isinstance(o, (tuple,list,L)): return type(o),[sketch(v) for v in o]
    if isinstance(o, (Data,Frozen)): return type(o),sketch(o.a),sketch(o.b)
    return type(o),str(o)

class Structured(nn.Module):
    "Finds its input with `get`, returns what `make` makes of its prediction, and remembers what it was given"
    def __init__(self, get, make):
        super().__init__()
        self.layers,self.get,self.make,self.seen = mlp(),get,make,[]
    def forward(self, *args):
        self.seen.append(sketch(args))
        return self.make(self.layers(self.get(*args)))

class Loss:
    "A loss that finds the prediction with `get`, and remembers what it was given"
    def __init__(self, get): self.get,self.seen = get,[]
    def __call__(self, pred, y):
        self.seen.append(sketch(pred))
        return F.mse_loss(self.get(pred), y)

@lru_cache(None)
def seen(inp, prediction, mode):
    "What model and loss are given in an epoch, and the weights at its end"
    (make_inp,get_inp),(make,get) = inputs[inp],predictions[prediction]
    batches = [(*make_inp(x), y) for x,y in zip(*(o.split(16) for o in numbers()))]
    learn = get_learner(Structured(get_inp, make), DataLoaders(batches, batches), loss_func=Loss(get), opt_func=SGD,
                        lr=.05)
    if mode: modes[mode](learn)
    learn.fit(1)
    return (learn.model.seen,learn.loss_func.seen),flat(weights(learn))

@pytest.mark.parametrize('prediction,inp', in_turns(predictions, inputs).items())
@each_mode
def test_structures(mode, prediction, inp):
    """Inputs reach the model as they do in float32, and predictions the loss: the same classes and dtypes, float32 for
    half precision. Gradients find their way back."""
    (given,w),(given32,w32) = seen(inp, prediction, mode),seen(inp, prediction, None)
    assert given==given32 and [*map(len, given)]==[8,8]
    assert 1e-7<(w-w32).norm()/w32.norm()<1e-3 # it did compute in half precision

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

@each_mode
def test_export_inside_a_batch(mode, tmp_path):
    "Nothing of the batch that was going on goes into the file"
    learn = modes[mode](get_learner(norm=True, path=tmp_path, cbs=GradientAccumulation(64)))
    recorders = learn.cbs.filter(lambda o: isinstance(o, PrecisionRecorder))
    with learn.removed_cbs(recorders): learn.fit(1, cbs=Now('after_batch', methodcaller('export')))
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
def test_copies_inside_a_batch(mode):
    """From the step on, and at the end of a validation batch, who copies the model gets the real weights, and no more
    than a model"""
    def copy(learn): copies.append((deepcopy(learn.model),weights(learn)))
    for event,training in (('before_step',True), ('after_step',True), ('after_batch',True), ('after_batch',False)):
        copies = []
        modes[mode](get_learner()).fit(1, cbs=Now(event, copy, training=training))
        (model,want), = copies
        assert all(torch.equal(p, q) for p,q in zip(model.parameters(), want, strict=True)), event
        assert_plain(model, event)

load_code = """
import json,sys
from fastai.learner import load_learner
def see():
    learn = load_learner('export.pkl')
    learn.logger,learn.create_mbar = lambda *args: None,False
    return [learn.predict(i)[2].tolist() for i in (3,4)],sorted({str(p.dtype) for p in learn.model.parameters()})
res = [see()] # with a little of fastai, and with all of it
from fastai.callback.all import *
print(json.dumps([*res, see()]), 'mp_callbacks.learner' in sys.modules)
"""

def test_unpatched_process(forked_plain, tmp_path):
    "load_learner needs nothing but that mp_callbacks is installed, and predicts in float32"
    learn = modes['fp16'](get_learner(norm=True, path=tmp_path))
    learn.fit(1)
    cloudpickle.register_pickle_by_value(learners) # so that the other process needn't import it, and with it all ours
    try: learn.export()
    finally: cloudpickle.unregister_pickle_by_value(learners)
    want = [[learn.to_fp32().predict(i)[2].tolist() for i in (3,4)],['torch.float32']]
    assert forked_plain(load_code, tmp_path).splitlines()[-1]==f'{json.dumps([want]*2)} False'

# --- Callbacks added by hand

alone = [(ModelToHalf,'only together with MixedPrecision'),
         (MixedPrecision, r'needs ModelToHalf: call learn.to_fp16\(\).*use NativeMixedPrecision')]

@pytest.mark.parametrize('cb,match', alone)
def test_one_of_two(cb, match):
    "ModelToHalf and MixedPrecision need each other, and say so before anything has changed"
    learn = get_learner(cbs=cb())
    before = state(learn)
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

made = dict(half=ModelToHalf, half2=lambda: ModelToHalf('bf16'), native=NativeMixedPrecision,
    mixed=lambda: MixedPrecision(max_loss_scale=2.**10), mixed2=lambda: MixedPrecision(dynamic=False),
    amp=fp16.MixedPrecision, non_native=fp16.NonNativeMixedPrecision)

@pytest.mark.parametrize('names', ['mixed mixed2', 'mixed native', 'native mixed', 'native native',
    'half mixed native', 'half half2 mixed', 'half native', 'amp mixed', 'native amp', 'half mixed non_native'])
def test_two_precisions(names):
    "Are refused when a fit begins, before anything has been converted"
    learn = get_learner()
    for o in names.split(): learn.add_cb(made[o]())
    before = state(learn)
    with pytest.raises(ValueError, match=r'to_fp16\(\)'): learn.fit(1)
    unchanged(learn, before, named=False)
    trains(learn.to_bf16())

# --- From one precision to the next

class Subclass(fp16.MixedPrecision): "As in somebody's own package"

def fastais(cb): return any(c.__module__==fp16.__name__ for c in type(cb).__mro__)
def precisions(learn): return [o for o in learn.cbs if isinstance(o, (PrecisionCallback,ModelToHalf)) or fastais(o)]

@each_call
def test_nothing_is_left(call):
    "A call replaces what was on, here a subclass of fastai's; and to_fp32 leaves nothing of it in model and optimizer"
    learn,plain = getattr(get_learner(norm=True, cbs=Subclass()), call)(),get_learner(norm=True)
    native = 'native' in call
    assert [type(o) for o in precisions(learn)]==([NativeMixedPrecision] if native else [ModelToHalf,MixedPrecision])
    for o in (learn,plain): o.fit(1)
    learn.to_fp32()
    assert precisions(learn)==[] and vars(learn.opt).keys()==vars(plain.opt).keys()
    for a,b in zip(*(map(vars, o.model.modules()) for o in (learn,plain)), strict=True):
        assert a.keys()==b.keys() and all(len(a[k])==len(b[k]) for k in a if k.endswith('hooks'))
    assert not any(vars(p) or p._backward_hooks for p in learn.model.parameters())
    assert {*map(id, learn.opt.state)}<={*map(id, learn.model.parameters())}
    trains(learn)

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
