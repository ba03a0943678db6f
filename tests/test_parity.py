"""Each precision against float32: the same learner from the same seed, with each kind of optimizer

How far apart may they be? Let u be the unit roundoff of the half dtype. On its way through one of the three layers of
the model a number is rounded four times: input and weight on the way there, incoming gradient and weight on the way
back. These twelve errors are independent and evenly spread, each of root mean square u/√3 at most, so together they
are √12·u/√3 = 2u of a gradient. Steps add up to the distance travelled as gradients add up to steps, so the final
weights should be within 2u of that distance from those of float32; `tolerance` allows twice as much, since optimizers
amplify what differs where gradients are small. Measured: .5u to u, for each optimizer. The validation loss is held to
the same tolerance, relative to its value."""
from learners import *

def wrapped(**kwargs): return partial(OptimWrapper, opt=partial(torch.optim.AdamW, **kwargs))

optimizers = dict( # and a learning rate that suits it
    sgd     = (SGD, .1),
    mom     = (partial(SGD, mom=.9), .02),
    adam    = (Adam, .01),
    radam   = (RAdam, .01),
    qhadam  = (QHAdam, .01),
    lamb    = (Lamb, .01),
    ranger  = (ranger, .02),
    adamw   = (wrapped(foreach=False), .01),
    foreach = (wrapped(foreach=True), .01),
    fused   = (wrapped(fused=True), .01))

tolerance = {k:4*roundoff(k) for k in modes}

quick = 'sgd adam ranger fused'.split()
some_modes = pytest.mark.parametrize('mode', ['fp16','native_bf16'])

def make(opt, mode=None, **kwargs):
    "A learner with batch norm that steps with `opt`, in `mode`, or in float32"
    opt_func,lr = optimizers[opt]
    return in_mode(mode, norm=True, opt_func=opt_func, lr=lr, **kwargs)

@functools.cache
def in_float32(opt):
    "Weights at the start and after six epochs of float32, and the validation loss"
    learn = make(opt)
    start,before = flat(weights(learn)),learn.validate()[0]
    learn.fit(6)
    end,loss = flat(weights(learn)),learn.validate()[0]
    assert (end-start).norm()>.5 and loss<.85*before # what tolerances are relative to is not small
    return start,end,loss

@pytest.mark.parametrize('opt,mode', crossed(optimizers, modes, thin=4,
                                             fast=lambda opt,mode: opt=='adam' or opt in quick and mode=='fp16'))
def test_follows_float32(opt, mode):
    start,end,loss = in_float32(opt)
    learn = fitted(make(opt, mode), 6)
    assert skipped(learn)==0 and len(log_of(learn))==24
    off = ((flat(weights(learn))-end).norm()/(end-start).norm()).item()
    assert roundoff(mode)/10<off<tolerance[mode] # nearer would not be half precision
    assert abs(learn.validate()[0]/loss-1)<tolerance[mode]

@pytest.mark.parametrize('mode', modes)
def test_clip(mode):
    "`clip=` does what fastai's GradientClip does, and the norms that are recorded are those before clipping"
    a,b = [fitted(make('sgd', mode, **o), 2) for o in (dict(cbs=GradientClip(.1)), dict(options=dict(clip=.1)))]
    assert torch.allclose(flat(weights(a)), flat(weights(b)), rtol=0, atol=1e-6)
    assert (log_of(b).norm>.1).all() and np.allclose(log_of(a).norm, log_of(b).norm, rtol=1e-4)

@some_modes
def test_accumulation(mode):
    "Two batches of 16 with GradientAccumulation are one of 32, in half precision too"
    def _way(bs, *cbs): return way(in_mode(mode, opt_func=SGD, lr=.05, dls=get_dls(bs=bs)), 4, *cbs)
    got,whole = _way(16, GradientAccumulation(32)),_way(32)
    assert (got-whole).norm()<tolerance[mode]*whole.norm()

@some_modes
def test_own_accumulation(mode):
    """A callback after ours may put every other step off: gradients as they are then, unscaled, and what is added,
    scaled, fit"""
    off = On('before_step', raises(CancelBatchException), 15, range(0, 16, 2))
    got,plain = [way(in_mode(o, opt_func=SGD, lr=.02), 4, off) for o in (mode,None)]
    assert (got-plain).norm()<tolerance[mode]*plain.norm()

