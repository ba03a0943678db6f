"""The table of *Does it work with…?*: each row that says yes names a test that exists, and what no other file tests
is tested here

Models are small and have linear layers, which are fast in emulated half precision, too."""
import torch._dynamo
from learners import *
from interpreters import launch
from mp_callbacks.core.nonfinite import diagnose

some_modes = pytest.mark.parametrize('mode', ['fp16','native_bf16'])

tested = re.compile(r'\[`(\w+)`\]\(https://github\.com/[^)]*/(tests/\w+\.py)\)')

def table():
    "What the page says: for each name in the first column, the answer and the tests, as pairs of function and file"
    md = '\n'.join(cells_of('howto/works_with.ipynb', 'markdown'))
    row = re.compile(r'\| (.*?) \| (.*?)(?:<br>Test: (.*))? \|')
    rows = [row.fullmatch(o).groups() for o in md.splitlines() if o.startswith('| ')]
    return {name:(answer,tested.findall(tests or '')) for name,answer,tests in rows if name!='you use'}

answers = table()

@pytest.mark.parametrize('name', answers)
def test_answer(name):
    "A yes has a test, and each test that is named is a function of that file"
    answer,tests = answers[name]
    assert re.match('(yes|partly|no|untested)[,.:]? ', answer+' '), answer
    if re.match('yes|partly', answer): assert tests, 'has no test'
    for func,file in tests:
        assert re.search(rf'^ *def {func}\(', (root/file).read_text(encoding='utf-8'), re.M), (func,file)

def both(mode, make, fit):
    "A learner that `make` returns in `mode`, and one in float32, after `fit`: the same weights, but for rounding"
    learn,plain = modes[mode](make()),make()
    start = flat(weights(plain))
    for o in (learn,plain): fit(o)
    off = apart(learn, plain, start)
    assert off<8*roundoff(mode), off/roundoff(mode)
    assert skipped(learn)==0
    return learn,plain

def sharpness_aware(learn):
    "SAM: step with the gradients of the point nearby where the loss is larger"
    params = [p for p in learn.model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    steps = [.05*p.grad/norm for p in params]
    for p,o in zip(params, steps): p.data.add_(o)
    learn.opt.zero_grad()
    learn.loss_func(learn.model(*learn.xb), *learn.yb).backward()
    for p,o in zip(params, steps): p.data.sub_(o)

@some_modes
def test_sam(mode):
    sam = On('before_step', sharpness_aware, 20) # after the gradients are checked
    both(mode, lambda: get_learner(opt_func=SGD, lr=.05), lambda o: o.fit(2, cbs=sam))

@some_modes
def test_discriminative_learning_rates(mode):
    "Each group of parameters has its own, and moves as in float32"
    def _make(): return get_learner(splitter=lambda m: [params(m[:2]),params(m[2:4]),params(m[4:])], opt_func=SGD)
    learn,plain = both(mode, _make, lambda o: o.fit_one_cycle(2, slice(1e-3,1e-1)))
    assert [o['lr'] for o in learn.opt.hypers]==[o['lr'] for o in plain.opt.hypers]
    assert len({o['lr'] for o in learn.opt.hypers})==3

@pytest.mark.parametrize('kind', ['swa','ema'])
@some_modes
def test_averaged_model(mode, kind):
    "It holds float32 weights, as near to those of float32 as the weights are, and learns nothing of a skipped step"
    kwargs = {} if kind=='swa' else dict(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(.8))
    def run(mode, *cbs):
        learn = in_mode(mode, opt_func=SGD, lr=.05)
        start,avg = flat(weights(learn)),torch.optim.swa_utils.AveragedModel(learn.model, **kwargs)
        def update(learn):
            if not mode or learn.step_stats.finite: avg.update_parameters(learn.model)
        learn.fit(2, cbs=[On('after_step', update),*cbs])
        return avg,flat(avg.module.parameters())-start
    avg,way = run(mode)
    _,plain = run(None)
    assert {p.dtype for p in avg.module.parameters()}=={torch.float32}
    assert (way-plain).norm()<8*roundoff(mode)*plain.norm()
    assert run(mode, InfiniteAt(1))[0].n_averaged==7 # of eight steps one is skipped

def adapted():
    "Two frozen layers, and beside each a product of two narrow matrices that is learned"
    model = mlp()
    for i in (0,2):
        layer,(n_out,n_in) = model[i].requires_grad_(False),model[i].weight.shape
        narrow = dict(a=nn.Linear(n_in, 4, bias=False), b=nn.Linear(4, n_out, bias=False))
        model[i] = Does(lambda m, x: m.layer(x)+m.b(m.a(x)), layer=layer, **narrow)
        nn.init.zeros_(model[i].b.weight)
    return model

def adapted_by_peft():
    peft = pytest.importorskip('peft')
    return peft.get_peft_model(mlp(), peft.LoraConfig(r=4, target_modules=['0','2'], modules_to_save=['4']))

@pytest.mark.parametrize('make', [adapted,adapted_by_peft])
@some_modes
def test_lora(mode, make):
    "The frozen weights stay as they are, and the others learn as in float32"
    def frozen(learn): return flat([p for p in learn.model.parameters() if not p.requires_grad])
    before = frozen(get_learner(make()))
    learn,_ = both(mode, lambda: get_learner(make(), opt_func=SGD, lr=.1), lambda o: o.fit(2))
    assert torch.equal(frozen(learn), before)

def test_transformers_in_own_loop():
    "`half_precision` around a model of transformers, whose loss comes down as in float32"
    t = pytest.importorskip('transformers')
    sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    x = torch.randint(20, (32,8), generator=torch.Generator().manual_seed(0))
    def train(half):
        torch.manual_seed(1)
        model = t.BertForSequenceClassification(t.BertConfig(num_labels=2, **sizes)).eval() # no dropout
        opt,losses = torch.optim.Adam(model.parameters(), 1e-2),[]
        for _ in range(15):
            with half_precision(model, torch.bfloat16) if half else nullcontext():
                loss = model(x, labels=(x[:,0]>9)*1).loss
                (loss*2**8).backward()
            assert prepare_grads(model.parameters(), scale=2.**8).finite
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses
    half,full = train(True),train(False)
    assert half[-1]<.5*half[0] and abs(half[-1]-full[-1])<.1*full[0], (half,full)

class Sick(nn.Sequential):
    "In bfloat16 the last layer's probability is rounded to 1, and then the loss is inf"
    def __init__(self):
        super().__init__(nn.Linear(8,8), nn.Linear(8,1))
        nn.init.constant_(self[1].bias, 7.)
    def forward(self, x, labels): return dict(loss=-(1-super().forward(x).sigmoid()).log().mean())

def asks(model, accelerator, batch):
    "What the page of other trainers says of the cause, where they use their own autocast"
    assert not prepare_grads(model.parameters()).finite
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return diagnose(model, lambda: model(**batch)['loss'], half_precision(model, torch.bfloat16, rules=False))

@pytest.mark.slow
def test_nan_in_accelerate():
    accelerate = pytest.importorskip('accelerate')
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision='bf16')
    model,batch = accelerator.prepare(Sick()),dict(x=torch.randn(4,8)/8, labels=torch.ones(4))
    accelerator.backward(model(**batch)['loss'])
    found = asks(model, accelerator, batch)
    assert (found.where,found.precision)==('forward',True)

