"""`looks`: questions to a learner leave it as it was, in everything, and refuse what they can't answer

The file takes long because it trains two learners for each of a hundred cases."""
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.text.all import AWD_LSTM,LMDataLoader,awd_lstm_lm_config,get_language_model
from learners import *
from mp_callbacks.core.forwards import WrappedForward
from mp_callbacks.learner import looks as looks_module

pytestmark = [pytest.mark.filterwarnings('ignore'),pytest.mark.usefixtures('folder')]
modes = {'fp32': noop, **modes}
looks = dict(report=lambda learn: learn.precision_report(batches=2), find=lambda learn: learn.find_nonfinite(),
             plan=lambda learn: learn.precision_plan(), serving=lambda learn: learn.precision_serving(2))
each_look = pytest.mark.parametrize('look', looks)

def frozen(o):
    "A copy of `o` that compares with =="
    if isinstance(o, torch.Tensor): return str(o.dtype),tuple(o.shape),o.detach().double().numpy().tobytes()
    if isinstance(o, np.ndarray): return str(o.dtype),o.tobytes()
    if isinstance(o, dict): return {k if isinstance(k, str) else id(k):frozen(v) for k,v in o.items()}
    if isinstance(o, (list,tuple,L)): return [frozen(v) for v in o]
    if isinstance(o, Metric): return id(o),frozen(vars(o))
    if isinstance(o, random.Random): return id(o),o.getstate()
    if isinstance(o, ref): return ref # PyTorch itself renews those of an LSTM to its weights when it is copied
    return o if isinstance(o, (str,bool,int,float,type(None))) else id(o)

def attributes(o): return {k:frozen(v) for k,v in vars(o).items() if k!='_parameters'}

def whole_world(learn):
    "All that a learner, its model, its optimizer, its callbacks, its data and the world around have"
    opt,dl = learn.opt,learn.dls.train
    while hasattr(opt, 'opt'): opt = opt.opt
    groups = getattr(opt, 'hypers', None) or getattr(opt, 'param_groups', [])
    order = getattr(getattr(dl, 'items', None), 'idxs', None)
    modules = [m for o in (learn.model,learn.loss_func) if isinstance(o, nn.Module) for m in o.modules()]
    params = [p for m in modules for p in m.parameters(False)]
    return dict(
        weights   = frozen(params),
        grads     = [(id(p.grad),frozen(p.grad)) for p in params],
        modules   = [attributes(m) for m in modules],
        hooks     = [len(o) for m in modules for k,o in vars(m).items() if k.endswith('hooks')],
        learner   = attributes(learn),
        callbacks = [(id(cb),attributes(cb)) for cb in learn.cbs],
        metrics   = frozen([*learn.metrics]),
        groups    = frozen([*groups]),
        state     = [(id(o),frozen(o)) for o in getattr(opt, 'state', {}).values()],
        scale     = frozen(vars(learn.mixed_precision.scaling)) if hasattr(learn, 'mixed_precision') else None,
        loader    = attributes(dl) if hasattr(dl, '__dict__') else None,
        order     = None if order is None else [*order],
        rng       = frozen([torch.get_rng_state(), *np.random.get_state(), random.getstate()]),
        files     = {str(o):o.read_bytes() for o in sorted(Path(learn.path).rglob('*')) if o.is_file()})

@contextmanager
def untouched(learn):
    "Nothing of the `whole_world` changes inside the `with`"
    before = whole_world(learn)
    yield
    after = whole_world(learn)
    assert not [k for k in before if before[k]!=after[k]]

def looked(learn, look):
    with untouched(learn): looks[look](learn)

class Jitter:
    "Rows with noise from random number generators of its own"
    def __init__(self, x, y):
        self.x,self.y,self.reads,self.plain,self.torch = x,y,0,random.Random(1),torch.Generator()
        self.numpy,self.old = np.random.default_rng(1),np.random.RandomState(1)
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        self.reads += 1
        noise = self.numpy.normal()+self.old.normal()+torch.randn((), generator=self.torch)
        return self.x[i]*self.plain.uniform(.9, 1.1)+.1*noise,self.y[i]

def shuffled(loss_func=None, model=None, path='.', **kwargs):
    "A learner that draws the order of its data"
    x,y = numbers()
    dls = DataLoaders(*[DataLoader(L(zip(x, y)), bs=16, shuffle=o, num_workers=0) for o in (True,False)], device='cpu')
    model = mlp(norm=True) if model is None else model
    return get_learner(model, dls, loss_func=loss_func or MSELossFlat(), path=Path(path), **kwargs)

def loss_with_parameter(**kwargs):
    loss = ScaledLoss()
    return shuffled(loss, splitter=lambda m: [params(m),[loss.w]], **kwargs)

