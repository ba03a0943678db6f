"""`measure`: the first batch says whether half precision is as exact as autocast, and changes nothing else

What it finds computes as under autocast from then on. The answer is kept, and asked for again where it may be
another."""
from collections import deque

from learners import *
from mp_callbacks.core import measure,processes
from mp_callbacks.core.measure import Measured
from measured_models import convolves,rows
from mp_callbacks.core.ways import Way

again = partial(checkpoint, use_reentrant=False)

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')

def years(n=24):
    "A table of years, which is not trained, before a batch norm; a quick one for float16"
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding.from_pretrained(1990+5*torch.randn(80,n)), nn.BatchNorm1d(n), nn.Linear(n,1))

def year_data(n=64):
    gen = torch.Generator().manual_seed(1)
    return torch.randint(80, (n,), generator=gen),torch.randn(n, 1, generator=gen)

def year_learner(**kwargs): return get_learner(years(), as_dls(*year_data()), opt_func=SGD, **kwargs)
def measured_of(learn): return learn.mixed_precision.state.measured

@contextmanager
def asked():
    "The list that gets the answer of each measure of gradients"
    found,plain = [],measure.measure_gradients
    def _measure(*args, **kwargs):
        found.append(plain(*args, **kwargs))
        return found[-1]
    with pytest.MonkeyPatch.context() as patch:
        for o in ('core.checked_steps','core.half'):
            patch.setattr(f'mp_callbacks.{o}.measure_gradients', _measure)
        yield found

@contextmanager
def told():
    "The list that gets the warnings about modules"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        yield (res := [])
    res += [o for o in found if 'as under autocast' in str(o.message)]

def loop(model, x, y, n=4, **kwargs):
    "`TrainingSteps` after `n` steps"
    opt = torch.optim.SGD(model.parameters(), .01)
    steps = TrainingSteps(model, opt, **{**dict(half=bf16, compute_loss=mse_of), **kwargs})
    return train_steps(steps, [(x,y)]*n)

# --- What it finds

@pytest.mark.parametrize('name,dtype', [(o,d) for o in rows for d in (bf16,f16) if d==bf16 or o not in convolves])
def test_rows(name, dtype):
    "Gradients are about as exact as under autocast, which by the rules alone they aren't, and few modules are named"
    torch.manual_seed(0)
    model,x,y = rows[name]()
    half,compute_loss = half_precision(model, dtype),lambda: F.mse_loss(model(x[:64]).float(), y[:64])
    found = half.measure(compute_loss)
    most = max(measure.tolerance*found.autocast, measure.least_steps['gradients']*torch.finfo(dtype).eps)
    assert 1<=len(found.names)<=2 and found.error>most
    with measure.batch_gradients(model, compute_loss) as gradients:
        full,ours,auto = gradients(None),gradients(half),gradients(half.replace(rules=False))
        assert measure.gradients_apart(ours, full)<=most and measure.gradients_apart(auto, full)<=found.autocast+1e-6

@pytest.mark.parametrize('call', ['to_bf16','to_fp16'])
def test_learner(call):
    "It is asked once, and says at the caller's line how far, which module, and a line with which nothing is said"
    with told() as said: learn = fitted(getattr(year_learner(), call)())
    found, = said
    text,ours = str(found.message),measured_of(learn)
    assert ours.names==('0',) and ours.error>.05>3*ours.autocast and found.filename==inspect.getfile(fitted)
    assert f"{ours.error:.2%} off float32's by our rules, and {ours.autocast:.2%} off under autocast" in text
    assert text.endswith("0. To begin so: keep={'0': 'autocast'}.")
    row = learn.mixed_precision.policy().set_index('module').loc['0']
    assert (row.way,row.why)==('autocast','measured')
    assert str(ours) in repr(ours) and 'As under autocast: 0.' in repr(ours)
    with told() as said: again = fitted(getattr(year_learner(), call)(keep={'0':'autocast'}))
    assert not said and measured_of(again).names==() and measured_of(again).error is None
    assert again.mixed_precision.policy().set_index('module').loc['0'].why=='keep'

