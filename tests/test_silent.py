"Nothing is lost silently: what fastai and PyTorch pass over without a word is right here, or is said"
from learners import *
from states import *

halves = [o for o in modes if o!='fp16_static']
some_halves = pytest.mark.parametrize('mode', crossed(halves, fast=lambda o: o in ('fp16','native_bf16')))

# --- A loss that is not finite while its gradients are

@some_halves
def test_infinite_loss_is_told(mode):
    """The step is made, as in PyTorch; log, summary, plot and the shown average say that its loss was infinite

    The average begins anew with the next epoch."""
    def infinite(learn): learn.loss,learn.loss_grad = learn.loss+torch.inf,learn.loss_grad+torch.inf
    learn = fitted(in_mode(mode), 2, On('after_loss', infinite, -20, (2,)))
    recorder = learn.precision_recorder
    assert [*recorder.log.index[recorder.log.bad_loss]]==[2] and not recorder.log.skipped.any()
    assert 'The loss of 1 step was not finite, though the gradients were' in recorder.summary()
    assert 'loss not finite: 1' in [o.get_label() for o in recorder.plot()[0].collections]
    assert [math.isfinite(o[0]) for o in learn.recorder.values]==[False,True]

@pytest.mark.parametrize('call', crossed(['to_fp16','to_native_fp16'], fast=lambda o: o=='to_fp16'))
def test_infinite_predictions(call):
    "The warning names the module, and `rescue` keeps it in float32"
    def _learner(**kwargs):
        model = nn.Sequential(mlp(), nn.Linear(1,1))
        nn.init.constant_(model[1].bias, 1e5) # beyond float16; gradients of an absolute error don't know that
        return getattr(get_learner(model, loss_func=L1LossFlat(), lr=1e-9), call)(**kwargs)
    learn = _learner()
    with pytest.warns(UserWarning, match='The loss of 32 steps in a row was not finite.*[Pp]recision is the cause'):
        learn.fit(9)
    assert learn.mixed_precision.state.bad_losses==sum(~learn.precision_recorder.log.skipped)>32
    learn = _learner(rescue=True)
    with pytest.warns(UserWarning, match="Kept in float32 from step"): learn.fit(9)
    assert learn.mixed_precision.state.rescued and not learn.precision_recorder.log.bad_loss.iloc[-3:].any()

# --- Learners and callbacks that do things in their own way

@some_halves
def test_by_hand(mode):
    "A batch outside of `one_batch` can't be undone after an exception, so training on it is refused"
    learn = fitted(in_mode(mode))
    before = weights(learn)
    learn.model.train()
    learn.training = True
    learn._split(learn.dls.one_batch())
    with pytest.raises(RuntimeError, match="isn't run by Learner.one_batch.*call super"): learn._do_one_batch()
    assert all(map(torch.equal, weights(learn), before))
    assert_plain(learn.model)

@some_halves
def test_missed_before_step(mode):
    "fastai takes a `StopIteration` for the end of the event, and ours don't hear of it: no step with scaled gradients"
    stop = On('before_step', raises(StopIteration('as asked')), 5)
    def run(mode):
        try: return way(in_mode(mode, opt_func=SGD, lr=1e-3), 1, stop)
        except RuntimeError: return torch.zeros(()) # to refuse is right, too
    assert run(mode).norm()<1.1*run(None).norm()

def test_names_in_the_model():
    "A model's attributes aren't taken for the learner's, of which fastai's `lr_find` and `ModelResetter` add some"
    model = mlp()
    model.lr_finder = model.model_resetter = 'mine'
    learn = get_learner(model).to_bf16()
    learn.fit(1, cbs=InfiniteAt(1))
    assert len(learn.precision_recorder.log)==4

def test_last_words():
    "The error comes although the fit ends with the step that was one too many"
    stop = On('after_batch', raises(CancelFitException), at=(3,))
    learn = get_learner().to_native_fp16(2.**10, max_skips=3)
    with pytest.raises(FloatingPointError, match='3 steps in a row were skipped'):
        learn.fit(1, cbs=[overflow(1,2,3),stop])

# --- Odd modules

class Casts(nn.Module):
    "As five losses of pytorch-metric-learning: the weight takes the dtype of the input"
    def __init__(self): super().__init__(); torch.manual_seed(1); self.weight = nn.Parameter(torch.randn(1,8))
    def forward(self, x):
        self.weight.data = self.weight.data.type(x.dtype)
        return F.linear(x, self.weight)

@some_halves
def test_rounded_parameter(mode):
    "is named before a step, is float32 again, and `keep` is the cure"
    def _learner(**options): return in_mode(mode, nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), Casts()), options)
    learn = _learner()
    before = weights(learn)[:-1]
    with pytest.raises(RuntimeError, match=r"turned the parameter 2.weight into torch.*keep='2'"): learn.fit(1)
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32} and same(weights(learn)[:-1], before)
    assert all(p.grad is None for p in learn.model.parameters())
    _learner(keep='2').fit(1)

# --- Modules of an unusual kind

class Encoder(nn.Module):
    "PyTorch's defaults, and a padding mask"
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0., batch_first=True), 2)
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        x = self.encoder(x[:,None].repeat(1,4,1), src_key_padding_mask=torch.arange(4)[None].repeat(len(x),1)>2)
        return self.head(x[:,0])

@some_halves
def test_encoder_with_a_mask(mode):
    "trains and validates"
    learn = fitted(in_mode(mode, Encoder()))
    assert math.isfinite(learn.recorder.values[-1][1]) and torch.backends.mha.get_fastpath_enabled()

class Static(nn.Module):
    @staticmethod
    def forward(x): return x*2

class OfClass(nn.Module):
    @classmethod
    def forward(cls, x): return x*2

@pytest.mark.parametrize('kind', [Static,OfClass])
def test_static_forward(kind):
    model,x = nn.Sequential(nn.Linear(8,8), kind(), nn.Linear(8,8)),numbers()[0]
    want = model(x).detach()
    with half_precision(model, torch.bfloat16, kind): assert (model(x)-want).norm()<.02*want.norm()
    class Whole(kind):
        def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    with half_precision(Whole(), torch.bfloat16) as half: assert torch.equal(half.model(x), x*2)
