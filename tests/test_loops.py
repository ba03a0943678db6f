"""Loops of one's own: several optimizers, Accelerate, float32; and what would train with wrong steps is said

Learners too: weights that become half in a fit, gradients of another loss, steps that nobody has checked."""
from torch.optim.optimizer import _default_to_fused_or_foreach as at_once
from learners import *

data = [*zip(*[o.split(16) for o in numbers()])]
def adam(model): return torch.optim.Adam(model.parameters(), 1e-2)

def new(half=bf16, opt=adam, model=None, **kwargs):
    model = mlp() if model is None else model
    return TrainingSteps(model, opt(model), half, **{'measure':False, **kwargs})

def batch(steps, x=data[0][0], y=data[0][1]):
    with steps.batch(x, y): steps.backward(mse_of(steps.model, x, y))

def train(steps, batches=data): return train_steps(steps, batches)

def told(f, *args):
    "The warnings of `f`"
    with warnings.catch_warnings(record=True) as res:
        warnings.simplefilter('always')
        f(*args)
    return [str(o.message) for o in res if 'emulates' not in str(o.message)]

# several optimizers

def two(model):
    "One for matrices, and one for vectors"
    matrices,vectors = ([p for p in model.parameters() if (p.dim()>1)==o] for o in (True,False))
    return [torch.optim.SGD(matrices, .05, momentum=.9),torch.optim.AdamW(vectors, 1e-2)]

def by_hand(model, opts, batches, clip, half=None):
    "A loop in float32, or in half precision with PyTorch's `GradScaler`; the number of steps that were made"
    scaler,made = torch.amp.GradScaler('cpu', 2.**10, enabled=half==f16),0
    for x,y in batches:
        with nullcontext() if half is None else autocast(dtype=half): loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        for o in opts: scaler.unscale_(o)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        made += norm.isfinite().item()
        for o in opts: scaler.step(o) if half==f16 else o.step()
        scaler.update()
        for o in opts: o.zero_grad()
    return made

@pytest.mark.parametrize('half', [f32,bf16,f16])
def test_several_optimizers(half):
    "One check, one clip over all gradients, one skip: as float32, and as a `GradScaler` that unscales both"
    bad = (data[0][0]*math.inf,data[0][1])
    batches = [*data,bad,*data] if half==f16 else data*2
    steps = train(new(half, two, clip=.5, loss_scale=2.**10 if half==f16 else None), batches)
    full,other = mlp(),mlp()
    by_hand(full, two(full), data*2, .5)
    made = by_hand(other, two(other), batches, .5, None if half==f32 else half)
    way = flat(full.parameters())-flat(mlp().parameters())
    for o in (full,other): assert (flat(steps.model.parameters())-flat(o.parameters())).norm()<.02*way.norm()
    assert made==8 and steps.state.steps==len(batches) and steps.opt[1].state_dict()['state'][0]['step']==8

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_several_in_a_learner(mode, tmp_path):
    "The object of the page trains as in float32, skips without a trace, saves and loads"
    code, = [o for o in cells_of('howto/works_with.ipynb', 'code') if 'class Together' in o]
    exec(code.partition('\nmodel = ')[0], names := dict(globals()))
    learn,full = (fitted(in_mode(o, opt_func=names['two'], path=tmp_path), 2) for o in (mode,None))
    assert apart(learn, full, flat(get_learner().model.parameters()))<.02
    def state(o): return leaves([o.opt.state_dict(),o.model.state_dict()])
    learn.save('both')
    before = deepcopy(state(learn.load('both'))) # with a checksum of the weights
    with stays(weights, learn): fitted(learn, 1, InfiniteAt(0,1,2,3))
    assert skipped(learn)==4
    fitted(learn)
    assert not same(state(learn), before) and same(state(learn.load('both')), before)

# gradients from outside a step

def gan(half=None):
    "Losses of the critic, in 20 steps, by a plain loop or by ours, in which its gradients are those of its own loss"
    torch.manual_seed(0)
    parts = make,critic = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,8)),mlp()
    opts,noise,losses = [torch.optim.SGD(o.parameters(), .05) for o in parts],torch.randn(20,64,8),[]
    real = numbers()[0]
    def of_critic(z): return (F.softplus(-critic(real))+F.softplus(critic(make(z).detach()))).mean()
    def of_maker(z): return F.softplus(-critic(make(z))).mean()
    both = half and [TrainingSteps(m, o, half) for m,o in zip(parts, opts)]
    for z in noise:
        for i,loss_of in ((1,of_critic),(0,of_maker)):
            if half:
                with both[i].batch(), both[1-i].half: both[i].backward(loss := loss_of(z))
                both[i].make()
            else:
                opts[i].zero_grad()
                (loss := loss_of(z)).backward()
                opts[i].step()
            losses.append(loss.item())
    return torch.tensor(losses)

