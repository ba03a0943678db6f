"""The layout is the architecture, and what an import does

The folders of the package are its layers, imports point down, and in the sidebar a module stands above those that it
imports. Only one module changes fastai, a class stands in one module, no module uses a private name of another, none
unpickles. Lines are short, in the tests, too, and functions, classes and cells are small. What a module imports,
anywhere in it, is found by grimp, the library below import-linter."""
import ast,tokenize

import yaml
from interpreters import forking,paste
from learners import *
from mp_callbacks import moved

pkg,nbs = root/'mp_callbacks',root/'nbs'
by_hand = {'__main__','all','core.all'} # modules that come from no notebook
below = { # folder -> those that it may import from, beside itself; the top, which is no folder, from all
    'core':[], 'look':['core'], 'names':['core'], 'learner':['core','look','names'],
    '':['core','look','names','learner']}
points_up = {('core.training_steps','look.explain')} # in `TrainingSteps(…, compute_loss=f)`: the one exception

def dotted(file, top): return '.'.join(file.relative_to(top).with_suffix('').parts)
def folder_of(name): return name.rpartition('.')[0]

with_exports = {dotted(o, nbs) for o in nbs.rglob('*.ipynb') if '#| default_exp' in o.read_text(encoding='utf-8')}
nav = yaml.safe_load((root/'docs/mkdocs.yml').read_text(encoding='utf-8'))['nav']
sidebar = [o.removesuffix('.md').replace('/', '.') for part in nav for title,pages in part.items()
           if title.startswith('Reference') for o in pages]
in_order = [*reversed([o for o in sidebar if o in with_exports]),*sorted(with_exports-{*sidebar})]
each_module = pytest.mark.parametrize('name', in_order)

def source(name): return (pkg/f"{name.replace('.', '/')}.py").read_text(encoding='utf-8')

def test_a_notebook_for_each_module():
    "In the same place, and of the same name; and of the old addresses each leads to one of them"
    modules = {dotted(o, pkg) for o in pkg.rglob('*.py') if o.name not in ('__init__.py','_modidx.py')}
    assert modules==with_exports|by_hand and {folder_of(o) for o in modules}==below.keys()
    for name in with_exports:
        assert f'#| default_exp {name}' in cells_of(f"{name.replace('.', '/')}.ipynb", 'code'), name
    assert {*moved.values()}<=with_exports and len(moved)==30

@pytest.fixture(scope='module')
def imports():
    "Module -> what it imports, ours without the package's name"
    grimp = pytest.importorskip('grimp', reason='needs the dev extra')
    graph = grimp.build_graph(pkg.name, include_external_packages=True, cache_dir=None)
    found = {o:graph.find_modules_directly_imported_by(f'{pkg.name}.{o}') for o in with_exports|by_hand}
    return {k:{o.removeprefix(f'{pkg.name}.') for o in v} for k,v in found.items()}

@pytest.mark.parametrize('name', [*in_order,*sorted(by_hand)])
def test_imports(name, imports):
    "Of its folder and of those below. Outside the package: fastai at the learner, tables and plots above the core"
    ours,folder = imports[name]&(with_exports|by_hand),folder_of(name)
    up = {(name,o) for o in ours if folder_of(o) not in (folder,*below[folder])}
    assert up==(points_up if name=='core.training_steps' else set())
    plain = {'torch','fastcore','pandas',*sys.stdlib_module_names} # pandas in functions: `test_core_is_light`
    if folder!='core': plain |= {'matplotlib','numpy'}
    if folder in ('learner',''): plain |= {'fastai','sklearn','fastprogress'}
    assert imports[name]-ours-{pkg.name,*below}<=plain

def test_sidebar_shows_the_order(imports):
    "A module stands above those that it imports, but for one that beginners find elsewhere"
    place = {o:i for i,o in enumerate(sidebar)}
    assert with_exports-{*sidebar}=={'learner.checkup'}
    found = {(k,o) for k in place.keys()&imports.keys() for o in imports[k]&place.keys() if place[o]<place[k]}
    assert found=={('core.training_steps','look.explain')}

