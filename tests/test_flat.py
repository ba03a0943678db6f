"""Flat steps against fastai's own loop, bit for bit, whatever happens between two steps

Each test has twins: the same parameters and the same optimizer twice, one stepped by fastai, one by `FlatStep`."""
import copy,inspect,io,random,sys

import pytest,torch
from torch import nn
from fastai.optimizer import *
from fastai.optimizer import adam_step,average_grad,average_sqr_grad,sgd_step,step_stat,weight_decay

from mp_callbacks import flat
from mp_callbacks.flat import FlatStep

optimizers = dict(
    sgd      = lambda ps: SGD(ps, lr=.1),
    sgd_wd   = lambda ps: SGD(ps, lr=.1, wd=.1),
    momentum = lambda ps: SGD(ps, lr=.1, mom=.9, wd=.1, decouple_wd=False),
    rmsprop  = lambda ps: RMSProp(ps, lr=.01, wd=.1),
    rms_mom  = lambda ps: RMSProp(ps, lr=.01, mom=.9, wd=.1, decouple_wd=False),
    adam     = lambda ps: Adam(ps, lr=.01),
    adam_l2  = lambda ps: Adam(ps, lr=.01, wd=.1, decouple_wd=False),
    radam    = lambda ps: RAdam(ps, lr=.01, wd=.1, sqr_mom=.9),
    sadam    = lambda ps: RAdam(ps, lr=.01, beta=50., eps=0, sqr_mom=.9),
    qhadam   = lambda ps: QHAdam(ps, lr=.01, wd=.1),
    qh_nu    = lambda ps: QHAdam(ps, lr=.01, nu_2=.9),
    ranger   = lambda ps: ranger(ps, lr=.01, k=3, sqr_mom=.9))

@pytest.fixture(autouse=True)
def one_thread():
    "Small tensors are faster on one"
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

def inner(opt): return opt.opt if hasattr(opt, 'slow_weights') else opt

def bits(t): return t.detach().contiguous().reshape(-1).view(torch.uint8)

def assert_equal(a, b, what):
    "`a` and `b` are the same to the last bit: structure, types, dtypes, shapes, numbers"
    assert type(a) is type(b), (what, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype,a.shape)==(b.dtype,b.shape), what
        assert torch.equal(bits(a), bits(b)), (what, tuple(a.shape), (a.double()-b.double()).abs().max())
    elif isinstance(a, dict):
        assert a.keys()==b.keys(), (what, a.keys(), b.keys())
        for k in a: assert_equal(a[k], b[k], f'{what}.{k}')
    else: assert a==b, (what, a, b)

class Twins:
    "Two optimizers with the same parameters; the second steps flat. `each(f)` does the same to both."
    def __init__(self, make, groups):
        self.opts = [make([[copy.deepcopy(p) for p in pg] for pg in groups]) for _ in range(2)]
        self.flat = FlatStep(self.opts[1])

    def each(self, f):
        seed = random.random()
        for o in self.opts:
            random.seed(seed); torch.manual_seed(int(seed*2**32))
            f(o)

    def params(self, opt): return [p for pg in opt.param_lists for p in pg]

    def replace(self, opt): self.opts[1],self.flat = opt,FlatStep(opt)

    def check(self, what=''):
        a,b = self.opts
        for i,(p,q) in enumerate(zip(self.params(a), self.params(b), strict=True)):
            assert_equal(p.data, q.data, f'{what} p{i}')
            assert p.is_contiguous()==q.is_contiguous()
            assert (p.grad is None)==(q.grad is None), (what, i)
            if p.grad is not None: assert_equal(p.grad, q.grad, f'{what} p{i}.grad')
            assert_equal(dict(inner(a).state[p]), dict(inner(b).state[q]), f'{what} state{i}')
        assert_equal([dict(h) for h in a.hypers], [dict(h) for h in b.hypers], 'hypers')
        for s,t in zip(getattr(a, 'slow_weights', None) or [], getattr(b, 'slow_weights', None) or []):
            for x,y in zip(s, t): assert_equal(x, y, f'{what} slow weights')

    def step(self, what=''):
        a,b = self.opts
        a.step()
        self.flat.step() if random.random()<.5 else (self.flat.install(), b.step())
        self.check(what)

    def own_storage(self):
        "Nothing is a part of something larger any more"
        opt = self.opts[1]
        for p in self.params(opt):
            for t in (p.data, p.grad, *inner(opt).state[p].values()):
                if isinstance(t, torch.Tensor) and t.numel(): assert t.untyped_storage().nbytes()==t.numel()*t.element_size()

