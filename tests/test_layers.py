"""The layout is the architecture, and what an import does

Numbers of notebooks are layers, imports point to lower ones, only one module changes fastai, a class is one piece, no
module uses a private name of another, and none unpickles. Lines are short, in the tests, too, and functions, classes
and cells are small. What a module imports, anywhere in it, is found by grimp, the library below import-linter; its
contracts would repeat the order that the numbers have."""
import ast,tokenize
from importlib import import_module

from interpreters import paste
from learners import *

pkg,nbs = root/'mp_callbacks',root/'nbs'
by_hand = {'__init__','__main__','_modidx','all'} # modules that come from no notebook

numbered = [m for o in sorted(nbs.glob('*.ipynb')) if (m := re.fullmatch(r'(\d\d[a-z]?)_(\w+)', o.stem))]
layers = {m[2]:m[1] for m in numbered} # such as '03', and '02a' between '02' and '03'
in_order = sorted(layers, key=layers.get)
foundation = [o for o in in_order if layers[o]<'10' or o in ('jmp','mpx','emily')] # or other libraries' names
each_module = pytest.mark.parametrize('name', in_order)

def source(name): return (pkg/f'{name}.py').read_text(encoding='utf-8')

def test_a_notebook_for_each_module():
    "With a number of its own, and named after the module that it exports"
    assert len({m[1] for m in numbered})==len(layers)==len(numbered)
    assert {o.stem for o in pkg.glob('*.py')}==layers.keys()|by_hand

@pytest.fixture(scope='module')
def imports():
    "Module -> what it imports, ours without the package's name"
    grimp = pytest.importorskip('grimp', reason='needs the dev extra')
    graph = grimp.build_graph(pkg.name, include_external_packages=True, cache_dir=None)
    found = {o:graph.find_modules_directly_imported_by(f'{pkg.name}.{o}') for o in layers.keys()|by_hand-{'__init__'}}
    return {k:{o.removeprefix(f'{pkg.name}.') for o in v} for k,v in found.items()}

@each_module
def test_imports(name, imports):
    "Lower modules only. The foundation: PyTorch, fastcore, tables, plots, the standard library. fastai begins at 10."
    assert {o for o in imports[name]&(layers.keys()|by_hand) if layers.get(o, '99')>=layers[name]}==set()
    plain = {'torch','fastcore','matplotlib','numpy','pandas',*sys.stdlib_module_names}
    if name not in foundation: plain |= {'fastai','sklearn','fastprogress'}
    assert imports[name]-layers.keys()<=plain

@pytest.mark.parametrize('name', [*in_order,'__main__','all'])
def test_nothing_of_ours_unpickles(name, imports):
    "Checkpoints are data, as Guarantees promises; nor is anything imported by name, which grimp wouldn't see"
    assert not {'pickle','_pickle','cloudpickle','dill','joblib','marshal','shelve'} & imports[name]
    calls = 'eval|exec|import_module|__import__|load_pickle|load_learner'
    assert not re.search(rf'(?<![\w.])({calls})\(|torch(\.serialization)?\.load\(|weights_only=', source(name))

@pytest.mark.parametrize('folder', [pkg,root/'tests'], ids=lambda o: o.name)
def test_lines_are_short(folder):
    for file in folder.glob('*.py'):
        lines = file.read_text(encoding='utf-8').splitlines()
        assert file.stem=='_modidx' or [o for o in lines if len(o)>120 and not o.startswith('__all__')]==[], file

@each_module
def test_a_class_is_one_piece(name):
    "`@patch` adds to fastai's `Learner`, never to a class of this package"
    patched = re.findall(r'^@patch\n(?:@(?:.|\n)*?)?def \w+\(\s*\w+:\s*(\w+)', source(name), re.M)
    assert len(patched)==source(name).count('\n@patch') and {*patched}<={'Learner'}

def code_lines(text):
    "Numbers of the lines that have code: docstrings, comments and empty lines have none"
    none = {tokenize.COMMENT,tokenize.NL,tokenize.NEWLINE,tokenize.INDENT,tokenize.DEDENT,tokenize.ENDMARKER}
    tokens = [o for o in tokenize.generate_tokens(io.StringIO(text).readline) if o.type not in none]
    docs = [o.body[0] for o in ast.walk(ast.parse(text)) if isinstance(o, (ast.Module,ast.ClassDef,ast.FunctionDef))
            and ast.get_docstring(o) is not None]
    return ({i for o in tokens for i in range(o.start[0], o.end[0]+1)}-
            {i for o in docs for i in range(o.lineno, o.end_lineno+1)})

