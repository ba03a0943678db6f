"""The cells of each module's notebook pass with the module that is installed: `nbdev-test` needs nbdev, this doesn't

It runs where nbdev is not, as in `make set`, and with --flags cells: `bench/mutations.py` edits modules alone. Without
nbdev it leaves out cells marked `newest`, as they need Python 3.11, where errors have notes, or a newer PyTorch."""
import json,re
from importlib.util import find_spec

import pytest
from interpreters import root

notebooks = {o.relative_to(root/'nbs').with_suffix('').as_posix():o for o in sorted((root/'nbs').rglob('*.ipynb'))
             if '#| default_exp' in o.read_text(encoding='utf-8') and '.ipynb_checkpoints' not in o.parts}

def cells(fn, left_out):
    "Names and sources of the cells of the notebook at `fn` that test its module"
    for o in json.loads(fn.read_text(encoding='utf-8'))['cells']:
        source = ''.join(o['source'])
        marks = {*re.findall(r'^#\| *([a-z_]+)', source, re.M)}
        if o['cell_type']=='code' and not marks&{'export','default_exp','eval',*left_out}:
            yield f"{fn.name}, cell {o['id']}",source

# The cells have the names of the module, private ones, too, and their source, which docments reads
page = """
import importlib,linecache,os,re,warnings
from contextlib import contextmanager
import fastcore.test,pytest
warnings.resetwarnings()
if not hasattr(fastcore.test, 'expect_fail'): # an older one, of `make set`
    @contextmanager
    def expect_fail(exc=Exception, contains='', msg='', regex=''):
        with pytest.raises(exc) as found: yield
        assert not contains or contains in str(found.value)
        assert not regex or re.search(regex, str(found.value))
    def test_fail(f, msg='', contains='', exc=Exception, args=None, kwargs=None):
        with expect_fail(exc, contains): f(*args or (), **kwargs or {{}})
    for o in (expect_fail,test_fail): setattr(fastcore.test, o.__name__, o)
    fastcore.test.__all__ += ['expect_fail']
os.environ['IN_TEST'] = '1' # as nbdev-test has it
os.chdir({folder!r})
names = dict(vars(importlib.import_module({module!r})), __name__='__main__')
for where,source in {cells!r}:
    linecache.cache[where] = len(source),None,source.splitlines(True),where
    exec(compile(source, where, 'exec'), names)
"""

@pytest.mark.cells
@pytest.mark.parametrize('name', notebooks)
def test_cells(name, flags, forked, tmp_path):
    fn,module = notebooks[name],'mp_callbacks.'+name.replace('/', '.')
    left_out = {'cuda','slow'} if find_spec('nbdev') else {'cuda','slow','newest'}
    forked(page.format(folder=str(fn.parent), module=module, cells=[*cells(fn, left_out-flags)]), tmp_path)
