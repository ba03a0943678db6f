"""Pages say what bench/results and the package say: the figures in sentences, and the tables that cells show

`test_outputs` and `test_notebooks` run the cells that show tables. No other sentence has milliseconds."""
from fastcore.nbio import read_nb
from learners import *

results = root/'bench/results'
parts = 'tutorials','howto','explanations' # whose pages are known by their names, and modules by folder and name
pages = {o.stem if o.parent.name in parts else o.relative_to(root/'nbs').with_suffix('').as_posix(): o
         for o in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts}

def medians(name, metric='step_ms', part=None):
    "Median by case, size, loop, optimizer and precision"
    df = pd.read_csv(results/f'{name}.csv', comment='#', keep_default_na=False)
    df = df[(df.metric==metric) & (True if part is None else df.part==part)]
    return df.groupby(['case','size','loop','opt','precision']).value.median()

def one(ms, *key):
    "That of `medians` with this case, loop, optimizer and precision, of whatever size"
    return ms.xs(key, level=['case','loop','opt','precision']).iloc[0]

def text(name):
    "What readers see of a page but code and outputs: its Markdown and its alternative texts"
    if name.endswith('.md'): return (root/name).read_text(encoding='utf-8')
    cells = read_nb(pages[name]).cells
    alts = [o for c in cells if c.cell_type=='code' for o in c.source.splitlines() if o.startswith('#| fig-alt:')]
    return '\n'.join([o.source for o in cells if o.cell_type=='markdown']+alts)

def over_float32(name, cases, call=('fused','bf16'), part=None, metric='step_ms'):
    "What `call` of ours takes in each of `cases`, over fastai's float32"
    ms = medians(name, metric, part)
    return [one(ms, o, 'ours', *call)/one(ms, o, 'fastai', 'fused', 'fp32') for o in cases]

cpu,on_gpu = ['mlp','conv','vit','gpt'],['vit-base','gpt-124M','resnet50','mlp-8x2048']
halves = ('fused','bf16'),('fused','fp16'),('fused','autocast-bf16')
def gpu(metric, cases): return [x for o in halves for x in over_float32('gpu', cases, o, 'train', metric)]
def spread(xs): return [100*min(xs),100*max(xs)]

def step_cost(*loops):
    "Milliseconds of a step of `loops` beside forward and backward, with many small tensors"
    ms = medians('step_cpu')['1000 tensors',10**5]
    return [ms[o]-ms['bare','',o[-1] if o[-1]=='bf16' else 'fp32'] for o in loops]

def batches(case, *sizes):
    ms = medians('gpu_a76470f', part='mpx')[case]
    return [ms[o][full]/ms[o][bf16] for o in sizes]

def less(part, case, loop, *others, metric='step_ms'):
    "Percent that `loop` takes less than each of `others`, on a GPU"
    ms = medians('gpu', metric, part)
    return [100-100*one(ms, case, *loop)/one(ms, case, *o) for o in others]

bf16,native,autocast = ('ours','fused','bf16'),('ours','fused','autocast-bf16'),('hand','fused','autocast-bf16')
by_hand,fastais,full = ('hand','fused','bf16'),('fastai','fused','autocast-bf16'),('fastai','fused','fp32')
def kernels(*loops): return [one(medians('host_cuda', 'kernels'), 'vit', *o) for o in loops]

fp8 = 'fp8-tensorwise'
def times(loop, precision, metric='step_ms', of='ours', base='bf16'):
    "How many times as much a GPT takes, in the part where some are compiled"
    ms = medians('gpu', metric, 'compiled')
    return one(ms, 'gpt-124M', loop, 'fused', precision)/one(ms, 'gpt-124M', of, 'fused', base)

def planned(page):
    "Peaks of `to_bf16` over those of `to_native_bf16`, in the plans that are saved in `page`"
    texts = [''.join(o.data.get('text/plain', '')) for c in read_nb(pages[page]).cells
             for o in c.get('outputs', []) if 'data' in o]
    def _peak(name, s): return float(re.search(rf'^{name} .* (\S+)$', s, re.M)[1])
    return [_peak('to_bf16', o)/_peak('to_native_bf16', o) for o in texts if o.startswith('MB with')]

def extras(part, what, loop='ours', unit=1, **of):
    "Smallest and largest of `what` of a model: microseconds, or with the arguments of `ratios` in `of`, a ratio"
    sys.path.insert(0, str(root/'bench'))
    from extras import ratios
    df = pd.read_csv(results/'extras_cpu.csv', comment='#', keep_default_na=False)
    cases = df[(df.part==part) & (df.metric!='done')].groupby('case')
    if of: found = [v for _,o in cases for (l,_),v in ratios(o, what, **of).items() if l==loop]
    else: found = [x for _,o in cases for x in o[o.metric==what].groupby('precision').value.median()]
    return [unit*min(found),unit*max(found)]
