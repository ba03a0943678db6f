"""`python -m mp_callbacks` as a user runs it, and what it says to bad values

The file takes long because it trains in every precision."""
import re,signal,subprocess,sys

import matplotlib.image,pandas as pd,pytest,torch

from mp_callbacks import demo
from mp_callbacks.demo import main
from machines import machine,pretend
from mp_callbacks.devices import Machine,support

error = 'python -m mp_callbacks: error:'
cmd = [sys.executable, '-m', 'mp_callbacks', '--device', 'cpu']

@pytest.mark.slow
def test_run(tmp_path):
    "Versions first; then table, advice and files, each with every precision"
    args = ['--epochs', '1', '--precision', *demo.precisions, '--out', tmp_path/'new/out']
    res = subprocess.run([*cmd, *args], capture_output=True, text=True)
    assert res.returncode==0, res.stderr
    assert res.stderr.splitlines()==[f'Training in {o}' for o in demo.precisions]
    lines = [o.split() for o in res.stdout.splitlines()]
    header = next(o for o in lines if o[:1]==['precision'])
    rows = {o[0]:o for o in lines if o and o[0] in demo.precisions}
    assert list(rows)==list(demo.precisions) and all(len(o)==len(header) for o in rows.values())
    assert rows['fp32'][header.index('speedup')]=='1.00x' and rows['fp32'][-2:]==['-','-']
    assert [rows[o][-1]=='-' for o in rows]==[True,True,False,True,False] # only float16 has a loss scale
    said = [o[0] for o in lines if o]
    assert said.index('torch')<said.index('precision')<said.index('Table:')
    csv,png = tmp_path/'new/out/precisions.csv',tmp_path/'new/out/precisions.png'
    assert res.stdout.splitlines()[-2:]==[f'Table: {csv}',f'Plot: {png}']
    df = pd.read_csv(csv, index_col='precision')
    assert list(df.index)==list(demo.precisions) and list(df.columns)==header[1:]
    assert (df.step_ms>0).all() and df.accuracy.between(.8,1).all()
    assert matplotlib.image.imread(png).shape[0]>100

@pytest.mark.slow
@pytest.mark.skipif(sys.platform=='win32', reason='has no such signal')
def test_interrupt(tmp_path):
    args = [*cmd, '--epochs', '1000', '--precision', 'bf16', '--out', tmp_path]
    with subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as p:
        p.stderr.readline() # training begins
        p.send_signal(signal.SIGINT)
        try: rest,lost = p.communicate(timeout=60)[1].splitlines(),False
        except subprocess.TimeoutExpired: # Python drops an interrupt in a finalizer, with a message: interrupt again
            p.send_signal(signal.SIGINT)
            rest,lost = p.communicate()[1].splitlines(),True
    assert p.returncode==130, rest
    assert rest[-1]=='Interrupted' and (lost or not [o for o in rest[:-1] if o]), rest

@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    "Exit code and output of the demo, with made-up results: 3 milliseconds per step or those of a precision"
    def _run(*args, quartiles=(1.,1.,1.), **ms):
        def _result(precision, rec, epochs, device):
            answer = support(device, demo.precisions[precision])
            return demo.Run(precision, answer, [1.], .9, .3, [ms.get(precision, 3.)*o for o in quartiles])
        monkeypatch.setattr(demo, 'run_precision', _result)
        code = main(['--device', 'cpu', '--out', str(tmp_path), *args])
        return code,*capsys.readouterr()
    return _run

# --- Errors

@pytest.mark.parametrize('args,says', [
    (['--epochs', '0'],                   'argument --epochs: 0 must be above 0'),
    (['--epochs', 'many'],                "argument --epochs: invalid int value: 'many'"),
    (['--precision', 'fp8'],              "argument --precision: invalid choice: 'fp8'"),
    (['--device', 'nonsense'],            "argument --device: 'nonsense' is not a device of this machine. Use "),
    (['--device', 'cuda:99'],             "argument --device: 'cuda:99' is not a device of this machine. Use "),
    (['--colour', 'red'],                 'unrecognized arguments: --colour red'),
    (['--out', __file__],                 "argument --out: can't write to "),
    (['--out', f'{__file__}/below'],      "argument --out: can't write to "),
])
def test_bad_value(args, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args)==2
    out,err = capsys.readouterr()
    assert out=='' and err.count('\n')==1 and err.startswith(f'{error} {says}')
    assert not list(tmp_path.iterdir())

def test_file_that_cannot_be_written(run, tmp_path):
    "It says so before it trains"
    (tmp_path/'precisions.csv').mkdir()
    code,out,err = run('--precision', 'bf16')
    assert code==2 and out=='' and err.startswith(f"{error} argument --out: can't write to ")

class NoFloat16(Machine):
    "This machine, if it had no float16"
    def train(self, kind, device, dtype, *args):
        if dtype==torch.float16: raise RuntimeError('no float16')
        return super().train(kind, device, dtype, *args)

def test_unsupported_precision(run):
    "is left out, and named"
    with pretend(NoFloat16()): code,out,err = run()
    assert code==0 and re.findall('Training in (.*)', err)==['fp32','bf16','native_bf16']
    assert "This CPU can't compute fp16, native_fp16\n" in out

# --- Advice

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

@pytest.mark.parametrize('high', [1.1,2.])
def test_busy(high, run):
    "If times vary, it says before the advice that they are not reliable"
    _,out,_ = run('--precision', 'bf16', quartiles=(1.,1.,high))
    assert ('not reliable' in out.partition('Stay with float32')[0])==(high==2)

@pytest.mark.parametrize('ms,use', [(1.05,'bf16'),(1.2,'native_bf16')])
def test_ties(ms, use, run):
    "In a tie within the noise it recommends what README does, and names the other; it runs only those asked for"
    with pretend(machine('AMX')): _,out,err = run('--precision', 'native_bf16', 'bf16', bf16=ms, native_bf16=1.)
    assert re.findall('Training in (.*)', err)==['fp32','bf16','native_bf16'] # and float32, in the order of preference
    assert f'Use learn.to_{use}() here' in out and ('within the noise: native_bf16' in out)==(use=='bf16')
