"Settings of the loss scale that are changed between steps: they act, as in fastai, or say what to write; own scales"
from mp_callbacks.core.loss_scale import LossScale
from mp_callbacks.core.ways import Float32
from learners import *

def new(call='to_fp16', **kwargs): return getattr(get_learner(), call)(**kwargs)
def fp16(**kwargs): return new(headroom=None, **{'max_loss_scale':2.**10, **kwargs})
def scales(learn): return [math.log2(o) for o in log_of(learn).scale]

@pytest.mark.parametrize('before', [True,False])
def test_they_act(before):
    "Before the first fit, or between two"
    learn = fp16()
    if not before: learn.fit(1)
    cb = learn.mixed_precision
    assert (cb.scale_wait,cb.div_factor,cb.max_loss_scale,cb.min_loss_scale,cb.dynamic)==(500,2.,2.**10,1.,True)
    cb.max_loss_scale,cb.loss_scale,cb.scale_wait,cb.div_factor = 2.**12,2.**6,2,4.
    learn.fit(1)
    assert scales(learn)[-4:]==[6,6,8,8] and cb.loss_scale==2.**10 and cb.scale_wait==2
    cb.max_loss_scale = 2.**5
    assert cb.loss_scale==2.**5 and cb.initial.max_loss_scale==2.**5
    assert learn.to_fp32().to_fp16().mixed_precision.scale_wait==500

def test_in_a_callback():
    "In the middle of an epoch, and saved; a found scale is searched no more"
    learn = new()
    learn.fit(1, cbs=On('after_batch', lambda learn: setattr(learn.mixed_precision, 'loss_scale', 128), at=[0]))
    assert scales(learn)==[10,7,7,7] and learn.opt.hypers[0]['mp_loss_scale']==128
    learn = new()
    learn.mixed_precision.loss_scale = 128
    assert set(scales(fitted(learn)))=={7}

@pytest.mark.parametrize('name,value,text', [
    ('scale_wait',0,'scale_wait=0 must be an int, at least 1'), ('div_factor',1.,'div_factor=1.0 must be a finite'),
    ('loss_scale',-1,'loss_scale=-1 must be a number'), ('min_loss_scale',2.**30,'min_loss_scale=.* is above'),
    ('dynamic',False,r'dynamic=False can.t be set between steps. Use learn.to_fp16\(loss_scale=1024, dynamic=False\)')])
def test_refused(name, value, text):
    "With the name that was set, and nothing has changed"
    cb = fp16().mixed_precision
    with stays(lambda: [cb.scaling,cb.initial]), pytest.raises(ValueError, match=text): setattr(cb, name, value)

constant = [('to_fp16',dict(dynamic=False)), ('to_bf16',{}), ('to_fp8',dict(emulate=True))]
@pytest.mark.parametrize('call,kwargs', constant)
def test_static(call, kwargs):
    "A constant scale has no such settings"
    cb = new(call, **kwargs).mixed_precision
    with pytest.raises(ValueError, match=r'scale_wait=3 has no effect on StaticLossScale.*to_fp16\(scale_wait=3\)'):
        cb.scale_wait = 3
    cb.loss_scale = 64
    assert cb.loss_scale==64 and cb.dynamic is False and cb.scale_wait is None

# --- The scaler of `to_native_fp16`

def native(**kwargs): return fitted(new('to_native_fp16', init_scale=2.**10, **kwargs))

def test_scaler_of_a_constant_scale():
    "It shows the factors of a scale that never grows"
    s = fitted(new('to_native_fp16', init_scale=StaticLossScale(8.))).scaler
    assert (s.get_scale(),s.get_growth_factor(),s.get_backoff_factor())==(8.,2.,.5)