plain = dict(other_loop='tensors=None') # steps without a recorder of each parameter

claims = [ # page, the figures in a sentence of it, and where they are from
    ('results', r'an MLP takes ([\d.]+) of the time of float32, a convolutional net ([\d.]+), and two small '
                r'transformers take (.\.\d+) and (.\.\d+)', lambda: over_float32('train_cpu', cpu)),
    ('results', r'Time is (.\.\d+) for an MLP, (.\.\d+) for a ConvNet, (.\.\d+) for a ViT and (.\.\d+) for a GPT',
        lambda: over_float32('train_cpu', cpu)),
    ('results', r'took (\d+) to (\d+) % of the time of float32', lambda: spread(gpu('step_ms', on_gpu[:3]))),
    ('results', r'and (\d+) to (\d+) % less memory. TensorFloat',
        lambda: spread([1-o for o in gpu('peak_mb', on_gpu[:3])])),
    ('results', r'takes only (\d+) ms in float32',
        lambda: [one(medians('gpu', part='train'), 'mlp-8x2048', 'fastai', 'fused', 'fp32')]),
    ('results', r"took (\d+) % longer than fastai's autocast for the ViT, (\d+) % for the GPT, (\d+) % for the "
                r'ResNet, and (\d+) % for the MLP',
        lambda: [-x for o in on_gpu for x in less('train', o, bf16, fastais)]),
    ('results', r'the ViT needed (\d+) % less memory',
        lambda: less('train', 'vit-base', bf16, fastais, metric='peak_mb')),
    ('results', r"own `Adam` in place of the fused `AdamW`, fastai's step of the ViT took ([\d.]+) times as long",
        lambda: [100/(100-less('train', 'vit-base', fastais, ('fastai','fastai','autocast-bf16'))[0])]),
    ('results', r'was ([\d.]+) times as fast with `to_bf16` as in float32',
        lambda: [100/(100-less('mpx', 'vit-base', bf16, full)[0])]),
    ('results', r'took (\d+) % less time than autocast in a plain loop, (\d+) % less than `to_native_bf16`, and',
        lambda: less('mpx', 'vit-base', bf16, autocast, native)),
    ('results', r'with 256 images needs ([\d.]+) times less memory than in float32',
        lambda: [100/(100-less('mpx', 'vit-base', bf16, full, metric='peak_mb')[0])]),
    ('results', r'Against TF32 ours was ([\d.]+) times as fast',
        lambda: [100/(100-less('mpx', 'vit-base', bf16, ('hand','fused','tf32'))[0])]),
    ('less_memory', r'the two need up to (\d+) % more there', lambda: [100*max(planned('less_memory'))-100]),
    ('results', r'and (\d+) % less memory than both', lambda: less('mpx', 'vit-base', bf16, native, metric='peak_mb')),
    ('results', r"a step took (\d+) kernels. A loop by hand with weights in half precision took (\d+), fastai's "
                r'autocast (\d+) and `to_native_bf16` (\d+)', lambda: kernels(bf16, by_hand, fastais, native)),
    ('fp8', r'Compiled, `to_fp8` took ([\d.]+) times the time of `to_bf16` and',
        lambda: [times('compiled', fp8, of='compiled')]),
    ('fp8', r'and (\d+) % less memory. Not compiled', lambda: [100-100*times('compiled', fp8, 'peak_mb', 'compiled')]),
    ('fp8', r'Not compiled, it took ([\d.]+) times', lambda: [times('ours', fp8)]),
    ('fast_on_a_gpu', r'Compiled, it took ([\d.]+) of its time with `to_native_bf16\(\)`, ([\d.]+) with `to_bf16\(\)` '
                      r'and ([\d.]+)', lambda: [times('compiled', o, base=o) for o in ('autocast-bf16','bf16','fp16')]),
    ('troubleshooting', r'rises from ([\d.]+) at 64 images to ([\d.]+) at 1024',
        lambda: batches('vit-256-800', 64, 1024)),
    ('results', r'ViT-base rises from ([\d.]+) at 16 images to ([\d.]+) at 256', lambda: batches('vit-base', 16, 256)),
    ('results', r'a ViT with 256 features from ([\d.]+) at 64 images to ([\d.]+) at 1024',
        lambda: batches('vit-256-800', 64, 1024)),
    ('learner/checkup', r"took ([\d.]+) ms with fastai's `Adam` and ([\d.]+) ms with the fused `AdamW` for a ViT, "
                    r'([\d.]+) and ([\d.]+) ms for a GPT, ([\d.]+) and ([\d.]+) ms for a ResNet',
        lambda: [one(medians('gpu', part='train'), o, 'ours', opt, 'bf16')
                 for o in on_gpu[:3] for opt in ('fastai','fused')]),
    ('core/grads', r"was ([\d.]+) to ([\d.]+) microseconds a batch, ([\d.]+) to ([\d.]+) % of the host's",
        lambda: [*extras('search', 'search_us'),*extras('search', 'search_us', unit=100, other_metric='step_us')]),
    ('core/grads', r'This took (\d+) to (\d+) microseconds', lambda: extras('search', 'all_us')),
    ('learner/recorder', r'it took ([\d.]+) to ([\d.]+) times as long as another step. .* all steps together took '
                    r'([\d.]+) to ([\d.]+) times as long as without',
        lambda: [*extras('tensors', 'step_us', 'tensors=1', **plain),
                 *extras('tensors', 'step_us', 'tensors=100', **plain)]),
    ('results', r'With 1000 tensors float32 takes (\d+) ms, autocast of fastai (\d+), of Lightning (\d+), ours (\d+) '
                r'and to_bf16 (\d+)',
        lambda: step_cost(full, fastais, ('lightning','fused','autocast-bf16'), native, bf16))]

