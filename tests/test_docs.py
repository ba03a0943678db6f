"The builder of site and README: what it makes of Markdown and of symbols, and that everything public is documented"
import importlib.util,inspect
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip('latex2mathml', reason='needs the docs extra')
root = Path(__file__).resolve().parent.parent

def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod

pages = load(root/'docs/pages.py')
github,site,deep = pages.GitHub(),pages.Site(Path('index.md')),pages.Site(Path('tutorials/first.md'))

def test_readme_in_sync(tmp_path):
    assert (root/'README.md').read_text(encoding='utf-8')==pages.readme(tmp_path)
    def pictures(o): return {p.name: p.read_bytes() for p in o.glob('README_files/*')}
    assert pictures(root)==pictures(tmp_path)

def test_links():
    "A link to a notebook leads to its page: on the site by a relative path, from GitHub to the site"
    assert github.link('tutorials/first.ipynb')==pages.base+'tutorials/first.html'
    assert site.link('00_dtypes.ipynb#policy')=='dtypes.md#policy'
    assert deep.link('../00_dtypes.ipynb#policy')=='../dtypes.md#policy'
    assert deep.link('second.ipynb')=='second.md'
    assert deep.link(pages.base+'dtypes.html#policy')=='../dtypes.md#policy'
    assert deep.link(pages.base)=='../index.md'
    for d in (github, site, deep):
        for o in ('https://example.com/a.ipynb', 'https://example.com/a#b', '#here'): assert d.link(o)==o

def test_names_become_links():
    assert pages.to_dialect('`cast_tree` casts', deep)=='[`cast_tree`](../dtypes.md#cast_tree) casts'
    assert pages.to_dialect('a `Learner`', site)=='a [`Learner`](https://docs.fast.ai/learner.html#learner)'
    assert pages.to_dialect('`cast_tree` here', site, names=['cast_tree'])=='`cast_tree` here'
    assert pages.to_dialect('its `module`', site)=='its `module`' # a plain word, though fastai has a function of that name
    assert pages.to_dialect('`_norms`', site)=='`_norms`' # private

def test_callouts():
    quarto = '::: {.callout-warning collapse="true" title="Why?"}\nBecause.\n\n    x = 1\n:::\n'
    alert  = '> [!WARNING]\n> Because.\n>\n> Really.\n'
    assert pages.to_dialect(quarto, site).strip()=='??? warning "Why?"\n\n    Because.\n\n        x = 1'
    assert pages.to_dialect(quarto, github).strip()=='> [!WARNING]\n> **Why?**\n>\n> Because.\n>\n>     x = 1'
    assert pages.to_dialect(alert, site).strip()=='!!! warning\n\n    Because.\n    \n    Really.'.replace('    \n', '\n')
    assert pages.to_dialect(alert, github).strip()==alert.strip()

def test_code_is_left_alone():
    code = '```python\nx[0](a.ipynb); y = "$a$ and $b$"\n```\n\n`[a](b.ipynb)` and `$c$`'
    assert pages.to_dialect(code, site)==code

def test_formulas():
    assert pages.to_dialect('$x^2$ costs $5 or $6', github)=='$x^2$ costs $5 or $6'
    res = pages.to_dialect('$x^2$ costs $5 or $6, $$y$$', site)
    assert res.count('<math')==2 and 'display="block"' in res and res.startswith('<math') and 'costs $5 or $6' in res

class Pair(NamedTuple):
    "Two"
    a: int      # The first
    b: str='x'  # The second

def both(x:'int|str', # What | which
         *, keep=load, # Another `Pair`
        )->int: # Their number
    "Count"

def test_symbols():
    assert pages.signature(Pair, 'Pair')=="class Pair(a:int, b:str='x')"
    assert pages.signature(both, 'both')=='both(x:int|str, *, keep=load) -> int'
    assert pages.signature(lambda f, /, *args, **kwargs: 0, 'f')=='f(f, /, *args, **kwargs)'
    assert pages.param_table(Pair, github).splitlines()[2:]==['| `a` | `int` |  | The first |', "| `b` | `str` | `'x'` | The second |"]
    assert pages.param_table(both, github).splitlines()[2:]==[r'| `x` | <code>int&#124;str</code> |  | What \| which |',
        '| `keep` |  | `load` | Another `Pair` |', '| *returns* | `int` |  | Their number |']

def test_outputs():
    def save(data, kind): return f'{kind} of {len(data)}'
    class Out(dict):
        def __getattr__(self, k): return self[k]
    table = '<style>p{}</style><div>\n  <table border="1" class="dataframe"><tr style="text-align: right;"><td>1</td></tr></table></div>'
    clean = '<div><table><tr><td>1</td></tr></table></div>'
    assert pages.output(Out(output_type='display_data', data={'text/html': table}), github, save)==clean
    assert pages.output(Out(output_type='display_data', data={'image/png': 'AAAA', 'text/plain': 'Figure'}), site, save)=='png of 3'
    assert pages.output(Out(output_type='stream', name='stdout', text='hi\n'), github, save)=='```text\nhi\n```'
    assert pages.output(Out(output_type='stream', name='stderr', text='hi\n'), github, save) is None

def test_navigation():
    nbs = [Path(o) for o in ('tutorials/b.ipynb', '10_callback.ipynb', '01_loss_scale.ipynb', 'index.ipynb', '00_dtypes.ipynb')]
    nav = pages.navigation(sorted(nbs))
    assert nav[0]=='index.md'
    assert [list(o.values())[0] for o in nav[1:]]==[['dtypes.md', 'loss_scale.md'], ['callback.md'], ['tutorials/b.md']]
    with pytest.raises(SystemExit, match='somewhere'): pages.navigation([Path('somewhere/x.ipynb')])

def public():
    "What the notebooks export: each public function and class, and each method that they add to a class of another library"
    from mp_callbacks._modidx import d
    for mod,syms in d['syms'].items():
        for name in (o.removeprefix(mod+'.') for o in syms):
            cls,_,method = name.rpartition('.')
            if f'{mod}.{cls}' in syms or cls.startswith('_') or method.startswith('_'): continue
            yield pytest.param(mod, name, id=f'{mod.partition(".")[2]}.{name}')

@pytest.mark.parametrize('mod,name', [*public()])
def test_documented(mod, name):
    "A docstring, and for each parameter a comment, or a mention in back-ticks in the docstring"
    sym = eval(name, vars(import_module(mod)))
    func = sym.fget if isinstance(sym, property) else inspect.unwrap(sym)
    doc = inspect.getdoc(func)
    assert doc
    if not callable(func): return
    texts = pages.comments(func)
    named = [p.name for p in pages.parameters(func) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert [o for o in named if not texts.get(o) and f'`{o}`' not in doc]==[]
