"""The layout is the architecture, and what an import does

Numbers of notebooks are layers, imports point to lower ones, only one module changes fastai, a class is one piece, no
module uses a private name of another, and none unpickles. Lines are short, in the tests, too, and no helper of theirs
stands twice. What a module imports, anywhere in it, is found by grimp, the library below import-linter; its contracts
would repeat the order that the numbers have."""
import ast,functools,json,re,subprocess,sys
from importlib import import_module
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
pkg,nbs = root/'mp_callbacks',root/'nbs'
by_hand = {'__init__','__main__','_modidx','all'} # modules that come from no notebook

numbered = [m for o in sorted(nbs.glob('*.ipynb')) if (m := re.fullmatch(r'(\d\d[a-z]?)_(\w+)', o.stem))]
layers = {m[2]:m[1] for m in numbered} # such as '03', and '02a' between '02' and '03'
in_order = sorted(layers, key=layers.get)
vocabularies = 'jmp','mpx','emily' # other libraries' names, which know nothing of fastai either
foundation = [o for o in in_order if layers[o]<'10' or o in vocabularies]
each_module = pytest.mark.parametrize('name', in_order)

def source(name): return (pkg/f'{name}.py').read_text(encoding='utf-8')

def test_a_notebook_for_each_module():
    "With a number of its own, and named after the module that it exports"
    assert len({m[1] for m in numbered})==len(layers)==len(numbered)
    assert {o.stem for o in pkg.glob('*.py')}==layers.keys()|by_hand

# --- Imports

@pytest.fixture(scope='module')
def imports():
    "Module -> what it imports, ours without the package's name"
    grimp = pytest.importorskip('grimp', reason='needs the dev extra')
    graph = grimp.build_graph(pkg.name, include_external_packages=True, cache_dir=None)
    found = {o:graph.find_modules_directly_imported_by(f'{pkg.name}.{o}') for o in layers}
    return {k:{o.removeprefix(f'{pkg.name}.') for o in v} for k,v in found.items()}

@each_module
def test_imports_lower_only(name, imports):
    assert {o for o in imports[name]&(layers.keys()|by_hand) if layers.get(o, '99')>=layers[name]}==set()

@each_module
def test_plain_pytorch(name, imports):
    "The foundation: PyTorch, fastcore, tables, plots and the standard library. fastai begins at 10."
    plain = {'torch','fastcore','matplotlib','numpy','pandas',*sys.stdlib_module_names}
    if name not in foundation: plain |= {'fastai','sklearn','fastprogress'}
    assert imports[name]-layers.keys()<=plain

def run(code, *args):
    "What `code` prints as JSON in a process of its own"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code, *args], capture_output=True, text=True, cwd=root)
    assert res.returncode==0, res.stderr
    return json.loads(res.stdout.splitlines()[-1])

def test_foundation_runs_without_fastai():
    "Also what they import in turn: after all of them, one after the other, fastai isn't there"
    code = '''if True:
        import json,sys
        from importlib import import_module
        seen = {}
        for o in sys.argv[1:]:
            import_module(f'mp_callbacks.{o}')
            seen[o] = any(m.partition('.')[0]=='fastai' for m in sys.modules)
        print(json.dumps(seen))'''
    assert run(code, *foundation)==dict.fromkeys(foundation, False)

# --- Lines and names

def called(o):
    "Name of the function that the call or decorator `o` calls"
    f = getattr(o, 'func', o)
    return getattr(f, 'id', getattr(f, 'attr', ''))

@each_module
def test_lines_are_short(name): assert [o for o in source(name).splitlines() if len(o)>120 and '__all__' not in o]==[]

@each_module
def test_a_class_is_one_piece(name):
    "`@patch` adds to fastai's `Learner`, never to a class of this package"
    patched = [o for o in ast.walk(ast.parse(source(name))) if isinstance(o, ast.FunctionDef)
               and 'patch' in map(called, o.decorator_list)]
    assert {ast.unparse(o.args.args[0].annotation) for o in patched}<={'Learner'}