shapes = [(), (0,), (1,), (3,), (7,), (17,), (5,3), (33,), (1000,), (2,0,3), (4,4)]

def param(dtypes=(torch.float32,)):
    "A parameter of random shape, dtype and layout"
    kind,dtype = random.random(),random.choice(dtypes)
    if kind<.1:   x = torch.randn(4,3,3,3).to(memory_format=torch.channels_last)
    elif kind<.2: x = torch.randn(5,6).t()
    elif kind<.3: x = torch.randn(9,8)[:,::2] # has gaps
    else:         x = torch.randn(random.choice(shapes))
    return nn.Parameter(x.to(dtype))

def new_grads(opt, none=.0):
    "A gradient for each parameter: added to the old one or a new tensor in some layout; or none"
    for pg in opt.param_lists:
        for p in pg:
            r,g = random.random(),torch.randn(p.shape, dtype=torch.float32).to(p.dtype)
            if r<none: p.grad = None
            elif r<.7 and p.grad is not None: p.grad += g
            elif r<.8: p.grad = g.t().contiguous().t().data if g.dim()==2 else g
            elif r<.85 and p.grad is not None: p.grad.data = g
            else: p.grad = g

def clear_grads(opt):
    r = random.random()
    if r<.5: opt.zero_grad()
    elif r<.8:
        for pg in opt.param_lists:
            for p in pg: p.grad = None

def flags(opt):
    for p in inner(opt).all_params().itemgot(0):
        if random.random()<.2: inner(opt).state[p]['do_wd'] = False
        if random.random()<.2: inner(opt).state[p]['force_train'] = True

@pytest.mark.parametrize('name', optimizers)
def test_sizes(name):
    "All sizes whose ends a CPU treats differently, in two groups with their own learning rates"
    groups = [[nn.Parameter(torch.randn(n)) for n in range(0,70,2)], [nn.Parameter(torch.randn(n)) for n in (*range(1,70,2),1000,70001)]]
    twins = Twins(optimizers[name], groups)
    twins.each(flags)
    twins.each(lambda o: o.set_hyper('lr', [.01,.1]))
    for i in range(7):
        twins.each(new_grads)
        twins.step(f'step {i}')
        twins.each(lambda o: o.zero_grad())
    assert name=='sadam' or len(twins.flat.buckets)<=8
    twins.flat.release()
    twins.check('released')
    twins.own_storage()

@pytest.mark.parametrize('dtype', [torch.float64,torch.bfloat16,torch.float16])
@pytest.mark.parametrize('name', ['momentum','adam_l2','qhadam','sadam'])
def test_dtypes(name, dtype):
    twins = Twins(optimizers[name], [[nn.Parameter(torch.randn(n).to(dtype)) for n in range(40)]])
    for i in range(4):
        twins.each(new_grads)
        twins.step(f'step {i}')

def poke(opt, how=None):
    "Change something behind the optimizer's back, on a random parameter"
    p = random.choice(inner(opt).all_params().itemgot(0))
    st = inner(opt).state[p]
    def each(f):
        for k in list(st):
            if isinstance(st[k], torch.Tensor): f(k)
    def rewrite(k, f): st[k] = f(st[k])
    def new_param():
        random.choice(inner(opt).param_lists).append(q := nn.Parameter(torch.randn(6)))
        inner(opt).state[q] = {}
    def other_group():
        pgs = opt.param_lists
        if opt is inner(opt) and len(pgs)>1 and len(pgs[0])>1: pgs[1].items.insert(0, pgs[0].items.pop())
    pokes = dict(
        other_memory  = lambda: setattr(p, 'data', p.data.clone()),
        other_numbers = lambda: setattr(p, 'data', torch.randn(p.shape).to(p.dtype)),
        in_place      = lambda: p.data.mul_(.5),
        transposed    = lambda: setattr(p, 'data', p.data.t()) if p.dim()==2 and p.shape[0]==p.shape[1] else None,
        grad_memory   = lambda: setattr(p.grad, 'data', p.grad.data.clone()*2) if p.grad is not None else None,
        state_copied  = lambda: inner(opt).state.update({p: dict(st)}),
        state_emptied = lambda: inner(opt).state.update({p: {}}),
        state_flag    = lambda: st.update(do_wd=not st.get('do_wd', True)),
        state_steps   = lambda: st.update(step=st['step']+3) if 'step' in st else None,
        state_tensor  = lambda: each(lambda k: rewrite(k, lambda v: v*2)),
        state_memory  = lambda: each(lambda k: setattr(st[k], 'data', st[k].data*2)),
        state_dtype   = lambda: each(lambda k: rewrite(k, lambda v: v.to(dtype))),
        new_param     = new_param,
        other_group   = other_group)
    dtype = random.choice([torch.bfloat16,torch.float64])
    pokes[how or random.choice(list(pokes))]()
    return pokes

