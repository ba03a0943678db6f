"""The layout is the architecture, and what an import does

In the sidebar a module stands above those that it imports. Only one module changes fastai, a class stands in one
module, none unpickles. Which folder may import which, pyproject.toml says, and `make check` sees to it, with
import-linter. What a module imports, anywhere in it, is found by grimp, the library below import-linter."""
import ast

import yaml
from interpreters import forking,paste
from learners import *

pkg,nbs = root/'mp_callbacks',root/'nbs'
by_hand = {'__main__','all','core.all'} # modules that come from no notebook

def dotted(file, top): return '.'.join(file.relative_to(top).with_suffix('').parts)

with_exports = {dotted(o, nbs) for o in nbs.rglob('*.ipynb') if '#| default_exp' in o.read_text(encoding='utf-8')}
nav = yaml.safe_load((root/'docs/mkdocs.yml').read_text(encoding='utf-8'))['nav']
sidebar = [o.removesuffix('.md').replace('/', '.') for part in nav for title,pages in part.items()
           if title.startswith('Reference') for o in pages]
in_order = [*reversed([o for o in sidebar if o in with_exports]),*sorted(with_exports-{*sidebar})]
each_module = pytest.mark.parametrize('name', in_order)

def source(name): return (pkg/f"{name.replace('.', '/')}.py").read_text(encoding='utf-8')

def test_a_notebook_for_each_module():
    "In the same place, and of the same name"
    modules = {dotted(o, pkg) for o in pkg.rglob('*.py') if o.name not in ('__init__.py','_modidx.py')}
    assert modules==with_exports|by_hand
    for name in with_exports:
        assert f'#| default_exp {name}' in cells_of(f"{name.replace('.', '/')}.ipynb", 'code'), name

@pytest.fixture(scope='module')
def imports():
    "Module -> what it imports, ours without the package's name"
    grimp = pytest.importorskip('grimp', reason='needs the dev extra')
    graph = grimp.build_graph(pkg.name, include_external_packages=True, cache_dir=None)
    found = {o:graph.find_modules_directly_imported_by(f'{pkg.name}.{o}') for o in with_exports|by_hand}
    return {k:{o.removeprefix(f'{pkg.name}.') for o in v} for k,v in found.items()}

def test_requirements(imports):
    "Modules import what the package requires and what comes with that, but for Python's own"
    others = {o for v in imports.values() for o in v}-{*sys.stdlib_module_names}-imports.keys()
    assert others-{pkg.name}<={'torch','fastcore','fastai','matplotlib','numpy','pandas','sklearn'}

def test_sidebar_shows_the_order(imports):
    "A module stands above those that it imports, but for one that beginners find elsewhere"
    place = {o:i for i,o in enumerate(sidebar)}
    assert with_exports-{*sidebar}=={'learner.checkup'}
    found = {(k,o) for k in place.keys()&imports.keys() for o in imports[k]&place.keys() if place[o]<place[k]}
    assert found==set()

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

@pytest.mark.parametrize('name', [*in_order,*sorted(by_hand)])
def test_nothing_of_ours_unpickles(name):
    "Checkpoints are data, as Guarantees promises; nor is anything imported by name, which import-linter wouldn't see"
    calls = 'eval|exec|import_module|__import__|load_pickle|load_learner'
    text = re.sub(r'torch\.load\([^()]*, weights_only=True\)', '', source(name)) # which reads data alone
    assert not re.search(rf'(?<![\w.])({calls})\(|torch(\.serialization)?\.load\(|weights_only=[^T]', text)

@each_module
def test_patches(name):
    "`@patch` adds to fastai's `Learner`, or goes on with a class of the same module"
    body = ast.parse(source(name)).body
    own = {o.name for o in body if isinstance(o, ast.ClassDef)}
    def _is_patch(d): return isinstance(d, ast.Name) and d.id=='patch' or isinstance(d, ast.Call) and _is_patch(d.func)
    patches = [o for o in body if isinstance(o, ast.FunctionDef) and any(map(_is_patch, o.decorator_list))]
    assert len(patches)==source(name).count('\n@patch')
    assert {o.args.args[0].annotation.id for o in patches}<={'Learner',*own}

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

# Private names that may stand anywhere: those of tensors, modules, operations and states on which much else is built,
# those of NamedTuples, and fastai's
anywhere = {*"""_version _modules _parameters _buffers _orig_mod _c10d_functional _growth_tracker
    _fields _replace _asdict   _methods _set_device _split _with_events _DataLoader__idxs""".split()}

def private_attributes(o):
    "Names of attributes in a node of a syntax tree that begin with one underscore, also in strings, as of `getattr`"
    found = [o.attr] if isinstance(o, ast.Attribute) else [o.value] if isinstance(o, ast.Constant) else []
    return {k for k in found if re.fullmatch(r'_[a-zA-Z]\w*', str(k))}

def test_private_attributes():
    "The rule finds them"
    code = "m._compiled_call_impl; type(o)._forward_cls; getattr(m, '_conv_forward'); m.__dict__; '_ a text'"
    found = set().union(*map(private_attributes, ast.walk(ast.parse(code))))
    assert found=={'_compiled_call_impl','_forward_cls','_conv_forward'}

@functools.cache
def own_names():
    "Names of all functions, classes, and attributes that the package defines"
    nodes = [o for name in in_order for o in ast.walk(ast.parse(source(name)))]
    return ({o.name for o in nodes if isinstance(o, (ast.FunctionDef,ast.ClassDef))}|
            {o.attr for o in nodes if isinstance(o, ast.Attribute) and isinstance(o.ctx, ast.Store)}|
            {o.id for o in nodes if isinstance(o, ast.Name) and isinstance(o.ctx, ast.Store)})

