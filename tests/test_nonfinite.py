"`nonfinite`: what is bad in a batch. The right place is named, precision told from other causes, and `keep` cures."
from sklearn.datasets import load_digits
from mp_callbacks.core.nonfinite import diagnose
from sick_models import *

pytestmark = pytest.mark.filterwarnings('ignore:32 steps in a row')

ends = 'float16 ends at 65504 and has only 0 below 3e-08, and in float32 all is finite'
told = dict( # what the text has, besides the name of the module
    attention     = ['1 (Attention) was the first module that returned inf or nan', ends, "keep='1'", 'bfloat16'],
    softmax       = ['1 (Softmax) was the first module that returned inf or nan', ends, "keep='1'", 'bfloat16'],
    variance      = ['1 (SmallVariance) was the first', 'too small to divide by', ends, "keep='1'", 'bfloat16'],
    growing       = ['1 (Growing) was the first module that returned inf or nan', ends, "keep='1'", 'bfloat16'],
    loss_inside   = ['The model (LossInside) was the first', 'its output would have values up to 1e+06', ends],
    embedding     = ['0 (Categories) was the first', '4 of its own weights or buffers are', 'load a checkpoint'],
    inf_in_batch  = ['The inputs of this batch have inf or nan, 8 in all'],
    nan_label     = ['The targets of this batch have inf or nan', 'Precision is not the cause'],
    learning_rate = ['Training has diverged', 'Lower the learning rate'])
later = 'growing','learning_rate' # finite at the start

def says(name, text): return [o for o in told[name] if o not in text]==[]

turns = in_turns(sick, ['to_fp16','to_native_fp16'])
@pytest.mark.parametrize('name,to', crossed(sick, ['to_fp16','to_native_fp16'], fast=lambda name,to: to==turns[name]))
def test_float16(name, to):
    "`find_nonfinite` and the error name the place and the cause, and give the line to write"
    s,learn = sick[name],getattr(sick[name].make(), to)(max_skips=33)
    if name in later: assert says(name, fails(learn))
    found = learn.find_nonfinite()
    assert (found.where,found.module,found.precision)==(s.where,s.module,s.precision), found
    assert not re.search(r'[.!?] [a-z]', str(found)) # sentences begin with a capital
    assert says(name, str(found)) and f"learn.{to}(keep=" in str(found) or not s.precision
    if name in ('attention','softmax','variance','embedding'): assert says(name, fails(learn))

@pytest.mark.parametrize('name', sick)
@pytest.mark.parametrize('to', ['to_bf16','to_native_bf16','to_fp32'])
def test_other_precisions(name, to):
    "In bfloat16 and float32, only what isn't about precision is found"
    s,learn,half = sick[name],sick[name].make(),to!='to_fp32'
    if half: getattr(learn, to)(max_skips=33)
    if name=='learning_rate':
        if half: assert says(name, fails(learn))
        else: learn.fit(5)
    found = learn.find_nonfinite()
    if s.precision: assert (found.where,found.precision)==('nothing',False)
    elif not half and name=='learning_rate': assert found.where in ('training','weights')
    else: assert (found.where,found.module,found.precision)==(s.where,s.module,False)

def final_loss(learn): return fitted(learn, 20, lr=1e-3).validate()[0] # with more, rounding alone makes a difference

@pytest.mark.parametrize('name', crossed(['attention','softmax','variance','growing'], fast=lambda o: o=='softmax'))
def test_keep_cures(name):
    "With `keep` of the finding, and with that of the report, training reaches the loss of float32"
    make,keeps = sick[name].make,[]
    learn = make().to_fp16(max_skips=33)
    if name in later: fails(learn)
    else: keeps.append(learn.find_nonfinite().keep)
    report = learn.precision_report()
    assert {*keeps,tuple(report.keep)}=={('1',)} and not math.isfinite(report.error)
    assert final_loss(make().to_fp16(keep=report.keep))==pytest.approx(final_loss(make()), rel=.02)

