"""`python -m mp_callbacks` as a user runs it, and what it says to bad values

The file takes long because it trains in every precision."""
import signal,time

from learners import *
from mp_callbacks import demo
from machines import Fake,SlowLayer,machine,pretend
from mp_callbacks.core.devices import support

error = 'python -m mp_callbacks: error:'
cmd = [sys.executable, '-m', 'mp_callbacks', '--device', 'cpu']

@pytest.mark.slow
def test_run(tmp_path):
    "Versions first; then table, advice and files, each with every precision"
    args = ['--epochs', '1', '--seconds', '5', '--precision', *demo.precisions, '--out', tmp_path/'new/out']
    res = subprocess.run([*cmd, *args], capture_output=True, text=True)
    assert res.returncode==0, res.stderr
    assert res.stderr.splitlines()==[f"Training in {', '.join(demo.precisions)} in turn, up to 5 s each"]
    said = [o.split()[0] for o in res.stdout.splitlines() if o.strip()]
    assert said.index('torch')<said.index('precision')<said.index('Table:')
    assert [o for o in said if o in demo.precisions]==[*demo.precisions]
    csv,png = tmp_path/'new/out/precisions.csv',tmp_path/'new/out/precisions.png'
    *_,table,plot,_,advice = res.stdout.splitlines()
    assert (table,plot)==(f'Table: {csv}',f'Plot: {png}') and advice.startswith(('Use learn.','Stay with float32'))
    df = pd.read_csv(csv, index_col='precision')
    assert df.loss_scale.isna().tolist()==[True,True,False,True,False] # only float16 has one
    assert (df.step_ms>0).all() and (df.speedup_q1<=df.speedup).all() and (df.speedup<=df.speedup_q3).all()
    assert df.accuracy[df.steps==11].between(.8,1).all() # on a busy machine there may be fewer
    assert plt.imread(png).shape[0]>100

@pytest.mark.slow
@pytest.mark.skipif(sys.platform=='win32', reason='has no such signal')
def test_interrupt(tmp_path):
    "Table and files have the steps that were made before, without accuracy, and there is no advice"
    args = [*cmd, '--epochs', '1000', '--seconds', '1000', '--precision', 'bf16', '--out', tmp_path]
    with subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        while 'bf16' not in p.stderr.readline(): pass # training begins
        time.sleep(10)
        p.send_signal(signal.SIGINT)
        out,err = p.communicate()
    rest = [o for o in err.splitlines() if o]
    assert p.returncode==130 and rest[-1]=='Interrupted', err
    assert 'learn.' not in out
    df = pd.read_csv(tmp_path/'precisions.csv')
    assert df.precision.tolist()==['fp32','bf16'] and df.accuracy.isna().all() and df.steps.min()>=df.steps.max()-1>0
    assert (tmp_path/'precisions.png').stat().st_size

without = """
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
class LeftOut:
    def find_spec(name, *args):
        if name in modules: raise ModuleNotFoundError(f'No module named {name}')
names = {o for o in Path('.ci/not-for-demo.txt').read_text().splitlines() if o[:1]!='#'}
modules = {o for o,dists in packages_distributions().items() if {*dists}<=names}
assert {'triton','spacy'} & modules
sys.meta_path.insert(0, LeftOut)
"""

@pytest.mark.slow
def test_fastai_after_the_demo():
    "What README's first lines import, and a fit and a checkup, need nothing that `make demo` leaves out"
    code, = re.findall(r'^```python\n(.*?)^```', (root/'README.md').read_text(encoding='utf-8'), re.M|re.S)
    imports = ''.join(o+'\n' for o in code.splitlines() if 'import' in o)
    assert 'fastai.vision.all' in imports and 'mp_callbacks.all' in imports
    train = """
items = [*zip(torch.randn(64,4), torch.randn(64,1))]
dls = DataLoaders.from_dsets(items, items[:16], bs=16, num_workers=0, device='cpu')
learn = Learner(dls, nn.Linear(4,1), MSELossFlat()).to_bf16()
learn.fit(1)
print(learn.precision_checkup())
"""
    res = subprocess.run([sys.executable, '-c', without+imports+train], cwd=root, capture_output=True, text=True)
    assert res.returncode==0 and 'steps, none skipped' in res.stdout, res.stderr