def test_scaler_shows_and_acts():
    "What is set there counts, in this fit and the next"
    learn = native()
    s,cb = learn.scaler,learn.mixed_precision
    assert isinstance(s, torch.amp.GradScaler) and (s.get_scale(),s.get_growth_interval())==(2.**10,2000)
    s.set_growth_interval(2); s.set_growth_factor(4.); s.set_backoff_factor(.25)
    assert (cb.growth_interval,cb.growth_factor,cb.backoff_factor)==(2,4.,.25)
    assert (s.get_growth_interval(),s.get_growth_factor(),s.get_backoff_factor())==(2,4.,.25)
    learn.fit(1, cbs=overflow(3))
    assert scales(learn)[4:]==[10,12,12,14] and learn.scaler.get_scale()==2.**12
    assert learn.scaler.get_growth_interval()==2
    learn.fit(1, cbs=On('after_batch', lambda learn: learn.scaler.update(2.**5), at=[0]))
    assert scales(learn)[-3]==5

def test_scaler_loads():
    "A state, such as of a run in fastai"
    d = torch.amp.GradScaler('cpu', growth_interval=3)
    d.load_state_dict(dict(d.state_dict(), scale=2.**7, _growth_tracker=2))
    learn = native()
    learn.scaler.load_state_dict(d.state_dict())
    assert learn.mixed_precision.scaling==DynamicLossScale(2.**7, counter=2, period=3, backoff=.5)
    assert learn.scaler.state_dict()==d.state_dict()
    assert fitted(learn).scaler.get_growth_interval()==3
    other = deepcopy(learn)
    other.scaler.set_growth_interval(7)
    assert learn.mixed_precision.growth_interval==3 and other.mixed_precision.growth_interval==7

def test_scaler_of_a_preset():
    assert native().scaler.get_growth_interval()==2000
    learn = fitted(new('to_native_fp16', init_scale='keras'))
    assert learn.scaler.get_scale()==2.**15

@pytest.mark.parametrize('at', ['between fits','in a fit'])
def test_another_scaler(at):
    "Has no effect, and an error says what to write"
    learn,other = native(),torch.amp.GradScaler('cpu', 128., growth_interval=7)
    cb = On('after_batch', lambda learn: setattr(learn, 'scaler', other), at=[0]) if at=='in a fit' else None
    if cb is None: learn.scaler = other
    way = r'learn.to_native_fp16\(init_scale=128, growth_factor=2, backoff_factor=0.5, growth_interval=7\)'
    with pytest.raises(ValueError, match=f'learn.scaler is another.*{way}'): learn.fit(1, cbs=cb)
    assert_plain(learn.model)
    assert fitted(learn.to_native_fp16()).scaler.get_scale()==65536

def test_no_scale():
    "Without a scale it does nothing, as in PyTorch"
    for learn in (fitted(new('to_native_bf16')),fitted(new('to_native_fp16', enabled=False))):
        learn.scaler.set_growth_interval(5)
        learn.scaler.load_state_dict({})
        assert learn.scaler.get_scale()==1 and fitted(learn).mixed_precision.loss_scale==1

# --- Loss scales of one's own

class Halves(LossScale):
    "No dataclass, and without bounds"
    state_fields = 'loss_scale',
    def __init__(self, loss_scale): self.loss_scale = loss_scale
    def adjust(self, finite, amax=None): return Halves(self.loss_scale/2)

@dataclass(frozen=True)
class ByNorm(LossScale):
    "As large as the norms of the last gradients allow"
    loss_scale:float = 2.**10
    norm:float = 0.
    state_fields = 'loss_scale','norm'
    def after(self, stats):
        if not stats.finite: return replace(self, loss_scale=self.loss_scale/2)
        norm = max(.9*self.norm, stats.norm)
        return replace(self, norm=norm, loss_scale=2.**math.floor(math.log2(2.**12/norm)))

@pytest.mark.parametrize('scale', [Halves(2.**20),ByNorm()], ids=['class','dataclass'])
def test_own_scale(scale, tmp_path):
    "Trains, is saved and loaded, in a learner and in steps; its settings can't be set"
    def _new(): return get_learner(path=tmp_path).to_fp16(scale)
    learn = fitted(_new(), 1, overflow(1))
    assert learn.mixed_precision.scaling.state_dict()!=scale.state_dict() and type(scale).__name__ in repr(scale)
    learn.save('m')
    other = _new().load('m')
    assert other.mixed_precision.scaling.state_dict()==learn.mixed_precision.scaling.state_dict()
    assert other.mixed_precision.dynamic is False and 'loss scale' in str(learn.precision_checkup())
    fitted(learn); fitted(other)
    assert same_weights(learn, other) and learn.mixed_precision.loss_scale==other.mixed_precision.loss_scale
    with pytest.raises(ValueError, match='scale_wait=3 has no effect on'): learn.mixed_precision.scale_wait = 3