@pytest.mark.parametrize('how', poke(SGD(nn.Parameter(torch.zeros(1)), lr=.1)))
@pytest.mark.parametrize('name', ['momentum','adam','rmsprop'])
def test_poke(how, name):
    "Each change by itself"
    twins = Twins(optimizers[name], [[nn.Parameter(torch.randn(4,4)) for _ in range(3)] for _ in range(2)])
    twins.each(lambda o: o.set_hypers(wd=.5, lr=[.1,.01]))
    for i in range(8):
        twins.each(new_grads)
        if i%3==1: twins.each(lambda o: poke(o, how))
        twins.step(f'step {i}')

def test_beta_set_later():
    "Softplus rounds differently at the end of a tensor, on a CPU: from the moment it is used, each parameter is stepped on by itself"
    twins = Twins(optimizers['radam'], [[nn.Parameter(torch.randn(n)) for n in range(40)]])
    for beta in (0.,50.,0.):
        twins.each(lambda o: o.set_hyper('beta', beta))
        for _ in range(3):
            twins.each(new_grads)
            twins.step(f'{beta=}')
            assert len(twins.flat.buckets)==(not beta)

def test_release_finds_copied_state():
    twins = Twins(optimizers['adam'], [[nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))]])
    twins.each(new_grads)
    twins.step()
    opt = twins.opts[1]
    for p in opt.param_lists[0]: opt.state[p] = {k: v.detach() if isinstance(v, torch.Tensor) else v for k,v in opt.state[p].items()}
    twins.flat.release()
    twins.check()
    twins.own_storage()

def test_pruned():
    twins = Twins(optimizers['sgd'], [[nn.Parameter(torch.randn(4,3)), nn.Parameter(torch.randn(5))]])
    for i in range(3):
        twins.each(new_grads)
        twins.step(f'step {i}')
        for o in twins.opts:
            p = o.param_lists[0][0]
            p.grad,p.data = None,p.data[:-1]

def reload(opt):
    "Through a file, or a copy"
    if random.random()<.5:
        f = io.BytesIO()
        torch.save(opt.state_dict() if opt is inner(opt) else inner(opt).state_dict(), f); f.seek(0)
        inner(opt).load_state_dict(torch.load(f, weights_only=False))
    else: inner(opt).load_state_dict(copy.deepcopy(inner(opt).state_dict()))

def copy_opt(opt):
    "A deep copy, with the flat step that may be installed in it; PyTorch forgets the gradients of copied parameters"
    res = copy.deepcopy(opt)
    for p,q in zip(inner(res).all_params().itemgot(0), inner(opt).all_params().itemgot(0)): p.grad = None if q.grad is None else q.grad.clone()
    return res

events = dict(
    nothing = lambda o: None,
    poke    = poke,
    freeze  = lambda o: o.freeze_to(random.randrange(len(o.param_lists))),
    unfreeze= lambda o: o.unfreeze(),
    clear   = lambda o: o.clear_state(),
    reload  = reload,
    hypers  = lambda o: o.set_hypers(lr=random.random()*.1, wd=random.choice([0.,.1])),
    beta    = lambda o: o.set_hyper('beta', random.choice([0.,50.])) if 'beta' in o.hypers[0] else None,
    stepper = lambda o: inner(o).cbs.insert(0, weight_decay),
    swap    = lambda o: random.choice(o.param_lists).items.reverse() if o is inner(o) else None) # slow weights go by position

