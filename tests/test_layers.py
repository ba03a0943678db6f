"""The layout is the architecture

Numbers of notebooks are layers, imports point to lower ones, only one module changes fastai, and a class is one piece.
Lines are short, in the tests, too, and no helper of theirs stands twice."""
import ast,functools,json,re,subprocess,sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
pkg,nbs = root/'mp_callbacks',root/'nbs'
by_hand = {'__init__','__main__','_modidx','all'} # modules that come from no notebook

def numbered(): return {o:m for o in sorted(nbs.glob('*.ipynb')) if (m := re.fullmatch(r'(\d\d[a-z]?)_(\w+)', o.stem))}

layers = {m[2]:m[1] for m in numbered().values()} # such as '03', and '02a' between '02' and '03'
each_module = pytest.mark.parametrize('name', sorted(layers, key=layers.get))

def called(o):
    "Name of the function that the call or decorator `o` calls"
    f = getattr(o, 'func', o)
    return getattr(f, 'id', getattr(f, 'attr', ''))

@cache
def imports(name):
    "Everything that module `name` imports, anywhere in it: dotted names, ours without the package's"
    res = set()
    for o in ast.walk(ast.parse((pkg/f'{name}.py').read_text(encoding='utf-8'))):
        if isinstance(o, ast.Import): res |= {a.name for a in o.names}
        elif isinstance(o, ast.ImportFrom):
            assert o.level<2, f'{name} imports from outside the package'
            base = '.'.join(filter(None, ['mp_callbacks' if o.level else '', o.module]))
            res |= {f'{base}.{a.name}' for a in o.names} if base=='mp_callbacks' else {base}
        elif isinstance(o, ast.Call) and called(o) in ('import_module', '__import__'):
            assert isinstance(o.args[0], ast.Constant), f'{name} imports what only running it would tell'
            res.add(re.sub(r'^\.', 'mp_callbacks.', o.args[0].value))
    return {o.removeprefix('mp_callbacks.') if o.startswith('mp_callbacks') else f'::{o}' for o in res}

def ours(name): return {o.partition('.')[0] for o in imports(name) if o[:2]!='::'}
def needs(name): return ours(name).union(*(needs(o) for o in ours(name)&layers.keys()))

# --- Notebooks and modules

def test_one_number_each():
    nums = [m[1] for m in numbered().values()]
    assert len(set(nums))==len(nums)>=9
    assert len(set(layers))==len(nums)

def test_notebook_for_each_module():
    "Each numbered notebook exports the module that it is named after, and nothing else exports one"
    for path,m in numbered().items():
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        src = [''.join(c['source']) for c in cells if c['cell_type']=='code']
        assert re.findall(r'^#\s*\|\s*default_exp\s+(\S+)', '\n'.join(src), re.M)==[m[2]], path.name
        assert f'../nbs/{path.name}' in (pkg/f'{m[2]}.py').read_text(encoding='utf-8')
    assert {o.stem for o in pkg.glob('*.py')}==layers.keys()|by_hand

# --- Imports

@each_module
def test_imports_lower_only(name):
    assert {o for o in ours(name) if layers.get(o, '99')>=layers[name]}==set()

@each_module
def test_foundation_is_plain_pytorch(name):
    "Below 10: only PyTorch, fastcore, tables, plots and the standard library. fastai begins at 10."
    theirs = {o[2:].partition('.')[0] for o in imports(name) if o[:2]=='::'}
    plain = {'torch','fastcore','matplotlib','numpy','pandas',*sys.stdlib_module_names}
    assert theirs<=(plain if layers[name]<'10' else plain|{'fastai','sklearn','fastprogress'})

def test_imports_are_seen(tmp_path, monkeypatch):
    "The tests above find an import in every way that there is to write one"
    src = '''
        from .a import x
        from . import b
        import mp_callbacks.c as c
        from mp_callbacks.d import y
        from mp_callbacks import e
        import fastai.learner, torch
        def f():
            from fastai.callback.core import Callback
            importlib.import_module('mp_callbacks.g')
            importlib.import_module('.h', __package__)
        if False: __import__('fastai')'''
    (tmp_path/'probe.py').write_text('if True:'+src)
    monkeypatch.setattr(sys.modules[__name__], 'pkg', tmp_path)
    assert ours('probe')==set('abcdegh')
    theirs = {o for o in imports('probe') if o[:2]=='::'}
    assert theirs=={'::fastai.learner','::torch','::fastai.callback.core','::fastai'}