def test_core_is_light():
    "Half precision and steps without fastai and plots, and without tables until one is asked for"
    code = """if True:
        import sys,mp_callbacks.core.half,mp_callbacks.core.training_steps
        from mp_callbacks.core.all import *
        def loaded(): return [o for o in ('fastai','matplotlib','pandas') if o in sys.modules]
        print(sorted(k for k in globals() if k[0]!='_' and k not in ('sys','mp_callbacks','loaded')), loaded())
        import torch
        model = torch.nn.Linear(2,2)
        def compute_loss(model, x): return model(x).sum()
        steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), .1), torch.bfloat16, compute_loss=compute_loss)
        with steps.batch(torch.ones(2,2)): steps.backward(compute_loss(model, torch.ones(2,2)))
        steps.make()
        found = steps.explain(torch.ones(2,2)*torch.inf)
        print(found.where, loaded())
        steps.policy()
        print(loaded())"""
    names = ['DynamicLossScale','StaticLossScale','TrainingSteps','half_precision','prepare_grads']
    assert paste(code, root).splitlines()==[f'{names} []', 'inputs []', "['pandas']"]

ways_to_import = 'import mp_callbacks.{}','from mp_callbacks import {}','from mp_callbacks.{} import *'
@pytest.mark.parametrize('how', ways_to_import)
def test_old_imports(how):
    "Say where the module is now. `mp_callbacks.learner` is a folder now, of which nothing can be imported as before."
    for old,new in moved.items():
        if old=='learner': continue
        with pytest.raises(ImportError) as e: exec(how.format(old), {})
        assert str(e.value)==f'mp_callbacks.{old} is mp_callbacks.{new} now.'
    with pytest.raises(ImportError, match='unknown'): exec(how.format('unknown'), {})

@pytest.mark.parametrize('name', [*in_order,*sorted(by_hand)])
def test_nothing_of_ours_unpickles(name, imports):
    "Checkpoints are data, as Guarantees promises; nor is anything imported by name, which grimp wouldn't see"
    assert not {'pickle','_pickle','cloudpickle','dill','joblib','marshal','shelve'} & imports[name]
    calls = 'eval|exec|import_module|__import__|load_pickle|load_learner'
    assert not re.search(rf'(?<![\w.])({calls})\(|torch(\.serialization)?\.load\(|weights_only=', source(name))

@pytest.mark.parametrize('folder', [pkg,root/'tests'], ids=lambda o: o.name)
def test_lines_are_short(folder):
    for file in folder.rglob('*.py'):
        lines = file.read_text(encoding='utf-8').splitlines()
        assert file.stem=='_modidx' or [o for o in lines if len(o)>120 and not o.startswith('__all__')]==[], file

def patches(name):
    "The functions that `@patch` adds to classes: pairs of a function's tree and the class's name"
    tree = ast.parse(source(name))
    def _is_patch(d): return isinstance(d, ast.Name) and d.id=='patch' or isinstance(d, ast.Call) and _is_patch(d.func)
    return [(o,o.args.args[0].annotation.id) for o in tree.body
            if isinstance(o, ast.FunctionDef) and any(map(_is_patch, o.decorator_list))]

@each_module
def test_patches(name):
    "`@patch` adds to fastai's `Learner`, or goes on with a class of the same module"
    own = {o.name for o in ast.parse(source(name)).body if isinstance(o, ast.ClassDef)}
    assert len(patches(name))==source(name).count('\n@patch') and {cls for _,cls in patches(name)}<={'Learner',*own}

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
    """Rooms to live in: a class has at most 35 methods and 230 lines of code, with its patches, what a function does 30

    A cell has 60 lines, or one class of 130."""
    text = source(name)
    lines = code_lines(text)
    # a signature has a line for each parameter, and doesn't count
    def size(first, last): return len([i for i in lines if first<=i<=last])
    for o in ast.walk(ast.parse(text)):
        if isinstance(o, ast.FunctionDef): assert size(o.body[0].lineno, o.end_lineno)<=30, o.name
        if not isinstance(o, ast.ClassDef): continue
        methods = [m for m in o.body if isinstance(m, ast.FunctionDef)]
        added = [m for m,cls in patches(name) if cls==o.name]
        assert size(o.lineno, o.end_lineno)+sum(size(m.lineno, m.end_lineno) for m in added)<=230, o.name
        assert len(methods)+len(added)<=35, o.name
    for o in cells_of(f"{name.replace('.', '/')}.ipynb", 'code'):
        one_class = re.match(r'#\| export\n(@.*\n)?class ', o) and len(re.findall(r'^(class|def) ', o, re.M))==1
        assert len(o.splitlines())<=(130 if one_class else 60), o

