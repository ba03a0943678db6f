"""What the calls refuse: the error comes before anything has changed, with a way out. And one precision is on at a time

Models, devices, arguments, errors of the model, callbacks that were added by hand; calls after calls: test_pairs."""
from fastai.callback import fp16
from torch.utils.checkpoint import CheckpointError
from learners import *
from machines import Fake,machine,pretend
from test_inputs import state,trains,unchanged

nan,inf = float('nan'),float('inf')

def offloaded():
    from accelerate import cpu_offload
    model = mlp()
    return cpu_offload(model, torch.device('cpu')) or model

unfit = dict( # others: test_half
    half      = (lambda: mlp().half(), r'has no float32 parameters \(.*call model.float\(\) first, or train without'),
    offloaded = (offloaded, r"0.weight is on the device 'meta', without numbers.*cpu_offload"))

@pytest.mark.parametrize('call', calls)
@pytest.mark.parametrize('make,match', unfit.values(), ids=unfit)
def test_unfit_model(make, match, call):
    "A model without float32 parameters, or without numbers, is refused at the call, with a way out"
    learn = get_learner(make())
    with stays(list, learn.cbs), pytest.raises(ValueError, match=match): getattr(learn, call)()

@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_fp16')))
def test_unsupported_device_later(mode):
    "The data may move after the call, to a device that can't: then the fit refuses, before anything has changed"
    learn = modes[mode](get_learner())
    before = state(learn)
    t4 = pretend(Fake('cuda', 'Tesla T4', (7,5)))
    with t4, pytest.raises(ValueError, match="device=cpu doesn't compute on this machine. Put"): learn.fit(1)
    unchanged(learn, before)

bad = dict( # call -> argument -> values
    to_fp16 = dict(loss_scale=[0,nan,'auto'], max_loss_scale=[0,inf,'2**24',None,.5], min_loss_scale=[0,2.**25,'low'],
                   div_factor=[1,inf,None], scale_wait=[0,1.5,True], clip=[0,nan,'1',True], headroom=[-1.,31,True],
                   max_skips=[0,1.5,nan,'3',None,True],
                   warn_skips=[0,-1,1.5,nan,'3',None,True], keep=[3,None,'head*',[3]]),
    to_bf16 = dict(clip=[-1.], max_skips=[-1], keep=[('*.nothing',)]),
    to_native_fp16 = dict(init_scale=[0,inf,'x',2.**25], growth_factor=[1.,'x'], backoff_factor=[1.,0,2],
                          growth_interval=[0,2.5], min_loss_scale=[-1,2.**17], max_loss_scale=[0,2.], max_skips=[0]),
    to_native_bf16 = dict(max_skips=[0,'many'], warn_skips=[0]))

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

said = dict( # a call, and what its error says
    clip      = (lambda: get_learner().to_bf16(clip='1.0'), r"clip='1.0' must be a number. Use clip=None for"),
    by_place  = (lambda: get_learner().to_bf16(1.), r'flat_master=1.0 must be True or False. .* as in clip=1.0'),
    dtype     = (lambda: get_learner().to_fp16('bf16'), r"loss_scale='bf16' is a dtype. The name of the call says it"),
    name_only = (lambda: half_precision(mlp(), keep=lambda name: True), 'keep=<lambda> must take the name and the mod'),
    way       = (lambda: half_precision(mlp(), way=3), "way=3 must be a function of a module's name"),
    rescue    = (lambda: get_learner().to_fp16(rescue=1), 'rescue=1 must be True or False'),
    plan      = (lambda: get_learner().precision_plan().batch_size('16'), "gb='16' must be a positive number"),
    no_items  = (lambda: get_learner().precision_plan(([torch.rand(3,4,4)]*2,torch.rand(2,1))), # a list of images
                 r'first dimensions of the tensors of this batch are \[2, 3\]'))

@pytest.mark.parametrize('call,match', said.values(), ids=said)
def test_said(call, match):
    "What is wrong, and not something else"
    with pytest.raises((ValueError,TypeError), match=match): call()

@pytest.mark.parametrize('keep,name', [
    (nn.Softmax,'Softmax'), ([nn.Softmax,nn.LSTM],'Softmax, LSTM'), (lambda name,m: name=='head','<lambda>')])
def test_keep_selects_nothing(keep, name):
    "A warning, as a callback may add such a module later"
    with pytest.warns(UserWarning, match=f'keep={name} selects no module. The model has .*Linear, GELU') as told:
        half_precision(mlp(), keep=keep)
    assert told[0].filename==__file__
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for keep in ((), '0', ['0',nn.GELU]): half_precision(mlp(), keep=keep)

def test_each_name_of_a_dtype():
    "Those of fastai's calls, too"
    for name in ('fp16','half','f16','float16',torch.float16): assert half_precision(mlp(), name).dtype==torch.float16
    for name in ('bf16','bfloat16'): assert NativeMixedPrecision(dtype=name).dtype==torch.bfloat16

