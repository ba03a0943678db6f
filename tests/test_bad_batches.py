"Batches that no loss scale can cure cost their steps and nothing else, and if there are many it is told"
from mp_callbacks.core.training_state import TrainingState
from mp_callbacks.core.loss_scale import loss_scale_presets
from learners import *

finite,infinite,bad_loss = [StepStats(0, 1., 1., *o) for o in ((True,), (False,), (False,None,None,False))]
outcomes = {'.':finite._replace(amax=1e-3), 'x':infinite, 'i':bad_loss} # finite, an overflow, a loss that is infinite

def after(state, steps): return [*itertools.accumulate(steps, lambda s,o: s.after(outcomes[o]), initial=state)]
def dynamic(**kwargs): return TrainingState(DynamicLossScale(2.**10, **kwargs))

@pytest.mark.parametrize('name', loss_scale_presets)
def test_presets(name):
    "Where losses are finite, each has the scales of its library"
    scale = state = None
    for o in random.Random(0).choices('x'+'.'*9, k=500):
        if scale is None: scale = DynamicLossScale.preset(name, period=5); state = TrainingState(scale)
        scale,state = scale.adjust(o=='.'),state.after(outcomes[o])
        assert state.scaling==scale

def batches(bad):
    "Batches of 16 rows, the numbers of those with one that is finite in float32, and too large for float16"
    x,y = numbers(256)
    at = random.Random(0).sample(range(16), bad)
    for i in at: x[16*i,0] = 1e6
    return [*zip(x.split(16), y.split(16))],at

def tiny_loss(model, x, y): return F.mse_loss(model(x), y)*1e-6

def small_adam(params, lr=1e-2): return torch.optim.Adam(params, lr, eps=1e-20)

def float32_loss(bad, epochs):
    "Loss of the other batches, after a training in float32 with them alone"
    data,at = batches(bad)
    good,model = [o for i,o in enumerate(data) if i not in at],mlp()
    opt = small_adam(model.parameters())
    for o in good*epochs: tiny_loss(model, *o).backward(); opt.step(); opt.zero_grad()
    return good,mean_loss(model, good)

@torch.no_grad()
def mean_loss(model, good): return tensor([F.mse_loss(model(x), y) for x,y in good]).mean().item()

def own_loop(data, epochs):
    "With a loss whose gradients are zero in float16 without a scale"
    steps = TrainingSteps(model := mlp(), small_adam(model.parameters()))
    return model,train_steps(steps, data*epochs, tiny_loss).loss_scale

def scaler_loop(data, epochs):
    model,scaler = mlp(),torch.amp.GradScaler('cpu')
    opt = small_adam(model.parameters())
    for x,y in data*epochs:
        with autocast(dtype=f16): pred = model(x)
        scaler.scale(F.mse_loss(pred.float(), y)*1e-6).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return model,scaler.get_scale()

def learner_loop(call, data, epochs):
    xs,ys = map(torch.cat, zip(*data))
    def _loss(pred, y): return F.mse_loss(pred, y)*1e-6
    learn = get_learner(dls=as_dls(xs, ys), loss_func=_loss, opt_func=partial(OptimWrapper, opt=small_adam))
    fitted(getattr(learn, call)(**(dict() if call=='to_fp16' else {})), epochs, lr=1e-2, wd=None)
    return learn.model,learn.mixed_precision.loss_scale

@pytest.mark.filterwarnings('ignore:.*were skipped because')
@pytest.mark.parametrize('bad', [1,4,7])
def test_as_without_the_bad_batches(bad, epochs=8):
    "6, 25 and 44 % of the batches: training ends where float32 does without them, and GradScaler's stops"
    data,_ = batches(bad)
    good,expected = float32_loss(bad, epochs)
    loops = {own_loop:.03, partial(learner_loop, 'to_fp16'):.03, partial(learner_loop, 'to_native_fp16'):.001}
    for train,off in loops.items():
        model,scale = train(data, epochs)
        assert mean_loss(model, good)==pytest.approx(expected, rel=off) and scale>=2.**15
    model,scale = scaler_loop(data, epochs)
    if bad>1: assert mean_loss(model, good)>1.5*expected and scale<1

def test_finite_loss_of_infinite_numbers():
    "A limit: tanh of inf is 1, so the loss doesn't show that the forward pass has overflowed, and the scale comes down"
    model = nn.Sequential(nn.Linear(8,1), nn.Tanh())
    steps = TrainingSteps(model, small_adam(model.parameters()), loss_scale=DynamicLossScale(2.**10))
    x,y = torch.eye(16, 8),torch.zeros(16,1)
    for large in (1e6,1e6,1e6,1.):
        with steps.batch(x, y): steps.backward(F.mse_loss(model(x*large), y))
        assert steps.make().finite==(large==1) and steps.last.loss_finite
    assert steps.loss_scale==2.**7

# --- Told by rate

def rows(n=1600, every=10, start=16):
    "Batches of 16 rows, of which each `every`th has a row too large for float16"
    x,y = numbers(n)
    x[start+5::16*every,0] = 1e6
    return x,y

