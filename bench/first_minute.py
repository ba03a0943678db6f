"""How long `make demo` and `make test` take in a fresh clone, and how large .venv becomes

Nothing is there before: neither .venv nor a cache of packages. Clones the commit, so what isn't committed isn't
measured."""
import os,subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from common import arguments,start

steps = ['make .venv/demo', 'make demo', 'make .venv/ready', 'make test']
here = Path(__file__).resolve().parent.parent

def megabytes(path): return sum(o.stat().st_size for o in path.rglob('*') if o.is_file() and not o.is_symlink())/1e6

def main():
    args,dev,results = start(arguments(__doc__), 'first_minute_{dev}')
    with TemporaryDirectory() as tmp:
        clone,env = Path(tmp)/'clone',{**os.environ, 'UV_CACHE_DIR':f'{tmp}/cache', 'PIP_NO_CACHE_DIR':'1'}
        env.pop('VIRTUAL_ENV', None)
        subprocess.run(['git', 'clone', '-q', here, clone], check=True)
        for cmd in ['make help'] if args.tiny else steps:
            begun = perf_counter()
            subprocess.run(cmd.split(), cwd=clone, env=env, check=True)
            for metric,value in (('s',perf_counter()-begun), ('venv_mb',megabytes(clone/'.venv'))):
                results.add('fresh clone', cmd, '', '', '', '', 1, metric, value, '')

if __name__=='__main__': main()
