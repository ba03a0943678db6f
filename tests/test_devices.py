"What each device computes in half precision, emulates, and can't do: on machines that aren't here, and on this one"
from torch._subclasses.fake_tensor import FakeTensorMode

from learners import *
from machines import *
from mp_callbacks.core.devices import Machine,emulation,known_faults,layers,support,why_unsupported
from mp_callbacks.core.fp8 import fp8_recipes
from sick_models import Overflows

fp8 = torch.float8_e4m3fn
device_of = lambda name: 'cuda' if machine(name).only=='rocm' else machine(name).only

expected = { # answers for float16, bfloat16 and FP8
    'T4': 'native emulated no',           'V100': 'native emulated no',
    'RTX 3090': 'native native no',       'H100': 'native native native',
    'GTX 1660': 'native emulated no',     'GTX 1080': 'native emulated no',
    'ROCm': 'native native no',           'RTX 4090': 'native native native',
    'MPS': 'native native no',            'MPS, macOS 13': 'native no no',
    'XPU': 'native native no',            'HPU': 'native native no',
    'AVX2': 'emulated emulated no',       'AVX2-VNNI-2': 'emulated emulated no',
    'AVX512': 'emulated emulated no',     'AVX512-BF16': 'emulated native no',
    'EPYC': 'emulated native no',
    'AMX': 'native native no',            'AVX512-BF16, forbidden': 'emulated emulated no',
    'ARM': 'native native no',            'ARM without bfloat16': 'native emulated no'}

@pytest.mark.parametrize('name', machines)
def test_support(name):
    with pretend(machine(name)):
        assert [support(device_of(name), o) for o in (f16,bf16,fp8)]==expected[name].split()
        assert support(device_of(name), f32)=='native'
        other = 'cuda' if device_of(name)=='cpu' else 'cpu'
        assert {support(other, o) for o in (f32,f16,bf16,fp8)}=={'no'}

@pytest.mark.parametrize('entries,want', [
    ({}, 'native native no'), ({f16:'never'}, 'emulated native no'),
    ({f16:'never',bf16:'never'}, 'emulated emulated no')])
def test_another_kind_of_device(entries, want, monkeypatch):
    "It needs no entry, or 'never' for what it only emulates; the instructions of the CPU beside it say nothing of it"
    for dtype,need in entries.items(): monkeypatch.setitem(devices.native_with, ('hpu',dtype), need)
    with pretend(machine('HPU')):
        assert [support('hpu', o) for o in (f16,bf16,fp8)]==want.split()
        assert emulation('hpu', f16).endswith({'emulated native no':'Use torch.bfloat16.',
                                               'emulated emulated no':'Use torch.float32.'}.get(want, ''))
    assert [Machine().capability(torch.device(o)) for o in ('hpu','mps','xpu')]==[None]*3

@pytest.mark.parametrize('need', [(2,0), {'bf16'}, set()])
@pytest.mark.parametrize('name', ['HPU','T4','AMX'])
def test_entry_of_another_kind(name, need, monkeypatch):
    "An entry that asks for what PyTorch doesn't tell of a kind of device is an error that says what to write"
    monkeypatch.setitem(devices.native_with, (device_of(name),bf16), need)
    told = pytest.raises(ValueError, match=r"native_with\['.*', torch.bfloat16\] = .* Use 'never', or no entry")
    fits = type(need) is type(machine(name).has)
    with pretend(machine(name)), nullcontext() if fits else told: support(device_of(name), bf16)

gaps = { # (machine, dtype) -> layers that stay in float32, and a part of the reason
    **{(o,bf16): ((nn.LSTM,), 'no bfloat16 LSTM on this CPU') for o in ('AVX2','AVX512-BF16, forbidden')},
    **{(o,f16): ((nn.LSTM,), 'no float16 LSTM on this CPU')
       for o in ('AVX2','AVX512-BF16, forbidden','AVX512-BF16','EPYC')},
    ('AVX2-VNNI-2',bf16): (convs, 'no bfloat16 Conv'),
    ('AVX2-VNNI-2',f16): (convs, 'no float16 Conv'),
    ('GTX 1660',f16): (convs[:3], 'float16 convolutions on GTX 16 return nan'),
    **{(o,bf16): (rnns, 'autocast would use float16')
       for o in ('T4','V100','RTX 3090','RTX 4090','H100','GTX 1660','GTX 1080')}}

@pytest.mark.parametrize('dtype', [f16,bf16])
@pytest.mark.parametrize('name', machines)
def test_gaps(name, dtype):
    "Exactly the layers that a device lacks stay in float32, and the policy says why"
    kinds,why = gaps.get((name,dtype), ((),''))
    device = device_of(name)
    with pretend(machine(name)):
        reasons = {o:why_unsupported(device, dtype, o(*layers[o][0])) for o in layers}
        assert {o for o,reason in reasons.items() if reason}=={*kinds}
        assert all(why in reasons[o] for o in kinds)
        assert why_unsupported(device, dtype, nn.GELU())==''
        if device!='cpu': return
        net = nn.ModuleDict({o.__name__:o(*args) for o,(args,_) in layers.items()})
        for copies in (True,False):
            table = half_precision(net, dtype, rules=copies).policy().set_index('module')
            assert {k for k,o in table.iterrows() if o.compute=='float32'}=={o.__name__ for o in kinds}
            assert all(why in table.why[o.__name__] for o in kinds)

