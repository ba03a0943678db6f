"""The cells of tutorials, how-tos and concepts run, with the hidden tests in them, and show what is saved

`nbdev-test` runs the numbered notebooks, and test_docs sees that no name in what readers see comes from a hidden cell.
The file takes long because the pages train models."""
import os
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest,torch
from execnb.shell import CaptureShell
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells

cfg = get_config(Path(__file__).parent)

def name(fn): return fn.relative_to(cfg.nbs_path).with_suffix('').as_posix()

def shows(outputs): return any(o['output_type'] in ('execute_result','display_data') for o in outputs)

def run(fn, flags):
    "What the first failing cell of the notebook at `fn` has to say, or which cell shows readers what isn't saved"
    os.environ['IN_TEST'] = '1' # as nbdev-test has it
    os.chdir(fn.parent)
    shell = CaptureShell(fn, profile=False)
    for cell in nb_test_cells(fn, cfg.tst_flags, flags):
        saved,cell.outputs = shows(cell.outputs),[]
        shell.cell(cell)
        where = f'{name(fn)}, cell {cell.id}:'
        unsaved = not saved and shows(cell.outputs) and 'hide' not in cell.directives_
        if unsaved: return f'{where} its output is not saved\n{cell.source}'
        if shell.exc: return f'{where}\n{cell.source}\n\n{shell.prettytb(fname=fn)}'

def run_alone(*args):
    "`run`, in a process of its own: what a page leaves in its libraries, such as Accelerate's state, meets no other"
    for o in ('fastai.tabular.all','fastai.text.all','fastai.vision.all'): import_module(o) # before it forks
    forks = hasattr(os, 'fork') and not torch.cuda.is_available() # a fork can't use a GPU
    with ProcessPoolExecutor(1, get_context('fork' if forks else 'spawn')) as pool:
        res = pool.submit(run, *args).result()
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
