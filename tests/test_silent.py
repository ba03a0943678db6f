"What used to be wrong without a message: each is right now, or is said"
import inspect,random
from functools import partial

import pytest
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')
halves = [o for o in modes if o!='fp16_static']
scaled = [o for o in modes if 'fp16' in o]

# --- A loss that is not finite while its gradients are

class InfiniteLoss(Callback):
    "The loss is infinite in the training batches `at`; the gradients aren't"
    order = -20
    def __init__(self, *at): self.at = at
    def after_loss(self):
        if self.training and self.train_iter in self.at:
            self.learn.loss,self.learn.loss_grad = self.loss+torch.inf,self.loss_grad+torch.inf

@pytest.mark.parametrize('mode', modes)
def test_infinite_loss_is_told(mode):
    """The step is made, as in PyTorch; log, summary, plot and the shown average say that its loss was infinite

    The average begins anew with the next epoch."""
    learn = modes[mode](get_learner())
    learn.fit(2, cbs=InfiniteLoss(2))
    recorder = learn.precision_recorder
    assert [*recorder.log.index[recorder.log.bad_loss]]==[2] and not recorder.log.skipped.any()
    assert 'The loss of 1 step was not finite, though the gradients were' in recorder.summary()
    assert 'loss not finite: 1' in [o.get_label() for o in recorder.plot()[0].collections]
    assert [math.isfinite(o[0]) for o in learn.recorder.values]==[False,True]

@pytest.mark.parametrize('mode', halves)
def test_many_infinite_losses(mode):
    "A warning after 32 in a row"
    learn = modes[mode](get_learner())
    with pytest.warns(UserWarning, match='The loss of 32 steps in a row was not finite, though their gradients were'):
        learn.fit(9, cbs=InfiniteLoss(*range(100)))
    assert learn.mixed_precision.state.bad_losses==36 and not learn.precision_recorder.log.skipped.any()

@pytest.mark.parametrize('call', ['to_fp16','to_native_fp16'])
def test_infinite_predictions(call):
    "The warning names the module, and `rescue` keeps it in float32"
    def _learner():
        model = nn.Sequential(mlp(), nn.Linear(1,1))
        nn.init.constant_(model[1].bias, 1e5) # beyond float16; gradients of an absolute error don't know that
        return get_learner(model, loss_func=L1LossFlat(), lr=1e-9)
    learn = getattr(_learner(), call)()
    with pytest.warns(UserWarning, match='The loss of 32 steps in a row was not finite.*[Pp]recision is the cause'):
        learn.fit(9)
    learn = getattr(_learner(), call)(rescue=True)
    with pytest.warns(UserWarning, match="Kept in float32 from step"): learn.fit(12)
    assert learn.mixed_precision.state.rescued and not learn.precision_recorder.log.bad_loss.iloc[-4:].any()

# --- Gradients that carry the loss scale

@pytest.mark.parametrize('mode', modes)
def test_parameters_of_the_loss(mode):
    "train as in float32"
    def _weight(mode):
        learn = get_learner(loss_func=ScaledLoss(), cbs=StepLoss())
        if mode: modes[mode](learn)
        learn.fit(3)
        return learn.loss_func.w.item()
    assert _weight(mode)==pytest.approx(_weight(None), rel=.03)

class FlatSGD(torch.optim.SGD):
    "Gradients are views of one buffer, which `zero_grad` sets to zero and `step` steps on"
    def __init__(self, params, lr=.05):
        params = [*params]
        super().__init__(params, lr=lr)
        self.flat = torch.zeros(sum(p.numel() for p in params))
        for p,g in zip(params, self.flat.split([p.numel() for p in params])): p.grad = g.view_as(p)
    def zero_grad(self, set_to_none=False): self.flat.zero_()
    @torch.no_grad()
    def step(self):
        for o in self.param_groups:
            for p,g in zip(o['params'], self.flat.split([p.numel() for p in o['params']])): p -= o['lr']*g.view_as(p)

@pytest.mark.parametrize('mode', modes)
def test_gradients_in_one_buffer(mode):
    "stay there, also after a skipped step"
    def _learner(): return get_learner(opt_func=partial(OptimWrapper, opt=FlatSGD), lr=.05)
    learn,full = modes[mode](_learner()),_learner()
    start = flat(weights(learn))
    for o in (learn,full): o.fit(4)
    assert apart(learn, full, start)<.05

# --- A backward pass of the learner's class