def private(name): return name.startswith('_') and not name.startswith('__')

@functools.cache
def own_private(src):
    "Private names that a module of source `src` defines: functions, classes, variables, attributes that it sets"
    res = set()
    for o in ast.walk(ast.parse(src)):
        if isinstance(o, (ast.FunctionDef,ast.ClassDef)): res.add(o.name)
        elif isinstance(o, ast.Name) and isinstance(o.ctx, ast.Store): res.add(o.id)
        elif isinstance(o, ast.Attribute) and isinstance(o.ctx, ast.Store): res.add(o.attr)
    return {o for o in res if private(o)}

def theirs_used(name):
    "Private names of our other modules that module `name` imports, or reads as an attribute or by `getattr`"
    others = set().union(*(own_private(source(o)) for o in layers if o!=name))-own_private(source(name))
    tree,used = ast.parse(source(name)),set()
    for o in ast.walk(tree):
        if isinstance(o, ast.ImportFrom) and (o.level or (o.module or '').startswith('mp_callbacks')):
            used |= {a.name for a in o.names if private(a.name)}
        elif isinstance(o, ast.Attribute) and o.attr in others: used.add(o.attr)
        elif isinstance(o, ast.Call) and called(o)=='getattr' and isinstance(o.args[1], ast.Constant):
            used |= {o.args[1].value}&others
    return used-of_torch_and_fastai

# names that we set on their objects, and that are theirs
of_torch_and_fastai = {'_with_events'}

@each_module
def test_no_private_name_of_another(name):
    "What two modules need has a public name in the lower one"
    assert theirs_used(name)==set()

unpicklers = {'pickle','_pickle','cloudpickle','dill','joblib','marshal','shelve','load_pickle','load_learner',
              'torch.load','torch.serialization.load','weights_only','eval','exec'}

def names(code):
    "What `code` imports, calls by name or passes by name, with the parts of dotted imports"
    for o in ast.walk(ast.parse(code)):
        if isinstance(o, (ast.Import, ast.ImportFrom)):
            mod = getattr(o, 'module', None) or ''
            for a in o.names: yield from (*mod.split('.'), *a.name.split('.'), f'{mod}.{a.name}')
        elif isinstance(o, ast.Name): yield o.id
        elif isinstance(o, ast.Attribute): yield ast.unparse(o)
        elif isinstance(o, ast.keyword): yield o.arg

@pytest.mark.parametrize('name', [*in_order,*sorted(by_hand)])
def test_nothing_of_ours_unpickles(name):
    "Checkpoints are data, as Guarantees promises; nor is anything imported by name, which grimp wouldn't see"
    assert not {*unpicklers,'import_module','__import__'} & {*names(source(name))}

# --- Changes to fastai

methods = ('to_fp16 to_bf16 to_fp8 to_native_fp16 to_native_bf16 to_fp32 to_native_fp32 to_non_native_fp16 '
           'to_non_native_fp32 one_batch _with_events create_opt save export to_contiguous __getattr__ '
           'find_nonfinite precision_plan precision_report precision_checkup').split()

changes = '''if True:
    import json,sys
    from importlib import import_module
    import fastai.learner,fastai.callback.fp16,fastai.callback.channelslast,torch
    from types import ModuleType
    if '--all' in sys.argv: import fastai.basics,fastai.callback.all
    mods = {n:m for n,m in sys.modules.items() if m is not None and n.partition('.')[0] in ('fastai','fastcore')}
    def snapshot():
        defaults = fastai.learner.defaults
        res = {'defaults':dict(vars(defaults)), 'callbacks':dict(enumerate(defaults.callbacks))}
        for n,m in mods.items():
            res[n] = {k:v for k,v in vars(m).items() if not isinstance(v, ModuleType) and k[:2]!='__'}
            for k,c in vars(m).items():
                if isinstance(c, type) and c.__module__==n: res[f'{n}.{k}'] = dict(vars(c))
        for c in (torch.nn.Module, torch.Tensor, torch.autocast, torch.amp.GradScaler, torch.optim.Optimizer):
            res[f'torch.{c.__name__}'] = dict(vars(c))
        return res
    def differ(x, y): return [k for k in x.keys()|y.keys() if x.get(k, differ) is not y.get(k, changes)]
    def changes(a, b): return sorted(f'{n}.{k}' for n in a for k in differ(a[n], b[n]))
    seen = {}
    before = snapshot()
    for o in sys.argv[1:]:
        if o=='--all': continue
        import_module(f'mp_callbacks.{o}')
        after = snapshot()
        seen[o] = changes(before, after)
        before = after
    print(json.dumps(seen))'''