no_effect = 'loss_scale=128 has no effect beside dynamic' # code written for fastai runs, as there
@pytest.mark.parametrize('name,call,match', [
    ('AVX2', lambda: get_learner().to_bf16(), 'only emulates'), ('ARM', lambda: MixedPrecision(128.), no_effect),
    ('ARM', lambda: get_learner().to_fp16(128.), no_effect)])
def test_warnings_show_the_caller(name, call, match):
    "And no line of this package"
    with pretend(machine(name)), pytest.warns(UserWarning, match=match) as told: call()
    assert told[0].filename==__file__

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_gradients_through_checkpoints(mode):
    "Before the backward pass, in the precision of the model; outside of it an error says how to compute them"
    class Checkpointed(nn.Sequential):
        def forward(self, x): return checkpoint(super().forward, x, use_reentrant=False)
    def _fit(inside):
        def penalty(learn):
            with learn.mixed_precision.autocast if inside else nullcontext():
                grads = torch.autograd.grad(learn.loss_grad, [*learn.model.parameters()], retain_graph=True)
            assert all(o.isfinite().all() for o in grads)
        body = Checkpointed(nn.Linear(8,8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8,8))
        fitted(in_mode(mode, nn.Sequential(body, nn.Linear(8,1)), dict(keep=nn.GELU)), 1, On('after_loss', penalty))
    assert 'with learn.mixed_precision.autocast:' in note_of(_fit, False, raises=CheckpointError)
    _fit(True)

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_optimizer_with_a_closure(mode):
    learn = in_mode(mode, opt_func=partial(OptimWrapper, opt=torch.optim.LBFGS))
    assert note_of(learn.fit, 1, raises=TypeError)==(
        "LBFGS computes the loss several times in a step, and asks for a function that does so. "
        "Neither fastai's Learner nor TrainingSteps passes one. Use an optimizer without a closure.")
    def other(learn): learn.opt.step = raises(TypeError('another'))
    with pytest.raises(TypeError) as e: learn.fit(1, cbs=On('before_step', other))
    assert not hasattr(e.value, '__notes__')

@pytest.mark.parametrize('how', ['learner', 'fit'])
def test_both_by_hand(how):
    "ModelToHalf and MixedPrecision through `cbs=` are to_fp16 to the bit, whichever comes first"
    learn = fitted(in_mode('fp16', norm=True), 2)
    def _mixed(): return MixedPrecision(max_loss_scale=2.**10)
    for cbs in ([ModelToHalf(),_mixed()], [_mixed(),ModelToHalf()]):
        other = get_learner(norm=True, cbs=cbs if how=='learner' else None)
        other.fit(2, cbs=None if how=='learner' else cbs)
        assert same_weights(learn, other)
    if how=='fit': assert not any(isinstance(cb, (PrecisionCallback,ModelToHalf)) for cb in other.cbs)

made = dict(half=ModelToHalf, half2=lambda: ModelToHalf('bf16'), native=NativeMixedPrecision,
    mixed=lambda: MixedPrecision(max_loss_scale=2.**10), mixed2=lambda: MixedPrecision(dynamic=False),
    amp=fp16.MixedPrecision, non_native=fp16.NonNativeMixedPrecision)

added = dict.fromkeys(['mixed mixed2', 'mixed native', 'native mixed', 'native native', 'half mixed native',
    'half half2 mixed', 'half native', 'amp mixed', 'native amp', 'half mixed non_native'], r'to_fp16\(\)')
added.update(half='only together with MixedPrecision', # and MixedPrecision only with it
             mixed=r'needs ModelToHalf: call learn.to_fp16\(\).*use NativeMixedPrecision')

@pytest.mark.parametrize('names', added)
def test_two_precisions(names):
    "Or the half of one are refused when a fit begins, before anything has been converted"
    learn = get_learner()
    for o in names.split(): learn.add_cb(made[o]())
    before = state(learn)
    with pytest.raises(ValueError, match=added[names]): learn.fit(1)
    unchanged(learn, before, named=names in ('half','mixed'))
    trains(learn.to_bf16())

def test_reload_of_fastai(forked, tmp_path):
    "What the page of migration says: it gives fastai's calls back, and a reload of ours replaces them again"
    forked("""if True:
        import importlib,fastai.callback.fp16
        from fastai.basics import Learner
        from mp_callbacks.all import *
        def owners(): return {getattr(Learner, o).__module__ for o in ('to_fp16','to_bf16','to_fp32')}
        for module in ('fastai.callback.fp16','mp_callbacks.learner.calls'):
            importlib.reload(importlib.import_module(module))
            assert owners()=={module}, module""", tmp_path)
