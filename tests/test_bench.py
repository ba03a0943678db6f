"""The benchmarks run, with toy sizes, and write what they say. Nothing here looks at a time.

The file takes long because each script trains all its loops, in processes of their own."""
import csv,runpy,subprocess,sys
from pathlib import Path

import pytest,torch

bench = Path(__file__).parent.parent/'bench'
columns = ['run','part','case','size','loop','opt','precision','turn','metric','value','note']

def rows(path):
    "The header and the rows of the csv file at `path`, without its comments"
    with path.open(newline='') as f: header,*res = csv.reader(o for o in f if not o.startswith('#'))
    return header,[dict(zip(header,o)) for o in res]

def failed(o): return o['metric'] in ('error','oom')

def run(script, out, *args):
    "Run `script` with toy sizes; the path of its csv file and its rows"
    cmd = [sys.executable, '-W', 'ignore', str(bench/f'{script}.py'), '--tiny', '--out', str(out), *args]
    res = subprocess.run(cmd, capture_output=True, text=True)
    assert res.returncode==0, res.stderr[-2000:]
    path, = out.glob(f'{script}*_tiny.csv')
    comment = path.read_text().splitlines()[0]
    assert all(o in comment for o in (f'{script}.py --tiny', 'torch', 'fastai', 'cores'))
    header,found = rows(path)
    assert header==columns
    return path,found

@pytest.mark.slow
@pytest.mark.parametrize('script,metrics', [('step', {'step_ms'}), ('gpu', {'step_ms','syncs'}),
                                            ('distributed', {'step_ms','first','last'})])
def test_script(script, metrics, tmp_path):
    path,found = run(script, tmp_path)
    assert metrics <= {o['metric'] for o in found}
    groups = {(o['part'],o['case'],o['size']) for o in found}
    assert groups=={(o['part'],o['case'],o['size']) for o in found if o['metric']=='done'}
    # fastai's flat masters are views, which channels-last weights don't have
    expected = 'fastai','flat','resnet50-nhwc'
    assert [o for o in found if failed(o) and (o['loop'],o['opt'],o['case'])!=expected]==[]
    loops = {o['loop'] for o in found}
    assert {'hand','fastai','ours'} <= loops
    text = path.with_suffix('.md').read_text()
    assert all(f'| {o} |' in text for o in loops if o not in ('','bare'))
    assert script=='distributed' or list(tmp_path.glob('*.png'))

@pytest.mark.slow
def test_half_report():
    cmd = [sys.executable, '-W', 'ignore', str(bench/'report.py'), '--tiny', '--turns', '1']
    res = subprocess.run(cmd, capture_output=True, text=True)
    assert res.returncode==0, res.stderr[-2000:]
    table = [o.split(' | ') for o in res.stdout.splitlines() if o.startswith('| ')][2:]
    assert [o[1] for o in table]==['bf16','fp16','bf16','bf16','fp16'] # convolutions in bfloat16 only
    assert all(float(x.rstrip(' |'))>0 for o in table for x in o[2:])

@pytest.mark.slow
def test_first_minute(tmp_path):
    _,found = run('first_minute', tmp_path)
    assert [(o['case'],o['metric']) for o in found]==[('make help','s'), ('make help','venv_mb')]

@pytest.mark.slow
def test_host(tmp_path):
    "The parts of a step add up to it, and each loop dispatches something"
    path,found = run('host', tmp_path)
    assert [o for o in found if failed(o)]==[] and {o['case'] for o in found}=={'vit','gpt','5 weights'}
    us = [float(o['value']) for o in found if o['case']=='vit' and o['metric'].endswith('_us')]
    steps = [float(o['value']) for o in found if o['case']=='vit' and o['metric']=='step_us']
    assert len(steps)==10 and sum(us)==pytest.approx(2*sum(steps), rel=1e-3)
    assert all(float(o['value'])>40 for o in found if o['metric']=='operations')
    assert '| copies, and native |' in path.with_suffix('.md').read_text()

@pytest.mark.slow
def test_families(tmp_path):
    "A family of each library, and both comparisons"
    path,found = run('families', tmp_path)
    assert {o['part'] for o in found}=={'timm','torchvision','transformers','stream'}
    whole = [o for o in found if o['metric']=='whole']
    assert len(whole)==6 and all(o['value']=='1' for o in whole)
    assert '| copies |' in path.with_suffix('.md').read_text()

@pytest.mark.slow
def test_quality(tmp_path):
    "A model with embeddings in each precision, with two seeds; a second run measures the seed that is missing"
    path,found = run('quality', tmp_path, '--tasks', 'diabetes', '--seeds', '2', '--device', 'cpu')
    assert [o for o in found if failed(o)]==[]
    losses = [(o['loop'],o['precision'],o['size']) for o in found if o['metric']=='loss']
    assert len(losses)==len({*losses})==2*14
    assert '| diabetes | to_bf16(keep=nn.Embedding) |' in path.with_suffix('.md').read_text()
    assert path.with_suffix('.png').exists()
    _,more = run('quality', tmp_path, '--tasks', 'diabetes', '--seeds', '3', '--device', 'cpu')
    assert more[:len(found)]==found and {o['size'] for o in more[len(found):]}=={'2'}

