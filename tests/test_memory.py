"What training in half precision needs in memory beside float32 training: almost nothing. Counted is what tensors hold."
import platform

from learners import *
from mp_callbacks.core import cast,measure
from mp_callbacks.learner.precision import keep_freed_memory

def make_model(sizes=[256]*33, bias=True):
    return nn.Sequential(*[nn.Linear(*o, bias=bias) for o in zip(sizes, sizes[1:])])

def learner(to):
    def _fit(model):
        batch = torch.randn(1,256),torch.zeros(1,256)
        learn = get_learner(model, dls=DataLoaders([batch]*3, [], device='cpu'), opt_func=fused_adam)
        return fitted(to(learn))
    return _fit

def loop(model, precision=half):
    opt,around = torch.optim.Adam(model.parameters(), fused=True),precision(model)
    for _ in range(3): # the first call casts nothing ahead
        with around: model(torch.zeros(1, model[0].in_features)).sum().backward()
        opt.step()
        opt.zero_grad()

def peak(train, make=make_model):
    "Most bytes at any time while `train` trains a model, and how many per parameter"
    with LiveBytes() as live:
        model = make()
        n = sum(p.numel() for p in model.parameters())
        train(model)
        gc.collect()
    return max(live.log),max(live.log)/n

ways = dict(loop=loop, to_bf16=learner(lambda learn: learn.to_bf16(measure=False)), # see `test_measure`
            to_native_fp16=learner(methodcaller('to_native_fp16')))

@pytest.mark.filterwarnings('ignore:.*only emulates')
@pytest.mark.parametrize('way', ways)
def test_memory(way, monkeypatch):
    "Less than half a byte beside the 16 of float32, if what is cast together is small beside the model"
    monkeypatch.setattr(cast, 'node_bytes', 2**20)
    _,got = peak(ways[way])
    assert got<=16.5, got

@pytest.mark.filterwarnings('ignore:.*only emulates')
@pytest.mark.parametrize('call', ['to_bf16','to_fp16'])
def test_measure(call, monkeypatch):
    "No more than half a byte beside what a step takes, in the first one, and when the optimizer has its averages"
    monkeypatch.setattr(measure, 'first_asks', (1,2))
    def _learner(**options): return learner(lambda learn: getattr(learn, call)(**options))
    def _fit(model): learns.append(_learner()(model))
    learns = []
    more = peak(_fit)[1]-peak(_learner(measure=False))[1]
    assert learns[0].mixed_precision.state.measured.steps==(0,1,2) and more<=.5, more

@pytest.mark.parametrize('sizes', [[1024]*14, [447,2346,2346,2346]])
def test_at_most_12_mb(sizes):
    "Pages say how much more half precision may take than float32"
    def _peak(precision): return peak(partial(loop, precision=precision), partial(make_model, sizes, False))[0]
    more = _peak(half)-_peak(lambda model: nullcontext())
    assert 0<more<12.1*2**20, more

def test_float32(): assert 15.9<peak(learner(noop))[1]<16.3, 'Adam: weights, gradients and two averages'

faults_per_step = """if 1:
    import resource
    from learners import *
    torch.set_num_threads(1)
    seen = []
    look = On('before_batch', lambda learn: seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt))
    model = nn.Sequential(*[o for _ in range(6) for o in (nn.Linear(1024,1024),nn.ReLU())])
    x = torch.randn(4,1024)
    learn = get_learner(model, DataLoaders([(x,x)]*12, [], device='cpu'), opt_func=Adam, cbs=look).to_bf16()
    learn.fit(1)
    print((seen[-1]-seen[2])//9)"""

@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0]!='glibc', reason='other allocators have other thresholds')
def test_page_faults():
    "Memory that a batch frees stays with the process, where the next finds it: each of the six weights has 1024 pages"
    env = {k:v for k,v in os.environ.items() if not k.startswith(('MALLOC_','GLIBC_TUNABLES'))}
    env['PYTHONPATH'] = os.pathsep.join(sys.path)
    cmd = [sys.executable, '-W', 'ignore', '-c', faults_per_step]
    assert int(subprocess.run(cmd, env=env, capture_output=True, text=True, check=True).stdout)<2*1024

def test_glibc_is_told_once():
    "And not before each fit: the threshold stays"
    keep_freed_memory.cache_clear()
    fitted(get_learner().to_bf16(), 1).fit(1)
    told = keep_freed_memory.cache_info()
    assert told.misses==1 and told.hits>=1
