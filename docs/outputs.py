"""Compare the saved outputs of notebooks with what their cells print now, and save these

    python docs/outputs.py nbs/howto/keep.ipynb

runs a page and saves the outputs that say something else than before. Those of cells marked `#| varies` depend on the
machine or on the time: `--all` saves them, too, and pictures, of which only the number is compared. The tests compare
all notebooks: `tests/test_outputs.py` and `tests/test_notebooks.py`."""
import argparse,json,os,re,sys
from decimal import Decimal
from pathlib import Path

import fastprogress.fastprogress as bars,torch
from execnb.shell import CaptureShell
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.test import nb_test_cells

cfg = get_config(Path(__file__).resolve().parent)
kinds = 'text/html','text/markdown','text/plain' # of a value that has several, readers see the first
number = re.compile(r'(\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)') # but for integers
near = .01 # what numbers differ by on machines that add up in another order, relative to their size

def joined(s): return s if isinstance(s, str) else ''.join(s)

def printed(o):
    "The text of a stream, as a terminal shows it: a progress bar goes back to the start of its line"
    return re.sub(r'[^\n]*\r', '', joined(o['text']))

def shown(outputs):
    "What readers see of `outputs`: what was printed, and the text of each value, or that there is a picture"
    res = ''
    for o in outputs:
        data = o.get('data', {})
        if o['output_type']=='stream': res += printed(o)*(o['name']=='stdout')
        elif any(k.startswith('image/') for k in data): res += '(a picture)\n'
        else: res += next((joined(data[k])+'\n' for k in kinds if k in data), '')
    return re.sub(r'\b\d\d:\d\d\b', '00:00', re.sub(r' at 0x[0-9a-f]+', '', res)) # which minutes, which object

def close(a, b):
    "Are the numbers in the strings `a` and `b` near, or one apart in the last digit?"
    digit = max(Decimal(10)**Decimal(o).as_tuple().exponent for o in (a,b))
    return abs(Decimal(a)-Decimal(b))<=max(Decimal(near)*abs(Decimal(b)), digit)

def same(a, b):
    "Are the texts `a` and `b` the same, up to the last digits of numbers, and the width of columns?"
    a,b = [re.split(number, re.sub(' +', ' ', o)) for o in (a, b)]
    return a[::2]==b[::2] and all(map(close, a[1::2], b[1::2]))

def ran(fn, flags=()):
    "Run the notebook at `fn`, and yield its cells, with new outputs, what was saved, and the error if one fails"
    torch.set_num_threads(1) # sums have one order
    bars.NO_BAR,bars.WRITER_FN = True,lambda *args, **kwargs: None # nor the tables that bars print in a terminal
    os.chdir(fn.parent)
    shell = CaptureShell(fn, profile=False)
    for cell in nb_test_cells(fn, cfg.tst_flags, flags):
        saved,cell.outputs = cell.outputs,[]
        shell.cell(cell)
        yield cell,saved,shell.prettytb(fname=fn) if shell.exc else None
        if shell.exc: return

def outdated(cell, saved):
    "Has `cell` printed something else than was `saved`, though it isn't marked?"
    return 'varies' not in cell.directives_ and not same(shown(saved), shown(cell.outputs))

def save(fn, everything):
    "Run the notebook at `fn`, save the outputs that are outdated, or `everything`, and return the ids of their cells"
    new = {}
    for cell,saved,error in ran(fn, ['slow']):
        if error: sys.exit(error)
        if everything or outdated(cell, saved):
            kept = [dict(o, text=printed(o).splitlines(True)) if 'text' in o else o for o in cell.outputs]
            kept = [o for o in kept if o.get('name')!='stderr' and o.get('text', True)] # no warnings of libraries
            new[cell.id] = json.loads(json.dumps(kept, sort_keys=True)) # as Jupyter has them
    nb = json.loads(fn.read_text(encoding='utf-8'))
    for o in nb['cells']:
        if o['id'] in new: o['outputs'] = new[o['id']]
    clean_nb(nb)
    fn.write_text(json.dumps(nb, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')
    return list(new)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('page', type=Path, help='the notebook')
    p.add_argument('--all', action='store_true', help='save pictures and the outputs of cells that are marked, too')
    args = p.parse_args()
    print('saved the outputs of:', ' '.join(save(args.page.resolve(), args.all)) or 'none')
