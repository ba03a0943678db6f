"What a loss may do: look at the weights, call a part of the model or all of it, train one model against another"
from fastai.vision.gan import GANLearner
from mp_callbacks.core import dtypes
from learners import *

each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','bf16','native_fp16')))

def plain_loss(learn, pred, y): return F.mse_loss(pred, y)
def decay(learn, pred, y): return F.mse_loss(pred, y)+.1*sum((p-1).pow(2).sum() for p in learn.model.parameters())
def part(learn, pred, y): return F.mse_loss(pred, y)+learn.model[2](torch.ones(4,16)).pow(2).mean()
def whole(learn, pred, y): return F.mse_loss(pred, y)+F.mse_loss(pred, learn.model(torch.ones(len(pred),8)))

@each_mode
@pytest.mark.parametrize('loss_func', [decay,part,whole])
def test_follows_float32(loss_func, mode):
    def train(mode):
        learn = in_mode(mode)
        learn.loss_func = partial(loss_func, learn)
        return way(learn, 3)
    got,want = train(mode),train(None)
    assert (got-want).norm() < (.1 if 'bf16' in mode else .02)*want.norm()

def hints(hook, make):
    "FitNets' loss: a layer of its own adapts an activation of the model, which `hook` keeps"
    torch.manual_seed(2)
    return Does(lambda m, pred, y: F.mse_loss(pred, y)+m.adaptor(hook.stored).pow(2).mean(), adaptor=make())

adaptors = dict(layer=lambda: nn.Linear(16,4), deep=lambda: nn.Sequential(nn.GELU(), nn.Linear(16,4)),
                own=lambda: Does(lambda m, x: x@m.w, w=torch.ones(16,4))) # arithmetic with a parameter of its own

@each_mode
@pytest.mark.parametrize('kind', adaptors)
def test_layers_of_a_loss(kind, mode):
    "They get float32, have gradients, and nothing of ours is left on them; a look computes the loss, too"
    def train(mode):
        learn = in_mode(mode)
        with hook_output(learn.model[2], detach=False) as hook:
            learn.loss_func = loss = hints(hook, adaptors[kind])
            grad = next(fitted(learn).loss_func.parameters()).grad
            assert learn.find_nonfinite().where=='nothing'
            assert not any(m._forward_pre_hooks for m in loss.modules())
        return grad
    grad,want = train(mode),train(None)
    assert grad.dtype==torch.float32 and (grad-want).norm()<.1*want.norm()

@each_mode
def test_layers_of_loss_and_model(mode):
    "A loss that has the model as a part, as GANs do: in the model its layers compute in half precision"
    learn,seen = in_mode(mode, loss_func=nn.MSELoss()),set()
    learn.loss_func.model = learn.model
    learn.model[2].register_forward_pre_hook(lambda m,args: seen.add(args[0].dtype))
    learn.fit(1)
    assert seen=={learn.mixed_precision.half_dtype}

@each_mode
def test_gan(mode):
    "fastai's GANLearner, whose loss calls one of its two models"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(32,10, generator=g),torch.rand(32,3,4,4, generator=g)
    def make():
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(10,48), nn.Unflatten(1, (3,4,4)))
        critic = nn.Sequential(nn.Flatten(), nn.Linear(48,1), nn.Flatten(0))
        learn = GANLearner.wgan(as_dls(x, y, 8), generator, critic, opt_func=RMSProp)
        learn.gan_trainer.show_img = False
        return quiet(learn)
    ref,learn = make(),modes[mode](make())
    start = flat(weights(ref))
    for o in (ref,learn): o.fit(2, 1e-3)
    assert skipped(learn)==0
    assert apart(learn, ref, start)<.1

# --- Tensors that require gradients and belong to nobody

class Places(nn.Module):
    "A network, and tensors that require gradients, in `seen`"
    def __init__(self): super().__init__(); self.net,self.seen = mlp(),[]
    def new(self, t): self.seen.append(t.detach().clone().requires_grad_()); return self.seen[-1]
    def forward(self, x): return self.net(x)

class Forces(Places):
    "Positions that require gradients inside `forward`, whose derivative is the prediction"
    def forward(self, x):
        with torch.enable_grad():
            x = self.new(x)
            return self.net(x)+torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0].mean(1, keepdim=True)

class Hidden(Places):
    "A first hidden state that nobody detaches"
    def forward(self, x): return super().forward(x+self.new(torch.zeros(1,8)))