def test_known_fault_of_any_module(monkeypatch):
    "An entry of `known_faults` may name modules that no try is made with, by their base class, too"
    monkeypatch.setitem(known_faults, ('CPU',bf16), (nn.RNNCellBase,'no cells here'))
    table = half_precision(nn.Sequential(nn.LSTMCell(2,2), nn.Linear(2,2)), bf16).policy()
    assert table.why[0]=='no cells here' and table.compute.tolist()==['float32','bfloat16']

@pytest.mark.parametrize('dtype,other,use', [(f16,bf16,'torch.bfloat16'), (bf16,f16,'torch.float16')])
@pytest.mark.parametrize('name', machines)
def test_emulation(name, dtype, other, use):
    "What it is, how much slower, and what to call instead, which the device has instructions for; else not a word"
    with pretend(machine(name)) as m:
        text = emulation(device_of(name), dtype)
        assert bool(text)==(support(device_of(name), dtype)=='emulated')
        if not text: return
        if support(device_of(name), other)!='native': use = 'torch.float32'
        size = 10**round(math.log10(m.times[dtype])) # an order of magnitude, as measurements differ
        assert text==(f'{m.called[0].upper()}{m.called[1:]} only emulates {str(dtype)[6:]}: a matrix product takes '
                      f'{f"about {size}" if size>1 else "up to 3"} times as long as in float32, a training step less. '
                      f'Use {use}.')

def add_callback(learn): return learn.add_cb(NativeMixedPrecision(dtype=bf16))

@pytest.mark.parametrize('call,dtype', [*[(getattr(Learner, o),o[-4:]) for o in calls],(add_callback,'bf16')])
def test_calls_say_it_once(call, dtype, recwarn):
    "At the call, or else in the first fit, at the user's line, and not again; and nothing about native devices"
    with pretend(machine('AMX')): call(get_learner()).fit(1)
    assert not recwarn.list
    learn = get_learner()
    with pretend(machine('AVX2')), pytest.warns(UserWarning) as told:
        call(learn)
        learn.fit(2)
        learn.fit(1)
    (said,where), = [(str(o.message).partition(':')[0],o.filename) for o in told]
    assert where==__file__ and said==f'This CPU only emulates {dict(fp16="", bf16="b")[dtype]}float16'

def overflow(**kwargs):
    learn = get_learner(nn.Sequential(nn.Linear(8,8), Overflows(8,1)))
    learn.to_native_fp16(8., warn_skips=2, **kwargs).fit(1)

def one_of_several():
    with patched('mp_callbacks.core.checked_steps.several_ranks', lambda: True): overflow(rescue=True)

def infinite_loss():
    model = nn.Linear(8,1)
    nn.init.constant_(model.bias, 1e5) # beyond float16; gradients of an absolute error don't know that
    get_learner(model, loss_func=nn.L1Loss(), lr=1e-9).to_native_fp16(1., warn_skips=2).fit(1)

def own_loop(error=None):
    model = nn.Linear(8,1)
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), lr=.1), bf16)
    if error: model.unshard,model.reshard = None,lambda: None # as if by `fully_shard` of an older PyTorch
    with pytest.raises(error) if error else nullcontext(), steps.batch():
        if error: raise error

no_lstm = 'stay in float32 (no bfloat16 LSTM on this CPU), so half precision changes nothing. Use ' # not: `keep`
warned = dict( # what the warning says, and what leads to it
    nothing_half  = (f'{no_lstm}torch.float32.', lambda: half_precision(nn.LSTM(2,2), bf16)),
    at_a_call     = (f'{no_lstm}learn.to_fp32().', lambda: get_learner(nn.LSTM(2,2)).to_native_bf16()),
    own_loop      = ('only emulates bfloat16', own_loop),
    skipped       = ('2 steps in a row were skipped', overflow),
    rescued       = ('Kept in float32 from step', lambda: overflow(rescue=True)),
    not_rescued   = ('rescue=True does not keep', one_of_several),
    infinite_loss = ('The loss of 2 steps in a row', infinite_loss),
    shards        = ("fully_shard of this PyTorch doesn't recover", lambda: own_loop(KeyError)))

@pytest.mark.parametrize('kind', warned)
def test_place_of_a_warning(kind):
    "The line of the user that has led to it, and none of this package, of fastai or of PyTorch"
    text,call = warned[kind]
    with pretend(machine('AVX2')), pytest.warns(UserWarning) as told: call()
    assert text in ''.join(str(o.message) for o in told) and {o.filename for o in told}=={__file__}