def replaced(changed):
    "Names of the methods of `Learner` among `changed`. fastcore's `patch` keeps what it replaces under another name."
    return {o.removeprefix('fastai.learner.Learner.') for o in changed if '._orig_to_' not in o}

def test_only_learner_changes_fastai(imports):
    "No other module changes an attribute of fastai's modules and classes, or of PyTorch's; `learner` only `Learner`"
    after = ['learner',*(o for o in layers if 'learner' in imports[o])]
    seen = run(changes, '--all', *(o for o in in_order if o not in after), *after)
    changed = seen.pop('learner')
    assert seen==dict.fromkeys(seen, [])
    assert replaced(changed)=={*methods}

@pytest.mark.slow
def test_import_changes_no_default():
    "After `fastai.learner` alone, `mp_callbacks.all` adds no default callback, such as fastai's progress bar"
    assert replaced(run(changes, 'all')['all'])=={*methods}

# --- What `all` exports

public = ('ModelToHalf MixedPrecision NativeMixedPrecision PrecisionRecorder half_precision StepStats Policy '
          'DynamicLossScale StaticLossScale').split()

def test_all_exports_what_users_need():
    ns = {}
    exec('from mp_callbacks.all import *', ns)
    assert {k for k in ns if k!='__builtins__'}=={*public} and len(public)<=25
    mods = [import_module(f'mp_callbacks.{o}') for o in layers]
    assert all(any(getattr(m, k, None) is ns[k] for m in mods if k in m.__all__) for k in public)

def test_ours_after_theirs():
    "After both star imports ours are in place, and no name of fastai's is lost but those that we mean to replace"
    ns = {}
    exec('from fastai.basics import *\nfrom fastai.callback.all import *', ns)
    theirs = dict(ns)
    exec('from mp_callbacks.all import *', ns)
    assert all(ns[k].__module__.startswith('mp_callbacks.') for k in public)
    assert {k for k in public if k in theirs}<={'MixedPrecision', 'ModelToHalf'}
    calls = [o for o in methods if o.startswith('to_') and o!='to_contiguous']
    assert all(getattr(ns['Learner'], o).__module__=='mp_callbacks.learner' for o in calls)

# --- The tests are code, too

test_files = sorted((root/'tests').glob('*.py'))

@pytest.mark.parametrize('file', test_files, ids=lambda o: o.stem)
def test_lines_of_tests_are_short(file): assert [o for o in file.read_text().splitlines() if len(o)>120]==[]

def test_no_helper_stands_twice():
    "Neither a function or class of more than forty letters, under any name, nor eight lines"
    bodies,passages = {},{}
    for file in test_files:
        for o in ast.parse(file.read_text()).body:
            if isinstance(o, (ast.FunctionDef,ast.ClassDef)):
                bodies.setdefault('\n'.join(map(ast.unparse, o.body)), []).append(f'{file.stem}.{o.name}')
        lines = [o.strip() for o in file.read_text().splitlines()]
        lines = [o for o in lines if o and not o.startswith(('import ','from '))]
        for i in range(len(lines)-7): passages.setdefault('\n'.join(lines[i:i+8]), []).append(file.stem)
    assert {k:o for k,o in bodies.items() if len(o)>1 and len(k)>40}=={}
    assert {k:o for k,o in passages.items() if len(o)>1}=={}
