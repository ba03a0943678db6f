"""What a forward pass may do with its parameters and buffers, and what a skipped step puts back

Written weights, hooks, gradients of gradients, tied weights, buffers of every kind, sharded models, learners that load
in their own way."""
import pytest
from learners import *
from states import *
from fastai.learner import load_model

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','bf16','native_fp16')))

def tol(mode): return .02 if 'bf16' in mode else .003
def close(got, want, mode): assert (got-want).norm()<tol(mode)*want.norm(), ((got-want).norm(),want.norm())

def gradients(mode, model, loss_func=None, **kwargs):
    "Those of the second batch, before any step: from then on, weights are cast together. In `mode`, or in float32."
    class Look(Callback):
        order = 20
        def before_step(self):
            if not self.train_iter: raise CancelStepException
            grads.extend(p.grad.clone() for p in self.model.parameters() if p.grad is not None)
            raise CancelFitException
    learn,grads = get_learner(model, **kwargs),[]
    if loss_func: learn.loss_func = loss_func(learn)
    if mode: modes[mode](learn)
    learn.fit(1, cbs=Look())
    assert {g.dtype for g in grads}=={torch.float32}
    return flat(grads)

# --- Parameters that the forward pass writes

class Momentum(nn.Module):
    "A key encoder without gradients, which follows the query encoder, as in momentum contrast"
    def __init__(self):
        super().__init__()
        self.query,self.key = nn.Linear(8,8),nn.Linear(8,8).requires_grad_(False)
    def forward(self, x):
        if self.training:
            for a,b in zip(self.query.parameters(), self.key.parameters()): b.data = b.data*.9+a.data*.1
        return self.query(x)*self.key(x).detach()

class Bounded(nn.Module):
    "Keeps the weights of its layer small while it trains"
    def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.layer.weight.clamp_(-.2,.2)
        return self.layer(x)

class FilterNorm(nn.Module):
    "No filter of its layer has a larger norm, as in EEGNet"
    def __init__(self): super().__init__(); self.layer = nn.Conv1d(8,8,1)
    def forward(self, x):
        self.layer.weight.data = torch.renorm(self.layer.weight.data, p=2, dim=0, maxnorm=.5)
        return self.layer(x[...,None]).squeeze(-1)

class Quantized(nn.Module):
    "Rows of a buffer, which follow the inputs that they are nearest to"
    def __init__(self): super().__init__(); self.register_buffer('codebook', torch.randn(4,8))
    def forward(self, x):
        h = x.detach().float()
        nearest = torch.cdist(h, self.codebook).argmin(1)
        if self.training:
            for i in nearest.unique(): self.codebook[i].lerp_(h[nearest==i].mean(0), .2)
        return x+self.codebook[nearest]

class Generated(nn.Module):
    "Computes the weights of a layer from the batch, as hypernetworks do"
    def __init__(self): super().__init__(); self.weights = nn.Linear(8,64)
    def forward(self, x): return F.linear(x, self.weights(x.mean(0)).view(8,8))

class Perturbed(nn.Module):
    "Its part is called again with other weights"
    def __init__(self): super().__init__(); self.part = nn.Linear(8,8)
    def forward(self, x):
        first = self.part(x)
        self.part.weight.data = self.part.weight.data*2
        second = self.part(x)
        self.part.weight.data = self.part.weight.data/2
        return first-second

writes = dict(momentum=Momentum, bounded=Bounded, filter_norm=FilterNorm, quantized=Quantized, generated=Generated,
              perturbed=Perturbed)

# autocast's cache of casts, which only `to_native_*` have, doesn't see that the weights are others
native_perturbed = [(o,'perturbed') for o in modes if 'native' in o]
written = crossed(modes, writes, fast=lambda mode,_: mode in ('fp16','bf16'))
written = [o for o in written if o.values not in native_perturbed]

@pytest.mark.parametrize('mode,kind', written)
def test_written(mode, kind):
    "Weights go where they go in float32, and so do those that the forward pass writes"
    def _run(mode):
        torch.manual_seed(0)
        learn = get_learner(nn.Sequential(nn.Linear(8,8), writes[kind](), nn.Linear(8,1)), opt_func=SGD, lr=.05)
        start = flat(learn.model.state_dict().values())
        if mode: modes[mode](learn)
        learn.fit(2)
        assert_plain(learn.model)
        return flat(learn.model.state_dict().values())-start
    close(_run(mode), _run(None), mode)