@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    "Exit code and output of the demo, with made-up steps: of 3 milliseconds or those of a precision, times `rounds`"
    def _run(*args, rounds=(1.,1.,1.), **ms):
        def _result(precision, training, validate):
            answer = support('cpu', demo.precisions[precision])
            made = [ms.get(precision, 3.)*(o if precision!='fp32' else 1) for o in rounds]
            return demo.Run(precision, answer, [1.]*3, made, .9, .3)
        monkeypatch.setattr(demo, 'in_turn', lambda trainings, *args: [o.times.append(1.) for o in trainings])
        monkeypatch.setattr(demo, 'run_of', _result)
        code = demo.main(['--device', 'cpu', '--out', str(tmp_path), *args])
        return code,*capsys.readouterr()
    return _run

@pytest.mark.parametrize('name,seconds,steps', [
    ('EPYC', {f32:.1,bf16:.05,f16:.1},  [22,22,22,22,22]),  # all in time
    ('EPYC', {f32:.1,bf16:.05,f16:3.},  [22,22,3,22,3]),    # as many as fit
    ('EPYC', {f32:.1,bf16:.05,f16:20.}, [22,22,1,22,1]),    # one takes longer than there is time
    ('EPYC', {f32:1.,bf16:.5,f16:20.},  [10,10,1,10,1]),    # as many as float32, though there is time for more
    ('AVX2', {f32:.1,bf16:4.,f16:8.},   [22,2,2,2,2])])
def test_within_a_minute(name, seconds, steps, capsys, tmp_path, monkeypatch):
    "Training takes a minute at most on machines as slow, and rows with fewer steps than float32 aren't compared"
    clock = SlowLayer(seconds)
    monkeypatch.setattr(demo, 'time', clock)
    monkeypatch.setattr(demo, 'recipes', dict.fromkeys(demo.recipes, demo.recipes['emulated']))
    net = demo.mlp
    monkeypatch.setattr(demo, 'mlp', lambda width: torch.nn.Sequential(clock, net(width)))
    with pretend(machine(name)): assert demo.main(['--device', 'cpu', '--epochs', '2', '--out', str(tmp_path)])==0
    assert 0<clock.now<=60
    df,out = pd.read_csv(tmp_path/'precisions.csv', index_col='precision'),capsys.readouterr().out
    assert df.steps.tolist()==steps
    assert (df.step_ms.round()==[1e3*seconds[o] for o in demo.precisions.values()]).all()
    short = df.index[df.steps<steps[0]]
    assert df.accuracy.isna().equals(df.steps<steps[0]) and df.valid_loss.isna().equals(df.steps<steps[0])
    said = re.findall(r'^In (\w+) there was time for (\d+) of \d+ steps.* is (\d\.\d+) then.* was (\d\.\d+)', out, re.M)
    assert [o[0] for o in said]==[*short] and [int(o[1]) for o in said]==df.steps[short].tolist()
    assert all(abs(float(a)-float(b))<.1 for *_,a,b in said) # so it trains as in float32
    assert f"{'Use learn.to_bf16()' if name=='EPYC' else 'Stay with float32'} here" in out

def test_progress(monkeypatch, capsys, tmp_path):
    "A terminal shows step and time left on one line, which is empty at the end; the others only what begins"
    args = ['--device', 'cpu', '--epochs', '1', '--precision', 'bf16', '--out', str(tmp_path)]
    begins = 'Training in fp32, bf16 in turn, up to 60 s each\n'
    with pretend(machine('AVX2')): # where the model is small
        for terminal,shown in ((True,r'(\rstep \d+, up to \d+ s left +\r)+\r {40}\r'), (False,'')):
            monkeypatch.setattr(sys.stderr, 'isatty', lambda: terminal, raising=False)
            demo.main([*args, '--seconds', '60'])
            assert re.fullmatch(begins+shown, capsys.readouterr().err)

@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    "It runs to its table, with memory, which half precision saves"
    assert demo.main(['--device', 'cuda', '--epochs', '1', '--out', str(tmp_path)])==0
    df = pd.read_csv(tmp_path/'precisions.csv', index_col='precision')
    assert df.index[0]=='fp32' and {*df.index}<={*demo.precisions} and len(df)>1
    assert (df.steps>0).all() and (df.peak_mib[1:]<df.peak_mib['fp32']).all()

