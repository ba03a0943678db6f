"The page of guarantees names tests that exist; nothing of ours unpickles"
import ast,re
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent

def test_links():
    "The page names test files that exist"
    files = {*re.findall(r'tests/(test_\w+)', (root/'nbs/explanations/guarantees.ipynb').read_text(encoding='utf-8'))}
    assert len(files)>10 and all((root/f'tests/{o}.py').is_file() for o in files)

unpicklers = {'pickle','_pickle','cloudpickle','dill','joblib','marshal','shelve','load_pickle','load_learner',
              'torch.load','torch.serialization.load','weights_only','eval','exec'}

def names(code):
    "What `code` imports, calls by name or passes by name, with the parts of dotted imports"
    for o in ast.walk(ast.parse(code)):
        if isinstance(o, (ast.Import, ast.ImportFrom)):
            mod = getattr(o, 'module', None) or ''
            for a in o.names: yield from (*mod.split('.'), *a.name.split('.'), f'{mod}.{a.name}')
        elif isinstance(o, ast.Name): yield o.id
        elif isinstance(o, ast.Attribute): yield ast.unparse(o)
        elif isinstance(o, ast.keyword): yield o.arg

@pytest.mark.parametrize('path', sorted((root/'mp_callbacks').glob('*.py')), ids=lambda o: o.stem)
def test_nothing_of_ours_unpickles(path): assert not unpicklers & {*names(path.read_text(encoding='utf-8'))}

@pytest.mark.parametrize('code', [
    'import pickle as p', 'from fastcore.xtras import load_pickle', 'torch.load(f)', 'from torch import load',
    'load(f, weights_only=False)', 'eval(s)', 'import a.dill'])
def test_unpickling_is_seen(code): assert unpicklers & {*names(code)}
