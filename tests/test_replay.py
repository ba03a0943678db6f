"Skipped steps compute again to the same bits in another process: in a learner, in a loop, and after an error"
from interpreters import forking
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

@pytest.fixture(scope='module')
def run():
    with forking('fastai.basics,fastai.callback.all,mp_callbacks.all,torch._dynamo') as run: yield run

learner = '''if True:
    from fastai.basics import *
    from fastai.callback.all import *
    from mp_callbacks.all import *

    class Square(nn.Module):
        def forward(self, x): return x*x

    def make(seed, **kwargs):
        "One row is too large; what it is mixed with, its noise and the dropout masks are drawn"
        set_seed(seed)
        x = torch.randn(320, 16)
        y = (x.sum(1)>0).long()
        x[100] *= SIZE
        items = [(TensorBase(a),TensorCategory(b)) for a,b in zip(x, y)]
        dls = DataLoaders.from_dsets(items, items[:32], bs=16, num_workers=0, device='cpu')
        model = nn.Sequential(nn.Linear(16,32), nn.Dropout(.5), Square(), nn.Linear(32,16), nn.BatchNorm1d(16),
                              nn.Linear(16,2))
        learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=[MixUp(.4),GradientAccumulation(32)])
        learn.logger,learn.create_mbar = noop,False
        return learn.remove_cb(ProgressCallback).CALL(**kwargs)
'''
train_learner = learner+'''
    learn = make(1, replay='nights', max_skips=SKIPS)
    try: learn.fit(2)
    except FloatingPointError as e: print(str(e).split('again: ')[1])
'''
ask_learner = learner+'''
    learn = make(2)
    for file in sorted(Path('nights').ls()): print(file, learn.replay(file), sep='\\n')
'''

loop = '''if True:
    import torch
    from pathlib import Path
    from torch import nn
    from torch.nn import functional as F
    from mp_callbacks.core.training_steps import TrainingSteps

    def compute_loss(model, x, y): return F.cross_entropy(model(x), y)
    def make(seed, **kwargs):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16,32), nn.BatchNorm1d(32), nn.Dropout(.5), nn.Linear(32,2))
        return TrainingSteps(model, torch.optim.Adam(model.parameters()), DTYPE, compute_loss=compute_loss, **kwargs)
'''
train_loop = loop+'''
    steps = make(1, replay='nights', max_skips=SKIPS)
    try:
        for i in range(40):
            x = torch.randn(16,16)
            if i in (20,30): x[3,4] = torch.nan
            y = (x.sum(1)>0).long()
            for part in range(2):
                with steps.batch(x, y): steps.backward(compute_loss(steps.model, x, y)/2)
            steps.make()
    except FloatingPointError as e: print(str(e).split('again: ')[1])
'''
ask_loop = loop+'''
    steps = make(2)
    for file in sorted(Path('nights').iterdir()): print(file, steps.replay(file), sep='\\n')
'''

sizes = {o:2e3 if 'fp16' in o else 1e22 for o in calls}

def answers(run, folder, train, ask, **names):
    "What the training has said at its end, and the files, with what another process says of each"
    def _fill(code): return re.sub('|'.join(names), lambda m: str(names[m[0]]), code)
    said = run(_fill(train), folder).split()
    lines = [o for o in run(_fill(ask), folder).splitlines() if o]
    return said,dict(zip(lines[::3], zip(lines[1::3], lines[2::3])))

@pytest.mark.parametrize('call', calls)
def test_learner(call, run, tmp_path):
    "With mixup, accumulation, dropout and batch norm, and fastai's classes of tensors"
    said,found = answers(run, tmp_path, train_learner, ask_learner, CALL=call, SKIPS=250, SIZE=sizes[call])
    assert not said and len(found)==2
    for same,cause in found.values():
        assert 'weights have the same bits as in training, and ' in same and 'nan as there' in same
        assert '2 (Square) was the first module that returned inf or nan' in cause

@pytest.mark.parametrize('call', ['to_fp16','to_native_bf16'])
def test_learner_after_an_error(call, run, tmp_path):
    said,found = answers(run, tmp_path, train_learner, ask_learner, CALL=call, SKIPS=1, SIZE=sizes[call])
    (file,(same,cause)), = found.items()
    assert said==[f"learn.replay('{file}')."] and 'have the same bits' in same and 'Square' in cause

@pytest.mark.parametrize('dtype', [f16,bf16])
@pytest.mark.parametrize('skips', [1,250])
def test_loop(skips, dtype, run, tmp_path):
    said,found = answers(run, tmp_path, train_loop, ask_loop, DTYPE=dtype, SKIPS=skips)
    assert [*found]==[f'nights/step_{i}.pt' for i in ((20,) if skips==1 else (20,30))]
    assert said==(["steps.replay('nights/step_20.pt')."] if skips==1 else [])
    for same,cause in found.values():
        assert 'weights have the same bits as in training, and 2 of the 2 losses are nan as there' in same
        assert 'inputs of this batch have inf or nan, 1' in cause
