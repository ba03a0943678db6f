"""Checkpoints: a run that is stopped, saved and loaded is the run that was never stopped, bit for bit

Each run meets a batch that overflows, again and again, and a loss scale that falls and grows. It is stopped at every
step, each time in another place of the loop. Each file that it leaves is loaded, by this process or by one that has not
seen the run, and trained to the end. Only while the optimizer is at work nothing can be exact: some weights have
been stepped on then, and others not. And what is in a file: plain numbers, which plain fastai loads."""
from interpreters import paste
from learners import *

n_epoch,n_batch = 3,4
n_steps = n_epoch*n_batch

x,y = numbers(8*n_batch)
x[16,0] = math.inf # the third of the batches is useless
batches = [*zip(x.split(8), y.split(8))]
def make_dls(train): return DataLoaders(train, batches[:1])

optimizers = dict(adam=Adam, ranger=ranger, adamw=partial(OptimWrapper, opt=torch.optim.AdamW))
start,wait = 2.**18,2 # some steps overflow, and after two that don't the scale grows
# all that can be counted
counts = DynamicLossScale(start, period=1, hysteresis=2, growth_delay=1, refill='finite+backoff')
precisions = dict(
    fp16        = lambda learn: learn.to_fp16(max_loss_scale=start, scale_wait=wait),
    fp16_static = lambda learn: learn.to_fp16(dynamic=False),
    fp16_value  = lambda learn: learn.to_fp16(counts),
    fp16_flat   = lambda learn: learn.to_fp16(max_loss_scale=start, scale_wait=wait, flat_master=True, clip=.5),
    bf16        = lambda learn: learn.to_bf16(),
    native_fp16 = lambda learn: learn.to_native_fp16(start, growth_interval=wait),
    native_bf16 = lambda learn: learn.to_native_bf16())
dynamic = 'fp16','fp16_value','fp16_flat','native_fp16'
some_modes = pytest.mark.parametrize('mode', ['fp16_flat','native_fp16','bf16'])

def make(path, mode=None, opt='adam', **kwargs):
    learn = get_learner(norm=True, dls=make_dls(batches), opt_func=optimizers[opt], path=Path(path), **kwargs)
    return learn if mode is None else precisions[mode](learn)