def run(code, *args):
    "What `code` prints as JSON in a process of its own"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code, *args], capture_output=True, text=True, cwd=root)
    assert res.returncode==0, res.stderr
    return json.loads(res.stdout.splitlines()[-1])

def test_foundation_runs_without_fastai():
    "Also what they import in turn: after all modules below 10, one after the other, fastai isn't there"
    code = '''if True:
        import json,sys
        from importlib import import_module
        seen = {}
        for o in sys.argv[1:]:
            import_module(f'mp_callbacks.{o}')
            seen[o] = any(m.partition('.')[0]=='fastai' for m in sys.modules)
        print(json.dumps(seen))'''
    names = [o for o in sorted(layers, key=layers.get) if layers[o]<'10']
    assert run(code, *names)==dict.fromkeys(names, False)

# --- Lines and names

def source(name): return (pkg/f'{name}.py').read_text(encoding='utf-8')

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

def test_private_names_are_seen(monkeypatch, tmp_path):
    sources = dict(low='def _f(): pass\nclass A:\n    _state = 0', fine='from .low import A\n_own = A()._own',
                   high='from .low import _f\nx = A()._state\ny = getattr(x, "_state", 1)')
    for n,src in sources.items():
        (tmp_path/f'{n}.py').write_text(src)
    monkeypatch.setattr(sys.modules[__name__], 'pkg', tmp_path)
    monkeypatch.setattr(sys.modules[__name__], 'layers', dict(low='00', high='01', fine='02'))
    assert theirs_used('high')=={'_f', '_state'} and theirs_used('fine')==theirs_used('low')==set()

def states(name):
    "Class -> names of the attributes that its methods, but for `__init__`, set on `self`"
    res,tree = {},ast.parse((pkg/f'{name}.py').read_text(encoding='utf-8'))
    classes = [c for c in ast.walk(tree) if isinstance(c, ast.ClassDef)]
    methods = [(c.name,f) for c in classes for f in c.body if isinstance(f, ast.FunctionDef)]
    for c,f in methods:
        own = f.args.args[0].arg if f.args.args else None
        if f.name=='__init__': continue
        for o in ast.walk(f):
            is_set = isinstance(o, ast.Attribute) and isinstance(o.ctx, ast.Store)
            if is_set and getattr(o.value, 'id', None)==own: res.setdefault(c, set()).add(o.attr)
    return res

@each_module
def test_classes_have_little_state(name):
    "What a class remembers between two calls is at most ten attributes"
    assert {k:v for k,v in states(name).items() if len(v)>10}=={}

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

def test_only_learner_changes_fastai():
    "No other module changes an attribute of fastai's modules and classes, or of PyTorch's; `learner` only `Learner`"
    patching = [o for o in layers if o=='learner' or 'learner' in needs(o)]
    names = sorted(set(layers)-set(patching), key=layers.get)
    seen = run(changes, '--all', *names, 'learner', *(o for o in patching if o!='learner'))
    changed = seen.pop('learner')
    assert seen==dict.fromkeys(seen, [])
    assert replaced(changed)=={*methods}

@pytest.mark.slow
def test_import_changes_no_default():
    "After `fastai.learner` alone, `mp_callbacks.all` adds no default callback, as importing all of fastai would"
    assert replaced(run(changes, 'all')['all'])=={*methods}

@pytest.mark.slow
def test_import_adds_no_progress_bar():
    "fastai's progress bar adds itself to every learner when it is imported: by the user, and not by us"
    code = """if 1:
        from fastai.learner import defaults
        before = [*defaults.callbacks]
        import mp_callbacks.all
        assert [*defaults.callbacks]==before
        from fastai.callback.progress import ProgressCallback
        assert [*defaults.callbacks]==[*before, ProgressCallback]"""
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True)

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