def test_as_exact_as_autocast():
    "In a fit of some epochs; by the rules alone the loss is another"
    def loss(change):
        learn = fitted(change(year_learner()), 8)
        return learn.to_fp32().validate()[0]
    full,ours,auto = map(loss, (noop, lambda o: o.to_bf16(), lambda o: o.to_native_bf16()))
    rules = loss(lambda o: o.to_bf16(measure=False))
    assert abs(ours-full)<.05*full and abs(auto-full)<.05*full and abs(rules-full)>2*abs(ours-full)

def test_message_keeps_keep():
    "One dict has all of it"
    model = nn.Sequential(*years(), nn.Linear(1,1))
    learn = get_learner(model, as_dls(*year_data()), opt_func=SGD).to_bf16(keep=nn.BatchNorm1d)
    with told() as said: fitted(learn)
    assert str(said[0].message).endswith("keep={'1': 'float32', '0': 'autocast'}.")

def own_gain():
    "A parameter of the model itself near 1, in a product that is repeated"
    def forward(m, x):
        u = m.inp(x.abs())
        h = torch.zeros_like(u)
        for _ in range(150): h = m.decay*h+u
        return m.out(h*.02)
    torch.manual_seed(0)
    return Does(forward, inp=nn.Linear(8,16), out=nn.Linear(16,1), decay=torch.linspace(.98,.999,16))

def test_the_model_itself():
    "Parameters in no layer: the name is '', for that module alone"
    with told() as said: learn = fitted(in_mode('bf16', own_gain()))
    assert measured_of(learn).names==('',)
    assert str(said[0].message).endswith("the model itself. To begin so: keep={'': 'autocast'}.")
    ways = half_precision(own_gain(), bf16, keep={'':'autocast'}).ways
    assert (ways[''].name,ways['inp'].name)==('autocast','layer')

