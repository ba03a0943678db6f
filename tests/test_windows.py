"Steps of several batches, and what changes between them: the precision, the optimizer, the parameters, the buffers"
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

precisions = dict(modes, float32=lambda o: o.to_fp32())

def trained(model, first, *fits, **kwargs):
    "How far a learner, `first` in this precision, comes from where it was in these fits"
    learn = first(get_learner(model, **{'opt_func':SGD, 'lr':.05, **kwargs}))
    start = flat(weights(learn))
    for f in fits: f(learn)
    return flat(weights(learn))-start

def assert_same_way(got, want, tol=.02):
    "Do both of `trained` come the same way?"
    assert (got-want).norm()<tol*want.norm(), (got.norm(), want.norm())

some = [('fp16','float32'),('float32','native_fp16'),('native_fp16','bf16'),('native_bf16','fp16')]
@pytest.mark.parametrize('first,to', some)
def test_switch_while_accumulating(first, to):
    "The gradients of before and after the switch add up as if there had been one precision, and momentum stays"
    def _trained(first, to):
        # 4 batches of 16: the second step's gradients come from both epochs
        cbs = [GradientAccumulation(40),Now('after_epoch', precisions[to], 0)]
        return trained(mlp(), precisions[first], lambda o: o.fit(2, cbs=cbs), opt_func=partial(SGD, mom=.9))
    assert_same_way(_trained(first, to), _trained('float32', 'float32'))

@pytest.mark.parametrize('then', ['float32','fp16'])
def test_switched_on_in_a_fit(then):
    "and there are gradients left at its end, which the next fit finds as plain fastai's would be"
    def _trained(on, then):
        cbs = [GradientAccumulation(10**6),Now('before_epoch', precisions[on], 0)]
        return trained(mlp(), noop, lambda o: o.fit(1, cbs=cbs), precisions[then], lambda o: o.fit(1))
    assert_same_way(_trained('native_fp16', then), _trained('float32', 'float32'))

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_gradients_from_before_a_fit(mode):
    "Count in its first step, as in plain fastai"
    def _by_hand(learn):
        x,y = learn.dls.one_batch()
        (F.mse_loss(learn.model(x), y)*20).backward()
    def _trained(to): return trained(mlp(), to, _by_hand, lambda o: o.fit(1))
    assert_same_way(_trained(modes[mode]), _trained(noop))

def head_only(model): return [list(model[-1].parameters())]
asked = RuntimeError('as asked')

@pytest.mark.parametrize('mode', modes)
def test_error_leaves_no_gradients(mode):
    "Neither the optimizer's, nor those of parameters that the splitter leaves out"
    learn = in_mode(mode, splitter=head_only)
    infinite = On('after_pred', lambda learn: setattr(learn, 'pred', learn.pred*float('inf')), 30)
    with pytest.raises(RuntimeError, match='as asked'):
        learn.fit(1, cbs=[infinite,On('after_backward', raises(asked), 30)])
    assert all(p.grad is None for p in learn.model.parameters())
    assert log_of(fitted(learn)).finite.all()

@pytest.mark.parametrize('event,order', [('after_step',5),('after_step',15),('before_step',5),('after_backward',15)])
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_batch_inside_a_step(mode, event, order):
    "A prediction in the middle of a step, by the learner itself, is no end of the step: it is made, and counted once"
    def _predict(learn):
        before = {k:getattr(learn, k) for k in ('xb','yb','pred','loss','loss_grad')}
        learn.training = False
        with torch.no_grad(): learn.one_batch(0, (learn.x[:4],learn.y[:4]))
        learn.training = True
        vars(learn).update(before)
    # fastai's recorder can't count in a batch of validation before there was a validation
    plain,inside = [in_mode(mode, norm=True).remove_cb(Recorder) for _ in range(2)]
    fitted(plain)
    fitted(inside, 1, On(event, _predict, order))
    assert same_weights(plain, inside) and inside.mixed_precision.state.as_dict()==plain.mixed_precision.state.as_dict()
    assert_clean(inside.model)