@pytest.mark.parametrize('half', [f32,bf16,f16])
def test_gan(half):
    "A generator's backward pass leaves gradients in the critic, which its next step is made without"
    plain,ours = gan(),gan(half)
    assert torch.equal(plain, ours) if half==f32 else (plain-ours).abs().max()<.005

# Accelerate

@pytest.mark.slow
@pytest.mark.parametrize('half', [f32,bf16,f16])
def test_accelerate(half):
    "With the line: as many steps as Accelerate makes, and its loss"
    accelerate = pytest.importorskip('accelerate')
    def run(half, line=True):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision='no', gradient_accumulation_steps=4)
        model,x,y = mlp(),*numbers(512)
        dl = torch.utils.data.DataLoader([*zip(x, y)], 16)
        model,opt,dl = accelerator.prepare(model, torch.optim.SGD(model.parameters(), .05), dl)
        steps,made = TrainingSteps(model, opt, half) if half else None,0
        for xb,yb in dl:
            with accelerator.accumulate(model), steps.batch() if half else nullcontext():
                loss = F.mse_loss(model(xb), yb)
                with steps.scaled(loss) if half else nullcontext(loss) as scaled: accelerator.backward(scaled)
            made += accelerator.sync_gradients
            if half is None: opt.step(),opt.zero_grad()
            elif accelerator.sync_gradients or not line: steps.make()
        return made if half is None else steps.state.steps,mse_of(model, x, y).item()
    try:
        (made,loss),(wanted,full) = run(half),run(None)
        assert made==wanted==8 and abs(loss-full)<.001*full
        with pytest.raises(RuntimeError, match='if accelerator.sync_gradients'): run(half, line=False)
    finally: accelerate.state.AcceleratorState._reset_state(True) # of the process, for other tests; no public name

# float32

@pytest.mark.parametrize('half', [f32,'float32','fp32',None])
def test_float32(half):
    "The bits of a plain loop; it checks, skips and explains"
    steps,plain = new(half, compute_loss=mse_of, measure=True, model=mlp(True)),mlp(True)
    opt = adam(plain)
    for o in data*2:
        mse_of(plain, *o).backward()
        opt.step()
        opt.zero_grad()
    bad = (data[0][0]*math.inf,data[0][1])
    train(steps, [*data,bad,*data])
    assert same(leaves(dict(plain.state_dict())), leaves(dict(steps.model.state_dict())))
    assert (steps.state.steps,steps.loss_scale)==(9,1) and steps.explain(*bad).where=='inputs'
    table = steps.policy()
    assert {*table.way}=={*table.compute}=={*table.why}=={'float32'}
    assert by_pickle(steps.half).dtype==f32

@pytest.mark.parametrize('foreach', [True,False])
def test_step_inside_the_with(foreach, monkeypatch):
    "PyTorch chooses the same kernels as outside, and computes the same numbers"
    model = Does(lambda m, x: m.layer(x)*m.gain, layer=nn.Linear(8,16), gain=torch.ones(16))
    other = deepcopy(model)
    monkeypatch.setattr(sys.modules[at_once.__module__], '_get_foreach_kernels_supported_devices', lambda: ['cpu'])
    for m,inside in ((model,True),(other,False)):
        opt,on = torch.optim.AdamW(m.parameters(), foreach=foreach),half(m)
        for x,_ in data:
            with on:
                m(x).sum().backward()
                if inside:
                    opt.step()
                    assert type(m.gain) is not nn.Parameter and at_once([*m.parameters()], False)==(False,True)
            if not inside: opt.step()
    assert same(leaves(dict(model.state_dict())), leaves(dict(other.state_dict())))

# what would train with wrong steps

def of(which):
    "A step with gradients of another loss than that of `scaled`"
    def _step(steps):
        model,params = steps.model,[*steps.model.parameters()]
        with steps.batch():
            loss = mse_of(model, *data[0])
            with steps.scaled(loss):
                if which=='backward': loss.backward()
                else:
                    grads = torch.autograd.grad(mse_of(model, *data[0]) if which=='again' else loss, params)
                    for p,g in zip(params, grads): p.grad = g
        steps.make()
    return _step