def rates(f, *args, **kwargs): return [o for o in heard(f, *args, **kwargs)[0] if 'in a row' not in o]

@pytest.mark.parametrize('call', ['to_fp16','to_native_fp16'])
def test_told_once(call):
    "10 of 100 steps of an epoch are skipped: a warning in the first of two epochs, the summary, and the check-up"
    learn = getattr(get_learner(dls=as_dls(*rows())), call)()
    told, = rates(learn.fit, 2)
    assert told.startswith('8 of the steps of this epoch were skipped because gradients were not finite. The inputs')
    step,said = learn.mixed_precision.steps.recent.warned_at,learn.precision_recorder.summary()
    assert step<80 and f'That many steps were skipped was told in step {step}.' in said
    assert 'The loss of 20 of them was inf or nan before' in said
    # the scale is put back 20 times, and that of `to_fp16` is found
    assert f"growths: {int(call=='to_fp16')})" in said and ('mostly' in said)==(skipped(learn)>20)
    learn.precision_recorder.first_row = 150
    assert 'was told' not in learn.precision_recorder.summary(last_fit=True)

def test_told_in_the_checkup():
    "Where the batches are finite now"
    learn = get_learner(dls=as_dls(*numbers(1600))).to_fp16()
    with warnings.catch_warnings(record=True): learn.fit(1, cbs=overflow(*range(1, 100, 10)))
    said = ' '.join(str(learn.precision_checkup()).split())
    assert 'Many steps of the last fit were skipped, and the batches are finite now' in said

@pytest.mark.parametrize('n,every,messages', [(1600,12,1), (1600,15,1), (3200,24,0), (3200,20,1), (1600,2,1)])
def test_rate(n, every, messages):
    "At least 8, and a twentieth of the epoch's steps; at the end of the fit 2, and more than a twentieth of its steps"
    assert len(rates(get_learner(dls=as_dls(*rows(n, every))).to_fp16().fit, 1))==messages

def test_accumulated_steps():
    "An epoch has fewer steps than batches: 8 of 100"
    learn = get_learner(dls=as_dls(*rows(3200, 24)), cbs=GradientAccumulation(32)).to_fp16()
    assert len(rates(learn.fit, 1))==1 and skipped(learn)<10

def test_in_a_loop_of_ones_own():
    "In 1,000 steps, which begin again"
    steps,data = make_steps(),[*zip(*[o.split(16) for o in rows(1600)])]
    told, = rates(train_steps, steps, data*6)
    assert told.startswith('50 of the last 1,000 steps were skipped because gradients were not finite. The loss was')
    steps,data = make_steps(),[*zip(*[o.split(16) for o in rows(1600, every=20)])]
    few = data[:2]+[o for i,o in enumerate(data) if i%20!=1]+data[:1]*8
    assert rates(train_steps, steps, (data*9+few)*2)==[] and steps.recent.count<50

def make_steps(**kwargs): return TrainingSteps(model := mlp(), small_adam(model.parameters()), **kwargs)

@pytest.mark.parametrize('loss_scale', [None,DynamicLossScale(2.**24)])
def test_no_search(loss_scale):
    "The search for the first scale is not told"
    x,y = numbers(16)
    steps = make_steps(loss_scale=loss_scale)
    assert rates(train_steps, steps, [(x,y*100)]*50)==[] and steps.recent.count<8 and steps.state.steps==50

def test_smallest_scale():
    "A step that is skipped with a finite loss at a scale of 1, once one has been made, and none with an infinite loss"
    def _steps(): return make_steps(loss_scale=DynamicLossScale(4.))
    x,y = numbers(16)
    def _train(steps, outcomes):
        for o in outcomes:
            with steps.batch(x, y):
                steps.backward(F.mse_loss(steps.model(x*(1e6 if o=='i' else 1)), y))
                if o=='x': steps.model[0].weight.grad.fill_(math.inf)
            steps.make()
    steps = _steps()
    assert rates(_train, steps, '.xx')==[] and steps.loss_scale==1
    told, = rates(_train, steps, 'xx.x')
    assert 'Step 3 was skipped, though the loss scale is 1, its smallest, because gradients were not finite.' in told
    steps = _steps()
    assert rates(_train, steps, '.iiiii.')==[] and rates(_train, steps, 'xx.x')!=[]

def test_measured_before_it_is_told():
    "Autocast could have trained what was skipped: it does so from then on, and nothing is told of the steps"
    learn = beyond_float16(as_dls(*numbers(1600))).to_fp16(dynamic=False, loss_scale=4)
    texts,e = heard(fitted, learn, 1, larger(range(1, 100, 10)))
    assert learn.mixed_precision.state.measured.names==('',) and skipped(learn)==8
    assert not any('of this epoch' in o for o in texts) and learn.mixed_precision.steps.recent.warned_at is None

