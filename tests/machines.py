"Machines that aren't here"
from learners import *
from mp_callbacks.core import devices
from mp_callbacks.core.devices import Machine

rnns = nn.LSTM,nn.GRU,nn.RNN
convs = nn.Conv1d,nn.Conv2d,nn.Conv3d,nn.ConvTranspose1d,nn.ConvTranspose2d,nn.ConvTranspose3d

def pretend(machine):
    "Inside a `with`, `machine` is asked in place of this one"
    return patched.object(devices, '_machine', machine)

class Fake(Machine):
    "A machine with one kind of device, which raises in the forward or backward pass of some layers"
    def __init__(self,
        kind, # Of its devices; 'rocm' ones have the type 'cuda'
        name, # Of each device
        capability=(), # As from `Machine.capability`: a version, names of instructions, or None
        no_dtype=(), # Dtypes that it can't compute in at all
        no_forward={}, # Layer -> dtypes of the input that its forward pass raises for
        no_backward={}, # Layer -> dtypes that its backward pass raises for
        returns={}, # Pair of layer and dtype -> dtype that autocast uses
        times={}, # Dtype -> how many times as long as in float32 a product takes; .5 for others
    ):
        self.only,self.called,self.has,self.no_dtype = kind,name,capability,no_dtype
        self.no_forward,self.no_backward,self.returns,self.times = no_forward,no_backward,returns,times

    def kind(self, device): return self.only
    def name(self, device): return self.called
    def capability(self, device): return self.has
    def slowdown(self, device, dtype): return self.times.get(dtype, .5)

    def train(self, kind, device, dtype, input_dtype):
        if device.type!=('cuda' if self.only=='rocm' else self.only): raise RuntimeError(f'there is no {device}')
        if dtype in self.no_dtype: raise TypeError(f'no {dtype} here')
        if dtype!=torch.float32 and input_dtype in self.no_forward.get(kind, ()):
            raise RuntimeError('could not create a primitive descriptor')
        if dtype in self.no_backward.get(kind, ()): raise RuntimeError('DNNL does not support bf16/f16 backward')
        return self.returns.get((kind,dtype), dtype)

class SlowLayer(nn.Module):
    "Training takes `seconds` longer by `perf_counter`, by the dtype that the layer is called in. Nobody waits."
    def __init__(self, seconds):
        super().__init__()
        self.seconds,self.now = seconds,0.

    def perf_counter(self): return self.now
    def forward(self, x):
        dtype = torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else torch.float32
        if self.training: self.now += self.seconds[dtype]
        return x

avx2 = dict(capability={'avx2'}, no_forward={nn.LSTM:{f32}}, times={f16:60.,bf16:60.}) # no LSTM in oneDNN below AVX512
always_float16 = {(o,bf16):f16 for o in rnns} # what autocast makes of recurrent layers on NVIDIA's GPUs

def machine(name):
    "The machine called `name`, with nothing asked so far"
    return machines[name]()

machines = {
    'T4':       lambda: Fake('cuda', 'Tesla T4', (7,5), returns=always_float16, times={bf16:3.}),
    'V100':     lambda: Fake('cuda', 'Tesla V100-SXM2-16GB', (7,0), returns=always_float16, times={bf16:3.}),
    'RTX 3090': lambda: Fake('cuda', 'NVIDIA GeForce RTX 3090', (8,6), returns=always_float16),
    'RTX 4090': lambda: Fake('cuda', 'NVIDIA GeForce RTX 4090', (8,9), returns=always_float16),
    'H100':     lambda: Fake('cuda', 'NVIDIA H100 80GB HBM3', (9,0), returns=always_float16),
    'GTX 1660': lambda: Fake('cuda', 'NVIDIA GeForce GTX 1660 Ti', (7,5), returns=always_float16, times={bf16:3.}),
    'GTX 1080': lambda: Fake('cuda', 'NVIDIA GeForce GTX 1080', (6,1), returns=always_float16, times={bf16:3.}),
    'ROCm':     lambda: Fake('rocm', 'AMD Instinct MI300X'),
    'MPS':      lambda: Fake('mps', 'this MPS'),
    'MPS, macOS 13': lambda: Fake('mps', 'this MPS', no_dtype={bf16}),
    'XPU':      lambda: Fake('xpu', 'this XPU'),
    'HPU':      lambda: Fake('hpu', 'this HPU', None, times={f16:50.}), # of a kind that nobody here knows
    'AVX2':     lambda: Fake('cpu', 'this CPU', **avx2),
    'AVX2-VNNI-2': lambda: Fake('cpu', 'this CPU', {'avx2','avx_vnni','avx_ne_convert'}, times={f16:9.,bf16:9.},
                                no_backward={o:{f16,bf16} for o in convs}),
    'AVX512':   lambda: Fake('cpu', 'this CPU', {'avx2','avx512_f'}, times={f16:1.5,bf16:1.5}),
    'AVX512-BF16': lambda: Fake('cpu', 'this CPU', {'avx512_f','avx512_bf16'}, no_forward={nn.LSTM:{f16}},
                                times={f16:7.}),
    'AVX512-BF16, forbidden': lambda: Fake('cpu', 'this CPU', **{**avx2, 'capability':{'avx512_f','avx512_bf16'}}),
    'EPYC':     lambda: Fake('cpu', 'this CPU', {'avx512_f','avx512_bf16'}, no_forward={nn.LSTM:{f16}},
                                times={f16:100.}), # Zen 4 and 5
    'AMX':      lambda: Fake('cpu', 'this CPU', {'avx512_bf16','avx512_fp16','amx_bf16','amx_fp16'}),
    'ARM':      lambda: Fake('cpu', 'this CPU', {'neon','bf16','fp16_arith'}),
    'ARM without bfloat16': lambda: Fake('cpu', 'this CPU', {'neon','fp16_arith'}, times={bf16:20.})}