class Notes(Callback):
    "Has a list, an `L` and a dict of its own"
    def __init__(self): self.seen,self.by,self.more = [0],{'n':0},L(0)
    def before_batch(self): self.seen.append(1); self.more.append(1); self.by[len(self.seen)] = 1
    def after_batch(self): self.by['loss'] = self.loss.item()

def mixup(**kwargs): return shuffled(cbs=[MixUp(.5),Notes()], **kwargs)
def accumulation(**kwargs): return shuffled(cbs=GradientAccumulation(24), **kwargs)
def wrapper(**kwargs): return shuffled(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), **kwargs)
def groups(**kwargs): return shuffled(splitter=lambda m: [params(m[:2]),params(m[2:])], lr=slice(1e-3,1e-2), **kwargs)
def language_model(path='.'):
    "AWD-LSTM with all of its regularization, and texts in a new order each time"
    config = {**awd_lstm_lm_config, 'emb_sz':8, 'n_hid':12, 'n_layers':2}
    texts = [torch.randint(20, (n,)) for n in (40,35,50,28,31)]
    def loader(shuffle): return LMDataLoader(texts, bs=4, seq_len=9, shuffle=shuffle, num_workers=0)
    dls = DataLoaders(loader(True), loader(False), device='cpu')
    return get_learner(get_language_model(AWD_LSTM, 20, config), dls, loss_func=CrossEntropyLossFlat(),
                       cbs=rnn_cbs(alpha=2, beta=1), path=Path(path))

def loss_alone(**kwargs):
    "The loss has a parameter that the learner's optimizer doesn't know, and a buffer"
    return shuffled(MovingLoss(), cbs=StepLoss(), **kwargs)

def generators(fastai=False, **kwargs):
    "Loader, sampler and dataset draw from random number generators of their own"
    data = Jitter(*numbers())
    order = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, 16, sampler=order, generator=torch.Generator())
    if fastai: loader = DataLoader(data, bs=16, shuffle=True, num_workers=0)
    return get_learner(dls=DataLoaders(loader, [(data.x[:16],data.y[:16])]), **kwargs)

makes = dict(plain=shuffled, loss=loss_with_parameter, mixup=mixup, accumulation=accumulation, wrapper=wrapper,
             groups=groups, language_model=language_model, loss_alone=loss_alone, generators=generators,
             fastai_generators=partial(generators, fastai=True))

def make(name, mode, **kwargs):
    set_seed(3)
    return modes[mode](makes[name](**kwargs))

turns,kinds = in_turns(makes, modes),in_turns(makes, looks)
cases = crossed(makes, modes, looks, fast=lambda k, *o: o==(turns[k],kinds[k]), thin=3) # nearly all pairs are there
cases = [o for o in cases if 'fp32' not in o.values or 'report' not in o.values] # the report needs a precision

@pytest.mark.parametrize('name,mode,look', cases)
def test_nothing_changes(name, mode, look):
    "Before the first fit, between two fits, and after one that was stopped; training goes on as if nobody had looked"
    learn,other = make(name, mode),make(name, mode)
    set_seed(4)
    looked(learn, look)
    assert learn.opt is None
    learn.fit(1)
    looked(learn, look)
    looked(learn, look)
    learn.fit(2)
    looked(learn, look)
    set_seed(4)
    other.fit(1)
    other.fit(2)
    assert same_weights(learn, other) and learn.recorder.values[0][:2]==other.recorder.values[0][:2]
    assert frozen([*learn.model.buffers()])==frozen([*other.model.buffers()])
    if mode!='fp32': pd.testing.assert_frame_equal(log_of(learn), log_of(other))

@each_look
@pytest.mark.parametrize('mode,event', [('fp16','after_backward'), ('native_bf16','after_pred')])
@pytest.mark.parametrize('e', [RuntimeError('as asked'),KeyboardInterrupt(),CancelFitException()], ids=repr)
def test_after_an_error(e, event, mode, look):
    learn = fitted(make('accumulation', mode))
    try: learn.fit(1, cbs=Now(event, raises(e), 60))
    except BaseException as got: assert type(got) is type(e)
    looked(learn, look)

@each_look
@pytest.mark.parametrize('fitted', [False,True])
@pytest.mark.parametrize('at', [1,2,3])
@pytest.mark.parametrize('e', [RuntimeError('as asked'),KeyboardInterrupt()], ids=['error','interrupt'])
def test_interrupted_look(e, at, fitted, look):
    "Wherever it happens: in half precision, in float32, or in the second batch"
    model = nn.Sequential(nn.Linear(8,8), nn.BatchNorm1d(8), nn.Dropout(.5), nn.Linear(8,1))
    learn = shuffled(model=model).to_fp16()
    if fitted: learn.fit(1)
    calls = iter([noop]*(at-1)+[raises(e)])
    model[1].register_forward_hook(lambda *args: next(calls, noop)())
    in_its_row = look=='serving' and at==3 and isinstance(e, Exception) # of a way to serve: it can't compute
    with untouched(learn), nullcontext() if in_its_row else pytest.raises(type(e)): looks[look](learn)
    assert not any(isinstance(o, WrappedForward) for m in model.modules() for o in vars(m).values())
    learn.fit(1)

