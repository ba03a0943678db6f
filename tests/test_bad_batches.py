"Batches that no loss scale can cure: they cost their steps and nothing else, and who looks for them is told which items"
from mp_callbacks.core.grads import StepStats
from mp_callbacks.core.training_steps import ScaleState,TrainingSteps
from mp_callbacks.core.loss_scale import loss_scale_presets
from learners import *

finite,overflow,bad_loss = [StepStats(0, 1., 1., *o) for o in ((True,), (False,), (False,None,None,False))]
outcomes = {'.':finite._replace(amax=1e-3), 'x':overflow, 'i':bad_loss} # finite, an overflow, a loss that is infinite

def after(state, steps): return [*itertools.accumulate(steps, lambda s,o: s.after(outcomes[o]), initial=state)]
def scales(state, steps): return [math.log2(o.scaling.loss_scale) for o in after(state, steps)]
def dynamic(**kwargs): return ScaleState(DynamicLossScale(2.**10, **kwargs))

@pytest.mark.parametrize('steps,expected', [
    ('ii.',     [10,9,8,10]),      # put back at the first finite step
    ('x.',      [10,9,9]),         # an overflow counts
    ('xii.',    [10,9,8,7,9]),     # also before the row
    ('iix.',    [10,9,8,7,7]),     # or in it: at 2**8 a loss that is finite has overflowed
    ('ix.i.',   [10,9,8,8,7,8]),
    ('iiiii',   [10,9,8,7,6,5]),   # all are infinite
    ('i'*12+'.', [*range(10,-1,-1),0,0,10])])
def test_put_back(steps, expected):
    "The scale from before a row of steps whose losses were infinite"
    assert scales(dynamic(), steps)==expected

def test_counters_and_measured_scales():
    "What counts finite steps begins again; a scale that the finite step has measured stays; static ones are as ever"
    assert after(dynamic(period=5), '...ii.')[-1].scaling==DynamicLossScale(2.**10, period=5)
    one,other = [after(dynamic(headroom=6.), o)[-1].scaling for o in ('.','i.')]
    assert one.found and one==other
    assert after(ScaleState(StaticLossScale(8.)), 'ii.')[-1]==ScaleState(StaticLossScale(8.), 3)

@pytest.mark.parametrize('cut', range(7))
def test_in_checkpoints(cut):
    "A run that goes on from numbers has the same scales"
    whole = after(dynamic(), '.xii.i.')
    saved = dynamic(period=2000).loaded(whole[cut].numbers())
    assert after(saved, '.xii.i.'[cut:])==whole[cut:]

@pytest.mark.parametrize('name', loss_scale_presets)
def test_presets(name):
    "Where losses are finite, each has the scales of its library"
    scale = state = None
    for o in random.Random(0).choices('x'+'.'*9, k=500):
        if scale is None: scale = DynamicLossScale.preset(name, period=5); state = ScaleState(scale)
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
    steps = TrainingSteps(model := mlp(), small_adam(model.parameters()), measure=False)
    for o in data*epochs:
        with steps.batch(*o): steps.backward(tiny_loss(model, *o))
        steps.make()
    return model,steps.loss_scale

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
    fitted(getattr(learn, call)(**(dict(measure=False) if call=='to_fp16' else {})), epochs, lr=1e-2, wd=None)
    return learn.model,learn.mixed_precision.loss_scale

@pytest.mark.parametrize('bad', [1,4,7])
def test_as_without_the_bad_batches(bad, epochs=8):
    "6, 25 and 44 % of the batches: training ends where float32 does without them, and GradScaler's stops"
    data,_ = batches(bad)
    good,expected = float32_loss(bad, epochs)
    for train,off in ((own_loop,.03), (partial(learner_loop, 'to_fp16'),.03), (partial(learner_loop, 'to_native_fp16'),.001)):
        model,scale = train(data, epochs)
        assert mean_loss(model, good)==pytest.approx(expected, rel=off) and scale>=2.**15
    model,scale = scaler_loop(data, epochs)
    if bad>1: assert mean_loss(model, good)>1.5*expected and scale<1

def test_finite_loss_of_infinite_numbers():
    "A limit: tanh of inf is 1, so the loss doesn't show that the forward pass has overflowed, and the scale comes down"
    model = nn.Sequential(nn.Linear(8,1), nn.Tanh())
    steps = TrainingSteps(model, small_adam(model.parameters()), loss_scale=DynamicLossScale(2.**10), measure=False)
    x,y = torch.eye(16, 8),torch.zeros(16,1)
    for large in (1e6,1e6,1e6,1.):
        with steps.batch(x, y): steps.backward(F.mse_loss(model(x*large), y))
        assert steps.make().finite==(large==1) and steps.last.loss_finite
    assert steps.loss_scale==2.**7
