"""Each preset of `DynamicLossScale` takes the steps of its library, on random overflows

An oracle is a generator: it is sent whether a step was finite, and yields the scale of the next one. It is written
after a library's source, with mutable state and that library's counters, so that it has nothing in common with
`adjust`; only its options have our names. Libraries with the same rule share one. For torch it is torch's own kernel.
JMP, MPX, Flax and Keras are asked themselves where they are installed (the extra `peers`), and so are the oracles that
stand in for them.

The file takes long because periods of 2000 steps are compared over 20,000."""
import inspect,math,os,random

import pytest,torch
from cases import *
from functools import partial
from mp_callbacks.core.loss_scale import DynamicLossScale,loss_scale_presets

f32,inf = torch.finfo(torch.float32),math.inf
def _f32(x): return torch.tensor(x, dtype=torch.float32).item()
def _grown(scale, factor):
    new = _f32(scale*factor)
    return new if math.isfinite(new) else scale

def torch_(loss_scale=2.**16, period=2000, factor=2., backoff=.5):
    scale,tracker = torch.tensor(loss_scale),torch.tensor(0, dtype=torch.int32)
    while True:
        finite = yield scale.item()
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), factor, backoff, period)

def megatron(loss_scale=2.**32, period=1000, factor=2., backoff=.5, min_loss_scale=1., hysteresis=2, refilled=False):
    "With `refilled`, Apex's: each finite step refills the hysteresis"
    scale,growth_tracker,hysteresis_tracker = loss_scale,0,hysteresis
    while True:
        finite = yield scale
        if not finite:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker<=0: scale = max(_f32(scale*backoff), min_loss_scale)
        else:
            growth_tracker += 1
            if growth_tracker==period or refilled: hysteresis_tracker = hysteresis
            if growth_tracker==period: growth_tracker,scale = 0,_grown(scale, factor)

def deepspeed(loss_scale=2.**16, period=1000, min_loss_scale=1., hysteresis=2, at_min='raise', consecutive=False):
    scale,cur_iter,last_overflow,cur_hysteresis = loss_scale,0,-1,hysteresis
    while True:
        finite = yield scale
        if finite:
            if consecutive: cur_hysteresis = hysteresis
            stable = cur_iter-last_overflow-1
            if stable>0 and stable%period==0:
                if not consecutive: cur_hysteresis = hysteresis
                scale *= 2
        else:
            if hysteresis==1 or cur_hysteresis==1:
                if scale==min_loss_scale and at_min=='raise': raise FloatingPointError('already at minimum')
                scale = max(scale/2, min_loss_scale)
            else: cur_hysteresis -= 1
            last_overflow = cur_iter
        cur_iter += 1

def fairseq(loss_scale=2.**7, period=2**14, min_loss_scale=1e-4, at_min='raise'):
    "A floor with `at_min='clip'` is its `threshold_loss_scale`, and the minimum that raises is below that"
    threshold,lowest = (min_loss_scale,1e-4) if at_min=='clip' else (None,min_loss_scale)
    scale,it,last_overflow = loss_scale,0,-1
    while True:
        finite = yield scale
        if finite:
            if (it-last_overflow)%period==0: scale *= 2
        else:
            last_overflow = it
            scale /= 2
            if threshold is not None: scale = max(scale, threshold)
            if scale<=lowest: raise FloatingPointError('minimum loss scale reached')
        it += 1

def paddle(loss_scale=2.**16, period=2000, factor=2., backoff=.5, hysteresis=1):
    scale,incr_count,decr_count = loss_scale,0,0
    while True:
        finite = yield scale
        incr_count,decr_count = (incr_count+1,0) if finite else (0,decr_count+1)
        if incr_count==period: scale,incr_count = _f32(scale*factor),0
        if decr_count==hysteresis: scale,decr_count = _f32(scale*backoff),0

def jmp(loss_scale=2.**15, period=2000, factor=2, backoff=None, min_loss_scale=1., max_loss_scale=inf, grow=_grown):
    scale,counter = loss_scale,0
    while True:
        finite = yield scale
        if not finite: scale = max(min_loss_scale, _f32(scale*(backoff or 1/factor)))
        elif counter==period-1: scale = min(grow(scale, factor), max_loss_scale)
        counter = (counter+1)%period*finite

