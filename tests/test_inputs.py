"Odd models and data: what reaches model and loss, and the learner afterwards is an ordinary one in float32"
import cloudpickle,learners
from mp_callbacks.learner.optimizers import steps_at_once
from interpreters import paste
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates', 'ignore:load_learner')

each_mode = pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o in ('fp16','native_fp16')))

def state(learn): return [p for p in learn.model.parameters()],weights(learn),list(learn.cbs)

def unchanged(learn, before, named=True):
    """Has `learn` the same parameters, weights and callbacks (each under its name, if they are `named` apart) as when
    `state` was taken?"""
    ps,ws,cbs = before
    assert identical(learn.model.parameters(), ps) and same(weights(learn), ws) and identical(learn.cbs, cbs)
    if named: assert all(getattr(learn, cb.name) is cb and cb.learn is learn for cb in cbs)
    assert [n for n,m in learn.model.named_modules() if 'forward' in vars(m)]==[]

def trains(learn):
    "Does a fit change all trainable weights, finitely, and leave them float32?"
    before = weights(learn)
    learn.fit(2)
    for p,w in zip(learn.model.parameters(), before, strict=True):
        assert not torch.equal(p, w) and p.isfinite().all() and p.dtype==torch.float32

@pytest.mark.parametrize('call', calls[:2])
def test_partly_double(call):
    "A part of the model may be float64, and stays so"
    model = nn.Sequential(nn.Linear(8,8), Does(lambda m,x: x.double()), nn.Linear(8,1).double())
    learn = fitted(getattr(get_learner(model), call)())
    assert [p.dtype for p in learn.model.parameters()]==[torch.float32]*2+[torch.float64]*2

def test_jagged_predictions():
    "Their class keeps the numbers in attributes: these are float32, too, and what somebody has put on stays"
    def words(m, x, offsets):
        res = torch.nested.nested_tensor_from_jagged(m.linear(x), offsets)
        res.note = 'kept'
        return res
    model,x = Does(words, linear=nn.Linear(8, 4)),numbers()[0]
    with half_precision(model, 'bf16'): res = model(x, torch.tensor([0,3,64]))
    assert res.dtype==res.values().dtype==torch.float32 and res.note=='kept'
    assert [len(o) for o in res.unbind()]==[3,61] and (res.values()-model(x, torch.tensor([0,64])).values()).norm()<.1

def part_of_script(how):
    "A model with a part made by `torch.jit.script` or `torch.jit.trace`, which remember the dtypes of a class"
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer,self.norm,self.scale = nn.Linear(16,16),nn.BatchNorm1d(16),nn.Parameter(torch.ones(16))
        def forward(self, x): return self.norm(self.layer(x))*self.scale
    torch.manual_seed(1)
    part = torch.jit.script(Part()) if how=='script' else torch.jit.trace(Part(), torch.ones(2,16))
    return nn.Sequential(nn.Linear(8,16), nn.Sequential(part, nn.GELU()), nn.Linear(16,1))

@pytest.mark.filterwarnings('ignore:.*torch.jit')
@pytest.mark.parametrize('how,mode', [('script','fp16'), ('script','native_fp16'), *[('trace',o) for o in modes]])
def test_scripted_part(how, mode):
    "It computes as autocast decides, or in float32 with all inside it if `keep` names it, and can be looked at"
    learn,full = in_mode(mode, part_of_script(how)),get_learner(part_of_script(how))
    if how=='script' and mode=='fp16': learn.loss_func = torch.jit.script(ScaledLoss())
    fitted(learn, 2, InfiniteAt(1))
    assert skipped(learn)==1 and all(o.isfinite().all() for o in learn.model.state_dict().values())
    fitted(full, 2, On('before_batch', raises(CancelBatchException), at=[1]))
    assert abs(learn.validate()[0]-full.validate()[0])<.02
    table = learn.mixed_precision.policy().set_index('module')
    assert {*table.why[table.index.str.startswith('1.0')]}=={'scripted'} and len(table)==5
    assert learn.find_nonfinite().where=='nothing' and not learn.precision_report().keep
    half = learn.mixed_precision.half
    assert {*half.keeping(['1.0']).policy().compute[1:4]}=={'float32'}
    assert half.keeping(['1.0.layer']).policy().why[2]=='scripted' # no Python calls it
    with half.keeping(['1.0']): learn.model(numbers()[0])

