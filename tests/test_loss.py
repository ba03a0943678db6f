"What a loss may do: look at the weights, call a part of the model or all of it, train one model against another"
import pytest
from fastai.vision.gan import GANLearner
from learners import *

each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','bf16','native_fp16')))

def trained(mode, loss_func, epochs=3, **kwargs):
    "A learner and how it was made, after a few epochs with `loss_func(learn)`, in `mode` or in float32"
    learn = get_learner(**kwargs)
    learn.loss_func = loss_func(learn)
    if mode: modes[mode](learn)
    learn.fit(epochs)
    return learn

def decay(learn):
    def _loss(pred, y): return F.mse_loss(pred, y) + .1*sum((p-1).pow(2).sum() for p in learn.model.parameters())
    return _loss

def part(learn):
    def _loss(pred, y): return F.mse_loss(pred, y) + learn.model[2](torch.ones(4,16)).pow(2).mean()
    return _loss

def whole(learn):
    def _loss(pred, y): return F.mse_loss(pred, y) + F.mse_loss(pred, learn.model(torch.ones(len(pred),8)))
    return _loss

@each_mode
@pytest.mark.parametrize('loss_func', [decay,part,whole])
def test_follows_float32(loss_func, mode):
    start = flat(weights(get_learner()))
    assert apart(trained(mode, loss_func), trained(None, loss_func), start) < (.1 if 'bf16' in mode else .02)

@each_mode
def test_sees_float32(mode):
    "The loss finds the real parameters, and what it asks of them is computed in float32"
    seen,learn = [],get_learner()
    real = list(learn.model.parameters())
    def _loss(pred, y):
        seen.append([p is q for p,q in zip(learn.model.parameters(),real)])
        return 1e3*(learn.model[0].weight-1).pow(2).sum() + 0*pred.mean()
    learn.loss_func,learn.opt_func = _loss,SGD
    with torch.no_grad(): learn.model[0].weight.fill_(1.001) # bfloat16 takes this for 1
    modes[mode](learn, **dict(fp16=dict(max_loss_scale=1.), native_fp16=dict(init_scale=1.)).get(mode, {}))
    learn.fit(1, lr=1e-5)
    assert all(map(all, seen)) and len(seen)==8
    want = torch.full((16,8), 1+1e-3*(1-2e-2)**4)
    torch.testing.assert_close(learn.model[0].weight.detach(), want, rtol=0, atol=1e-6)

@pytest.mark.parametrize('use_reentrant', [False,True])
@each_mode
def test_checkpointed(mode, use_reentrant):
    "Layers that compute again in the backward pass do so as in the forward pass: weights are as without checkpoints"
    from torch.utils.checkpoint import checkpoint
    class Twice(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.body,self.head,self.again,self.dtypes = mlp()[:4],mlp()[4],again,[]
        def _body(self, x):
            x = self.body[0](x)
            self.dtypes.append(x.dtype)
            return self.body[1:](x)
        def forward(self, x):
            x.requires_grad_() # the reentrant kind needs an input that does
            return self.head(checkpoint(self._body, x, use_reentrant=use_reentrant) if self.again else self._body(x))
    learn,plain = (modes[mode](get_learner(Twice(o))) for o in (True,False))
    for o in (learn,plain): o.fit_one_cycle(1)
    assert len(learn.model.dtypes)==12 and len(plain.model.dtypes)==8 # four batches, twice, and four of validation
    assert {*learn.model.dtypes}=={*plain.model.dtypes}=={torch.bfloat16 if 'bf16' in mode else torch.float16}
    assert all(map(torch.equal, weights(learn), weights(plain)))

@each_mode
def test_gan(mode):
    "fastai's GANLearner, whose loss calls one of its two models"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(32,10, generator=g),torch.rand(32,3,4,4, generator=g)
    def make():
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(10,48), nn.Unflatten(1, (3,4,4)))
        critic = nn.Sequential(nn.Flatten(), nn.Linear(48,1), nn.Flatten(0))
        learn = GANLearner.wgan(as_dls(x, y, 8), generator, critic, opt_func=RMSProp)
        learn.remove_cb(ProgressCallback)
        learn.logger,learn.gan_trainer.show_img = noop,False
        return learn
    ref,learn = make(),modes[mode](make())
    start = flat(weights(ref))
    for o in (ref,learn): o.fit(2, 1e-3)
    assert skipped(learn)==0
    assert apart(learn, ref, start)<.1