@pytest.mark.parametrize('name', optimizers)
@pytest.mark.parametrize('seed', range(6))
def test_anything(name, seed):
    "Random parameters, random events between the steps"
    random.seed(f'{name}{seed}'); torch.manual_seed(seed)
    dtypes = random.choice([(torch.float32,),(torch.float32,),(torch.float32,torch.float64,torch.bfloat16)])
    twins = Twins(optimizers[name], [[param(dtypes) for _ in range(random.randint(1,6))] for _ in range(random.randint(1,3))])
    twins.each(flags)
    none,log = random.choice([0.,0.,.3]),[]
    for i in range(14):
        log.append(event := random.choice(list(events)))
        twins.each(lambda o: new_grads(o, none))
        twins.each(events[event])
        r = random.random()
        if r<.1: twins.flat.release(); log.append('release')
        elif r<.2: twins.flat.remove(); twins.each(lambda o: o.step()); twins.check('loop'); log.append('loop')
        elif r<.25: twins.replace(copy_opt(twins.opts[1])); log.append('copy')
        twins.step(f'{i}: {log}')
        twins.each(clear_grads)
    for _ in range(2):
        twins.flat.release()
        twins.check('released')
    if none==0: twins.own_storage()

def test_parts_come_and_go():
    "Blocks that are left out of a step now and then get buckets of their own, and then nothing has to be gathered any more"
    twins = Twins(optimizers['momentum'], [[nn.Parameter(torch.randn(5)) for _ in range(12)]])
    made = []
    for i in range(40):
        used = [random.random()<.7 for _ in range(3)]
        for o in twins.opts:
            torch.manual_seed(i)
            for j,p in enumerate(twins.params(o)): p.grad = torch.randn(5) if used[j%3] else None
        before = set(twins.flat.buckets)
        twins.step(f'step {i}')
        made.append(len({*twins.flat.buckets}-before))
    assert sum(made[:20]) and not sum(made[20:]) and len(twins.flat.buckets)<=7

@pytest.mark.parametrize('error', [KeyboardInterrupt,RuntimeError])
def test_error_in_a_stepper(error):
    "Whatever a stepper raises, the optimizer shows its own parameters and state, and can go on"
    def fail(p, fail=False, **kwargs):
        if fail: raise error('here')
    fail.elementwise = True
    twins = Twins(lambda ps: Optimizer(ps, [average_grad,step_stat,fail,sgd_step], lr=.1), [[nn.Parameter(torch.randn(3))], [nn.Parameter(torch.randn(4))]])
    opt = twins.opts[1]
    lists,state = opt.param_lists,opt.state
    for bad in (True,False,True,False):
        twins.each(new_grads)
        twins.each(lambda o: o.hypers[0].update(fail=bad))
        if bad:
            for f in (twins.opts[0].step,twins.flat.step):
                with pytest.raises(error): f()
            assert opt.param_lists is lists and opt.state is state
            twins.check('after the error') # what the first steppers did to the first group is done, as in the loop
        else: twins.step()

def interrupt(f, n):
    "Call `f`, but raise a KeyboardInterrupt before the `n`th line of flat.py that it runs; True if it had so many"
    left,lines = [n],inspect.getsourcelines(flat)[0]
    def trace(frame, event, arg):
        if frame.f_code.co_filename!=flat.__file__: return
        if event=='line' and not lines[frame.f_lineno-1].strip().startswith(('try:','finally:')): # a real one comes at a call
            left[0] -= 1
            if not left[0]: raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try: f()
    except KeyboardInterrupt: return True
    finally: sys.settrace(None)

@pytest.mark.parametrize('release', [True,False])
@pytest.mark.parametrize('first', [True,False])
def test_interrupt_anywhere(first, release):
    "A KeyboardInterrupt at any line: the step has been taken or it hasn't, the optimizer is itself, and the next steps are right"
    n = 0
    while True:
        n += 1
        torch.manual_seed(0)
        twins = Twins(optimizers['adam'], [[nn.Parameter(torch.randn(o)) for o in (3,(2,2))], [nn.Parameter(torch.randn(5))]])
        if not first: # one bucket stays and one is made anew
            twins.each(new_grads); twins.step()
            twins.each(lambda o: setattr(o.param_lists[1][0], 'data', torch.ones(5)))
        opt,flat_step = twins.opts[1],twins.flat
        lists,state = opt.param_lists,opt.state
        twins.each(new_grads)
        if not interrupt(flat_step.step, n): break
        assert opt.param_lists is lists and opt.state is state
        flat_step.remove()
        if release:
            if interrupt(flat_step.release, n%40+1): flat_step.release()
            twins.own_storage()
        taken = {opt.state[p].get('step', 0) for p in twins.params(opt)}
        assert len(taken)==1
        if taken!={int(not first)}: twins.opts[0].step()
        twins.check(f'interrupted before line {n}')
        twins.each(new_grads)
        twins.step('the step after')
    assert n>50

