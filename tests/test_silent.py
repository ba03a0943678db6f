"Nothing is lost silently: what fastai and PyTorch pass over without a word is right here, or is said"
from learners import *

some_halves = pytest.mark.parametrize('mode', crossed([o for o in modes if o!='fp16_static'],
                                                      fast=lambda o: o in ('fp16','native_bf16')))

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

@some_halves
def test_by_hand(mode):
    "A batch outside of `one_batch` can't be undone after an exception, so training on it is refused"
    learn = fitted(in_mode(mode))
    learn.model.train()
    learn.training = True
    learn._split(learn.dls.one_batch())
    told = pytest.raises(RuntimeError, match="isn't run by Learner.one_batch.*call super")
    with stays(weights, learn), told: learn._do_one_batch()
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
    assert len(log_of(fitted(get_learner(model).to_bf16(), 1, InfiniteAt(1))))==4

def test_last_words():
    "The error comes although the fit ends with the step that was one too many"
    stop = On('after_batch', raises(CancelFitException), at=(3,))
    learn = get_learner().to_native_fp16(2.**10, max_skips=3)
    with pytest.raises(FloatingPointError, match='3 steps in a row were skipped'):
        learn.fit(1, cbs=[overflow(1,2,3),stop])

def casts(m, x):
    "As five losses of pytorch-metric-learning: the weight takes the dtype of the input"
    m.weight.data = m.weight.data.type(x.dtype)
    return F.linear(x, m.weight)

@some_halves
def test_rounded_parameter(mode):
    "is named before a step, is float32 again, and `keep` is the cure"
    def _learner(**options):
        last = Does(casts, weight=torch.randn(1,8))
        return in_mode(mode, nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), last), options)
    learn = _learner()
    told = pytest.raises(RuntimeError, match=r"turned the parameter 2.weight into torch.*keep='2'")
    with stays(lambda: weights(learn)[:-1]), told: learn.fit(1)
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32}
    assert all(p.grad is None for p in learn.model.parameters())
    _learner(keep='2').fit(1)

@some_halves
def test_rounded_in_a_cancelled_batch(mode):
    "The error doesn't wait for a backward pass"
    def _round_once(m, x):
        if m.training and m.layer.weight.dtype==torch.float32: m.layer.half()
        return m.layer(x.to(m.layer.weight.dtype)).float()
    options = dict(measure=False) if mode=='bf16' else {} # the model rounds once
    learn = in_mode(mode, Does(_round_once, layer=nn.Linear(8,1)), options)
    told = pytest.raises(RuntimeError, match='turned the parameter layer.weight into')
    with told: learn.fit(1, cbs=On('after_loss', raises(CancelBatchException)))
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32}

@some_halves
def test_encoder_with_a_mask(mode):
    "of padding, and PyTorch's defaults: trains and validates"
    def masked(m, x):
        padding = torch.arange(4).repeat(len(x), 1)>2
        return m.head(m.encoder(x[:,None].repeat(1,4,1), src_key_padding_mask=padding)[:,0])
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0., batch_first=True)
    learn = fitted(in_mode(mode, Does(masked, encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(8,1))))
    assert math.isfinite(learn.recorder.values[-1][1]) and torch.backends.mha.get_fastpath_enabled()

@pytest.mark.parametrize('forward', [staticmethod(lambda x: x*2),classmethod(lambda cls, x: x*2)], ids=type)
def test_static_forward(forward):
    "In a model, and of a model"
    kind = type('Twice', (nn.Module,), dict(forward=forward))
    model,x = nn.Sequential(nn.Linear(8,8), kind(), nn.Linear(8,8)),numbers()[0]
    want = model(x).detach()
    with half_precision(model, torch.bfloat16, kind): assert (model(x)-want).norm()<.02*want.norm()
    whole = kind()
    whole.layer = nn.Linear(8,8)
    with half_precision(whole, torch.bfloat16): assert torch.equal(whole(x), x*2)
