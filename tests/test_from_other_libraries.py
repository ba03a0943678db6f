"Both sides of each diff of howto/from_other_libraries, and of README's, train the same model to the same loss"
import json,re

import pytest,torch,torch.nn.functional as F
from accelerate.state import AcceleratorState
from interpreters import root
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader,TensorDataset

cells = json.loads((root/'nbs/howto/from_other_libraries.ipynb').read_text(encoding='utf-8'))['cells']
pages = [''.join(o['source']) for o in cells if o['cell_type']=='markdown']

def diffs():
    "Heading -> text of its diff"
    found = [(re.search('^## (.*)', o, re.M),re.search('```diff\n(.*?)```', o, re.S)) for o in pages]
    return {title[1]:diff[1] for title,diff in found if diff}

def side(diff, sign):
    "The lines of `diff` that are there before (`-`) or after (`+`)"
    return '\n'.join(o[1:] for o in diff.splitlines() if o[:1] in (sign,' ',''))

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64,64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64,10))

def loader(dsets, batch_size=50): return DataLoader(TensorDataset(*dsets), batch_size)

x,y = load_digits(return_X_y=True)
x,y = torch.tensor(x/16, dtype=torch.float32),torch.tensor(y)
train,valid = (x[:1500],y[:1500]),(x[1500:],y[1500:])

def valid_loss(model):
    "In float32, in a new model: what a library has put around `model` doesn't count"
    new = get_model().eval()
    new.load_state_dict(model.state_dict())
    with torch.no_grad(): return F.cross_entropy(new(valid[0]), valid[1]).item()

def run(code, train_dl=None):
    "Validation loss of the model that `code` trains"
    model = get_model()
    ns = dict(torch=torch, nn=nn, F=F, device='cpu', epochs=5, model=model, train_dl=train_dl or loader(train),
              valid_dl=loader(valid), opt=torch.optim.AdamW(model.parameters(), lr=1e-3), __name__='script')
    try: exec(code, ns)
    finally: AcceleratorState._reset_state(reset_partial_state=True) # it keeps the precision of the first `Accelerator`
    return valid_loss(model)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('title', [*diffs()])
def test_both_sides(title, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path) # Lightning writes to the current folder
    if title=='Lightning': pytest.importorskip('pytorch_lightning')
    before,after = run(side(diffs()[title], '-')),run(side(diffs()[title], '+'))
    print(f'{title}: {before:.4f} before, {after:.4f} after')
    assert abs(after/before-1)<.02
    assert before<.3*valid_loss(get_model())

def test_of_readme():
    "Its loop is one epoch"
    diff = re.search('```diff\n(.*?)```', (root/'README.md').read_text(encoding='utf-8'), re.S)[1]
    before,after = [run(side(diff, o), [*loader(train)]*5) for o in '-+']
    assert abs(after/before-1)<.02 and before<.3*valid_loss(get_model())

def test_all_libraries():
    assert [*diffs()]==['PyTorch, float16: keep the loop', 'PyTorch, bfloat16: keep the loop',
                        'PyTorch: move to a Learner', 'Lightning', 'Accelerate']