def penalty_loss(learn, pred, y):
    "The gradient penalty of WGAN-GP, at interpolates"
    x = learn.model.new(.5*learn.x)
    with torch.enable_grad(): g, = torch.autograd.grad(learn.model(x).sum(), x, create_graph=True)
    return F.mse_loss(pred, y)+(g.norm(dim=1)-1).square().mean()

def running_loss(learn, pred, y):
    "A total that starts as a tensor with gradients"
    return learn.model.new(torch.zeros(1))[0]+F.mse_loss(pred, y)

def feature_loss(learn, pred, y):
    "Features of a network that is not frozen, and that only a plain function has"
    if not hasattr(learn, 'features'):
        torch.manual_seed(2)
        learn.features = nn.Linear(1,4)
        learn.model.seen += learn.features.parameters()
    return F.mse_loss(learn.features(pred), learn.features(y))

def adversarial(learn):
    "A perturbation of the input, whose loss is added in `after_loss`"
    extra = F.mse_loss(learn.model(learn.x+learn.model.new(torch.zeros_like(learn.x))), learn.y)
    learn.loss_grad = learn.loss_grad+extra
    learn.loss = learn.loss_grad.clone()

nobodys = dict(penalty=(Places,penalty_loss), forces=(Forces,plain_loss), total=(Places,running_loss),
               perturbed=(Places,plain_loss,On('after_loss', adversarial)), hidden=(Hidden,plain_loss),
               features=(Places,feature_loss))

def nobodys_learner(kind, mode, *cbs):
    make,loss,*more = nobodys[kind]
    learn = in_mode(mode, make(), cbs=[*more,*cbs])
    learn.loss_func = partial(loss, learn)
    return learn

@pytest.mark.parametrize('mode', ['fp16','native_fp16'])
@pytest.mark.parametrize('kind', nobodys)
def test_tensors_of_nobody(kind, mode):
    "Train as in float32, and their gradients are those of float32, in all batches"
    def train(mode):
        found = []
        def keep(learn): found.append([t.grad.clone() for t in learn.model.seen if t.grad is not None])
        return fitted(nobodys_learner(kind, mode), 2, On('after_backward', keep)),found
    (learn,found),(full,wanted) = train(mode),train(None)
    assert apart(learn, full, flat(weights(get_learner())))<.1 and skipped(learn)==0
    for got,want in zip(found, wanted, strict=True):
        for a,b in zip(got, want, strict=True): assert (a-b).norm()<=.05*b.norm()+1e-4

@pytest.mark.parametrize('mode', modes)
def test_tensors_of_nobody_after_a_skipped_step(mode):
    "Have no gradient, as the parameters"
    def cleared(learn): assert learn.step_stats.finite or learn.model.seen[-1].grad is None
    assert skipped(fitted(nobodys_learner('hidden', mode, InfiniteAt(1), On('after_batch', cleared, 80))))==1

@pytest.mark.parametrize('mode', modes)
@pytest.mark.parametrize('which', ['loss','loss_grad'])
def test_own_backward(which, mode):
    "Of the loss that has no scale: an error, before a step is made"
    own,plain = in_mode(mode),in_mode(mode)
    own._backward = lambda: getattr(own, which).backward()
    if which=='loss' and 'fp16' in mode:
        told = pytest.raises(RuntimeError, match=r'write self\.loss_grad\.backward\(\)')
        with stays(weights, own), told: own.fit(1)
        assert all(p.grad is None for p in own.model.parameters())
    else:
        for o in (own,plain): o.fit(1)
        assert same_weights(own, plain)

class Counted(torch.Tensor):
    "A tensor whose class has functions of its own"
    calls = 0
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counted.calls += func is F.gelu
        return super().__torch_function__(func, types, args, kwargs)

class Block(nn.Linear):
    "A block that is computed again in the backward pass, with a tensor of a class of its own inside"
    def forward(self, x): return checkpoint(self.compute, x, use_reentrant=False)
    def compute(self, x): return F.gelu(super().forward(x).as_subclass(Counted)).as_subclass(torch.Tensor)