def two_at_once(steps):
    with steps.batch():
        loss = mse_of(steps.model, *data[0])
        with steps.scaled(loss) as a, steps.scaled(loss**2) as b: (a+b).backward()

def becomes_half(part):
    def _step(steps):
        train(steps)
        part(steps.model).half()
        batch(steps)
    return _step

@pytest.mark.parametrize('half', [bf16,f16])
@pytest.mark.parametrize('f,match', [
    *[(of(o), 'scaled.backward.. or torch.autograd.grad') for o in ('backward','loss','again')],
    (two_at_once, 'one after the other, or of their sum'),
    (becomes_half(lambda m: m), 'no float32 parameters .torch.float16.')])
def test_wrong_steps(f, match, half):
    "Are refused, at once or before the next batch; nothing is left of the batch, and after a mend training goes on"
    steps = new(half)
    if half==bf16 and 'autograd' in match: return f(steps) # without a scale they are what they should be
    with pytest.raises((RuntimeError,ValueError), match=match): f(steps)
    assert all(p.grad is None for p in steps.model.parameters())
    assert_clean(train(new(half, model=steps.model.float())).model)
    assert_clean(train(steps).model)

def test_gradients_of_the_scaled_loss():
    "`torch.autograd.grad` of it is right, in `.grad`, and in a later batch without a backward pass they stay"
    steps,other = new(f16),new(f16)
    with steps.batch():
        with steps.scaled(mse_of(steps.model, *data[0])) as scaled:
            grads = torch.autograd.grad(scaled, [*steps.model.parameters()])
            for p,g in zip(steps.model.parameters(), grads): p.grad = g
    with steps.batch(), steps.scaled(mse_of(steps.model, *data[1])): pass
    batch(other)
    assert steps.make().norm==other.make().norm

def test_learner_without_gradients():
    "The loss scale learns nothing of them, either"
    learn = get_learner().to_fp16()
    scale = learn.mixed_precision.loss_scale
    fitted(learn, 1, On('after_backward', lambda o: o.model.zero_grad()))
    assert learn.mixed_precision.loss_scale==scale and learn.mixed_precision.state.steps==4

def test_warning_that_never_comes():
    text, = told(lambda: get_learner().to_bf16(max_skips=5, warn_skips=9))
    assert text.startswith('warn_skips=9 has no effect')

@pytest.mark.parametrize('make,error,match', [
    (lambda m: TrainingSteps(m, adam(m), loss_scale=DynamicLossScale), TypeError, r'Use DynamicLossScale\(\)'),
    (lambda m: get_learner().to_fp16(DynamicLossScale), TypeError, r'Use DynamicLossScale\(\)'),
    (lambda m: get_learner().to_native_fp16(StaticLossScale), TypeError, '^init_scale=StaticLossScale is a class'),
    (lambda m: get_learner().to_bf16(foo=1), TypeError, r"to_bf16\(\).*'foo'. It has flat_master, clip")])
def test_wrong_arguments(make, error, match):
    with pytest.raises(error, match=match): make(mlp())

def test_repr_of_stats():
    "Has name and shape of the parameter whose gradient isn't finite, not its numbers"
    steps = new(model=mlp(n=64))
    assert 'culprit=None' in repr(train(steps).last)
    with steps.batch():
        steps.backward(mse_of(steps.model, *data[0]))
        steps.model[2].weight.grad.fill_(math.inf)
    text = repr(steps.make())
    assert 'culprit=2.weight of shape (64, 64)' in text and len(text)<250
    assert 'culprit=a parameter of shape (64, 64)' in repr(steps.last._replace(culprit_name=''))

def test_limits():
    "That the page names: what is silently as many times too small"
    def norm(half, backward):
        steps = new(half, loss_scale=1024.)
        with steps.batch(): backward(steps, mse_of(steps.model, *data[0]))
        return steps.make().norm
    wanted = norm(f32, lambda steps, loss: steps.backward(loss))
    def added(steps, loss):
        with steps.scaled(loss) as scaled:
            scaled.backward(retain_graph=True)
            steps.model.zero_grad()
            loss.backward()
    assert abs(norm(f32, added)*1024/wanted-1)<.001

