"""`flat_master=True` gives the same weights, bit for bit, whatever happens between the steps

Each test has twins: the same parameters and the same optimizer twice, one stepped by fastai, one in `flat_steps`.
Learners with `flat_master=True`, and what they refuse, are in `test_parity.py`."""
from fastai.optimizer import l2_reg,sgd_step,weight_decay
from learners import *
from mp_callbacks.learner.optimizers import flat_steps
from tracing import interrupted

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

def flat_step(opt):
    with flat_steps(opt): opt.step()

def inner(opt): return opt.opt if hasattr(opt, 'slow_weights') else opt
def params(opt): return [p for pg in opt.param_lists for p in pg]
def bits(t):
    "A tensor as its bytes, so that -0 isn't 0, and nan is nan"
    if not isinstance(t, torch.Tensor): return t
    return t.dtype,t.shape,t.detach().contiguous().reshape(-1).view(torch.uint8).clone()

def contents(opt):
    "For each parameter of `opt` its bits, those of its gradient, and its state; then the slow weights"
    def _grad(p): return None if l2_reg in opt.cbs else bits(p.grad)
    res = [[bits(p.data), p.grad is None, _grad(p), {k:bits(v) for k,v in inner(opt).state[p].items()}]
           for p in params(opt)]
    return [*res, *([bits(o) for o in pg] for pg in getattr(opt, 'slow_weights', None) or [])]

class Twins:
    "Two optimizers with the same parameters; the second steps flat. `each(f)` does the same to both."
    def __init__(self, make, groups):
        self.opts = [make(deepcopy(groups)) for _ in range(2)]

    def each(self, f):
        seed = random.random()
        for o in self.opts:
            random.seed(seed); seed_cpu(int(seed*2**32))
            f(o)

    def step(self, what=''):
        self.opts[0].step()
        flat_step(self.opts[1])
        for i,(a,b) in enumerate(zip(*map(contents, self.opts), strict=True)): assert same(a, b), (what, i)

    def steps(self, n):
        for i in range(n):
            self.each(new_grads)
            self.step(f'step {i}')

def new_grads(opt, none=0.):
    "A gradient for each parameter, some transposed, or none"
    for p in params(opt):
        g = torch.randn(p.shape).to(p.device, p.dtype)
        if random.random()<.2 and g.dim()==2: g = g.t().contiguous().t()
        p.grad = None if random.random()<none else g

def flags(opt):
    for p in params(opt):
        if random.random()<.2: inner(opt).state[p]['do_wd'] = False

@pytest.mark.parametrize('name', optimizers)
def test_sizes(name):
    "All sizes whose ends a CPU treats differently, in two groups with their own learning rates"
    sizes = range(0,70,2),(*range(1,70,2),1000,70001)
    twins = Twins(optimizers[name], [[nn.Parameter(torch.randn(n)) for n in ns] for ns in sizes])
    twins.each(flags)
    twins.each(lambda o: o.set_hyper('lr', [.01,.1]))
    twins.steps(7)
    for t in [t for p in params(twins.opts[1]) for t in (p,*inner(twins.opts[1]).state[p].values())]:
        # a part of a model can be saved without the rest
        if isinstance(t, torch.Tensor): assert t.untyped_storage().nbytes()==t.numel()*t.element_size()

@pytest.mark.parametrize('group', [0,1])
def test_listed_twice(group):
    "In one group or in two: fastai steps on it twice"
    twins = Twins(optimizers['momentum'], [[nn.Parameter(torch.randn(n)) for n in (3,4)] for _ in range(2)])
    twins.each(lambda o: o.param_lists[group].append(o.param_lists[0][1]))
    twins.steps(3)

def param(dtypes=(torch.float32,)):
    "A parameter of random shape, dtype and layout"
    kind,dtype = random.random(),random.choice(dtypes)
    if kind<.1:   x = torch.randn(4,3,3,3).to(memory_format=torch.channels_last)
    elif kind<.2: x = torch.randn(5,6).t()
    elif kind<.3: x = torch.randn(9,8)[:,::2] # has gaps
    else:
        x = torch.randn(random.choice([(), (0,), (1,), (3,), (7,), (17,), (5,3), (33,), (1000,), (2,0,3), (4,4)]))
    return nn.Parameter(x.to(dtype))

def change(opt):
    "Something about a random parameter or its state"
    p = random.choice(params(opt))
    state = inner(opt).state[p]
    tensors = [k for k,v in state.items() if isinstance(v, torch.Tensor)]
    random.choice([lambda: setattr(p, 'data', p.data.clone()*2), lambda: p.data.mul_(.5), state.clear,
                   lambda: state.update(do_wd=not state.get('do_wd', True)),
                   lambda: state.update({k: state[k]*2 for k in tensors}),
                   lambda: state.update({k: state[k].double() for k in tensors})])()