def error_by_rules():
    "Sums into float32, which only our rules don't fit"
    def forward(m, x):
        h = m.inp(x)*m.gain
        return m.out(torch.zeros(4, 16).index_add_(0, torch.arange(len(h))%4, h).repeat(len(h)//4, 1))
    return Does(forward, inp=nn.Linear(8,16), out=nn.Linear(16,1), gain=torch.ones(16))

def nested(f, *args): return again(lambda *args: 1*again(f, *args), *args)
def on_cpu(f, *args):
    with torch.autograd.graph.save_on_cpu(): return again(f, *args)

@pytest.mark.parametrize('how', [nested,on_cpu])
def test_checkpointed_arguments(how):
    """Of a part that is checkpointed twice, or saved elsewhere: PyTorch gives back another tensor than the parameter

    What is computed again then has another dtype, which is an error. As under autocast it has the same."""
    model = Does(lambda m,x: m.out(how(torch.mul, m.inp(x), m.gain)), inp=nn.Linear(8,16), out=nn.Linear(16,1),
                 gain=torch.linspace(.5, 1.5, 16))
    learn = fitted(in_mode('bf16', model))
    assert measured_of(learn).names==('',) and measured_of(learn).error==math.inf and log_of(learn).finite.all()

def zeros_like(h): return torch.zeros(h.shape)
def index(h): return torch.arange(len(h))[:,None].expand(h.shape)

writes = { # into float32 zeros, or with a function that has no half precision
    'scatter':   lambda h: zeros_like(h).scatter(0, index(h), h),
    'index_put': lambda h: zeros_like(h).index_put((torch.arange(len(h)),), h),
    'complex':   lambda h: torch.complex(h[:,::2].contiguous(), h[:,1::2].contiguous()).abs().repeat(1, 2)}

# complex numbers of a layer's results fail under autocast, too
@pytest.mark.parametrize('write,rows_from', [*[(o,'lookup') for o in writes],('scatter','own'),('index_put','own')])
def test_what_only_float32_can_write(write, rows_from):
    "Works as under autocast; the module that makes the rows is named"
    if rows_from=='own':
        model = Does(lambda m, i: m.out(writes[write](m.inp(m.rows(i).detach())*m.gain)), gain=torch.ones(16),
                     rows=nn.Embedding(80,16), inp=nn.Linear(16,16), out=nn.Linear(16,1))
    else: model = Does(lambda m, i: m.out(writes[write](m.rows(i))), rows=nn.Embedding(80,16), out=nn.Linear(16,1))
    learn = get_learner(model, as_dls(*year_data()), opt_func=SGD).to_bf16()
    assert log_of(fitted(learn)).finite.all()
    assert measured_of(learn).error==math.inf and measured_of(learn).names==(('',) if rows_from=='own' else ('rows',))

@pytest.mark.parametrize('how', ['learner','steps','with'])
def test_an_error_of_a_way_of_ones_own(how):
    "Is raised where the model is called, as without the measure, and names no module"
    class Mistaken(Way):
        def around(self, half, module, forward, args, kwargs): return forward(args[0].to(dtyp=half.dtype))
    half = half_precision(model := mlp(), bf16, way=lambda name, m: Mistaken() if name=='2' else None)
    with told() as said,pytest.raises(TypeError, match='dtyp'):
        if how=='learner': get_learner(model).to_bf16(way=half.way).fit(1)
        elif how=='steps': loop(model, *numbers(), half=half)
        else:
            with half: model(numbers()[0])
    assert not said

def test_an_error_of_ours(monkeypatch):
    "All modules are named, and the warning says what was raised, where, and that it should be reported"
    from mp_callbacks.core import cast
    def broken(ctx, *args): raise AttributeError('a name that PyTorch has lost')
    monkeypatch.setattr(cast.CastAll, 'forward', staticmethod(broken))
    with told() as said: learn = fitted(get_learner().to_bf16())
    text, = [str(o.message) for o in said]
    assert measured_of(learn).names==('0','2','4') and log_of(learn).finite.all()
    for o in ('an error (AttributeError: a name that PyTorch has lost, in broken, line','Please report it','Traceback'):
        assert o in text
    assert 'AttributeError' in str(measured_of(learn)) and 'Traceback' not in str(measured_of(learn))
    monkeypatch.undo()
    with told() as said: # one module is to blame; nor was it all if the search ended before it had found which
        fitted(in_mode('bf16', error_by_rules()))
        monkeypatch.setattr(measure, 'most_tries', 1)
        fitted(in_mode('bf16', nn.Sequential(error_by_rules(),nn.Linear(1,1))))
    assert len(said)==2 and not any('report' in str(o.message) for o in said)

def cnn(): return nn.Sequential(nn.Unflatten(1, (2,4)), nn.Conv1d(2,4,3), nn.Flatten(), nn.Linear(8,1))

@pytest.mark.parametrize('make', [mlp,cnn])
def test_an_ordinary_model_is_measured(make):
    with asked() as found,told() as said: learn = fitted(get_learner(make()).to_bf16())
    assert len(found)==1 and not said and measured_of(learn).names==() and measured_of(learn).passes==3
    assert re.fullmatch(r"Measured at step 0: gradients are within 0\.\d\d% of autocast's\.", str(measured_of(learn)))

def test_refused():
    "What is neither True, False nor an answer"
    model = mlp()
    for f in (lambda: half_precision(model, bf16, measure=3), lambda: get_learner().to_bf16(measure='no')):
        with pytest.raises(TypeError, match='measure=.* must be True or False'): f()

def test_nothing_to_measure():
    "No layer, norm, lookup or own parameter; autocast; FP8; who doesn't want it"
    nothing = nn.Sequential(nn.RNN(8,1), Does(lambda m, x: x[0]))
    learns = [get_learner(nothing).to_bf16(),get_learner().to_native_bf16(),get_learner().to_bf16(measure=False),
              get_learner(mlp(16)).to_fp8(emulate=True)]
    with asked() as found:
        for learn in learns: assert measured_of(fitted(learn)) is None
    assert not found

def recur(m, x):
    "A recurrence written by hand, of five operations in a step"
    x = m.enter(x)
    for _ in range(m.steps): x = torch.tanh(x*m.a+m.b)*m.g+m.views[1][None]
    return m.leave(x)

def recurrence(steps):
    torch.manual_seed(0)
    model = Does(recur, enter=nn.Linear(8,32), leave=nn.Linear(32,1), a=torch.ones(32), b=torch.zeros(32),
                 g=torch.full((32,), .5), views=nn.ParameterList([torch.zeros(32)]*2))
    model.steps = steps
    return model

def test_loops_of_a_learner():
    "They are counted once, go into checkpoints without a word, and not with measure=False"
    dls = get_dls()
    with told() as warned:
        learn = get_learner(recurrence(9), dls).to_bf16()
        with asked() as found: learn.fit(2)
        other = get_learner(recurrence(9), dls).to_bf16()
        with TemporaryDirectory() as d:
            learn.path = other.path = Path(d)
            learn.save('a')
            other.load('a')
        with asked() as again: other.fit(1)
        plain = get_learner(recurrence(9), dls).to_bf16(measure=False)
        plain.fit(1)
    assert [len(found),len(again),len(warned)]==[1,0,0]
    assert measured_of(learn).loops==other.mixed_precision.half.measured.as_autocast==('',)
    assert 'own parameters' in [*plain.mixed_precision.policy().way]

def test_a_copy_follows():
    "One that has computed nothing yet, too"
    half = copy(half_precision(mlp(), bf16))
    half.follow(Measured(('0',)), warn=False)
    assert half.ways['0'].why=='measured'

# --- Nothing else changes

def remembers(m, x):
    "Draws from all generators, writes a parameter and a buffer, and remembers"
    m.calls.append(len(x))
    with torch.no_grad(): m.book.mul_(.9)
    m.last = m.norm(m.lin(x))
    noise = random.random()+np.random.rand()+torch.rand(16)
    return m.out(F.dropout(m.last*noise, .5))

def noisy(): return Does(remembers, lin=nn.Linear(8,16), norm=nn.BatchNorm1d(16), out=nn.Linear(16,1), calls=[],
                         book=nn.Parameter(torch.ones(4), requires_grad=False))

class Counts(Callback):
    "Counts, in numbers, lists and dicts"
    def before_fit(self): self.n,self.seen,self.by = 0,[],{}
    def after_pred(self): self._count('pred')
    def after_loss(self): self._count('loss')
    def _count(self, what):
        self.n += 1
        self.seen.append(what)
        self.by[what] = self.by.get(what, 0)+1

@pytest.mark.parametrize('mode', ['bf16','fp16'])
@pytest.mark.parametrize('cbs', [[],[GradientAccumulation(24)],[MixUp()]], ids=['each','gathered','mixup'])
def test_bits(mode, cbs):
    "All is as without the measure: weights, state, random numbers, what model, callbacks and recorder have counted"
    def run(**options):
        set_seed(3)
        learn = in_mode(mode, noisy(), options=options, cbs=[Counts(),*cbs], opt_func=Adam)
        with asked() as found: fitted(learn, 2)
        cb,model = learn.counts,learn.model
        state = {k:o for k,o in precision_state(learn).items() if not k.startswith('measured')}
        rngs = random.random(),np.random.rand(),torch.rand(1).item()
        return len(found),[model.state_dict(),learn.opt.state_dict()['state'],state,rngs,(cb.n,cb.seen,cb.by),
                           model.calls,model.last.detach(),log_of(learn).to_dict(),learn.recorder.values]
    (one,with_it),(none,without) = run(),run(measure=False)
    assert one>0 and not none
    for a,b in zip(with_it, without): assert same(a, b)

def test_tensors_elsewhere():
    "Inputs that want gradients, and parameters of a loss, keep theirs; no hook of an optimizer steps"
    learn = get_learner(loss_func=ScaledLoss())
    learn.loss_func.w.grad = torch.tensor(7.)
    seen = []
    def look(learn):
        seen.append((learn.loss_func.w.grad.item(), learn.x.grad))
    def want(learn): learn.xb = (learn.x.clone().requires_grad_(),)
    fitted(learn.to_bf16(), 1, On('before_batch', want, at=[0]), On('before_backward', look, 90, at=[0]))
    assert seen==[(7.,None)] and measured_of(learn).why==''

def test_modules_are_put_back():
    "After an error in the middle, too"
    model,calls = mlp(),[0]
    def forward(m, x):
        calls[0] += 1
        if calls[0]==2: raise KeyboardInterrupt
        return m.body(x)
    learn = in_mode('bf16', Does(forward, body=model))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert_plain(learn.model)
    assert measured_of(learn) is None and measured_of(fitted(learn)).names==()

def test_memory():
    "Two lists of gradients and a copy of the parameters, beside the parameters and what the cast needs"
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256,256) for _ in range(8)])
    n,x = sum(p.numel() for p in model.parameters()),torch.randn(2,256)
    half = half_precision(model, bf16)
    with LiveBytes() as live:
        for p in model.parameters(): live.add(p)
        half.measure(lambda: model(x).square().mean())
        gc.collect()
    assert half.measured.why=='' and max(live.log)<=(4*4+2+.5)*n # float32 four times, and half precision
    assert live.now<4.1*n