def nodes_inside(o):
    "Of a syntax tree, without functions in it: their code is elsewhere"
    for inner in ast.iter_child_nodes(o):
        if isinstance(inner, (ast.FunctionDef,ast.Lambda,ast.GeneratorExp)): continue
        yield inner
        yield from nodes_inside(inner)

@each_module
def test_no_comprehension_where_something_has_to_end(name):
    "From Python 3.12 on it is a part of its function, and a `with` or `finally` may miss a tracer's interrupt in it"
    comprehensions = ast.ListComp,ast.SetComp,ast.DictComp
    for o in ast.walk(ast.parse(source(name))):
        if not (isinstance(o, ast.With) or isinstance(o, ast.Try) and o.finalbody): continue
        inside = ast.Module([*o.body,*getattr(o, 'finalbody', ())], [])
        assert [ast.unparse(c) for c in nodes_inside(inside) if isinstance(c, comprehensions)]==[]

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
    others = set().union(*(private_names(o)[1] for o in in_order if o!=name))
    assert (used & others)-defined-{'_with_events'}==set()

@each_module
def test_private_names_of_torch(name):
    "And those of TorchScript, which is deprecated, stand in `core/torch_internals`; attributes of objects anywhere"
    if name=='core.torch_internals': return
    found = [ast.unparse(o) for o in ast.walk(ast.parse(source(name))) if isinstance(o, (ast.Attribute,ast.ImportFrom))]
    private = r'(torch|nn|F)(\.\w+)*\.(_[^_]|jit\b)|from torch.*([. ]_|jit\b)'
    assert [o for o in found if re.match(private, o)]==[]

taken_away = '_C.DisableTorchFunctionSubclass _C._are_functorch_transforms_active _scaled_mm _foreach_ jit.is_tracing \
    utils._foreach_utils._group_tensors_by_device_and_dtype utils._python_dispatch.TorchDispatchMode jit.ScriptModule \
    cpu._is_avx512_bf16_supported _C._len_torch_dispatch_stack'.split()

without = """if True:
    import torch,warnings
    from operator import attrgetter
    from fastai.basics import *
    warnings.simplefilter('ignore')
    place,_,name = 'torch.{name}'.rpartition('.')
    place = attrgetter(place.partition('.')[2])(torch) if '.' in place else torch
    taken = {o:getattr(place, o) for o in dir(place) if o==name or name=='_foreach_' and o.startswith(name)}
    for o in taken: delattr(place, o)
    from mp_callbacks.all import *
    for o in taken: setattr(place, o, taken[o]) # which PyTorch uses, too
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos,self.first = nn.Parameter(torch.zeros(16)),nn.Linear(8,16)
            self.layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16,16), nn.Linear(16,1))
        def forward(self, x): return self.layers(self.first(x)+self.pos)
    def fit(call, **kwargs):
        torch.manual_seed(0)
        x = torch.randn(64,8)
        items = [*zip(x, x.sum(1, keepdim=True))]
        dls = DataLoaders.from_dsets(items, items, bs=16, num_workers=0, shuffle=False, device='cpu')
        learn = Learner(dls, Net(), loss_func=MSELossFlat(), lr=.02)
        learn.logger,learn.create_mbar = noop,False
        if call: getattr(learn, call)(**kwargs)
        learn.fit(2)
        return learn
    full = fit(None).recorder.losses[-1].item()
    learns = [fit(o) for o in ('to_fp16','to_bf16','to_native_bf16')]
    learns += [fit('to_native_fp16', init_scale=2.**8),fit('to_fp8', emulate=True)]
    print(max([abs(o.recorder.losses[-1].item()-full)/full for o in learns])<.02)
    report = learns[1].precision_checkup()
    print([o.title for o in report.lines if o.text.startswith('Not asked')])
    x,y = learns[1].dls.one_batch()
    print(learns[1].find_nonfinite((x*torch.inf,y)).where, {*learns[1].mixed_precision.policy().way})"""

