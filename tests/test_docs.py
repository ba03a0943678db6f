"""README and site: what their builder makes of notebooks, that all that is public is documented, that blocks run

README itself is compared by `make check`, which `make test` begins with. Cells are run by `nbdev-test` and
`test_notebooks.py`; here, that no name in them comes from a hidden cell."""
import ast,builtins
from typing import NamedTuple

from fastcore.nbio import read_nb
from interpreters import paste
from learners import *

pytest.importorskip('latex2mathml', reason='needs the docs extra')

sys.path.insert(0, str(root/'docs'))
import outputs,pages

github,site,deep = pages.GitHub(),pages.Site(Path('index.md')),pages.Site(Path('tutorials/first.md'))

code = '```python\nx[0](a.ipynb); y = "$a$ and $b$"\n```\n\n`[a](b.ipynb)` and `$c$`'
diff = '```diff\n-a = 1\n+a = 2\n\n for b in c:\n+    b\n```'

@pytest.mark.parametrize('dialect,text,want', [
    # a link to a notebook leads to its page: on the site by a relative path, from GitHub to the site
    (github, '[a](tutorials/b.ipynb)',       f'[a]({pages.base}tutorials/b.html)'),
    (site,   '[a](core/dtypes.ipynb#policy)', '[a](core/dtypes.md#policy)'),
    (deep,   '[a](../core/dtypes.ipynb#b)',  '[a](../core/dtypes.md#b)'),
    (deep,   f'[a]({pages.base}core/dtypes.html#b) [c]({pages.base})', '[a](../core/dtypes.md#b) [c](../index.md)'),
    (deep,   f'[a]({pages.blob}CONTRIBUTING.md#b)',  '[a](../CONTRIBUTING.md#b)'),
    (deep,   '[a](https://x.org/a.ipynb) [b](#b)',   '[a](https://x.org/a.ipynb) [b](#b)'),
    # a name in back-ticks becomes a link, if it isn't private or a plain word, which are fastai's functions, too
    (deep,   '`cast_tree` casts',            '[`cast_tree`](../core/dtypes.md#cast_tree) casts'),
    (site,   'a `Learner`',                  'a [`Learner`](https://docs.fast.ai/learner.html#learner)'),
    (site,   'its `module` and `_norms`',    'its `module` and `_norms`'),
    (site,   code,                           code),
    (github, diff,                           diff)])
def test_text(dialect, text, want): assert pages.to_dialect(text, dialect)==want

def test_code_of_the_site():
    "What is folded, and what a diff leads to, to copy; formulas; printed sentences, which wrap, and columns"
    assert site.code('x = 1', 'Data')=='??? example "Data"\n\n    ```python\n    x = 1\n    ```'
    new = pages.to_dialect(diff, site).partition('??? example')[2]
    assert new.splitlines()[2:]==['    ```python','    a = 2','','    for b in c:','        b','    ```']
    math = pages.to_dialect('$x^2$ costs $5 or $6', site)
    assert math.startswith('<math') and math.endswith('</math> costs $5 or $6')
    printed = site.text('Two rows:\n\na    b\n1    2\n\nSo it is.')
    assert ['.prose' in o for o in re.findall('^``` {.*', printed, re.M)]==[True,False,True]

class Pair(NamedTuple):
    "Two"
    a: int      # The first
    b: str='x'  # The second

def both(x:'int|str', # What | which
         *, keep=len, # Another `Pair`
        )->int: # Their number
    "Count"

class Talk:
    def say(self, word, times=1): "Say `word`"
    def _hidden(self): "No"
    @property
    def log(self): "All | that"