# --- Asked again

def test_once():
    "Not in a second fit, nor after saving and loading"
    with asked() as found,TemporaryDirectory() as tmp:
        learn = fitted(fitted(year_learner(path=tmp).to_bf16()))
        learn.save('a')
        fitted(learn)
        fitted(learn.load('a'))
        fitted(year_learner(path=tmp).to_bf16().load('a'))
        fitted(deepcopy(learn))
    assert len(found)==1

class Offset(nn.Module):
    "Points in pixels, learned from zero: bfloat16 has steps of 2 to 4 near 500, and zeros are exact"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net,self.ref = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,16)),nn.Parameter(torch.zeros(16))
    def forward(self, x): return self.ref+self.net(x)

def points(n=64):
    gen = torch.Generator().manual_seed(1)
    return torch.randn(n, 8, generator=gen),torch.randn(n, 16, generator=gen)+500

def trained():
    model = Offset()
    nn.init.constant_(model.ref, 500.)
    return model

def offset_learner(**kwargs):
    return get_learner(Offset(), as_dls(*points()), loss_func=nn.L1Loss(), opt_func=SGD, lr=1e-3, **kwargs).to_bf16()

def l1_of(m, x, y): return F.l1_loss(m(x), y)

def offset_steps(**kwargs):
    steps = loop(Offset(), *points(), n=0, **{**dict(compute_loss=l1_of), **kwargs})
    return train_steps(steps, [points()], l1_of)

