"What training in half precision needs in memory beside float32 training: almost nothing"
import gc

import pytest
from learners import *
from mp_callbacks.plan import LiveBytes

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
    return max(live.log)/n

ways = dict(loop=loop, bf16=learner(lambda o: o.to_bf16()), fp16=learner(lambda o: o.to_fp16()),
            native_bf16=learner(lambda o: o.to_native_bf16()), native_fp16=learner(lambda o: o.to_native_fp16()))

@pytest.mark.filterwarnings('ignore:float16 on a CPU')
@pytest.mark.parametrize('way', ways)
def test_memory(way):
    "With Adam, float32 weights, gradients and two averages are 16 bytes. Copies add less than half a byte."
    assert 15.9<peak(learner(noop))<16.3
    got = peak(ways[way])
    assert got<=16.5, got
