"`skipped`: what the warning and the error after skipped steps say, and errors that come in the wrong place of a batch"
from sick_models import *

pytestmark = pytest.mark.filterwarnings('ignore:32 steps in a row')

@torch.no_grad()
def sam(learn):
    "Moves the weights along gradients that nobody has checked"
    norm = torch.stack([p.grad.norm() for p in learn.model.parameters()]).norm()
    for p in learn.model.parameters(): p.add_(p.grad*.05/norm)

def error(learn): return ' '.join(fails(learn, 9).split())

@pytest.mark.parametrize('mode', ['fp16','native_fp16','bf16'])
@pytest.mark.parametrize('at', [0,2])
def test_steps_on_unchecked_gradients(at, mode):
    "A callback below order 10 has made weights nan: since when, and why, and no word that they are the same"
    told = error(modes[mode](learner(net(), cbs=[On('before_step', sam, 5),overflow(at)]), max_skips=9))
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

@pytest.mark.parametrize('call', [*calls,'to_fp32'])
@pytest.mark.parametrize('event', in_batch)
@pytest.mark.parametrize('before', ['to_fp32','to_fp16',slow_unless(False, 'to_native_bf16')])
def test_precision_changes_between_batches(before, event, call):
    "Inside a batch each call says so, in float32, too; between batches it works"
    learn = getattr(get_learner(), before)()
    if call==before=='to_fp32': return learn.fit(1, cbs=Now(event, lambda learn: learn.to_fp32()))
    with pytest.raises(RuntimeError, match="The precision can't change in the middle of a batch"):
        learn.fit(1, cbs=Now(event, lambda learn: getattr(learn, call)()))
    learn.fit(2, cbs=Now('after_epoch', lambda learn: getattr(learn, call)()))

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

class Direct(nn.Linear):
    def __init__(self): super().__init__(16, 16); self.w = nn.Parameter(torch.randn(16,16))
    def forward(self, x): return Swish.apply(super().forward(x), self.w.to(x.dtype))
class Helped(Direct):
    def forward(self, x): return swish(nn.Linear.forward(self, x), self.w.to(x.dtype))
class Aliased(Direct):
    def forward(self, x): return apply(nn.Linear.forward(self, x), self.w.to(x.dtype))

@has_notes
@pytest.mark.parametrize('kind', [Direct,Helped,Aliased])
@pytest.mark.parametrize('to', ['to_fp16','to_native_bf16'])
def test_backward_of_own_function(to, kind):
    "The error has a note with the module that uses it, and what the note says helps"
    note = note_of(getattr(learner(net(kind)), to)().fit, 1)
    assert note.startswith(f'In the backward pass of Swish, which 1 ({kind.__name__}) uses') and "keep='1'" in note
    getattr(learner(net(kind)), to)(keep='1').fit(1)
    def by_hand(model):
        with half_precision(model, torch.bfloat16): model(torch.ones(2,8)).sum().backward()
    assert note_of(by_hand, net(kind))==note

@pytest.mark.parametrize('order', [-5,60])
def test_error_after_the_step(order):
    "What the optimizer has made counts, and keeps its buffers"
    learn = get_learner(norm=True).to_fp16()
    with pytest.raises(RuntimeError, match='as asked'):
        learn.fit(1, cbs=On('after_step', raises(RuntimeError('as asked')), order, at=(1,)))
    assert learn.mixed_precision.state.steps==learn.model[1].num_batches_tracked==2
    assert all(p.grad is None for p in learn.model.parameters())