@pytest.mark.parametrize('mode', modes)
def test_classes_in_the_backward_pass(mode):
    """Compute again as in the forward pass: `backward` of fastai's `TensorBase` would switch off what classes do, so it
    begins at a plain tensor. The loss is of its class at every event."""
    learn,seen = get_learner(nn.Sequential(Block(8,16), nn.Linear(16,1))),[]
    events = 'before_backward','after_backward','before_step','after_step'
    Counted.calls = 0
    ask_nothing(modes[mode](learn)).fit(1, cbs=[On(o, lambda learn: seen.append(learn.loss_grad), 20) for o in events])
    assert {type(o) for o in seen}=={TensorBase} and all(seen[i] is seen[i-i%4] for i in range(len(seen)))
    assert Counted.calls==3*4 # forward and again in four batches, and four of validation

@pytest.mark.parametrize('mode', [None,'fp16','native_fp16','bf16'])
def test_hessian_product(mode):
    "From `.grad`, after a backward pass that makes a graph"
    def product(mode):
        learn,found = in_mode(mode),[]
        learn._backward = lambda: learn.loss_grad.backward(create_graph=True)
        def curvature(learn):
            p = learn.model[0].weight
            found.extend(torch.autograd.grad((p.grad*torch.ones_like(p)).sum(), p))
            for o in learn.model.parameters(): o.grad = o.grad.detach()
        learn.fit(1, cbs=On('after_backward', curvature))
        return found[-1]
    got,want = product(mode),product(None)
    assert (got-want).norm()<.1*want.norm()

# --- Gradients that don't come from the loss alone

class Auxiliary(torch.autograd.Function):
    "As DeepSeek's: the first input goes on, and the second one, another loss, gets a gradient of 1"
    @staticmethod
    def forward(ctx, x, loss): return x.view_as(x)
    @staticmethod
    def backward(ctx, grad): return grad,torch.ones((), device=grad.device)

def gated():
    "A gate that only the loss of its own trains"
    def _forward(m, x): return Auxiliary.apply(m.net(x), m.gate(x).softmax(-1).square().mean())
    return Does(_forward, net=mlp(), gate=nn.Linear(8,4))

def clamped():
    model = mlp()
    for p in model.parameters(): p.register_hook(lambda grad: grad.clamp(-1e-4,1e-4))
    return model

def first_gradient(model, find, mode):
    "Of what `find` returns, in the first step, and the step's loss scale"
    torch.manual_seed(2)
    learn,found = in_mode(mode, model()),[]
    learn.fit(1, cbs=On('after_backward', lambda learn: found.append(find(learn.model).grad.clone())))
    return found[0],log_of(learn).scale[0] if mode else 1

@pytest.mark.parametrize('mode', ['fp16','native_fp16','bf16'])
@pytest.mark.parametrize('kind', ['auxiliary','clamped'])
def test_own_gradient(kind, mode):
    """Of a function, or what a hook makes of one: without the loss scale it is as many times too small, as with any
    GradScaler, and the report finds no cure in `keep`. In bfloat16 it is right."""
    model,find = dict(auxiliary=(gated,lambda m: m.gate.weight), clamped=(clamped,lambda m: m[0].weight))[kind]
    (got,scale),(want,_) = [first_gradient(model, find, o) for o in (mode,None)]
    assert (got*scale-want).norm()<.05*want.norm() and scale==(1 if mode=='bf16' else 1024)
    torch.manual_seed(2)
    report = modes[mode](get_learner(model())).precision_report()
    assert report.keep==([] if mode=='bf16' else None)
    assert ('No keep brings the difference under 10%' in str(report))==(mode!='bf16')

@pytest.mark.parametrize('call', ['to_fp16','to_native_fp16'])
def test_a_loss_without_graph(call):
    "For an empty batch, as float32 and fastai's float16 have it: an ordinary batch without gradients"
    def loss(pred, y):
        loss.calls += 1
        return torch.tensor(0., requires_grad=True) if loss.calls==2 else F.mse_loss(pred, y)
    loss.calls = 0
    assert len(log_of(fitted(getattr(get_learner(loss_func=loss), call)())))==4

