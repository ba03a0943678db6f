"`plan`: the planned memory of a step is what training takes, and which batch size fits"
from learners import *
from mp_callbacks.look.checkpointing import plan_checkpoints
from mp_callbacks.look.plan import plan_memory

sys.path.insert(0, str(root/'bench'))
from models import GPT,Task,ViT,conv,loss_func,mlp as bench_mlp

tasks = dict( # the models of bench, with fewer and smaller layers
    mlp      = Task('mlp',      lambda: bench_mlp(256, 6, 256),           (256,),    256, 64),
    wide_mlp = Task('wide_mlp', lambda: bench_mlp(64, 6, 64),             (64,),     64,  512),
    vit      = Task('vit',      lambda: ViT(32, 4, 48, 192, 3, 4, 10),    (3,32,32), 10,  16),
    conv     = Task('conv',     lambda: conv(16, 4, 10),                  (3,32,32), 10,  32),
    gpt      = Task('gpt',      lambda: GPT(500, 32, 32, 128, 2, 2),      (32,),     500, 8))
opts = dict(fused=partial(OptimWrapper, opt=torch.optim.AdamW, fused=True), fastai=Adam)
calls = dict(float32=noop, to_bf16=lambda o: o.to_bf16(), to_native_bf16=lambda o: o.to_native_bf16())

def plan_for(model, batch, opt, loss_func=loss_func):
    def _loss(n):
        x,y = [t[torch.arange(n)%len(t)] for t in batch]
        return loss_func(model(x), y)
    return plan_memory(model, _loss, opt, len(batch[0]))

def planned(plan, n, name='float32'): return plan._replace(items=n).table.peak[name].item()*2**20

def trained_peak(task, opt, call):
    "Most bytes at any time of three steps, from before the model is made"
    with LiveBytes() as live:
        learn = get_learner(task.model('cpu'), DataLoaders([task.data('cpu')]*3, [], device='cpu'),
                            loss_func=loss_func, opt_func=opts[opt], lr=1e-6)
        call(learn).fit(1)
    del learn
    gc.collect()
    return max(live.log)

peaks = [*((k,'fused') for k in tasks),('vit','fastai')] # what an optimizer keeps is the same in any model

@pytest.mark.parametrize('name,opt', [slow_unless(o==('vit','fused'), *o) for o in peaks])
def test_peak(name, opt):
    "Within 1 % of training with a learner, in each precision"
    task = tasks[name]
    model = task.model('cpu')
    plan = plan_for(model, task.data('cpu'), opts[opt]([*model.parameters()], lr=1e-6))
    errors = {k:planned(plan, task.batch, k)/trained_peak(task, opt, call)-1 for k,call in calls.items()}
    assert max(map(abs, errors.values()))<.01, errors

def sizes(plan, name='float32'): return [*plan.table.loc[name, ['weights','gradients','optimizer']]*2**20]
def sgd(model): return torch.optim.SGD(model.parameters(), .1)

def plan_mse(model, opt=None):
    batch = torch.randn(4,8),torch.randn(4,1)
    return plan_for(model, batch, opt or torch.optim.Adam(model.parameters()), F.mse_loss)

def test_parts():
    """8 to 16 to 1 numbers: 161 parameters of four bytes, two averages each, and Adam's counts

    Activations, in bytes per item: x and y, hidden layer, predictions and losses. In half precision there are copies of
    weights, too."""
    model = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,1))
    plan = plan_mse(model)
    for name in calls: assert sizes(plan, name)==[644,644,2*644+4*4]
    assert sizes(plan_mse(model, sgd(model)))==[644,644,0]
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(4,8)).mean().backward()
    opt.step() # the state is there already
    assert sizes(plan_mse(model, opt))==[644,644,2*644+4*4]
    def _activations(name): return [o.item() for o in plan.steps[name][3]]
    assert _activations('float32')==[0, 4*(8+1+16+1+1)]
    # the first layer's weight isn't needed for a gradient
    assert _activations('to_bf16')==[2*16, 4*(8+1+1+1)+2*(8+16)]