def fastai(loss_scale=2.**24, period=500, factor=2.):
    scale,count = loss_scale,0
    while True:
        if (yield scale): count += 1
        else: scale /= factor
        if count==period: scale,count = scale*factor,0

# For each preset its oracle, which may be another library's with other numbers, and options to compare it with, besides
# its own: only powers of two, so that float32 and Python's floats are the same, or nearly the largest of float32
nearly_max = dict(loss_scale=3*2.**120, factor=4)
oracles = dict(
    torch                 = (torch_, dict(loss_scale=256., factor=4, backoff=.25),
                             dict(loss_scale=3*2.**125, backoff=2.**-8)),
    apex                  = (partial(jmp, loss_scale=2.**16, min_loss_scale=0., max_loss_scale=2.**24),
                             dict(loss_scale=2.**9, min_loss_scale=8., max_loss_scale=2.**13)),
    apex_hysteresis       = (partial(megatron, loss_scale=2.**16, period=2000, min_loss_scale=0., refilled=True),),
    megatron              = (megatron, dict(loss_scale=2.**20, min_loss_scale=4., factor=4.)),
    deepspeed             = (deepspeed, dict(loss_scale=2.**40, at_min='clip'),
                             dict(loss_scale=2.**10, min_loss_scale=16.)),
    deepspeed_consecutive = (partial(deepspeed, consecutive=True),),
    deepspeed_fused       = (partial(deepspeed, hysteresis=1, at_min='clip'),
                             dict(loss_scale=2.**16, min_loss_scale=.25)),
    fairseq               = (fairseq, dict(loss_scale=100.), dict(min_loss_scale=.25, at_min='clip')),
    paddle                = (paddle, dict(loss_scale=2.**30, backoff=.25)),
    jmp                   = (jmp, dict(loss_scale=2.**10, factor=4, min_loss_scale=2.)),
    mpx                   = (partial(jmp, loss_scale=65504., max_loss_scale=65504.),
                             dict(loss_scale=2.**10, factor=2, min_loss_scale=4.)),
    flax                  = (partial(jmp, loss_scale=65536., period=2001, backoff=.5, min_loss_scale=f32.tiny,
                                     max_loss_scale=f32.max, grow=lambda scale,factor: _f32(scale*factor)),
                             dict(nearly_max, backoff=2.**-8)),
    keras                 = (partial(torch_, loss_scale=2.**15),),
    tf                    = (jmp, nearly_max),
    mindspore             = (partial(jmp, loss_scale=2.**24), dict(loss_scale=2.**8, factor=4)),
    emily                 = (partial(jmp, loss_scale=65536., backoff=.5),
                             dict(loss_scale=2.**8, factor=4, min_loss_scale=2.**-3)),
    fastai                = (fastai, dict(loss_scale=512., factor=4)))

def flags(p, n, seed):
    "`n` random flags, of which about `p` are overflows, half of them with another right behind"
    rng,res = random.Random(f'{p}{n}{seed}'),[]
    while len(res)<n:
        bad = rng.random()<p
        res += [not bad]
        if bad and rng.random()<.5: res += [False]
    return res[:n]

def traces(n):
    "A trace of `n` steps for each of several shares of overflows, and one of each extreme"
    for p in (.002,.01,.03,.1,.2,.3,.5,.8): yield flags(p, n, 1)
    yield [True]*n
    yield [False]*100

def same(oracle, s, trace):
    """`s` and `oracle` have the same scale after each step of `trace`, until the peer raises or leaves float32's range

    Returns the number of steps."""
    assert next(oracle)==s.loss_scale
    for i,finite in enumerate(trace):
        old = s
        try: expected = oracle.send(finite)
        except FloatingPointError:
            with pytest.raises(FloatingPointError, match='it may not shrink below'): s.adjust(finite)
            return i+1
        s = s.adjust(finite)
        assert f32.tiny<=s.loss_scale<=f32.max and _f32(1/s.loss_scale)>0
        if not f32.tiny<=expected<=f32.max: # here the peer has gone on to 0 or infinity, and we have not
            assert s.loss_scale==old.loss_scale or s.loss_scale in (s.min_loss_scale,s.max_loss_scale)
            return i+1
        assert s.loss_scale==expected, (i, s, expected)
    return len(trace)

def all_the_same(make, s, trace):
    "As `same`, and where it ends early, once more from the start with what is left of `trace`"
    while trace: trace = trace[same(make(), s, trace):]

