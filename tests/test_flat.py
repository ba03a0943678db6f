"""Steps on all parameters at once give the same weights, bit for bit, whatever happens between them

Each test has twins: the same parameters and the same optimizer twice, one stepped by fastai, one in `steps_at_once`.
Learners that train so, and what `flat_master=True` refuses, are in `test_parity.py`."""
from learners import *
from mp_callbacks.learner import optimizers as module
from mp_callbacks.learner.optimizers import steps_at_once
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

def step_at_once(opt):
    with steps_at_once(opt): opt.step()

def inner(opt): return opt.opt if hasattr(opt, 'slow_weights') else opt
def params(opt): return [p for pg in opt.param_lists for p in pg]
def bits(t):
    "A tensor as its bytes, so that -0 isn't 0, and nan is nan"
    if not isinstance(t, torch.Tensor): return t
    return t.dtype,t.shape,t.detach().contiguous().reshape(-1).view(torch.uint8).clone()

def contents(opt):
    "For each parameter of `opt` its bits, those of its gradient, and its state; then the slow weights"
    res = [[bits(p.data), p.grad is None, bits(p.grad), {k:bits(v) for k,v in inner(opt).state[p].items()}]
           for p in params(opt)]
    return [*res, *([bits(o) for o in pg] for pg in getattr(opt, 'slow_weights', None) or [])]

class Twins:
    "Two optimizers with the same parameters; the second steps at once. `each(f)` does the same to both."
    def __init__(self, make, groups):
        self.opts = [make(deepcopy(groups)) for _ in range(2)]

    def each(self, f):
        seed = random.random()
        for o in self.opts:
            random.seed(seed); seed_cpu(int(seed*2**32))
            f(o)

    def step(self, what=''):
        self.opts[0].step()
        step_at_once(self.opts[1])
        for i,(a,b) in enumerate(zip(*map(contents, self.opts), strict=True)): assert same(a, b), (what, i)

    def close(self):
        "May they differ in the last place only?"
        def _numbers(opt): return [[p,p.grad,dict(inner(opt).state[p])] for p in params(opt)]
        torch.testing.assert_close(*map(_numbers, self.opts), rtol=1e-5, atol=1e-6)

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

@pytest.fixture
def lists(monkeypatch):
    "The parameters of each list that is stepped on at once"
    seen,own = [],module._step_list
    def _note(opt, params, *args):
        seen.append(params)
        own(opt, params, *args)
    monkeypatch.setattr(module, '_step_list', _note)
    return seen

@pytest.mark.parametrize('dtype', [torch.float32,torch.float64])
@pytest.mark.parametrize('name', optimizers)
def test_sizes(name, dtype, lists):
    "All sizes whose ends a CPU treats differently, in two groups with their own learning rates"
    sizes = range(0,70,2),(*range(1,70,2),1000,70001)
    twins = Twins(optimizers[name], [[nn.Parameter(torch.randn(n, dtype=dtype)) for n in ns] for ns in sizes])
    twins.each(flags)
    twins.each(lambda o: o.set_hyper('lr', [.01,.1]))
    twins.steps(7)
    assert len(lists)==7*2*2 and sum(map(len, lists))==7*70 # with and without decay; not those of 0 and 70001 numbers
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
        for o,step in zip(twins.opts, (Optimizer.step,step_at_once)):
            for p in params(o): p.grad = torch.ones_like(p)
            sparse,double,_,_ = params(o)
            sparse.grad = torch.sparse_coo_tensor([[1,3]], torch.ones(2,2), (5,2), check_invariants=True)
            double.data = double.data.double()
            step(o)
        for p,q in zip(*map(params, twins.opts)): assert torch.equal(p, q)

class OwnParameter(nn.Parameter): "A class of its own"

odd = dict(
    sparse  = lambda p: setattr(p, 'grad', torch.ones(5).to_sparse()),
    complex = lambda p: setattr(p, 'data', p.data.cfloat()),
    half    = lambda p: setattr(p, 'data', p.data.half()),
    own     = lambda p: setattr(p, '__class__', OwnParameter))

@pytest.mark.parametrize('name', odd)
def test_odd_one_out(name, lists):
    "It is stepped on by itself, and the others at once"
    opt = SGD([nn.Parameter(torch.ones(5)) for _ in range(3)], lr=.5)
    ps = params(opt)
    odd[name](ps[1])
    for p in ps:
        if p.grad is None: p.grad = torch.ones_like(p)
    step_at_once(opt)
    assert all(torch.equal(p.real.float(), torch.full((5,), .5)) for p in ps)
    assert len(lists)==1 and identical(lists[0], [ps[0],ps[2]])

def shared(i, j):
    "Two views of one tensor as parameters"
    def _make(groups):
        ps = groups[0]
        ps[0].data,ps[1].data = ps[2].data[:i],ps[2].data[j:]
        return SGD(groups, lr=.1, mom=.9, wd=.1)
    return _make

def halve(p, **kwargs): p.data.mul_(.5)

class OwnStep(Optimizer):
    def step(self, closure=None): super().step(closure)