def by_load(model): model.load_state_dict(trained().state_dict())
def by_hand(model):
    with torch.no_grad(): model.ref.fill_(500.)
def replaced(model): model.ref = nn.Parameter(trained().ref.detach())

@pytest.mark.parametrize('write', [by_load,by_hand,replaced])
def test_other_weights(write):
    "Whoever wrote them: in the first batch of a fit, and in the next call without gradients"
    learn = fitted(offset_learner())
    write(learn.model)
    with told() as said: fitted(learn)
    assert len(said)==1 and measured_of(learn).names==('',) and measured_of(learn).steps==(0,4)
    half,x = half_precision(Offset(), bf16),points()[0]
    with half,torch.no_grad():
        half.model(x)
        write(half.model)
        half.refresh()
        with told() as said: pred = half.model(x)
    assert len(said)==1 and (pred-half.model(x)).abs().max()<.1

def test_loaded_after_lr_find(tmp_path):
    "The usual order in a notebook"
    learn = offset_learner(path=tmp_path)
    torch.save(trained().state_dict(), tmp_path/'trained.pth')
    learn.lr_find(show_plot=False, num_it=4)
    learn.load(tmp_path/'trained', with_opt=False)
    assert measured_of(fitted(learn)).names==('',)

def test_resumed_at_the_same_steps(tmp_path):
    "A resumed run has the answers of the unbroken one, also where others had written the weights before it was saved"
    def new(): return offset_learner(path=tmp_path)
    for write in (noop,by_load):
        learn = fitted(new(), 2)
        write(learn.model)
        learn.save('a')
        other = new().load('a')
        for o in (learn,other): fitted(o, 7)
        assert measured_of(learn)==measured_of(other) and same_weights(learn, other)
        assert measured_of(learn).steps==((0,32) if write is noop else (0,8,32))

def test_other_parameters_and_modules():
    "A set of parameters that hasn't trained, one by one; a module that is another; another precision"
    model = nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.Linear(16,1))
    learn = get_learner(model).to_bf16()
    def train(body): model[0].requires_grad_(body)
    with asked() as found:
        for body,n in ((False,1),(True,2),(False,2),(True,2)): # as a GAN switches
            train(body)
            assert len(fitted(learn) and found)==n
        model[1] = nn.GroupNorm(4,16)
        assert len(fitted(learn) and found)==3
        learn.to_fp16()
        assert len(fitted(learn) and found)==4
        learn.to_fp16(keep='0')
        assert len(fitted(learn) and found)==5