@pytest.fixture(scope='module')
def forked_before():
    "As `forked`, before anything of ours is imported"
    with forking('fastai.basics,torch._dynamo') as run: yield run

@pytest.mark.parametrize('name', taken_away)
def test_without_a_private_name(name, forked_before, tmp_path):
    "Where PyTorch lacks it all precisions train, and only what needs it says so"
    trains,not_asked,rest = forked_before(without.replace('{name}', name), tmp_path).splitlines()
    assert trains=='True' and not_asked==("['Memory']" if 'DispatchMode' in name else '[]')
    assert rest.startswith('inputs ') and ('own parameters' in rest)==('TorchFunction' not in name)

methods = ('to_fp16 to_bf16 to_fp8 to_native_fp16 to_native_bf16 to_fp32 to_native_fp32 to_non_native_fp16 '
           'to_non_native_fp32 one_batch _with_events create_opt save export to_contiguous '
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
    last = [o for o in in_order if o=='learner.calls' or 'learner.calls' in imports[o]]
    parts = ' '.join(o for o in in_order if o not in last),' '.join(last)
    others,learner = ast.literal_eval(paste(f'parts = {parts}\n{changes}', root).splitlines()[-1])
    assert others==[] and {*learner}=={f'fastai.learner.Learner.{o}' for o in methods}

progress = """if True:
    {first}
    import mp_callbacks.all,pickle
    from fastcore.basics import defaults
    def names(): return ' '.join(o.__name__ for o in defaults.callbacks)
    print(names())
    import fastai.callback.fp16 as fp16
    {then}
    import fastai.callback.progress as progress
    from fastai.callback.progress import ProgressCallback
    print(fp16.ProgressCallback is ProgressCallback is type(pickle.loads(pickle.dumps(ProgressCallback()))))
    print(progress.__spec__.origin==progress.__file__, names())"""
bare,full = 'TrainEvalCallback Recorder CastToTensor','TrainEvalCallback Recorder CastToTensor ProgressCallback'

@pytest.mark.slow
@pytest.mark.parametrize('first,then,had', [
    ('from fastai.learner import *', '', bare), ('', 'from fastai.callback.progress import *', bare),
    ('', 'from fastai.callback.all import *', bare), ('', 'p = pickle.dumps(fp16.ProgressCallback())', bare),
    ('from fastai.basics import *', 'from fastai.text.all import *', bare),
    ('from fastai.callback.progress import *', '', full), ('from fastai.callback.all import *', '', full)])
def test_one_progress_bar(first, then, had):
    "Without an import of its own new learners have none; with it, before or after ours, it's one class, and there once"
    lines = paste(progress.format(first=first, then=then), root).splitlines()
    assert lines==[had, 'True', f'True {full}'], lines

public = ('ModelToHalf MixedPrecision NativeMixedPrecision PrecisionRecorder half_precision StepStats Policy '
          'DynamicLossScale StaticLossScale').split()

def test_all():
    "After both star imports ours are in place, and no name of fastai's is lost but those that we mean to replace"
    ours,theirs = {},{}
    exec('from mp_callbacks.all import *', ours)
    exec('from fastai.basics import *\nfrom fastai.callback.all import *', theirs)
    assert ours.keys()-{'__builtins__'}=={*public}
    mods = [import_module(f'mp_callbacks.{o}') for o in in_order]
    assert all(any(getattr(m, k, None) is ours[k] for m in mods if k in m.__all__) for k in public)
    assert all(ours[k].__module__.startswith('mp_callbacks.') for k in public)
    assert {*public}&theirs.keys()<={'MixedPrecision', 'ModelToHalf'}
    calls = [o for o in methods if o.startswith('to_') and o!='to_contiguous']
    assert all(getattr(theirs['Learner'], o).__module__=='mp_callbacks.learner.calls' for o in calls)