def go_on(learn, way, k, *cbs):
    "Train from step `k` to the end: in a fit over the batches that are left, or in the one that was begun"
    if way=='fit':
        learn.dls = make_dls((batches*n_epoch)[k:])
        learn.fit(1, cbs=cbs)
    else:
        pass_over = On('before_batch', raises(CancelBatchException), -100, range(k))
        learn.fit_one_cycle(n_epoch, 2e-2, cbs=[pass_over,*cbs], start_epoch=k//n_batch)
    return learn

def changes(xs, ys):
    "Names of what is not the same in `xs` and `ys`, which `leaves` returned"
    def _name(i): return next((o for o in reversed(xs[:i]) if isinstance(o, str)), i)
    names = [_name(i) for i,(x,y) in enumerate(zip(xs, ys)) if not same(x, y)]
    return names+(['how many'] if len(xs)!=len(ys) else [])

@functools.cache
def whole(mode, opt, way):
    "Everything, before the first step and after each, of a run that isn't stopped"
    learn,states = make('unused', mode, opt),[]
    learn.create_opt()
    def keep(learn): states.append(everything(learn))
    log = log_of(go_on(learn, way, 0, On('before_fit', keep, 90), On('after_batch', keep, 90)))
    assert len(log)==n_steps and 3<=log.skipped.sum()<=n_steps-4
    if mode in dynamic: assert log.scale.min()<start and (log.scale.diff()>0).any()
    return states

# After the check of the gradients nobody sees a step that is skipped. Before us in `after_step` it is half done.
stops = [(e,o) for e in (*before_the_step,'after_step','after_batch') for o in (-50,80)
         if (e,o) not in (('before_step',80), ('after_step',-50))]

def stopped(learn, way, k, event, order, at):
    "Train `learn` from step `k` on; is it stopped on the way, in `event` of step `at`?"
    try: go_on(learn, way, k, On(event, raises(KeyboardInterrupt('as asked')), order, [at-k*(way=='fit')]))
    except KeyboardInterrupt: return True

def resume(path, mode, opt, way, files):
    "Load each of `files`, go on from the step that stands beside its name, and write down where that leads"
    default_device(False) # the CPU, as in the test's own process
    warnings.simplefilter('ignore')
    warnings.filterwarnings('error', 'Could not load|Saved file')
    res = {f:everything(go_on(make(path, mode, opt).load(f), way, k)) for f,k in files.items()}
    torch.save(res, Path(path)/'resumed')

def assert_resumes(path, want, *args):
    "Another process gets from each of the files to what is in `want`"
    process = get_context(start_method).Process(target=resume, args=(path,*args))
    process.start()
    process.join()
    assert not process.exitcode
    for f,res in torch.load(path/'resumed').items(): assert not changes(res, want), f

in_short = [('fp16_flat','ranger','fit'), ('native_fp16','adam','start_epoch')]
slowly = [('fp16_value','adam','fit'), ('native_bf16','ranger','fit'), ('bf16','adamw','fit'),
          ('fp16_static','adam','fit'), ('fp16','adamw','start_epoch')]
@pytest.mark.parametrize('mode,opt,way', [slow_unless(o in in_short, *o) for o in in_short+slowly])
def test_stopped_at_each_step(mode, opt, way, tmp_path):
    "A run that goes on, at once, loaded into the same learner or in another process, ends where the whole one does"
    states = whole(mode, opt, way)
    learn,k = make(tmp_path, mode, opt),0
    learn.create_opt()
    learn.save('0')
    for i in range(n_steps):
        event,order = stops[(i+6*(way=='fit'))%len(stops)]
        if not stopped(learn, way, k, event, order, k+(event in before_the_step)): break
        k += 1
        learn.save(str(k))
        assert not changes(everything(learn), states[k]), (k, event, order)
    assert k>=n_steps-1 and not changes(everything(learn), states[-1])
    files = {str(i):i for i in range(min(k+1, n_steps))}
    if way=='fit':
        for i in range(1, len(files), 2): # a file from before the first fit has no scale, and loading it changes none
            learn.load(str(i))
            del files[str(i)]
            assert not changes(everything(learn), states[i]), i
            go_on(learn, way, i)
            assert not changes(everything(learn), states[-1]), i
    assert_resumes(tmp_path, states[-1], mode, opt, way, files)

@some_modes
def test_save_model_callback(mode, tmp_path):
    "What `SaveModelCallback` saves in the middle of a fit is whole too"
    states = whole(mode, 'adam', 'start_epoch')
    learn = go_on(make(tmp_path, mode), 'start_epoch', 0, SaveModelCallback(every_epoch=True, with_opt=True))
    assert not changes(everything(learn), states[-1]) # it does no harm
    files = {f'model_{e}':(e+1)*n_batch for e in range(n_epoch-1)}
    assert sorted(o.name for o in (tmp_path/'models').iterdir())==sorted(f'model_{e}.pth' for e in range(n_epoch))
    assert_resumes(tmp_path, states[-1], mode, 'adam', 'start_epoch', files)

@some_modes
def test_best_model_with_its_scale(mode, tmp_path, capsys):
    "The best model, here that of the first epoch, comes back at the end of a fit, with its optimizer and its scale"
    states = whole(mode, 'adam', 'start_epoch')
    def never_better(p, y): return 0
    best = SaveModelCallback('never_better', with_opt=True)
    learn = go_on(make(tmp_path, mode, metrics=never_better), 'start_epoch', 0, best)
    assert not changes(everything(learn), states[n_batch])
    assert capsys.readouterr().out.count('Better model found')==1

# --- What is in a file

def finished(path, mode, opt='adam'): return go_on(make(path, mode, opt), 'fit', 0)

plain_code = f"""import sys,torch,warnings
from fastai.basics import *
from fastai.callback.all import *
{inspect.getsource(mlp)}"""+"""
warnings.simplefilter('error', UserWarning)
optimizers = dict(adam=Adam, ranger=ranger, adamw=partial(OptimWrapper, opt=torch.optim.AdamW))
for name,opt_func in optimizers.items():
    dls = DataLoaders(*torch.load('data'))
    learn = Learner(dls, mlp(True), loss_func=MSELossFlat(), opt_func=opt_func, path=Path.cwd())
    learn.load(name)
    torch.save([dict(learn.model.state_dict()), {k:repr(v) for k,v in learn.opt.state_dict().items()}], name)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    learn.save('plain_'+name)
assert 'mp_callbacks' not in sys.modules
"""

@pytest.mark.slow
def test_plain_fastai(tmp_path):
    """fastai by itself loads what we saved, optimizer included, and goes on

    We load what it saved, with the scale that it has carried along."""
    learns = {opt:finished(tmp_path, mode, opt) for opt,mode in dict(adam='fp16_flat', ranger='native_fp16',
                                                                      adamw='fp16').items()}
    for opt,learn in learns.items(): learn.save(opt)
    torch.save([batches[:2], batches[:1]], tmp_path/'data')
    paste(plain_code, tmp_path)
    for opt,learn in learns.items():
        model,state = torch.load(tmp_path/opt)
        assert same(model, dict(learn.model.state_dict()))
        assert all(state[k]==repr(v) for k,v in opt_state(learn).items())
        with stays(precision_state, learn): fitted(learn).load('plain_'+opt)
        assert not torch.equal(learn.model[0].weight, model['0.weight'])
        learn.fit(1)

@some_modes
def test_files_without_optimizer(mode, tmp_path):
    "Weights alone: neither saving nor loading them says anything about the scale"
    learn = finished(tmp_path, mode)
    learn.save('weights', with_opt=False)
    learn.save('all')
    assert set(torch.load(tmp_path/'models/weights.pth'))==set(learn.model.state_dict())
    for file,with_opt in (('weights',True), ('weights',False), ('all',False)):
        new = fitted(make(tmp_path, mode))
        no_state = pytest.warns(UserWarning, match="doesn't contain an optimizer state")
        with stays(lambda: leaves([opt_state(new), precision_state(new)])), no_state if with_opt else nullcontext():
            new.load(file, with_opt=with_opt)
        assert same_weights(new, learn)

@pytest.mark.parametrize('mode,opt,other', [('fp16','adam','adamw'), ('native_fp16','adamw','adam')])
def test_another_optimizer(mode, opt, other, tmp_path):
    "If the optimizer state can't be loaded, the scale isn't either"
    finished(tmp_path, mode, other).save('model')
    learn = fitted(make(tmp_path, mode, opt))
    told = pytest.warns(UserWarning, match='Could not load the optimizer state')
    with stays(precision_state, learn), told: learn.load('model')

# --- Into other settings

def scale_of(learn): return learn.mixed_precision.loss_scale

def saved(path, scale=64., counter=1):
    "A learner with this loss scale, that has saved itself as 'model'"
    learn = make(path).to_fp16(max_loss_scale=scale, scale_wait=100, headroom=None)
    learn.dls = make_dls(batches[:1])
    assert precision_state(fitted(learn, counter))['counter']==counter
    learn.save('model')
    return learn

def test_the_state_waits(tmp_path):
    "Loaded while no precision is on, the scale is for the next one, and saved until then; `to_fp32` forgets it"
    want = dict(loss_scale=64, counter=3, steps=3, skips=0)
    assert want.items()<=precision_state(saved(tmp_path, counter=3)).items()
    learn = make(tmp_path).load('model')
    learn.save('again')
    assert want.items()<=precision_state(learn.to_fp16()).items()
    scaling = learn.mixed_precision.scaling
    assert scaling.max_loss_scale==2**24 and scaling.period==500 # settings are those of the call
    assert scale_of(learn.to_fp32().to_fp16(headroom=None))==2**24
    other = make(tmp_path).load('again')
    assert scale_of(other.to_native_fp16())==64
    assert scale_of(other.load('again').to_fp32().to_fp16(headroom=None))==2**24

@pytest.mark.parametrize('order', [0,20])
def test_loaded_in_a_batch(order, tmp_path):
    "Before our callback or after it, the state goes on from what was loaded, and half precision is off in the loss"
    learn = saved(tmp_path)
    learn.dls,n = make_dls(batches),learn.mixed_precision.state.steps
    learn.mixed_precision.loss_scale = 4.
    def _load(learn):
        learn.load('model')
        learn.model.train()
    off = On('after_loss', lambda learn: assert_plain(learn.model))
    learn.fit(1, cbs=[On('before_batch', _load, order, at=(1,)), off])
    assert learn.mixed_precision.loss_scale==64 and learn.mixed_precision.state.steps==n+len(learn.dls.train)-1

def validate_in_a_batch(learn):
    names = 'dl','iter','n_iter','xb','yb','pred'
    before = [getattr(learn, o, None) for o in names]
    learn.validate()
    for name,o in zip(names, before): setattr(learn, name, o)
    learn.training = True
    learn.model.train()

def test_rescued_in_a_batch():
    "A batch inside it computes as it does; what was rescued meanwhile counts from the next one on"
    learn,halves = get_learner().to_bf16(),[]
    def _rescue(learn):
        cb = learn.mixed_precision
        cb.state,before = cb.state._replace(rescued=(('0',0),)),cb.half
        validate_in_a_batch(learn)
        halves.append((before,cb.half))
    learn.fit(1, cbs=On('after_pred', _rescue, 20, at=[1]))
    (before,inside),after = halves[0],learn.mixed_precision.half
    assert before is inside and not before.keep and str(after.keep[-1])=='0'

def test_loaded_and_validated_in_a_batch(tmp_path):
    "What was rescued in the loaded state counts from the next batch on, and half precision is off in this one's loss"
    learn = saved(tmp_path)
    learn.dls = make_dls(batches)
    cb = learn.mixed_precision
    cb.state = cb.state._replace(rescued=(('0',0),))
    learn.save('rescued')
    cb.state = cb.state._replace(rescued=())
    def _load(learn):
        learn.load('rescued')
        validate_in_a_batch(learn)
    seen = []
    def _look(learn): seen.append(assert_plain(learn.model))
    looks = [On(o, _look, 30) for o in ('after_pred','after_loss','before_step')] # the last one not in a skipped step
    learn.fit(1, cbs=[Now('before_batch', _load, 20), *looks])
    assert len(seen)>=2*len(learn.dls.train) and cb.rescued==[('0',0)]

bounds = {(1,2**24):64, (1,32):32, (128,2**24):128} # of the precision that follows a scale of 64
bounded = [(methodcaller(call, *first, min_loss_scale=lo, max_loss_scale=hi), want) for (lo,hi),want in bounds.items()
           for call,first in (('to_fp16',()), ('to_native_fp16',(hi,)))]
# what a file from each of these says, and another precision makes of it. With a scale of 1, small gradients are lost.
handed_on = dict(fp16=dict(fp16=64, fp16_static=512, fp16_flat=64, bf16=1, native_fp16=64, native_bf16=1),
                 bf16=dict(fp16=2**10, native_fp16=start, fp16_static=512))

@pytest.mark.parametrize('mode', handed_on)
def test_into_another_precision(mode, tmp_path):
    """A dynamic scale goes over into another dynamic scale, within the bounds of this one

    A static one stays what it is; bfloat16 has none to hand on."""
    if mode=='fp16': saved(tmp_path)
    else: finished(tmp_path, mode).save('model')
    for to,scale in [(precisions[k],v) for k,v in handed_on[mode].items()]+bounded*(mode=='fp16'):
        learn,late = to(make(tmp_path)).load('model'),to(make(tmp_path).load('model'))
        assert scale_of(learn)==scale_of(late)==scale, to
        learn.fit(1)

def test_links_and_open_files(tmp_path):
    "A checkpoint that is a link to a file elsewhere stays one; an open file is one, too"
    learn = finished(tmp_path, 'fp16_flat')
    link,file = learn.save('model'),tmp_path/'elsewhere'
    link.replace(file)
    try: link.symlink_to(file)
    except OSError: pytest.skip('may not make links')
    learn.fit(1)
    learn.save('model')
    learn.save(opened := io.BytesIO())
    opened.seek(0)
    assert link.is_symlink()
    for o in ('model',opened): assert not changes(everything(make(tmp_path, 'fp16_flat').load(o)), everything(learn))