def test_after():
    "Gets the norm of each step"
    learn = fitted(get_learner().to_fp16(ByNorm()))
    norms = log_of(learn).norm
    assert learn.mixed_precision.scaling.norm==pytest.approx(max(.9**i*o for i,o in enumerate(reversed(norms))))
    assert {*scales(learn)[1:]}<={*range(9, 14)}

# --- What is set on the callbacks

def in_float32(learn):
    "The modules that compute in float32"
    table = learn.mixed_precision.policy()
    return [*table.module[table.compute=='float32']]

@pytest.mark.parametrize('call,cb', [
    ('to_bf16','mixed_precision'), ('to_bf16','model_to_half'), ('to_fp16','mixed_precision'),
    ('to_native_bf16','mixed_precision')])
def test_keep_acts(call, cb):
    "Between fits; a bad value is an error, and changes nothing"
    learn = fitted(new(call, keep='0'))
    cb = getattr(learn, cb)
    for bad in ('nope',3):
        with stays(lambda: cb.keep), pytest.raises((ValueError,TypeError), match='keep'): cb.keep = bad
    cb.keep = ['2','4']
    assert cb.keep==['2','4'] and in_float32(fitted(learn))==['2','4']

class Keep(Callback):
    "Sets `keep` at an event of a batch, and sees which dtypes layer 2 then returns"
    def __init__(self, event, at): setattr(self, event, self.set); self.at = at
    def before_fit(self):
        self.seen = []
        self.hook = self.model[2].register_forward_hook(lambda m, args, out: self.seen.append(out.dtype))
    def set(self):
        if self.training and self.train_iter==self.at: self.learn.mixed_precision.keep = '2'
    def after_fit(self): self.hook.remove()

@pytest.mark.parametrize('event,at,half_steps', [('before_batch',1,1), ('after_pred',1,2), ('after_step',1,2)])
def test_keep_acts_from_the_next_step(event, at, half_steps):
    learn = fitted(get_learner(cbs=(keep := Keep(event, at))).to_bf16())
    n = len(learn.dls.train)
    assert keep.seen[:n]==[bf16]*half_steps+[f32]*(n-half_steps)

def test_keep_acts_on_a_whole_step():
    "If it is set while batches are gathered, these are of one step"
    learn = get_learner(cbs=[keep := Keep('before_batch', 1), GradientAccumulation(32)]).to_bf16()
    learn.fit(1)
    assert keep.seen[:4]==[bf16,bf16,f32,f32]

def test_way_and_measure_act():
    learn = get_learner().to_bf16(measure=False)
    learn.fit(1)
    assert learn.mixed_precision.half.measured is None
    learn.mixed_precision.measure = True
    learn.fit(1)
    assert learn.mixed_precision.half.measured.passes
    learn.mixed_precision.way = lambda name, m: Float32('mine') if name=='2' else None
    learn.fit(1)
    assert learn.mixed_precision.policy().set_index('module').why['2']=='mine'
    for name,value in [('measure',3),('way',3)]:
        with pytest.raises(TypeError, match=f'{name}=3'): setattr(learn.mixed_precision, name, value)

def test_rescued_modules_stay():
    learn = fitted(new('to_bf16'))
    cb = learn.mixed_precision
    cb.state = cb.state._replace(rescued=(('0',0),))
    cb.keep = '2'
    assert in_float32(fitted(learn))==['0','2']

