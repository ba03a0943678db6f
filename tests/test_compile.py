"""A compiled model: one graph for training and one for validation, as in float32, with no breaks and no recompiles

The file takes long because models are compiled."""
import torch._dynamo
from torch._dynamo.utils import counters
from learners import *
from mp_callbacks.core import ways

def norms():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16,16), nn.BatchNorm1d(16), nn.GELU(),
                         Does(lambda m,x: x*m.gain, gain=torch.ones(16)), nn.Linear(16,16), nn.RMSNorm(16),
                         nn.Linear(16,1))

compiled = dict(
    wrapped  = lambda: torch.compile(norms(), backend='aot_eager'),
    in_place = lambda: (m := norms(), m.compile(backend='aot_eager'))[0],
    part     = lambda: nn.Sequential(*norms()[:4], torch.compile(norms()[4:], backend='aot_eager')))

modes = {**modes, 'bf16_flat': lambda learn: learn.to_bf16(flat_master=True),
                  'bf16_keep': lambda learn: learn.to_bf16(keep=Does)}
moving = dict(fp16        = dict(scale_wait=3, max_loss_scale=2.**24, headroom=None), # overflows, and grows
              native_fp16 = dict(init_scale=2.**24, growth_interval=3))

def graphs(make, mode):
    "The learner, and how many graphs there were after the first and after the last of some fits"
    torch._dynamo.reset()
    counters.clear()
    learn = get_learner(make())
    if mode: modes[mode](learn, **moving.get(mode, {}))
    learn.fit(1)
    learn.validate()
    first = counters['stats']['unique_graphs']
    learn.fit_one_cycle(2)
    assert not counters['graph_break'] and not counters['recompiles']
    return learn,first,counters['stats']['unique_graphs']

slow = [*((o,'wrapped') for o in (None,*modes) if o!='fp16'),
        ('native_fp16','part'), ('bf16','in_place'), ('bf16','part')]

@pytest.mark.parametrize('mode,kind', [('fp16','wrapped'), *(slow_unless(False, *o) for o in slow)])
def test_graphs(mode, kind):
    learn,first,last = graphs(compiled[kind], mode)
    assert (first,last)==(2,2)
    if mode in moving: assert skipped(learn)>2 and learn.precision_recorder.log.scale.nunique()>4

def test_ways():
    "What is compiled computes as it is kept, or looks up; layers and norms are left to autocast"
    net = nn.Sequential(nn.Embedding(9,16), nn.Linear(16,16), nn.Linear(16,16), nn.RMSNorm(16))
    net.compile()
    for m in net: m.compile()
    rows = half_precision(net, bf16, keep='1').policy()
    assert [*rows[rows['size']>0].way]==['lookup','float32','autocast','autocast']

@pytest.mark.slow
@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
def test_learns_the_same(mode):
    "Compiled or not, the same weights; or as near to float32, as compiled layers and norms are left to autocast"
    runs = (None,norms),(mode,norms),(mode,compiled['wrapped'])
    full,plain,fast = (fitted(in_mode(o, make()), 3) for o,make in runs)
    start = flat(weights(get_learner(norms())))
    if mode=='native_fp16': assert apart(fast, plain, start)<1e-2
    else: assert apart(fast, full, start)<1.5*apart(plain, full, start)

@pytest.mark.slow
def test_layer_norm_as_on_cuda(monkeypatch):
    "One graph, too, if a `LayerNorm` computes in half precision, which it doesn't on a CPU"
    monkeypatch.setattr(ways, 'why_inexact', lambda device, module: '')
    learn,first,last = graphs(compiled['wrapped'], 'bf16')
    assert (first,last)==(2,2) and {p.dtype for p in learn.model.parameters()}=={torch.float32}
    assert not (learn.mixed_precision.policy().compute=='float32').any()
