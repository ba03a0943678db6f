"""The tables of *ours against fastai's*: each row is a function here, named as the row, that returns what a user sees

It runs with each of our calls in this process and with each of fastai's in another, which never imports mp_callbacks:
this file, run as a script. fastai's callbacks are as they are, but for the device: where they ask for 'cuda' they get
the CPU. In the row `cpu` they don't."""
import sys
from unittest.mock import MagicMock

import fastai
from fastai.callback import fp16

# The helpers for learners import mp_callbacks, which would change fastai: the script has nothing in its place
if __name__=='__main__':
    mocked = ' .all .core .core.all .learner .learner.precision .look .look.plan'.split(' ')
    sys.modules |= {f'mp_callbacks{o}': MagicMock() for o in mocked}
from learners import *

masters,natives = ('to_fp16', 'to_bf16'),('to_native_fp16', 'to_native_bf16')
theirs = (*masters,'to_non_native_fp16')
rows = {}

def row(
    sees:dict, # What a user of ours sees
    ours=masters+natives, # In which of our calls
    **fastai # What is different in fastai's of this name; None: it doesn't have what the row is about
):
    "The decorated function, of the name of a `Learner` method, as a row of the table"
    def _row(f): rows[f.__name__] = SimpleNamespace(f=f, sees=sees, ours=ours, fastai=fastai); return f
    return _row

def linear(): return nn.Linear(4, 1)
def two_layers(): return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
def normed(norm): return lambda: nn.Sequential(nn.Linear(4, 8), norm(), nn.Linear(8, 1))

def learner(to, model=linear, options={}, loss=MSELossFlat(), lr=.1, **kwargs):
    "A learner of a line after its method `to`, called with `options`; from the same seed each time"
    set_seed(1)
    x = torch.randn(64, 4)
    dls = as_dls(x, x.sum(1, keepdim=True)+1).to(torch.device('cpu'))
    return getattr(get_learner(model(), dls, loss_func=loss, lr=lr, **kwargs), to)(**options)

in_third = partial(On, order=5, at=(2,)) # in the third training batch

def error(f, *args, **kwargs):
    "The exception of `f`, if there is one"
    try: f(*args, **kwargs)
    except BaseException as e: return e

def error_name(f, *args, **kwargs): return type(e).__name__ if (e := error(f, *args, **kwargs)) else None
def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])
def dtypes(tensors): return ','.join(sorted({str(o.dtype).removeprefix('torch.') for o in tensors}))
def is_finite(x): return bool(torch.as_tensor(x).isfinite().all())
def autocast_on(): return torch.is_autocast_enabled('cpu')

def learns(learn):
    "Does the loss come down, without an error?"
    before = learn.validate()[0]
    return not error(learn.fit, 10) and learn.validate()[0]<before/2

def scales():
    "A callback, and the list of loss scales it makes, one for each batch"
    seen = []
    def _see(learn):
        cb = getattr(learn, 'non_native_mixed_precision', None) or learn.mixed_precision
        seen.append(cb.loss_scale if hasattr(cb, 'loss_scale') else learn.scaler.get_scale())
    return On('before_backward', _see, 5),seen

@row(dict(autocast_on=False, weights='float32', learns_on=True, others_learn=True),
     to_fp16=dict(autocast_on=True, learns_on=False, others_learn=False),
     to_bf16=dict(autocast_on=True, learns_on=False, others_learn=False),
     to_non_native_fp16=dict(weights='float16', learns_on=False))
def interrupted_fit(to):
    "An interrupt in the third batch; then this learner is to go on, and after it another one, in float32"
    learn = learner(to)
    error(learn.fit, 1, cbs=in_third('after_pred', raises(KeyboardInterrupt)))
    return dict(autocast_on=autocast_on(), weights=dtypes(learn.model.parameters()), learns_on=learns(learn),
                others_learn=learns(learner('to_fp32')))

@row(dict(step=None, autocast_on=False, learns_on=True),
     to_fp16=dict(step='AssertionError', autocast_on=True, learns_on=False),
     to_bf16=dict(autocast_on=True, learns_on=False))
def cancelled_batch_or_step(to):
    "A callback raises `CancelStepException` before the step, or `CancelBatchException` after the model was called"
    step = error_name(learner(to).fit, 1, cbs=in_third('before_step', raises(CancelStepException)))
    learn = learner(to)
    learn.fit(1, cbs=in_third('after_pred', raises(CancelBatchException)))
    return dict(step=step, autocast_on=autocast_on(), learns_on=learns(learn))

