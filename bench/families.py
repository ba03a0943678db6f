"""Model families of timm, torchvision and transformers: which compute in half precision, and how exact are gradients?

Each family's smallest model, with random weights and without dropout, computes one batch of random inputs on a CPU: in
float32, with `torch.autocast`, and with our rules, without and with embeddings kept in float32; each twice, as the
first call casts nothing ahead. What a family is: a module of timm or torchvision, a kind of configuration of
transformers, which is made tiny. The loss is a fixed linear function of all floating outputs. The part `stream` has
transformers' GPT-2 and BERT: the gradient's error, memory of activations, and (not with `--float32-kernels`) time.

With `--measured` each family's batch is compared with autocast as a learner does with its first one, into a csv of its
own: which modules compute as under autocast from then on, and the gradient's error then. Of families that are in
families_cpu.csv, only those that compute in float32 take part."""
import inspect,logging,multiprocessing,warnings
from contextlib import nullcontext
from functools import partial
from math import isfinite

import timm,transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode # PyTorch has no public way to replace kernels for a while
from torchvision.models import get_model,get_model_builder,list_models

from common import *
from loops import Variant
from mp_callbacks.core.dtypes import cast_tree
from mp_callbacks.core.half import half_precision
from mp_callbacks.core.measure import measure_predictions
from mp_callbacks.look.plan import plan_memory

libraries = ['timm','torchvision','transformers']
in_half = {'autocast-bf16':dict(rules=False), 'bf16':dict(), 'bf16, embeddings kept':dict(keep=nn.Embedding)}
quick = ['ghostnet','squeezenet','albert'] # one family of each library
most = 200e6 # parameters that a model may have

# --- Models and inputs

def numel(make):
    "How many parameters the model has that `make` would make"
    with torch.device('meta'): return sum(p.numel() for p in make().parameters())

def smallest(makes):
    "The name with the fewest parameters among `makes`, which are functions by name"
    sizes = {}
    for name,make in makes.items():
        try: sizes[name] = numel(make)
        except Exception: pass # can't be made without weights, or without another package
    name = min(sizes or makes, key=lambda o: sizes.get(o, 0))
    if name in sizes: check_size(sizes[name])
    return name

def check_size(n):
    if n>most: raise ValueError(f'{n/1e6:.0f} million parameters')

def images(size): return torch.randn(2, 3, size, size)

def timm_families():
    return {o:timm.list_models(module=o) for o in timm.list_modules()}

def timm_model(names):
    name = smallest({o:partial(timm.create_model, o, num_classes=10) for o in names})
    model = timm.create_model(name, num_classes=10)
    return name,model,[((torch.randn(2, *model.default_cfg['input_size']),), {})]

def torchvision_families():
    res = {}
    for name in list_models():
        module = get_model_builder(name).__module__.removeprefix('torchvision.models.')
        if 'quantization' not in module: res.setdefault(module, []).append(name)
    return res

def torchvision_model(names):
    name = smallest({o:partial(get_model, o, weights=None, **backbone(o)) for o in names})
    model = get_model(name, weights=None, **backbone(name))
    boxes = dict(boxes=torch.tensor([[8.,8,40,40]]), labels=torch.tensor([1]), masks=torch.ones(1,96,96).byte(),
                 keypoints=torch.ones(1,17,3))
    shapes = [images(224), images(299), torch.randn(2,3,8,112,112), torch.randn(2,3,16,224,224)]
    return name,model,[*[((o,), {}) for o in shapes], (([*images(96)],[boxes]*2), {}), ((images(128),images(128)), {})]

def backbone(name):
    "The options without which a model of torchvision loads weights"
    known = inspect.signature(get_model_builder(name)).parameters
    return dict(weights_backbone=None) if 'weights_backbone' in known else {}

# What makes a configuration of transformers tiny, where it has an option of that name
tiny = dict.fromkeys('hidden_size d_model n_embd dim embed_dim embedding_size decoder_hidden_size projection_dim '
                     'out_hidden_size hidden_dim encoder_hidden_dim mlp_dim conv_dim'.split(), 32)
tiny |= dict.fromkeys('num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers '
                      'num_decoder_layers decoder_num_hidden_layers num_encoder_layers'.split(), 2)
