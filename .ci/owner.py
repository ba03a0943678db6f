"""Write the owner of the repository on GitHub into all files that name it: python .ci/owner.py OWNER

The present one is read from pyproject.toml. `make check` then makes what follows from the notebooks."""
import re,subprocess,sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def main(new):
    project = (root/'pyproject.toml').read_text(encoding='utf-8')
    old = re.search(r'^Repository = "https://github.com/([^/]+)/', project, re.M)[1]
    files = subprocess.run(['git', 'ls-files', '-z'], cwd=root, check=True, capture_output=True, text=True).stdout
    for o in filter(None, files.split('\0')):
        try: text = (root/o).read_text(encoding='utf-8')
        except UnicodeDecodeError: continue # a picture
        changed = re.sub(rf'(github(?:\.com)?)/{re.escape(old)}/(?=mp_callbacks)', rf'\1/{new}/', text) # or Colab's
        changed = re.sub(rf'\b{re.escape(old)}\.github\.io/(?=mp_callbacks)', f'{new}.github.io/', changed)
        if changed!=text: (root/o).write_text(changed, encoding='utf-8')

if __name__=='__main__': main(sys.argv[1]) if len(sys.argv)==2 else sys.exit(__doc__)
