"""A look at a batch, or its measure, leaves no trace: whatever state a model, a loss or a callback keeps, and wherever

What computes hidden passes is in `looks` and `of_learner`; a new one belongs there."""
from collections import deque
from learners import *
from mp_callbacks.core.measure import measure_gradients,measure_predictions
from mp_callbacks.core.nonfinite import bad_items,diagnose
from mp_callbacks.core.replay import record_batch,record_step,write_step
from mp_callbacks.learner.looks import batch_noise,batch_times
from mp_callbacks.look.half_report import PrecisionReport,measure_precision
from mp_callbacks.look.noise import BatchNoise
from mp_callbacks.look.plan import plan_memory

pytestmark = [pytest.mark.filterwarnings('ignore'),pytest.mark.usefixtures('folder')]

class Plain: n = 0

def count(o): o.n += 1
def put(o): o['x'] = len(o)
def plus(o): o += 1
def of_rng(o): return str(pickle.dumps(o) if not isinstance(o, torch.Generator) else o.get_state().tolist())

kinds = dict( # what makes it, what changes it, and what is to be seen of it; core/restore.ipynb has all kinds
    number=(Plain, count, vars), dict=(dict, put, dict), deque=(deque, lambda o: o.append(1), list),
    array=(lambda: np.zeros(2), plus, list),
    tensor=(lambda: [torch.zeros(2)], lambda o: plus(o[0]), lambda o: o[0].clone()),
    torch=(torch.Generator, lambda o: torch.rand(1, generator=o), of_rng),
    python=(lambda: random.Random(1), random.Random.random, of_rng))

class Stateful(nn.Module):
    "Changes its state in each call"
    def __init__(self, kind):
        super().__init__()
        self.layer,(make,self.change,self.look) = nn.Linear(2,1),kinds[kind]
        self.state = make()
    def forward(self, x):
        self.change(self.state)
        return self.layer(x)
    @property
    def seen(self): return deepcopy(self.look(self.state)),id(self.state)