@pytest.mark.parametrize('name,to', crossed(healthy, calls, fast=lambda _,to: to in ('to_fp16','to_native_bf16')))
def test_healthy(name, to):
    "Nothing is found, and nothing is to be kept"
    learn = fitted(getattr(healthy[name](), to)(), 2)
    all_are = 'All 4 batches of dls.train and 4 of dls.valid are finite.'
    assert learn.find_nonfinite()==('nothing',all_are,'',False,(),())
    report = learn.precision_report()
    assert report.keep==[] and report.error<.05

def net_and_loss(factor):
    "A net in which one layer's output is 10,000 times as large in `factor` 1e5"
    model = nn.Sequential(nn.Linear(8,16), nn.Linear(16,16), nn.ReLU(), nn.Linear(16,16), nn.Linear(16,1))
    with torch.no_grad(): model[1].weight.mul_(factor)
    xb,yb = torch.randn(4,8),torch.zeros(4,1)
    return model,lambda: F.l1_loss(model(xb), yb)

def test_backward():
    "A gradient that is too large: because of the loss scale, or with any"
    model,loss = net_and_loss(1.)
    half = half_precision(model, torch.float16)
    big = diagnose(model, loss, half, scale=2.**24)
    assert (big.where,big.precision)==('scale',True) and 'The loss scale of 16777216 is too large' in str(big)
    huge = diagnose(model, lambda: loss()*1e6, half)
    assert (huge.where,huge.precision)==('backward',True) and '4' in huge.keep and 'bfloat16' in str(huge)

def test_wrong_call():
    "Inside `with half:` it would compare half precision with itself"
    model,loss = net_and_loss(1e5)
    half = half_precision(model, torch.float16)
    with half,pytest.raises(RuntimeError, match='outside of `with half:`'): diagnose(model, loss, half)

def test_existing_keep():
    "What is kept already stays, and the text says that more is to be added"
    model,loss = net_and_loss(1e5)
    rules = "{'0': 'float32', '1': 'float32', '3': 'float32'}"
    for keep,to_write in (('0',"['0', '1', '3']"), (['0'],"['0', '1', '3']"), ({'0':'float32'},rules)):
        found = diagnose(model, loss, half_precision(model, torch.float16, keep))
        assert found.keep==('1','3') and f"Keep these in float32: half_precision(keep={to_write}), or" in str(found)

def test_no_keep_helps():
    "The loss itself overflows in half precision: modules in float32 don't change that"
    model,loss = net_and_loss(1.)
    def sick(): return loss()*(math.inf if 'forward' in vars(model) else 1)
    found = diagnose(model, sick, half_precision(model, torch.float16))
    assert (found.where,found.keep)==('loss',()) and 'To keep single modules in float32 is not enough' in str(found)

def test_masks_are_no_overflow():
    "A mask of -inf goes through all modules, and only the layer that overflows is named"
    class Masked(nn.TransformerEncoderLayer):
        def forward(self, x): return super().forward(x, nn.Transformer.generate_square_subsequent_mask(4))
    layer,x = Masked(8, 2, 16, dropout=0., batch_first=True),torch.randn(2,4,8)
    model = nn.Sequential(layer, nn.Linear(8,8), layer)
    with torch.no_grad(): model[1].weight.mul_(1e6)
    found = diagnose(model, lambda: model(x).mean(), half_precision(model, torch.float16))
    assert (found.where,found.module,found.precision)==('forward','1',True)

def test_compiled():
    "Compiled models are looked at without compilation, and compile no graph again afterwards"
    torch._dynamo.reset()
    wrapped,xb = torch.compile(net_and_loss(1e5)[0], backend='eager'),torch.randn(4,8)
    half = half_precision(wrapped, torch.bfloat16)
    with half: wrapped(xb).mean().backward()
    graphs = torch._dynamo.utils.counters['stats']['unique_graphs']
    found = diagnose(wrapped, lambda: wrapped(xb).abs().mean(), half_precision(wrapped, torch.float16))
    assert (found.where,found.module)==('forward','1')
    with half: wrapped(xb).mean().backward()
    assert torch._dynamo.utils.counters['stats']['unique_graphs']==graphs

