"What training in half precision needs in memory beside float32 training: almost nothing. Counted is what tensors hold."
import gc,pytest
from contextlib import nullcontext
from learners import *
from mp_callbacks import cast
from mp_callbacks.plan import LiveBytes

def make_model(): return nn.Sequential(*[nn.Linear(256,256) for _ in range(32)])
batch = torch.zeros(1,256),torch.zeros(1,256)

def learner(to):
    def _fit(model):
        learn = get_learner(model, dls=DataLoaders([batch]*3, [], device='cpu'), opt_func=fused_adam)
        to(learn).fit(1)
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

ways = dict(loop=loop, **{o:learner(methodcaller(o)) for o in ('to_bf16','to_native_fp16')})

@pytest.mark.filterwarnings('ignore:.*only emulates')
@pytest.mark.parametrize('way', ways)
def test_memory(way, monkeypatch):
    "Less than half a byte beside the 16 of float32, if what is cast together is small beside the model"
    monkeypatch.setattr(cast, 'node_bytes', 2**20)
    got = peak(ways[way])
    assert got<=16.5, got

@pytest.mark.filterwarnings('ignore:.*only emulates')
def test_memory_of_one_node():
    "What is cast together keeps its gradients in half precision until the last is there"
    assert peak(ways['to_bf16'])<=18.1

@pytest.mark.parametrize('sizes', [[1024]*14, [447,2346,2346,2346]])
def test_at_most_12_mb(sizes):
    "Pages say how much more half precision may take than float32"
    def _peak(precision):
        with LiveBytes() as live:
            model = nn.Sequential(*[nn.Linear(*o, bias=False) for o in zip(sizes, sizes[1:])])
            opt,around = torch.optim.Adam(model.parameters(), fused=True),precision(model)
            for _ in range(3): # the first call casts nothing ahead
                with around: model(torch.zeros(1,sizes[0])).sum().backward()
                opt.step()
                opt.zero_grad()
            gc.collect()
        return max(live.log)
    more = _peak(lambda model: half_precision(model, torch.bfloat16))-_peak(lambda model: nullcontext())
    assert 0<more<12.1*2**20, more

def test_float32(): assert 15.9<peak(learner(noop))<16.3, 'Adam: weights, gradients and two averages'
