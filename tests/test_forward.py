"""A skipped step and an error put back buffers of every kind; what a model keeps from batch to batch is float32 between

And hooks of parameters see the gradients."""
import pytest
from learners import *
from states import *

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','bf16','native_fp16')))
halves = [o for o in modes if o!='fp16_static']

# --- Weights and gradients

@each_mode
def test_hooks(mode):
    "Hooks of parameters see one float32 gradient per parameter and batch, which carries the loss scale"
    learn,seen = modes[mode](get_learner()),[]
    for p in learn.model.parameters():
        p.register_hook(lambda g, p=p: seen.append(('hook',id(p),g.clone())))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(('accumulated',id(p),p.grad.clone())))
    class Look(Callback):
        order = 20
        def before_backward(self): self.scale = self.learn.mixed_precision.loss_scale
        def before_step(self):
            for what in ('hook','accumulated'):
                batch = {i:g for o,i,g in seen if o==what}
                assert len(batch)==6 and {g.dtype for g in batch.values()}=={torch.float32}
                for p in self.model.parameters(): assert torch.equal(batch[id(p)]/self.scale, p.grad)
            seen.clear()
    learn.fit(1, cbs=Look())
    assert learn.mixed_precision.state.steps==4

# --- What a skipped step puts back

buffers = dict( # what it is, and a function that changes it or returns another one
    late         = (lambda: None, lambda b: torch.ones(4)),
    replaced     = (lambda: torch.arange(4.), lambda b: b*2),
    grows        = (lambda: torch.arange(4.), lambda b: b.resize_(b.numel()+1).fill_(9)),
    sparse       = (lambda: torch.eye(4).to_sparse(), lambda b: b.mul_(2)))

class Holds(nn.Module):
    "Changes a buffer in each training batch, beside one that shares its storage if it can"
    def __init__(self, kind):
        super().__init__()
        make,self.change = buffers[kind]
        self.layer = nn.Linear(8,1)
        self.register_buffer('held', held := make())
        if held is not None and held.layout is torch.strided:
            self.register_buffer('same', held.view(held.shape), persistent=False)
    def forward(self, x):
        if self.training: self.held = self.change(self.held)
        return self.layer(x)

def dense(model): return [o.detach().to_dense().clone() for o in model.buffers()]

@pytest.mark.parametrize('kind', buffers)
def test_buffers_are_put_back(kind):
    "after a skipped step and after an interrupt"
    model = Holds(kind)
    held,before = model.held,dense(model)
    learn = get_learner(model).to_bf16()
    def put_back(): return model.held is held and all(map(torch.equal, dense(model), before))
    learn.fit(1, cbs=[InfiniteAt(i) for i in range(4)])
    assert skipped(learn)==4 and put_back()
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(after_pred=raises(KeyboardInterrupt)))
    assert put_back()
    learn.fit(1)
    assert skipped(learn)==4 and not put_back()

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

@pytest.mark.parametrize('event', ['before_batch','after_batch'])
def test_grown_block(event):
    "A block that a callback appends in the fit is put back after a skipped step, and `keep` holds for it"
    class Grows(Callback):
        order,run_valid,dtypes = -30,False,[]
        def grow(self):
            if self.epoch!=1 or len(self.model)>5: return
            self.block = nn.Sequential(nn.Linear(16,16), nn.BatchNorm1d(16), nn.GELU())
            self.model.insert(4, self.block)
            self.block[1].register_forward_hook(lambda module, args, out: self.dtypes.append(out.dtype))
            self.opt.opt.add_param_group(dict(params=[*self.block.parameters()], lr=1e-2))
        def after_step(self):
            if not self.learn.step_stats.finite: self.after_skip = [o.clone() for o in self.block.buffers()]
    learn,cb = get_learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD)),Grows()
    setattr(cb, event, cb.grow)
    learn.to_bf16(keep=nn.BatchNorm1d).fit(2, cbs=[cb,InfiniteAt(5 if event=='after_batch' else 4)])
    assert skipped(learn)==1 and {*cb.dtypes}=={torch.float32}
    assert all(map(torch.equal, cb.after_skip, nn.BatchNorm1d(16).buffers()))
    assert all(o.isfinite().all() for o in cb.block.buffers()) and cb.block[1].running_mean.any()
    policy = learn.mixed_precision.policy().set_index('module')
    assert policy.loc['4.1','why']=='keep' and policy.loc['4.0','compute']!='float32'

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
        else: self.h = torch.zeros(16,8)
        self.seen = self.h # the same list or dict
    def kept(self):
        if self.kind=='list': return self.h[0][0]
        return self.h['last'][0] if self.kind=='dict' else self.h
    def keep(self, h):
        if self.kind=='list': self.h[0] = h,1
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

kinds = 'attribute buffer list dict'.split()

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
    get_learner(Keeps(kind), path=tmp_path, opt_func=learn.opt_func).to_fp32().load('kept').fit(1)
    learn.to_fp32().fit(1)
    assert math.isfinite(learn.recorder.values[-1][1])

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
