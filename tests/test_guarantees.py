"""The page of guarantees names tests that exist, and shows how many cases pytest counts; nothing of ours unpickles

As a script, with the name of a notebook to write: runs the page, which asks pytest, and saves it with its outputs. `make guarantees` does that."""
import ast,re,subprocess,sys
from pathlib import Path

import pytest
from execnb.shell import CaptureShell
from fastcore.nbio import read_nb
from nbdev.clean import clean_nb

root = Path(__file__).resolve().parent.parent
page = root/'nbs/explanations/guarantees.ipynb'

def shown(path):
    "What each cell that shows something shows, with its source"
    nb = read_nb(path)
    clean_nb(nb)
    def texts(cell): return [{k: ''.join(v) for k,v in o.get('data', {}).items()} or ''.join(o.text) for o in cell.outputs]
    return [(c.source, texts(c)) for c in nb.cells if c.cell_type=='code' and c.outputs]

def test_links():
    "The page names test files that exist"
    files = {*re.findall(r'tests/(test_\w+)', str(shown(page)))}
    assert len(files)>10 and all((root/f'tests/{o}.py').is_file() for o in files)

@pytest.mark.slow
def test_up_to_date(tmp_path):
    "The numbers of cases are those that pytest counts"
    new = tmp_path/page.name
    res = subprocess.run([sys.executable, __file__, new], capture_output=True, text=True)
    assert res.returncode==0, res.stderr[-3000:]
    old = f'{page.relative_to(root)} shows other numbers than pytest: run `make guarantees`, and commit it'
    if shown(new)!=shown(page): pytest.fail(old, pytrace=False)

unpicklers = {'pickle','_pickle','cloudpickle','dill','joblib','marshal','shelve','load_pickle','load_learner','torch.load',
              'torch.serialization.load','weights_only','eval','exec'}

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

@pytest.mark.parametrize('code', ['import pickle as p', 'from fastcore.xtras import load_pickle', 'torch.load(f)', 'from torch import load',
                                  'load(f, weights_only=False)', 'eval(s)', 'import a.dill'])
def test_unpickling_is_seen(code): assert unpicklers & {*names(code)}

def quiet(cell):
    "Without warnings: where they come from differs from machine to machine"
    if cell.cell_type=='code': cell.outputs = [o for o in cell.outputs if o.get('name')!='stderr']

if __name__=='__main__': CaptureShell(mpl_format=None).execute(page, sys.argv[1], exc_stop=True, postproc=quiet)