def test_a_batch_that_is_not_finite_says_nothing():
    "The next one is measured"
    bad = On('before_batch', lambda learn: setattr(learn, 'yb', (learn.y*math.inf,)), at=[0,1])
    with told() as said: learn = fitted(year_learner(cbs=bad).to_bf16())
    assert len(said)==1 and measured_of(learn).names==('0',) and skipped(learn)==2

def test_an_infinite_loss_after_the_measure():
    "What was measured isn't open again: a batch that is computed for a warning of skipped steps shows nothing"
    bad = On('after_pred', lambda learn: setattr(learn, 'yb', (learn.y*math.inf,)), at=[3,4])
    with asked() as found: learn = get_learner(cbs=bad).to_bf16(warn_skips=2, max_skips=99); heard(learn.fit, 2)
    assert skipped(learn)==2 and len(found)==1 and measured_of(learn).waits==0

def test_turned_off_later():
    "Nothing is measured any more, and what was named counts no more"
    with told(): learn = fitted(year_learner().to_bf16())
    assert learn.mixed_precision.half.measured.names==('0',)
    learn.mixed_precision.measure = False
    with asked() as found: learn.fit(1, cbs=On('before_fit', lambda learn: learn.model[2].bias.requires_grad_(False)))
    assert not found and learn.mixed_precision.half.measured is None

class Margin(nn.Module):
    "A hinge, whose margin isn't violated before batch `first`"
    def __init__(self, first): super().__init__(); self.n,self.first = 0,first
    def forward(self, pred, y):
        self.n += 1
        return F.relu(F.mse_loss(pred, y)-(0 if self.n>self.first else 1e6))

def test_gradients_of_zero_say_nothing():
    "The next batch is measured, in a loop, too"
    with told() as said: learn = fitted(year_learner(loss_func=Margin(3)).to_bf16())
    assert len(said)==1 and measured_of(learn).names==('0',) and measured_of(learn).waits==0
    def compute_loss(m, x, y, weight): return F.mse_loss(m(x), y)*weight[0]
    steps = loop(years(), *year_data(), n=0, compute_loss=compute_loss)
    train_steps(steps, [(*year_data(),torch.full((64,), o)) for o in (0.,0.,1.)], compute_loss)
    assert steps.state.measured.names==('0',)

def test_without_evidence_it_is_left():
    "After 20 batches in a row. `policy` and the check-up say why."
    learn = fitted(year_learner(loss_func=Margin(1e9)).to_bf16(), 6)
    assert measured_of(learn).waits==measure.most_waits and not measured_of(learn).waiting
    text = 'Not measured: gradients are all zero, 20 batches in a row'
    assert text in learn.mixed_precision.policy().why[0] and text in str(learn.precision_checkup())

def test_equal_predictions_say_nothing():
    "Such as those of a first call on zeros, to warm up"
    half,x = half_precision(close_rows(), bf16),year_data()[0]
    with told() as said,half,torch.no_grad():
        half.model(torch.zeros_like(x))
        assert half.to_measure and half.measured.why=='predictions are all equal'
        half.model(x)
    assert not half.to_measure and half.measured.names==('rows',) and len(said)==1

def test_before_skipped_steps_are_told():
    "What autocast can train isn't skipped for ever, and nobody is told of the steps"
    learn = fitted(beyond_float16().to_fp16(dynamic=False, loss_scale=4, warn_skips=3))
    assert measured_of(learn).names==() and not skipped(learn)
    with told() as said: texts,e = heard(fitted, learn, 3, larger())
    assert measured_of(learn).names==('',) and e is None and skipped(learn)==3 and not said
    text, = texts # which says nothing of steps
    assert text.startswith('Measured at steps 0 and 7: gradients are not finite by our rules')

# --- Kept