@each_module
def test_private_names_of_torch(name):
    "And those of TorchScript, which is deprecated, stand in `core/torch_internals`, attributes of objects, too"
    if name=='core.torch_internals': return
    nodes = [*ast.walk(ast.parse(source(name)))]
    found = [ast.unparse(o) for o in nodes if isinstance(o, (ast.Attribute,ast.ImportFrom))]
    private = r'(torch|nn|F)(\.\w+)*\.(_[^_]|jit\b)|from torch.*([. ]_|jit\b)'
    assert [o for o in found if re.match(private, o)]==[]
    assert set().union(*map(private_attributes, nodes))-own_names()-anywhere==set()

taken_away = '_C.DisableTorchFunctionSubclass _C._are_functorch_transforms_active _scaled_mm _foreach_ jit.is_tracing \
    utils._foreach_utils._group_tensors_by_device_and_dtype utils._python_dispatch.TorchDispatchMode jit.ScriptModule \
    cpu._is_avx512_bf16_supported _C._len_torch_dispatch_stack nn.Module._compiled_call_impl Tensor._base \
    Tensor._post_accumulate_grad_hooks autograd.Function._set_sequence_nr nn.Conv1d._conv_forward \
    nn.parallel.DataParallel distributed.Reducer._reset_state nn.parameter.is_lazy overrides.TorchFunctionMode'.split()

without = """if True:
    import inspect,sys,torch,warnings
    from operator import attrgetter
    from fastai.basics import *
    warnings.simplefilter('ignore')
    place,_,name = 'torch.{name}'.rpartition('.')
    place = attrgetter(place.partition('.')[2])(torch) if '.' in place else torch
    was = inspect.getattr_static(place, name, None)
    class Hidden:
        "An attribute of a class, or of its objects, that PyTorch finds, and we don't"
        def __get__(self, o, cls=None):
            if sys._getframe(1).f_globals['__name__'].startswith('mp_callbacks.'): raise AttributeError(name)
            if name in getattr(o, '__dict__', ()): return vars(o)[name]
            return was.__get__(o, cls) if hasattr(was, '__get__') else was
        def __set__(self, o, value): vars(o)[name] = value
    if isinstance(place, type): setattr(place, name, Hidden())
    taken = {o:getattr(place, o) for o in dir(place) if o==name or name=='_foreach_' and o.startswith(name)}
    if isinstance(place, type): taken = {}
    for o in taken: delattr(place, o)
    from mp_callbacks.all import *
    for o in taken: setattr(place, o, taken[o]) # which PyTorch uses, too
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos,self.first = nn.Parameter(torch.zeros(16)),nn.Linear(8,16)
            self.conv = nn.Conv1d(1, 1, 3, padding=1)
            self.layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16,16), nn.Linear(16,1))
        def forward(self, x): return self.layers(self.conv((self.first(x)+self.pos)[:,None])[:,0])
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
    print(max([abs(o.recorder.losses[-1].item()-full)/full for o in learns])<.05) # float8 has three bits
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
    lines = {'utils._python_dispatch.TorchDispatchMode':['Memory'], 'Tensor._post_accumulate_grad_hooks':['Noise']}
    assert trains=='True' and not_asked==str(lines.get(name, []))
    assert rest.startswith('inputs ') and ('own parameters' in rest)==(name!='_C.DisableTorchFunctionSubclass')

methods = ('to_fp16 to_bf16 to_fp8 to_native_fp16 to_native_bf16 to_fp32 to_native_fp32 to_non_native_fp16 '
           'to_non_native_fp32 one_batch _with_events validation_context create_opt save export to_contiguous '
           'find_nonfinite precision_plan precision_report precision_serving replay precision_checkup').split()

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
    import mp_callbacks.all,pickle,sys
    from fastcore.basics import defaults
    def names(): return ' '.join(o.__name__ for o in defaults.callbacks)
    print(names(), [o for o in sys.meta_path if o.__module__.partition('.')[0]=='mp_callbacks'])
    {then}
    from fastai.callback.progress import ProgressCallback
    from fastai.learner import Learner
    print(names(), defaults.callbacks[-1] is type(pickle.loads(pickle.dumps(ProgressCallback()))) is ProgressCallback)
    calls = Learner.to_fp16,Learner.to_fp32,Learner.to_non_native_fp16
    print(*{{o.__module__ for o in calls}}, hasattr(Learner.to_contiguous, 'plain'))"""
bare,full = 'TrainEvalCallback Recorder CastToTensor','TrainEvalCallback Recorder CastToTensor ProgressCallback'

@pytest.mark.slow
@pytest.mark.parametrize('first,then,had', [
    ('from fastai.basics import *', '', bare), ('', 'from fastai.vision.all import *', bare),
    ('', 'import fastai.callback.fp16,fastai.callback.channelslast', bare),
    ('from fastai.callback.progress import *', '', full), ('from fastai.callback.all import *', '', full)])
def test_import_changes_no_default(first, then, had):
    """New learners have fastai's progress bar from its import on, which may come before ours or after

    Calls are ours, also where fastai's are imported later, and Python finds modules as before."""
    lines = paste(progress.format(first=first, then=then), root).splitlines()
    assert lines==[f'{had} []', f'{full} True', 'mp_callbacks.learner.calls True'], lines

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