class Retains(Learner):
    def _backward(self): self.loss_grad.backward(retain_graph=True)

@pytest.mark.parametrize('mode', scaled)
def test_own_backward(mode):
    "of a subclass of `Learner` has the loss scale: small gradients arrive"
    def _grads(cls):
        learn = cls(get_dls(), mlp(), loss_func=lambda pred,y: 1e-7*F.mse_loss(pred, y), lr=1e-2)
        learn.logger,learn.create_mbar = noop,False
        learn.remove_cbs([o for o in learn.cbs if isinstance(o, ProgressCallback)])
        modes[mode](learn).fit(1)
        return learn.precision_recorder.log.norm.tolist()
    assert _grads(Retains)==_grads(Learner)

# --- Parameters in half precision

class Casts(nn.Module):
    "As five losses of pytorch-metric-learning: the weight takes the dtype of the input"
    def __init__(self): super().__init__(); torch.manual_seed(1); self.weight = nn.Parameter(torch.randn(1,8))
    def forward(self, x):
        self.weight.data = self.weight.data.type(x.dtype)
        return F.linear(x, self.weight)

@pytest.mark.parametrize('mode', halves)
def test_rounded_parameter(mode):
    "is named before a step, is float32 again, and `keep` is the cure"
    def _learner(): return get_learner(nn.Sequential(nn.Linear(8,8), nn.Linear(8,8), Casts()))
    learn = modes[mode](_learner())
    with pytest.raises(RuntimeError, match=r"turned the parameter 2.weight into torch.*keep='2'"): learn.fit(1)
    assert {p.dtype for p in learn.model.parameters()}=={torch.float32}
    assert all(p.grad is None for p in learn.model.parameters())
    modes[mode](_learner(), keep='2').fit(1)

# --- What a model keeps from batch to batch

class Keeps(nn.Module):
    "Its next call uses what it has kept, in one of many places"
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.kind,self.inner,self.outer = kind,nn.Linear(16,8),nn.Linear(8,1)
        self.table = torch.ones(1, dtype=torch.bfloat16) # its author wants it so
        self.register_buffer('scale', torch.ones(1, dtype=torch.float16))
        if kind=='buffer': self.register_buffer('h', torch.zeros(16,8))
        elif kind=='list': self.h = [(torch.zeros(16,8),0)]
        elif kind=='dict': self.h = dict(last=[torch.zeros(16,8)])
        elif kind!='later': self.h = torch.zeros(16,8)
        self.seen = getattr(self, 'h', None) # the same list or dict
    def kept(self):
        if self.kind=='later' and not hasattr(self, 'h'): return torch.zeros(16,8)
        if self.kind=='list': return self.h[0][0]
        return self.h['last'][0] if self.kind=='dict' else self.h
    def keep(self, h):
        if self.kind=='later' and not hasattr(self, 'h'): self.register_buffer('h', h)
        elif self.kind=='list': self.h[0] = h,1
        elif self.kind=='dict': self.h['last'][0] = h
        else: self.h = h
    def forward(self, x):
        h = self.inner(torch.cat([x,self.kept()], 1)).tanh()
        if self.training: self.keep(h.detach())
        return self.outer(h)

class Float32(Callback):
    "What the model keeps is float32 at the events, and so is what is saved"
    order = 80
    def look(self):
        assert self.model.kept().dtype==torch.float32
        assert {k for k,o in self.model.state_dict().items() if o.dtype!=torch.float32}=={'scale'}
    after_pred = after_loss = after_step = after_batch = after_train = after_validate = after_fit = look

kinds = 'attribute buffer later list dict'.split()

@pytest.mark.parametrize('mode,kind', crossed(halves, kinds, fast=lambda mode,kind: mode=='bf16' or kind=='attribute'))
def test_state_is_float32(mode, kind, tmp_path):
    "between batches and after the fit, so that predictions, `to_fp32` and checkpoints are float32"
    learn = modes[mode](get_learner(Keeps(kind), path=tmp_path), clip=1.)
    learn.fit(2, cbs=Float32())
    model = learn.model
    if kind in ('list','dict'): assert model.seen is model.h
    assert model.table.dtype==torch.bfloat16
    assert learn.model(numbers(16)[0]).dtype==torch.float32
    file = learn.save('kept')
    with torch.serialization.safe_globals([L]): assert torch.load(file)['model']['outer.bias'].dtype==torch.float32
    if kind!='later': get_learner(Keeps(kind), path=tmp_path, opt_func=learn.opt_func).to_fp32().load('kept').fit(1)
    learn.to_fp32().fit(1)
    assert math.isfinite(learn.recorder.values[-1][1])