def test_frozen():
    "Frozen parameters have neither gradients nor state, and need no activations"
    model,whole = mlp(),mlp()
    for p in model[:4].parameters(): p.requires_grad_(False)
    plan = plan_mse(model)
    assert sizes(plan)==[sum(p.nbytes for p in whole.parameters()), 4*17, 2*4*17+2*4]
    assert plan.table.activations.float32<plan_mse(whole).table.activations.float32

@pytest.mark.parametrize('use_reentrant', [False,True])
def test_checkpoint(use_reentrant):
    "Checkpointing saves activations, and the plan says so"
    class Saves(nn.Sequential):
        def forward(self, x): return checkpoint(super().forward, x.requires_grad_(), use_reentrant=use_reentrant)
    def _peaks(block):
        blocks = [block(nn.Linear(8,64), nn.GELU(), nn.Linear(64,8)) for _ in range(4)]
        return plan_mse(nn.Sequential(*blocks, nn.Linear(8,1)))._replace(items=1000).table
    plain,saving = _peaks(nn.Sequential),_peaks(Saves)
    assert (saving.activations<.4*plain.activations).all() and (saving.peak<.7*plain.peak).all()

@pytest.mark.parametrize('n', [1,7,32])
def test_any_batch_size(n):
    "What is computed for `n` items is what a step with `n` items takes"
    model = nn.Sequential(nn.Conv2d(3,8,3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8*36,1))
    def _loss(n):
        x,y = torch.randn(n,3,8,8),torch.randn(n,1)
        pred = model(x)
        return F.mse_loss(pred, y)
    plan,held = plan_memory(model, _loss, sgd(model), n),[]
    model.register_forward_hook(lambda m, args, pred: held.append(pred))
    with LiveBytes() as live:
        for t in (*model.parameters(),*model.buffers()): live.add(t)
        _loss(n).backward()
    assert max(live.log)==planned(plan, n)

def test_batch_size():
    "The largest that fits: one more item doesn't"
    plan = plan_mse(mlp())
    for gb in (1e-4,1,16):
        for name,n in plan.batch_size(gb).items():
            assert planned(plan, n, name)<=gb*2**30<planned(plan, n+1, name)
    assert (plan.batch_size(1e-6)==0).all()

def test_loss_of_a_fixed_batch():
    "A loss of other items than it is asked for is an error, as a plan for it would be of the wrong size"
    model,x = mlp(),torch.randn(64,8)
    with pytest.raises(ValueError, match=r'take the same bytes.*model\(x\[:n\]\)'):
        plan_memory(model, lambda n: model(x).mean(), sgd(model), 64)
    assert plan_memory(model, lambda n: model(x[:n]).mean(), sgd(model), 64).items==64

def test_several_optimizers():
    "They step together, with the bytes of both"
    model = mlp()
    one,*both = [torch.optim.Adam(o.parameters()) for o in (model,model[:2],model[2:])]
    assert sizes(plan_mse(model, both))==sizes(plan_mse(model, one))

bad = dict(fraction=(dict(batch_size=2.5), ValueError, 'batch_size=2.5 must be a positive int'),
           dtype=(dict(half=torch.bfloat16), TypeError, r'half=torch.bfloat16 must say.*half_precision\(model, '),
           number=(dict(opt=1), TypeError, 'opt is a int, and must be an optimizer'))
@pytest.mark.parametrize('plan', [plan_memory,partial(plan_checkpoints, gb=1)])
@pytest.mark.parametrize('name', bad)
def test_bad_arguments(plan, name):
    "The error says what is needed"
    given,error,match = bad[name]
    model = mlp()
    with pytest.raises(error, match=match):
        plan(model, lambda n: model(torch.ones(n,8)).mean(), **(dict(opt=sgd(model), batch_size=4)|given))

def test_float32_as_half():
    "Has its row anyway"
    model = mlp()
    with pytest.raises(ValueError, match='half computes in float32.*Leave half out'):
        plan_memory(model, lambda n: model(torch.ones(n,8)).mean(), sgd(model), 4, half_precision(model, torch.float32))