def test_not_in_a_look():
    "`lr_find` goes on until training diverges, and tells nothing of many skips"
    learn = get_learner(cbs=overflow(*range(3, 16))).to_fp16(max_loss_scale=2., headroom=None)
    assert rates(learn.lr_find, show_plot=False, num_it=16)==[] and learn.mixed_precision.steps.recent.warned_at is None
    assert skipped(learn)==0 and rates(learn.fit, 2)!=[] # it is at its smallest there

# --- Told at the end of a fit

ends = 'of this fit w'
def at_end(learn, epochs=1, cbs=()): return heard(learn.fit, epochs, cbs=cbs)[0]
def of_batches(n, call='to_bf16', **kwargs):
    return getattr(get_learner(dls=as_dls(*numbers(n), bs=1)), call)(**kwargs)

@pytest.mark.parametrize('call', calls)
@pytest.mark.parametrize('epochs', [1,3])
def test_no_step_was_made(call, epochs):
    "Said once at the end of each such fit, also if callbacks end it, with what was not finite, and of the weights"
    learn,n = of_batches(4, call),4*epochs
    told, = at_end(learn, epochs, InfiniteAt(*range(n)))
    assert told.startswith(f'All {n} steps of this fit were skipped because gradients were not finite. In the last of '
                           'them, the loss was inf or nan before it was scaled. For the cause: learn.find_nonfinite().')
    assert told.endswith('the weights have not changed since step 0.')
    told, = at_end(learn, 1, [overflow(0,1),On('after_batch', raises(CancelFitException), at=(1,))])
    assert told.startswith('All 2 steps of this fit') and 'the gradient of 0.weight was the first' in told
    assert told.endswith(f'the weights have not changed since step {n}.')
    told, = at_end(learn, 1, [overflow(0),On('after_batch', raises(CancelFitException), at=(0,))])
    assert told.startswith('The only step of this fit was skipped')

@pytest.mark.parametrize('call', ['to_bf16','to_native_fp16'])
@pytest.mark.parametrize('bad,of,said', [(5,15,1), (2,39,1), (2,40,0), (1,6,0)])
def test_some_steps_were_skipped(call, bad, of, said):
    "Infinite losses have nothing to do with a search for the first scale; once in the life of a learner"
    learn = of_batches(of, call, **(dict(init_scale=16.) if call=='to_native_fp16' else {}))
    texts = at_end(learn, 1, InfiniteAt(*range(bad)))
    assert len(texts)==said and skipped(learn)==bad
    if said: assert texts[0].startswith(f'{bad} of the {of} steps of this fit were skipped because')
    if said: assert 'was told in step' in learn.precision_recorder.summary()
    assert at_end(learn, 1, InfiniteAt(*range(bad)))==[]

def searched(learn, n): return heard(learn.lr_find, show_plot=False, num_it=n, suggest_funcs=())[0]

def test_search_of_a_fit():
    "What is skipped in the search for the first scale doesn't count, in a fit after `lr_find`, either"
    learn = of_batches(30, 'to_native_fp16', init_scale=2.**24)
    assert searched(learn, 20)==[] and at_end(learn)==[] and 2<=skipped(learn)<30
    assert at_end(learn, 1, overflow(3,5))!=[]

@pytest.mark.parametrize('end', [KeyboardInterrupt,ValueError])
def test_nothing_after_an_error(end):
    "What the user has stopped isn't explained"
    learn = of_batches(4)
    with warnings.catch_warnings(record=True) as told, pytest.raises(end):
        warnings.simplefilter('always')
        learn.fit(1, cbs=[overflow(*range(4)),On('after_batch', raises(end('as asked')), at=(2,))])
    assert not any(ends in str(o.message) for o in told) and at_end(learn)==[]

def test_nothing_more_is_said():
    "After a warning of skipped steps in this fit, a change of precision, in a validation, and of a look"
    learn = of_batches(6, warn_skips=3)
    told, = at_end(learn, 1, overflow(*range(6)))
    assert told.startswith('3 steps in a row')
    told, = at_end(learn, 1, overflow(*range(6))) # steps in a row are counted on, and the fit isn't the same
    assert told.startswith('All 6 steps of this fit')
    assert at_end(learn, 1, [overflow(*range(6)),Now('after_train', lambda learn: learn.to_fp16())])==[]
    with warnings.catch_warnings(record=True) as told: learn.validate(); learn.find_nonfinite()
    assert not any(ends in str(o.message) for o in told)

def test_diverging_search():
    "`lr_find` warns of data that it can't train with, and of nothing where it has trained before"
    learn = of_batches(4, warn_skips=2, max_skips=3)
    assert searched(learn, 8)==[]
    diverges = of_batches(4, warn_skips=2, max_skips=3)
    diverges.add_cb(overflow(*range(1, 8)))
    assert searched(diverges, 8)==[] and skipped(diverges)==0
    diverges = of_batches(4, warn_skips=2)
    diverges.add_cb(overflow(*range(8)))
    told, = searched(diverges, 8)
    assert told.startswith('2 steps in a row')
