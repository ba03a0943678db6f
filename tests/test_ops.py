"What our part of a batch asks of Python and PyTorch grows no faster than the number of modules"
from learners import *

@contextmanager
def calls(counts):
    "Count calls of functions: ours, and those of PyTorch and fastai that they need, written in Python or in C"
    def note(frame, event, arg):
        name = frame.f_globals.get('__name__', '')
        known = name.partition('.')[0] in ('mp_callbacks','torch','fastai') and not name.startswith('torch._dynamo')
        if event=='call' and known: counts[f'{name}.{frame.f_code.co_name}'] += 1
        elif event=='c_call' and known: counts[f'{name}: {arg.__name__}'] += 1
    gc.disable() # it calls others back when it runs
    sys.setprofile(note)
    try: yield
    finally:
        sys.setprofile(None)
        gc.enable()

def sub():
    "A module in another, with a parameter and a buffer besides"
    return Does(lambda m,x: x+m.lin(x)*m.gain+m.shift, lin=nn.Linear(8,8), gain=torch.ones(8),
                shift=nn.Buffer(torch.zeros(8)))

def deep(n):
    "`n` modules of that kind, with norms, half of them in a module in a module"
    torch.manual_seed(0)
    def some(n): return nn.Sequential(*[nn.Sequential(sub(), nn.LayerNorm(8), nn.BatchNorm1d(8)) for _ in range(n)])
    return nn.Sequential(some(n//2), nn.Sequential(nn.Sequential(some(n-n//2))), nn.Linear(8,1))

def count(n, mode, **kwargs):
    "Calls in the third batch of a fit, and when a fit starts"
    learn,counts,steps = modes[mode](get_learner(deep(n)), **kwargs),Counter(),[]
    own = learn.one_batch
    def one_batch(i, b):
        steps.append(i)
        with calls(counts) if len(steps)==3 else nullcontext(): own(i, b)
    learn.one_batch = one_batch
    learn.fit(1)
    with calls(counts): learn.mixed_precision.before_fit()
    return counts

cases = [('fp16',{}), ('fp16',dict(clip=1., flat_master=True)), ('bf16',dict(keep=('*.1',nn.BatchNorm1d))),
         ('native_fp16',{}), ('native_bf16',{})]

@pytest.mark.parametrize('case', crossed(cases, fast=lambda o: o==cases[1]))
def test_linear(case):
    "From 20 modules to 40 the counts grow by no more than twice of what they grow by from 10 to 20"
    mode,kwargs = case
    few,some,many = (count(n, mode, **kwargs) for n in (10,20,40))
    assert sum(few.values())
    assert not {k:(few[k],some[k],many[k]) for k in many if many[k]-some[k]>2*(some[k]-few[k])+2}