def test_first_minute():
    "CONTRIBUTING says how long its commands took, and on which machine"
    file = results/'first_minute_cpu.csv'
    took = [*pd.read_csv(file, comment='#').query("metric=='s'").value] # .venv/demo, demo, .venv/ready, test
    machine,cores,*_ = file.read_text(encoding='utf-8').splitlines()[0].split(' | ')[2].split(', ')
    said = (f'took {sum(took[:2]):.0f} s and then `make test` {sum(took[2:]):.0f} s, downloads included, '
            f'on an {machine} with {cores}')
    assert said in (root/'CONTRIBUTING.md').read_text(encoding='utf-8')

def figures(pattern, s):
    found = re.search(pattern, s)
    assert found, f'There is no sentence {pattern!r} any more'
    return found.groups()

@pytest.mark.parametrize('page,pattern,values', claims, ids=[f'{o[0]}-{i}' for i,o in enumerate(claims)])
def test_figures(page, pattern, values):
    shown,values = figures(pattern, text(page)),values()
    assert shown==tuple(f'{v:.{len(o.partition(".")[2])}f}' for o,v in zip(shown, values, strict=True))

@pytest.mark.parametrize('page', [*pages, 'README.md', 'bench/README.md'])
def test_no_other_times(page):
    "No sentence has milliseconds that aren't tested above, but for lines that a report may have, as quotations"
    s = text(page)
    if page=='learner/checkup': s = re.sub('(?m)^> .*$', '', s)
    for _,pattern,_ in [o for o in claims if o[0]==page]: s = re.sub(pattern, '', s)
    assert re.findall(r'(?<![\w.])\d[\d.,]* ?(?:ms|milliseconds)\b', s)==[]

# Cells that measure show another machine's numbers after each run
measures = re.compile(r'perf_counter|process_time|StepByStep|timeit|measure_precision')
about_speed = re.compile(r'\b(faster|slower|(less|half the) time|(twice|half) as fast|times as (fast|long))\b')

@pytest.mark.parametrize('page', pages)
def test_no_speed_beside_a_measurement(page):
    "Neither the text before and after a cell that measures, nor its alternative text, says which is faster"
    found = [o for o in read_nb(pages[page]).cells if not re.search(r'#\| *(hide|export)', o.source)]
    for i,c in enumerate(found):
        if c.cell_type!='code' or not measures.search(c.source): continue
        alt = [o for o in c.source.splitlines() if o.startswith('#| fig-alt:')]
        near = [o.source.split('\n\n')[k] for o,k in zip(found[i-1:i+2:2], (-1,0)) if o.cell_type=='markdown']
        assert [o for o in alt+near if about_speed.search(o)]==[], c.id

def test_one_machine():
    "What this CPU does in bfloat16 is the same in both tables of the page: native, and then at most twice as long"
    cells = {o.id:o for o in read_nb(pages['which_precision']).cells}
    support,times = (''.join(cells[o].outputs[0].data['text/plain']) for o in ('c01cfc8e','ffb13748'))
    how = re.search(r'^cpu +native +(\w+)', support, re.M)[1]
    took = {k:float(v) for k,v in re.findall(r'(to_\w+) .* ([\d.]+)$', times, re.M)}
    assert (took['to_bf16']<=2*took['to_fp32'])==(how=='native')