@pytest.mark.parametrize('call', calls)
def test_refused(call):
    "A device that can't: an error, at the call, and nothing has changed"
    learn = get_learner()
    told = pytest.raises(ValueError, match=r"device=cpu doesn't compute in .* Use learn.to_fp32\(\)")
    neither = pretend(Fake('cpu', 'this CPU', no_dtype={f16,bf16}))
    with stays(list, learn.cbs), neither, told: getattr(learn, call)()

@pytest.mark.parametrize('error', [torch.OutOfMemoryError('full'), RuntimeError('MPS backend out of memory'),
                                   RuntimeError('CUBLAS_STATUS_ALLOC_FAILED')])
def test_forgets_a_lack_of_memory(error):
    with pretend(Machine()):
        with patched.object(Machine, 'train', raises(error)):
            with pytest.raises(type(error)): support('cpu', bf16)
            with pytest.raises(type(error)): why_unsupported('cpu', bf16, nn.LSTM(2,2))
        assert support('cpu', bf16)!='no'

def test_asks_once():
    "And computes with as many threads afterwards as before"
    tried,threads = [],torch.get_num_threads()
    class Counts(Machine):
        def train(self, *args): tried.append(args); return super().train(*args)
        def slowdown(self, *args): tried.append(args); return super().slowdown(*args)
    torch.set_num_threads(2)
    try:
        with pretend(Counts()):
            for n in (2,3): support('cpu', bf16), support('cpu', 'f16'), why_unsupported('cpu', bf16, nn.LSTM(n,n))
            Machine().slowdown(torch.device('cpu'), bf16)
        assert len(tried)==len({*tried})>3 and torch.get_num_threads()==2
    finally: torch.set_num_threads(threads)

@pytest.mark.parametrize('inside', [torch.no_grad, torch.inference_mode, lambda: torch.autocast('cpu', f16),
                                    lambda: torch.device('meta')])
def test_whatever_is_on(inside):
    "The answer doesn't depend on where the question is asked first, and takes no random numbers"
    modules = [o(*layers[o][0]) for o in layers]
    def _answers(): return [support('cpu', bf16), *[why_unsupported('cpu', bf16, o) for o in modules]]
    with stays(torch.get_rng_state):
        with pretend(Machine()): want = _answers()
        with pretend(Machine()), inside(): assert _answers()==want

@pytest.mark.parametrize('dtype', [f16,bf16])
@pytest.mark.parametrize('kind', rnns+convs)
def test_this_machine(kind, dtype):
    "Each layer trains in half precision here, or in float32 where that is missing"
    args,shape = layers[kind]
    net = kind(*args)
    with half_precision(net, dtype):
        res = net(torch.randn(shape))
        (res[0] if isinstance(res, tuple) else res).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())

@pytest.mark.parametrize('row,names', [
    ('an NVIDIA GPU with bfloat16',['RTX 3090','H100']), ('an older NVIDIA GPU',['V100','T4']),
    ('a CPU with AMX or AVX512-BF16',['AVX512-BF16','EPYC','AMX']), ('another CPU',['AVX2','AVX512','AVX2-VNNI-2']),
    ('a GPU of AMD, Intel or Apple',['ROCm','MPS','MPS, macOS 13','XPU']), ('P100, GTX 10',['GTX 1080'])])
def test_pages_say_the_same(row, names):
    "README, and the page on GPUs of cards that are older than Tensor Cores"
    texts = [(root/o).read_text(encoding='utf-8') for o in ('README.md','nbs/howto/fast_on_a_gpu.ipynb')]
    call = re.search(rf'\| {row}.*? \| (.*?) \|', '\n'.join(texts))[1]
    for name in names:
        with pretend(machine(name)): native = [o for o in (bf16,f16) if support(device_of(name), o)=='native']
        assert {bf16:'`to_bf16()`', f16:'`to_fp16()`', f32:'`to_fp32()`'}[[*native,f32][0]] in call

# with a GPU of NVIDIA, PyTorch 2.11 makes no fake tensors for one of Intel
xpu = pytest.param('xpu', False, marks=pytest.mark.skipif(torch.cuda.is_available(), reason='needs no CUDA device'))
@pytest.mark.parametrize('device,double', [('mps',False), xpu, ('cuda',True)])
def test_fp8_without_float64(device, double):
    seen = set()
    def see(func, args, res): seen.update(o.dtype for o in leaves(res) if isinstance(o, torch.Tensor))
    with FakeTensorMode(),Operations(see): fp8_recipes['rowwise'].quantize(torch.ones(4, 4, device=device), dim=1)
    assert (torch.float64 in seen)==double

def test_fake_tensors():
    "A model without numbers has the dtypes of one with numbers"
    def _dtypes(inside):
        with inside:
            net,seen = nn.Sequential(nn.Linear(16,16), nn.GroupNorm(2,16), nn.Linear(16,16)),[]
            for m in net: m.register_forward_hook(lambda m,args,res: seen.append(res.dtype))
            for _ in range(2): # the second call casts all weights at once
                with unmeasured(net, bf16): net(torch.ones(4,16)).sum().backward()
            return seen+[p.grad.dtype for p in net.parameters()]
    assert _dtypes(FakeTensorMode())==_dtypes(nullcontext())
