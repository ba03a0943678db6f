"`skipped`: what the warning and the error after skipped steps say, and errors that come in the wrong place of a batch"
import pytest
from sick_models import *

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates', 'ignore:32 steps in a row')

class SAM(Callback):
    "Moves the weights along gradients that nobody has checked"
    order = 5
    def before_step(self):
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.model.parameters()]).norm()
            for p in self.model.parameters(): p.add_(p.grad*.05/norm)

class OverflowAt(Callback):
    "The gradient of step number `at` overflows; the loss doesn't"
    order = -20
    def __init__(self, at): self.at = at
    def after_backward(self):
        if self.training and self.train_iter==self.at: self.model[0].weight.grad.fill_(math.inf)

def error(learn):
    "The error that training ends with"
    with pytest.raises(FloatingPointError) as e: learn.fit(9)
    return ' '.join(str(e.value).split())

@pytest.mark.parametrize('mode', ['fp16','native_fp16','bf16'])
@pytest.mark.parametrize('at', [0,2])
def test_steps_on_unchecked_gradients(at, mode):
    "A callback below order 10 has made weights nan: since when, and why, and no word that they are the same"
    told = error(modes[mode](learner(net(), cbs=[SAM(),OverflowAt(at)]), max_skips=9))
    assert f'since step {at}' in told and "4 of the model's parameters are inf or nan, such as 0.weight" in told
    assert f'They became so in step {at}, after its loss, though that step was skipped.' in told
    assert 'Callbacks with an order below 10 see gradients before' in told and 'give it a higher order' in told
    assert 'have not changed' not in told and 'not the cause' not in told

def test_weights_that_were_nan():
    "Nobody is blamed for what was so before"
    learn = learner(net()).to_bf16(max_skips=2)
    with torch.no_grad(): learn.model[0].weight.fill_(math.nan)
    told = error(learn)
    assert "1 of the model's parameters are inf or nan, such as 0.weight" in told
    assert told.endswith('They were so before the loss of step 0.')
    assert 'order' not in told
    learn.remove_cb(PrecisionRecorder)
    learn.mixed_precision.max_skips = 3
    assert "In which step they became so isn't known." in error(learn)

# --- In the wrong place

@pytest.mark.parametrize('call', [*calls,'to_fp32'])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_backward'])
@pytest.mark.parametrize('before', ['to_fp32','to_bf16'])
def test_precision_changes_between_batches(before, event, call):
    "Inside a batch each call says so, in float32, too; between batches it works"
    learn = getattr(get_learner(), before)()
    if call==before=='to_fp32': return learn.fit(1, cbs=Now(event, lambda learn: learn.to_fp32()))
    with pytest.raises(RuntimeError, match="The precision can't change in the middle of a batch"):
        learn.fit(1, cbs=Now(event, lambda learn: getattr(learn, call)()))
    learn.fit(2, cbs=Now('after_epoch', lambda learn: getattr(learn, call)()))

def test_names_that_a_call_adds():
    "What isn't there yet is there after a call, and the error says which; other names are those of the model"
    learn = get_learner()
    for name in ('precision_recorder','mixed_precision'):
        assert not hasattr(learn, name)
        with pytest.raises(AttributeError, match=rf'has no {name}. to_fp16\(\), to_bf16\(\)'): getattr(learn, name)
    with pytest.raises(AttributeError, match=r'has no scaler. to_native_fp16\(\) makes one when training begins'):
        get_learner().to_fp16().scaler
    with pytest.raises(AttributeError, match='has no step_stats. They are there after the first step in mixed'):
        learn.step_stats
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'recordr'"): learn.recordr
    assert hasattr(learn.to_fp16(), 'precision_recorder') and hasattr(learn, 'mixed_precision')

# --- An autograd.Function of one's own

class Swish(torch.autograd.Function):
    "Its backward pass mixes dtypes"
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x@w
    @staticmethod
    def backward(ctx, g):
        x,w = ctx.saved_tensors
        return g.float()@w.T,x.T@g

def swish(x, w): return Swish.apply(x, w)
apply = Swish.apply

class Direct(nn.Module):
    def __init__(self): super().__init__(); self.w,self.inner = nn.Parameter(torch.randn(16,16)),nn.Linear(16,16)
    def forward(self, x): return Swish.apply(self.inner(x), self.w.to(x.dtype))
class Helped(Direct):
    def forward(self, x): return swish(self.inner(x), self.w.to(x.dtype))
class Aliased(Direct):
    def forward(self, x): return apply(self.inner(x), self.w.to(x.dtype))

@has_notes
@pytest.mark.parametrize('kind', [Direct,Helped,Aliased])
@pytest.mark.parametrize('to', ['to_fp16','to_native_bf16'])
def test_backward_of_own_function(to, kind):
    "The error has a note with the module that uses it, and what the note says helps"
    learn = getattr(learner(net(kind)), to)()
    with pytest.raises(RuntimeError) as e: learn.fit(1)
    note, = e.value.__notes__
    assert note.startswith(f'In the backward pass of Swish, which 1 ({kind.__name__}) uses') and "keep='1'" in note
    getattr(learner(net(kind)), to)(keep='1').fit(1)
    model = net(kind) # without a learner
    with pytest.raises(RuntimeError) as e, half_precision(model, torch.bfloat16):
        model(torch.ones(2,8)).sum().backward()
    assert e.value.__notes__==[note]