kinds = dict(always=lambda i,y: True, later=lambda i,y: i>=2, fourth=lambda i,y: i%4==3,
             odd=lambda i,y: y[0].round()%2==1)

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('call', ['to_fp16','to_native_fp16'])
def test_a_tensor_that_joins_in(call, kind):
    "Centres with an optimizer of their own: from the start, after a warm-up, in each fourth batch, with odd labels"
    def centres(to):
        c,learn,joined = torch.zeros(1, requires_grad=True),get_learner(),[]
        opt = torch.optim.SGD([c], .1)
        def loss(pred, y):
            if learn.training: joined.append(bool(kinds[kind](learn.iter, y)))
            return F.mse_loss(pred, y)+(F.mse_loss(c, y.mean()[None]+1) if learn.training and joined[-1] else 0.)
        learn.loss_func = loss
        to(learn).fit(2, cbs=Callback(after_step=lambda cb: opt.step(), after_batch=lambda cb: opt.zero_grad()))
        assert any(joined) and all(joined)==(kind=='always')
        return c.item()
    few = dict(to_native_fp16=dict(init_scale=1024.)).get(call, {}) # so that no step is skipped
    assert centres(lambda learn: getattr(learn, call)(**few))==pytest.approx(centres(noop), rel=.05)

@pytest.mark.parametrize('depth', [1,50])
@pytest.mark.parametrize('mode', ['fp16','native_fp16','bf16'])
def test_cost_of_the_search(mode, depth):
    "Of the search for others that the loss leads to: its own six nodes; all of the model only in the first batch"
    learn = in_mode(mode, nn.Sequential(*[nn.Linear(8,8) for _ in range(depth)], nn.Linear(8,1)))
    learn.fit(1)
    lines,own = [],sys.gettrace()
    def trace(frame, event, arg):
        if frame.f_code.co_name!='reached_leaves': return
        if event=='call': lines.append(0)
        lines[-1] += event=='line'
        return trace
    sys.settrace(trace)
    try: learn.fit(2)
    finally: sys.settrace(own)
    for first,*others in (lines[:4],lines[4:]): assert first>20*depth and len(others)==3 and max(others)<60

class Wraps(Callback):
    "Puts a method in place of the learner's loss function, as MixUp does"
    def before_train(self): self.old,self.learn.loss_func = self.learn.loss_func,self.lf
    def after_train(self): self.learn.loss_func = self.old
    def lf(self, pred, y): return self.old(pred, y)

@pytest.mark.parametrize('call', ['to_fp16','to_native_fp16'])
def test_parameters_behind_a_callback(call):
    "Have to be finite, too, and the loss function is found in what the callback keeps"
    loss = ScaledLoss()
    loss.w.register_hook(lambda g: g*float('inf'))
    learn = fitted(getattr(get_learner(cbs=Wraps(), loss_func=loss), call)())
    assert log_of(learn).skipped.all() and loss.w.grad is None

# --- What a model returns beside its predictions, and then computes with itself

@dataclass
class Output:
    pred: torch.Tensor
    z: torch.Tensor
    last: torch.Tensor

kinds_of_output = dict(
    tuple=lambda *o: o, list=lambda *o: [*o], dict=lambda *o: dict(zip(('pred','z','last'), o)), dataclass=Output,
    nested=lambda pred,z,last: (pred,{'all':[z,last]}), same=lambda pred,z,last: [pred,z,z,last])
def parts_of(out):
    "Prediction, activation, and a second prediction"
    pred,*_,z,last = dtypes.leaves(out)
    return pred,z,last

def shows(make=kinds_of_output['tuple'], inner=torch.tanh, again=False):
    "Returns an activation beside two predictions that it makes of it, `again` in a checkpoint"
    def _forward(m, x):
        z = checkpoint(lambda x: inner(m.a(x)), x, use_reentrant=False) if again else inner(m.a(x))
        return make(m.b(z),z,m.c(z))
    torch.manual_seed(3)
    return Does(_forward, a=nn.Linear(8,16), b=nn.Linear(16,1), c=nn.Linear(16,1))

half_modes = [(bf16,True),(bf16,False),(f16,True),(f16,False)]
def outputs_in(dtype, rules=True, **kwargs):
    "Prediction, activation, second prediction, in float32 or half precision"
    model,x = shows(**kwargs),numbers(16)[0]
    with half_precision(model, dtype, rules=rules) if dtype else nullcontext(): return parts_of(model(x))

