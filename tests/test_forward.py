"""What a forward pass may do with its parameters and buffers, and what a skipped step puts back

Hooks, gradients of gradients, encoders that follow each other, tied weights, parameters written by the forward pass,
sharded models, learners that load in their own way."""
from contextlib import nullcontext

import pytest
from learners import *
from states import *
from fastai.learner import load_model

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','bf16','native_fp16')))
copying   = pytest.mark.parametrize('mode', ['fp16','bf16'])

def tol(mode): return .02 if 'bf16' in mode else .003
def close(got, want, mode): assert (got-want).norm()<tol(mode)*want.norm(), ((got-want).norm(),want.norm())

def first_grads(mode, model, loss_func=None, **kwargs):
    "Gradients that the first step of training `model` uses, in `mode` or in float32"
    class Look(Callback):
        order = 20
        def before_step(self):
            grads.extend(p.grad.clone() for p in self.model.parameters() if p.grad is not None)
            raise CancelFitException
    learn,grads = get_learner(model, **kwargs),[]
    if loss_func: learn.loss_func = loss_func(learn)
    if mode: modes[mode](learn)
    learn.fit(1, cbs=Look())
    assert {g.dtype for g in grads}=={torch.float32}
    return flat(grads)

# --- Parameters that the forward pass writes

class MoCo(nn.Module):
    "Momentum contrast: the key encoder follows the query encoder, by a momentum update in the forward pass"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder_q,self.encoder_k = nn.Linear(8,4),nn.Linear(8,4)
        for param_q,param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.head = nn.Linear(8,1)
    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q,param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data*.9+param_q.data*.1
    def forward(self, x):
        q = self.encoder_q(x)
        with torch.no_grad():
            if self.training: self._momentum_update_key_encoder()
            k = self.encoder_k(x)
        return self.head(torch.cat([q,k], 1))

@each_mode
def test_momentum_encoder(mode):
    "The key encoder follows, and all weights go where they go in float32"
    def _run(mode):
        learn = get_learner(MoCo(), opt_func=SGD, lr=.05)
        start = flat(weights(learn)),learn.model.encoder_k.weight.clone()
        if mode: modes[mode](learn)
        learn.fit(2)
        assert_plain(learn.model)
        return flat(weights(learn))-start[0],learn.model.encoder_k.weight-start[1]
    for got,want in zip(_run(mode), _run(None)): close(got, want, mode)

class Clamped(nn.Linear):
    "A layer that keeps its own weights small, while it trains"
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.weight.clamp_(-.2,.2)
        return super().forward(x)

def clamped():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,8), Clamped(8,1))

@copying
def test_written_copies(mode):
    "What a module writes into the copy of its own weights would be lost: an error says so, and nothing has changed"
    learn = modes[mode](get_learner(clamped()))
    before = weights(learn)
    match = "changes 1.weight, .* would be lost. Keep the module in float32 with keep='1', or use autocast alone"
    with pytest.raises(RuntimeError, match=match): learn.fit(1)
    assert_plain(learn.model)
    assert all(map(torch.equal, weights(learn), before))
    assert learn.validate()[0]>0 # it only writes when it trains

@pytest.mark.parametrize('way', ['keep','native_fp16','native_bf16'])
def test_ways_out(way):
    "The layer clamps its weights as in float32"
    def _run(way):
        learn = get_learner(clamped(), opt_func=SGD, lr=.05)
        start = flat(weights(learn))
        if way: modes[way](learn) if way!='keep' else learn.to_bf16(keep='1')
        learn.fit(2)
        return flat(weights(learn))-start
    close(_run(way), _run(None), 'bf16')

@pytest.mark.parametrize('event', [o for o in in_batch if o!='before_backward'])
@copying
def test_callback_writes(mode, event):
    "A callback may write the weights at any event: they are the real ones"
    class Clamp(Callback):
        order = 50
        def go(self):
            with torch.no_grad(): self.model[0].weight.clamp_(-.05,.05)
    def _run(mode):
        learn,cb = get_learner(opt_func=SGD, lr=.01),Clamp()
        setattr(cb, event, cb.go)
        if mode: modes[mode](learn)
        try: learn.fit(1, cbs=cb)
        except RuntimeError: return None # autograd can't go back through weights that have changed
        return flat(weights(learn))-flat(mlp().parameters())
    want,got = _run(None),_run(mode)
    if want is not None: close(got, want, mode)

# --- Gradients