def with_hyper(opt, k, v):
    for h in opt.hypers: h[k] = v
    return opt

def wrapped_step(opt):
    opt.step = partial(Optimizer.step, opt)
    return opt

alone = dict(
    larc = lambda ps: Larc(ps, lr=.1), lamb = lambda ps: Lamb(ps, lr=.1), overlap = shared(5, 4), same = shared(8, 0),
    own = lambda ps: OwnStep(ps, [sgd_step], lr=.1), unmarked = lambda ps: Optimizer(ps, [halve,sgd_step], lr=.1),
    instance = lambda ps: wrapped_step(SGD(ps, lr=.1)),
    tensor = lambda ps: with_hyper(SGD(ps, lr=.1), 'lr', torch.tensor(.1)))

@pytest.mark.parametrize('name', alone)
def test_one_by_one(name, lists):
    "What can't step at once is left as it is, without a word"
    twins = Twins(alone[name], [[nn.Parameter(torch.randn(8,2)) for _ in range(3)]])
    before = [{**vars(o)} for o in twins.opts]
    twins.steps(3)
    assert not lists and all(vars(o).keys()==b.keys() for o,b in zip(twins.opts, before))
    assert all(vars(o).get('step')==b.get('step') for o,b in zip(twins.opts, before))

def test_neighbours(lists):
    "Views of one tensor that don't overlap, as cuDNN's weights of an RNN, are stepped on at once"
    twins = Twins(shared(4, 4), [[nn.Parameter(torch.randn(8,2)) for _ in range(3)]])
    for o in twins.opts: o.param_lists[0] = L(params(o)[:2])
    twins.steps(3)
    assert [*map(len, lists)]==[2]*3

@pytest.mark.parametrize('share', ['gradient','large'])
def test_shared_with_another(share, lists):
    "A gradient that weight decay is added to, and a parameter that is a part of one that is too large for a list"
    def _make(groups):
        small,large = groups[0][:-1],groups[0][-1]
        if share=='large': small[0].data = large.data[:3]
        return SGD(groups, lr=.1, wd=.1, decouple_wd=False)
    twins = Twins(_make, [[nn.Parameter(torch.randn(n)) for n in (3,3,2**16)]])
    for _ in range(3):
        twins.each(new_grads)
        for o in twins.opts:
            if share=='gradient': params(o)[1].grad = params(o)[0].grad
        twins.step()
    assert not lists

def of(*steppers): return lambda ps: Optimizer(ps, [*steppers,sgd_step], lr=.1)

def ema(p, ema=0., **kwargs): return {'ema': ema*.9+p.grad*.1, 'seen': 1}
def extremes(p, largest=None, **kwargs):
    largest = torch.zeros_like(p.grad) if largest is None else largest.maximum(p.grad)
    p.data.sub_(torch.sqrt(largest*largest), alpha=.1)
    return {'largest': largest}
def shape(p, **kwargs): return {'dims': p.grad.dim()} # what follows has no list either
def norm(p, **kwargs): return {'norm': p.grad.norm()}
def equal(p, **kwargs): p.data.mul_(p.grad.data==0)
def truth(p, **kwargs): p.data.mul_(1. if p.grad else 0.)
def counter(p, count=None, **kwargs):
    if count is None: count = torch.zeros(())
    count += 1
    return {'count': count}
listed,unlisted = (ema,extremes,counter),(shape,norm,equal,truth)
for f in (*listed,*unlisted): f.elementwise = True

@pytest.mark.parametrize('f', listed, ids=lambda f: f.__name__)
def test_own_stepper(f, lists, recwarn):
    "One that is marked does what it does in fastai, in one call, and the same comes out"
    twins = Twins(of(f), [[nn.Parameter(torch.randn(o)) for o in (3,5,(2,2),7)]])
    twins.steps(4)
    assert [*map(len, lists)]==[4]*4 and not [o for o in recwarn if 'mp_callbacks' in str(o.filename)]

@pytest.mark.parametrize('f', unlisted, ids=lambda f: f.__name__)
def test_asks_for_more(f):
    "What a list doesn't have is an error in the first step, which names the way out"
    opt = of(f)([nn.Parameter(torch.randn(3)) for _ in range(2)])
    new_grads(opt)
    with pytest.raises(AttributeError, match=r'has no \S+\. Set elementwise=False on the stepper'): step_at_once(opt)

def test_state_of_a_stepper():
    "New tensors, numbers, and tensors of another shape that are there already"
    twins = Twins(of(ema), [[nn.Parameter(torch.randn(o)) for o in (3,5,(2,2),7)]])
    states = {'rank':torch.ones(2)},{'history':[1]},{'ema':0.},{'ema':0.}
    def prepare(opt):
        for p,state in zip(params(opt), states): opt.state[p].update(state)
    twins.each(prepare)
    twins.steps(3)

