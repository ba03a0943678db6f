"""Each preset of `DynamicLossScale` against its peer, step by step, on random overflows

An oracle is a generator: it is sent whether a step was finite, and yields the scale of the next one. Each is written
after its peer's own source, with mutable state and the peer's own counters, so that it has nothing in common with
`adjust`. For torch it is torch's own kernel. JMP, MPX, Flax and Keras are asked themselves where they are installed
(the extra `peers`), and so are the oracles that stand in for them.
The file takes long because periods of 2000 steps are compared over 20,000."""
import copy,math,os,pickle,random
from dataclasses import asdict,fields,replace

import pytest,torch
from cases import *
from mp_callbacks.loss_scale import DynamicLossScale,StaticLossScale,as_loss_scale,loss_scale_presets

f32 = torch.finfo(torch.float32)
def _f32(x): return torch.tensor(x, dtype=torch.float32).item()

# --- The peers

def torch_(init=2.**16, interval=2000, growth=2., backoff=.5):
    scale,tracker = torch.tensor(init),torch.tensor(0, dtype=torch.int32)
    while True:
        finite = yield scale.item()
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), growth, backoff, interval)

def apex(init=2.**16, window=2000, factor=2., lo=None, hi=2.**24):
    unskipped = 0
    while True:
        finite = yield init
        if finite: unskipped += 1
        else:
            init = max(lo, init/factor) if lo else init/factor
            unskipped = 0
        if unskipped==window:
            init = min(hi, init*factor)
            unskipped = 0

def apex_hysteresis(init=2.**16, interval=2000, growth=2., backoff=.5, hysteresis=2):
    growth_tracker,hysteresis_tracker = 0,hysteresis
    while True:
        finite = yield init
        if not finite:
            hysteresis_tracker -= 1
            growth_tracker = 0
            if hysteresis_tracker>0: continue
            init = _f32(init*backoff)
        else:
            successful = growth_tracker+1
            if successful==interval:
                new = _f32(init*growth)
                if math.isfinite(new): init = new
                growth_tracker = 0
            else: growth_tracker = successful
            hysteresis_tracker = hysteresis

def megatron(init=2.**32, lo=1., growth=2., backoff=.5, interval=1000, hysteresis=2):
    growth_tracker,hysteresis_tracker = 0,hysteresis
    while True:
        finite = yield init
        if not finite:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker<=0: init = max(_f32(init*backoff), lo)
        else:
            growth_tracker += 1
            if growth_tracker==interval:
                growth_tracker,hysteresis_tracker = 0,hysteresis
                init = _f32(init*growth)

def deepspeed(scale=2.**16, window=1000, lo=1., delayed_shift=2, consecutive=False, raises=True, factor=2.):
    cur_iter,last_overflow,cur_hysteresis = 0,-1,delayed_shift
    while True:
        finite = yield scale
        if finite:
            if consecutive: cur_hysteresis = delayed_shift
            stable = cur_iter-last_overflow-1
            if stable>0 and stable%window==0:
                if not consecutive: cur_hysteresis = delayed_shift
                scale *= factor
        else:
            if delayed_shift==1 or cur_hysteresis==1:
                if scale==lo and raises: raise FloatingPointError('already at minimum')
                scale = max(scale/factor, lo)
            else: cur_hysteresis -= 1
            last_overflow = cur_iter
        cur_iter += 1

def deepspeed_fused(scale=2.**16, window=1000, lo=1., factor=2.):
    cur_iter,last_overflow = 0,-1
    while True:
        finite = yield scale
        if not finite:
            scale = max(scale/factor, lo)
            last_overflow = cur_iter
        else:
            stable = cur_iter-last_overflow-1
            if stable>0 and stable%window==0: scale *= factor
        cur_iter += 1

def fairseq(scale=2.**7, window=2**14, threshold=None, lo=1e-4, factor=2.):
    it,last_overflow = 0,-1
    while True:
        finite = yield scale
        if finite:
            if (it-last_overflow)%window==0: scale *= factor
        else:
            before,last_overflow = scale,it
            scale /= factor
            if threshold is not None: scale = max(scale, threshold)
            if scale<=lo:
                scale = before
                raise FloatingPointError('minimum loss scale reached')
        it += 1

def paddle(scale=2.**16, incr_ratio=2., decr_ratio=.5, incr_every=2000, decr_every=1):
    incr_count = decr_count = 0
    while True:
        finite = yield scale
        if not finite:
            incr_count = 0
            decr_count += 1
            if decr_count==decr_every:
                scale = _f32(scale*decr_ratio)
                decr_count = 0
        else:
            decr_count = 0
            incr_count += 1
            if incr_count==incr_every:
                scale = _f32(scale*incr_ratio)
                incr_count = 0

