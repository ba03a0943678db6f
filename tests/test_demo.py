"""`python -m mp_callbacks` as a user runs it, and what it says to bad values

The file takes long because it trains the models of the demo."""
import re,signal,subprocess,sys

import matplotlib.image,pandas as pd,pytest,torch

from mp_callbacks import demo
from mp_callbacks.demo import main
from learners import crossed,raises
from machines import machine
from mp_callbacks.devices import Machine,pretend,support

error = 'python -m mp_callbacks: error:'
cmd = [sys.executable, '-m', 'mp_callbacks', '--device', 'cpu', '--size', '.03']

@pytest.mark.slow
def test_run(tmp_path):
    "Versions and duration first; then table, advice and files, each with every precision"
    args = ['--epochs', '1', '--precision', *demo.precisions, '--out', tmp_path/'new/out']
    res = subprocess.run([*cmd, *args], capture_output=True, text=True)
    assert res.returncode==0, res.stderr
    assert 'Traceback' not in res.stderr
    assert all(o.startswith(('Note: ',*demo.precisions)) for o in res.stderr.splitlines())
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
    assert (df.step_ms>0).all() and df.accuracy.between(0,1).all()
    assert pd.isna(df.loss_scale['bf16']) and df.loss_scale['fp16']>1
    assert matplotlib.image.imread(png).shape[0]>100

@pytest.mark.slow
@pytest.mark.skipif(sys.platform=='win32', reason='has no such signal')
def test_interrupt(tmp_path):
    args = [*cmd, '--epochs', '1000', '--precision', 'bf16', '--out', tmp_path]
    with subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as p:
        p.stderr.readline() # the first epoch is over
        p.send_signal(signal.SIGINT)
        try: rest,lost = p.communicate(timeout=60)[1].splitlines(),False
        except subprocess.TimeoutExpired: # Python drops an interrupt in a finalizer, with a message: interrupt again
            p.send_signal(signal.SIGINT)
            rest,lost = p.communicate()[1].splitlines(),True
    assert p.returncode==130, rest
    assert rest[-1]=='Interrupted' and (lost or not [o for o in rest[:-1] if o and not o.startswith('fp32')]), rest

def run(capsys, path, *args):
    "Exit code and output of the demo; of arguments that are given twice the last count"
    code = main(['--device', 'cpu', '--size', '.03', '--out', str(path), *args])
    return code,*capsys.readouterr()

def fake_run(monkeypatch, noise=1., **ms):
    "Replace training by results with this noise, and 3 milliseconds per step or those for a precision"
    def _run(precision, rec, device, *args):
        answer = support(device, demo.precisions[precision])
        return demo.Run(precision, [1.], .9, .3, (ms.get(precision, 3.),)*3, noise, support=answer)
    monkeypatch.setattr(demo, 'run_precision', _run)

# --- Errors