def test_shared_memory_found_late():
    ps = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    opt = SGD(ps, lr=.1)
    fs = FlatStep(opt)
    for p in ps: p.grad = torch.ones(3)
    fs.step()
    ps[0].data = ps[1].data
    was = [p.detach().clone() for p in ps]
    with pytest.raises(ValueError, match='share memory'): fs.step()
    for p,w in zip(ps,was): assert torch.equal(p, w)
    with pytest.raises(ValueError, match='share memory'): FlatStep(SGD([nn.Parameter(torch.zeros(1).expand(3))], lr=.1))

def test_bad_gradients_change_nothing():
    emb,lin = nn.Embedding(5,2,sparse=True),nn.Linear(2,2)
    opt = Adam([*emb.parameters(),*lin.parameters()], lr=.1)
    fs = FlatStep(opt)
    was = copy.deepcopy([p.data for p in opt.param_lists[0]])
    lin(emb(torch.tensor([1,2]))).sum().backward()
    with pytest.raises(ValueError, match='dense real gradients.*flat_master=False'): fs.step()
    emb.weight.grad = emb.weight.grad.to_dense()
    for p,w in zip(opt.param_lists[0],was): assert torch.equal(p.data, w)
    fs.step()
    was = copy.deepcopy([p.data for p in opt.param_lists[0]])
    emb.weight.grad = None
    lin(emb(torch.tensor([1,2]))).sum().backward()
    with pytest.raises(ValueError, match='sparse'): fs.step()
    for p,w in zip(opt.param_lists[0],was): assert torch.equal(p.data, w)
    c = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    c.grad = torch.ones_like(c)
    with pytest.raises(ValueError, match='complex64'): FlatStep(SGD([c], lr=.1)).step()

def test_what_a_stepper_may_leave():
    "Tensors that are new each time and any number; anything else is an error"
    def ema(p, ema=0., **kwargs): return {'ema': ema*.9+p.grad*.1, 'seen': float(p.numel()>0)}
    def norm(p, **kwargs): return {'norm': p.grad.norm()}
    ema.elementwise = norm.elementwise = True
    twins = Twins(lambda ps: Optimizer(ps, [ema,sgd_step], lr=.1), [[nn.Parameter(torch.randn(o)) for o in (3,5,(2,2))]])
    for _ in range(3): twins.each(new_grads); twins.step()
    twins.flat.release(); twins.check(); twins.own_storage()
    ps = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    for p in ps: p.grad = torch.ones(3)
    opt = Optimizer(ps, [norm,sgd_step], lr=.1)
    with pytest.raises(ValueError, match='norm of shape .. from'): FlatStep(opt).step()
    assert [*opt.param_lists[0]]==ps or all(p is q for p,q in zip(opt.param_lists[0],ps))
    opt.state[ps[0]]['history'] = []
    with pytest.raises(ValueError, match='history is'): FlatStep(opt).step()

def test_replaced_loop():
    "Whoever has replaced `step` may need each parameter; so may a stepper that is new"
    opt = SGD([nn.Parameter(torch.ones(1))], lr=.1)
    fs = FlatStep(opt)
    fs.step()
    opt.cbs.append(lambda p, **kwargs: None)
    with pytest.raises(ValueError, match="can't run <lambda>"): fs.step()
    class Mine(Optimizer):
        def step(self, closure=None): super().step(closure)
    with pytest.raises(ValueError, match="can't run step"): FlatStep(Mine([nn.Parameter(torch.ones(1))], [sgd_step], lr=.1))

@pytest.mark.cuda
@pytest.mark.parametrize('name', optimizers)
def test_cuda(name):
    twins = Twins(optimizers[name], [[nn.Parameter(torch.randn(n).to(d)) for n in (*range(20),1000,70001) for d in ('cuda','cpu')]])
    for i in range(7):
        for o in twins.opts:
            torch.manual_seed(i)
            for p in twins.params(o): p.grad = torch.randn(p.shape).to(p.device)
        twins.step(f'step {i}')
    assert {b.flat.device.type for b in twins.flat.buckets}==({'cuda'} if name=='sadam' else {'cuda','cpu'})
