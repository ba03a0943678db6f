"Which items of the data make a batch inf or nan: by the names that the user knows, or by batch and row"
from fastai.tabular.all import TabularPandas
from mp_callbacks.core.blame import each_bad
from mp_callbacks.core.nonfinite import BadItem
from sick_models import *

factors = {20:1e6, 75:math.nan, 127:math.inf, 150:5e7} # the first and the last are finite in float32

class Pixels:
    "The picture of a file"
    def __init__(self, n):
        self.xs = torch.randn(n,3,4,4)
        for i,factor in factors.items():
            if i<n: self.xs[i,0,1] *= factor
    def __call__(self, file): return self.xs[int(file.stem[4:])]

def label(file): return int(file.stem[4:])%4

def images(n=160, **kwargs):
    files = [Path(f'img_{i:04d}.png') for i in range(n)]
    dsets = Datasets(files, [Pixels(n),label], splits=(range(n),range(16)))
    return dsets.dataloaders(bs=16, num_workers=0, device='cpu', **kwargs)

def classifier(): return nn.Sequential(nn.Flatten(), nn.Linear(48,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,4))

def image_learner(call='to_fp16', dls=None, model=None, **kwargs):
    set_seed(0)
    learn = get_learner(model or classifier(), dls or images(), loss_func=CrossEntropyLossFlat(), **kwargs)
    return getattr(learn, call)()

def named(found): return {o.name:o.cause for o in found.items}

@pytest.mark.parametrize('call', ['to_fp16','to_native_fp16','to_bf16','to_fp32'])
def test_file_names(call):
    "All of them in an epoch in random order, and no other, whether or not steps were skipped before"
    expected = {f'img_{i:04d}.png':'precision' if i in (20,150) else 'data' for i in factors}
    if call in ('to_bf16','to_fp32'): expected = {k:o for k,o in expected.items() if o=='data'}
    learn = image_learner(call)
    found = learn.find_nonfinite()
    assert named(found)==expected and all(name in str(found) for name in expected)
    assert image_learner(call).find_nonfinite(seconds=0).items==() # no time
    if call!='to_fp32':
        with warnings.catch_warnings(record=True): learn.fit(1)
        assert named(learn.find_nonfinite())==expected

def test_nothing_changes():
    "In weights, buffers, and the order of the next epoch"
    def _trained(look):
        learn = image_learner()
        look(learn)
        with warnings.catch_warnings(record=True): learn.fit(1)
        return leaves(dict(learn.model.state_dict()))
    assert same(_trained(noop), _trained(Learner.find_nonfinite))

def test_rows():
    "Number and row of the batch where items have no names, and of a batch that is passed; a table has its index"
    x,y = numbers(64)
    x[37] = math.inf
    learn = get_learner(dls=as_dls(x, y)).to_bf16()
    assert learn.find_nonfinite().items==(BadItem('item 37 of dls.train (batch 2, row 5)', 'data'),)
    assert learn.find_nonfinite((x[32:48],y[32:48])).items==(BadItem('row 5', 'data'),)
    plain = torch.utils.data.TensorDataset(x, y)
    learn = get_learner(dls=DataLoaders(*[torch.utils.data.DataLoader(plain, 16)]*2)).to_bf16()
    assert learn.find_nonfinite().items==(BadItem('batch 2 of dls.train, row 5', 'data'),)
    df = pd.DataFrame(dict(a=x[:,0], b=x[:,1], y=y[:,0]), index=[f'id{i}' for i in range(64)])
    table = TabularPandas(df, cont_names=['a','b'], y_names='y', splits=([*range(64)],[*range(16)]))
    model = Does(lambda m, cats, conts: m.layer(conts), layer=nn.Linear(2,1))
    learn = get_learner(model, table.dataloaders(bs=16, device='cpu')).to_bf16()
    assert named(learn.find_nonfinite())=={'id37':'data'}

def test_validation():
    "Items of `dls.valid` are named as such"
    x,y = numbers(64)
    bad = x.clone()
    bad[37] = math.nan
    dls = DataLoaders(as_dls(x, y).train, as_dls(bad, y).valid)
    found = get_learner(dls=dls).to_bf16().find_nonfinite()
    assert str(found).startswith('In evaluation mode, on dls.valid: The inputs')
    assert found.items==(BadItem('item 37 of dls.valid (batch 2, row 5)', 'data'),)