def test_inside_a_fit():
    "Between epochs of a fit with a schedule and a progress bar"
    def ask(learn):
        if learn.epoch==1: found.extend([learn.find_nonfinite(),learn.precision_report(2)])
    def train(*cbs):
        set_seed(3)
        learn = shuffled().to_fp16()
        learn.add_cb(ProgressCallback())
        with learn.no_mbar(): learn.fit_one_cycle(3, cbs=[*cbs,CSVLogger()])
        return learn
    found = []
    learn,other = train(On('before_epoch', ask, 80), On('after_epoch', ask, 80)),train()
    assert len(found)==4 and all(map(torch.equal, weights(learn), weights(other)))
    assert learn.recorder.losses==other.recorder.losses and learn.recorder.hps==other.recorder.hps

@each_look
@pytest.mark.parametrize('fitted', [False,True])
def test_writes_nothing(fitted, look, tmp_path, capsys):
    "No logger or tracker says a word"
    cbs = [CSVLogger(),SaveModelCallback(),EarlyStoppingCallback(patience=1),ReduceLROnPlateau(patience=1),
           TensorBoardCallback(tmp_path/'runs', trace_model=False, log_preds=False)]
    learn = Learner(get_dls(), mlp(), loss_func=MSELossFlat(), cbs=cbs, path=tmp_path).to_fp16()
    if fitted: learn.fit(2)
    capsys.readouterr()
    looked(learn, look)
    said = capsys.readouterr() # the bar, which is cleared
    assert not any(o in said.out for o in ('epoch','loss','odel')) and not said.err
    assert fitted==(tmp_path/'history.csv').exists()==(tmp_path/'models').exists()==(tmp_path/'runs').exists()
    learn.fit(1)
    assert len(pd.read_csv(tmp_path/'history.csv'))==1 and capsys.readouterr()!=('','')

def test_wrong_arguments():
    "The error says what is needed"
    learn = get_learner().to_fp16()
    for batch in (torch.zeros(16,8), {'x':1}):
        with pytest.raises(TypeError, match='batch is a .* must be a tuple of inputs and targets.*one_batch'):
            learn.find_nonfinite(batch)
    for batch in (3,'a',torch.zeros(16,8)):
        with pytest.raises(TypeError, match='batch is a .* must be a tuple.*one_batch'): learn.precision_checkup(batch)
    for n in ('a',True,-1,math.nan):
        with pytest.raises(ValueError, match=f'seconds={n!r} must be a number, 0 or more. Leave it out'):
            learn.find_nonfinite(seconds=n)
    for n in (0,True,1.5):
        with pytest.raises(ValueError, match=f'batches={n!r} must be an int, at least 1. The default is 4'):
            learn.precision_report(batches=n)
    with pytest.raises(ValueError, match='trains in float32.*to_fp16'): learn.to_fp32().precision_report()

@each_look
def test_no_batch(look):
    "An empty loader, and one without targets"
    x,y = numbers()
    for batches in ([], [(x[:16],)]):
        learn = get_learner().to_bf16()
        learn.dls = DataLoaders(batches, batches)
        learn.dls.n_inp = 1
        no_batch = r'no batch with targets.*dls\.(train|valid)'
        with untouched(learn), pytest.raises(ValueError, match=no_batch): looks[look](learn)
    with pytest.raises(ValueError, match='no batch with targets'): get_learner().to_bf16().find_nonfinite((x[:16],))

@each_look
@pytest.mark.parametrize('mode', modes)
def test_in_the_middle_of_a_batch(mode, look):
    learn = make('plain', mode)
    words = 'trains in float32' if (mode,look)==('fp32','report') else 'in the middle of a batch'
    with pytest.raises((RuntimeError,ValueError), match=words): learn.fit(1, cbs=Now('after_loss', looks[look]))
    learn.fit(1)

def test_strict_steppers():
    "A stepper that takes only its own arguments never sees the loss scale"
    def my_step(p, lr, do_wd=True): p.data.add_(p.grad.data, alpha=-lr)
    learn = fitted(get_learner(opt_func=lambda ps, lr: Optimizer(ps, [my_step], lr=lr)).to_fp16())
    looked(learn, 'plan')

