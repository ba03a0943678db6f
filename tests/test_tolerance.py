"Ordinary code that used to end in an error of ours, or in one without a way out"
from contextlib import nullcontext
from functools import partial

import pytest
from torch.utils.checkpoint import CheckpointError,checkpoint
from learners import *
from mp_callbacks.dtypes import cast_tree,leaves,tree_map

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates', 'ignore:Sparse CSR', 'ignore:.*quantize')

# --- Buffers of every kind

def grow(b): b.resize_(b.numel()+1).fill_(9)
def assign(b): b.data = torch.full((b.numel()+1,), 9.)
def point(b): b.set_(torch.full((2,3), 9.))
def double(b): b.mul_(2)
def more_entries(b): b.data = torch.ones(4,4).to_sparse_csr()

buffers = dict(
    grows        = (lambda: torch.arange(4.), grow),
    assigned     = (lambda: torch.arange(4.), assign),
    points       = (lambda: torch.arange(4.), point),
    from_nothing = (lambda: torch.empty(0), grow),
    csr          = (lambda: torch.eye(4).to_sparse_csr(), double),
    csr_pattern  = (lambda: torch.eye(4).to_sparse_csr(), more_entries),
    coo          = (lambda: torch.eye(4).to_sparse(), double),
    coo_pattern  = (lambda: torch.eye(4).to_sparse(), lambda b: b.add_(torch.ones(4,4).to_sparse())),
    expanded     = (lambda: torch.arange(3.)[None].expand(4,3), lambda b: b[0].mul_(2)),
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
        if self.training: self.change(self.held)
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
        class Stops(Callback):
            def after_pred(self): raise error("mine")
        with pytest.raises(error, match="mine"): learn.fit(1, cbs=Stops())
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

# --- Structures that refer to themselves

@dataclass
class Branch:
    "A part of predictions, which knows the others"
    value:Any
    parent:Any=None
    children:Any=None

def family(x):
    "A dataclass whose children refer to it, in a list that also has itself"
    root = Branch(x)
    root.children = [Branch(x+1, root), dict(last=Branch(x+2, root), all=root)]
    root.children.append(root.children)
    return root

@pytest.mark.parametrize('mode', [o for o in modes if o!='fp16_static'])
def test_predictions_in_a_circle(mode):
    "are float32 in all places, and keep their form"
    class Circles(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(1); self.layer = nn.Linear(8,1)
        def forward(self, x): return family(self.layer(x))
    seen = []
    def _loss(pred, y):
        first,more,itself = pred.children
        seen.extend(o.value.dtype for o in (pred,first,first.parent,more['last'],more['last'].parent,more['all']))
        assert itself is pred.children and first.parent is more['last'].parent is more['all'] is pred
        return F.mse_loss(first.parent.value, y)
    learn = modes[mode](get_learner(Circles(), loss_func=_loss))
    learn.fit(1)
    assert {*seen}=={torch.float32} and not torch.equal(learn.model.layer.weight, Circles().layer.weight)

def test_circles():
    x = torch.ones(1, dtype=torch.float16)
    plain = [1, 'a']
    plain.append(plain)
    assert cast_tree(plain, torch.float32) is plain and len(leaves(plain))==2
    ring = [x, {}]
    ring[1].update(back=ring, pair=(x, ring))
    new = cast_tree(ring, torch.float32)
    assert new[1]['back'] is new and new[1]['pair'][1] is new and new is not ring
    assert {o.dtype for o in leaves(new)}=={torch.float32} and {o.dtype for o in leaves(ring)}=={torch.float16}
    assert new[0] is new[1]['pair'][0]
    with pytest.raises(ValueError, match='refers to itself.*one structure only'): tree_map(torch.add, ring, ring)

@pytest.mark.parametrize('copies', [True,False])
def test_circle_into_a_kept_module(copies):
    "What it writes into the list arrives"
    class Writes(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(8,8)
        def forward(self, state):
            state.append(self.layer(state[0]))
            return state[-1]
    class Holder(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(1); self.down,self.up = nn.Linear(8,8),Writes()
        def forward(self, x):
            state = [self.down(x)]
            state.append(state)
            y = self.up(state)
            assert len(state)==3 and state[1] is state and state[2] is y
            return y
    with half_precision(Holder(), torch.bfloat16, 'up', copies) as half:
        assert half.model(numbers()[0]).dtype==torch.float32

# --- Errors with a way out

has_notes = pytest.mark.skipif(not hasattr(Exception, 'add_note'), reason='Exceptions have notes since Python 3.11')

class Masks(nn.Module):
    "Has no parameters, and a number that float16 can't hold"
    def forward(self, x): return x.masked_fill(x>1, -1e9).softmax(-1)

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_note_about_a_module_without_parameters(mode):
    "names it, and `keep` is the cure"
    def _fit(keep): modes[mode](get_learner(nn.Sequential(nn.Linear(8,8), Masks(), nn.Linear(8,1))), keep=keep).fit(1)
    with pytest.raises(RuntimeError, match='without overflow') as e: _fit(())
    assert e.value.__notes__==["In 1 (Masks), with its operations in half precision: keep='1' computes it in float32."]
    _fit('1')

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_no_note_about_other_errors(mode):
    class Breaks(nn.Module):
        def forward(self, x): return x.view(7)
    for layer,keep in ((Breaks(),()), (Masks(),()), (Breaks(),'1')):
        learn = modes[mode](get_learner(nn.Sequential(nn.Linear(8,8), layer)), keep=keep)
        with pytest.raises(RuntimeError) as e: learn.fit(1)
        assert bool(getattr(e.value, '__notes__', ()))==isinstance(layer, Masks)

class Penalty(Callback):
    "Asks for gradients before the backward pass, in the precision of the model or outside of it"
    def __init__(self, inside): self.inside = inside
    def after_loss(self):
        if not self.training: return
        with self.learn.mixed_precision.autocast if self.inside else nullcontext():
            grads = torch.autograd.grad(self.learn.loss_grad, [*self.model.parameters()], retain_graph=True)
        assert all(o.isfinite().all() for o in grads)

@has_notes
@pytest.mark.parametrize('mode', [o for o in modes if o!='fp16_static'])
def test_gradients_through_checkpoints(mode):
    "An error says how to compute them"
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8,8))
            self.head = nn.Linear(8,1)
        def forward(self, x): return self.head(checkpoint(self.body, x, use_reentrant=False))
    def _fit(inside): modes[mode](get_learner(Checkpointed()), keep=nn.GELU).fit(1, cbs=Penalty(inside))
    with pytest.raises(CheckpointError) as e: _fit(False)
    assert 'with learn.mixed_precision.autocast:' in e.value.__notes__[0]
    _fit(True)

@has_notes
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_optimizer_with_a_closure(mode):
    learn = modes[mode](get_learner(opt_func=partial(OptimWrapper, opt=torch.optim.LBFGS)))
    with pytest.raises(TypeError, match='closure') as e: learn.fit(1)
    assert e.value.__notes__==["LBFGS computes the loss several times in a step, and asks for a function that does so. "
                               "fastai's Learner passes none, in float32 either. Use an optimizer without a closure."]

@pytest.mark.parametrize('call', calls)
def test_offloaded_model(call):
    "has no numbers to train"
    cpu_offload = pytest.importorskip('accelerate').cpu_offload
    learn = get_learner(cpu_offload(mlp(), torch.device('cpu')) or mlp())
    with pytest.raises(ValueError, match=r"0.weight is on the device 'meta', without numbers.*cpu_offload"):
        getattr(learn, call)()
    assert not any(isinstance(cb, PrecisionCallback) for cb in learn.cbs)
