"""What a forward pass changes beside its activations: parameters, buffers, states, the model itself. And who may get a gradient without the optimizer knowing"""
from collections import deque
from contextlib import contextmanager

import pytest
from learners import *
from copy import deepcopy # fastai has its own `copy`
from fastai.learner import load_model

pytestmark = pytest.mark.filterwarnings('ignore')

copying = dict(fp16=modes['fp16'], bf16=modes['bf16'], flat=lambda o: o.to_bf16(flat_master=True), **{k:(lambda o,k=k: o.to_bf16(master=k)) for k in ('split','kahan','stochastic')})
every = {**modes, **{k:copying[k] for k in ('flat','split')}}
def fused(ps, **kwargs): return OptimWrapper(ps, torch.optim.AdamW, fused=True, **kwargs)
def sgd(ps, **kwargs): return OptimWrapper(ps, torch.optim.SGD, **kwargs)

def healthy(learn):
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32} and not torch.is_autocast_enabled('cpu')
    assert not [m for m in learn.model.modules() if 'forward' in vars(m)]

# --- Parameters written by the forward pass

class Momentum(nn.Module):
    "One encoder follows another, as in momentum contrast; `write(follower, leader)` says how"
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.write,self.lead,self.follow,self.head = write,nn.Linear(8,4),nn.Linear(8,4).requires_grad_(False),nn.Linear(8,1)
    @torch.no_grad()
    def _follow(self):
        for a,b in zip(self.lead.parameters(), self.follow.parameters()): self.write(b, a)
    def forward(self, x):
        if self.training: self._follow()
        return self.head(torch.cat([self.lead(x),self.follow(x)], 1))

def assign(b, a): b.data = b.data*.9+a.data.to(b.dtype)*.1
def in_place(b, a): b.mul_(.9).add_(a, alpha=.1)
def behind(b, a): b.data.mul_(.9).add_(a.data, alpha=.1)
writes = [assign,in_place,behind]

@pytest.mark.parametrize('mode', copying)
@pytest.mark.parametrize('write', writes)
def test_written_copies(write, mode):
    "What is written into a copy would be lost: an error says so, with the name, and nothing has happened"
    learn = copying[mode](get_learner(Momentum(write)))
    before = deepcopy(learn.model.state_dict())
    with pytest.raises(RuntimeError, match=r"has changed follow.weight. But the model has a copy .* the change would be lost. Keep its module in float32, as in keep=\('follow', is_norm\), or use to_native_"): learn.fit(1)
    healthy(learn)
    if write is not behind and mode in ('fp16','bf16','flat'): assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())
    assert learn.validate()[0]>0 # it only writes when it trains

@pytest.mark.parametrize('way', ['keep','native_fp16','native_bf16','alone'])
@pytest.mark.parametrize('write', writes)
def test_ways_out(write, way):
    "It follows as in float32"
    def _run(way):
        learn = get_learner(Momentum(write))
        start = learn.model.follow.weight.clone()
        if way: modes[way](learn) if way!='keep' else learn.to_bf16(keep=('follow', is_norm))
        learn.fit(2)
        return learn.model.follow.weight-start
    want = _run(None)
    assert want.norm()>.3 and (_run(way)-want).norm()<.05*want.norm()

class Clamp(Callback):
    "Write into the model's weights while it has the copies"
    order = 50
    def __init__(self, at=0): self.at = at
    def before_batch(self):
        if self.training and self.train_iter==self.at:
            with torch.no_grad(): self.model[0].weight.clamp_(-.05,.05)

@pytest.mark.parametrize('at', [0,3])
def test_callback_writes(at):
    learn = get_learner().to_bf16()
    with pytest.raises(RuntimeError, match='or a callback before it, has changed 0.weight'): learn.fit(1, cbs=Clamp(at))
    healthy(learn)
    learn.fit(1)

@pytest.mark.parametrize('mode', ['fp16','bf16','flat'])
def test_real_weights_may_be_written(mode):
    "What a callback does to the optimizer's own parameters is no write into a copy"
    class Real(Callback):
        order = 50
        def before_batch(self):
            for p in self.opt.all_params(): p[0].data.clamp_(-.1,.1)
    learn = copying[mode](get_learner())
    learn.fit(2, cbs=Real())
    assert skipped(learn)==0

