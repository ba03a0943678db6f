"The benchmarks run, with toy sizes, and write what they say. Nothing here looks at a time."
import csv,os,subprocess,sys
from pathlib import Path

import pytest

bench = Path(__file__).parent.parent/'bench'
columns = ['run','part','case','size','loop','opt','precision','turn','metric','value','note']

def rows(path):
    "The header and the rows of the csv file at `path`, without its comments"
    with path.open(newline='') as f: header,*res = csv.reader(o for o in f if not o.startswith('#'))
    return header,[dict(zip(header,o)) for o in res]

def failed(o): return o['metric'] in ('error','oom')

@pytest.mark.parametrize('script,name,metrics', [('gpu','gpu_tiny',{'copy_gbs','overhead_ms','syncs','step_ms'}), ('train','train_*_tiny',{'step_ms'}), ('step','step_*_tiny',{'copy_gbs','overhead_ms','step_ms'})])
def test_script(script, name, metrics, tmp_path):
    res = subprocess.run([sys.executable, '-W', 'ignore', str(bench/f'{script}.py'), '--tiny', '--out', str(tmp_path)], capture_output=True, text=True)
    assert res.returncode==0, res.stderr[-2000:]
    path, = tmp_path.glob(f'{name}.csv')
    comment = path.read_text().splitlines()[0]
    assert all(o in comment for o in (f'{script}.py --tiny', 'torch', 'fastai', 'cores'))
    header,found = rows(path)
    assert header==columns
    assert metrics <= {o['metric'] for o in found}
    groups = {(o['part'],o['case'],o['size']) for o in found}
    assert groups=={(o['part'],o['case'],o['size']) for o in found if o['metric']=='done'}
    # fastai's flat masters are views, which channels-last weights don't have
    assert [o for o in found if failed(o) and (o['loop'],o['opt'],o['case'])!=('fastai','flat','resnet50-nhwc')]==[]
    loops = {o['loop'] for o in found}
    assert {'hand','fastai','ours'} <= loops
    text = path.with_suffix('.md').read_text()
    assert all(f'| {o} |' in text for o in loops if o not in ('','bare'))
    assert script=='train' or list(tmp_path.glob('*.png'))

def test_norms(tmp_path):
    res = subprocess.run([sys.executable, '-W', 'ignore', str(bench/'norms.py'), '--tiny', '--out', str(tmp_path)], capture_output=True, text=True)
    assert res.returncode==0, res.stderr[-2000:]
    path, = tmp_path.glob('norms_*_tiny.csv')
    header,found = rows(path)
    assert header==columns and not [o for o in found if failed(o) and 'expected' not in o['note']] # a kernel may want one dtype
    for part,metrics in dict(model={'saved_mb','log2_max_scale','grad_err','norm_grad_err'}, time={'step_ms'}, alone={'y_err','x_grad_err','weight_grad_err','saved_bytes','default'}).items():
        assert metrics <= {o['metric'] for o in found if o['part']==part}
    saved = {(o['case'],o['precision'],o['loop']):float(o['value']) for o in found if o['metric']=='saved_mb'}
    assert all(saved[c,p,'rounded']<saved[c,p,'float32'] for c in ('vit','gpt','conv-gn') for p in ('fp16','bf16'))
    text = path.with_suffix('.md').read_text()
    assert all(f'| {o} |' in text for o in ('float32','as it is','rounded','lent','exact'))

def test_results(tmp_path):
    "A group that was interrupted is measured again, and one that wasn't is not"
    code = """if 1:
        from common import Results
        from loops import Variant
        measured = []
        def measure(stop=False):
            measured.append(1)
            yield Variant('hand','fused','fp32'),1,'step_ms',len(measured),''
            if stop: raise KeyboardInterrupt
        try: Results('a.csv').measure('train', 'mlp', 4, measure(stop=True))
        except KeyboardInterrupt: pass
        assert not len(Results('a.csv').read())
        again = Results('a.csv')
        again.run = 'later'
        for _ in range(2): again.measure('train', 'mlp', 4, measure())
        assert (len(measured),again.read().value.tolist())==(2,[2])"""
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=tmp_path, env={**os.environ, 'PYTHONPATH':os.pathsep.join([str(bench), *sys.path])}, capture_output=True, text=True)
    assert res.returncode==0, res.stderr[-2000:]