@pytest.mark.parametrize('reentrant', [False,True])
def test_checkpointing(reentrant):
    "Modules that compute again in the backward pass are looked at once"
    class Checkpointed(nn.Sequential):
        def forward(self, x): return checkpoint(super().forward, x, use_reentrant=reentrant)
    model,xb = Checkpointed(*net_and_loss(1.)[0]),torch.randn(4,8,requires_grad=True)
    half = half_precision(model, torch.float16)
    assert diagnose(model, lambda: model(xb).mean(), half).where=='nothing'
    found = diagnose(model, lambda: model(xb).mean()*1e6, half)
    assert (found.where,found.precision)==('backward',True)
    with torch.no_grad(): model[1].weight.mul_(1e5)
    found = diagnose(model, lambda: model(xb).mean(), half)
    assert (found.where,found.module,found.keep)==('forward','1',('1','3'))

def log_no(x): return (1-(x*0+9).sigmoid()).log()*x # a probability near 1 becomes 1
def near(x): return x/((1e4+x.detach()*0+.1)-1e4) # divides by a difference that is lost

@pytest.mark.parametrize('f,dtype', [(log_no,torch.float16), (log_no,torch.bfloat16), (near,torch.bfloat16)])
def test_range_or_digits(f, dtype):
    """The range of float16 alone is the cause if all is finite in bfloat16, which has fewer digits: see `ends`

    bfloat16 is no cure for what float16 rounds to 1, and has the range of float32: then it is the digits."""
    model,x = nn.Sequential(nn.Linear(8,8), Lambda(f), nn.Linear(8,1)),torch.randn(8,8)
    found = diagnose(model, lambda: model(x).float().square().mean(), half_precision(model, dtype))
    bits,one = (11,.9999) if dtype==torch.float16 else (8,.999)
    assert found.precision and f'rounds to {bits} bits ({one} to 1)' in str(found) and torch.tensor(one).to(dtype)==1
    assert 'or train in float32' in str(found) and torch.tensor([2.9e-8,3.1e-8]).half().tolist()==[0,2.**-24]
    assert ('float16 ends at 65504 and has only 0 below 3e-08 and' in str(found))==(dtype==torch.float16)

@pytest.mark.parametrize('f,where', [(torch.log,'loss'), (torch.sqrt,'backward')])
def test_digits_that_the_loss_misses(f, where):
    "What the model rounds shows in a float32 loss, or in its gradients"
    model = nn.Sequential(nn.Linear(8,8), nn.Sigmoid())
    nn.init.constant_(model[0].bias, 9)
    found = diagnose(model, lambda: f(1-model(torch.zeros(8,8))).mean(), half_precision(model, torch.bfloat16))
    assert (found.where,found.precision)==(where,True) and 'bfloat16 rounds to 8 bits' in str(found)

def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4,1))
    def loss(): return model(torch.tensor([1,5,1])).square().mean()
    half = half_precision(model, torch.float16)
    assert [diagnose(model, loss, half, scale=o).where for o in (1.,2.**40)]==['nothing','scale']

@pytest.mark.parametrize('to,kwargs', [('to_fp16',{}), ('to_native_fp16',dict(init_scale=2.**24)), ('to_bf16',{})])
def test_divergence_after_a_skipped_step(to, kwargs):
    """The first loss may be nan, as its step was skipped while the scale was found

    The net is that of the page on troubleshooting whose learning rate is too high."""
    torch.manual_seed(42)
    x,y = load_digits(return_X_y=True)
    dls = as_dls(torch.tensor(x/16).float(), torch.tensor(y).float(), bs=64)
    deep = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,64), nn.ReLU(), nn.Linear(64,1))
    found = fitted(getattr(get_learner(deep, dls, opt_func=SGD), to)(**kwargs), lr=.5).find_nonfinite()
    assert (found.where,found.precision)==('training',False) and 'Training has diverged' in str(found)