def _jmp_rule(scale, finite, grow, factor, lo):
    "JMP's rule for the next scale, which MPX has too"
    if not finite: return max(lo, _f32(scale/factor))
    grown = _f32(scale*factor)
    return grown if grow and math.isfinite(grown) else scale

def jmp(scale=2.**15, period=2000, factor=2, lo=1.):
    counter = 0
    while True:
        finite = yield scale
        scale = _jmp_rule(scale, finite, counter==period-1, factor, lo)
        counter = (counter+1)%period*finite

def mpx(scale=65504., lo=1., factor=2, period=2000):
    counter = 0
    while True:
        finite = yield scale
        scale = min(max(_jmp_rule(scale, finite, counter==period-1, factor, lo), lo), 65504.)
        counter = (counter+1)%period*finite

def flax(scale=65536., interval=2000, growth=2., backoff=.5, lo=f32.tiny):
    fin_steps = 0
    while True:
        finite = yield scale
        grow = fin_steps==interval
        if not finite: scale = max(_f32(scale*backoff), lo)
        elif grow: scale = min(_f32(scale*growth), f32.max)
        fin_steps = 0 if grow or not finite else fin_steps+1

def keras(scale=2.**15, steps=2000):
    counter = 0
    while True:
        finite = yield scale
        if not finite: counter,scale = 0,_f32(scale*.5)
        elif counter==steps-1: counter,scale = 0,_f32(scale*2.)
        else: counter += 1

def tf(scale=2.**15, period=2000, multiplier=2.):
    good = 0
    while True:
        finite = yield scale
        if finite:
            if good+1>=period:
                new = _f32(scale*multiplier)
                if math.isfinite(new): scale = new
                good = 0
            else: good += 1
        else:
            good = 0
            scale = max(_f32(scale/multiplier), 1.)

def mindspore(scale=2.**24, factor=2, window=2000):
    counter = 0
    while True:
        finite = yield scale
        grown = _f32(scale*factor)
        if finite: scale = grown if counter==window-1 and math.isfinite(grown) else scale
        else: scale = max(1., _f32(scale/factor))
        counter = (counter+1)%window*finite

def emily(scale=65536., growth=2., backoff=.5, interval=2000, lo=1.):
    counter = 0
    while True:
        finite = yield scale
        if not finite: scale,counter = max(lo, scale*backoff),0
        elif counter+1>=interval: scale,counter = scale*growth,0
        else: counter += 1

def fastai(scale=2.**24, wait=500, div=2.):
    count = 0
    while True:
        finite = yield scale
        if not finite:
            scale /= div
            continue
        count += 1
        if count==wait:
            count = 0
            scale *= div