def test_symbols():
    assert pages.signature(Pair, 'Pair')=="class Pair(a:int, b:str='x')"
    assert pages.signature(both, 'both')=='both(x:int|str, *, keep=len) -> int'
    assert pages.signature(lambda f, /, *args, **kwargs: 0, 'f')=='f(f, /, *args, **kwargs)'
    def rows(o): return pages.param_table(o, github).splitlines()[2:]
    assert rows(Pair)==['| `a` | The first |  | `int` |', "| `b` | The second | `'x'` | `str` |"]
    assert rows(both)==[r'| `x` | What \| which |  | <code>int&#124;str</code> |',
        '| `keep` | Another `Pair` | `len` |  |', '| *returns* | Their number |  | `int` |']
    members = pages.member_table(Talk, 'Talk', {'Talk.log'}, github).splitlines()
    assert members[2:]==['| `say(word, times)` | Say `word` |', r'| [`log`](#talk.log) | All \| that |']

def test_index_of_names():
    "Those of users come first"
    heads = re.findall('^## (.*)', pages.name_index(site)[2], re.M)
    internal = [o.endswith(' (internal)') for o in heads]
    assert {'core.half','learner.callback','learner.fastai_internals (internal)'}<={*heads}
    assert internal==sorted(internal)

def test_columns():
    "A phone shows two: what to do, and what an option means, are never behind them"
    for o in nbs:
        heads = re.findall(r'^\|(.*)\|\n\|[-| ]+\|$', '\n'.join(cells(o, 'markdown')), re.M)
        assert not [h for h in heads if {'what to do','meaning'} & {c.strip() for c in h.split('|')[2:]}], o

def test_sidebar():
    "Each page has its place in it; a beginner's parts have at most seven"
    found = [o for part in pages.sidebar.values() for o in part]
    pages.check_sidebar(found)
    assert max(len(pages.sidebar[o]) for o in ('First steps','How-to','Advanced'))<=7
    for names,match in (([*found, 'x.md'], 'x.md: not in the sidebar. Add it'),
                        ([o for o in found if o!='core/half.md'], 'core/half.md: in `nav`.* no such page')):
        with pytest.raises(SystemExit, match=match): pages.check_sidebar(names)

nbs = {o.relative_to(root/'nbs').with_suffix('').as_posix(): o for o in sorted(pages.nbglob(root/'nbs', as_path=True))}
def cells(name, kind): return [o.source for o in read_nb(nbs[name]).cells if o.cell_type==kind]

@pytest.mark.parametrize('name', [o for o in nbs if re.match('index|learner/|tutorials/|howto/', o)])
def test_colab(name):
    "What users read can be run in Colab: it installs this package before anything runs, and the page has no such cell"
    assert cells(name, 'code')[0]==f'#| hide\n#| eval: false\n{pages.install}'

@pytest.mark.parametrize('name', [o for o in nbs if re.match('tutorials/|howto/', o)])
def test_badge(name, tmp_path):
    "On GitHub, what users run shows where to run it"
    assert cells(name, 'markdown')[1]==f'{pages.badge}({pages.in_colab(nbs[name])})'
    assert pages.badge not in pages.convert(nbs[name], site, tmp_path)[2]

def test_first_screen():
    "README is short. In its first 40 lines: how to install, what to write, what it answers, the picture"
    text = (root/'README.md').read_text(encoding='utf-8')
    begin = '\n'.join(text.splitlines()[:40])
    first = '> Mixed','```sh\npip install','```python\nfrom fastai','```diff\n','| you ask | it answers |','!['
    assert sorted(first, key=lambda o: begin.index(f'\n{o}'))==[*first]
    prose = re.sub(r'^```.*?^```|<!--.*?-->|\]\([^)]*\)', '', text, flags=re.M|re.S)
    assert len(re.findall(r'\S*\w\S*', prose))<=750 and text.count('](')<=35

def test_searched_words():
    "What fastai users look for, in README, and in what `help(mp_callbacks)` and machines read"
    import mp_callbacks
    looked_for = {'to_fp16','to_bf16','master weights','GradScaler','MixedPrecision','NativeMixedPrecision',
                  'ModelToHalf','nbdev'}
    for text in ((root/'README.md').read_text(encoding='utf-8'), mp_callbacks.__doc__, pages.llms({})):
        assert {o for o in looked_for if o not in text}==set()

def blocks(name):
    "The blocks of Python on the page `name` that are not cells"
    return re.findall(r'^```python\n(.*?)^```', '\n'.join(cells(name, 'markdown')), re.M|re.S)