@pytest.mark.parametrize('args,says', [
    (['--epochs', '0'],                   "argument --epochs: '0' must be a whole number above 0"),
    (['--size', '0'],                     "argument --size: '0' must be a number above 0 and not above 16"),
    (['--size', 'nan'],                   "argument --size: 'nan' must be a number"),
    (['--size', 'big'],                   "argument --size: 'big' must be a number"),
    (['--model', 'rnn'],                  "argument --model: invalid choice: 'rnn'"),
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

class NoFloat16(Machine):
    "This machine, if it had no float16"
    def forward(self, kind, device, dtype, *args):
        if dtype==torch.float16: raise RuntimeError('no float16')
        return super().forward(kind, device, dtype, *args)

def test_unsupported_precision(capsys, tmp_path, monkeypatch):
    "To ask for it is an error; without that it is left out, and named"
    fake_run(monkeypatch)
    with pretend(NoFloat16()):
        says = "needs a device that computes in torch.float16, and cpu doesn't. Use fp32 or bf16 or native_bf16."
        assert run(capsys, tmp_path, '--precision', 'native_fp16')==(
            2, '', f'{error} argument --precision: native_fp16 {says}\n')
        code,out,_ = run(capsys, tmp_path)
    assert code==0 and 'in each of fp32, bf16, native_bf16: about' in out
    assert "This CPU can't compute fp16, native_fp16\n" in out

def test_out_of_memory(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, 'run_precision', raises(torch.OutOfMemoryError('CUDA out of memory')))
    says = f'{error} argument --size: 0.03 needs more memory than there is on cpu. Use a smaller one.\n'
    assert run(capsys, tmp_path, '--precision', 'bf16')[2]==says

def test_table_is_shown_if_it_cannot_be_written(capsys, tmp_path, monkeypatch):
    fake_run(monkeypatch)
    (tmp_path/'precisions.csv').mkdir()
    code,out,err = run(capsys, tmp_path, '--precision', 'bf16')
    assert code==2 and 'Stay with float32' in out
    assert err.count('\n')==1 and "argument --out: can't write to" in err

# --- Advice

@pytest.mark.parametrize('noise', (1.1,3.))
def test_busy(noise, capsys, tmp_path, monkeypatch):
    "If times vary, it says before the advice that they are not reliable"
    fake_run(monkeypatch, noise)
    _,out,_ = run(capsys, tmp_path, '--precision', 'bf16')
    assert ('Something else was running here' in out.partition('Stay with float32')[0])==(noise>2)

@pytest.mark.parametrize('name,slow', [('AVX2',['bf16','fp16','native_bf16','native_fp16']),
                                       ('AVX512-BF16',['fp16','native_fp16']), ('AMX',[])])
def test_all_precisions_on_every_machine(name, slow, capsys, tmp_path, monkeypatch):
    "Five rows; where some are emulated, they are marked, and the advice says why"
    fake_run(monkeypatch, **{o:30. for o in slow})
    monkeypatch.setattr(demo, 'estimate', lambda rec, device, names: 1.)
    with pretend(machine(name)): code,out,_ = run(capsys, tmp_path, '--size', '1')
    assert code==0
    csv = pd.read_csv(tmp_path/'precisions.csv', index_col='precision')
    assert [*csv.index]==[*demo.precisions]
    assert ('support' in csv)==bool(slow)
    if slow: assert [*csv.index[csv.support=='emulated']]==sorted(slow, key=[*demo.precisions].index)
    if name=='AVX2': assert 'Stay with float32 here: this CPU only emulates bfloat16 and float16. On a GPU' in out
    else: assert 'Stay with float32 here: nothing else' in out

def test_fit_width(monkeypatch):
    "The largest that the time allows, and never a step of one that would take minutes"
    asked,rec = [],demo.recipes['mlp']
    def _estimate(rec, device, names):
        asked.append(rec.width)
        return 1e-3*rec.width**2*rec.repeat
    monkeypatch.setattr(demo, 'estimate', _estimate)
    assert demo.fit_width(rec, 'cpu', ['fp32'], 1e-3*512**2)==rec.part(2)
    assert demo.fit_width(rec, 'cpu', ['fp32'], 1.)==rec.part(8) and asked[-1]==rec.part(8).width
    assert demo.fit_width(rec, 'cpu', ['fp32'], 1e9)==rec

@pytest.mark.parametrize('noise,use', [(1.,'native_bf16'),(1.3,'bf16')])
def test_ties(noise, use, capsys, tmp_path, monkeypatch):
    "In a tie within the noise it recommends what README does, and names the other; it runs only those asked for"
    fake_run(monkeypatch, noise, bf16=1.2, native_bf16=1.)
    _,out,_ = run(capsys, tmp_path, '--precision', 'native_bf16', 'bf16')
    assert 'in each of fp32, bf16, native_bf16: about' in out # and float32, in the order of preference
    assert f'Use learn.to_{use}() here' in out and ('within the noise: native_bf16' in out)==(use=='bf16')

@pytest.mark.parametrize('name', crossed(demo.recipes, fast=lambda o: o=='mlp'))
def test_models_learn(name):
    "Small ones of each kind, in bfloat16 as in float32"
    rec = demo.recipes[name].part(8)._replace(epochs=2)
    runs = [demo.run_precision(o, rec) for o in ('fp32','bf16')]
    assert abs(runs[0].valid_loss-runs[1].valid_loss)<.1 and runs[0].losses[-1]<runs[0].losses[0]