# --- As if the batch had never been

class CenterNorm(nn.Module):
    "A running mean that is a frozen parameter"
    def __init__(self, n): super().__init__(); self.mean = nn.Parameter(torch.zeros(n), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            if self.training: self.mean.lerp_(x.float().mean(0), .3)
        return x-self.mean

class Recall(nn.Module):
    "Remembers the batch before"
    def __init__(self, n): super().__init__(); self.lin,self.last,self.seen = nn.Linear(n,n),None,[0]
    def reset(self): self.last = None
    def forward(self, x):
        y = self.lin(x) if self.last is None else self.lin(x)+self.last*.5
        if self.training: self.last,self.seen = y.detach().mean(0),[self.seen[0]+1]
        return y

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb,self.inner,self.head = nn.Embedding(4, 8, max_norm=.5),nn.Sequential(nn.BatchNorm1d(8), CenterNorm(8), Recall(8)),nn.Linear(8,1)
    def forward(self, x): return self.head(self.inner(x+self.emb((x[:,0].nan_to_num(9.,9.,9.)>5).long()*3)))

def went(mode, model, bad, opt, late=True, spoil=float('inf')):
    "A learner trained on five batches, with a bad one in between if it is to be"
    x,y = numbers(80)
    batches = [*zip(x.split(16), y.split(16))]
    if bad: batches.insert(2, (torch.full((16,8), spoil), y[:16]))
    learn = every[mode](get_learner(model(), dls=DataLoaders(batches, batches[:1]), opt_func=opt, lr=1e-2))
    learn.mixed_precision.may_be_late = late
    learn.fit(1)
    assert learn.mixed_precision._steps==5+bad and learn.mixed_precision._skips==0
    if mode!='alone': assert skipped(learn)==bad
    return learn

@pytest.mark.parametrize('late', [True,False])
@pytest.mark.parametrize('opt', [sgd,fused,SGD])
@pytest.mark.parametrize('mode', ['fp16_static','bf16','native_bf16','alone','split'])
def test_no_trace(mode, opt, late):
    "An embedding with a maximal norm, a frozen parameter that moves, a module inside that remembers: bit for bit as if the batch had not been"
    a,b = (went(mode, Odd, bad, opt, late) for bad in (True,False))
    for k,v in b.model.state_dict().items(): assert torch.equal(v, a.model.state_dict()[k]), k
    assert torch.equal(a.model.inner[2].last, b.model.inner[2].last) and a.model.inner[2].seen==b.model.inner[2].seen==[5]
    assert a.model.inner[2].last.dtype==torch.float32
    healthy(a)

class Growing(nn.Module):
    "Makes its norm in the first forward pass"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin,self.head = nn.Linear(8,8),nn.Linear(8,1)
    def forward(self, x):
        if not hasattr(self, 'norm'): self.norm = nn.BatchNorm1d(8, affine=False)
        return self.head(self.norm(self.lin(x)))

@pytest.mark.parametrize('late', [True,False])
@pytest.mark.parametrize('mode', ['fp16_static','bf16','native_bf16','alone'])
def test_module_that_came(mode, late):
    a,b = (went(mode, Growing, bad, fused, late) for bad in (True,False))
    for k,v in b.model.state_dict().items(): assert torch.equal(v, a.model.state_dict()[k]), k

def test_spoilt_before():
    "A state that isn't finite when a batch begins is reset with the second step in a row that is skipped: nobody else would do it"
    class Spoil(Callback):
        def before_batch(self):
            if self.training and self.train_iter==2: self.model.inner[2].last = torch.full((8,), float('nan'))
    x,y = numbers(80)
    learn = get_learner(Odd(), dls=DataLoaders(o := [*zip(x.split(16), y.split(16))], o[:1])).to_bf16()
    learn.fit(1, cbs=Spoil())
    assert skipped(learn)==2 and learn.model.inner[2].last.isfinite().all()

# --- Who gets a gradient, and isn't the optimizer's

class Swap(Callback):
    "Another last layer in the second epoch, without the optimizer being told"
    def before_epoch(self):
        if self.epoch==1: torch.manual_seed(3); self.model[-1] = nn.Linear(16,1)

class Late(nn.Module):
    "Makes a parameter in its first forward pass"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(8,1)
    def forward(self, x):
        if not hasattr(self, 'gain'): self.gain = nn.Parameter(torch.ones(1))
        return self.lin(x)*self.gain

class Weighed(nn.Module):
    "A loss with a parameter of its own"
    def __init__(self): super().__init__(); self.s = nn.Parameter(torch.zeros(1))
    def forward(self, pred, y): return (F.mse_loss(pred, y)*torch.exp(-self.s)+self.s).squeeze()

class Buffered(nn.Module):
    "A buffer that requires a gradient"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(8,1); self.register_buffer('b', torch.ones(1, requires_grad=True))
    def forward(self, x): return self.lin(x)*self.b.to(x.dtype)

strangers = dict(swapped=(mlp,dict(cbs=Swap()),lambda o: o.model[-1].weight), made=(Late,{},lambda o: o.model.gain), loss=(mlp,dict(loss_func=Weighed),lambda o: o.loss_func.s),
    wrapped_loss=(mlp,dict(loss_func=lambda: BaseLoss(Weighed, flatten=False)),lambda o: o.loss_func.func.s), buffer=(Buffered,{},lambda o: o.model.b))

@pytest.mark.parametrize('mode', every)
@pytest.mark.parametrize('kind', strangers)
def test_strangers(kind, mode):
    "Their gradients add up as in float32, unscaled"
    make,kwargs,which = strangers[kind]
    def _grad(on):
        loss = dict(loss_func=kwargs['loss_func']()) if 'loss_func' in kwargs else {}
        learn = on(get_learner(make(), opt_func=SGD, lr=1e-3, **{**kwargs, **loss}))
        learn.fit(2)
        return which(learn).grad.float()
    want,got = _grad(noop),_grad(every[mode])
    assert (got-want).norm()<.05*want.norm(), (got,want)

# --- Events that another callback keeps from us

@contextmanager
def steps(learn):
    "How far each step went"
    res,seen = [],[flat(weights(learn))]
    class Look(Callback):
        order = 80
        def after_batch(self):
            if self.training: seen.append(flat(weights(self.learn))); res.append((seen[-1]-seen[-2]).norm().item())
    cb = Look()
    learn.add_cb(cb)
    yield res
    learn.remove_cb(cb)

@pytest.mark.parametrize('order', [-5,9.5])
@pytest.mark.parametrize('event', ['before_batch','before_backward','after_backward','before_step'])
@pytest.mark.parametrize('mode', every)
def test_stop_iteration(mode, event, order):
    "fastai ends an event where a callback raises StopIteration. The step is that of float32, or there is an error; never another step."
    class Stop(Callback):
        def go(self):
            if self.training and self.train_iter==1: raise StopIteration('that is all')
    def _run(on):
        learn,stop = on(get_learner(opt_func=SGD, lr=.05)),Stop()
        stop.order = order
        setattr(stop, event, stop.go)
        with steps(learn) as res: learn.fit(1, cbs=stop)
        return res
    want = _run(noop)
    for a,b in zip(_run(every[mode]), want, strict=True): assert abs(a-b)<.03*b

@pytest.mark.parametrize('mode', every)
def test_by_hand(mode):
    "A batch outside the loop isn't unwound, so it can't be trained on"
    learn = every[mode](get_learner())
    learn.fit(1)
    before = weights(learn)
    learn.model.train()
    learn.training = True
    learn._split(learn.dls.one_batch())
    with pytest.raises(RuntimeError, match="can't train here: it isn't inside a batch of fastai's training loop"): learn._do_one_batch()
    learn.opt.zero_grad()
    assert all(map(torch.equal, weights(learn), before))

@pytest.mark.parametrize('late', [True,False])
def test_last_words(late):
    "The error comes although the fit ends with the step that was one too many"
    class Bad(Callback):
        def after_loss(self):
            if self.training and self.iter>=1: self.learn.loss_grad = self.learn.loss_grad*float('inf')
    class Stop(Callback):
        def after_batch(self):
            if self.training and self.iter==3: raise CancelFitException
    learn = get_learner(opt_func=fused).to_native_fp16(2.**10, max_skips=3)
    learn.mixed_precision.may_be_late = late
    with pytest.raises(FloatingPointError, match='3 steps in a row have been skipped'): learn.fit(1, cbs=[Bad(),Stop()])

# --- Elsewhere

@pytest.mark.parametrize('mode', every)
def test_inference_mode_first(mode):
    "Copies that are made for a prediction are good for training"
    def _run(first):
        learn = every[mode](get_learner())
        if first:
            with torch.inference_mode(): learn.validate()
        learn.fit(2)
        learn.validate()
        return weights(learn)
    assert all(map(torch.equal, _run(True), _run(False)))

@pytest.mark.parametrize('mode', calls)
def test_own_load(mode, tmp_path):
    "A subclass that loads in its own way gets the scale back, too, after `load` as after `lr_find`"
    class Own(Learner):
        def load(self, file, device=None, **kwargs):
            if self.opt is None: self.create_opt()
            load_model(self.path/self.model_dir/f'{file}.pth', self.model, self.opt, device=device, **kwargs)
            return self
    class Bad(Callback):
        def after_loss(self):
            if self.training and self.iter in (1,2): self.learn.loss_grad = self.learn.loss_grad*float('inf')
    def _new():
        learn = get_learner(path=tmp_path)
        learn.__class__ = Own
        return getattr(learn, mode)()
    learn = _new()
    learn.fit(1, cbs=Bad())
    state = learn.mixed_precision.precision_state()
    assert state['steps']==4
    learn.save('a')
    assert _new().load('a').mixed_precision.precision_state()==state
    learn.lr_find(show_plot=False, num_it=20, end_lr=1e6)
    assert learn.mixed_precision.precision_state()==state
    later = get_learner(path=tmp_path)
    later.__class__ = Own
    assert getattr(later.load('a'), mode)().mixed_precision.precision_state()==state

@pytest.fixture
def one_process(tmp_path):
    import torch.distributed as dist
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('has no gloo')
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/rendezvous', rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()

@pytest.mark.parametrize('mode', calls)
def test_sharded(mode, one_process):
    "Each process would decide about its part of the step alone"
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import distribute_module
    whole = FullyShardedDataParallel(mlp(), device_id=torch.device('cpu'))
    for model,kind in ((whole,'FullyShardedDataParallel'), (nn.Sequential(whole,nn.ReLU()),'FullyShardedDataParallel'), (distribute_module(mlp(), init_device_mesh('cpu', (1,))),'DTensor')):
        learn = get_learner(model)
        with pytest.raises(ValueError, match=f'{kind} leaves each process only a part of the gradients, so none can tell whether to step. Use DistributedDataParallel with'): getattr(learn, mode)()
        assert not [cb for cb in learn.cbs if isinstance(cb, PrecisionCallback)]

@pytest.mark.parametrize('mode', ['native_fp16','native_bf16','alone'])
def test_partly_scripted(mode):
    "A scripted part trains, if it has no buffers that would have to be put back"
    def _learn(part): torch.manual_seed(0); return modes[mode](get_learner(nn.Sequential(nn.Linear(8,16), part, nn.Linear(16,1))))
    learn = _learn(torch.jit.trace(nn.Linear(16,16), torch.ones(2,16)))
    before = weights(learn)
    learn.fit(1)
    healthy(learn)
    assert not any(map(torch.equal, weights(learn), before))
    with pytest.raises(ValueError, match='A scripted model holds its buffers where nobody can put others in their place. Train the model before scripting it.'): _learn(torch.jit.script(nn.BatchNorm1d(16))).fit(1)

# --- No false alarms

@pytest.mark.parametrize('mode', copying)
def test_interrupted_first(mode):
    "Weights that are loaded after a first batch that was cut short, and written into the copies by us, are no forward pass's doing"
    class Stop(Callback):
        def after_pred(self):
            if self.training: raise KeyboardInterrupt
    Stop.order = -50
    learn = copying[mode](get_learner())
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Stop())
    for p in learn.model.parameters(): p.data.normal_()
    learn.fit(2)
    healthy(learn)