tiny |= dict.fromkeys('num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads '
                      'num_key_value_heads decoder_num_attention_heads'.split(), 4)
tiny |= dict.fromkeys('intermediate_size encoder_ffn_dim decoder_ffn_dim moe_intermediate_size ffn_dim d_ff '
                      'decoder_intermediate_size'.split(), 64)
tiny |= dict(vocab_size=128, max_position_embeddings=128, n_positions=128, head_dim=8, d_kv=8, image_size=32,
             patch_size=8, num_experts=4, n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2, num_queries=8,
             num_mel_bins=16, max_source_positions=32, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
             qk_rope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1, first_k_dense_replace=1, pad_token_id=0,
             bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0., attention_dropout=0.,
             hidden_dropout_prob=0., layerdrop=0., attention_probs_dropout_prob=0., drop_path_rate=0.,
             mask_time_prob=0., mask_feature_prob=0.)

def tiny_config(cls):
    "A configuration of class `cls`, and of all that it consists of, with the options in `tiny`"
    default = cls()
    parts = {k:o for k,o in vars(default).items() if isinstance(o, transformers.PretrainedConfig)}
    parts = {k:tiny_config(type(o)).to_dict() for k,o in parts.items()}
    options = {k:v for k,v in tiny.items() if isinstance(getattr(default, k, None), (int,float))}
    return cls(**options, **parts)

def transformers_families():
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    return dict(MODEL_MAPPING_NAMES)

def transformers_model(names):
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config = tiny_config(cls.config_class)
    check_size(numel(partial(cls, config)))
    model = cls(config)
    def _find(name, default):
        parts = [config,*(o for o in vars(config).values() if hasattr(o, 'to_dict'))]
        return next((v for o in parts if isinstance(v := getattr(o, name, None), int)), default)
    words = torch.randint(3, 100, (2,16))
    size,mels = _find('image_size', 64),_find('num_mel_bins', _find('feature_size', 80))
    given = [images(size), images(64), images(224), images(256), images(32), torch.randn(2,8,3,size,size),
             torch.randn(2,16,3,224,224), torch.randn(2,mels,64), torch.randn(2,64,mels), torch.randn(2,mels,3000),
             torch.randn(2,4000), torch.randn(2,1,4000), torch.randn(2,32,1)]
    texts = [{}, dict(input_ids=words), dict(decoder_input_ids=words),
             dict(input_ids=words, attention_mask=torch.ones_like(words))]
    main = model.main_input_name
    if main=='input_ids': return cls.__name__,model,[((), {**dict(input_ids=words), **o}) for o in texts]
    return cls.__name__,model,[((), {main:x, **o}) for o in texts[:3] for x in given]

# --- What is measured

aten = torch.ops.aten
products = {o.default for o in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm,
                                aten.convolution, aten.convolution_backward)}

class Float32Kernels(TorchDispatchMode):
    """Products and convolutions in bfloat16, computed by float32 kernels from the same numbers, and rounded

    That is what processors with instructions for bfloat16 do. Others emulate it, which takes many times as long."""
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # tensors of several dtypes are an error, here as there
        if f not in products or {o.dtype for o in tensors(args)}!={bf16}: return f(*args, **kwargs)
        return cast_tree(f(*cast_tree(args, torch.float32, bf16), **kwargs), bf16, torch.float32)

def linear_loss(model, args, kwargs, half=None):
    "A fixed linear function of the floating outputs, seeded"
    torch.manual_seed(1)
    with half or nullcontext(): out = model(*args, **kwargs)
    outs,gen = [o for o in tensors(out) if o.requires_grad],torch.Generator().manual_seed(2)
    return sum((o.float()*torch.randn(o.shape, generator=gen)).sum() for o in outs)

def gradient(model, args, kwargs, half=None):
    "Gradients of all parameters as one vector, of `linear_loss`"
    model.zero_grad()
    linear_loss(model, args, kwargs, half).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])

def tensors(out):
    "The floating tensors in a model's result"
    if isinstance(out, torch.Tensor): return [out] if out.is_floating_point() else []
    if hasattr(out, 'to_tuple'): out = out.to_tuple()
    if isinstance(out, dict): out = [*out.values()]
    return [t for o in out for t in tensors(o)] if isinstance(out, (list,tuple)) else []

