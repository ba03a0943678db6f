"Threads: a second one damages no parameter, and each call computes what it would compute alone"
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')

def in_threads(*fs):
    "Call all `fs` at the same time, and return their errors"
    with ThreadPoolExecutor(len(fs)) as pool: calls = [*map(pool.submit, fs)]
    return [o.exception() for o in calls if o.exception()]

def own():
    "Parameters of its own, and modules with more inside"
    return Does(lambda m,x: x+m.gain*m.norm(m.lin(x)), gain=torch.ones(64), lin=nn.Linear(64,64), norm=nn.RMSNorm(64))

@pytest.fixture(autouse=True)
def switching():
    "Threads take turns as often as they can"
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)

def test_in_one_with():
    "Gradients are those of a call that is alone, and the parameters stay for a third thread that looks"
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(64,64), own(), own()),torch.randn(8,64)
    params,half = [*model.parameters()],half_precision(model, bf16)
    with half: grad = torch.autograd.grad((want := model(x)).sum(), params)
    def predict():
        with torch.no_grad():
            for _ in range(40): assert torch.equal(model(x), want)
    def train():
        for _ in range(20): assert all(map(torch.equal, torch.autograd.grad(model(x).sum(), params), grad))
    def look():
        for _ in range(40): assert identical(model.parameters(), params)
    with half: errors = in_threads(predict, train, train, look)
    assert errors==[] and identical(model.parameters(), params)
    assert_plain(model)

@pytest.mark.parametrize('shared', [True,False])
def test_each_thread_has_its_own_with(shared):
    "Of one `half_precision`, or of one of its own on the same model"
    model,x = nn.Sequential(nn.Linear(64,64), own()),torch.randn(8,64)
    params,half = [*model.parameters()],half_precision(model, bf16)
    with half: want = model(x).detach()
    def call():
        mine = half if shared else half_precision(model, bf16)
        for _ in range(30):
            with mine, torch.set_grad_enabled(not shared): assert torch.equal(model(x), want)
    assert in_threads(call, call)==[] and identical(model.parameters(), params)
    assert_plain(model)

def test_a_with_is_for_the_model():
    "In another thread, too: what the page says of it, and of a copy"
    model,x = nn.Sequential(nn.Linear(64,64)),torch.randn(8,64)
    want,copied = model(x),deepcopy(model)
    def rounded(model): return sum(not torch.equal(model(x), want) for _ in range(100))
    with half(model), ThreadPoolExecutor(1) as pool:
        assert [pool.submit(rounded, o).result() for o in (model,copied)]==[100,0]

def test_a_with_that_ends_in_the_backward_pass():
    "of a learner, in another thread: checkpointed parts compute again as they did"
    def block(m, x):
        wrapped.append('forward' in vars(m.layer))
        return m.layer(x)
    def net(m, x): return checkpoint(partial(block, m), x.requires_grad_(), use_reentrant=True)
    wrapped,learn = [],ask_nothing(get_learner(Does(net, layer=nn.Linear(8,1))).to_bf16())
    half = learn.mixed_precision.autocast
    def _open(learn):
        pool.submit(half.__enter__).result()
        learn.pred.register_hook(lambda grad: pool.submit(half.__exit__).result())
    with ThreadPoolExecutor(1) as pool: learn.fit(1, cbs=On('before_backward', _open, 80, at=(0,)))
    assert len(wrapped)>=8 and all(wrapped[:8])
    assert_plain(learn.model)

def test_predictions_while_a_learner_trains():
    "The training is what it is alone"
    learn,alone = (get_learner().to_bf16() for _ in range(2))
    params,stop,x = [*learn.model.parameters()],threading.Event(),torch.randn(4,8)
    def predict():
        with torch.no_grad():
            while not stop.is_set(): assert learn.model(x).isfinite().all()
    def fit():
        try: learn.fit(3)
        finally: stop.set()
    errors = in_threads(fit, predict)
    # A call that began before a batch did may fail, see "Limits" of half_precision; the training never does
    assert not [e for e in errors if 'dtype' not in str(e)]
    assert_plain(learn.model)
    assert same_weights(learn, fitted(alone, 3))
    assert identical(learn.model.parameters(), params) and identical(opt_params(learn), params)