def test_resumed(tmp_path):
    "It needn't ask, and has the bits of one that wasn't interrupted; a file without an answer leaves the one there is"
    def new(): return year_learner(path=tmp_path).to_bf16()
    whole = fitted(fitted(new()))
    fitted(first := new()).save('half')
    with asked() as found,told() as said: fitted(second := new().load('half'))
    assert not found and not said and same_weights(whole, second) and measured_of(second)==measured_of(first)
    file = torch.load(tmp_path/'models/half.pth', weights_only=False)
    file['opt']['hypers'] = [{k:o for k,o in d.items() if 'measured' not in k} for d in file['opt']['hypers']]
    torch.save(file, tmp_path/'models/old.pth')
    with asked() as found: fitted(second.load('old')) # it says nothing of the weights
    assert len(found)==1 and measured_of(second).names==('0',)
    with asked() as found: fitted(new().load('old'))
    assert len(found)==1
    assert {*map(type, first.opt.hypers[0].values())}<={int,float,bool}

def test_exported(tmp_path):
    learn = fitted(in_mode('bf16', own_gain(), path=tmp_path))
    learn.export()
    loaded = load_learner(tmp_path/'export.pkl', cpu=False)
    assert loaded.mixed_precision.half.ways[''].why=='measured'
    assert measured_of(loaded)._replace(weights=None)==measured_of(learn)

def test_an_answer_about_others():
    "What `keep` has in float32 stays so, and what is gone is no error"
    half = half_precision(mlp(), bf16, keep='2', measure=Measured(('0','2','gone')))
    rows = half.policy().set_index('module')
    assert rows.loc['0'].why=='measured' and rows.loc['2'].why=='keep'

@contextmanager
def model_eval(model):
    yield model.eval()
    model.train()

def close_rows():
    "Differences of rows of a table that are nearly the same"
    torch.manual_seed(0)
    rows = nn.Embedding(80,20)
    rows.weight.data = torch.randn(1,20)*2+.03*torch.randn(80,20)
    return Does(lambda m, i: (m.rows(i)-m.rows((i+1)%80)).square().sum(1, keepdim=True)*50, rows=rows)

# --- In loops of one's own, and without a gradient

def test_the_first_call_of_a_with():
    "With two items or more; gradients are on, or off"
    x = year_data()[0]
    for context in (nullcontext,torch.no_grad,torch.inference_mode):
        model = years()
        half = half_precision(model, bf16)
        with told() as said,half,context():
            with model_eval(model): model(x[:1])
            assert half.to_measure
            pred = model(x)
        assert half.measured.as_autocast==('0',) and half.measured.of=='predictions' and len(said)==1
        assert (pred-years()(x)).abs().max()<.02 and pred.requires_grad==(context is nullcontext)
        with told() as said,half,context(): model(x)
        assert not said
        assert_plain(model)
    with told(),half_precision(years(), bf16) as half: half.model(x[:2])
    assert not half.to_measure

def test_predictions_of_a_learner():
    "A learner that only validates or predicts asks in its first batch; a fit asks for gradients"
    for f in (lambda o: o.validate(), lambda o: o.get_preds(reorder=False)): # in evaluation mode
        learn = get_learner(close_rows(), as_dls(*year_data()), opt_func=SGD).to_bf16()
        with told() as said: f(learn)
        assert learn.mixed_precision.half.measured.of=='predictions' and len(said)==1
        assert measured_of(fitted(learn)).names==('rows',)
        learn = in_mode('bf16')
        f(learn)
        with asked() as found: fitted(learn)
        assert len(found)==1 and measured_of(learn).of=='gradients'

def test_measure_in_any_loop():
    model,(x,y) = years(),year_data()
    half = half_precision(model, bf16)
    found = half.measure(lambda: F.mse_loss(model(x), y))
    assert found.names==('0',)==half.measured.as_autocast and found.of=='gradients'
    with half,pytest.raises(RuntimeError, match='outside of `with half:`'): half.measure(noop)
    assert 'Not measured: ValueError: as asked' in str(half.measure(raises(ValueError('as asked'))))

# --- Where it can't be measured

