"The lines of the page 'Get started', typed into a plain interpreter"
import os,subprocess,sys
from pathlib import Path

import pytest
from fastcore.nbio import read_nb

page = Path(__file__).parent.parent/'nbs/tutorials/get_started.ipynb'

@pytest.mark.slow
def test_typed(tmp_path):
    cells = [o.source for o in read_nb(page).cells if o.cell_type=='code']
    shown = [o for o in cells if not o.startswith(('#| hide','#| echo'))]
    typed = '\n\n'.join(shown)+'\n'
    env = {**os.environ, 'MPLBACKEND':'Agg', 'PYTHONPATH':str(page.parents[2]), 'OMP_NUM_THREADS':'1'}
    res = subprocess.run([sys.executable, '-i'], input=typed, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert 'Traceback' not in res.stderr and 'SyntaxError' not in res.stderr, res.stderr
    assert 'stopped in epoch 1' in res.stdout
    assert (tmp_path/'models/digits.pth').exists()
