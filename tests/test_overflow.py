"""Gradients that are not finite: never a step, never silence, and never a scale out of its bounds

Overflow for ever, and overflow now and then; in each precision."""
from learners import *

inf,nan = float('inf'),float('nan')
def fp16_flat(learn, **kwargs): return modes['fp16'](learn, flat_master=True, clip=1., **kwargs)
precisions = dict(modes, fp16_flat=fp16_flat)
some_modes = pytest.mark.parametrize('mode', ['fp16_flat','native_bf16'])
dynamic = 'fp16','fp16_flat','native_fp16'
no_measure = {o: dict(headroom=None) for o in ('fp16','fp16_flat')} # a start that measures no gradients

batch = [o[:8] for o in numbers()]

def make(mode, n=1, **kwargs):
    "A learner whose epoch is `n` batches, all the same; module 2 is too large for any dtype while it is `on`"
    model = mlp(True)
    model.insert(2, Does(lambda m, x: x*1e30*1e30 if m.on else x, on=False))
    def _quiet(cb): model[2].on = False
    learn = get_learner(model, dls=DataLoaders([batch]*n, [batch]), cbs=Callback(before_batch=_quiet))
    return precisions[mode](learn, **kwargs)

def fill(x, at=None):
    "Put `x` into all gradients, before they are checked"
    def _fill(learn):
        for p in learn.model.parameters(): p.grad.fill_(x)
    return On('before_step', _fill, 5, at)

def poison(x):
    def _poison(learn): learn.xb = (learn.xb[0].clone().index_fill_(0, torch.tensor([0]), x),)
    return On('before_batch', _poison, -20)

def loud(): return On('before_batch', lambda learn: setattr(learn.model[2], 'on', True), 1)

def wrong_loss(x):
    def _wrong(learn): learn.loss,learn.loss_grad = learn.loss*x,learn.loss_grad*x
    return On('after_loss', _wrong, -20)

not_ours  = 'Precision is not the cause: in float32 it is the same.'
no_inputs = 'The inputs of this batch have inf or nan, 8 in all.'
large     = 'The inputs have values up to 1e+38, float16 ends at 65504: normalize them.'
no_preds  = '2 (Does) was the first module that returned inf or nan, from inputs up to '
no_loss   = f"The model's predictions are finite, but the loss is not. {not_ours}"
no_grads  = 'The gradient of 6.bias was the first that was not finite. Computed again, this batch is finite. '
causes = dict( # and what is said of them
    forward  = (loud, no_preds),
    nan_data = (lambda: poison(nan), no_inputs),
    inf_data = (lambda: poison(inf), no_inputs),
    big_data = (lambda: poison(1e38), large),
    inf_loss = (lambda: wrong_loss(inf), no_loss),
    inf_grad = (lambda: fill(inf), no_grads),
    # finite, but its squares are not; a bias of one number has no square
    big_norm = (lambda: fill(1e25), no_grads.replace('bias','weight')))
turns = in_turns(causes, precisions)
turns['big_data'] = 'fp16' # others have the range for it
each_cause = pytest.mark.parametrize('cause,mode', turns.items())

@each_cause
def test_for_ever(mode, cause):
    "A warning, an error, and no number in model or optimizer has changed; the learner goes on when the cause is gone"
    learn = fitted(make(mode, 5, max_skips=40))
    steps = len(learn.precision_recorder.log)
    before = model_and_opt(learn)
    learn.dls = DataLoaders([batch]*60, [batch])
    told,e = heard(learn.fit, 1, cbs=causes[cause][0]())
    says = f'since step {steps}, because gradients were not finite. {causes[cause][1]}'
    many,row = told # as there was a step before
    assert many.startswith('8 of the steps of this epoch were skipped because gradients were not finite.')
    assert row.startswith(f'32 steps in a row were skipped, {says}')
    assert f'\t40 steps in a row were skipped, {says}' in str(e)
    assert f' The loss scale is {512 if mode=="fp16_static" else 1}, and the weights have not changed' in str(e)
    assert (not_ours in str(e))==(cause in ('forward','inf_loss'))
    assert not learn.step_stats.finite and not math.isfinite(learn.step_stats.norm)
    assert same(model_and_opt(learn), before)
    assert_clean(learn.model)
    assert identical(learn.model.parameters(), opt_params(learn))
    assert learn.mixed_precision.scaling==learn.mixed_precision.initial # it starts anew
    learn.dls = DataLoaders([batch]*3, [batch])
    assert heard(learn.fit, 1)==([],None)
    assert not same(model_and_opt(learn), before)
    assert math.isfinite(learn.validate()[0])