@pytest.mark.parametrize('mode', modes)
def test_an_error_in_a_batch_inside_a_batch(mode):
    "That somebody catches: the batch around it goes on with its own gradients, and its step is made"
    def _try(learn):
        before = {k:getattr(learn, k) for k in ('xb','yb','pred','loss','loss_grad')}
        with pytest.raises(RuntimeError, match='cannot be multiplied'): learn.one_batch(0, (learn.x[:,:3],learn.y))
        vars(learn).update(before)
    plain,inside = in_mode(mode),in_mode(mode)
    fitted(plain)
    fitted(inside, 1, On('after_backward', _try))
    assert same_weights(plain, inside) and inside.mixed_precision.state.as_dict()==plain.mixed_precision.state.as_dict()

@pytest.mark.parametrize('opt', [SGD,partial(OptimWrapper, opt=torch.optim.SGD)], ids=['fastai','torch'])
@pytest.mark.parametrize('mode', modes)
def test_batch_ends_after_step(mode, opt):
    "The gradients of a step that was made don't count in the next one, though the optimizer hasn't cleared them"
    ends = On('after_step', raises(CancelBatchException), 80)
    one,other = [fitted(in_mode(mode, opt_func=opt, lr=.05), 2, *cbs) for cbs in ([],[ends])]
    assert same_weights(one, other) and not any(p.grad is not None for o in (one,other) for p in o.model.parameters())

@pytest.mark.parametrize('mode', modes)
def test_replaced_model_fails(mode):
    "It is an ordinary model afterwards, as the one before it"
    before,broken = mlp(),mlp()
    broken[-1].register_forward_hook(raises(asked))
    with pytest.raises(RuntimeError, match='as asked'):
        in_mode(mode, before).fit(1, cbs=On('before_batch', lambda learn: setattr(learn, 'model', broken)))
    assert not [m for model in (before,broken) for m in model.modules() if 'forward' in vars(m)]

def join(how, learn):
    "Gradual unfreezing: the body joins the optimizer after the first epoch"
    if learn.epoch!=1: return
    if how=='group': return learn.opt.opt.add_param_group(dict(params=[*learn.model[:-1].parameters()], lr=.05))
    learn.splitter = trainable_params
    learn.create_opt()
    learn.opt.set_hypers(lr=.05)

@pytest.mark.parametrize('mode,how,accumulate', [('fp16','group',16), ('bf16','new',16), ('native_fp16','new',40)])
def test_parameters_join(mode, how, accumulate):
    "They move as far as in float32"
    def _trained(to):
        opt = partial(OptimWrapper, opt=torch.optim.SGD) if how=='group' else SGD
        cbs = [GradientAccumulation(accumulate),On('before_epoch', partial(join, how))]
        return trained(mlp(), to, lambda o: o.fit(3, cbs=cbs), opt_func=opt, splitter=head_only)
    assert_same_way(_trained(modes[mode]), _trained(noop), .05)

@pytest.mark.parametrize('mode,bad', [('fp16',0), ('bf16',1), ('native_fp16',2)])
def test_overflow_in_a_window(mode, bad):
    "Three batches make a step. If one of them overflows, all three leave no trace, batch norm's statistics included."
    def _run(bad):
        x,y = numbers(144)
        batches = [*zip(x.split(16), y.split(16))]
        if bad is None: del batches[3:6]
        else: batches[3+bad] = torch.full((16,8), float('inf')),y[:16]
        return fitted(in_mode(mode, mlp(True), dls=DataLoaders(batches, batches[:1])), 1, GradientAccumulation(48))
    learn,want = _run(bad),_run(None)
    assert list(log_of(learn).finite)==[True,False,True]
    assert same(want.model.state_dict(), learn.model.state_dict())

