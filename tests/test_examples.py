"""The programs of `examples` do what their first lines say, and a page shows each as it is

The file takes long because each program trains, some in processes of their own."""
import runpy,socket
from importlib.util import find_spec

import torch.multiprocessing as mp
from learners import *

pytestmark = pytest.mark.slow
examples = {o.stem: o for o in sorted((root/'examples').glob('*.py'))}
page = json.loads((root/'nbs/howto/examples.ipynb').read_text(encoding='utf-8'))['cells']

def as_saved(name, out, order=list):
    "The page of examples shows these lines, but for their numbers, and for what depends on other packages"
    saved = next(o for o in page if ''.join(o['source'][-1:]).startswith(f"run('{name}'"))['outputs'][0]['text']
    def words(lines): return order(re.sub(r'(?<!\w)\d[\de+.-]*', '0', ' '.join(o.split())) for o in lines)
    shown = words(o for o in ''.join(saved).splitlines() if o and not o.endswith('not installed'))
    assert [o for o in words(out) if o in shown]==shown

@pytest.fixture
def run(forked, tmp_path):
    "The lines that an example prints, run in a folder of its own"
    def _run(name):
        out = forked(examples[name].read_text(), tmp_path).splitlines()
        as_saved(name, out)
        return out
    return _run

# --- In one process. What they print is that of the page; here, what its numbers have to be.

def test_resume(run, tmp_path):
    "The resumed run knows the best epoch, and how many have been worse since"
    out = run('resume')
    at = out.index('Ctrl-C, and on from epoch 3, batch 10:')
    better = [o for o in out[:at] if o.startswith('Better')]
    assert len(better)==4 and better[:2]==better[2:] # none after the interrupt
    assert [out[2],*out[at+1:]]==2*['No improvement since epoch 1: early stopping']+['Last weights are equal: True']
    assert not [*tmp_path.glob('*.pth')] # the files of ended runs are gone

def test_log_steps(run, tmp_path):
    out,rows = run('log_steps'),[*csv.DictReader(open(tmp_path/'steps.csv'))]
    assert [*rows[0]]=='step loss norm scale skipped'.split() and [o['step'] for o in rows]==[*map(str, range(11))]
    assert [o['skipped'] for o in rows[:3]]==['True','True','False']
    assert [float(o['scale']) for o in rows[:3]]==[2**22,2**21,2**20] and float(rows[2]['loss'])>2
    if find_spec('tensorboard'):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        seen = EventAccumulator(str(tmp_path/'runs')).Reload().Scalars('precision/norm')
        assert [o.step for o in seen]==[*range(11)] and seen[5].value==pytest.approx(float(rows[5]['norm']))
    assert ('wandb is not installed' in out)==(not find_spec('wandb'))

def test_own_scale(run):
    plain,careful,saved,loaded = run('own_scale')
    skips = [int(re.search(r': (\d+) of 115', o)[1]) for o in (plain,careful)]
    assert skips[0]>5*skips[1]>0
    assert saved.split()[1:]==loaded.split()[1:]
    assert 'ceiling=524288.0' in saved

def test_own_keep(run):
    assert float(run('own_keep')[-1].removeprefix('accuracy '))>.8

def test_export(run):
    "Each file that can be written here gives the outputs of the model"
    out = run('export')
    errors = [float(o.split()[-1]) for o in out if 'difference' in o]
    written = bool(find_spec('onnx') and find_spec('onnxscript'))
    compared = bool(written and find_spec('onnxruntime'))
    assert len(errors)==2+compared and max(errors)<1e-4
    said = 'written but not compared, onnxruntime is' if written else 'left out, onnx and onnxscript are'
    assert compared or out[-1]==f'ONNX: {said} not installed'

def test_inference(run):
    assert min(int(re.search(r'(\d+) of 64', o)[1]) for o in run('inference'))>60

def test_trainer(run):
    pytest.importorskip('transformers')
    assert float(run('trainer')[1].removeprefix("loss with keep='head': "))<.6

def test_own_loop(run):
    out = run('own_loop')
    assert out[1:3]==['stopped in step 47', 'goes on from step 40']
    assert out[0]==out[3] and out[0].startswith('87 steps')

def as_torchrun(rank, file, path, port):
    "A process in the environment that torchrun gives to its own, which would import for seconds; it prints into `out`"
    os.chdir(path)
    os.dup2(os.open('out', os.O_WRONLY|os.O_CREAT|os.O_APPEND), 1)
    env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    os.environ.update({k:str(v) for k,v in env.items()})
    runpy.run_path(file, run_name='__main__')
    sys.stdout.flush()
    os._exit(0) # threads of gloo may abort an interpreter that ends

@pytest.fixture
def in_two(tmp_path):
    "The lines that an example prints in two processes"
    def _run(name):
        with socket.create_server(('127.0.0.1', 0)) as free: args = str(examples[name]),tmp_path,free.getsockname()[1]
        mp.start_processes(as_torchrun, args, nprocs=2, start_method=start_method)
        out = re.findall('process .*? items|(?:accuracy|part|weights).*', (tmp_path/'out').read_text())
        as_saved(name, out, sorted) # each process prints when it likes
        return out
    return _run

@pytest.mark.parametrize('name', ['own_data','fsdp2'])
def test_alone(name, capsys):
    "Without torchrun they say how to start them"
    with pytest.raises(SystemExit) as e: runpy.run_path(str(examples[name]), run_name='__main__')
    said = f'Start it with: torchrun --nproc-per-node 2 examples/{name}.py\n'
    assert (e.value.code,capsys.readouterr().err)==(2,said)

def test_own_data(in_two, tmp_path):
    out = in_two('own_data')
    result,*items = sorted(out) # each process prints when it likes
    assert items==['process 0 of 2 has 899 items', 'process 1 of 2 has 898 items']
    acc,same = re.fullmatch(r'accuracy (.*), weights are equal: (.*)', result).groups()
    assert float(acc)>.8 and same=='True'
    assert (tmp_path/'models/digits.pth').exists()

@pytest.mark.skipif(not fsdp2_runs, reason=no_fsdp2)
def test_fsdp2(in_two, tmp_path):
    assert in_two('fsdp2')==['part of the first weight: (32, 64), loaded scale: 8192', 'weights are equal: True']
    assert len([*(tmp_path/'checkpoint').glob('*.distcp')])==2 # each process has written its part

def test_named():
    "The page of examples names and shows each, as none is long; test_notebooks and `as_saved` look there"
    assert {k:n for k,o in examples.items() if k!='distributed' and (n := len(o.read_text().splitlines()))>64}=={}
    text = '\n'.join(''.join(o['source']) for o in page if o['cell_type']=='markdown')
    assert {o for o in examples if f'/examples/{o}.py' not in text}==set()
    code = '\n'.join(''.join(o['source']) for o in page if o['cell_type']=='code')
    for f in ('show','run'): assert {*re.findall(rf"^{f}\('(\w+)'", code, re.M)}==examples.keys()-{'distributed'}