starts = { # page -> what its only block needs
    'howto/accumulation_and_clipping': 'from learners import *\nlearn = get_learner()',
    'howto/less_memory':               'import torch\nx,block = torch.ones(2,8),torch.nn.Linear(8,8)',
    'howto/telemetry':                 'from learners import *\nfrom mp_callbacks.all import *\nlearn = get_learner()\n'
                                       'dls,model,loss_func = learn.dls,learn.model,learn.loss_func'}

@pytest.mark.parametrize('name', starts)
def test_block(name):
    code, = blocks(name)
    exec(f'{starts[name]}\n{code}', {})

def test_blocks_are_run():
    "by `test_block`, or by a test of their own below; `test_from_other_libraries` runs diffs, .ci/run the commands"
    found = {o for o in nbs if re.match('index|howto/', o) and blocks(o)}
    assert found=={*starts,*by_hand,'index','howto/several_gpus','howto/other_trainers','howto/applications',
                   'howto/fast_on_a_gpu'}

by_hand = { # page -> what its first block needs, which is not among the requirements of the tests
    'howto/segmentation': 'segmentation_models_pytorch',
    'howto/graphs':       'torch_geometric',
    'howto/time_series':  'tsai'}

@pytest.mark.slow
@pytest.mark.parametrize('name', by_hand)
def test_by_hand(name, tmp_path):
    "The block prints what the page says, and the page which version that was with"
    pytest.importorskip(by_hand[name])
    text = '\n'.join(cells(name, 'markdown'))
    (code,said), = re.findall(r'^```python\n(.*?)^```\n\n```text\n(.*?)^```', text, re.M|re.S)
    printed = paste('import torch; torch.set_num_threads(1)\n'+code, tmp_path)
    assert outputs.same(said, outputs.printed(dict(text=printed)))

def test_by_hand_says_so():
    for name,lib in by_hand.items():
        assert re.search(rf'Run by hand, .* {lib} [\d.]+', '\n'.join(cells(name, 'markdown'))), name

small_pets = """
import fastai.vision.all as vision
from fastai.vision.all import *
from mp_callbacks.all import *
from sklearn.datasets import load_sample_images
vision.defaults.callbacks.remove(ProgressCallback)

def untar_data(url):
    Path('images').mkdir()
    for name,o in zip(('Temple','flower'), load_sample_images().images):
        for i in range(80): PILImage.create(o[i:i+48,4*i:4*i+48]).save(f'images/{name}_{i}.jpg')
    return Path()

def compiled(self, _f=nn.Module.compile): _f(self, backend='eager')
nn.Module.compile = compiled
new = dict(untar_data=untar_data, vision_learner=partial(vision_learner, pretrained=False), resnet34='test_resnet',
           resnet50='test_resnet', Resize=lambda size, _f=Resize: _f(32), aug_transforms=lambda size: [])
for k,v in new.items(): setattr(vision, k, v)
from fastai.vision.all import *
"""
ended = """
assert len(learn.recorder.values)=={} and learn.precision_recorder.log.finite.iloc[-1]
"""

@pytest.mark.slow
@pytest.mark.parametrize('name,epochs', [('howto/applications',1),('howto/fast_on_a_gpu',3)])
def test_pets(name, epochs, forked, tmp_path):
    "The first block of that page, with small images in place of a download, a small model without pretrained weights"
    pytest.importorskip('timm')
    forked(small_pets+blocks(name)[0]+ended.format(epochs), tmp_path)

@pytest.mark.slow
def test_first_block(forked, tmp_path):
    "That of README, with those images"
    pytest.importorskip('timm')
    code, = blocks('index')
    dls = """
def of_class(name): return name[0]
dls = ImageDataLoaders.from_name_func(Path(), get_image_files(untar_data('')/'images'), of_class, bs=16, num_workers=0)
"""
    forked(small_pets+dls+code+'learn.fit(1)'+ended.format(1), tmp_path)