@row(dict(after_validate=True, after_fit=True, file='float32'),
     to_non_native_fp16=dict(after_validate=False, after_fit=False, file='float16'))
def weights_in_float32(to):
    """After `validate`, after many fits whose steps are smaller than what float16 resolves, and in the file of
    `SaveModelCallback`"""
    def moved(to):
        learn = learner(to, lr=1e-7, loss=lambda p,y: F.mse_loss(p, y)/100)
        before = weights(learn)
        for _ in range(20): learn.fit(1)
        return weights(learn)-before
    learn = learner(to)
    learn.model.weight.data[0,:2] = torch.tensor([.1234567, 70000.])
    before = weights(learn)
    learn.validate()
    after_validate = torch.equal(weights(learn), before)
    after_fit = torch.allclose(moved(to), moved('to_fp32'), rtol=.3)
    with TemporaryDirectory() as d:
        learner(to, path=d).fit(1, cbs=SaveModelCallback(every_epoch=True))
        file = dtypes(torch.load(Path(d)/'models/model_0.pth').values())
    return dict(after_validate=after_validate, after_fit=after_fit, file=file)

@row(dict(steps=True, next_fit=True, checkpoint=True),
     to_fp16=dict(steps=False, next_fit=False, checkpoint=False), to_non_native_fp16=dict(checkpoint=False))
def loss_scale_of_the_next_fit(to):
    """A loss so steep that its scale needs more than one fit to come down: is there a step in five fits, and where do
    a second fit, and a learner that has loaded a checkpoint, begin?"""
    def make(**kwargs): return learner(to, loss=lambda p,y: 2000*F.mse_loss(p, y), **kwargs)
    with TemporaryDirectory() as d:
        cb,seen = scales()
        learn = make(path=d, cbs=cb)
        before = weights(learn)
        for _ in range(5): learn.fit(2)
        n = len(seen)//5
        next_fit = seen[n] in (seen[n-1], seen[n-1]/2)
        learn.save('checkpoint')
        cb,new = scales()
        make(path=d, cbs=cb).load('checkpoint').fit(1)
    checkpoint = new[0] in (seen[-1], seen[-1]/2)
    return dict(steps=not torch.equal(weights(learn), before), next_fit=next_fit, checkpoint=checkpoint)

@row(dict(error='FloatingPointError', named=True, warned=True, scale=True, weights=True),
     **{o: dict(error=None, named=False, warned=False, scale=o=='to_bf16', weights=False) for o in theirs})
def gradients_that_stay_infinite(to):
    """260 batches of them, then 20 good ones: is there an error, and before it a warning, that name what was not finite
    first (here the inputs), is the scale at least 1, and are the weights as they were, or at least finite?"""
    cause = 'inputs of this batch have inf'
    cb,seen = scales()
    learn = learner(to, cbs=cb)
    before = weights(learn)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        e = error(learn.fit, 70, cbs=InfiniteAt(*range(260)))
    warned = any('32 steps in a row' in (s := str(o.message)) and cause in s for o in told)
    return dict(error=type(e).__name__ if e else None, named=cause in str(e), warned=warned, scale=min(seen)>=1,
                weights=torch.equal(weights(learn), before) if e else is_finite(weights(learn)))

@row(dict(valid_loss=True, weights=True), to_fp16=dict(valid_loss=False), to_bf16=dict(weights=False),
     to_non_native_fp16=dict(valid_loss=False))
def batch_that_overflows(to):
    """One batch too large for float16, in a model with `BatchNorm`; and one that is infinite, in a model without: is
    everything finite afterwards?"""
    def large(learn): learn.xb = (learn.x*1e6,)
    learn = learner(to, normed(lambda: nn.BatchNorm1d(8)))
    learn.fit(3, cbs=in_third('before_batch', large))
    plain = learner(to)
    plain.fit(3, cbs=InfiniteAt(2))
    return dict(valid_loss=is_finite(learn.validate()[0]), weights=is_finite(weights(plain)))

@row(dict(finite=True), **{o: dict(finite=False) for o in theirs})
def training_loss_shown(to):
    "In the epoch of an infinite batch, and in those after it"
    learn = learner(to)
    learn.fit(3, cbs=InfiniteAt(2))
    return dict(finite=is_finite([o[0] for o in learn.recorder.values]))

def step_norm(learn):
    "The largest norm of the gradients with which the optimizer of `learn` makes a step, in 8 epochs"
    norms = []
    def _norm(learn):
        norms.append(torch.cat([p.grad.flatten() for p in opt_params(learn) if p.grad is not None]).norm().item())
    learn.fit(8, cbs=On('before_step', _norm, 12))
    return max(norms)

