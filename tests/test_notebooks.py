"""The cells of tutorials, how-tos and concepts, with the names that readers have, and the hidden tests in them

`nbdev-test` runs the numbered notebooks, and test_docs pastes what they show. The file takes long because the pages
train models."""
import os,sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest,torch
from execnb.shell import CaptureShell
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells

cfg = get_config(Path(__file__).parent)

def name(fn): return fn.relative_to(cfg.nbs_path).with_suffix('').as_posix()

def shows(outputs): return any(o['output_type'] in ('execute_result','display_data') for o in outputs)

yours = {'howto/from_other_libraries': ['model','train_dl','valid_dl']} # what readers have, as the page says

def run(fn, flags):
    """What the first failing cell of the notebook at `fn` has to say, or which cell shows readers what isn't saved

    Cells whose code readers don't see have a module of their own, which gets what the page defines. What they define
    stays there, but for `yours`. What they change elsewhere, such as the folder or PyTorch's threads, holds for all."""
    os.environ['IN_TEST'] = '1' # as nbdev-test has it
    os.chdir(fn.parent)
    shell = CaptureShell(fn, profile=False)
    page = shell.user_module
    hidden = sys.modules['hidden_cells'] = ModuleType('hidden_cells')
    def _copy(names, a, b): vars(b).update({o:vars(a)[o] for o in names if o in vars(a)})
    _copy([o for o in vars(page) if o!='__name__'], page, hidden)
    for cell in nb_test_cells(fn, cfg.tst_flags, flags):
        saved,cell.outputs = shows(cell.outputs),[]
        seen = 'hide' not in cell.directives_ and cell.directives_.get('echo')!='false'
        before = dict(vars(page))
        shell.user_module = page if seen else hidden
        shell.user_ns = vars(shell.user_module)
        shell.cell(cell)
        if seen: _copy([k for k,v in vars(page).items() if before.get(k) is not v], page, hidden)
        else: _copy(yours.get(name(fn), []), hidden, page)
        where = f'{name(fn)}, cell {cell.id}:'
        unsaved = not saved and shows(cell.outputs) and 'hide' not in cell.directives_
        if unsaved: return f'{where} its output is not saved\n{cell.source}'
        if shell.exc: return f'{where}\n{cell.source}\n\n{shell.prettytb(fname=fn)}'

def run_alone(*args):
    "`run`, in a process of its own: what a page leaves in its libraries, such as Accelerate's state, meets no other"
    for o in ('fastai.tabular.all','fastai.text.all','fastai.vision.all'): import_module(o) # before it forks
    forks = hasattr(os, 'fork') and not torch.cuda.is_available() # a fork can't use a GPU
    return in_process('fork' if forks else 'spawn', run, *args)

def in_process(start, f, *args):
    with ProcessPoolExecutor(1, get_context(start)) as pool:
        res = pool.submit(f, *args).result()
        pool.submit(os._exit, 0) # by itself a process ends after many seconds, if PyTorch has compiled in it
        return res

@pytest.fixture(scope='module')
def pool():
    "A process that forks for notebooks"
    with ProcessPoolExecutor(1, get_context('spawn')) as res: yield res

def case(fn): return pytest.param(fn, id=name(fn))

@pytest.mark.slow
@pytest.mark.parametrize('fn', [case(o) for o in sorted(nbglob(cfg.nbs_path, as_path=True)) if o.parent!=cfg.nbs_path])
def test_notebook(fn, flags, pool):
    if error := pool.submit(run_alone, fn, flags).result(): pytest.fail(error, pytrace=False)