# For each preset: its oracle as it comes, then others as `(oracle, changes)`, for a period of `n` and a hysteresis of
# `h`. Only powers of two, so that float32 and Python's floats are the same.
oracles = dict(
    torch                 = (torch_, [
        (lambda n,h: torch_(256., n, 4., .25), lambda n,h: dict(loss_scale=256., period=n, factor=4, backoff=.25)),
        (lambda n,h: torch_(3*2.**125, n, 2., 2.**-8),
         lambda n,h: dict(loss_scale=3*2.**125, period=n, backoff=2.**-8))]),
    apex                  = (apex, [
        (lambda n,h: apex(window=n), lambda n,h: dict(period=n)),
        (lambda n,h: apex(2.**9, n, lo=8., hi=2.**13),
         lambda n,h: dict(loss_scale=2.**9, period=n, min_loss_scale=8., max_loss_scale=2.**13))]),
    apex_hysteresis       = (apex_hysteresis, [
        (lambda n,h: apex_hysteresis(interval=n, hysteresis=h), lambda n,h: dict(period=n, hysteresis=h))]),
    megatron              = (megatron, [
        (lambda n,h: megatron(interval=n, hysteresis=h), lambda n,h: dict(period=n, hysteresis=h)),
        (lambda n,h: megatron(2.**20, 4., 4., .5, n, h),
         lambda n,h: dict(loss_scale=2.**20, min_loss_scale=4., factor=4., period=n, hysteresis=h))]),
    deepspeed             = (deepspeed, [
        (lambda n,h: deepspeed(window=n, delayed_shift=h), lambda n,h: dict(period=n, hysteresis=h)),
        (lambda n,h: deepspeed(2.**40, n, delayed_shift=h, raises=False),
         lambda n,h: dict(loss_scale=2.**40, period=n, hysteresis=h, at_min='clip')),
        (lambda n,h: deepspeed(2.**10, n, 16., h),
         lambda n,h: dict(loss_scale=2.**10, period=n, min_loss_scale=16., hysteresis=h))]),
    deepspeed_consecutive = (lambda: deepspeed(consecutive=True), [
        (lambda n,h: deepspeed(window=n, delayed_shift=h, consecutive=True),
         lambda n,h: dict(period=n, hysteresis=h))]),
    deepspeed_fused       = (deepspeed_fused, [
        (lambda n,h: deepspeed_fused(window=n), lambda n,h: dict(period=n)),
        (lambda n,h: deepspeed_fused(2.**16, n, .25), lambda n,h: dict(period=n, min_loss_scale=.25))]),
    fairseq               = (fairseq, [
        (lambda n,h: fairseq(window=n), lambda n,h: dict(period=n)),
        (lambda n,h: fairseq(100., n), lambda n,h: dict(loss_scale=100., period=n)),
        (lambda n,h: fairseq(window=n, threshold=.25),
         lambda n,h: dict(period=n, min_loss_scale=.25, at_min='clip'))]),
    paddle                = (paddle, [
        (lambda n,h: paddle(incr_every=n, decr_every=h), lambda n,h: dict(period=n, hysteresis=h)),
        (lambda n,h: paddle(2.**30, 2., .25, n, h),
         lambda n,h: dict(loss_scale=2.**30, backoff=.25, period=n, hysteresis=h))]),
    jmp                   = (jmp, [
        (lambda n,h: jmp(period=n), lambda n,h: dict(period=n)),
        (lambda n,h: jmp(2.**10, n, 4, 2.),
         lambda n,h: dict(loss_scale=2.**10, period=n, factor=4, min_loss_scale=2.))]),
    mpx                   = (mpx, [
        (lambda n,h: mpx(period=n), lambda n,h: dict(period=n)),
        (lambda n,h: mpx(2.**10, 4., 2, n), lambda n,h: dict(loss_scale=2.**10, min_loss_scale=4., period=n))]),
    flax                  = (flax, [
        (lambda n,h: flax(interval=n), lambda n,h: dict(period=n+1)),
        (lambda n,h: flax(3*2.**120, n, 4., 2.**-8),
         lambda n,h: dict(loss_scale=3*2.**120, period=n+1, factor=4, backoff=2.**-8))]),
    keras                 = (keras, [(lambda n,h: keras(steps=n), lambda n,h: dict(period=n))]),
    tf                    = (tf, [
        (lambda n,h: tf(period=n), lambda n,h: dict(period=n)),
        (lambda n,h: tf(3*2.**120, n, 4.), lambda n,h: dict(loss_scale=3*2.**120, period=n, factor=4))]),
    mindspore             = (mindspore, [
        (lambda n,h: mindspore(window=n), lambda n,h: dict(period=n)),
        (lambda n,h: mindspore(2.**8, 4, n), lambda n,h: dict(loss_scale=2.**8, factor=4, period=n))]),
    emily                 = (emily, [
        (lambda n,h: emily(interval=n), lambda n,h: dict(period=n)),
        (lambda n,h: emily(2.**8, 4., .5, n, 2.**-3),
         lambda n,h: dict(loss_scale=2.**8, factor=4, period=n, min_loss_scale=2.**-3))]),
    fastai                = (fastai, [
        (lambda n,h: fastai(wait=n), lambda n,h: dict(period=n)),
        (lambda n,h: fastai(512., n, 4.), lambda n,h: dict(loss_scale=512., factor=4, period=n))]))

# --- What they are compared on

def flags(p, n, seed, burst=.5):
    "`n` random flags, of which about `p` are overflows, `burst` of them with another right behind"
    rng,res = random.Random(f'{p}{n}{seed}'),[]
    while len(res)<n:
        bad = rng.random()<p
        res += [not bad]
        if bad and rng.random()<burst: res += [False]
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

@pytest.mark.parametrize('shares', crossed([(1e-3,), (0, 1e-4, 3e-4, 5e-3, .1)], fast=lambda o: len(o)==1))
@pytest.mark.parametrize('name', oracles)
def test_default(name, shares):
    "As it comes: the start, the period and what makes it shrink, with different shares of overflows"
    make = oracles[name][0]
    for p in shares:
        all_the_same(make, DynamicLossScale.preset(name), flags(p, 20000, 0))

