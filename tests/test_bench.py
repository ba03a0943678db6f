"""The benchmarks run, with toy sizes, and write what they say. Nothing here looks at a time.

The file takes long because each script trains all its loops, some in processes of their own."""
from learners import *

bench = root/'bench'
sys.path.insert(0, str(bench))
from common import Results
from loops import Variant

@pytest.fixture
def call(forked, tmp_path):
    "What a script prints with these arguments"
    def _call(script, *args):
        argv = [str(bench/f'{script}.py'),*args]
        code = f"import runpy,sys\nsys.path.insert(0, {str(bench)!r})\nsys.argv = {argv}\n"
        return forked(code+"runpy.run_path(sys.argv[0], run_name='__main__')", tmp_path)
    return _call

scripts = dict( # its options, and some of what it measures
    step         = ('--tensors 10', 'step_ms'),
    optimizers   = ('', 'cpu_ms'),
    beside_autocast = ('', 'us'),
    gpu          = ('--only train cast syncs mpx', 'step_ms syncs'),
    distributed  = ('', 'step_ms first last'),
    host         = ('', 'step_us operations'),
    extras       = ('', 'search_us all_us step_us'),
    families     = ('--only torchvision', 'whole'),
    measured     = ('', 'named error_of_the_gradient validation_loss'),
    batch_size   = ('--only diabetes --seeds 1', 'worth_after_0'),
    later        = ('--seeds 1', 'result named measures'),
    fp8          = ('--only products report', 'taken_out'),
    first_minute = ('', 's venv_mb'),
    quality      = ('--tasks diabetes --seeds 1 --device cpu', 'loss'),
    train        = ('--only mlp --loops fastai --processes 1', 'step_ms cpu_ms faults'),
    compare      = (f'--against {bench.parent} --only linears --processes 1', 'cpu_ms'),
    **{'families measured': ('--measured --only torchvision', 'named whole')})

@pytest.mark.slow
@pytest.mark.parametrize('script', scripts)
def test_script(script, call, tmp_path):
    "With toy sizes. A table is written, too, and no loop fails that shouldn't."
    options,metrics = scripts[script]
    script = script.split()[0]
    call(script, '--tiny', '--out', str(tmp_path), *options.split())
    path, = tmp_path.glob(f'*{script}*_tiny.csv')
    comment,*lines = path.read_text().splitlines()
    assert all(o in comment for o in (f'{script}.py --tiny', 'torch', 'fastai', 'cores'))
    found = [*csv.DictReader(o for o in lines if o[:1]!='#')]
    assert [*found[0]]=='run part case size loop opt precision turn metric value note'.split()
    assert {*metrics.split()} <= {o['metric'].replace(' ', '_') for o in found}
    # fastai's flat masters are views, which channels-last weights don't have
    expected = 'fastai','flat','resnet50-nhwc'
    failed = [o for o in found if o['metric'] in ('error','oom')]
    assert [o for o in failed if (o['loop'],o['opt'],o['case'])!=expected]==[]
    if script!='first_minute': assert '\n| ' in path.with_suffix('.md').read_text()

@pytest.mark.slow
def test_report(call):
    table = [o.split(' | ') for o in call('report', '--tiny', '--turns', '1').splitlines() if o.startswith('| ')][2:]
    assert [o[1] for o in table]==['bf16','fp16','bf16','bf16','fp16'] # convolutions in bfloat16 only

measure_nothing = dict(train=['--only'], step=['--tensors','--elements'], compare=['--only'],
                       quality=['--device','cpu'], mutations=['--n','0'], measured=['--only'], later=['--parts'],
                       batch_size=['--only'],
                       families=['--measured','--only']) # into measured_families_cpu

@pytest.mark.slow
def test_tables_are_of_the_csv(call, tmp_path):
    "What is committed as a table is what the script makes of the csv file beside it"
    committed = {o.name:o.read_text() for k in measure_nothing for suffix in ('csv','md')
                 for o in bench.glob(f'results/{k}*.{suffix}') if k!='families'}
    for name,text in committed.items():
        if name.endswith('.csv'): (tmp_path/name).write_text(text)
    for script,args in measure_nothing.items(): call(script, '--out', str(tmp_path), *args)
    assert {o:(tmp_path/o).read_text() for o in committed}==committed

@pytest.mark.slow
def test_report_of_failures(tmp_path, monkeypatch):
    "gpu.py writes its tables though no variant of a model has run"
    import gpu
    monkeypatch.chdir(tmp_path)
    results = Results('a.csv')
    results.measure('train', 'mlp', 4, [(Variant('hand','fused','fp32'),0,'error',0,'cuDNN error')])
    gpu.report(results)
    assert 'train: mlp' in (tmp_path/'a.md').read_text()

@pytest.mark.slow
def test_float32_kernels():
    "They give the numbers of bfloat16's own kernels, and their errors"
    from families import Float32Kernels
    a,b,c = torch.randn(3,2,8,8).bfloat16()
    def _product(): return torch.baddbmm(c, a, b, beta=.5, alpha=.25)
    want = _product()
    with Float32Kernels():
        res = _product()
        with pytest.raises(RuntimeError, match='dtype'): torch.mm(a[0], b[0].float())
    assert res.dtype==torch.bfloat16 and torch.allclose(res, want, rtol=1e-2, atol=1e-2)

def test_interrupted_group(tmp_path, monkeypatch):
    "Is measured again, and one that wasn't interrupted is not"
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

def test_kernels_and_waits():
    "Copies are no kernels, and a launch is no wait"
    from host import of_gpu
    on_gpu,on_host = ('gemm','Memcpy DtoH','Memset'),('aten::mm','cudaLaunchKernel','cudaStreamSynchronize')
    assert of_gpu([(o,True) for o in on_gpu]+[(o,False) for o in on_host])==[1,1]

def test_mutants():
    "Each is one edit of the code, neither of annotations nor of texts"
    from mutations import mutants
    source = '''def f(a:int=1, b='é')->3: # a comment
    "Text 1"
    if a<2 and b: g(f'{a+1}')
    a.x = [o for o in b if o is not None]
    raise ValueError(b)
    return not b
'''
    found = [(o.kind,o.old,o.new) for o in mutants('m', source)]
    assert found==[
        ('constant','1','2'), ('and/or','a<2 and b','(a < 2 or b)'), ('comparison','a<2','(a <= 2)'),
        ('negated','a<2 and b','not (a < 2 and b)'), ('constant','2','3'), ('dropped',"g(f'{a+1}')",'pass'),
        ('dropped','a.x = [o for o in b if o is not None]','pass'), ('comparison','o is not None','(o is None)'),
        ('negated','o is not None','not (o is not None)'), ('dropped','raise ValueError(b)','pass'),
        ('dropped','return not b','return')]
    for o in mutants('m', source): assert o.apply(source)!=source and len(o.apply(source).splitlines())==6

def test_removed_results(tmp_path, monkeypatch):
    "Before mutants are tried anew the csv is removed, which Git still lists"
    import mutations
    monkeypatch.setattr(mutations, 'root', tmp_path)
    for o in ('kept','removed'): (tmp_path/o).touch()
    for o in ('init -q','add -A'): subprocess.run(['git',*o.split()], cwd=tmp_path, check=True)
    (tmp_path/'removed').unlink()
    (tmp_path/'new').touch()
    assert sorted(mutations.files())==['kept','new']
    monkeypatch.setattr(sys, 'argv', ['mutations.py','--n','0','--out',str(tmp_path)])
    monkeypatch.setattr(mutations, 'modules', {})
    mutations.main() # there is nothing to report
