"""The test cells of each notebook, run against the package as it is installed

`nbdev-test` runs a notebook with the definitions that it makes itself. Here its `#| export` cells are left out, and what its
module exports stands in for them: this is what users get, pickling and `__module__` are real, and coverage counts."""
from importlib import import_module
from pathlib import Path

import pytest
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells

cfg = get_config(Path(__file__).parent)
exports = {'export', 'exports', 'exporti', 'exportd'}

def name(fn): return fn.relative_to(cfg.nbs_path).with_suffix('').as_posix()

@pytest.mark.parametrize('fn', sorted(nbglob(cfg.nbs_path, as_path=True)), ids=name)
def test_notebook(fn, flags, monkeypatch):
    monkeypatch.setenv('IN_TEST', '1') # as nbdev-test has it
    shell = CaptureShell(fn, profile=False)
    for cell in nb_test_cells(fn, cfg.tst_flags, flags):
        if mod := cell.directives_.get('default_exp'):
            shell.user_ns.update({k: v for k,v in vars(import_module(f'{cfg.lib_path.name}.{mod}')).items() if not k.startswith('__')})
        if exports & cell.directives_.keys(): continue
        with working_directory(fn.parent): shell.cell(cell)
        if shell.exc: pytest.fail(f'{name(fn)}, cell {cell.id}:\n{cell.source}\n\n{shell.prettytb(fname=fn)}', pytrace=False)