@pytest.mark.parametrize('call,cb,name,text', [
    ('to_fp16','mixed_precision','headroom',r'learn\.to_fp16\(headroom=…\)'),
    ('to_bf16','mixed_precision','headroom',r'learn\.to_fp16\(headroom=…\)'),
    ('to_bf16','mixed_precision','foo','MixedPrecision has no foo that can be set. It has keep, way, measure, '),
    ('to_bf16','model_to_half','foo','ModelToHalf has no foo that can be set. It has keep, way, measure.'),
    ('to_bf16','model_to_half','dtype',r'to_fp16\(\) or to_bf16\(\)'),
    ('to_bf16','model_to_half','fp8',r'learn\.to_fp8\(\)'),
    ('to_native_bf16','mixed_precision','way',r'learn\.to_bf16\(way=…\)'),
    ('to_native_fp16','mixed_precision','measure',r'learn\.to_fp16\(measure=…\)'),
    ('to_fp16','mixed_precision','first_scale','MixedPrecision has no first_scale that can be set'),
    ('to_native_fp16','mixed_precision','enabled',r'learn\.to_native_fp16\(enabled=…\)'),
    ('to_native_fp16','mixed_precision','foo','It has .*growth_interval, .*clip')])
def test_nobody_would_read(call, cb, name, text):
    "Is refused"
    cb = getattr(new(call), cb)
    with stays(lambda: {*vars(cb)}), pytest.raises(AttributeError, match=text): setattr(cb, name, 3)

def named_half(name, value):
    half = half_precision(mlp(), bf16)
    setattr(half, name, value)
    with half: pass

def named_steps(name, value, cls=TrainingSteps, **kwargs):
    model = mlp()
    steps = cls(model, torch.optim.SGD(model.parameters(), .1), bf16, **kwargs)
    setattr(steps, name, value)
    with steps.batch(*[o[:16] for o in numbers()]): pass

def named_recorder(name, value):
    learn = get_learner(cbs=PrecisionRecorder()).to_bf16()
    setattr(learn.precision_recorder, name, value)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)

@pytest.mark.parametrize('new, name, text', [
    (named_half,'keep',r"keep='2' can't be set.* half = half\.replace\(keep=…\)"),
    (named_half,'dtype',r"dtype='2' can't be set"),
    (named_half,'measure',r'half_precision has no measure that can be set\. Make another: half = half\.replace\(…\)'),
    (named_half,'foo',r'half_precision has no foo that can be set'),
    (named_recorder,'foo',r'PrecisionRecorder has no foo that can be set\. It has columns, tensors and log_tensors')])
def test_nobody_would_read_in_a_loop(new, name, text):
    "Is refused at once, or in the next batch or fit"
    with pytest.raises(AttributeError, match=text): new(name, '2')

def test_of_another_version():
    "What was pickled without the names that may be set refuses nothing, and keeps what it has"
    learn = get_learner(cbs=PrecisionRecorder()).to_bf16()
    vars(learn.precision_recorder).pop('_known')
    steps = TrainingSteps(model := mlp(), torch.optim.SGD(model.parameters(), .1), bf16)
    vars(steps).pop('_known')
    with steps.batch(*numbers(16)): pass
    assert steps.clip is None and len(log_of(fitted(learn)))==len(learn.dls.train)

def test_others_may_set_in_a_loop():
    "What is read, and anything in a subclass"
    class Mine(TrainingSteps): pass
    named_steps('clip', .5)
    named_steps('foo', 1, Mine)
    named_steps('compute_loss', mse_of)
    named_steps('make', noop) # as mocks do
    named_recorder('columns', True)
    named_recorder('after_epoch', noop)

def test_others_may_set():
    "What fastai sets and reads, events, and anything in a subclass"
    class Mine(NativeMixedPrecision):
        def __init__(self): super().__init__(dtype=bf16); self.mine = 1
    learn = get_learner(cbs=Mine())
    learn.mixed_precision.foo = 2
    learn.mixed_precision.keep = '2'
    learn.fit(1)
    assert (learn.mixed_precision.mine,learn.mixed_precision.foo)==(1,2) and in_float32(learn)==['2']
    learn,seen = get_learner().to_bf16(),[]
    for cb in (learn.mixed_precision,learn.model_to_half):
        cb.run = True
        cb.order = cb.order
        cb.after_fit = lambda: seen.append(1)
    learn.fit(1)
    assert seen==[1,1]

@pytest.mark.parametrize('name', ['keep','way','measure'])
def test_without_a_learner(name):
    "A callback of which no learner knows yet has no `ModelToHalf` to set it on"
    with pytest.raises(AttributeError, match=rf'Use learn.to_fp16\({name}=…\)'): setattr(MixedPrecision(), name, ())