def shape_of(model):
    "What must be the same after a model has computed in half precision: classes, attributes and dtypes"
    modules = [(name,type(m),*vars(m)) for name,m in model.named_modules()]
    return modules,[(name,id(p),p.dtype) for name,p in model.named_parameters(remove_duplicate=False)]

def relative_error(x, y): return ((x-y).norm()/y.norm()).item()

def small_model(library, names):
    "A family's smallest model without dropout: its name, the model, and inputs of which it may compute one"
    torch.manual_seed(0)
    name,model,inputs = globals()[f'{library}_model'](names)
    for m in model.modules(): # in these libraries `p` is a probability of dropout, too
        for k in ('p','drop_prob','drop_rate','dropout','layerdrop'):
            if isinstance(vars(m).get(k), float): setattr(m, k, 0.)
    return name,model,inputs

def in_float32(model, inputs):
    "The first inputs that the model computes, arguments and keyword arguments, and its gradient"
    for args,kwargs in inputs:
        try: exact = gradient(model, args, kwargs)
        except Exception as e: failed = e
        else: break
    else: raise failed
    if not exact.isfinite().all(): raise ValueError('gradients are not finite in float32')
    return args,kwargs,exact

def family(library, names):
    "Rows of (precision, metric, value, note)"
    name,model,inputs = small_model(library, names)
    yield 'fp32','parameters',sum(p.numel() for p in model.parameters()),name
    args,kwargs,exact = in_float32(model, inputs)
    yield 'fp32','again',relative_error(gradient(model, args, kwargs), exact),''
    before = shape_of(model)
    for precision,options in in_half.items():
        half = half_precision(model, bf16, **options)
        try:
            for _ in range(2): # the first call of a model casts nothing ahead
                error = relative_error(gradient(model, args, kwargs, half), exact)
            if not isfinite(error): raise ValueError('the gradient is not finite')
            yield precision,'error of the gradient',error,''
        except Exception as e: yield precision,'error',0,explained(e)[1]
        yield precision,'whole',shape_of(model)==before,''

def measured_family(library, names):
    "Rows of (precision, metric, value, note)"
    name,model,inputs = small_model(library, names)
    yield 'fp32','parameters',sum(p.numel() for p in model.parameters()),name
    args,kwargs,exact = in_float32(model, inputs)
    before,half = shape_of(model),half_precision(model, bf16)
    found = half.measure(lambda: linear_loss(model, args, kwargs))
    if found.why: yield 'measured','not measured',0,found.why
    else:
        yield 'measured','named',*named(found)
        yield 'measured','passes',found.passes,''
        yield 'measured','apart',found.apart,''
        for precision,error in {'autocast-bf16':found.autocast, 'bf16':found.error}.items():
            if error is not None: yield precision,'error of the gradient',error,''
        if found.names or found.error is None: # else it is the one by rules
            for _ in range(2): # the first call of a model casts nothing ahead
                after = gradient(model, args, kwargs, half)
            yield 'measured','error of the gradient',relative_error(after, exact),''
        else: yield 'measured','error of the gradient',found.error,''
    try:
        found = measure_predictions(half_precision(model, bf16), args, kwargs)
        yield 'measured','named by predictions',*named(found)
        yield 'measured','predictions apart',found.apart,''
        if found.error is not None:
            yield 'autocast-bf16','error of predictions',found.autocast,''
            yield 'bf16','error of predictions',found.error,''
    except Exception as e: yield 'measured','predictions not measured',0,explained(e)[1]
    yield 'measured','whole',shape_of(model)==before,''

def named(found):
    "How many modules are named, and their names"
    return len(found.names),' '.join(o or 'the-model-itself' for o in found.names)

def run_family(connection, of, library, names, kernels):
    torch.set_num_threads(1)
    rows = []
    try:
        with kernels: rows += of(library, names)
    except Exception as e: rows.append(('fp32', 'error', 0, explained(e)[1]))
    connection.send(rows)

def in_a_process(of, library, names, kernels, seconds):
    "The rows that `of` yields, such as `family`, computed in a fork, as some models end the process or don't end"
    fork = multiprocessing.get_context('fork')
    here,there = fork.Pipe()
    process = fork.Process(target=run_family, args=(there, of, library, names, kernels), daemon=True)
    process.start()
    there.close()
    try: rows = here.recv() if here.poll(seconds) else [('fp32', 'error', 0, f'longer than {seconds} seconds')]
    except EOFError: rows = [('fp32', 'error', 0, 'the process ended')]
    process.kill()
    process.join()
    for precision,*row in rows: yield Variant('ours', '', precision),1,*row