def test_asks_for_more_later():
    "Then it is an error, which names what is missing and the way out"
    def late(p, step=0, **kwargs):
        if step==2: p.data.clamp_(-1, 1)
        return {'step': step+1}
    late.elementwise = True
    opt = of(late)([nn.Parameter(torch.randn(3)) for _ in range(2)])
    new_grads(opt)
    for _ in range(2): step_at_once(opt)
    with pytest.raises(AttributeError, match='has no clamp_. Set elementwise=False on the stepper'): step_at_once(opt)
    late.elementwise = False
    step_at_once(opt)
    assert [opt.state[p]['step'] for p in params(opt)]==[3,3]

def test_numbers_of_numpy():
    "As in `even_mults` of discriminative learning rates"
    twins = Twins(optimizers['qhadam'], [[nn.Parameter(torch.randn(o)) for o in (3,5)] for _ in range(2)])
    twins.each(lambda o: o.set_hyper('lr', slice(1e-3,1e-1)))
    twins.each(lambda o: with_hyper(with_hyper(o, 'nu_1', np.float64(.6)), 'mom', np.float32(.9)))
    twins.steps(3)

@pytest.mark.parametrize('name', optimizers)
def test_temporaries(name, monkeypatch):
    "At most four times the parameters of a list: 64 MB"
    most,*_ = module._limits(torch.device('cuda'))
    assert 4*most==64*2**20
    monkeypatch.setattr(module, '_limits', lambda device: (2**20,2**20,2))
    opt = optimizers[name]([nn.Parameter(torch.randn(3*2**14)) for _ in range(24)])
    new_grads(opt)
    step_at_once(opt) # makes the state
    with LiveBytes() as live:
        for p in params(opt):
            for t in (p,p.grad,*inner(opt).state[p].values()):
                if isinstance(t, torch.Tensor): live.add(t)
        before = live.now
        step_at_once(inner(opt))
    assert max(live.log)-before<=4*2**20 and live.now==before

def now_and_then():
    "A stepper that Ctrl-C interrupts if it is told to"
    def _stop(p, **kwargs):
        if _stop.on: raise KeyboardInterrupt
    _stop.elementwise,_stop.on = True,False
    return _stop

@pytest.mark.parametrize('place', range(6))
def test_interrupt_in_a_stepper(place):
    "What fastai leaves of the parameter that it is at, is left of all in the list; and the optimizer goes on"
    stop = now_and_then()
    def make(ps):
        opt = Adam(ps, lr=.1, wd=.1)
        opt.cbs.insert(place, stop)
        return opt
    twins = Twins(make, [[nn.Parameter(torch.randn(o)) for o in (3,5,(2,2))]])
    twins.steps(2)
    twins.each(new_grads)
    stop.on = True
    a,b = twins.opts
    for p in params(a): # each is where fastai is as the interrupt comes
        one = copy(a)
        one.param_lists = [[p]]
        with pytest.raises(KeyboardInterrupt): one.step()
    with pytest.raises(KeyboardInterrupt): step_at_once(b)
    for x,y in zip(*map(contents, twins.opts), strict=True): assert same(x, y)
    stop.on = False
    twins.steps(2)

def test_interrupt_anywhere():
    "A KeyboardInterrupt at any line: the optimizer is as it was but for parameters and their state, and can go on"
    for n in itertools.count(1):
        torch.manual_seed(0)
        groups = [[nn.Parameter(torch.randn(o)) for o in shapes] for shapes in ((3,(2,2)),(5,4))]
        twins = Twins(optimizers['ranger'], groups)
        b = twins.opts[1]
        new_grads(b)
        lists,state = inner(b).param_lists,inner(b).state
        done = not interrupted(lambda: step_at_once(b), n, 'mp_callbacks/learner/optimizers.py', 'fastai/optimizer.py')
        assert inner(b).param_lists is lists and inner(b).state is state and 'step' not in vars(inner(b))
        new_grads(b)
        step_at_once(b)
        assert all(p.isfinite().all() and 1<=inner(b).state[p]['step']<=2 for p in params(b))
        if done: break
    assert n>100

@pytest.mark.parametrize('mode', with_fp8)
def test_each_call(mode, lists):
    "All precisions step at once, by default, and what is saved and resumed has the bits of fastai's own step"
    def _run(opt_func):
        learn = with_fp8[mode](get_learner(opt_func=opt_func))
        learn.fit(1)
        state = deepcopy(learn.opt.state_dict())
        learn.create_opt()
        learn.opt.load_state_dict(deepcopy(state))
        learn.fit(1)
        return weights(learn),state,learn.opt.state_dict()
    got = _run(Adam)
    assert lists and all(len(o)>1 for o in lists)
    lists.clear()
    assert same(_run(one_by_one(Adam)), got) and not lists

@pytest.mark.cuda
@pytest.mark.results
@pytest.mark.parametrize('name', optimizers)
def test_cuda(name):
    "Kernels for lists may round otherwise than those for single tensors"
    sizes = *range(1,20),1000,70001
    twins = Twins(optimizers[name], [[nn.Parameter(torch.randn(n).to(d)) for n in sizes for d in ('cuda','cpu')]])
    for _ in range(7):
        twins.each(new_grads)
        for o,step in zip(twins.opts, (lambda o: o.step(),step_at_once)): step(o)
        twins.close()