@each_look
def test_progress(look, capsys):
    "A learner with fastai's bar shows one, with the number of batches, and clears it"
    learn = get_learner().to_bf16()
    looks[look](learn)
    assert capsys.readouterr().out==''
    learn.add_cb(ProgressCallback())
    looks[look](learn)
    out = capsys.readouterr().out
    assert '[0/' in out and out.endswith(' \r')

@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('mode', ['fp32','native_fp16'])
@pytest.mark.parametrize('look', [*looks,'checkup'])
def test_no_warning(look, mode):
    "As fastai's about a callback's attribute that the learner or its model has, too"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # that the precision is emulated
        learn = modes[mode](get_learner())
        for o in 'seen look runs bar start batches'.split(): setattr(learn.model, o, 0) # a callback may use such names
        learn.fit(1)
    if (look,mode)==('report','fp32'): return
    {**looks, 'checkup':lambda learn: learn.precision_checkup()}[look](learn)

def test_autocast_of_fastai():
    "fastai's own callback closes its autocast after a loss; that of a look, which it hasn't opened, it doesn't close"
    learn = get_learner(cbs=FastaiPrecision())
    assert learn.find_nonfinite().where=='nothing' and learn.mixed_precision.run
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert nested==1 # before it was raised here: 0

# --- Is it served as it was trained?

def scores(): return nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))
def as_targets(x): return TensorCategory(x.abs().sum(1).long()%4)

@pytest.mark.parametrize('loss_func,axis', [(CrossEntropyLossFlat(),-1), (nn.CrossEntropyLoss(),1), (F.cross_entropy,1),
    (LabelSmoothingCrossEntropyFlat(),-1), (MSELossFlat(),None), (nn.BCEWithLogitsLoss(),None)])
def test_axis_of_scores(loss_func, axis): assert looks_module._score_axis(SimpleNamespace(loss_func=loss_func))==axis

def test_serving():
    "In the learner's precision, with validation batches; class scores by the loss, or as the argument says"
    x,_ = numbers(64)
    learn = get_learner(scores(), as_dls(x, as_targets(x)), loss_func=CrossEntropyLossFlat()).to_bf16()
    table = learn.precision_serving()
    assert table.distance['bfloat16']<table.distance['float32'] and table.KL['int8, dynamic']>0
    assert [*learn.precision_serving(1, axis=None).columns]==['MB','distance']
    learn.to_fp32()
    assert learn.precision_serving().distance['float32']==0
    learn.dls.loaders[1] = learn.dls.valid.new(dataset=[])
    with pytest.raises(ValueError, match='no batch with targets.*dls.valid'): learn.precision_serving()
    with pytest.raises(ValueError, match='batches=0 must be'): learn.precision_serving(0)

# --- A skipped step, computed again

def skipping(name, mode, path, at=2):
    "A learner, after a fit in which the step of batch `at` was skipped, and its file"
    def _spoil(learn): learn.loss_grad.register_hook(lambda g: g*math.inf)
    learn = modes[mode](makes[name](path=path), replay=path/'nights')
    learn.fit(1, cbs=Now('before_backward', _spoil, at=at))
    file, = (path/'nights').ls()
    return learn,file

@pytest.mark.parametrize('name,mode', [pytest.param(k, o, id=f'{k}-{o}') for k,o in zip(makes, cycle([*modes][1:]))])
def test_replay(name, mode, tmp_path):
    "To the same bits, by the learner that has skipped the step and by another, and nothing of them changes"
    set_seed(3)
    learn,file = skipping(name, mode, tmp_path)
    set_seed(5)
    other = modes[mode](makes[name](path=tmp_path))
    for o in (other,learn):
        with untouched(o): found = o.replay(file)
        kept_elsewhere = name=='language_model' # its hidden state
        assert found.same!=kept_elsewhere and not found.other_tensors, str(found)
    other.fit(1)

@pytest.mark.parametrize('e', [RuntimeError('as asked'),KeyboardInterrupt()], ids=repr)
def test_interrupted_replay(e, tmp_path):
    set_seed(3)
    learn,file = skipping('plain', 'fp16', tmp_path)
    for at in (1,2): # what explains, and what compares
        calls = iter([noop]*(at-1)+[raises(e)])
        with learn.model[0].register_forward_hook(lambda *args: next(calls, noop)()):
            with untouched(learn), pytest.raises(type(e)): learn.replay(file)
    assert learn.replay(file).same

def test_no_replay_in_a_batch(tmp_path):
    learn,file = skipping('plain', 'bf16', tmp_path)
    with pytest.raises(RuntimeError, match='in the middle of a batch|inside a batch'):
        learn.fit(1, cbs=Now('after_loss', lambda learn: learn.replay(file)))
    with pytest.raises(ValueError, match='trains in float32'): get_learner().replay(file)
    with pytest.raises(ValueError, match='another model'): modes['bf16'](makes['loss_alone']()).replay(file)