@pytest.mark.parametrize('copies', [True,False])
@pytest.mark.parametrize('kind', kinds)
def test_state_after_a_with(copies, kind):
    model,x = Keeps(kind),numbers(16)[0]
    half = half_precision(model, torch.bfloat16, copies=copies)
    try:
        with half:
            model(x)
            raise ZeroDivisionError
    except ZeroDivisionError: pass
    assert model.kept().dtype==torch.float32 and model.kept().any() and model.table.dtype==torch.bfloat16
    assert model(x).dtype==torch.float32

def test_kept_for_the_loss():
    "What a module keeps for the loss is float32 there, and gradients lead through it"
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer,self.log = nn.Linear(8,1),nn.Linear(8,1)
        def forward(self, x):
            self.kept = self.log(x)
            return self.layer(x)
    learn = get_learner(Penalized()).to_fp16()
    learn.loss_func = lambda pred,y: F.mse_loss(pred, y)+(learn.model.kept+1e5).mean()*1e-5 # float16 ends at 65504
    learn.fit(1)
    assert skipped(learn)==0 and not torch.equal(learn.model.log.weight, Penalized().log.weight)
    assert math.isfinite(learn.recorder.values[-1][0])

# --- A model that grows

class Grows(Callback):
    "Appends a block to the model before or after the training batch number `at`, and lets the optimizer train it"
    order = -30
    def __init__(self, event, at):
        self.at,self.run_valid = at,False
        setattr(self, event, self.grow)
    def grow(self):
        if self.learn.train_iter!=self.at or len(self.model)>5: return
        self.block = nn.Sequential(nn.Linear(16,16), nn.BatchNorm1d(16), nn.GELU())
        self.model.insert(4, self.block)
        self.block[1].register_forward_hook(lambda module, args, out: self.dtypes.add(out.dtype))
        self.opt.opt.add_param_group(dict(params=[*self.block.parameters()], lr=1e-2))
        self.dtypes = set()
    def after_step(self):
        if not self.learn.step_stats.finite: self.after_skip = [o.clone() for o in self.block.buffers()]

growing = [('before_epoch',4,1), ('before_train',4,1), ('before_batch',4,1), ('after_batch',3,1), ('before_batch',5,2),
           ('after_batch',4,2)]

@pytest.mark.parametrize('mode,when', crossed(halves, growing, fast=lambda mode,when: mode=='bf16'))
def test_grown_block(mode, when):
    "is put back after a skipped step, and `keep` holds for it"
    event,at,accumulated = when
    learn = modes[mode](get_learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD)), keep=nn.BatchNorm1d)
    cb = Grows(event, at)
    learn.fit(2, cbs=[cb, InfiniteAt(3+accumulated), GradientAccumulation(16*accumulated)])
    assert skipped(learn)==1 and {*cb.dtypes}=={torch.float32}
    assert all(map(torch.equal, cb.after_skip, nn.BatchNorm1d(16).buffers()))
    assert all(o.isfinite().all() for o in cb.block.buffers()) and cb.block[1].running_mean.any()
    policy = learn.mixed_precision.policy().set_index('module')
    assert policy.loc['4.1','why']=='keep' and policy.loc['4.0','compute']!='float32'

# --- Casts for a module in float32 stand in for what it was given

class Pops(nn.Module):
    "Takes from a list and writes into a dict, as decoders do with skip connections"
    def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    def forward(self, skips, seen):
        x = self.layer(skips.pop())
        seen['out'],seen['n'] = x,seen['n']+1
        return x

class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.down,self.up,self.last = nn.Linear(8,8),Pops(),Pops()
    def forward(self, x):
        skips,seen = [x,self.down(x)],dict(n=0, x=self.down(x))
        self.up(skips, seen)
        y = seen['out']
        skips.append(y)
        self.last(skips, seen)
        self.left = len(skips),seen['n'],[*seen]
        return y+seen['out']+skips[0]

@pytest.mark.parametrize('copies', [True,False])
@pytest.mark.parametrize('keep', ['up','last',('up','last')])
def test_containers_are_written(keep, copies):
    "What a module in float32 takes out of them or puts into them arrives"
    model,x = Skips(),numbers()[0]
    want,left = model(x).detach(),model.left
    with half_precision(model, torch.bfloat16, keep, copies): got = model(x)
    assert model.left==left and (got-want).norm()<.02*want.norm()