@each_mode
def test_outside_the_optimizer(mode):
    "Gradients of parameters that no optimizer holds are not scaled, and a batch that overflows leaves nothing in them"
    def run(mode, *cbs):
        learn = fitted(in_mode(mode, opt_func=SGD, lr=.05, splitter=lambda m: [params(m[-1])], cbs=[*cbs]))
        return learn.model[0].weight.grad,learn.model[-1].weight.detach()
    for cbs in ([], [GradientClip(1.)]):
        (g,w),(g32,w32) = run(mode, *cbs),run(None, *cbs)
        assert off(g, g32)<.05 and off(w, w32)<.05
        g,w = run(mode, InfiniteAt(1), *cbs)
        assert g.isfinite().all() and off(w, w32)<.5 # three steps are almost four

@pytest.mark.cuda
@pytest.mark.results
@each_mode
def test_moved(mode):
    "The data may move from one device to another between two fits: half precision moves with it"
    learn = modes[mode](get_learner())
    seen = returned(learn.model[0])
    for device in ('cpu', 'cuda', 'cpu'):
        learn.dls.to(torch.device(device))
        learn.model.to(device)
        learn.create_opt()
        seen.clear()
        learn.fit(1)
        assert {(o.device.type, o.dtype) for o in seen}=={(device, f16 if 'fp16' in mode else bf16)}

n,big = torch.tensor([1,2]),torch.tensor([1e5,1e-8]) # float16 can hold neither of the latter
predictions = dict( # from a prediction, and back to it; more of them in nbs/core/dtypes.ipynb
    dict   = (lambda p: OrderedDict(b=[True,p], a=None),             lambda o: o['b'][1]),
    data   = (lambda p: Data(p, 'word'),                             lambda o: o.a),
    image  = (lambda p: (TensorImage(p), SimpleNamespace(x=1)),      lambda o: o[0].as_subclass(torch.Tensor)),
    max    = (lambda p: p.max(1, keepdim=True),                      lambda o: o.values),
    nested = (lambda p: [dict(a=(Frozen(Named(p, [None])),),), 3],   lambda o: o[0]['a'][0].a.a),
    others = (lambda p: (p.double(), p.to(torch.complex64), p.long(), p>0), lambda o: o[0].float()))
inputs = dict( # the same for rows of numbers
    several = (lambda x: (None, x, n, n>1, big, x.double(), 'word', 3), lambda _,x,*__: x),
    dict    = (lambda x: (dict(x=[x, (big, None)], n=n, s='word'),),    lambda d: d['x'][0]),
    data    = (lambda x: (Data(TensorImage(x), big),),                  lambda o: o.a.as_subclass(torch.Tensor)),
    half    = (lambda x: (x.half(),),                                   lambda x: x.float()),
    int     = (lambda x: ((x*4).long(),),                               lambda x: x.float()))

def sketch(o):
    "The structure of `o`: its classes, and dtypes and shapes of its tensors"
    if isinstance(o, torch.Tensor): return type(o),o.dtype,tuple(o.shape)
    if isinstance(o, dict): return type(o),{k:sketch(v) for k,v in o.items()}
    if isinstance(o, (tuple,list,L)): return type(o),[sketch(v) for v in o]
    if isinstance(o, (Data,Frozen)): return type(o),sketch(o.a),sketch(o.b)
    return type(o),str(o)

@functools.lru_cache(None)
def seen(inp, prediction, mode):
    """What model and loss are given in an epoch, and the weights at its end

    Data are plain lists: any iterable that has a length will do, and where it names no device, the model's counts."""
    (make_inp,get_inp),(make,get) = inputs[inp],predictions[prediction]
    batches = [(*make_inp(x), y) for x,y in zip(*(o.split(16) for o in numbers()))]
    to_model,to_loss = [],[]
    def forward(m, *args):
        to_model.append(sketch(args))
        return make(m.layers(get_inp(*args)))
    def loss(pred, y):
        to_loss.append(sketch(pred))
        return F.mse_loss(get(pred), y)
    dls = DataLoaders(batches, batches)
    learn = ask_nothing(in_mode(mode, Does(forward, layers=mlp()), dls=dls, loss_func=loss, opt_func=SGD, lr=.05))
    return (to_model,to_loss),flat(weights(fitted(learn)))

@pytest.mark.parametrize('prediction,inp', in_turns(predictions, inputs).items())
@each_mode
def test_structures(mode, prediction, inp):
    """Inputs reach the model as they do in float32, and predictions the loss: the same classes and dtypes, float32 for
    half precision. Gradients find their way back."""
    (given,w),(given32,w32) = seen(inp, prediction, mode),seen(inp, prediction, None)
    assert given==given32 and [*map(len, given)]==[8,8]
    assert 1e-7<(w-w32).norm()/w32.norm()<1e-3 # it did compute in half precision

