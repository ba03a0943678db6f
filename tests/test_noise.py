"`noise`: the sums are the formula, what is rounded too coarsely is named, and nothing changes"
from learners import *
from mp_callbacks.core.ways import Way
from mp_callbacks.learner.looks import batch_noise
from mp_callbacks.look.noise import AddedNoise,BatchNoise,most_added
from test_checkup import all_modes,lines
from test_looks import attributes,frozen,make,makes,untouched

pytestmark = [pytest.mark.filterwarnings('ignore'),pytest.mark.usefixtures('folder')]
batches = [*zip(*[o.split(16) for o in numbers(64)])] # those of the learners

def to_bits(x, bits):
    "`x`, rounded to `bits` bits after the first"
    mantissa,exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa*2**(bits+1)).round()/2**(bits+1), exponent).to(x.dtype)

class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits):
        ctx.bits = bits
        return to_bits(x, bits)
    @staticmethod
    def backward(ctx, grad): return to_bits(grad, ctx.bits),None

class Coarse(Way):
    "Results and their gradients are rounded to `bits` bits"
    def __init__(self, bits):
        super().__init__(f'{bits} bits')
        self.bits = bits
    def around(self, half, module, forward, args, kwargs): return Rounded.apply(forward(*args, **kwargs), self.bits)

def coarse(bits): return lambda name, module: None if [*module.children()] else Coarse(bits)

def deep(n=32):
    "Twelve layers and a last one: each module rounds"
    torch.manual_seed(1)
    layers = [o for i in range(12) for o in (nn.Linear(n if i else 8, n), nn.LayerNorm(n), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(n, 1))

def measured(model, half, scale=1., batches=batches):
    "The sums after all of `batches`, with random numbers that `gradients` can draw, too"
    noise = BatchNoise(half, scale)
    for i,o in enumerate(batches):
        torch.manual_seed(i)
        noise.add(lambda: mse_of(model, *o))
    return noise

def gradients(model, half=None, scale=1.):
    "A row for each batch, in float64"
    rows = []
    for i,o in enumerate(batches):
        torch.manual_seed(i)
        model.zero_grad()
        with half or nullcontext(): (mse_of(model, *o)*scale).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params(model)]
        rows.append(torch.cat([g.double().flatten()/scale for g in grads]))
    model.zero_grad()
    return torch.stack(rows)

def with_dropout():
    "With an unused parameter and one that doesn't train"
    model = nn.Sequential(mlp(), nn.Dropout(.2), nn.Linear(1,1))
    model[0].unused = nn.Parameter(torch.ones(3))
    model[2].weight.requires_grad_(False)
    return model

@pytest.mark.parametrize('make_model', [mlp,partial(mlp, norm=True),with_dropout], ids=['mlp','norm','dropout'])
@pytest.mark.parametrize('dtype,rules,scale', [(bf16,True,1.), (bf16,False,1.), (f16,True,2.**10)])
def test_sums(make_model, dtype, rules, scale):
    "What the running sums say is what all gradients at once say, by the formula"
    model = make_model()
    half = half_precision(model, dtype, rules=rules)
    noise = measured(model, half, scale)
    g,h = gradients(model),gradients(model, half, scale)
    off,n = h-g,len(batches)
    variance = (g-g.mean(0)).square().sum()/(n-1)
    of_mean = off.mean(0).square().sum()-(off-off.mean(0)).square().sum()/(n-1)/n
    precision,added,bias,*counts,worth = noise.result
    assert added==pytest.approx((off.square().sum()/n/variance).item(), rel=1e-3)
    assert bias==pytest.approx((of_mean.clamp(min=0).sqrt()/g.mean(0).norm()).item(), rel=1e-2, abs=1e-6)
    assert precision==('bfloat16' if dtype==bf16 else 'float16') and counts==[n,0] and worth is None
    held = [t for v in vars(noise).values() if isinstance(v, list) for t in v]
    assert len(held)==2*len([p for p in model.parameters() if p.requires_grad])

