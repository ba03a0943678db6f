"`rescue=True`: the modules that half precision makes nan are kept in float32, and training goes on"
from sick_models import *

pytestmark = pytest.mark.filterwarnings('ignore:You are shadowing', 'ignore:.* steps in a row')

def fit(learn, n, **kwargs):
    "The texts of warnings in `n` epochs of four steps"
    return heard(learn.fit, n, 1e-3, **kwargs)[0]

@pytest.mark.parametrize('name,to', [('softmax','to_fp16'), ('variance','to_native_fp16'),
                                     slow_unless(False, 'attention','to_fp16')])
def test_trains_on(name, to):
    "As float32 does from the step on in which the module was kept"
    learn,full = getattr(sick[name].make(), to)(rescue=True),sick[name].make()
    told, = fit(learn, 16)
    full.fit(8, lr=1e-3) # eight epochs of four steps were skipped
    assert abs(learn.validate()[0]/full.validate()[0]-1)<.02
    assert '32 steps in a row were skipped' in told and 'Precision is the cause' in told
    assert "Kept in float32 from step 32: ['1']. To do so from the start: keep='1'." in told
    assert learn.mixed_precision.state.rescued==(('1',32),)
    assert '1 is kept in float32 since step 32.' in learn.precision_recorder.summary()
    table = learn.mixed_precision.policy().set_index('module')
    assert {*table.why[table.index.str.match(r'1(\.|$)')]}=={'rescued, step 32'} and table.compute['0']=='float16'
    assert learn.find_nonfinite().where=='nothing' and all(p.dtype==torch.float32 for p in learn.model.parameters())
    # plain numbers, which fastai's `TensorBoardCallback` logs
    assert {type(v) for o in learn.opt.hypers for k,v in o.items() if k.startswith('mp_')}<={int,float,bool}

def test_later():
    "In the middle of training"
    learn = sick['growing'].make().to_fp16(rescue=True)
    told, = fit(learn, 40)
    (name,step), = learn.mixed_precision.state.rescued
    assert name=='1' and step>32 and f'Kept in float32 from step {step}' in told
    assert learn.precision_recorder.log.finite[step:].all()

no_cure = [('learning_rate','to_fp16'), ('learning_rate','to_native_fp16'), ('embedding','to_fp16')]
@pytest.mark.parametrize('name,to', no_cure)
def test_no_cure(name, to):
    "The error as ever if precision isn't the cause"
    learn = getattr(sick[name].make(), to)(rescue=True, max_skips=33)
    with pytest.raises(FloatingPointError, match='33 steps in a row'): learn.fit(30)
    assert learn.mixed_precision.state.rescued==()

def worse(m, x):
    "Nan in float32, too, after some steps"
    if m.training and not torch.is_inference_mode_enabled(): m.calls += 1
    return m.softmax(x) if m.calls<60 else x*torch.nan

def test_second_streak():
    "If nothing is left to add, training ends"
    learn = get_learner(net(partial(Does, worse, softmax=Softmax(), calls=0))).to_fp16(rescue=True, max_skips=40)
    with pytest.raises(FloatingPointError, match='40 steps in a row') as e: learn.fit(60, 1e-3)
    assert 'Precision is not the cause' in str(e.value) and len(learn.mixed_precision.state.rescued)==1

@pytest.mark.parametrize('to,opt', [('to_fp16','fastai'), ('to_native_fp16','torch')])
def test_resumed(to, opt, tmp_path):
    "A run that was killed and resumed has the weights, bit for bit, of one that went on"
    def _learner():
        learn = sick['softmax'].make()
        learn.path = tmp_path
        if opt=='torch': learn.opt_func = partial(OptimWrapper, opt=torch.optim.AdamW)
        return getattr(learn, to)(rescue=True)
    whole = _learner()
    fit(whole, 10, cbs=SaveModelCallback(every_epoch=True, with_opt=True, fname='run'))
    fit(whole, 3)
    resumed = _learner()
    resumed.create_opt()
    resumed.load('run_9')
    assert resumed.find_nonfinite().where=='nothing' # it knows before the next fit
    assert fit(resumed, 3)==[] and resumed.mixed_precision.state==whole.mixed_precision.state
    assert same_weights(whole, resumed)
    resumed.to_fp32()
    assert not any(k.startswith('mp_') for k in resumed.opt.hypers[0])

@pytest.mark.parametrize('before', [0,1])
def test_another_model(before):
    "What was rescued in the model of before is forgotten, also if all that has weights now has the name of it"
    learn = sick['softmax'].make().to_fp16(rescue=True)
    fit(learn, 9)
    assert learn.mixed_precision.rescued==[('1',32)]
    learn.model = nn.Sequential(*[nn.Identity()]*before, nn.Linear(8,1))
    assert learn.mixed_precision.half.model is learn.model
    assert 'rescued' not in ' '.join(learn.mixed_precision.policy().why)
    assert learn.find_nonfinite().where=='nothing'
    learn.fit(1)
    assert learn.mixed_precision.rescued==[] and 'kept in float32' not in learn.precision_recorder.summary()