@pytest.mark.slow
def test_nan_in_trainer(tmp_path):
    t = pytest.importorskip('transformers')
    class Watched(t.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            super().training_step(model, inputs, *args, **kwargs)
            raise FloatingPointError(asks(model, self.accelerator, inputs))
    args = t.TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, report_to=[], disable_tqdm=True)
    data = [dict(x=x, labels=torch.ones(())) for x in torch.randn(8,8)/8]
    with pytest.raises(FloatingPointError) as e: Watched(Sick(), args, train_dataset=data).train()
    found, = e.value.args
    assert (found.where,found.precision)==('forward',True)

def test_seeded_look():
    "A batch that begins with a seed is computed again with the dropout that it had, as on the page for the Trainer"
    masks,model = [],nn.Sequential(nn.Dropout(.5), nn.Linear(64,1))
    model[0].register_forward_hook(lambda m,x,y: masks.extend([y!=0]*m.training)) # items are judged without it
    def _loss(model, x, seed):
        torch.manual_seed(seed)
        return model(x).sum()*math.inf
    opt = torch.optim.SGD(model.parameters(), .1)
    # of the masks only those of the batch and its explanation
    steps = TrainingSteps(model, opt, torch.bfloat16, compute_loss=_loss, max_skips=1, measure=False)
    with steps.batch(torch.ones(4,64), 42):
        loss = _loss(model, torch.ones(4,64), 42)
        steps.backward(loss)
    with pytest.raises(FloatingPointError, match='was the first|loss is'): steps.make()
    assert len(masks)>1 and all(torch.equal(o, masks[0]) for o in masks) and not masks[0].all()

@pytest.mark.parametrize('wrap', [True,False])
def test_compiled_files(wrap, tmp_path):
    "`model.compile()` leaves the names of the parameters as they are, `torch.compile(model)` doesn't"
    torch._dynamo.reset()
    model = mlp()
    if wrap: model = torch.compile(model, backend='eager')
    else: model.compile(backend='eager')
    learn = fitted(get_learner(model, path=tmp_path).to_bf16())
    file = learn.save('compiled', with_opt=False)
    assert all(o.startswith('_orig_mod.') for o in torch.load(file))==wrap
    if not wrap: get_learner(path=tmp_path).load('compiled', with_opt=False)

