"Settings of the loss scale that are changed between steps: they act, as in fastai, or say what to write; own scales"
from mp_callbacks.core.loss_scale import LossScale
from learners import *

def new(call='to_fp16', **kwargs): return ask_nothing(getattr(get_learner(), call)(**kwargs))
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

def test_steps():
    "In a loop of one's own"
    steps = TrainingSteps(model := mlp(), torch.optim.SGD(model.parameters(), .01))
    steps.loss_scale = 128
    assert steps.scaling==replace(steps.initial, loss_scale=128., found=True)

# --- The scaler of `to_native_fp16`

def native(**kwargs): return fitted(new('to_native_fp16', init_scale=2.**10, **kwargs))

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
    def _new(): return ask_nothing(get_learner(path=tmp_path).to_fp16(scale))
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
    learn = fitted(get_learner().to_fp16(ByNorm(), measure=False))
    norms = log_of(learn).norm
    assert learn.mixed_precision.scaling.norm==pytest.approx(max(.9**i*o for i,o in enumerate(reversed(norms))))
    assert {*scales(learn)[1:]}<={*range(9, 14)}