def test_every_preset_has_an_oracle(): assert list(oracles)==list(loss_scale_presets)

@pytest.mark.parametrize('shares', crossed([(1e-3,), (0, 3e-4, .1)], fast=lambda o: len(o)==1))
@pytest.mark.parametrize('name', oracles)
def test_default(name, shares):
    "As it comes: the start, the period and what makes it shrink, with different shares of overflows, and with one"
    oracle,s = oracles[name][0],DynamicLossScale.preset(name)
    for p in shares: all_the_same(oracle, s, flags(p, 20000, 0))
    all_the_same(oracle, s, [False]+[True]*2*(s.period+1))

@pytest.mark.parametrize('steps', crossed([100,400], fast=lambda o: o==100))
@pytest.mark.parametrize('name', oracles)
def test_changed(name, steps):
    "With short periods, with more or less hysteresis where the library has it, with other factors and bounds"
    oracle,*others = oracles[name]
    has_hysteresis = name!='deepspeed_fused' and 'hysteresis' in inspect.signature(oracle).parameters
    more = [dict(hysteresis=h) for h in (1,2,3)] if has_hysteresis else [{}]
    for options in ({**o, **h, 'period':n} for o in ({}, *others) for h in more for n in (1,2,5,20)):
        s = DynamicLossScale.preset(name, **options)
        for t in traces(steps): all_the_same(partial(oracle, **options), s, t)

def test_known_differences():
    "At a minimum that halving doesn't hit DeepSpeed goes there before it raises; fairseq raises when it hits one"
    oracle = deepspeed(8., min_loss_scale=3., hysteresis=1)
    s = DynamicLossScale.preset('deepspeed', loss_scale=8., min_loss_scale=3., hysteresis=1)
    assert [next(oracle), oracle.send(False), oracle.send(False)]==[8,4,3]
    with pytest.raises(FloatingPointError): s.adjust(False).adjust(False)
    oracle,s = fairseq(8., min_loss_scale=4.),DynamicLossScale.preset('fairseq', loss_scale=8., min_loss_scale=4.)
    assert next(oracle)==8
    with pytest.raises(FloatingPointError): oracle.send(False)
    assert s.adjust(False).loss_scale==4

# --- The peers themselves: oracles from the libraries

def jmp_itself(n):
    jmp,jnp = pytest.importorskip('jmp'),pytest.importorskip('jax.numpy')
    o = jmp.DynamicLossScale(jnp.float32(2.**15), period=n)
    while True: o = o.adjust(jnp.asarray((yield o.loss_scale.item())))

def mpx_itself(n):
    mpx,jnp = pytest.importorskip('mpx'),pytest.importorskip('jax.numpy')
    o = mpx.DynamicLossScaling(jnp.float32(mpx.FLOAT16_MAX), jnp.float32(1.), period=n)
    while True: o = o.adjust(jnp.asarray((yield o.loss_scaling.item())))

def flax_itself(n):
    jax,flax = pytest.importorskip('jax'),pytest.importorskip('flax.training.dynamic_scale')
    o,update = flax.DynamicScale(growth_interval=n-1),jax.jit(lambda o,x: o.value_and_grad(lambda x: x*x)(x)[0])
    while True:
        finite = yield float(o.scale)
        o = update(o, 1. if finite else math.inf)

def keras_itself(n):
    os.environ.setdefault('KERAS_BACKEND', 'torch')
    keras = pytest.importorskip('keras')
    v = keras.Variable([0.])
    o = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.), dynamic_growth_steps=n)
    o.build([v])
    while True:
        finite = yield float(o.dynamic_scale)
        o.apply([keras.ops.convert_to_tensor([1. if finite else math.inf])], [v])

@pytest.mark.parametrize('make', [jmp_itself,mpx_itself,flax_itself,keras_itself])
def test_itself(make):
    "The library's own code on more than a thousand steps, and our transcription of it"
    name = make.__name__.removesuffix('_itself')
    for n in (2,3,8):
        for p in (.02,.15,.4):
            trace = flags(p, 150, n)
            all_the_same(lambda: make(n), DynamicLossScale.preset(name, period=n), trace)
            ours,theirs = oracles[name][0](period=n),make(n)
            assert [next(ours), *map(ours.send, trace)]==[next(theirs), *map(theirs.send, trace)]
