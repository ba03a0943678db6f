"""A skipped step and an error put back buffers of every kind; what a model keeps from batch to batch is float32 between

And hooks of parameters see the gradients. Activations that a module stores stay in their graph."""
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')
halves = [o for o in modes if o!='fp16_static']

@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','bf16','native_fp16')))
def test_hooks(mode):
    "Hooks of parameters see one float32 gradient per parameter and batch, which carries the loss scale"
    learn,seen = modes[mode](get_learner()),[]
    for p in learn.model.parameters():
        p.register_hook(lambda g, p=p: seen.append(('hook',id(p),g.clone())))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(('accumulated',id(p),p.grad.clone())))
    def look(learn):
        for what in ('hook','accumulated'):
            batch = {i:g for o,i,g in seen if o==what}
            assert len(batch)==6 and {g.dtype for g in batch.values()}=={torch.float32}
            scale = learn.mixed_precision.loss_scale
            for p in learn.model.parameters(): assert torch.equal(batch[id(p)]/scale, p.grad)
        seen.clear()
    learn.fit(1, cbs=On('before_step', look, 20))
    assert learn.mixed_precision.state.steps==4

buffers = dict( # what it is, and a function that changes it or returns another one
    late         = (lambda: None, lambda b: torch.ones(4)),
    replaced     = (lambda: torch.arange(4.), lambda b: b*2),
    grows        = (lambda: torch.arange(4.), lambda b: b.resize_(b.numel()+1).fill_(9)),
    sparse       = (lambda: torch.eye(4).to_sparse(), lambda b: b.mul_(2)))

def holds(kind):
    "Changes a buffer in each training batch, beside one that shares its storage if it can"
    make,change = buffers[kind]
    def _forward(m, x):
        if m.training: m.held = change(m.held)
        return m.layer(x)
    res = Does(_forward, layer=nn.Linear(8,1))
    res.register_buffer('held', held := make())
    if held is not None and held.layout is torch.strided:
        res.register_buffer('same', held.view(held.shape), persistent=False)
    return res

def dense(model): return [o.detach().to_dense().clone() for o in model.buffers()]

@pytest.mark.parametrize('kind', buffers)
def test_buffers_are_put_back(kind):
    "after a skipped step and after an interrupt"
    model = holds(kind)
    held,before = model.held,dense(model)
    learn = get_learner(model).to_bf16()
    def put_back(): return model.held is held and all(map(torch.equal, dense(model), before))
    learn.fit(1, cbs=[InfiniteAt(i) for i in range(4)])
    assert skipped(learn)==4 and put_back()
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(after_pred=raises(KeyboardInterrupt)))
    assert put_back()
    learn.fit(1)
    assert skipped(learn)==4 and not put_back()

def test_new_buffers():
    "that a skipped batch has registered are gone if they aren't finite; others may be relied on"
    def _registers(m, x):
        if not hasattr(m, 'mean'): m.register_buffer('mean', x.mean(0))
        if not m.length:
            m.register_buffer('table', torch.ones(8))
            m.length = 8
        return m.layer((x-m.mean)*m.table)
    learn = fitted(get_learner(Does(_registers, layer=nn.Linear(8,1), length=0)).to_bf16(), 1, InfiniteAt(0))
    assert skipped(learn)==1 and learn.model.mean.isfinite().all()

@pytest.mark.parametrize('event', ['before_batch','after_batch'])
def test_grown_block(event):
    "A block that a callback appends in the fit is put back after a skipped step, and `keep` holds for it"
    block,after_skip = nn.Sequential(nn.Linear(16,16), nn.BatchNorm1d(16), nn.GELU()),[]
    seen,infinite = returned(block[1]),5 if event=='after_batch' else 4
    def grow(learn):
        learn.model.insert(4, block)
        learn.opt.opt.add_param_group(dict(params=[*block.parameters()], lr=1e-2))
    cbs = [On(event, grow, -30, (4,)), InfiniteAt(infinite),
           On('after_step', lambda learn: after_skip.extend(o.clone() for o in block.buffers()), at=(infinite,))]
    learn = get_learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD)).to_bf16(keep=nn.BatchNorm1d)
    learn.fit(2, cbs=cbs)
    assert skipped(learn)==1 and {o.dtype for o in seen}=={torch.float32}
    assert all(map(torch.equal, after_skip, nn.BatchNorm1d(16).buffers())) and len(after_skip)==3
    assert all(o.isfinite().all() for o in block.buffers()) and block[1].running_mean.any()
    policy = learn.mixed_precision.policy().set_index('module')
    assert policy.loc['4.1','why']=='keep' and policy.loc['4.0','compute']!='float32'

places = dict( # where a model keeps `h`: what of it, how it is read there, and written
    attribute = (noop,                  lambda m: m.h,            lambda m,h: setattr(m, 'h', h)),
    buffer    = (nn.Buffer,             lambda m: m.h,            lambda m,h: setattr(m, 'h', h)),
    list      = (lambda h: [(h,0)],     lambda m: m.h[0][0],      lambda m,h: m.h.__setitem__(0, (h,1))),
    dict      = (lambda h: {'last':[h]}, lambda m: m.h['last'][0], lambda m,h: m.h['last'].__setitem__(0, h)))

