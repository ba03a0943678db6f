"What training in half precision needs in memory beside float32 training: almost nothing. Counted is what tensors hold."
import gc,pytest
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

def test_float32(): assert 15.9<peak(learner(noop))<16.3, 'Adam: weights, gradients and two averages'