@each_mode
def test_hooks(mode):
    """Hooks of parameters see one float32 gradient per parameter and batch, which carries the loss scale

    Hooks of modules see float32 parameters."""
    learn = get_learner()
    hooked,accumulated,params = [],[],[]
    names = [n for n,_ in learn.model.named_parameters()]
    for n,p in learn.model.named_parameters():
        p.register_hook(lambda g, n=n: hooked.append((n,g.clone())))
        p.register_post_accumulate_grad_hook(lambda p, n=n: accumulated.append((n,p.grad.clone())))
    for m in learn.model:
        m.register_forward_pre_hook(lambda m, args: params.extend(m.parameters()))
        m.register_forward_hook(lambda m, args, out: params.extend(m.parameters()))
    modes[mode](learn)
    scales,steps = [],[]
    class Look(Callback):
        order = 20
        def before_backward(self): scales.append(self.learn.mixed_precision.loss_scale)
        def before_step(self): steps.append([p.grad.clone() for p in self.model.parameters()])
    learn.fit(1, cbs=Look())
    assert {p.dtype for p in params}=={torch.float32} and {id(p) for p in params}=={*map(id, learn.model.parameters())}
    for seen in (hooked,accumulated):
        assert len(seen)==4*len(names) and {g.dtype for _,g in seen}=={torch.float32}
        for i,(scale,grads) in enumerate(zip(scales, steps, strict=True)):
            batch = dict(seen[i*len(names):(i+1)*len(names)])
            assert sorted(batch)==sorted(names)
            for n,g in zip(names, grads): assert torch.equal(batch[n]/scale, g)

@each_mode
def test_hook_changes_gradients(mode):
    "What a hook returns is what the step uses"
    def _model():
        res = mlp()
        res[0].weight.register_hook(lambda g: g*0)
        res[2].weight.register_hook(lambda g: g*2)
        return res
    close(first_grads(mode, _model()), first_grads(None, _model()), mode)

def gradient_penalty(learn):
    def _loss(pred, y):
        params = [*learn.model.parameters()]
        grads = torch.autograd.grad(pred.mean(), params, create_graph=True)
        assert {g.dtype for g in grads}=={torch.float32}
        return F.mse_loss(pred, y)+sum(g.pow(2).sum() for g in grads)
    return _loss

def again(learn):
    def _loss(pred, y): return F.mse_loss(pred, y)+F.mse_loss(learn.model(learn.xb[0].flip(1)), pred)
    return _loss

@pytest.mark.parametrize('loss_func', [gradient_penalty,again])
@each_mode
def test_gradients_of_a_loss(mode, loss_func):
    "A loss may ask for gradients of the real parameters, and call the model again"
    close(first_grads(mode, mlp(), loss_func), first_grads(None, mlp(), loss_func), mode)

class Tied(nn.Module):
    "An embedding whose weights are those of the last layer, and a layer that is used three times"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb,self.mid,self.out = nn.Embedding(10,8),nn.Linear(8,8),nn.Linear(8,10)
        self.out.weight = self.emb.weight
    def forward(self, x):
        x = x+self.emb(x[:,0].abs().mul(5).long().clamp(max=9))
        for _ in range(3): x = torch.tanh(self.mid(x))
        return self.out(x).mean(1, keepdim=True)

@each_mode
def test_tied(mode):
    "Weights that are tied, and modules that are used repeatedly, have the gradient of float32, and stay tied"
    model = Tied()
    close(first_grads(mode, model), first_grads(None, Tied()), mode)
    assert model.out.weight is model.emb.weight

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_calls_in_a_loop(dtype):
    "`half_precision` in a plain loop: a second call, one under `no_grad` before it, and `autograd.grad` inside"
    def _grads(on):
        model,(x,y) = mlp(),numbers()
        with half_precision(model, dtype) if on else nullcontext():
            with torch.no_grad(): target = model(x.flip(0))
            pred,other = model(x),model(x.flip(1))
            slope, = torch.autograd.grad(pred.sum(), model[0].weight, create_graph=True)
            loss = F.mse_loss(pred, y)+F.mse_loss(other, target)+slope.pow(2).mean()
            loss.backward()
        assert {p.grad.dtype for p in model.parameters()}=={loss.dtype}=={torch.float32}
        return flat(p.grad for p in model.parameters())
    close(_grads(True), _grads(False), 'bf16' if dtype==torch.bfloat16 else 'fp16')

# --- What a skipped step puts back

class Running(nn.Module):
    "Buffers that are written in place, made anew, and made late"
    def __init__(self):
        super().__init__()
        for o in ('mean','last'): self.register_buffer(o, torch.zeros(8))
        self.register_buffer('seen', torch.tensor(0), persistent=False)
        self.register_buffer('late', None)
    def forward(self, x):
        y = x-self.mean.to(x.dtype)+.5*self.last.to(x.dtype)
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), .3)
            self.last,self.seen = y.detach().float().mean(0),self.seen+1
            if not y.isfinite().all(): self.late = y.detach().float()
        return y

def running():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,8), nn.BatchNorm1d(8), Running(), nn.Linear(8,1))