class Distance(nn.Sequential):
    "The distance of two encodings: the root of 0 has no gradient"
    def forward(self, x):
        return (super().forward(x)-super().forward(x.abs())).pow(2).sum(-1, keepdim=True).sqrt()

@pytest.mark.parametrize('half', [False, True])
@pytest.mark.parametrize('nested', [False, True])
def test_backward_of_own_code(half, nested):
    "A module whose own `forward` makes nan on the way back is named, and after which of the modules inside it"
    model,x = Distance(nn.Linear(8,8), nn.Tanh()),torch.randn(4,8)
    x[1] = x[1].abs()
    if nested: model = nn.Sequential(model, nn.Linear(1,1))
    half = half_precision(model, torch.bfloat16) if half else None
    found = diagnose(model, lambda: model(x).float().square().mean(), half)
    assert (found.where,found.module,found.precision)==('backward','0' if nested else '',False)
    which = f"{'0' if nested else 'the model'} (Distance) was the first where gradients became inf or nan"
    assert f"{which}, in its own forward, after {'0.1' if nested else '1'}." in str(found)

@pytest.mark.parametrize('to', ['to_fp16','to_native_fp16','to_bf16'])
def test_one_wrong_label(to):
    "Targets are looked at beside the predictions"
    def _learner(): return getattr(get_learner(nn.Linear(8,1), as_dls(x, x[:,:1], 64)), to)()
    x = torch.randn(64,8)
    batch = x,torch.where(torch.arange(64)[:,None]==5, 3e6, x[:,:1])
    learn = fitted(_learner(), 2)
    found = learn.find_nonfinite(batch)
    assert (found.where,found.precision)==('targets',False) and 'wrong label' in str(found)
    assert 'The targets of this batch have values up to 3e+06, and the predictions up to' in str(found)
    # without a fit there is no loss to compare with
    assert _learner().find_nonfinite(batch).where==('nothing' if to=='to_bf16' else 'targets')

class MaskedRow(nn.Linear):
    "Attention in which one row may look at nothing"
    def forward(self, x):
        logits = super().forward(x)@x.mT
        logits[0] = -torch.inf
        return logits.softmax(-1)@x

def large_net(inner):
    "A net with `inner`, and a large weight beside"
    model = nn.Sequential(nn.Linear(8,8), inner, nn.Linear(8,1))
    model.register_parameter('shift', nn.Parameter(torch.tensor(2e5)))
    return model

def test_large_by_design():
    "A large weight is evidence of divergence only if it has grown"
    learn = get_learner(large_net(MaskedRow(8,8))).to_fp16(max_skips=3)
    with pytest.raises(FloatingPointError, match=r'1 \(MaskedRow\)') as e: learn.fit(1)
    # in float32 isn't known what the weights were
    for found in (learn.find_nonfinite(),get_learner(large_net(MaskedRow(8,8))).find_nonfinite()):
        assert (found.where,found.module,found.precision)==('forward','1',False)
        assert 'diverged' not in f'{found} {e.value}' and 'inside, a softmax gets -inf in all of a row.' in str(found)

@pytest.mark.parametrize('before,where', [(None,'forward'),(1.,'training'),(1e5,'forward')])
def test_weights_that_have_grown(before, where):
    "Large weights are a cause of nan if they were not so large when training began, and nothing is guessed"
    model,x = large_net(Lambda(torch.sqrt)),torch.randn(8,8)
    found = diagnose(model, lambda: model(x).square().mean(), usual_weight=before)
    assert (found.where,found.precision)==(where,False)
    assert ('Training has diverged' in str(found))==(where=='training')