@row(dict(clipped=True), to_non_native_fp16=dict(clipped=False))
def gradientclip(to):
    "Does `GradientClip(.1)` clip them?"
    return dict(clipped=step_norm(learner(to, cbs=GradientClip(.1)))<.101)

@row(dict(norm=.1), to_fp16=None, to_bf16=None, to_non_native_fp16=dict(norm=.14))
def clip(to):
    "The norm of the gradients with `clip=.1`, in a model of two parameter groups"
    learn = learner(to, options=dict(clip=.1), splitter=lambda m: [[m.weight], [m.bias]])
    return dict(norm=round(step_norm(learn), 2))

@row(dict(in_half=True, error=None, weights='float32'),
     to_fp16=dict(in_half=False), to_bf16=dict(in_half=False),
     to_non_native_fp16=dict(in_half=False, error='AssertionError', weights='float16'))
def cpu(to):
    "Does the model compute in half precision, is there an error, and what are the weights afterwards?"
    learn,seen = learner(to, two_layers),[]
    learn.model[0].register_forward_hook(lambda m,args,res: seen.append(res))
    e = error_name(learn.fit, 1)
    return dict(in_half=dtypes(seen) in ('float16','bfloat16'), error=e, weights=dtypes(learn.model.parameters()))

@row(dict(error=None, callbacks=1), to_fp16=dict(error='AssertionError', callbacks=2), to_bf16=dict(callbacks=2),
     to_non_native_fp16=dict(callbacks=2))
def called_twice(to):
    "A second call of the same method; and the callbacks of order 10 after a call of another one"
    learn = learner(to)
    e = error_name(getattr(learn, to)().fit, 1)
    return dict(error=e, callbacks=len([cb for cb in learner(to).to_bf16().cbs if cb.order==10]))

@row(dict(none=None, text=None, namedtuple=None),
     **{o: dict(none='TypeError', text='TypeError', namedtuple='TypeError') for o in theirs})
def predictions_other_than_tensors(to):
    "A model that returns a tuple with None in it, a dict with a string, or a namedtuple"
    def fit(f, get):
        learn = learner(to, lambda: nn.Sequential(linear(), Lambda(f)), loss=lambda p,y: F.mse_loss(get(p), y))
        return error_name(learn.fit, 1)
    return dict(none=fit(lambda p: (p,None), itemgetter(0)),
                text=fit(lambda p: dict(p=p, kind='line'), itemgetter('p')),
                namedtuple=fit(lambda p: Named(p, p), attrgetter('a')))

@row(dict(LayerNorm='float32', GroupNorm='float32'), to_non_native_fp16=dict(LayerNorm="float16", GroupNorm="float16"))
def normalisation_layers(to):
    "The dtype of their parameters while the model is called, as a hook sees it"
    def seen(norm):
        learn,res = learner(to, normed(norm)),[]
        learn.model[1].register_forward_pre_hook(lambda m,args: res.extend(p.detach() for p in m.parameters()))
        learn.fit(1)
        return dtypes(res)
    return dict(LayerNorm=seen(lambda: nn.LayerNorm(8)), GroupNorm=seen(lambda: nn.GroupNorm(2, 8)))

@row(dict(dtype='float32', finite=True), to_fp16=dict(dtype='float16', finite=False), to_bf16=dict(dtype='bfloat16'))
def loss_function(to):
    "The dtype of a matrix product in it, and is the product of predictions of 1000 finite?"
    def loss(p, y):
        seen.append((p+1000)@(p+1000).T)
        return F.mse_loss(p, y)
    seen = []
    learner(to, loss=loss).fit(1)
    return dict(dtype=dtypes(seen), finite=all(map(is_finite, seen)))

@row(dict(frozen=True, unused=True, same=True), ours=masters, to_fp16=None, to_bf16=None,
     to_non_native_fp16=dict(frozen=False, unused=False, same=False))
def flat_master(to):
    """Is there no error with a frozen parameter group, and with a parameter without gradient; and are the weights those
    of `flat_master=False` where weight decay leaves out norms and biases?"""
    opts = dict(opt_func=SGD, lr=.01, wd=.3, wd_bn_bias=False)
    def make(model=two_layers, flat=True, **kwargs): return learner(to, model, dict(flat_master=flat), **opts, **kwargs)
    def unused(): return Does(lambda m, x: m.used(x), used=linear(), unused=linear())
    frozen = make(splitter=lambda m: [[*o.parameters()] for o in m])
    frozen.freeze()
    both = [make(normed(lambda: nn.BatchNorm1d(8)), o) for o in (True, False)]
    for o in both: o.fit(10)
    same = torch.equal(*map(weights, both))
    return dict(frozen=not error(frozen.fit, 1), unused=not error(make(unused).fit, 10), same=same)