@pytest.mark.parametrize('steps', crossed([100,1000], fast=lambda o: o==100))
@pytest.mark.parametrize('name', oracles)
def test_changed(name, steps):
    "With short periods, more or less hysteresis, other factors and bounds"
    for make,changes in oracles[name][1]:
        for n in (1,2,5,20):
            for h in (1,2,3):
                if h>1 and changes(n,h)==changes(n,1): continue
                s = DynamicLossScale.preset(name, **changes(n,h))
                for t in traces(steps): all_the_same(lambda: make(n,h), s, t)

def test_torch_with_any_factors():
    "Scales that are not powers of two: torch rounds them to float32, and we don't"
    rng = random.Random(0)
    for seed in range(20):
        growth,backoff,n = rng.uniform(1.1,3),rng.uniform(.3,.9),rng.randint(1,9)
        oracle = torch_(1000., n, growth, backoff)
        s = DynamicLossScale.preset('torch', loss_scale=1000., factor=growth, backoff=backoff, period=n)
        next(oracle)
        for finite in flags(.15, 60, seed):
            expected,s = oracle.send(finite),s.adjust(finite)
            assert s.loss_scale==pytest.approx(expected, rel=1e-5)

def test_only_at_an_odd_minimum_is_deepspeed_different():
    "Deviation: it goes to a minimum that halving does not hit before it raises"
    oracle = deepspeed(8., lo=3., delayed_shift=1)
    s = DynamicLossScale.preset('deepspeed', loss_scale=8., min_loss_scale=3., hysteresis=1)
    assert [next(oracle), oracle.send(False), oracle.send(False)]==[8,4,3]
    with pytest.raises(FloatingPointError): s.adjust(False).adjust(False)

def test_only_at_an_even_minimum_is_fairseq_different():
    "Deviation: it raises when it hits the minimum, we when we would go below"
    oracle,s = fairseq(8., lo=4.),DynamicLossScale.preset('fairseq', loss_scale=8., min_loss_scale=4.)
    assert next(oracle)==8
    with pytest.raises(FloatingPointError): oracle.send(False)
    assert s.adjust(False).loss_scale==4

# --- The peers themselves

def peer(step, scale):
    "An oracle from the library itself: `step(finite)` goes on, `scale()` reads the scale"
    while True:
        finite = yield scale()
        step(finite)

def jmp_itself(n):
    jmp,jnp = pytest.importorskip('jmp'),pytest.importorskip('jax.numpy')
    o = jmp.DynamicLossScale(jnp.float32(2.**15), period=n)
    def step(finite):
        nonlocal o
        o = o.adjust(jnp.asarray(finite))
    return peer(step, lambda: o.loss_scale.item())

def mpx_itself(n):
    mpx,jnp = pytest.importorskip('mpx'),pytest.importorskip('jax.numpy')
    o = mpx.DynamicLossScaling(jnp.float32(mpx.FLOAT16_MAX), jnp.float32(1.), period=n)
    def step(finite):
        nonlocal o
        o = o.adjust(jnp.asarray(finite))
    return peer(step, lambda: o.loss_scaling.item())

def flax_itself(n):
    jax,flax = pytest.importorskip('jax'),pytest.importorskip('flax.training.dynamic_scale')
    o,update = flax.DynamicScale(growth_interval=n),jax.jit(lambda o,x: o.value_and_grad(lambda x: x*x)(x)[0])
    def step(finite):
        nonlocal o
        o = update(o, 1. if finite else math.inf)
    return peer(step, lambda: float(o.scale))

def keras_itself(n):
    os.environ.setdefault('KERAS_BACKEND', 'torch')
    keras = pytest.importorskip('keras')
    v = keras.Variable([0.])
    o = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.), dynamic_growth_steps=n)
    o.build([v])
    def step(finite): o.apply([keras.ops.convert_to_tensor([1. if finite else math.inf])], [v])
    return peer(step, lambda: float(o.dynamic_scale))

itself = dict(jmp=(jmp_itself,0), mpx=(mpx_itself,0), flax=(flax_itself,1), keras=(keras_itself,0))

@pytest.mark.parametrize('name', itself)
def test_itself(name):
    "The library's own code on more than a thousand steps, and our transcription of it"
    make,more = itself[name]
    for n in (1,3,8):
        for p in (.02,.15,.4):
            trace = flags(p, 150, n)
            all_the_same(lambda: make(n), DynamicLossScale.preset(name, period=n+more), trace)
            ours,theirs = oracles[name][1][0][0](n,1),make(n)
            assert [next(ours), *map(ours.send, trace)]==[next(theirs), *map(theirs.send, trace)]