# --- Autocast, our rules, and our rules with a float32 residual stream

class Words(nn.Module):
    "A language model of transformers, and its loss"
    def __init__(self, name, dim=64, depth=6):
        super().__init__()
        size = dict(vocab_size=200, hidden_size=dim, num_hidden_layers=depth, num_attention_heads=4,
                    intermediate_size=4*dim)
        config = transformers.AutoConfig.for_model(name, **size)
        drops = 'resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob'
        for o in drops.split(): setattr(config, o, 0.)
        config.is_decoder = True
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, words): return self.model(input_ids=words, labels=words, use_cache=False).loss

def seconds_of(model, words, half=None):
    "Time of one forward and backward pass"
    start = perf_counter()
    gradient(model, (words,), {}, half)
    return perf_counter()-start

def relative_times(model, words, turns):
    "The time of a pass in each precision, divided by that of float32 in the same turn: medians, without the first turn"
    halves = {o:half_precision(model, bf16, **options) for o,options in in_half.items()}
    rows = []
    for _ in range(turns+1): # in the first one nothing is cast ahead
        full = seconds_of(model, words)
        rows.append({o:seconds_of(model, words, half)/full for o,half in halves.items()})
    return pd.DataFrame(rows[1:]).median()

def stream(name, kernels, turns=21, width=512):
    "Rows of (precision, metric, value, note)"
    torch.manual_seed(0)
    model,words = Words(name),torch.randint(200, (8,64))
    exact = gradient(model, (words,), {})
    def _loss(n): return model(torch.randint(200, (n,64)))
    for precision,options in in_half.items():
        half = half_precision(model, bf16, **options)
        with kernels:
            for _ in range(2): error = relative_error(gradient(model, (words,), {}, half), exact)
        yield precision,'error of the gradient',error,''
        plan = plan_memory(model, _loss, torch.optim.AdamW(model.parameters()), 64, half).table
        yield precision,'activations, MB',plan.activations['to_bf16' if half.rules else 'to_native_bf16'],''
    yield 'fp32','activations, MB',plan.activations.float32,''
    if isinstance(kernels, Float32Kernels): return # the time of those kernels says nothing about bfloat16
    times = relative_times(Words(name, width, 4), torch.randint(200, (8,64)), turns)
    for o in in_half: yield o,'time',times[o],''

# --- The tables

def summary(df):
    "How many families of each library compute, and how exact their gradients are"
    rows = {}
    for library,o in df[df.part!='stream'].groupby('part', sort=False):
        errors = o[o.metric=='error of the gradient'].pivot_table(index='case', columns='precision', values='value')
        rows[library] = dict(families=o.case.nunique(), float32=o[o.metric=='again'].case.nunique())
        for name,precision in dict(autocast='autocast-bf16', rules='bf16').items():
            rows[library] |= {name:errors[precision].count(), f'error, {name}':errors[precision].median()}
        for name,precision in {'above 1.5':'bf16', 'embeddings kept':'bf16, embeddings kept'}.items():
            if precision in errors: rows[library][name] = (errors[precision]/errors['autocast-bf16']>1.5).sum()
        rows[library]['whole'] = o[o.metric=='whole'].groupby('case').value.min().eq(1).sum()
    return pd.DataFrame(rows).T.rename_axis('library').fillna('')

def failures(df):
    "Families that compute in float32 and not in half precision, or don't come back whole"
    bad = df.metric.isin(['error','oom']) & (df.precision!='fp32') | (df.metric=='whole') & (df.value!=1)
    return df[bad][['part','case','precision','note']].set_index('part')

def measured_summary(df):
    "How many families of each library could be measured, and of how many a module is named"
    rows = {}
    for library,o in df.groupby('part', sort=False):
        by_gradients,by_predictions = [o[o.metric==k].value for k in ('named','named by predictions')]
        n,some = len(by_gradients),by_gradients.gt(0).sum()
        rows[library] = {'families':o.case.nunique(), 'measured':n, 'named':some,
                         'named, %':100*some/n if n else 0., 'median of passes':o[o.metric=='passes'].value.median(),
                         'measured by predictions':len(by_predictions),
                         'named by predictions':by_predictions.gt(0).sum()}
    return pd.DataFrame(rows).T.rename_axis('library').astype(object)