def keeps(kind):
    "Its next call uses what it has kept, in one of many places"
    hold,kept,keep = places[kind]
    def _forward(m, x):
        h = m.inner(torch.cat([x,kept(m)], 1)).tanh()
        if m.training: keep(m, h.detach())
        return m.outer(h)
    torch.manual_seed(1)
    scale = nn.Buffer(torch.ones(1, dtype=torch.float16))
    m = Does(_forward, inner=nn.Linear(16,8), outer=nn.Linear(8,1), kept=kept, scale=scale)
    m.table = torch.ones(1, dtype=torch.bfloat16) # its author wants it so
    m.h = hold(torch.zeros(16,8))
    m.seen = m.h if kind in ('list','dict') else None # the same
    return m

class Float32(Callback):
    "What the model keeps is float32 at the events, and so is what is saved"
    order = 80
    def look(self):
        assert self.model.kept(self.model).dtype==torch.float32
        assert {k for k,o in self.model.state_dict().items() if o.dtype!=torch.float32}=={'scale'}
    after_pred = after_loss = after_step = after_batch = after_train = after_validate = after_fit = look

@pytest.mark.parametrize('mode,kind', crossed(halves, places, fast=lambda mode,kind: mode=='bf16' or kind=='attribute'))
def test_state_is_float32(mode, kind, tmp_path):
    "between batches and after the fit, so that predictions, `to_fp32` and checkpoints are float32"
    learn = modes[mode](get_learner(keeps(kind), path=tmp_path), clip=1.)
    learn.fit(2, cbs=Float32())
    model = learn.model
    assert model.seen is None or model.seen is model.h
    assert model.table.dtype==torch.bfloat16
    assert learn.model(numbers(16)[0]).dtype==torch.float32
    file = learn.save('kept')
    with torch.serialization.safe_globals([L]): assert torch.load(file)['model']['outer.bias'].dtype==torch.float32
    get_learner(keeps(kind), path=tmp_path, opt_func=learn.opt_func).to_fp32().load('kept').fit(1)
    learn.to_fp32().fit(1)
    assert math.isfinite(learn.recorder.values[-1][1])

class Scales(nn.Module):
    "Has an own parameter, and stores what it was given"
    def __init__(self):
        super().__init__()
        self.w,self.last = nn.Parameter(torch.rand(16)),None
    def forward(self, x):
        self.last = x.detach()
        return x*self.w

def executed():
    "Its class is of no module"
    exec(inspect.getsource(Scales), found := dict(nn=nn, torch=torch))
    return nn.Sequential(nn.Linear(8,16), found['Scales'](), nn.Linear(16,1))

def traced(): return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8,16), Scales(), nn.Linear(16,1)))
def part(): return nn.Sequential(nn.Linear(8,8), traced())

@pytest.mark.parametrize('mode', halves)
@pytest.mark.parametrize('make', [executed,traced,part])
def test_generated_code(make, mode):
    "Of torch.fx, on which feature extractors are built, or made by `exec`: `forward` has no module, or the class none"
    learn = fitted(modes[mode](get_learner(make())))
    assert skipped(learn)==0
    if make is executed: assert learn.model[1].last.dtype==f32

def two_tasks():
    "Stores what both heads have in common, and a view of a parameter, in many places"
    def _forward(m, x):
        m.h,view = m.body(x).tanh(),m.scale[:]
        if m.h.requires_grad:
            m.h.retain_grad()
            view.retain_grad()
        m.views = [dict(view=view)]
        h = m.h*view
        return torch.cat([m.a(h),m.b(h)], 1)
    torch.manual_seed(1)
    heads = dict(a=nn.Linear(32,1), b=nn.Linear(32,1))
    return Does(_forward, body=nn.Linear(8,32), scale=torch.ones(32), **heads, h=None, views=None)

def balanced(model, seen, pred, y):
    "The loss that MGDA makes of two: weighed by the gradients of what a module has stored (Sener and Koltun 2018)"
    a,b = losses = F.mse_loss(pred[:,:1], y),F.mse_loss(pred[:,1:], 3*y)
    if not model.training: return a+b
    to_a,to_b = [torch.autograd.grad(o, model.h, retain_graph=True)[0].float() for o in losses]
    weight = ((to_b-to_a)*to_b).sum()/(to_a-to_b).square().sum()
    seen.append(weight.item())
    return weight*a+(1-weight)*b

@pytest.mark.parametrize('call', calls)
def test_stored_activations(call):
    """Are those of the graph, in the dtype that they were computed in: a loss may take their gradients, they keep their
    own, and a callback may hook them"""
    def run(call):
        model,seen,hooked = two_tasks(),[],[]
        learn = ask_nothing(getattr(get_learner(model, loss_func=partial(balanced, model, seen)), call)())
        def look(learn):
            assert type(model.h) is type(model.views[0]['view']) is torch.Tensor
            assert model.h.grad.any() and model.views[0]['view'].grad.any()
        learn.fit(1, cbs=[On('after_pred', lambda learn: model.h.register_hook(hooked.append), 50),
                          On('after_backward', look)])
        assert len(seen)==4 and len(hooked)==12
        return seen,hooked[0].dtype
    want,_ = run('to_fp32')
    got,dtype = run(call)
    assert np.allclose(got, want, atol=.02) and dtype==(f16 if 'fp16' in call else bf16)
