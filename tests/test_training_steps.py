"""Training steps without fastai: the same as a learner's, skipped without a trace, resumed bit for bit

Any optimizer of `torch.optim`; Ctrl-C at any line; rescue. What is of one module stands in its notebook. DDP:
test_distributed."""
from learners import *
from sick_models import Softmax,net
from tracing import interrupted

data = [*zip(*[o.split(16) for o in numbers()])]
def adamw(params): return torch.optim.AdamW(params, 1e-2)

def make(opt=adamw, model=None, half=torch.float16, scale=1024., **kwargs):
    model = mlp(True) if model is None else model
    return TrainingSteps(model, opt(model.parameters()), half, scale, compute_loss=mse_of, **kwargs)

def state(steps): return leaves([dict(steps.model.state_dict()),steps.opt.state_dict()['state'],steps.state_dict()])

def infinite(x, y): return x*math.inf,y

@pytest.mark.parametrize('half', ['float16','bfloat16'])
def test_as_a_learner(half):
    "The same bits, the same scale, and the same skipped step"
    learn = get_learner(norm=True, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), cbs=InfiniteAt(2))
    fitted((learn.to_fp16 if half=='float16' else learn.to_bf16)(clip=1.), lr=1e-2, wd=.01)
    steps = train_steps(make(half=half, scale=None, clip=1.), [infinite(*o) if i==2 else o for i,o in enumerate(data)])
    assert same(leaves(dict(learn.model.state_dict())), leaves(dict(steps.model.state_dict())))
    assert learn.mixed_precision.steps.state_dict()==steps.state_dict() and steps.last[:4]==learn.step_stats[:4]

optimizers = [o for o in dir(torch.optim) if isinstance(getattr(torch.optim, o), type)]

@pytest.mark.parametrize('name', [o for o in optimizers if o not in ('LBFGS','SparseAdam','Muon','Optimizer')])
def test_any_optimizer(name):
    "A skipped step is as if it had not been: with all but those for sparse gradients, closures and matrices"
    opt,with_bad = partial(getattr(torch.optim, name), lr=1e-3),[*data[:2],infinite(*data[0]),*data[2:]]
    good,bad = [train_steps(make(opt, scale=StaticLossScale(64.)), o) for o in (data,with_bad)]
    assert same(*[leaves([dict(o.model.state_dict()),o.opt.state_dict()]) for o in (good,bad)])
    assert (good.state.steps,bad.state.steps)==(4,5) and bad.state.skips==0
    assert_clean(bad.model)

def test_gradients_in_one_buffer():
    "Those that are views of it, as an optimizer has that steps on it, stay so after a step that is made or skipped"
    steps = make()
    ps = [*steps.model.parameters()]
    buffer = torch.zeros(sum(p.numel() for p in ps))
    for p,o in zip(ps, buffer.split([p.numel() for p in ps])): p.grad = o.view_as(p)
    for batch in (data[0],infinite(*data[1])):
        train_steps(steps, [batch])
        assert all(p.grad is not None and p.grad._base is buffer for p in ps) and not buffer.any()

@pytest.mark.parametrize('at', [1,3,6])
def test_resumed(at, tmp_path):
    "Goes on bit for bit, in the middle of growing and skipping"
    def new(): return make(scale=DynamicLossScale(2.**22, period=3))
    whole,first = train_steps(new(), data*2),train_steps(new(), (data*2)[:at])
    torch.save([first.model.state_dict(),first.opt.state_dict(),first.state_dict()], tmp_path/'steps.pt')
    then = new()
    for o,saved in zip((then.model,then.opt,then), torch.load(tmp_path/'steps.pt', weights_only=True)):
        o.load_state_dict(saved)
    assert same(state(train_steps(then, (data*2)[at:])), state(whole)) and whole.loss_scale<2.**22

def test_installed_by_a_helper():
    "A function that predicts in half precision leaves an open batch in it"
    steps = make()
    with steps.batch(*data[0]):
        steps.half.hold(0)
        with torch.no_grad(): steps.model(data[0][0])
        steps.half.release(0)
        assert 'forward' in vars(steps.model)
    assert_plain(steps.model)

files = 'training_steps.py','checked_steps.py','backward.py','pending_step.py' # those that a step is in

def test_interrupted_at_each_line():
    "The float32 model, and a step that nobody has made is dropped, or can be: then nothing has changed"
    seen = set()
    for n in itertools.count(1):
        steps = train_steps(make(), data[:1])
        before = state(steps)
        if not interrupted(lambda: train_steps(steps, data[1:2]), n, *files): break
        assert_plain(steps.model, n)
        assert all(b.isfinite().all() for b in steps.model.buffers()), n
        seen.add(steps.state.steps)
        if steps.step is not None: steps.drop_step() # it came between batch and step
        if steps.opt.state_dict()['state'][0]['step']==1:
            assert same(state(steps), before) and all(p.grad is None for p in steps.model.parameters()), n
        train_steps(steps, data[1:])
    assert n>50 and seen=={1,2}

@pytest.mark.parametrize('change,why', [(infinite, 'The inputs of this batch have inf or nan, 128 in all'),
    (lambda x, y: (x,y*math.inf), 'Looking for the cause failed: MemoryError: full')])
def test_warns(change, why):
    "With the cause, if it can be computed again"
    steps = make(warn_skips=1, max_skips=9)
    steps.compute_loss = raises(MemoryError('full'))
    (text,),_ = heard(train_steps, steps, [change(*data[0])])
    assert text.startswith(f'Step 0 was skipped, because gradients were not finite. {why}.')

def test_rescues():
    "As a learner: the module stays in float32, also after a restart"
    def new(**kwargs): return make(model=net(Softmax), scale=None, **kwargs)
    steps = new(rescue=True, warn_skips=6)
    (text,),e = heard(train_steps, steps, data*4)
    assert e is None and "Kept in float32 from step 6: ['1']. To do so from the start: keep='1'." in text
    assert steps.rescued==[('1',6)] and steps.last.finite and steps.state.skips==0
    assert steps.policy().set_index('module').why['1']=='rescued, step 6'
    other = new()
    other.load_state_dict(steps.state_dict())
    assert other.rescued==steps.rescued
    assert new().explain(*data[0]).module=='1' and other.explain(*data[0]).where=='nothing'

@pytest.mark.parametrize('when', ['forward','backward','loss','step'])
def test_error(when):
    "Leaves what was before the step, and the next one is as if it had not been"
    model,e = mlp(True),ValueError('as asked')
    steps,twin = [train_steps(make(model=o), data[:2]) for o in (model,deepcopy(model))]
    hooks = dict(forward=model[2].register_forward_hook, backward=model[0].weight.register_hook)
    if when in hooks: hook = hooks[when](raises(e))
    if when=='step': steps.opt.step = raises(e)
    with stays(state, steps), pytest.raises(ValueError, match='as asked'):
        for batch in data[:2]: # the first of two batches is dropped, too
            with steps.batch(*batch):
                loss = mse_of(model, *batch)
                if when=='loss': raise e
                steps.backward(loss)
        steps.make()
    assert_clean(steps.model)
    if when in hooks: hook.remove()
    vars(steps.opt).pop('step', None)
    assert same(state(train_steps(steps, data)), state(train_steps(twin, data)))