def crawl(mode):
    "Weights before and after twenty fits with a very small learning rate"
    learn = in_mode(mode, opt_func=SGD, lr=2.5e-7, dls=get_dls(n=32))
    start = flat(weights(learn))
    for _ in range(20): learn.fit(1)
    return start,flat(weights(learn))

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_tiny_updates(mode):
    """Twenty short fits move the weights as float32 does, each by less than half precision could tell

    fastai's own masters are thrown away at the end of each fit."""
    start,end = crawl(None)
    moved = end-start
    big = start.abs()>.01
    assert (moved.abs()[big] < start.abs()[big]*roundoff(mode)/4).all() # all together would be rounded away
    assert moved.abs().max()>1e-6
    off = ((crawl(mode)[1]-end).norm()/moved.norm()).item()
    assert off<tolerance[mode]+.01 # the latter: float32 has about a hundred steps of 1e-8 in a movement of 1e-5

def in_both(learns, *fs):
    "Do each of `fs` with both learners, and see after each that nothing differs"
    for f in fs:
        for o in learns: f(o)
        a,b = learns
        assert same(a.model.state_dict(), b.model.state_dict()) and same(a.opt.state_dict(), b.opt.state_dict())
        assert {*map(id, opt_params(b))}=={*map(id, b.model.parameters())}

def twins(opt, mode, path):
    """The same learner twice, the first stepped one by one by fastai

    It has a layer that is not used."""
    def model(): return mlp(True).insert(5, Does(lambda m, x: x, layer=nn.Linear(3,3)))
    def halves(model): return [params(model[:-1]),params(model[-1])]
    res = [make(opt, mode, model=model(), path=path/o, wd=.1, splitter=halves) for o in ('one_by_one','at_once')]
    res[0].opt_func = one_by_one(res[0].opt_func)
    return res

@pytest.mark.parametrize('opt,mode', crossed(
    [o for o in optimizers if o not in ('lamb', 'adamw', 'foreach', 'fused')], modes,
    thin=3, fast=lambda *o: o in (('adam','fp16'),('ranger','native_bf16'))))
def test_at_once(opt, mode, tmp_path):
    """Bit for bit: discriminative rates, decay exclusions, frozen groups, an unused layer, fit after fit, save and
    load, a skipped step, an interrupt, accumulation and clipping"""
    def interrupted(learn):
        with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Now('after_backward', raises(KeyboardInterrupt)))
    in_both(twins(opt, mode, tmp_path),
            lambda o: o.create_opt(),
            lambda o: o.freeze(),
            lambda o: o.fit(1, slice(1e-3, 1e-2)),
            lambda o: o.unfreeze(),
            lambda o: o.fit_one_cycle(2, slice(1e-3, 1e-2)),
            lambda o: o.save('here'),
            lambda o: o.fit(1),
            lambda o: o.load('here'),
            lambda o: o.freeze_to(1),
            lambda o: o.fit(1, cbs=InfiniteAt(2)),
            interrupted,
            lambda o: o.fit(1, cbs=[GradientAccumulation(32), GradientClip(.1)]),
            lambda o: o.fit(1, reset_opt=True))

@pytest.mark.parametrize('opt,match', [(Lamb,'lamb_step'), (Larc,'larc_layer_lr'), (wrapped(),'AdamW')])
def test_flat_master_refused(opt, match, tmp_path):
    "Optimizers that need each parameter by itself, or have their own fast ways: a clear error, and all is as it was"
    learn = fitted(get_learner(opt_func=opt, norm=True))
    before,objects = model_and_opt(learn),list(learn.model.parameters())
    learn.to_bf16(flat_master=True)
    state = deepcopy(learn.opt.state_dict())
    with pytest.raises(ValueError, match='flat_master=True') as e: learn.fit(1)
    assert match in str(e.value) and 'flat_master=False' in str(e.value)
    assert same(model_and_opt(learn), before) and same(learn.opt.state_dict(), state)
    assert identical(learn.model.parameters(), objects) and identical(opt_params(learn), objects)
    learn.to_bf16().fit(1) # one by one: all is well
    assert not same(model_and_opt(learn), before)