precisions = {'by rules':'bf16', 'under autocast':'autocast-bf16', 'measured':'measured'}

def those_named(df, metric='named', error='error of the gradient'):
    "The families of which modules are named: which, and the `error` by rules, under autocast, measured"
    res = df[(df.metric==metric) & (df.value>0)].set_index(['part','case'])
    errors = df[df.metric==error].pivot_table(index=['part','case'], columns='precision', values='value')
    of = {k:errors.get(o, pd.Series(dtype=float)).reindex(res.index) for k,o in precisions.items()}
    return pd.DataFrame(dict(modules=res.value.map('{:.0f}'.format), names=res.note.map(shortened), **of))

def shortened(names, most=3):
    "The first of the names in a string"
    first,rest = names.split()[:most],names.split()[most:]
    return ', '.join(f'`{o}`' for o in first)+(f', and {len(rest)} others' if rest else '')

def not_measured(df):
    "Why families could not be measured"
    bad = df[df.metric.isin(['error','not measured','predictions not measured'])]
    return bad[['part','case','metric','note']].set_index('part')

def run_measured(args, results, kernels):
    "The option `--measured`"
    file = Path(__file__).parent/'results/families_cpu.csv'
    earlier = pd.read_csv(file, comment='#', keep_default_na=False)
    failed = {*earlier[(earlier.precision=='fp32') & (earlier.metric=='error')][['part','case']].apply(tuple, axis=1)}
    with torch.compiler.set_stance('force_eager'): pass # what this imports, each fork would import again
    for library in [o for o in ('transformers','timm','torchvision') if o in args.only]: # the small models first
        for name,models in globals()[f'{library}_families']().items():
            if (library,name) in failed or args.tiny and name not in quick: continue
            rows = in_a_process(measured_family, library, models, kernels, args.seconds)
            results.measure(library, name, '', rows)
    df = results.read()
    results.write('Model families, measured on one batch, on a CPU',
                  [markdown(measured_summary(df)), '\n## Named\n', markdown(those_named(df)),
                   '\n## Named by predictions\n',
                   markdown(those_named(df, 'named by predictions', 'error of predictions')),
                   '\n## Not measured\n', markdown(not_measured(df))], of='all families')

def main():
    p = arguments(__doc__)
    parts = [*libraries,'stream']
    p.add_argument('--only', nargs='*', choices=parts, default=parts, help='parts [all]')
    p.add_argument('--seconds', type=int, default=120, help='seconds that a family may take [120]')
    p.add_argument('--float32-kernels', action='store_true',
                   help='where bfloat16 is emulated: compute products and convolutions in float32, and round them')
    p.add_argument('--measured', action='store_true', help='compare a batch with autocast, into another csv')
    torch.set_num_threads(1)
    args,_,results = start(p, 'measured_families_cpu' if '--measured' in sys.argv else 'families_cpu')
    kernels = Float32Kernels() if args.float32_kernels else nullcontext()
    warnings.filterwarnings('ignore')
    logging.disable(logging.WARNING)
    transformers_model('GPT2Model') # what it imports then, each fork would import again
    if args.measured: return run_measured(args, results, kernels)
    for library in [o for o in libraries if o in args.only]:
        for name,models in globals()[f'{library}_families']().items():
            if args.tiny and name not in quick: continue
            results.measure(library, name, '', in_a_process(family, library, models, kernels, args.seconds))
    for name in ('gpt2','bert') if 'stream' in args.only else ():
        rows = ((Variant('ours', '', o),1,*row) for o,*row in stream(name, kernels, *(1,64) if args.tiny else ()))
        results.measure('stream', name, '', rows)
    df = results.read()
    of_stream = df[df.part=='stream']
    of_stream = of_stream.pivot_table(index=['case','precision'], columns='metric', values='value', sort=False)
    results.write('Model families in half precision, on a CPU',
                  [markdown(summary(df)), '\n## Failures\n', markdown(failures(df)), '\n## Autocast and our rules\n',
                   markdown(of_stream)], of='all families')

if __name__=='__main__': main()