def test_words_of_jmp():
    "Policies as text, and dtypes of what is scaled, as in the library"
    jmp,jnp = pytest.importorskip('jmp'),pytest.importorskip('jax.numpy')
    from mp_callbacks import jmp as ours
    for o in ('full','half','f16','bf16','float32','p=f16,c=f32','c=half','o=f16',
              'params=float32,compute=float16,output=float32'):
        assert str(ours.get_policy(o))==str(jmp.get_policy(o))
    for o in ('f','h','','g','p=f','p=f16, c=f32','p = f16',' f16','f16 ','p=f16,','x=f16'):
        for lib in (ours,jmp):
            with pytest.raises(ValueError): lib.get_policy(o)
    for kind in ('StaticLossScale','DynamicLossScale'):
        a,b = getattr(ours, kind)(2.**10),getattr(jmp, kind)(2.**10)
        for k in ('float16','bfloat16','float32'):
            x,y = torch.ones(2, dtype=getattr(torch, k)),jnp.ones(2, k)
            for f in ('scale','unscale'):
                p,q = getattr(a, f)(x),getattr(b, f)(y)
                assert str(p.dtype)==f'torch.{q.dtype}' and p.tolist()==q.tolist()

# --- The value

def random_scale(rng):
    "Any settings, in any combination"
    lo,hi = sorted(rng.choice([f32.tiny, 2.**-3, 1., 3., 2.**10, 65504., 2.**24, f32.max]) for _ in range(2))
    return DynamicLossScale(
        rng.choice([lo, hi, (lo*hi)**.5]), rng.randint(0,3), rng.randint(1,5), rng.choice([1.5,2,4,2000]), lo, hi,
        rng.choice([None,.5,.9,1e-3]), rng.random()<.7, rng.randint(0,2), rng.randint(1,4),
        '+'.join(rng.sample(['growth','finite','backoff'], rng.randint(1,3))), rng.choice(['clip','clip','raise']),
        rng.choice(['clip','keep']),
        headroom=rng.choice([None,None,0,2,3.5]), found=rng.random()<.5)

def walk(s, trace):
    "The values of `s`, up to the floor where it may raise"
    yield s
    for i,finite in enumerate(trace):
        try: s = s.adjust(finite, [0,1e-30,1e-9,1.,3e4][(len(trace)-i)%5])
        except FloatingPointError: return
        yield s

values = [random_scale(random.Random(i)) for i in range(300)] + [DynamicLossScale.preset(o) for o in loss_scale_presets]

def test_every_step_is_a_valid_value():
    "`adjust` does not check what it returns: it has no need to"
    for i,s in enumerate(values):
        for o in walk(s, flags(.3, 60, i)):
            assert type(o)(**asdict(o))==o
            assert o.min_loss_scale<=o.loss_scale<=o.max_loss_scale
            assert {k.name for k in fields(o) if getattr(o,k.name)!=getattr(s,k.name)} <= set(o.state_fields)

def test_round_trips():
    for i,s in enumerate(values):
        for o in walk(s, flags(.3, 20, i)):
            assert pickle.loads(pickle.dumps(o))==copy.deepcopy(o)==eval(repr(o))==o
            assert hash(eval(repr(o)))==hash(o)
            state = o.state_dict()
            assert s.load_state_dict(state)==o
            assert all(type(v) in (int,float,bool) for v in state.values())

def test_resumed_at_any_step_it_goes_on_the_same():
    for i,s in enumerate(values[:100]):
        trace = flags(.3, 40, i)
        full = list(walk(s, trace))
        for k,o in enumerate(full): assert list(walk(s.load_state_dict(o.state_dict()), trace[k:]))==full[k:]

def test_a_state_from_other_settings_is_put_within_bounds():
    for i,s in enumerate(values):
        o = s.load_state_dict(DynamicLossScale.preset('megatron').state_dict())
        assert o.loss_scale==min(max(2.**32, s.min_loss_scale), s.max_loss_scale)
        assert replace(o, **s.state_dict())==s

def test_a_preset_is_what_a_learner_would_be_given():
    for o in loss_scale_presets: assert as_loss_scale(o)==DynamicLossScale.preset(o)
    assert as_loss_scale(512)==StaticLossScale(512)
