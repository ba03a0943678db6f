"Interpreters that know nothing of the tests, for code that users paste or start"
import json,os,subprocess,sys
from contextlib import contextmanager
from pathlib import Path

root = Path(__file__).resolve().parent.parent
env = {**os.environ, 'MPLBACKEND':'agg', 'OMP_NUM_THREADS':'1', 'PYTHONPATH':str(root)}
python = [sys.executable, '-W', 'ignore', '-c']

def cells_of(page, kind):
    "Sources of the cells of a `kind` in the notebook nbs/`page`"
    cells = json.loads((root/'nbs'/page).read_text(encoding='utf-8'))['cells']
    return [''.join(o['source']) for o in cells if o['cell_type']==kind]

def paste(code, folder):
    "What a plain interpreter prints that runs `code` in `folder`"
    res = subprocess.run([*python, code], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stderr[-2000:]
    return res.stdout

# An interpreter that has imported what takes longer than most pages, and forks for each folder that it reads from
# stdin. The fork runs page.py there, in a `__main__` of its own, and writes what is printed to `out` and `errors`.
forks = """
import os,signal,sys,traceback,types
import {imports}
for folder in sys.stdin:
    if not (pid := os.fork()):
        signal.alarm(300)
        os.chdir(folder.rstrip())
        for i,name in ((1,'out'),(2,'errors')): os.dup2(os.open(name, os.O_WRONLY|os.O_CREAT|os.O_TRUNC), i)
        main = sys.modules['__main__'] = types.ModuleType('__main__')
        failed = True
        try:
            exec(open('page.py').read(), vars(main))
            failed = False
        except BaseException: traceback.print_exc()
        sys.stdout.flush()
        os._exit(failed)
    print(os.waitpid(pid, 0)[1], flush=True)
os._exit(0) # else it takes seconds to end, because it frees all modules
"""

@contextmanager
def forking(
    imports, # Modules that are there already, separated by commas
):
    "A function as `paste`, which takes less time"
    if not hasattr(os, 'fork'):
        yield paste
        return
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    with subprocess.Popen([*python, forks.format(imports=imports)], **pipes) as process:
        def _run(code, folder):
            (folder/'page.py').write_text(code)
            print(folder, file=process.stdin, flush=True)
            assert process.stdout.readline()=='0\n', (folder/'errors').read_text()[-2000:]
            return (folder/'out').read_text()
        yield _run
        process.stdin.close()

# PyTorch frees the threads of gloo only with the last `DistributedDataParallel`, and sometimes not even then. If one of
# them still holds a tensor as the interpreter exits, it aborts the process: github.com/pytorch/pytorch/pull/179291.
aborted = 'terminate called without an active exception'

def launch(cmd, path, **env):
    "Run `python` with the arguments `cmd`, and up to four times again as long as it is `aborted` at its end"
    out = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    given = {**os.environ, 'OMP_NUM_THREADS':'1', **env}
    for _ in range(5):
        res = subprocess.run([sys.executable, *cmd], cwd=path, env=given, timeout=300, **out)
        if aborted not in res.stdout: break
    return res