def quiet_rows(xy):
    "Every second batch of 16 rows is 0, and finite in half precision"
    for i in (16,48): xy[0][i:i+16] = 0

def accumulated(make, to, change=quiet_rows, **kwargs):
    "Steps of two batches, the first of which goes wrong"
    learn = learner(make(), change, cbs=GradientAccumulation(32))
    return getattr(learn, to)(**kwargs)

@pytest.mark.parametrize('to', ['to_fp16','to_native_fp16'])
def test_earlier_batch(to):
    "of a step is looked at, too: what is rescued, and what the warning and the error say"
    learn = accumulated(lambda: net(Softmax), to, rescue=True)
    told, = fit(learn, 18)
    assert '1 (Softmax) was the first module that returned inf or nan' in told and 'Precision is the cause' in told
    assert learn.mixed_precision.state.rescued==(('1',32),) and learn.precision_recorder.log.finite[32:].all()
    learn = accumulated(lambda: net(Softmax), to, max_skips=3)
    with pytest.raises(FloatingPointError, match=r'3 steps in a row.*1 \(Softmax\) was the first'): learn.fit(3)

def large(m, x):
    "Beyond float16, in the batches that aren't 0; gradients of an absolute error don't know that"
    return m.head(x.detach()*0)+(x.abs()>1e-6).to(x.dtype)*12e4

@pytest.mark.parametrize('change,n', [(noop,16),(quiet_rows,32)], ids=['each','earlier'])
@pytest.mark.parametrize('to', ['to_fp16','to_native_fp16'])
def test_infinite_loss(to, change, n):
    "of each batch, or of the first of two"
    model = nn.Sequential(nn.Linear(8,1,bias=False), Does(large, head=nn.Linear(1,1)))
    learn = learner(model, change, loss_func=L1LossFlat(), cbs=GradientAccumulation(n))
    told, = fit(getattr(learn, to)(rescue=True), 18)
    assert 'The loss of 32 steps in a row was not finite' in told and '1 (Does) was the first' in told
    start = 32+skipped(learn) # the first scale of native float16 may be too large
    assert 'Precision is the cause' in told and learn.mixed_precision.state.rescued==(('1',start),)
    assert [*log_of(learn).index[log_of(learn).bad_loss]]==[*range(start)]

def test_a_loss_that_is_finite_again():
    calls = itertools.count()
    def loss(pred, y): return F.mse_loss(pred, y)+(0. if next(calls) else math.inf)
    told = heard(ask_nothing(get_learner(loss_func=loss).to_bf16(warn_skips=1)).fit, 1)
    assert 'Computed again, this batch is finite.' in str(told)

def test_finite_batches():
    "All are, where a callback has spoilt the gradients"
    spoil = On('after_backward', lambda learn: learn.model[0].bias.grad.fill_(math.nan), 5)
    with pytest.raises(FloatingPointError, match='0.bias was the first.*the 2 batches of this step are finite'):
        accumulated(net, 'to_bf16', max_skips=3).fit(3, cbs=spoil)

class Remembers(MovingLoss):
    "Divides by what predictions have been"
    def forward(self, pred, y):
        if pred.requires_grad: self.size.mul_(.9).add_(.1*pred.detach().abs().mean())
        return F.mse_loss(self.w*pred/self.size, y/self.size)

def test_loss_is_the_same_in_each_run():
    "What half precision leaves in the loss's buffers isn't there in the run in float32"
    learn = learner(net(Softmax), loss_func=Remembers()).to_fp16(rescue=True)
    found = learn.find_nonfinite()
    assert (found.where,found.module,found.precision,found.keep)==('forward','1',True,('1',))
    told, = fit(learn, 9)
    assert learn.mixed_precision.state.rescued==(('1',32),) and learn.loss_func.size.isfinite()

def test_loss_after_an_explanation():
    "Its numbers, gradients and attributes are what they are without"
    def loss(**kwargs):
        learn = get_learner(loss_func=MovingLoss(), cbs=[StepLoss(),*map(InfiniteAt, range(8))]).to_fp16(**kwargs)
        told, = fit(learn, 2)
        assert ('of this fit' in told)==(not kwargs) # which looks at no batch
        return learn.loss_func
    told,quiet = loss(warn_skips=3),loss()
    assert (told.w,told.size,told.calls)==(quiet.w,quiet.size,quiet.calls)

def test_batches_are_not_held():
    "but in the steps that may be explained"
    seen,alive = [],[]
    def held(learn):
        alive.append(any(o() is not None for o in seen))
        seen.append(ref(learn.xb[0]))
    accumulated(lambda: net(Softmax), 'to_bf16', max_skips=3).fit(2, cbs=On('before_batch', held, 20))
    assert len(alive)==8 and not any(alive)