class Merges(nn.Module):
    "As fastai's `MergeLayer`"
    def forward(self, x): return x+x.orig

@pytest.mark.parametrize('keep', [Merges, nn.GELU])
def test_attributes_of_tensors(keep):
    "go on through a cast"
    class Remembers(nn.Module):
        def __init__(self): super().__init__(); self.body,self.act,self.end = nn.Linear(8,8),nn.GELU(),Merges()
        def forward(self, x):
            y = self.body(x)
            y.orig = y
            return self.end(y)
    torch.manual_seed(1)
    model,x = Remembers(),numbers()[0]
    want = model(x).detach()
    with half_precision(model, torch.bfloat16, keep): got = model(x)
    assert (got-want).norm()<.02*want.norm()

# --- Loud, in ordinary code

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

@pytest.mark.parametrize('mode', halves)
def test_encoder_with_a_mask(mode):
    "trains and validates"
    learn = modes[mode](get_learner(Encoder()))
    learn.fit(1)
    assert math.isfinite(learn.recorder.values[-1][1]) and torch.backends.mha.get_fastpath_enabled()

class Static(nn.Module):
    @staticmethod
    def forward(x): return x*2

class OfClass(nn.Module):
    @classmethod
    def forward(cls, x): return x*2

class Chosen(nn.Module):
    @property
    def forward(self): return self.double
    def double(self, x): return x*2

@pytest.mark.parametrize('copies', [True,False])
@pytest.mark.parametrize('kind', [Static,OfClass,Chosen])
def test_kinds_of_forward(kind, copies):
    model,x = nn.Sequential(nn.Linear(8,8), kind(), nn.Linear(8,8)),numbers()[0]
    want = model(x).detach()
    half = half_precision(model, torch.bfloat16, kind, copies)
    with half:
        assert (model(x)-want).norm()<.02*want.norm()
        assert [[*inspect.signature(o.forward).parameters] for o in model[:2]]==[['input'],['x']]
    class Whole(kind):
        def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
    with half_precision(Whole(), torch.bfloat16, copies=copies) as half: assert torch.equal(half.model(x), x*2)

def test_rules_of_the_user_and_more():
    "Whatever rules the user has, and in whatever order: more modules in float32 change nothing else"
    draw = random.Random(0)
    rules = ['*','a*','sub*','sub.*','[[]a]','sub.x[*]','x[*]','x1']
    def _layers(**parts): return nn.ModuleDict({**{o:nn.Linear(2,2) for o in ('[a]','x*','x1','a')}, **parts})
    for _ in range(60):
        keep = {draw.choice(rules):draw.choice(['float32','bfloat16']) for _ in range(draw.randint(1, 4))}
        model = _layers(sub=_layers())
        more = draw.sample(['[a]','x*','sub','sub.[a]','sub.x*','a'], 2)
        try: before = half_precision(model, torch.bfloat16, {'x1':'bfloat16', **keep}).policy()
        except ValueError: continue # nothing would be left in half precision
        try: after = half_precision(model, torch.bfloat16, {'x1':'bfloat16', **keep}).keeping(more).policy()
        except ValueError: continue
        after = after.set_index('module').compute
        for o in before.itertuples():
            kept = any(o.module==m or o.module.startswith(f'{m}.') for m in more)
            assert after[o.module]==('float32' if kept else o.compute), (keep,more,o.module)

def test_scaler_of_somebody_else():
    "Another scale in `learn.scaler` doesn't change the gradients"
    def _norms(*cbs):
        learn = get_learner(cbs=cbs).to_native_fp16(init_scale=1024.)
        learn.fit(1)
        return learn.precision_recorder.log.norm.tolist()
    class Update(Callback):
        def after_loss(self):
            if self.training and self.train_iter>0: self.learn.scaler.update(4096.)
    assert _norms(Update())==_norms()

def test_names_in_the_model():
    "A model's attributes aren't taken for the learner's"
    model = mlp()
    model.lr_finder = model.model_resetter = 'mine'
    learn = get_learner(model).to_bf16()
    learn.fit(1)
    assert len(learn.precision_recorder.log)==4

def test_hints_are_calls_that_work():
    for call in ('to_native_fp16','to_fp16'):
        with pytest.raises(TypeError, match='The name of the call says it'): getattr(get_learner(), call)(dtype='f16')
    with pytest.raises(TypeError, match=r'learn.to_fp16\(keep=…\)'): MixedPrecision(keep='0')