@each_mode
def test_afterwards(mode, tmp_path):
    "All that a learner can do, and not one bit of a weight different for it"
    learn = modes[mode](get_learner(norm=True, path=tmp_path))
    trains(learn)
    before,loss = state(learn),learn.validate()[0]
    learn.get_preds(with_input=True, with_loss=True, with_decoded=True)
    learn.summary()
    learn.export()
    unchanged(learn, before)
    preds = learn.to_fp32().get_preds()[0]
    assert abs(learn.validate()[0]/loss-1)<.02
    loaded = quiet(load_learner(tmp_path/'export.pkl', cpu=True))
    assert torch.equal(loaded.get_preds(dl=learn.dls.valid)[0], preds)

@each_mode
def test_export_inside_a_batch(mode, tmp_path):
    "Nothing of the batch that was going on goes into the file"
    learn = modes[mode](get_learner(norm=True, path=tmp_path, cbs=GradientAccumulation(64)))
    recorders = learn.cbs.filter(lambda o: isinstance(o, PrecisionRecorder))
    with learn.removed_cbs(recorders): learn.fit(1, cbs=Now('after_batch', methodcaller('export')))
    loaded = load_learner(tmp_path/'export.pkl', cpu=False)
    loaded.remove_cbs([ProgressCallback,Now,GradientAccumulation])
    loaded.dls = get_dls()
    loaded.validate()
    assert_plain(loaded.model)
    loaded.fit(1, cbs=InfiniteAt(0))
    assert all(o.isfinite().all() for o in loaded.model.state_dict().values())
    trains(loaded)

load_code = """
import json,sys
from fastai.learner import load_learner
def see():
    learn = load_learner('export.pkl')
    learn.logger,learn.create_mbar = lambda *args: None,False
    return [learn.predict(i)[2].tolist() for i in (3,4)],sorted({str(p.dtype) for p in learn.model.parameters()})
res = [see()] # with a little of fastai, and with all of it
from fastai.callback.all import *
print(json.dumps([*res, see()]), 'mp_callbacks.learner.calls' in sys.modules)
"""

@pytest.mark.slow
def test_unpatched_process(tmp_path):
    "`load_learner` needs nothing but that mp_callbacks is installed, and predicts in float32"
    learn = modes['fp16'](get_learner(norm=True, path=tmp_path))
    learn.fit(1)
    cloudpickle.register_pickle_by_value(learners) # so that the other process needn't import it, and with it all ours
    try:
        learn.export()
        learn.to_fp32().export('float32.pkl')
    finally: cloudpickle.unregister_pickle_by_value(learners)
    want = [[learn.predict(i)[2].tolist() for i in (3,4)],['torch.float32']]
    assert paste(load_code, tmp_path).splitlines()[-1]==f'{json.dumps([want]*2)} False'
    # after `to_fp32` it need not be installed
    code = "import sys; sys.modules['mp_callbacks'] = None; from fastai.learner import *; load_learner('float32.pkl')"
    paste(code, tmp_path)

def test_default_device():
    """A loop by hand may have `torch.set_default_device('cuda')`: what has to be on the CPU stays there

    Here it is 'meta', for a `with`: `set_default_device(None)` doesn't undo all of it, and `get_default_device` of
    PyTorch before 2.10 fails after it."""
    ps = [nn.Parameter(torch.ones(n, device='cpu')) for n in (5,3000)] # few and many numbers are handled differently
    for p in ps: p.grad = torch.ones_like(p)
    with torch.device('meta'):
        opt = Adam(ps, lr=.1)
        with steps_at_once(opt): opt.step()
        norm = prepare_grads(ps, 2., 1.).norm
    assert norm==pytest.approx(3005**.5/2)

def test_gradients_of_two_classes():
    "Each counts once, and is clipped once"
    ps = [nn.Parameter(torch.ones(3,3)) for _ in range(2)]
    for p,cls in zip(ps, (torch.Tensor,TensorBase)): p.grad = torch.ones(3,3).as_subclass(cls)
    assert prepare_grads(ps, clip=1.).norm==pytest.approx(18**.5)
    for p in ps: torch.testing.assert_close(torch.Tensor(p.grad), torch.full((3,3), 18**-.5))