@pytest.mark.parametrize('mode', ['bf16','native_fp16'])
def test_overflow_in_an_unfinished_step(mode):
    "The last batch of the epoch overflows, and its step doesn't come: validation sees statistics from before the step"
    learn = fitted(in_mode(mode, norm=True, cbs=[GradientAccumulation(48),InfiniteAt(3)]))
    assert_clean(learn.model)
    assert np.isfinite(learn.recorder.values[-1][1])

def test_load_after_an_unfinished_step(tmp_path):
    "A skipped step restores what was loaded, and not what an unfinished step of an earlier fit remembers"
    learn = get_learner(norm=True, path=tmp_path, cbs=GradientAccumulation(48)).to_bf16()
    norm,seen = learn.model[1],[]
    norm.running_mean.fill_(7.)
    learn.save('good')
    norm.running_mean.fill_(0.)
    learn.fit(1) # a step of three batches, and one batch more
    learn.load('good')
    see = Callback(after_cancel_step=lambda cb: seen.append(norm.running_mean.clone()))
    learn.fit(1, cbs=[InfiniteAt(0),see])
    assert torch.equal(seen[0], torch.full_like(seen[0], 7.))

class Masked(nn.Linear):
    "Has a mask that doesn't change, which may be exchanged, and counts its batches"
    def __init__(self, exchange=False):
        super().__init__(8, 8)
        self.exchange = exchange
        self.register_buffer('mask', torch.rand(8, 8)>.2)
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        if self.exchange: self.mask = self.mask.clone()
        self.count += 1
        return F.linear(x, self.weight*self.mask, self.bias)

def masks():
    "How many there are"
    gc.collect()
    return sum(type(o) is Tensor and o.dtype==torch.bool and o.shape==(8,8) for o in gc.get_objects())

@pytest.mark.parametrize('exchange,clones', [(False,1),(True,16+7)])
def test_unchanged_buffers(exchange, clones):
    "Within a fit a mask is copied again only when it is another, a count when it has changed; no copy is left"
    n,model = 0,Masked(exchange)
    was = model.mask.clone()
    before = masks()
    def see(func, args, res):
        nonlocal n
        n += func is torch.ops.aten.clone.default and res.shape==(8,8) and res.dtype==torch.bool
    net = nn.Sequential(model, nn.Linear(8,1))
    learn = get_learner(net, cbs=InfiniteAt(5)).to_bf16(measure=False) # counted are copies of steps
    for _ in range(2):
        n = 0
        with Operations(see): learn.fit(2)
        assert n==clones and torch.equal(model.mask, was)
    assert model.count==2*(2*8-1) # with validations, without the skipped batches
    assert masks()==before

class Table(nn.Linear):
    "Shares a buffer with another one like it"
    def __init__(self, table): super().__init__(8, 8); self.register_buffer('table', table)
    def forward(self, x): return x+super().forward(x)*self.table

@pytest.mark.parametrize('mode,view', [('fp16',False), ('bf16',True), ('native_fp16',True)])
def test_shared_buffer(mode, view):
    "A skipped step puts it back, and it is still shared; one of inference mode, which nobody can write, is replaced"
    table = torch.linspace(.5, 1.5, 8)
    t = table.clone()
    model = nn.Sequential(Table(t), Table(t[:] if view else t), nn.Linear(8,1))
    with torch.inference_mode(): model.register_buffer('fixed', torch.arange(3.).expand(2,3))
    learn = fitted(in_mode(mode, model), 2, InfiniteAt(1))
    assert skipped(learn)==1 and torch.equal(t, table) and model.fixed.tolist()==[[0,1,2]]*2
    assert all(model[i].table.data_ptr()==t.data_ptr() for i in range(2))

@pytest.mark.parametrize('flat_master', [False,True])
def test_copies_of_a_learner(flat_master):
    "A copy trains as the first one"
    copies = []
    copy = Now('after_epoch', lambda learn: copies.append(deepcopy(learn)), 50)
    learn = fitted(get_learner().to_bf16(flat_master=flat_master), 1, copy)
    for o in (learn,*copies):
        o.opt.clear_state()
        o.fit(1)
    assert same_weights(learn, *copies)