@pytest.mark.slow
def test_fp8(tmp_path):
    "All parts, emulated; and what needs a GPU says so"
    path,found = run('fp8', tmp_path)
    assert {o['part'] for o in found}=={'kernels','products','steps','losses','report','syncs'}
    assert [o for o in found if failed(o)]==[]
    taken_out = [o for o in found if o['part']=='report' and o['metric']=='taken out' and float(o['value'])]
    assert {o['loop'] for o in taken_out}>={'outlier 3000','outlier 300000'}
    if torch.cuda.is_available(): return
    res = subprocess.run([sys.executable, '-W', 'ignore', str(bench/'fp8.py')], capture_output=True, text=True)
    assert res.returncode==1 and 'cpu has no FP8' in res.stderr

@pytest.mark.slow
def test_train(tmp_path):
    "Each loop has processes of its own, of which each is a row"
    path,found = run('train', tmp_path, '--only', 'mlp', '--loops', 'fastai', '--processes', '2')
    assert [o for o in found if failed(o)]==[]
    measured = [o for o in found if o['metric']=='faults']
    assert len(measured)==2*len({(o['loop'],o['opt'],o['precision']) for o in measured})==8
    assert {'step_ms','cpu_ms'} <= {o['metric'] for o in found}
    text = path.with_suffix('.md').read_text()
    assert '| in each process |' in text and '| page faults |' in text

@pytest.mark.slow
def test_compare(tmp_path):
    "Another checkout is named by its commit"
    path,found = run('compare', tmp_path, '--against', str(bench.parent), '--only', 'linears', '--processes', '1')
    assert len({o['loop'] for o in found if o['metric']=='cpu_ms'})==2 and [o for o in found if failed(o)]==[]
    text = path.with_suffix('.md').read_text()
    assert text.count('\n| 120 × Linear')==2 and str(bench.parent) not in text+path.read_text()

@pytest.fixture
def in_bench(monkeypatch):
    "Scripts and modules of bench can be imported, and don't change the number of threads"
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(bench))
    yield
    torch.set_num_threads(threads)

def test_kernels_and_waits(in_bench):
    "Copies are no kernels, and a launch is no wait"
    from host import of_gpu
    on_gpu,on_host = ('gemm','Memcpy DtoH','Memset'),('aten::mm','cudaLaunchKernel','cudaStreamSynchronize')
    assert of_gpu([(o,True) for o in on_gpu]+[(o,False) for o in on_host])==[1,1]

@pytest.mark.slow
def test_quality_of_bad_runs(in_bench, monkeypatch):
    "Skipped steps are counted, and a run that ends in nan is a failure"
    import quality
    v = quality.ours('autocast-fp16')
    monkeypatch.setattr(quality, 'ways', {v: lambda learn: learn.to_native_fp16(2.**24)})
    found = {metric:(value,note) for _,_,metric,value,note in quality.run('wine', 0, 'cpu', 4)}
    assert 0<found['skipped'][0]<28 and found['skipped'][1]=='of 28 steps'
    monkeypatch.setattr(quality, 'ways', {quality.of_fastai('fp32'): lambda learn: None})
    monkeypatch.setitem(quality.tasks, 'wine', quality.tasks['wine']._replace(lr=float('inf')))
    (_,_,metric,_,note), = quality.run('wine', 0, 'cpu', 1)
    assert metric=='error' and 'FloatingPointError' in note

@pytest.mark.slow
@pytest.mark.parametrize('name', ['train','step','compare','quality'])
def test_tables_are_of_the_csv(name, tmp_path, monkeypatch, in_bench):
    "What is committed as a table is what the script makes of the csv file beside it"
    csv,md = [bench/f'results/{name}_cpu.{o}' for o in ('csv','md')]
    (tmp_path/csv.name).write_text(csv.read_text())
    nothing = dict(step=['--tensors', '--elements'], quality=['--device', 'cpu']).get(name, ['--only'])
    monkeypatch.setattr(sys, 'argv', [str(bench/f'{name}.py'), '--out', str(tmp_path), *nothing])
    runpy.run_path(sys.argv[0], run_name='__main__')
    assert (tmp_path/md.name).read_text()==md.read_text() and (tmp_path/csv.name).read_text()==csv.read_text()

@pytest.mark.slow
def test_results(tmp_path, monkeypatch, in_bench):
    "A group that was interrupted is measured again, and one that wasn't is not"
    from common import Results
    from loops import Variant
    monkeypatch.chdir(tmp_path)
    measured = []
    def measure(stop=False):
        measured.append(1)
        yield Variant('hand','fused','fp32'),1,'step_ms',len(measured),''
        if stop: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): Results('a.csv').measure('train', 'mlp', 4, measure(stop=True))
    assert not len(Results('a.csv').read())
    again = Results('a.csv')
    again.run = 'later'
    for _ in range(2): again.measure('train', 'mlp', 4, measure())
    assert (len(measured),again.read().value.tolist())==(2,[2])