@each_module
def test_sizes(name):
    "Rooms to live in: a class has at most 25 methods and 160 lines of code, what a function does 30, a cell 60 lines"
    text = source(name)
    lines = code_lines(text)
    # a signature has a line for each parameter, and doesn't count
    def size(first, last): return len([i for i in lines if first<=i<=last])
    for o in ast.walk(ast.parse(text)):
        if isinstance(o, ast.FunctionDef): assert size(o.body[0].lineno, o.end_lineno)<=30, o.name
        if isinstance(o, ast.ClassDef): assert size(o.lineno, o.end_lineno)<=160, o.name
        if isinstance(o, ast.ClassDef): assert sum(isinstance(m, ast.FunctionDef) for m in o.body)<=25, o.name
    for o in cells_of(f'{layers[name]}_{name}.ipynb', 'code'): assert len(o.splitlines())<=60, o

@functools.cache
def private_names(name):
    "Those that a module uses or has in a string, and those that it defines: functions, classes, variables, attributes"
    used,defined = set(),set()
    for o in ast.walk(ast.parse(source(name))):
        for k in ('name','id','attr','value'):
            if not re.fullmatch(r'_[a-zA-Z]\w*', found := str(getattr(o, k, ''))): continue
            used.add(found)
            if isinstance(o, (ast.FunctionDef,ast.ClassDef)) or isinstance(getattr(o, 'ctx', None), ast.Store):
                defined.add(found)
    return used,defined

@each_module
def test_no_private_name_of_another(name):
    "What two modules need has a public name in the lower one; `_with_events` is fastai's"
    used,defined = private_names(name)
    others = set().union(*(private_names(o)[1] for o in layers if o!=name))
    assert (used & others)-defined-{'_with_events'}==set()

methods = ('to_fp16 to_bf16 to_fp8 to_native_fp16 to_native_bf16 to_fp32 to_native_fp32 to_non_native_fp16 '
           'to_non_native_fp32 one_batch _with_events create_opt save export to_contiguous __getattr__ '
           'find_nonfinite precision_plan precision_report precision_checkup').split()

changes = '''if True:
    import fastai.basics,fastai.callback.all,fastai.callback.channelslast,sys,torch
    from importlib import import_module
    from types import ModuleType
    defaults = fastai.learner.defaults
    mods = [m for n,m in sys.modules.items() if n.partition('.')[0] in ('fastai','fastcore') and m is not None]
    kinds = [torch.nn.Module, torch.Tensor, torch.autocast, torch.amp.GradScaler, torch.optim.Optimizer]
    kinds += {o for m in mods for o in vars(m).values() if isinstance(o, type) and o.__module__==m.__name__}
    def snapshot():
        res = {f'{o.__module__}.{o.__qualname__}.{k}':v for o in kinds for k,v in vars(o).items()}
        for m in mods:
            own = {k:v for k,v in vars(m).items() if k[:2]!='__' and not isinstance(v, ModuleType)}
            res.update({f'{m.__name__}.{k}':v for k,v in own.items()})
        return {**res, **vars(defaults), **dict(enumerate(defaults.callbacks))}
    def change_by(names):
        "What importing these modules changes. fastcore's `patch` keeps what it replaces under another name."
        before = snapshot()
        for o in names.split(): import_module(f'mp_callbacks.{o}')
        after = snapshot()
        changed = [k for k in before.keys()|after.keys() if before.get(k) is not after.get(k, before)]
        return [k for k in changed if '._orig_to_' not in str(k)]
    print([*map(change_by, parts)])'''

@pytest.mark.slow
def test_only_learner_changes_fastai(imports):
    "Or PyTorch's classes, or fastai's default callbacks; and `learner` only methods of `Learner`"
    last = [o for o in in_order if o=='learner' or 'learner' in imports[o]]
    parts = ' '.join(o for o in in_order if o not in last),' '.join(last)
    others,learner = ast.literal_eval(paste(f'parts = {parts}\n{changes}', root).splitlines()[-1])
    assert others==[] and {*learner}=={f'fastai.learner.Learner.{o}' for o in methods}

public = ('ModelToHalf MixedPrecision NativeMixedPrecision PrecisionRecorder half_precision StepStats Policy '
          'DynamicLossScale StaticLossScale').split()

def test_all():
    "After both star imports ours are in place, and no name of fastai's is lost but those that we mean to replace"
    ours,theirs = {},{}
    exec('from mp_callbacks.all import *', ours)
    exec('from fastai.basics import *\nfrom fastai.callback.all import *', theirs)
    assert ours.keys()-{'__builtins__'}=={*public}
    mods = [import_module(f'mp_callbacks.{o}') for o in layers]
    assert all(any(getattr(m, k, None) is ours[k] for m in mods if k in m.__all__) for k in public)
    assert all(ours[k].__module__.startswith('mp_callbacks.') for k in public)
    assert {*public}&theirs.keys()<={'MixedPrecision', 'ModelToHalf'}
    calls = [o for o in methods if o.startswith('to_') and o!='to_contiguous']
    assert all(getattr(theirs['Learner'], o).__module__=='mp_callbacks.learner' for o in calls)