class Writes(nn.Module):
    "Writes its parameter, its buffers and one that is in no module, and adds a buffer"
    def __init__(self, how):
        super().__init__()
        self.layer,self.how,self.elsewhere = nn.Linear(2,1),how,[torch.ones(1, requires_grad=True)]
        self.register_buffer('mean', torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.elsewhere[0].grad = torch.full((1,), 7.)
    def forward(self, x):
        if self.how=='elsewhere': return self.layer(x)*self.elsewhere[0]
        if self.how=='data': self.scale.data = self.scale.data*2
        if self.how=='in_data': self.scale.data.view(1,2)[0,:1].mul_(2)
        with torch.no_grad():
            if self.how=='parameter': self.scale.mul_(2)
            if self.how=='each': torch._foreach_add_([self.scale,self.mean], 1.)
            if self.how=='buffer': self.mean += x.mean(0)
            if self.how=='resized': self.mean.resize_(3).fill_(1.)
            if self.how=='new': self.register_buffer('more', self.mean+1)
        return self.layer(x*self.scale)
    @property
    def seen(self):
        t = self.elsewhere[0]
        return deepcopy(self.state_dict()),self.scale.data_ptr(),t.grad.item(),[p.grad for p in self.parameters()]

def loss_of(model, x): return model(x).square().mean()
def all_of(model, x): return dict(half=half_precision(model, bf16), compute_loss=lambda *_: loss_of(model, x))
def report(model, half, compute_loss): measure_precision(PrecisionReport(bf16, 1., 0.), model, compute_loss, half)
def plan(model, half, compute_loss):
    def loss(n): return loss_of(model, x[:n]) # as many items as it asks for
    plan_memory(model, loss, torch.optim.Adam(model.parameters()), 4, half)
x = torch.arange(8.).view(4,2)
looks = dict(
    gradients=lambda model, half, compute_loss: measure_gradients(half, compute_loss),
    predictions=lambda model, half, compute_loss: measure_predictions(half, (x,), {}),
    diagnose=lambda model, half, compute_loss: diagnose(model, compute_loss, half),
    items=lambda model, half, compute_loss: bad_items(model, lambda o: loss_of(model, o*math.inf), x, half),
    noise=lambda model, half, compute_loss: BatchNoise(half).add(compute_loss), report=report, plan=plan,
    without_rules=lambda model, half, compute_loss: half.works_without_rules((x,), {}))
writes = 'parameter','data','in_data','each','buffer','resized','new','elsewhere'

@pytest.mark.parametrize('look', looks)
@pytest.mark.parametrize('make,kind', [*[(Stateful,o) for o in kinds],*[(Writes,o) for o in writes]], ids=str)
def test_state_of_a_model(make, kind, look):
    "Each kind of state, each look"
    if look=='plan' and kind in ('parameter','data','in_data','each'): return # a copy may not fit
    model = make(kind)
    before = model.seen
    looks[look](model, **all_of(model, x))
    assert same(model.seen, before)
    model(x)
    if kind!='elsewhere': assert not same(model.seen, before)

@pytest.mark.parametrize('look', looks)
def test_the_same_in_each_pass(look):
    "All passes of a look see what the first one saw"
    class Notes(Stateful):
        def forward(self, x):
            seen.append(self.seen)
            return super().forward(x)
    seen = []
    model = Notes('python')
    looks[look](model, **all_of(model, x))
    if look!='plan': assert seen and all(o==seen[0] for o in seen) # it counts steps that follow each other

def test_not_repeatable():
    "Noise from a closure, which can't be put back, is no difference between precisions: no module is blamed for it"
    rng = torch.Generator().manual_seed(0)
    class Noisy(nn.Module):
        def __init__(self): super().__init__(); self.table,self.layer = nn.Embedding(4,16),nn.Linear(16,1)
        def forward(self, i): return self.layer(self.table(i)*torch.randn(16, generator=rng))
    model = Noisy()
    half = half_precision(model, bf16)
    found = half.measure(lambda: loss_of(model, torch.arange(4)))
    assert found.why.startswith('not repeatable') and found.names==() and 'not repeatable' in half.policy().why.iloc[0]

# --- Learners

class Everything:
    "A state of every kind"
    def __init__(self): self.states = {k:make() for k,(make,*_) in kinds.items()}
    def change(self):
        for k,o in self.states.items(): kinds[k][1](o)
    @property
    def seen(self): return {k:deepcopy(kinds[k][2](o)) for k,o in self.states.items()}

class OfModel(nn.Module):
    def __init__(self, state): super().__init__(); self.layer,self.state = nn.Linear(8,1),state
    def forward(self, x):
        self.state.change()
        return self.layer(x)

class OfLoss(nn.Module):
    def __init__(self, state): super().__init__(); self.inside = nn.Module(); self.inside.state = state
    def forward(self, pred, y):
        self.inside.state.change()
        return F.mse_loss(pred, y)

class PlainLoss:
    def __init__(self, state): self.state = state
    def compute(self, pred, y):
        self.state.change()
        return F.mse_loss(pred, y)

class OfCallback(Callback):
    def __init__(self, state): self.by = {'all':[state]}
    def after_loss(self): self.by['all'][0].change()

def learner_with(holder, state):
    if holder=='model': return get_learner(OfModel(state))
    if holder=='callback': return get_learner(nn.Linear(8,1), cbs=OfCallback(state))
    return get_learner(nn.Linear(8,1), loss_func=OfLoss(state) if holder=='loss' else PlainLoss(state).compute)

def replayed(learn):
    "Compute a batch again, as if its step had been skipped"
    steps,half = learn.mixed_precision.steps,learn.mixed_precision.half
    recorded = record_batch(learn.dls.one_batch(), half.params)._replace(loss=torch.tensor(0.))
    step = record_step(learn.model, steps.loss_modules(), [recorded], by='learn.replay', step=0, place={}, scale=1.,
                       half=repr(half), half_checksum=half.model_checksum, rescued=[], measured=None)
    with TemporaryDirectory() as folder: learn.replay(write_step(step, Path(folder)))

of_learner = dict(find=lambda o: o.find_nonfinite(), report=lambda o: o.precision_report(2),
                  noise=lambda o: batch_noise(o, 2), plan=lambda o: o.precision_plan(), times=batch_times,
                  serving=lambda o: o.precision_serving(2), replay=replayed)
holders = 'model','loss','plain_loss','callback'

@pytest.mark.parametrize('look', of_learner)
@pytest.mark.parametrize('holder', holders)
def test_state_of_a_learner(holder, look):
    state = Everything()
    before,learn = state.seen,learner_with(holder, state).to_bf16()
    of_learner[look](learn)
    assert same(state.seen, before)

@pytest.mark.parametrize('options', [dict(),dict(memory=1e-4)], ids=['measure','memory'])
@pytest.mark.parametrize('holder', holders)
def test_state_of_a_fit(holder, options):
    "The measure of the first batch, and a plan: as without them"
    states = Everything(),Everything()
    for state,o in zip(states, [options,dict(measure=False)]): fitted(learner_with(holder, state).to_bf16(**o))
    assert same(*[o.seen for o in states])

@pytest.mark.parametrize('call', ['to_native_bf16','to_bf16'])
def test_explained_steps(call):
    "A warning about many skipped steps looks at a batch, which a callback counts once"
    class Counts(Callback):
        order,run_valid,seen,off = 1,False,0,0
        def after_loss(self):
            self.off += self.seen!=self.train_iter
            self.seen += 1
            if self.train_iter in (2,3,7,11,13,19,20,21,23,24):
                self.learn.loss_grad = self.loss_grad*1.
                self.loss_grad.register_hook(lambda g: g*math.inf)
    learn = get_learner(nn.Linear(8,1), as_dls(*numbers(400), bs=8), cbs=Counts())
    texts,_ = heard(fitted, getattr(learn, call)())
    assert any('not finite' in o for o in texts) and learn.counts.seen==50 and not learn.counts.off

# --- A layer that initialises itself

class Flag: ready = False
class FromFirstBatch(nn.Module):
    "Scales by the first batch, as an ActNorm; its flag is in an object"
    def __init__(self):
        super().__init__()
        self.scale,self.flag,self.layer = nn.Parameter(torch.ones(8)),Flag(),nn.Linear(8,1)
    def forward(self, x):
        if not self.flag.ready:
            with torch.no_grad(): self.scale.copy_(1/x.float().std(0))
            self.flag.ready = True
        return self.layer(x*self.scale)

@pytest.mark.parametrize('how', ['learner','steps','with','find'])
def test_initialised_by_the_first_batch(how):
    "Of the training, and not of a look"
    data,y = numbers(64)
    model,want = FromFirstBatch(),1/data[:16].std(0)
    if how=='with':
        with half_precision(model, bf16): model(data[:16])
    elif how=='steps':
        steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.), bf16, compute_loss=mse_of)
        with steps.batch(data[:16], y[:16]): steps.backward(F.mse_loss(model(data[:16]), y[:16]))
    else:
        learn = get_learner(model, as_dls(data, y, bs=16), lr=0.).to_bf16()
        if how=='find': learn.find_nonfinite(); assert not model.flag.ready
        fitted(learn)
    assert model.flag.ready and torch.allclose(model.scale, want, rtol=1e-2)
