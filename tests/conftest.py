import os,random

import numpy as np,pytest,torch

def pytest_configure(config):
    "Processes that share the cores don't each take them all"
    n = getattr(config, 'workerinput', {}).get('workercount')
    if n: torch.set_num_threads(max(1, (os.cpu_count() or 1)//n))

def pytest_addoption(parser):
    parser.addoption('--flags', default='', help='run these too: "cuda slow" for the cells and tests so marked')

@pytest.fixture(scope='session')
def flags(request):
    "What to run besides the ordinary: what --flags names, and `cuda` where there is one"
    return {*request.config.getoption('flags').split(), *(['cuda'] if torch.cuda.is_available() else [])}

@pytest.fixture(autouse=True)
def only_flagged(request, flags):
    for o in ('cuda', 'slow'):
        if request.node.get_closest_marker(o) and o not in flags: pytest.skip(f'needs --flags {o}')

@pytest.fixture(autouse=True)
def seed():
    "The same random numbers in each test, whichever others run"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