@pytest.mark.parametrize('event', [o for o in in_batch if o!='before_backward'])
@pytest.mark.parametrize('mode', ['fp16','bf16'])
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
    "Hooks of parameters see one float32 gradient per parameter and batch, which carries the loss scale"
    learn = get_learner()
    hooked,accumulated = [],[]
    names = [n for n,_ in learn.model.named_parameters()]
    for n,p in learn.model.named_parameters():
        p.register_hook(lambda g, n=n: hooked.append((n,g.clone())))
        p.register_post_accumulate_grad_hook(lambda p, n=n: accumulated.append((n,p.grad.clone())))
    modes[mode](learn)
    scales,steps = [],[]
    class Look(Callback):
        order = 20
        def before_backward(self): scales.append(self.learn.mixed_precision.loss_scale)
        def before_step(self): steps.append([p.grad.clone() for p in self.model.parameters()])
    learn.fit(1, cbs=Look())
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
    close(gradients(mode, _model()), gradients(None, _model()), mode)

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
    close(gradients(mode, mlp(), loss_func), gradients(None, mlp(), loss_func), mode)

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
    close(gradients(mode, model), gradients(None, Tied()), mode)
    assert model.out.weight is model.emb.weight

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

def assign(b):
    b.data = torch.full((b.numel()+1,), 9.)
    return b

def first_row(b):
    b[0].mul_(2)
    return b

def more_entries(b):
    b.data = torch.ones(4,4).to_sparse_csr()
    return b

def double(b): return b.mul_(2)

buffers = dict( # what it is, and a function that changes it or returns another one
    replaced     = (lambda: torch.arange(4.), lambda b: b*2),
    longer       = (lambda: torch.zeros(0), lambda b: torch.cat([b,torch.ones(1)])),
    grows        = (lambda: torch.arange(4.), lambda b: b.resize_(b.numel()+1).fill_(9)),
    assigned     = (lambda: torch.arange(4.), assign),
    points       = (lambda: torch.arange(4.), lambda b: b.set_(torch.full((2,3), 9.))),
    csr          = (lambda: torch.eye(4).to_sparse_csr(), double),
    csr_pattern  = (lambda: torch.eye(4).to_sparse_csr(), more_entries),
    coo          = (lambda: torch.eye(4).to_sparse(), double),
    coo_pattern  = (lambda: torch.eye(4).to_sparse(), lambda b: b.add_(torch.ones(4,4).to_sparse())),
    expanded     = (lambda: torch.arange(3.)[None].expand(4,3), first_row),
    quantized    = (lambda: torch.quantize_per_tensor(torch.arange(4.), .1, 0, torch.qint8),
                    lambda b: b.copy_(torch.ones(4))),
    complex      = (lambda: torch.ones(4, dtype=torch.cfloat), double),
    bool         = (lambda: torch.ones(4, dtype=torch.bool), lambda b: b.logical_not_()))

class Holds(nn.Module):
    "Changes a buffer in each training batch, beside one that shares its storage if it can"
    def __init__(self, kind):
        super().__init__()
        make,self.change = buffers[kind]
        self.layer = nn.Linear(8,1)
        self.register_buffer('held', make())
        if self.held.layout is torch.strided and not self.held.is_quantized:
            self.register_buffer('same', self.held.view(self.held.shape))
    def forward(self, x):
        if self.training: self.held = self.change(self.held)
        return self.layer(x)

def dense(model): return [o.dequantize() if o.is_quantized else o.detach().to_dense().clone() for o in model.buffers()]

@pytest.mark.parametrize('kind', buffers)
def test_buffers_are_put_back(kind):
    "after a skipped step and after the user's own error, which comes out as it is"
    for error in (ZeroDivisionError,KeyboardInterrupt):
        model = Holds(kind)
        held,before = model.held,dense(model)
        learn = get_learner(model).to_bf16()
        learn.fit(1, cbs=[InfiniteAt(i) for i in range(4)])
        assert skipped(learn)==4 and model.held is held and all(map(torch.equal, dense(model), before))
        with pytest.raises(error, match="mine"): learn.fit(1, cbs=Callback(after_pred=raises(error("mine"))))
        assert model.held is held and all(map(torch.equal, dense(model), before))
        learn.fit(1)
        assert skipped(learn)==4

def test_new_buffers():
    "that a skipped batch has registered are gone if they aren't finite; others may be relied on"
    class Registers(nn.Module):
        def __init__(self): super().__init__(); self.layer,self.length = nn.Linear(8,1),0
        def forward(self, x):
            if not hasattr(self, 'mean'): self.register_buffer('mean', x.mean(0))
            if not self.length:
                self.register_buffer('table', torch.ones(8))
                self.length = 8
            return self.layer((x-self.mean)*self.table)
    learn = get_learner(Registers()).to_bf16()
    learn.fit(1, cbs=InfiniteAt(0))
    assert skipped(learn)==1 and learn.model.mean.isfinite().all()

def test_buffer_from_inference_mode():
    "Nothing can be written to it, so a copy takes its place"
    model = mlp()
    with torch.inference_mode(): model.register_buffer('table', torch.arange(3.).expand(2,3))
    learn = get_learner(model).to_bf16()
    learn.fit(1, cbs=InfiniteAt(1))
    assert skipped(learn)==1 and model.table.tolist()==[[0,1,2]]*2

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