@row(dict(error=None), to_fp16=dict(error='AttributeError'), to_bf16=dict(error='AttributeError'),
     to_non_native_fp16=dict(error='RuntimeError'))
def validate_inside_a_fit(to):
    "And `get_preds`, by a callback, after the third batch"
    def _both(learn): learn.validate(); learn.get_preds()
    return dict(error=error_name(learner(to).fit, 1, cbs=in_third('after_batch', _both)))

@row(dict(kept=True, entries=2), to_non_native_fp16=dict(kept=False, entries=6))
def optimizers_of_pytorch(to):
    """Does their state live from fit to fit, and for how many parameters do they have one after three fits of a model
    with two?"""
    learn,steps = learner(to, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),[]
    def _count(learn):
        known = {*map(id, opt_params(learn))}
        steps.append(max([int(s['step']) for p,s in learn.opt.opt.state.items() if id(p) in known], default=0))
    for _ in range(3): learn.fit(8, cbs=On('before_step', _count, 12))
    return dict(kept=steps==[*range(len(steps))], entries=len(learn.opt.opt.state))

# --- fastai's side

def has(o): return [to for to in theirs if o.fastai.get(to, {}) is not None]

@contextmanager
def on_cpu():
    "Let fastai's callbacks take the CPU for the device they want"
    class NonNativeMixedPrecision(fp16.NonNativeMixedPrecision):
        dls = SimpleNamespace(device=torch.device('cuda')) # asked for this, once, and for nothing else
    with pytest.MonkeyPatch.context() as m:
        m.setattr(fp16, 'NonNativeMixedPrecision', NonNativeMixedPrecision)
        for o in ('autocast', 'GradScaler'):
            m.setattr(fp16, o, lambda device, f=getattr(fp16, o), **kwargs: f('cpu', **kwargs))
        yield

def fastai_sees():
    "What each row returns for each of fastai's methods"
    for name,o in rows.items():
        for to in has(o):
            with nullcontext() if name=='cpu' else on_cpu():
                try: res = o.f(to)
                except Exception as e: res = repr(e)
            # Close what a row has left open, so that it is not the next row's
            for _ in range(torch.autocast_increment_nesting()): torch.autocast_decrement_nesting()
            torch.set_autocast_enabled('cpu', False)
            torch.clear_autocast_cache()
            yield f'{name}-{to}',res

if __name__=='__main__':
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    print(json.dumps(dict(fastai_sees())))
    sys.exit()

pytestmark = pytest.mark.filterwarnings('ignore')

def tables(nb):
    "For each table with a column for fastai in the notebook `nb`: fastai's version, and the titles of the rows"
    text = '\n'.join(cells_of(f'{nb}.ipynb', 'markdown'))
    found = re.findall(r'^\| \| fastai ([\d.]+) \|.*\n\|-.*\n((?:\|.*\n?)+)', text, re.M)
    return [(version, re.findall(r'^\| ([^|]+) \|', body, re.M)) for version,body in found]

compared = tables('explanations/comparison')
version = compared[0][0]

@pytest.fixture(scope='module')
def fastai_saw():
    if fastai.__version__!=version: pytest.skip(f'the table is about fastai {version}')
    res = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(res.stdout)

def cases(of): return [(k,to) for k,o in rows.items() for to in of(o)]

turns = {k: o.ours[i%len(o.ours)] for i,(k,o) in enumerate(rows.items())} # the one call of each row that isn't slow

@pytest.mark.parametrize('name,to', [slow_unless(to==turns[k], k, to) for k,to in cases(lambda o: o.ours)])
def test_ours(name, to):
    assert rows[name].f(to)==rows[name].sees

@pytest.mark.slow
@pytest.mark.parametrize('name,to', cases(has))
def test_fastai(name, to, request):
    fastai_saw = request.getfixturevalue('fastai_saw') # asked for here, so that it isn't made for skipped tests
    assert fastai_saw[f'{name}-{to}']=={**rows[name].sees, **rows[name].fastai.get(to, {})}

def slug(s): return re.sub(r'\W+', '_', s.lower()).strip('_')

def test_tables():
    "They have these rows, each once, and are about one version; those of the home page are among them"
    titles = [slug(o) for _,names in compared for o in names]
    assert sorted(titles)==sorted(rows)
    assert {v for v,_ in compared}=={version}
    for v,titles in tables('index'): assert v==version and {*map(slug, titles)}<={*rows}