@pytest.mark.parametrize('args,says', [
    (['--epochs', '0'],                   'argument --epochs: 0 must be above 0'),
    (['--epochs', 'many'],                "argument --epochs: invalid int value: 'many'"),
    (['--seconds', '-1'],                 'argument --seconds: -1 must be above 0'),
    (['--seconds', 'nan'],                'argument --seconds: nan must be above 0'),
    (['--precision', 'fp8'],              "argument --precision: invalid choice: 'fp8'"),
    (['--device', 'nonsense'],            "argument --device: 'nonsense' is not a device of this machine. Use "),
    (['--device', 'cuda:99'],             "argument --device: 'cuda:99' is not a device of this machine. Use "),
    (['--colour', 'red'],                 'unrecognized arguments: --colour red'),
    (['--out', __file__],                 "argument --out: can't write to "),
    (['--out', f'{__file__}/below'],      "argument --out: can't write to "),
    (['--out', '.'],                      "argument --out: can't write to ")]) # a folder has the name of its file
def test_bad_value(args, says, capsys, tmp_path, monkeypatch):
    "It says so before it trains"
    monkeypatch.chdir(tmp_path)
    (tmp_path/'precisions.csv').mkdir()
    assert demo.main(args)==2
    out,err = capsys.readouterr()
    assert out=='' and err.count('\n')==1 and err.startswith(f'{error} {says}')
    assert [o.name for o in tmp_path.rglob('*')]==['precisions.csv']

def test_unsupported_precision(run):
    "is left out, and named"
    with pretend(Fake('cpu', 'this CPU', set(), no_dtype={f16})): code,out,err = run()
    assert code==0 and 'Training in fp32, bf16, native_bf16 in turn' in err
    assert "This CPU can't compute fp16, native_fp16\n" in out

@pytest.mark.parametrize('name,slow', [('AVX2',['bf16','fp16','native_bf16','native_fp16']),
                                       ('AVX512-BF16',['fp16','native_fp16']), ('AMX',[])])
def test_all_precisions_on_every_machine(name, slow, run, tmp_path):
    "Five rows, emulated ones marked and never recommended; the model is small where all are emulated"
    with pretend(machine(name)): code,out,_ = run(**dict.fromkeys(slow, 2.))
    assert code==0
    csv = pd.read_csv(tmp_path/'precisions.csv', index_col='precision')
    assert [*csv.index]==[*demo.precisions] and {*csv.index[csv.support=='emulated']}=={*slow}
    assert (f"MLP of width {demo.recipes['emulated' if name=='AVX2' else 'cpu'].width}," in out)
    if name=='AVX2': assert 'Stay with float32 here: this CPU only emulates the others. On a GPU' in out
    else: assert 'Stay with float32 here: nothing else' in out

@pytest.mark.parametrize('high', [1.1,4.])
def test_busy(high, run):
    "If speedups vary, it says before the advice that they are not reliable"
    _,out,_ = run('--precision', 'bf16', rounds=(1.,1.,high))
    assert ('not reliable' in out.partition('Stay with float32')[0])==(high==4)

def test_busy_for_a_while(capsys, tmp_path, monkeypatch):
    "Something else slows the machine down to a third for a while: twice as fast stays twice as fast"
    class Busy(SlowLayer):
        def perf_counter(self): return 3*min(self.now, 2.2)+max(self.now-2.2, 0.)
    clock = Busy({f32:.1, bf16:.05, f16:.1})
    monkeypatch.setattr(demo, 'time', clock)
    monkeypatch.setattr(demo, 'recipes', dict.fromkeys(demo.recipes, demo.recipes['emulated']))
    net = demo.mlp
    monkeypatch.setattr(demo, 'mlp', lambda width: torch.nn.Sequential(clock, net(width)))
    args = ['--device', 'cpu', '--epochs', '2', '--precision', 'bf16', '--out', str(tmp_path)]
    with pretend(machine('EPYC')): assert demo.main(args)==0
    out = capsys.readouterr().out
    assert 'Use learn.to_bf16() here: 2.0 times as fast as float32 (2.0 to 2.0)' in out and 'not reliable' not in out

def test_only_those_asked_for(run):
    "And float32, best first; the faster one is recommended"
    with pretend(machine('AMX')): _,out,err = run('--precision', 'native_bf16', 'bf16', bf16=1.2, native_bf16=1.)
    assert 'Training in fp32, bf16, native_bf16 in turn' in err
    assert 'Use learn.to_native_bf16() here' in out