def test_by_default():
    "A warning within 50 skipped steps, an error within 500, and neither before 25"
    learn,seen = make('fp16', 600),[]
    count = On('after_step', lambda learn: seen.append(len(told)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        with pytest.raises(FloatingPointError, match='steps in a row') as e: learn.fit(1, cbs=[fill(inf), count])
    assert 25<=seen.index(1)+1<=50 and seen[-1]==1
    assert 25<len(seen)+1<=500 and f'{len(seen)+1} steps in a row were skipped, since step 0, ' in str(e.value)
    for o in ('data','learning rate'): assert o in str(e.value) # what one can do there

@some_modes
def test_over_many_fits(mode):
    "Steps are counted over fits, validation and predictions: many short fits that never step don't pass unheard"
    learn = make(mode, 1, max_skips=34).add_cb(fill(inf))
    for i in range(1,35):
        told,e = heard(learn.fit, 1)
        if i%10==0: learn.validate(); learn.get_preds(dl=[batch])
        assert len(told)==(i<34) and (e is not None)==(i==34), i
        if told: assert told[0].startswith('32 steps' if i==32 else 'The only step of this fit was skipped')
    assert '34 steps in a row were skipped, since step 0, ' in str(e)
    told,e = heard(learn.fit, 31) # and from the beginning again
    assert told[0].startswith('All 31 steps of this fit') and e is None
    told,e = heard(learn.fit, 3)
    assert len(told)==1 and 'since step 34, ' in str(e)
    heard(learn.fit, 12)
    learn.mixed_precision.max_skips = 9 # fewer than were skipped: exceeded at once
    assert heard(learn.fit, 1)[1]

@some_modes
def test_a_good_step_between(mode):
    "Steps that are skipped are counted in a row anew; that they are many is told once"
    learn = make(mode, 90, max_skips=30)
    (told,),e = heard(learn.fit, 1, cbs=fill(inf, {i for i in range(90) if i%30!=29}))
    assert told.startswith('8 of the steps of this epoch were skipped') and e is None
    assert learn.mixed_precision.state.skips==0

def test_warnings_as_errors():
    "With warnings turned into errors the learner is as healthy afterwards"
    learn = make('fp16', 40)
    learn.create_opt()
    before = model_and_opt(learn)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        with pytest.raises(UserWarning, match='32 steps in a row'): learn.fit(1, cbs=fill(inf))
    assert same(model_and_opt(learn), before)
    assert_clean(learn.model)
    assert heard(learn.fit, 1)==([],None) and not same(model_and_opt(learn), before)

@each_cause
def test_one_step(mode, cause):
    "A step that overflows, between others, is as if it had not been"
    def run(where):
        learn,states = make(mode, 6, **no_measure.get(mode, {})),[]
        cb = causes[cause][0]()
        cb.at = where
        look = On('after_batch', lambda learn: states.append(model_and_opt(learn)), 90)
        return states,fitted(learn, 1, cb, look)
    want,_ = run(())
    got,learn = run((2,3))
    for i,j in ((0,0),(1,1),(2,1),(3,1),(4,2),(5,3)):
        if mode not in dynamic or cause in ('inf_grad','big_norm') or i<4: assert same(got[i], want[j]), (i,j)
    assert all(map(math.isfinite, learn.recorder.losses))

def scale(init, lo=1., hi=2.**24, period=3, **kwargs):
    return DynamicLossScale(init, min_loss_scale=lo, max_loss_scale=hi, period=period, **kwargs)
scales = [scale(2.**10), scale(2.**6, 2.**5, 2.**7), scale(2.**120, 2.**-126, 2.**127, 1),
          scale(3., .7, 5., factor=10., backoff=.1)]

@pytest.mark.parametrize('i', range(len(scales)))
@pytest.mark.parametrize('mode', ['fp16_flat','native_fp16'])
def test_random_sequences(mode, i):
    "At each step the scale is what it should be, by the rule that test_scalers and test_properties know"
    s,rng,seen = scales[i],random.Random(i),[]
    finite = [rng.random()>(.1,.4,.7)[i%3] for _ in range(40)]
    kwargs = dict(min_loss_scale=s.min_loss_scale, max_loss_scale=s.max_loss_scale)
    if mode=='native_fp16': kwargs.update(init_scale=s.loss_scale, growth_factor=s.factor, growth_interval=s.period,
                                          backoff_factor=s.backoff or .5)
    else: # starts at the cap, and divides by what it multiplies with
        s = replace(s, loss_scale=s.max_loss_scale, backoff=None)
        kwargs.update(div_factor=s.factor, scale_wait=s.period, headroom=None)
    look = On('before_batch', lambda learn: seen.append(learn.mixed_precision.loss_scale))
    fills = [fill(x, {i for i,ok in enumerate(finite) if ok==o}) for x,o in ((0.,True), (inf,False))]
    learn = fitted(make(mode, 40, **kwargs), 1, *fills, look)
    seen.append(learn.mixed_precision.loss_scale)
    assert seen==[o.loss_scale for o in itertools.accumulate(finite, DynamicLossScale.adjust, initial=s)]
    assert all((1/torch.tensor(x)).isfinite() for x in seen)
    assert all(p.isfinite().all() for p in learn.model.parameters())
    # the scale of a step is the one that its own gradients carried
    assert list(learn.precision_recorder.log.scale)==seen[:-1] and list(learn.precision_recorder.log.finite)==finite