events = dict(
    nothing  = lambda o: None,
    change   = change,
    freeze   = lambda o: o.freeze_to(random.randrange(len(o.param_lists))),
    unfreeze = lambda o: o.unfreeze(),
    clear    = lambda o: o.clear_state(),
    reload   = lambda o: o.load_state_dict(deepcopy(o.state_dict())),
    hypers   = lambda o: o.set_hypers(lr=random.random()*.1, wd=random.choice([0.,.1])),
    beta     = lambda o: o.set_hyper('beta', random.choice([0.,50.])) if 'beta' in o.hypers[0] else None,
    stepper  = lambda o: inner(o).cbs.insert(0, weight_decay),
    loop     = lambda o: o.step())

@pytest.mark.parametrize('seed', [0,1])
@pytest.mark.parametrize('name', optimizers)
def test_anything(name, seed):
    "Random parameters, random events between the steps, and parameters that have a gradient now and then"
    random.seed(f'{name}{seed}'); torch.manual_seed(seed)
    dtypes = random.choice([(torch.float32,),(torch.float32,torch.float64,torch.bfloat16,torch.float16)])
    groups = [[param(dtypes) for _ in range(random.randint(1,6))] for _ in range(random.randint(1,3))]
    twins = Twins(optimizers[name], groups)
    twins.each(flags)
    log = []
    for i in range(14):
        log.append(event := random.choice(list(events)))
        twins.each(lambda o: new_grads(o, .3*(seed%2)))
        twins.each(events[event])
        twins.step(f'{i}: {log}')

def test_unusual_gradients():
    "Parameters with sparse, complex, or other gradients are stepped on as they are"
    dtypes = [torch.float32]*3+[torch.complex64]
    twins = Twins(optimizers['sgd'], [[nn.Parameter(torch.randn(5,2, dtype=o)) for o in dtypes]])
    for _ in range(3):
        for o,step in zip(twins.opts, (Optimizer.step,flat_step)):
            for p in params(o): p.grad = torch.ones_like(p)
            sparse,double,_,_ = params(o)
            sparse.grad = torch.sparse_coo_tensor([[1,3]], torch.ones(2,2), (5,2), check_invariants=True)
            double.data = double.data.double()
            step(o)
        for p,q in zip(*map(params, twins.opts)): assert torch.equal(p, q)

def test_state_of_a_stepper():
    "New tensors, numbers, and tensors of another shape that are there already; to make one of another is an error"
    def ema(p, ema=0., **kwargs): return {'ema': ema*.9+p.grad*.1, 'seen': float(p.numel()>0)}
    def norm(p, **kwargs): return {'norm': p.grad.norm()}
    ema.elementwise = norm.elementwise = True
    groups = [[nn.Parameter(torch.randn(o)) for o in (3,5,(2,2),7)]]
    twins = Twins(lambda ps: Optimizer(ps, [ema,sgd_step], lr=.1), groups)
    states = {'rank':torch.ones(2)},{'history':[1]},{'ema':0.},{'ema':0.}
    def prepare(opt):
        for p,state in zip(params(opt), states): opt.state[p].update(state)
    twins.each(prepare)
    twins.steps(3)
    opt = Optimizer([nn.Parameter(torch.randn(3)) for _ in range(2)], [norm,sgd_step], lr=.1)
    new_grads(opt)
    was = [p.detach().clone() for p in params(opt)]
    with pytest.raises(ValueError, match='norm of shape .. from 6 numbers.*flat_master=False'): flat_step(opt)
    assert all(torch.equal(p, w) for p,w in zip(params(opt), was)) and not any(opt.state[p] for p in params(opt))

def test_interrupt_anywhere():
    "A KeyboardInterrupt at any line: each parameter has been stepped on or it hasn't, and the optimizer can go on"
    for n in itertools.count(1):
        torch.manual_seed(0)
        groups = [[nn.Parameter(torch.randn(o)) for o in shapes] for shapes in ((3,(2,2)),(5,))]
        twins = Twins(optimizers['ranger'], groups)
        twins.each(new_grads)
        a,b = twins.opts
        before = deepcopy(params(b))
        lists,state = inner(b).param_lists,inner(b).state
        done = not interrupted(lambda: flat_step(b), n, 'mp_callbacks/learner/optimizers.py')
        assert inner(b).param_lists is lists and inner(b).state is state and 'step' not in vars(inner(b))
        a.step()
        assert all(torch.equal(q, p) or torch.equal(q, w) for p,q,w in zip(params(a), params(b), before))
        new_grads(b)
        flat_step(b)
        assert all(p.isfinite().all() and 1<=inner(b).state[p]['step']<=2 for p in params(b))
        if done: break
    assert n>50

@pytest.mark.cuda
@pytest.mark.results
@pytest.mark.parametrize('name', optimizers)
def test_cuda(name):
    sizes = *range(1,20),1000,70001
    Twins(optimizers[name], [[nn.Parameter(torch.randn(n).to(d)) for n in sizes for d in ('cuda','cpu')]]).steps(7)