@pytest.mark.slow
def test_lora_block(forked, tmp_path):
    "After the page's cells that make its data, and a BERT"
    pytest.importorskip('peft')
    pytest.importorskip('transformers')
    lines = [o for o in cells('howto/applications', 'code') if re.search('fastai.tabular|import .*pydoc|BertConfig', o)]
    _,code = blocks('howto/applications')
    quiet = '\ndefaults.callbacks.remove(ProgressCallback)\n'
    end = "assert 0<sum(p.requires_grad for p in model.parameters())<len([*model.parameters()])/2\n"
    forked('\n'.join(lines)+quiet+code+ended.format(4)+end, tmp_path)

@pytest.mark.slow
def test_several_gpus(tmp_path):
    "The Python blocks of that page, in order, in one process that has a learner as in the example"
    pytest.importorskip('accelerate')
    start = f"""import sys
sys.path.insert(0, '{root}/examples')
from distributed import get_dls,get_model as new_model # fastai has a `get_model`, too
import fastai.callback.progress as progress
dls,model = get_dls(64),new_model()
progress.defaults.callbacks.remove(progress.ProgressCallback)
"""
    sharded = """
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(OrderedDict(layers=nn.Sequential(new_model())))
"""
    # tensor parallel needs two processes, as in test_tensor_parallel
    found = [o for o in blocks('howto/several_gpus') if 'parallelize_module' not in o]
    of_shards = [o for o in found if 'fully_shard' in o or 'dcp.save' in o]
    code = start+''.join(o for o in found if o not in of_shards)
    paste(code+sharded+'learn.fit(1)\n'.join(of_shards)+'learn.fit(1)\ndist.destroy_process_group()', tmp_path)

def public():
    "What the notebooks export: each public function, class, and method that they add to a class of another library"
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

def test_migrate_has_all_names():
    "of fastai's mixed precision, as it says"
    from fastai.callback import fp16
    added = re.findall(r'@patch\n(?:@\S+\n)*def (\w+)\(self:\s*Learner', inspect.getsource(fp16))
    text = '\n'.join(cells('howto/migrate', 'markdown'))
    assert len(added)>=5 and [o for o in (*fp16.__all__,*added) if not re.search(rf'\b{o}\b', text)]==[]

words = { # what people type who have a problem, and the page that answers; test_site asks the site's search
    'expected scalar type Half but found Float': 'howto/troubleshooting',
    'Attempting to unscale FP16 gradients':      'howto/troubleshooting',
    'P100':              'howto/which_precision',  'GTX':           'howto/which_precision',
    'MacBook':           'howto/which_precision',  'Ryzen':         'howto/which_precision',
    'notebook_launcher': 'howto/several_gpus',     'PicklingError': 'howto/checkpoints',
    'show_results':      'howto/works_with',       'optimi':        'howto/works_with',
    'fastxtend':         'howto/from_other_libraries',
    'Kaggle':            'howto/applications',     'Colab':         'howto/applications',
    'LoRA':              'howto/applications',     'MixUp':         'howto/applications',
    'T4':                'howto/applications',     'laptop':        'howto/which_precision',
    'A100':              'howto/fast_on_a_gpu',    'RTX 4090':      'howto/fast_on_a_gpu',
    'Trainer':           'howto/other_trainers',   'Accelerate':    'howto/other_trainers',
    'K-fold':            'howto/kfold',            'sweep':         'howto/kfold',
    'detectors':         'howto/detection',        'Dice':          'howto/segmentation',
    'PyG':               'howto/graphs',           'new_zeros':     'howto/graphs',
    'GradNorm':          'howto/multi_task',       'ArcFace':       'howto/metric_learning',
    'tsai':              'howto/time_series',      'generate':      'howto/generate',
    'telemetry':         'howto/telemetry',        'manual optimization': 'howto/other_trainers',
    'GAN':               'howto/two_networks',     'critic':        'howto/two_networks',
    'alternating':       'howto/two_networks',     'custom loss':   'howto/own_losses',
    'float16 loss':      'howto/own_losses',       'detect_anomaly': 'howto/troubleshooting',
    'zero_grad':         'tutorials/your_own_loop', 'unscale_':     'tutorials/your_own_loop',
    'night':             'core/replay',            'timeseries':    'howto/time_series'}

