"""fastai's own notebooks don't change when `mp_callbacks.all` is imported"""
import os,subprocess,sys
from pathlib import Path

import pytest

nbs = os.environ.get('FASTAI_NBS')

@pytest.mark.slow
@pytest.mark.skipif(not nbs, reason="FASTAI_NBS doesn't name the folder nbs of a copy of fastai's repository")
def test_import_breaks_no_cell():
    cmd = [sys.executable, Path(__file__).with_name('fastai_notebooks.py'), nbs, '--precision', 'import']
    res = subprocess.run(cmd, capture_output=True, text=True)
    assert res.returncode==0, res.stdout+res.stderr