def asked(pred, z, last):
    "All that may be asked of the activation, about a loss that it is part of"
    seen = []
    z.retain_grad()
    handle = z.register_hook(lambda g: seen.append(g.clone()))
    z.register_hook(lambda g: 2*g)
    def _loss(): return pred.square().sum()+z.square().sum()
    res = dict(grad=torch.autograd.grad(_loss(), z, retain_graph=True)[0])
    g, = torch.autograd.grad(pred.square().sum(), [z], create_graph=True)
    res['second'], = torch.autograd.grad(g.square().sum(), z, retain_graph=True)
    res['edge'], = torch.autograd.grad(_loss(), torch.autograd.graph.get_gradient_edge(z), retain_graph=True)
    seen.clear()
    _loss().backward(retain_graph=True)
    assert z.retains_grad and z.grad is z.grad and len(seen)==1
    res.update(hook=seen[0], kept=z.grad.clone())
    z.grad = None
    handle.remove()
    pred.sum().backward(inputs=[z])
    return res|dict(input=z.grad)

@pytest.mark.parametrize('dtype,rules', half_modes)
@pytest.mark.parametrize('kind', kinds_of_output)
def test_gradients_of_activations(kind, dtype, rules):
    "Are as in float32, in float32, whichever way they are asked for: the whole gradient, after the hooks before"
    make = kinds_of_output[kind]
    got,want = [asked(*outputs_in(*o, make=make)) for o in ((dtype,rules),(None,True))]
    for k in want:
        assert got[k].dtype==f32 or k=='edge'
        assert off(got[k], want[k])<(.02 if dtype==bf16 else .003), k

def test_activations_in_a_checkpoint():
    got,want = [asked(*outputs_in(o, again=True)) for o in (bf16,None)]
    for k in want: assert off(got[k], want[k])<.02

def test_activations_of_fastai():
    "keep their class, also beside others, and pickles are plain"
    model,x = shows(),numbers(16)[0]
    with half_precision(model, bf16): pred,z,last = model(TensorImage(x))
    assert isinstance(z, TensorImage) and type(z*2) is type(pred) is TensorImage
    assert pickle.loads(pickle.dumps(z)).__class__ is TensorImage and 'TensorImage' in repr(z)
    want = asked(*outputs_in(None))
    got = asked(pred.as_subclass(torch.Tensor), z, last)
    for k in want: assert off(got[k], want[k])<.02
    with half_precision(model, bf16): pred,z,last = model(TensorImage(x))
    g, = torch.autograd.grad(pred.sum(), z, retain_graph=True)
    assert off(g, model.b.weight.detach().expand(16,16))<.02
    pred.sum().backward(inputs=[z])
    with pytest.raises(RuntimeError, match='torch.autograd.grad,'): z.grad
    pred,z,last = outputs_in(bf16)
    assert type(F.cross_entropy(z, TensorCategory(torch.zeros(16, dtype=torch.long)))) is TensorCategory
    assert pickle.loads(pickle.dumps(z)).__class__ is torch.Tensor and repr(z).startswith('tensor')

def path_length(out, y):
    "StyleGAN's: how fast the prediction moves with the activation"
    pred,z,_ = parts_of(out)
    if not z.requires_grad: return F.mse_loss(pred, y)
    g, = torch.autograd.grad(pred.sum(), z, create_graph=True)
    return F.mse_loss(pred, y)+10*(g.norm(dim=1)-2).square().mean()

def least_norm(out, y):
    "MGDA's: the two tasks are weighted by their gradients to what they share"
    pred,z,last = parts_of(out)
    losses = F.mse_loss(pred, y),F.l1_loss(last, -y)
    if not z.requires_grad: return sum(losses)
    a,b = [torch.autograd.grad(o, z, retain_graph=True)[0].flatten() for o in losses]
    w = ((b-a).dot(b)/(a-b).square().sum()).clamp(0,1)
    return w*losses[0]+(1-w)*losses[1]

def reversed_gradient(out, y):
    "A hook of the activation changes what reaches the layers below"
    pred,z,last = parts_of(out)
    if z.requires_grad: z.register_hook(lambda g: -.5*g)
    return F.mse_loss(pred, y)

@each_mode
@pytest.mark.parametrize('loss_func', [path_length,least_norm,reversed_gradient])
def test_learners_that_ask(loss_func, mode):
    def train(mode, loss_func=loss_func):
        learn = in_mode(mode, shows())
        learn.loss_func = loss_func
        return way(learn, 3)
    got,want = train(mode),train(None)
    assert (got-want).norm()<(.1 if 'bf16' in mode else .02)*want.norm()
    assert (train(None, lambda out, y: F.mse_loss(out[0], y))-want).norm()>.3*want.norm()