class Move(Callback):
    "The same numbers in another memory format, or in other memory"
    order = 50
    def __init__(self, f): self.f = f
    def before_batch(self): self.f(self.model)

@pytest.mark.parametrize('f', [lambda m: m.to(memory_format=torch.channels_last), lambda m: [setattr(p, 'data', p.data.clone()) for p in m.parameters()]], ids=['format','memory'])
def test_moved_copies(f):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (2,2,2)), nn.Conv2d(2,4,2), nn.Flatten(), nn.Linear(4,1))
    learn = get_learner(net).to_bf16()
    learn.fit(2, cbs=Move(f))
    healthy(learn)

@pytest.mark.parametrize('mode', ['fp16','bf16','native_bf16','alone'])
def test_unusual_frozen(mode):
    "A sparse one, and one that was made in inference mode"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lin,self.adj = nn.Linear(8,1),nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
            with torch.inference_mode(): self.fix = nn.Parameter(torch.ones(8), requires_grad=False)
        def forward(self, x): return self.lin(torch.sparse.mm(self.adj.float(), x.float().T).T)
    learn = modes[mode](get_learner(Net()))
    learn.fit(1)
    healthy(learn)

class Nested(nn.Module):
    "Remembers something in `where`, and can `reset` it"
    def __init__(self, where): super().__init__(); torch.manual_seed(0); self.lin,self.head,self.where = nn.Linear(8,8),nn.Linear(8,1),where; self.reset()
    def reset(self): setattr(self, self.where, deque(maxlen=1) if self.where=='queue' else torch.zeros(8) if self.where=='in_place' else None)
    def forward(self, x):
        h,y = getattr(self, self.where),self.lin(x)
        for o in h if self.where=='queue' else [h]*(h is not None): y = y+.5*o
        if self.training:
            new = y.detach().float().mean(0)
            if self.where=='queue': h.append(new)
            elif self.where=='in_place': h.copy_(new)
            else: setattr(self, self.where, new)
        return self.head(y)