def went(mode, bad, opt):
    "A learner trained on five batches, and on a bad one in between if asked for"
    x,y = numbers(80)
    batches = [*zip(x.split(16), y.split(16))]
    if bad: batches.insert(2, (torch.full((16,8), float('inf')), y[:16]))
    learn = modes[mode](get_learner(running(), dls=DataLoaders(batches, batches[:1]), opt_func=opt))
    learn.fit(1)
    assert learn.mixed_precision.state.steps==5+bad and skipped(learn)==bad
    return learn

@pytest.mark.parametrize('opt', [Adam,partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['fastai','torch'])
@each_mode
def test_no_trace(mode, opt):
    "Parameters, optimizer states and buffers are, bit for bit, as if the batch had not been"
    a,b = (went(mode, bad, opt) for bad in (True,False))
    for k,v in b.model.state_dict().items(): assert torch.equal(v, a.model.state_dict()[k]), k
    assert a.model[2].seen==b.model[2].seen==5 and a.model[2].late is None
    for p,q in zip(a.model.parameters(), b.model.parameters()):
        for k,v in b.opt.state[q].items(): assert torch.equal(torch.as_tensor(v), torch.as_tensor(a.opt.state[p][k])), k
    assert_plain(a.model)

# --- Elsewhere

@each_mode
def test_by_hand(mode):
    "A batch outside of `one_batch` can't be undone after an exception, so training on it is refused"
    learn = modes[mode](get_learner())
    learn.fit(1)
    before = weights(learn)
    learn.model.train()
    learn.training = True
    learn._split(learn.dls.one_batch())
    with pytest.raises(RuntimeError, match="isn't run by Learner.one_batch.*call super"): learn._do_one_batch()
    assert all(map(torch.equal, weights(learn), before))
    assert_plain(learn.model)

def infinite_loss(*at):
    "Of the training batches `at`, where gradients come from"
    def _infinite(cb):
        if cb.training and cb.iter in at: cb.learn.loss_grad = cb.learn.loss_grad*float('inf')
    return Callback(after_loss=_infinite)

def test_last_words():
    "The error comes although the fit ends with the step that was one too many"
    class Stop(Callback):
        def after_batch(self):
            if self.training and self.iter==3: raise CancelFitException
    learn = get_learner().to_native_fp16(2.**10, max_skips=3)
    with pytest.raises(FloatingPointError, match='3 steps in a row were skipped'):
        learn.fit(1, cbs=[infinite_loss(1, 2, 3),Stop()])

@each_mode
def test_inference_mode_first(mode):
    "A prediction in inference mode is no obstacle to training"
    def _run(first):
        learn = modes[mode](get_learner())
        if first:
            with torch.inference_mode(): learn.validate()
        learn.fit(2)
        learn.validate()
        return weights(learn)
    assert all(map(torch.equal, _run(True), _run(False)))

class Own(Learner):
    "A learner that loads in its own way"
    def load(self, file, device=None, **kwargs):
        if self.opt is None: self.create_opt()
        load_model(self.path/self.model_dir/f'{file}.pth', self.model, self.opt, device=device, **kwargs)
        return self

@pytest.mark.parametrize('mode', calls)
def test_own_load(mode, tmp_path):
    "It gets the scale back, after `load` as after `lr_find`"
    def _new():
        learn = get_learner(path=tmp_path)
        learn.__class__ = Own
        return learn
    def _state(learn): return learn.mixed_precision.state
    learn = getattr(_new(), mode)()
    learn.fit(1, cbs=infinite_loss(1, 2))
    state = _state(learn)
    assert state[1]==4
    learn.save('a')
    assert _state(getattr(_new(), mode)().load('a'))==state
    learn.lr_find(show_plot=False, num_it=20, end_lr=1e6)
    assert _state(learn)==state
    assert _state(getattr(_new().load('a'), mode)())==state

def test_own_load_replaces():
    "A subclass may load what it likes how it likes, the model as well"
    class Replaces(Learner):
        def load(self, *, name='best'): self.model,self.loaded = mlp(),name
    for on in (noop, modes['bf16']):
        learn = get_learner()
        learn.__class__ = Replaces
        on(learn)
        learn.load(name='x')
        assert learn.loaded=='x' and learn.opt is None
        before = weights(learn)
        learn.fit(1)
        assert not any(map(torch.equal, weights(learn), before))

@pytest.fixture
def one_process(tmp_path):
    import torch.distributed as dist
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('has no gloo')
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/rendezvous', rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()

@pytest.mark.parametrize('mode', calls)
def test_sharded(mode, one_process):
    "Flat shards are refused, with a way out"
    from torch.distributed.fsdp import FullyShardedDataParallel
    whole = FullyShardedDataParallel(mlp(), device_id=torch.device('cpu'))
    for model in (whole, nn.Sequential(whole, nn.ReLU())):
        learn = get_learner(model)
        match = r'FullyShardedDataParallel has flat shards .* Use to_fp32\(\) and its own mixed precision'
        with pytest.raises(ValueError, match=match): getattr(learn, mode)()
        assert not [cb for cb in learn.cbs if isinstance(cb, PrecisionCallback)]