@pytest.mark.parametrize('word', words)
def test_words(word): assert re.search(rf'\b{word}\b', '\n'.join(cells(words[word], 'markdown')))

def shown_cells(name):
    "The code of the page `name` that readers see, cell by cell"
    opts = [pages.options(o) for o in read_nb(nbs[name]).cells if o.cell_type=='code']
    left_out = {'hide','export','exporti','exports','default_exp'}
    return [code for o,code in opts if not left_out & {*o} and o.get('echo')!='false']

def shown(name): return '\n'.join(shown_cells(name))

compound = ast.With,ast.For,ast.While,ast.If,ast.Try,ast.FunctionDef,ast.ClassDef

@pytest.mark.parametrize('name', [o for o in nbs if re.match('index|tutorials/|howto/|look/serving', o)])
def test_blank_lines(name):
    "A plain interpreter, into which a cell is pasted, needs one between a block and the next statement"
    for code in shown_cells(name):
        lines,body = code.splitlines(),ast.parse(re.sub(r'^[!%].*', 'pass', code, flags=re.M)).body
        for a,b in zip(body, body[1:]):
            if isinstance(a, compound): assert '' in lines[a.end_lineno:b.lineno-1], lines[b.lineno-1]

def defined(tree):
    "Names that `tree` assigns, defines, imports or takes as arguments, in any scope"
    res = set(dir(builtins))
    for o in ast.walk(tree):
        if isinstance(o, ast.Name) and not isinstance(o.ctx, ast.Load): res.add(o.id)
        elif isinstance(o, (ast.FunctionDef,ast.ClassDef)): res.add(o.name)
        elif isinstance(o, ast.arg): res.add(o.arg)
        elif isinstance(o, ast.ExceptHandler) and o.name: res.add(o.name)
        elif isinstance(o, (ast.Import,ast.ImportFrom)):
            for a in o.names:
                if a.name!='*': res.add(a.asname or a.name.partition('.')[0])
                else:
                    mod = import_module(o.module)
                    res |= {*getattr(mod, '__all__', [k for k in vars(mod) if k[0]!='_'])}
    return res

@pytest.mark.parametrize('name', nbs)
def test_names_are_shown(name):
    "Pasted into an interpreter, without the hidden cells, no name is missing"
    tree = ast.parse('\n'.join(o for o in shown(name).splitlines() if not re.match(r'\s*[!%]', o)))
    used = {o.id for o in ast.walk(tree) if isinstance(o, ast.Name) and isinstance(o.ctx, ast.Load)}
    assert sorted(used-defined(tree))==[]

elsewhere = 'howto/several_gpus','howto/examples' # they show files of the repository, see `test_examples`
@pytest.mark.slow
@pytest.mark.parametrize('name', [o for o in nbs if re.match('index|tutorials/|howto/', o) and o not in elsewhere])
def test_pasted(name, forked, tmp_path):
    "In order, into an interpreter that has nothing of the hidden cells"
    forked(re.sub(r'^\s*[!%].*', '', shown(name), flags=re.M), tmp_path)

@pytest.mark.slow
@pytest.mark.parametrize('name', ['lightning','pytorch_lightning'])
def test_lightning(name, tmp_path):
    "The blocks for Lightning, after the page's cells: the sick model is found, the cured one trains, also by our steps"
    pytest.importorskip(name)
    own,manual = [re.sub('import (pytorch_)?lightning', f'import {name}', o) for o in blocks('howto/other_trainers')]
    end = """
train(*new(YesNo32))
try: train(*new())
except FloatingPointError as e: print(e.args[0].where, e.args[0].module)
"""
    printed = paste('\n'.join([shown('howto/other_trainers'), own, end, manual]), tmp_path).splitlines()
    said, = re.findall(r'```text\n(.*)\n```', '\n'.join(cells('howto/other_trainers', 'markdown')))
    assert printed[-2]=='backward head' and outputs.same(said, printed[-1])
