"What training in half precision needs in memory beside float32 training: almost nothing"
import gc,weakref

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from learners import *

class LiveBytes(TorchDispatchMode):
    "How many bytes the tensors have that were made in here and are alive: `now`, and the most so far, `peak`"
    def __init__(self):
        super().__init__()
        self.known,self.now,self.peak = weakref.WeakSet(),0,0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        for t in tree_leaves(res):
            if not isinstance(t, torch.Tensor) or t.layout!=torch.strided: continue
            s = t.untyped_storage()
            if s in self.known: continue
            self.known.add(s)
            self.now += s.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(s, self._freed, s.nbytes())
        return res

    def _freed(self, n): self.now -= n

def make_model(): return nn.Sequential(*[nn.Linear(256,256) for _ in range(32)])
def adam(params, **kwargs): return OptimWrapper(params, torch.optim.Adam, fused=True, **kwargs)
batch = torch.zeros(1,256),torch.zeros(1,256)

def learner(to):
    def _fit(model):
        learn = get_learner(model, dls=DataLoaders([batch]*3, [], device='cpu'), opt_func=adam)
        to(learn).fit(2)
    return _fit

def loop(model):
    opt,half = torch.optim.Adam(model.parameters(), fused=True),half_precision(model, torch.bfloat16)
    for _ in range(3):
        with half: F.mse_loss(model(batch[0]), batch[1]).backward()
        opt.step()
        opt.zero_grad()

def peak(train):
    "Most bytes per parameter at any time while `train` trains a model"
    with LiveBytes() as live:
        model = make_model()
        n = sum(p.numel() for p in model.parameters())
        train(model)
        gc.collect()
    return live.peak/n

ways = dict(loop=loop, bf16=learner(lambda o: o.to_bf16()), fp16=learner(lambda o: o.to_fp16()),
            native_bf16=learner(lambda o: o.to_native_bf16()), native_fp16=learner(lambda o: o.to_native_fp16()))

@pytest.mark.filterwarnings('ignore:float16 on a CPU')
@pytest.mark.skipif(torch.__version__<'2.6', reason='fastai does not run in a dispatch mode of PyTorch 2.5')
@pytest.mark.parametrize('way', ways)
def test_memory(way):
    "With Adam, float32 weights, gradients and two averages are 16 bytes. Copies add less than half a byte."
    assert 15.9<peak(learner(noop))<16.3
    got = peak(ways[way])
    assert got<=16.5, got