@pytest.mark.parametrize('compile', [lambda m: m.compile(backend='eager'), lambda m: torch.compile(m, backend='eager'),
                                     lambda m: torch.compile(lambda *xy: mse_of(m, *xy), backend='eager')])
def test_compiled_model_is_called(compile):
    "Its calls aren't seen where others are compiled, so nothing is said"
    model = mlp()
    f = compile(model) or model
    steps = new(model=f if isinstance(f, nn.Module) else model)
    def _step(steps, *xy):
        with steps.batch(): steps.backward(mse_of(f, *xy) if isinstance(f, nn.Module) else f(*xy))
        steps.make()
    assert told(_step, steps, *data[0])==[]

# learners

some_modes = pytest.mark.parametrize('mode', ['fp16','bf16','native_bf16'])

@some_modes
@pytest.mark.parametrize('part', [lambda m: m, lambda m: m[2]])
def test_half_in_a_fit(part, mode):
    "As by a callback that saves a half copy, in place: an error at the next batch, as in float32"
    learn,plain = in_mode(mode),get_learner()
    halves = On('after_batch', lambda o: part(o.model).half(), at=(1,))
    told = pytest.raises(RuntimeError, match=r'weight has become torch.float16.*deepcopy\(model\).half')
    with told: learn.fit(1, cbs=halves)
    with pytest.raises(RuntimeError): plain.fit(1, cbs=halves)
    assert learn.mixed_precision.state.steps==2
    def frozen(o): o.model[0].requires_grad_(False).half()
    learn = in_mode(mode)
    learn.model[0].requires_grad_(False)
    fitted(learn, 1, On('after_batch', frozen, at=(1,))) # what isn't trained may be in half precision
    assert 'float16' in learn.mixed_precision.half.ways['0'].why
    def trained(o): (o.model[0].float if o.iter==0 else o.model[0].half)().requires_grad_() # and then rounded
    with told: learn.fit(1, cbs=On('after_batch', trained, at=(0,1)))

@some_modes
def test_before_step_without_super(mode):
    "A step that nobody has checked isn't made"
    kind = type(in_mode(mode).mixed_precision)
    own = type('Own', (kind,), dict(before_step=lambda self: None))
    learn = get_learner()
    learn.add_cbs([own(),ModelToHalf()] if kind is MixedPrecision else own())
    with stays(weights, learn), pytest.raises(RuntimeError, match=r'super\(\).before_step'): learn.fit(1)

@pytest.mark.parametrize('mode', ['fp16','native_fp16','bf16'])
def test_own_backward_of_another_loss(mode):
    "Gradients of a loss computed again have no loss scale: an error, before a step is made"
    learn = in_mode(mode)
    def _backward():
        params = [*learn.model.parameters()]
        grads = torch.autograd.grad(learn.loss_func(learn.model(*learn.xb), *learn.yb), params)
        for p,g in zip(params, grads): p.grad = g.as_subclass(torch.Tensor).clone()
    learn._backward = _backward
    if mode=='bf16':
        learn.fit(1)
        return
    with stays(weights, learn), pytest.raises(RuntimeError, match='write self.loss_grad'): learn.fit(1)
    assert all(p.grad is None for p in learn.model.parameters())

@some_modes
@pytest.mark.parametrize('fits', [0,1])
def test_callbacks_of_another_learner(fits, mode):
    "The error names the cause; the learner that has them trains"
    learn = in_mode(mode)
    if fits: learn.fit(fits)
    other = copy(learn)
    told = pytest.raises(RuntimeError, match=r'belong to another.*Use deepcopy\(learn\)')
    with stays(weights, learn), told: other.fit(1)
    learn.fit(1)
    get_learner(cbs=[cb for cb in learn.cbs if 'half' in cb.name or 'precision' in cb.name])
    with pytest.raises(RuntimeError, match='belong to another'): learn.fit(1)

@some_modes
@pytest.mark.parametrize('event', ['before_batch','after_loss','after_batch'])
def test_removed_in_a_batch(event, mode):
    "Is refused with the cause, and nothing has changed; between batches it is allowed"
    learn = in_mode(mode)
    def remove(o): o.remove_cb(o.mixed_precision)
    told = pytest.raises(RuntimeError, match="can't change in the middle of a batch")
    with told: learn.fit(1, cbs=Now(event, remove))
    assert learn.mixed_precision.learn is learn
    fitted(learn, 1, On('after_fit', remove))