class OnlyHalf(nn.Linear):
    "Like a kernel that was made for half precision"
    def forward(self, x):
        if not torch.is_autocast_enabled('cpu'): raise ValueError('kernel for half only')
        return super().forward(x)*torch.inf

class OwnHalf(nn.Linear):
    def forward(self, x):
        with torch.autocast('cpu', torch.float16): return super().forward(x*1e6)

@pytest.mark.parametrize('kind,why', [(OnlyHalf,'the model raises ValueError: kernel for half only'),
                                      (OwnHalf,'1 still returns half precision')])
def test_comparison_fails(kind, why):
    "A look that can't compute in float32 says so, and doesn't end training with its own error"
    learn = get_learner(nn.Sequential(nn.Linear(8,8), kind(8,1))).to_fp16(max_skips=3)
    with pytest.raises(FloatingPointError, match='3 steps in a row were skipped') as e: learn.fit(1)
    found = learn.find_nonfinite()
    assert (found.where,found.module,found.precision)==('forward','1',False) and 'same' not in str(found)
    for text in (str(e.value),str(found)):
        assert f'1 ({kind.__name__}) was the first module that returned inf or nan' in text
        assert f'computed in float32 for comparison, {why}. Its own code may cast' in text

def test_fresh_scale_hides_nothing():
    "A scale that is too large is named only if nothing else is found"
    def _learner(spoil):
        x = torch.randn(64,8)
        if spoil: x[40] = torch.nan
        return get_learner(nn.Linear(8,1), as_dls(x, 10*x[:,:1]))
    for kwargs in ({}, dict(init_scale=2.**24)):
        assert _learner(True).to_native_fp16(**kwargs).find_nonfinite().where=='inputs'
    assert _learner(False).to_native_fp16(init_scale=2.**24).find_nonfinite().where=='scale'

@pytest.mark.parametrize('number,where', [(torch.inf,'weights'), (-torch.inf,'forward')])
def test_buffer(number, where):
    "A buffer that isn't finite is named as such; a mask of -inf isn't"
    shift = nn.Buffer(torch.tensor([number]*3))
    buffered = Does(lambda m, x: m.layer(x)+m.shift.max(), layer=nn.Linear(8,1), shift=shift)
    found = get_learner(nn.Sequential(nn.Linear(8,8), buffered)).to_fp16().find_nonfinite()
    assert (found.where,found.module)==(where,'1')
    assert ('3 of its own weights or buffers are inf or nan' in str(found))==(where=='weights')

@pytest.mark.parametrize('to', ['to_fp16','to_native_fp16','to_bf16'])
def test_validation_only(to):
    "Batches that are finite in training are looked at in evaluation mode: here statistics are beyond float16"
    learn = fitted(getattr(get_learner(norm=True), to)())
    learn.model[1].running_mean.fill_(1e6)
    batch,bad = learn.dls.valid.one_batch(),to!='to_bf16'
    assert math.isfinite(learn.validate()[0])!=bad
    finding,theirs = learn.precision_checkup().finding,', on dls.valid'
    for found,of in ((learn.find_nonfinite(),theirs),(learn.find_nonfinite(batch),''),(finding,theirs)):
        assert (found.where,found.module,found.precision)==(('forward','1',True) if bad else ('nothing','',False))
        assert str(found).startswith(f'In evaluation mode{of}: 1 (BatchNorm1d) was the first')==bad
    if bad: assert math.isfinite(getattr(learn, to)(keep=found.keep).validate()[0])
    x,y = batch
    learn.dls = DataLoaders(learn.dls.train, [(x,y),(x*math.nan,y)])
    told = str(learn.to_fp32().find_nonfinite())
    assert told.startswith('In evaluation mode, on dls.valid: The inputs of this batch have inf or')
    assert told.endswith('all of 8 items looked at, the first is batch 1 of dls.valid, row 0 (data).')