def test_sparse_gradients():
    "Those of a table are as dense ones"
    def added(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 16, sparse=sparse), nn.Flatten(), nn.Linear(32,1))
        return measured(model, half(model), batches=[(torch.randint(50, (16,2)),torch.randn(16,1)) for _ in range(4)])
    assert added(True).result==pytest.approx(added(False).result) and added(True).result.added>0

@pytest.mark.parametrize('make_model', [mlp,partial(mlp, norm=True),deep], ids=['mlp','norm','deep'])
def test_ordinary_models(make_model):
    "bfloat16 adds less than 1 %, and float16, which has three digits more, less than bfloat16"
    model = make_model()
    found = {o:measured(model, half_precision(model, o), s).result for o,s in ((bf16,1.),(f16,2.**10))}
    assert 0<found[f16].added<found[bf16].added<.01
    assert re.fullmatch(r'bfloat16 adds (0\.\d\d|less than 0\.01)% to the noise of your batches\.', str(found[bf16]))

def test_planted_rounding():
    "Three bits add more than 5 %, and each bit more adds less; the check-up says what to do"
    model = deep()
    added = [measured(model, half_precision(model, bf16, way=coarse(o))).result.added for o in (2,3,4,5)]
    assert added[1]>most_added==.05 and sorted(added, reverse=True)==added
    for bits in (3,7):
        learn = get_learner(deep()).to_bf16(way=coarse(bits))
        with untouched(learn): texts,todo = lines(report := learn.precision_checkup())
        assert texts['Noise']==str(report.noise) and report.noise.batches==4
        if bits==7: assert report.noise.added<.01 and 'Too much noise' not in todo
        else: assert re.match(r'bfloat16 adds \d+% to the noise of your batches, as if they were \d+% smaller: keep',
                              todo['Too much noise'])

def test_in_words():
    "The share is that of batches that are smaller, and too much from 5 % on"
    def todo(added):
        found = AddedNoise('float16', added)
        with patched('mp_callbacks.learner.checkup.batch_noise', lambda *args, **kwargs: found):
            return lines(get_learner().to_bf16().precision_checkup())[1].get('Too much noise', '')
    assert todo(.25).startswith('float16 adds 25% to the noise of your batches, as if they were 20% smaller: ')
    assert todo(.05).startswith('float16 adds 5%') and todo(.0499)==todo(None)==''

def writes(m, x):
    "Changes a parameter, a buffer and an attribute, and draws random numbers"
    with torch.no_grad(): m.w += .1
    m.seen += 1
    m.calls.append(random.random())
    return F.dropout(x*m.w, .1)+np.random.rand()*.01

def test_model_is_as_before():
    "Parameters that `forward` writes, buffers, gradients, attributes and random numbers, whatever a batch raises"
    torch.manual_seed(0)
    inner = Does(writes, w=torch.ones(16), calls=[], seen=nn.Buffer(torch.zeros(())))
    model = nn.Sequential(nn.Linear(8,16), inner, nn.BatchNorm1d(16), nn.Linear(16,1))
    for p in model.parameters(): p.grad = torch.ones_like(p)
    def world():
        modules = [attributes(m) for m in model.modules()]
        rng = torch.get_rng_state(),*np.random.get_state(),random.getstate()
        return modules,frozen([params(model),[p.grad for p in params(model)],rng])
    before,noise = world(),BatchNoise(half(model))
    for o in batches: noise.add(lambda: mse_of(model, *o))
    with pytest.raises(RuntimeError): noise.add(lambda: mse_of(model, batches[0][0][:,:3], batches[0][1]))
    assert world()==before and 0<noise.result.added<.01 and noise.result.batches==len(batches)

@pytest.mark.parametrize('mode', modes)
@pytest.mark.parametrize('name', [o for o in makes if o!='language_model'])
def test_learner_is_as_before(name, mode):
    learn = make(name, mode)
    with untouched(learn): found = batch_noise(learn, 3)
    assert found.batches==3 and 0<found.added<.01 and found.bias<.01

