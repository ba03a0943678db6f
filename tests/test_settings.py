"Loss scales of one's own, and what can be set in a loop; what a learner's callbacks take: callback.ipynb"
from mp_callbacks.core.loss_scale import LossScale
from learners import *

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
    assert {*log_of(learn).scale[1:]}<={2.**i for i in range(9, 14)}

# --- What is set on the callbacks

def in_float32(learn):
    "The modules that compute in float32"
    table = learn.mixed_precision.policy()
    return [*table.module[table.compute=='float32']]

def test_rescued_modules_stay():
    learn = fitted(get_learner().to_bf16())
    cb = learn.mixed_precision
    cb.state = cb.state._replace(rescued=(('0',0),))
    cb.keep = '2'
    assert in_float32(fitted(learn))==['0','2']

def named_half(name, value):
    half = half_precision(mlp(), bf16)
    setattr(half, name, value)
    with half: pass

def named_steps(name, value, cls=TrainingSteps, **kwargs):
    model = mlp()
    steps = cls(model, torch.optim.SGD(model.parameters(), .1), bf16, **kwargs)
    setattr(steps, name, value)
    with steps.batch(*[o[:16] for o in numbers()]): pass

@pytest.mark.parametrize('new, name, text', [
    (named_half,'keep',r"keep='2' can't be set.* half = half\.replace\(keep=…\)"),
    (named_half,'dtype',r"dtype='2' can't be set"),
    (named_half,'measure',r'half_precision has no measure that can be set\. Make another: half = half\.replace\(…\)'),
    (named_half,'foo',r'half_precision has no foo that can be set')])
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
