"""The cells of notebooks with modules print what is saved

Readers see saved outputs, so these must be those of the code. Cells whose outputs depend on the machine or on the time
are marked `#| varies`. `make outputs PAGE=nbs/…` saves outputs again."""
import difflib,os,re,subprocess,sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

import pytest,torch
from interpreters import root
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells

sys.path.insert(0, str(root/'docs'))
import outputs

nbs = root/'nbs'
way_out = 'Run `make outputs PAGE={}`, or mark the cell `#| varies` if that depends on the machine or on the time.'
has_gpu = torch.cuda.is_available() # which computes other numbers, and can't be used by a fork

def run(fn, flags):
    "What the first cell of the notebook at `fn` that fails has to say, or one that prints something else than is saved"
    os.environ['IN_TEST'] = '1' # as nbdev-test has it
    for cell,saved,error in outputs.ran(fn, flags):
        where = f'{fn.relative_to(nbs)}, cell {cell.id}:\n{cell.source}\n\n'
        if error: return where+error
        if 'hide' in cell.directives_ or has_gpu or not outputs.outdated(cell, saved): continue
        texts = [outputs.shown(o).splitlines() for o in (saved,cell.outputs)]
        diff = '\n'.join(difflib.unified_diff(*texts, 'saved', 'printed', lineterm=''))
        return where+diff+'\n\n'+way_out.format(fn.relative_to(root))

def run_alone(fn, *args):
    "`run`, in a process of its own: what a notebook leaves in its libraries, as Accelerate's state, meets no other"
    if 'from fastai' in fn.read_text(encoding='utf-8'):
        for o in ('fastai.tabular.all','fastai.text.all','fastai.vision.all'): import_module(o) # before it forks
    with ProcessPoolExecutor(1, get_context('spawn' if has_gpu or not hasattr(os, 'fork') else 'fork')) as pool:
        res = pool.submit(run, fn, *args).result()
        pool.submit(os._exit, 0) # by itself a process ends after many seconds, if PyTorch has compiled in it
        return res

def check(fn, flags, pool):
    if error := pool.submit(run_alone, fn, flags).result(): pytest.fail(error, pytrace=False)

def cases(modules):
    "Notebooks with modules, or pages; those without fastai come first: it changes other libraries when it is imported"
    texts = {o:o.read_text(encoding='utf-8') for o in nbglob(nbs, as_path=True)}
    found = [o for o,text in texts.items() if ('#| default_exp' in text)==modules]
    found.sort(key=lambda o: ('from fastai' in texts[o], o))
    return [pytest.param(o, id=o.relative_to(nbs).with_suffix('').as_posix()) for o in found]

@pytest.mark.slow # nbdev-test runs them, too
@pytest.mark.parametrize('fn', cases(modules=True))
def test_module(fn, flags, pool): check(fn, flags, pool)

def test_outdated():
    "Which outputs count as the same"
    def text(s, **kwargs): return dict(output_type='stream', name='stdout', text=s.splitlines(True), **kwargs)
    def value(**data): return dict(output_type='execute_result', data={k.replace('_','/'):v for k,v in data.items()})
    def outdated(saved, printed, *marks):
        cell = type('Cell', (), dict(outputs=printed, directives_=dict.fromkeys(marks)))
        return outputs.outdated(cell, saved)
    for a,b in (('loss 0.5468','loss 0.5459'), ('0.57%','0.58%'), ('0.5   x','0.51 x'), ('1e-08','1.1e-08')):
        assert not outdated([text(a)], [text(b)])
    for a,b in (('step 31','step 32'), ('0.61','0.63'), ('1.5','-1.5'), ('1.5','nan'), ('a\n','a\nb\n'), ('a',''),
                ('290','280'), ('1.5 2','1.5'), ('1.0e-08','1.2e-08')):
        assert outdated([text(a)], [text(b)]) and outdated([text(b)], [text(a)])
        assert not outdated([text(a)], [text(b)], 'varies')
    assert not outdated([text('a\nb')], [text('a\n'),dict(text('noise'), name='stderr'),text('b')])
    assert not outdated([text('a 00:03')], [text('|---| 0%\r|███| 50%\r         \ra 00:04')])
    picture = value(text_plain='<Figure>', image_png='x')
    assert not outdated([picture], [value(image_png='y')]) and outdated([picture], []) and outdated([], [picture])
    assert outdated([value(text_plain='a', text_html='<b>')], [value(text_plain='a', text_html='<i>')])
    assert not outdated([value(text_plain='<A at 0x12>')], [value(text_plain='<A at 0x3f>')])

def test_no_notebook_is_lost():
    "`nbdev-test` leaves out folders: it runs each notebook with a module, and README's, and all cells but those marked"
    makefile = (root/'Makefile').read_text(encoding='utf-8')
    left_out = re.search(r'^PAGES *:= *(.*)$', makefile, re.M)[1].replace('$$', '$')
    found = [*nbglob(nbs, skip_folder_re=left_out, as_path=True)]
    assert {o.id for o in cases(modules=True)}|{'index'}=={o.relative_to(nbs).with_suffix('').as_posix() for o in found}
    ran = sum(len([*nb_test_cells(o, outputs.cfg.tst_flags, [])]) for o in found)
    assert len(found)>=36 and ran>=750

@pytest.mark.slow
def test_no_test_is_lost():
    "What pytest finds, when all are asked for"
    cmd = [sys.executable, '-m', 'pytest', '-q', '--collect-only', '--flags', 'cuda slow', root/'tests']
    found = subprocess.run(cmd, cwd=root, capture_output=True, text=True).stdout
    assert found.count('::')>=4000