late = 'There was no time for more within 0 seconds.'
@pytest.mark.parametrize('train,valid,seconds,told', [
    (64, 32, math.inf, 'All 4 batches of dls.train and 2 of dls.valid are finite.'),
    (16, 0,  math.inf, 'The only batch of dls.train is finite.'),
    (64, 0,  math.inf, 'All 4 batches of dls.train are finite.'),
    (64, 32, 0, f'The first batch of dls.train and 1 of dls.valid are finite. {late}'),
    (64, 0,  0, f'The first batch of dls.train is finite. {late}')])
def test_seen(train, valid, seconds, told):
    "How many batches are finite, of which data"
    dls = DataLoaders(as_dls(*numbers(train)).train, as_dls(*numbers(valid)).valid if valid else [])
    assert str(get_learner(dls=dls).find_nonfinite(seconds=seconds))==told

@pytest.mark.parametrize('call', ['to_fp16','to_fp32'])
@pytest.mark.parametrize('bs,told', [(16, 'all of 8 items looked at, the first is'),
    (4, 'all of 4 items looked at, the first is'), (1, 'the only item,')])
def test_all_items(bs, told, call):
    "That all are bad is said, and the first of them, once"
    x,y = numbers(32)
    learn = getattr(get_learner(dls=as_dls(x*math.nan, y, bs)), call)()
    found = learn.find_nonfinite()
    assert (found.where,found.items)==('inputs',())
    assert str(found).endswith(f'Not finite by themselves: {told} '
                               'item 0 of dls.train (batch 0, row 0) (data).')

def test_one_item_and_then_all():
    "What was named before is named once"
    x,y = numbers(64)
    x[3] = x[16:] = math.nan
    assert [*named(found := get_learner(dls=as_dls(x, y)).find_nonfinite())]==['item 3 of dls.train (batch 0, row 3)']
    assert str(found).count('by themselves')==1

def test_mixed_items():
    "MixUp mixes rows, and each is judged by itself"
    dls = images(32)
    assert named(image_learner(dls=dls, cbs=MixUp()).find_nonfinite())=={'img_0020.png':'precision'}

@pytest.mark.parametrize('name', ['attention','softmax','embedding','learning_rate'])
def test_a_model_is_to_blame(name):
    "No item is named where all would be"
    learn = sick[name].make().to_fp16(max_skips=33)
    if name=='learning_rate': fails(learn)
    assert learn.find_nonfinite().items==()

def test_what_cannot_be_judged():
    "A model that answers otherwise in evaluation mode, and items that are not one tensor each"
    def _no(m, x):
        if not m.training: raise ValueError('only in training')
        return m.lin(x)
    x,y = numbers(64)
    x[37] = math.inf
    found = get_learner(Does(_no, lin=nn.Linear(8,1)), as_dls(x, y)).to_bf16().find_nonfinite()
    assert found.where=='inputs' and found.items==()

def test_own_loop():
    "The row, in what `explain` says and in the warning"
    model,(x,y) = mlp(),numbers(16)
    x[5,2] = 1e6
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), .01), compute_loss=mse_of, warn_skips=2)
    assert steps.explain(x, y).items==(BadItem('row 5', 'precision'),)
    told, = heard(train_steps, steps, [(x,y)]*2)[0]
    assert 'Not finite by themselves: row 5 (precision).' in told

def test_checkup():
    "Says what to do: with the items, or with the batch"
    def _said(learn): return ' '.join(str(learn.precision_checkup()).split())
    said = _said(image_learner())
    assert 'img_0075.png (data)' in said and 'Mend or leave out the items that the line Batches names' in said
    x,y = numbers(64)
    said = _said(get_learner(dls=as_dls(x*math.inf, y)).to_bf16())
    assert 'The inputs of this batch have inf or nan' in said and 'Look for inf and nan in the data' in said

def test_by_halves():
    "As few calls as groups are bad, and an end after some"
    for n,bad in ((64,[]), (64,[5]), (64,[5,6,40]), (1,[0])):
        calls = []
        assert each_bad(range(n), lambda some: calls.append(some) or bool({*some} & {*bad}), 8)==bad
        assert len(calls)<=1+2*len(bad)*math.log2(n)
    calls = []
    assert each_bad(range(64), lambda some: calls.append(some) or True, 8)==[*range(8)] and len(calls)<32

def test_warning_of_a_learner():
    "Says how to learn of the items"
    learn = image_learner()
    learn.mixed_precision.warn_skips = 1
    told = heard(learn.fit, 1)[0]
    assert all(o.count('For the items: learn.find_nonfinite().')==1 for o in told) and len(told)==skipped(learn)