@pytest.mark.parametrize('why', ['memory','steps in the backward pass','several processes'])
def test_not_measured(why, monkeypatch):
    "`policy` says why; nothing is raised, and training goes on"
    model,calls = mlp(),[0]
    def forward(m, x):
        calls[0] += 1
        if why=='memory' and calls[0]==3: raise torch.OutOfMemoryError('out of memory')
        return m.body(x)
    learn = in_mode('bf16', Does(forward, body=model))
    if why.startswith('steps'): model[0].weight.register_post_accumulate_grad_hook(noop)
    if why=='several processes':
        monkeypatch.setattr(processes, 'several_ranks', lambda: True)
        model.set_requires_gradient_sync = noop # as `fully_shard` adds it
    with told() as said: fitted(learn)
    text = dict(memory='out of memory', several='fully_shard', steps='post_accumulate')[why.partition(' ')[0]]
    assert not said and text in measured_of(learn).why and measured_of(learn).names==()
    assert f'Not measured: {measured_of(learn).why}' in learn.mixed_precision.policy().set_index('module').loc[''].why
    assert log_of(learn).finite.all()

@pytest.mark.parametrize('part', [False,True])
def test_compiled(part):
    "Eagerly, and nothing is compiled again for it"
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    counter,model = CompileCounterWithBackend('aot_eager'),mlp()
    (model[0] if part else model).compile(backend=counter)
    learn = get_learner(model).to_bf16()
    with asked() as found: learn.fit(1)
    frames = counter.frame_count
    learn.fit(1)
    assert len(found)==part and counter.frame_count==frames # all of it compiled is as under autocast
    other = CompileCounterWithBackend('aot_eager')
    torch._dynamo.reset()
    plain = mlp()
    (plain[0] if part else plain).compile(backend=other)
    get_learner(plain).to_bf16(measure=False).fit(1)
    assert frames==other.frame_count

# --- What a model, a loss and callbacks do to what they are given

def in_place(m, x): return m.body(x.sub_(.5))
def pops(m, x): return m.body(x.pop('x'))

@pytest.mark.parametrize('forward,wrap', [(in_place,noop),(pops,lambda x: dict(x=x))], ids=['in_place','emptied'])
@pytest.mark.parametrize('how', ['learner','with'])
def test_a_batch_of_its_own(forward, wrap, how):
    "Each pass has one: the real one is as it was"
    def run(**options):
        torch.manual_seed(0)
        model,(x,y) = Does(forward, body=mlp()),numbers(64)
        if how=='with':
            with half_precision(model, bf16, **options): return model(wrap(x.clone()))
        batches = [(wrap(a.clone()),b) for a,b in zip(x.split(16), y.split(16))]
        return flat(weights(fitted(get_learner(model, DataLoaders(batches, [])).to_bf16(**options))))
    assert torch.equal(run(), run(measure=False))

def test_a_graph_before_the_batch():
    "Isn't freed: an encoder of its own is trained with it"
    encoder,model,(x,y) = nn.Linear(8,8),mlp(),numbers(64)
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), .1), bf16, compute_loss=mse_of)
    train_steps(steps, [(encoder(x),y)])
    assert steps.last.finite and encoder.weight.grad is not None and steps.state.measured.why==''

def annealed(m, pred, y):
    "A loss whose second part grows from step to step"
    m.step += 1
    return F.mse_loss(pred, y)+min(1., m.step/9)*pred.square().mean()

class WarmUp(Callback):
    "The same by a callback, which counts in a tensor, a deque and a set, too"
    def before_fit(self): self.n,self.t,self.seen,self.kinds = 0,torch.zeros(1),deque(),set()
    def after_loss(self):
        self.n += 1
        self.t += 1
        self.seen.append(self.n)
        self.kinds.add(self.n)
        self.learn.loss_grad = self.loss_grad*min(1., self.n/9)

@pytest.mark.parametrize('way', ['loss','callback'])
def test_what_loss_and_callbacks_count(way):
    "Is the same in each pass, so that no module is blamed for it, and afterwards"
    def run(**options):
        torch.manual_seed(0)
        loss,cbs = (Does(annealed, step=0),[]) if way=='loss' else (MSELossFlat(),[WarmUp()])
        learn = fitted(get_learner(loss_func=loss, cbs=cbs).to_bf16(**options))
        if way=='loss': return learn,loss.step
        return learn,(cbs[0].n,cbs[0].t.item(),[*cbs[0].seen],cbs[0].kinds)
    (learn,counted),(other,wanted) = run(),run(measure=False)
    assert measured_of(learn).names==() and measured_of(learn).error is None
    assert counted==wanted and same_weights(learn, other)