@pytest.mark.parametrize('where', ['public','_private','queue','in_place'])
@pytest.mark.parametrize('mode', ['bf16','native_bf16','alone'])
def test_wherever_it_remembers(mode, where):
    a,b = (went(mode, lambda: Nested(where), bad, SGD) for bad in (True,False))
    for k,v in b.model.state_dict().items(): assert torch.equal(v, a.model.state_dict()[k]), k

def test_reset_means_something_else():
    "A gate by that name, one that asks for something, one beside a mask that is infinite, and a word list: nobody calls them"
    class Odd(nn.Module):
        def __init__(self, reset): super().__init__(); torch.manual_seed(0); self.lin,self.mask,self.words,self.called = nn.Linear(8,1),torch.full((2,2), -float('inf')),['a']*10**5,0; reset(self)
        def forward(self, x): return self.lin(x)
    def gate(o): o.reset = nn.Linear(8,8)
    def asks(o): type(o).reset = lambda self, bs: None
    def counts(o): type(o).reset = lambda self: setattr(self, 'called', self.called+1)
    class Bad(Callback):
        def after_loss(self):
            if self.training and self.iter in (1,3): self.learn.loss_grad = self.learn.loss_grad*float('inf')
    for f in (gate,asks,counts):
        learn = get_learner(nn.Sequential(type('Odd', (Odd,), {})(f))).to_bf16()
        learn.fit(1, cbs=Bad())
        assert skipped(learn)==2 and learn.model[0].called==0

def test_own_load_replaces():
    "A subclass may load what it likes how it likes: nothing is made before it is asked for"
    class Own(Learner):
        def load(self, *, name='best'): self.model,self.loaded = mlp(),name
    for on in (noop, modes['bf16']):
        learn = get_learner()
        learn.__class__ = Own
        on(learn)
        learn.load(name='x')
        assert learn.loaded=='x' and learn.opt is None
        before = weights(learn)
        learn.fit(1)
        assert not any(map(torch.equal, weights(learn), before))
