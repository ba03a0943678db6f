import os,random,signal,sys,threading
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np,pytest,torch

# What reads pages needs nbdev, which needs a newer fastcore than this package
if not find_spec('nbdev'):
    collect_ignore = [f'test_{o}.py' for o in 'docs figures notebooks outputs quality site'.split()]

def pytest_configure(config):
    "One thread, and interrupts that interrupt, here and in the processes that tests start"
    # Most tests train on whatever CPU there is
    config.addinivalue_line('filterwarnings', 'ignore:.*only emulates')
    # Sums have one order, and tests that run side by side don't fight for the cores
    torch.set_num_threads(1)
    os.environ['OMP_NUM_THREADS'] = '1'
    # A job in the background of a script ignores SIGINT, and so would all that it starts, the fork server too.
    # Python leaves that as it is. A process that has a handler starts others with the default. Only the main thread can
    # set one.
    if threading.current_thread() is threading.main_thread(): signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    "One more than there are cores, as some tests wait: for other processes, a browser, a time-out"
    return len(os.sched_getaffinity(0))+1 if hasattr(os, 'sched_getaffinity') else None

def pytest_addoption(parser):
    parser.addoption('--flags', default='', help='run these too: "cuda slow cells" for the cells and tests so marked')

marks = 'cuda','slow','cells'

def left_out(config):
    """The marks whose tests don't run: all but those that --flags names, `cuda` where there is one, and the cells of
    modules where there is no nbdev, which else runs them"""
    asked = {*config.getoption('flags').split(), *(['cuda'] if torch.cuda.is_available() else []),
             *([] if find_spec('nbdev') else ['cells'])}
    return [o for o in marks if o not in asked]

def pytest_collection_modifyitems(config, items):
    """Leave out what wasn't asked for

    The files that take the longest come first, so that at the end no process works alone."""
    longest = ('notebooks outputs bench distributed_faults distributed site docs applications faults looks examples '
               'operations composition resume parity').split()
    kept,out = [],[]
    for o in items: (out if any(map(o.get_closest_marker, left_out(config))) else kept).append(o)
    config.hook.pytest_deselected(items=out)
    items[:] = sorted(kept, key=lambda o: o.path.stem.removeprefix('test_') not in longest)

def pytest_terminal_summary(terminalreporter, config):
    "Processes of xdist don't say how many tests they have left out"
    out = left_out(config)
    if out: terminalreporter.line(f'without tests marked {" or ".join(out)}: --flags "{" ".join(out)}"')

@pytest.fixture(scope='session')
def flags(request):
    "What to run besides the ordinary"
    return {*marks}-{*left_out(request.config)}

@pytest.fixture(autouse=True)
def short_lists(monkeypatch):
    "Small models step at once, too: on a CPU, fewer than 8 parameters would be stepped on one by one"
    from mp_callbacks.learner import optimizers
    monkeypatch.setattr(optimizers, '_few', 2)

@pytest.fixture(autouse=True)
def on_cpu(request):
    "Learners are on the CPU, also where there is a GPU, but for tests marked `cuda`"
    if torch_core := sys.modules.get('fastai.torch_core'):
        torch_core.default_device(None if request.node.get_closest_marker('cuda') else False)

@pytest.fixture(autouse=True)
def seed():
    "The same random numbers in each test, whichever others run"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

@pytest.fixture
def folder(tmp_path, monkeypatch):
    "An empty folder to be in: `whole_world` of test_looks reads all files in that of the learner"
    monkeypatch.chdir(tmp_path)

@pytest.fixture(scope='module')
def pool():
    "A process that forks for notebooks"
    with ProcessPoolExecutor(1, get_context('spawn')) as res: yield res

@pytest.fixture(scope='module')
def forked():
    "Run code in a fork of an interpreter that has imported fastai, see `interpreters.forking`"
    from interpreters import forking
    fastai = 'fastai.tabular.all,fastai.text.all,fastai.vision.all'
    with forking(f'{fastai},mp_callbacks.all,torch._dynamo') as run: yield run

@pytest.fixture(scope='module')
def one_process(tmp_path_factory):
    "A process group of this process alone, for `DistributedDataParallel`"
    import torch.distributed as dist
    if not dist.is_available() or not dist.is_gloo_available(): pytest.skip('has no gloo')
    dist.init_process_group('gloo', init_method=f'file://{tmp_path_factory.mktemp("dist")}/init', rank=0, world_size=1)
    yield
    dist.destroy_process_group()
