"Ordinary code that used to end in an error of ours, or in one without a way out"
import pytest
from learners import *

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
