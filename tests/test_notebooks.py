"""The test cells of each notebook, run against the package as it is installed

`nbdev-test` runs a notebook with the definitions that it makes itself. Here its `#| export` cells are left out, and
what its module exports stands in for them: this is what users get, and pickling and `__module__` are real. The file
takes long because the pages train models."""
import os,re
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest,torch
from execnb.shell import CaptureShell
from fastcore.nbio import read_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells

cfg = get_config(Path(__file__).parent)
exports = {'export', 'exports', 'exporti', 'exportd'}

def name(fn): return fn.relative_to(cfg.nbs_path).with_suffix('').as_posix()

def shows(outputs): return any(o['output_type'] in ('execute_result','display_data') for o in outputs)

def run(fn, flags):
    "What the first failing cell of the notebook at `fn` has to say, or which cell shows readers what isn't saved"
    os.environ['IN_TEST'] = '1' # as nbdev-test has it
    os.chdir(fn.parent)
    shell = CaptureShell(fn, profile=False)
    for cell in nb_test_cells(fn, cfg.tst_flags, flags):
        if mod := cell.directives_.get('default_exp'):
            ns = vars(import_module(f'{cfg.lib_path.name}.{mod}'))
            shell.user_ns.update({k: v for k,v in ns.items() if not k.startswith('__')})
        if exports & cell.directives_.keys(): continue
        saved,cell.outputs = shows(cell.outputs),[]
        shell.cell(cell)
        where = f'{name(fn)}, cell {cell.id}:'
        unsaved = not saved and shows(cell.outputs) and 'hide' not in cell.directives_
        if unsaved: return f'{where} its output is not saved\n{cell.source}'
        if shell.exc: return f'{where}\n{cell.source}\n\n{shell.prettytb(fname=fn)}'

def run_alone(kind, *args):
    "`run`, in a process of its own: what a page leaves in its libraries, such as Accelerate's state, meets no other"
    for o in imported[kind]: import_module(o)
    forks = hasattr(os, 'fork') and not torch.cuda.is_available() # a fork can't use a GPU
    return in_process('fork' if forks else 'spawn', run, *args)

# what a process imports before it forks; importing fastai changes tensors for what follows
imported = dict(plain=['torch'], fastai=['fastai.tabular.all','fastai.text.all','fastai.vision.all'])

def in_process(start, f, *args):
    with ProcessPoolExecutor(1, get_context(start)) as pool:
        res = pool.submit(f, *args).result()
        pool.submit(os._exit, 0) # by itself a process ends after many seconds, if PyTorch has compiled in it
        return res

@pytest.fixture(scope='module')
def pools():
    "A process that forks for notebooks without fastai, and one for the others"
    with ProcessPoolExecutor(1, get_context('spawn')) as plain, ProcessPoolExecutor(1, get_context('spawn')) as fastai:
        yield dict(plain=plain, fastai=fastai)

def process(fn):
    "Notebooks numbered below 10 import fastai only where they say so, all others do"
    imports = re.compile(r'^\s*(from|import) fastai\b', re.M)
    codes = [o.source for o in read_nb(fn).cells if o.cell_type=='code']
    return 'fastai' if fn.name[0]!='0' or any(map(imports.search, codes)) else 'plain'

def case(fn): return pytest.param(fn, id=name(fn))

@pytest.mark.slow # `make test` runs the cells of the numbered ones by `nbdev-test`
@pytest.mark.parametrize('fn', [*map(case, sorted(nbglob(cfg.nbs_path, as_path=True)))])
def test_notebook(fn, flags, pools):
    if fn.parent==cfg.nbs_path: flags = {*flags}-{'slow'} # `nbdev-test` runs their slow cells
    kind = process(fn)
    error = pools[kind].submit(run_alone, kind, fn, flags).result()
    if error: pytest.fail(error, pytrace=False)