def test_what_is_left_out():
    "Batches that aren't finite, in float32 or half precision, and all where there are fewer than two others"
    model = mlp()
    bad = batches[0][0],batches[0][1]*math.inf
    found = measured(model, half(model), batches=[*batches[:3],bad]).result
    assert found==measured(model, half(model), batches=batches[:3]).result._replace(left_out=1)
    assert str(found).endswith(' Without 1 of 4 batches, whose gradients are not finite.')
    large = batches[0][0]*1e6,batches[0][1] # float16 ends at 65504
    too_large = measured(model, half_precision(model, f16), batches=[batches[0],large]).result
    assert too_large[1:]==(None,None,1,1,None)
    assert str(too_large)=='Not measured: the gradients of 1 of 2 batches are not finite.'
    for n,word in ((0,'none'),(1,'one')):
        found = measured(model, half(model), batches=batches[:n]).result
        assert str(found)==f'Not measured: it takes two batches, and {word} was compared.' and found.added is None

def test_same_gradients():
    "Of all batches: there is no noise to compare with"
    model = mlp()
    for o in (batches[:1]*3,[batches[0],[t+1e-9 for t in batches[0]]]):
        found = measured(model, half(model), batches=o).result
        assert found[1:]==(None,None,len(o),0,None)
        assert str(found)=='Not measured: all batches have the same gradients.'

def test_loss_scale():
    "Where gradients overflow it is halved, and no further"
    model = mlp()
    noise = measured(model, half_precision(model, f16), 2.**30)
    assert 2**8<noise.scale<2**20 and noise.result.left_out==0 and noise.result.added<1e-4
    assert measured(model, half_precision(model, f16), noise.scale).result==noise.result

def test_calls():
    "What is refused, and what a time limit leaves"
    learn = get_learner().to_bf16()
    with pytest.raises(ValueError, match='This learner trains in float32'): batch_noise(get_learner())
    for o in (1,0,True,2.):
        with pytest.raises(ValueError, match='must be an int, at least 2. The default is 8'): batch_noise(learn, o)
    assert batch_noise(learn).batches==4 and batch_noise(learn, 2).batches==2
    assert str(batch_noise(learn, seconds=0)).startswith('Not measured: it takes two batches')

def test_what_the_check_up_does_not_ask(monkeypatch):
    "One batch, float32, and a batch that doesn't fit in float32: nothing fails, and there may be nothing to do"
    learn = get_learner().to_bf16()
    texts,_ = lines(report := learn.precision_checkup(learn.dls.one_batch()))
    assert texts['Noise'].startswith('Not measured: one batch has no noise') and report.noise is None
    monkeypatch.setattr('mp_callbacks.learner.checkup.batch_noise', raises(torch.OutOfMemoryError('none left')))
    texts,todo = lines(learn.precision_checkup())
    assert texts['Noise']=='Not measured: a batch in float32 needs more memory than there is.'
    assert [*todo] in (['Nothing to do'],['Emulated']) # the latter on a CPU without bfloat16

def test_what_was_measured():
    "By the first batch of a fit, for the model as it is; native precisions, FP8 and float32 have nothing to measure"
    def said(learn): return lines(learn.precision_checkup())[0]['Measured']
    learn = get_learner(norm=True).to_bf16()
    assert said(learn).startswith('Not measured yet: ')
    learn.fit(1)
    assert f'Measured a{said(learn)[1:]}'==repr(learn.mixed_precision.steps.state.measured)
    assert said(learn).startswith('At step 0: gradients')
    learn.model = mlp()
    assert said(learn).startswith('Not measured yet: ')
    nothing = dict(fp32='no call', native_bf16='autocast alone', native_fp16='autocast alone', fp8='in FP8')
    for mode,text in nothing.items():
        assert re.match(f'Nothing to measure.*{text}', said(all_modes[mode](get_learner())))