def test_gradient_release():
    "optimi's optimizer that steps in the backward pass gives the weights of the one that steps after it"
    optimi = pytest.importorskip('optimi')
    def _fit(release):
        opt = partial(optimi.AdamW, gradient_release=release)
        learn = get_learner(opt_func=partial(OptimWrapper, opt=opt)).to_bf16()
        learn.create_opt()
        if release: optimi.prepare_for_gradient_release(learn.model, learn.opt.opt)
        learn.fit(2, 1e-2)
        return learn
    after,inside = _fit(False),_fit(True)
    assert all(map(torch.equal, after.model.parameters(), inside.model.parameters()))
    assert after.precision_recorder.log.norm.min()>0==inside.precision_recorder.log.norm.max()

launched = '''
import sys,distributed as example
from accelerate import notebook_launcher
def train():
    learn = example.train('fp16', 1, 32, 1e-2, 'no', False, [])
    total = sum(p.double().sum() for p in learn.model.parameters())
    # in one piece, as two processes write
    sys.stdout.write(f'process {example.num_distrib()} {len(learn.precision_recorder.log)} {total.item()}\\n')
    example.teardown_distrib()
notebook_launcher(train, num_processes=2)
'''

@pytest.mark.slow
def test_notebook_launcher(tmp_path):
    "Two processes of a notebook have the same weights"
    pytest.importorskip('accelerate')
    env = os.pathsep.join(map(str, (root/'examples', root)))
    res = launch(['-W', 'ignore', '-c', launched], tmp_path, PYTHONPATH=env)
    lines = re.findall('^process .*', res.stdout, re.M)
    assert len(lines)==2 and len({*lines})==1 and lines[0].startswith('process 2 23 '), res.stdout

def lora(layer):
    "A frozen layer, and beside it a product of two small float32 matrices, as of peft"
    x = torch.zeros(1, 32, dtype=layer.weight.dtype)
    narrow = dict(a=nn.Linear(32, 4, bias=False), b=nn.Linear(4, layer(x).shape[1], bias=False))
    nn.init.zeros_(narrow['b'].weight)
    return Does(lambda m, x: m.layer(x)+m.b(m.a(x.to(m.a.weight.dtype))), layer=layer, **narrow)

def transformer(name):
    "A model made of a configuration, and the name of the layers that get weights beside them"
    if name=='vit':
        timm = pytest.importorskip('timm')
        return timm.create_model('vit_tiny_patch16_224', img_size=8, patch_size=4, embed_dim=32, depth=1, num_heads=2,
                                 num_classes=0), 'qkv'
    t,sizes = pytest.importorskip('transformers'),dict(vocab_size=50, bos_token_id=1, eos_token_id=1)
    if name=='gpt2':
        sizes.update(n_embd=32, n_layer=1, n_head=2, n_positions=16, attn_pdrop=0., resid_pdrop=0., embd_pdrop=0.)
        return t.GPT2Model(t.GPT2Config(**sizes)), 'c_attn'
    sizes.update(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                 hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    return t.BertModel(t.BertConfig(**sizes)), 'query'

def tuned(name, dtype):
    "A frozen `body` in `dtype`, with float32 weights beside some of its layers, and a float32 head"
    def _forward(m, x):
        h = m.body(x)
        h = getattr(h, 'last_hidden_state', h)
        return m.head(h.flatten(1, -2).mean(1) if h.dim()>2 else h)
    torch.manual_seed(0)
    body,beside = transformer(name)
    body = body.to(bf16).to(dtype).requires_grad_(False)
    for k in [k for k,_ in body.named_modules() if k.endswith(beside)]:
        body.set_submodule(k, lora(body.get_submodule(k)))
    return Does(_forward, body=body, head=nn.Linear(32, 1))

@pytest.mark.parametrize('mode', ['fp16','bf16','native_fp16','native_bf16'])
@pytest.mark.parametrize('name', ['bert','gpt2','vit'])
def test_body_in_half_precision(name, mode):
    "Frozen weights that were bfloat16 before, as transformers loads them, with float32 weights beside them: as float32"
    x = torch.randn(64,3,8,8) if name=='vit' else torch.randint(0, 50, (64,8))
    def learner(mode, dtype): return in_mode(mode, tuned(name, dtype), dls=as_dls(x, torch.randn(64,1)+1), lr=.01)
    learn,full = learner(mode, bf16),fitted(learner(None, f32), 2)
    before = [p.clone() for p in learn.model.body.parameters() if p.dtype==bf16]
    learn.fit(2)
    assert all(map(torch.equal, before, [p for p in learn.model.body.parameters() if p.dtype==bf16]))
    start,end = [o.validate()[0] for o in (learner(None, f32),full)]
    assert end<.9*start and abs(learn.validate()[0]-end)<.02*(start-end)
    table = learn.mixed_precision.policy()
    assert {*table.why[table.params=='bfloat16']}=={'parameters are in bfloat16, and stay so'}
