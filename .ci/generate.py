"""Make the modules and README.md again from the notebooks, in place; exit with 1 if that changed a file

Modules and pictures are deleted first, so that none outlives its notebook. If a step fails, every file is put back."""
import subprocess,sys
from pathlib import Path

root    = Path(__file__).resolve().parent.parent
by_hand = '__init__.py','__main__.py','all.py'

def files():
    "What the steps below may write, with its contents"
    patterns = 'mp_callbacks/**/*.py', 'nbs/**/*.ipynb', 'nbs/llms.txt', 'README.md', 'README_files/*'
    found = [o for pat in patterns for o in root.glob(pat)]
    return {o: o.read_bytes() for o in found if '.ipynb_checkpoints' not in o.parts}

def generate():
    for o in [*root.glob('mp_callbacks/**/*.py'), *root.glob('README_files/*')]:
        if o.name not in by_hand: o.unlink()
    python = Path(sys.executable)
    export,clean = python.with_name('nbdev-export'),python.with_name('nbdev-clean')
    for cmd in ([export], [clean], [python, 'docs/pages.py', 'readme']):
        subprocess.run(cmd, cwd=root, check=True)

def main():
    before = files()
    try: generate()
    except subprocess.CalledProcessError as e:
        for p,b in before.items(): p.write_bytes(b)
        return f'Nothing was changed, as this failed: {" ".join(map(str, e.cmd))}'
    after = files()
    changed = sorted(p.relative_to(root).as_posix() for p in before.keys()|after.keys() if before.get(p)!=after.get(p))
    message = ('These files were not what the notebooks say. They are now: look at them, commit them, and run this '
               'again.')
    if changed: return '\n  '.join([message, *changed])
    print(f'{len(after)} files are what the notebooks say')

if __name__=='__main__': sys.exit(main())
