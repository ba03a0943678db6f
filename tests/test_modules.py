"""The cells of each module's notebook pass with the module that is installed: `nbdev-test` needs nbdev, this doesn't

It runs where nbdev is not, as in `make set`, and with --flags cells: `bench/mutations.py` edits modules alone."""
import json,re

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
import importlib,linecache,os,warnings
warnings.resetwarnings()
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
    forked(page.format(folder=str(fn.parent), module=module, cells=[*cells(fn, {'cuda','slow'}-flags)]), tmp_path)
