"""Does it learn as well? The statistics find what is known, the page has the figures of its csv, and no page advises
what the csv denies"""
import runpy

from learners import *
from test_figures import figures,results,text

eq = SimpleNamespace(**runpy.run_path(str(root/'bench/equivalence.py')))

def drawn(seed=0, n=12):
    "Losses in float32 with a mean of exactly 7, and standard noise, centered, for another precision"
    base,own = np.random.default_rng(seed).normal(size=(2,n))
    return pd.Series(base-base.mean()+7),pd.Series(own)

def compared(values, base, *more):
    "The row for bfloat16 with losses `values`, where those of float32 are `base`, and `more` rows of measurements"
    losses = {eq.float32:base, ('ours','bf16'):values}
    rows = [('a task',seed,*key,'loss',o) for key,x in losses.items() for seed,o in x.items()]
    df = pd.DataFrame([*rows,*more], columns=['case','size','loop','precision','metric','value'])
    return eq.compare(df).loc['a task','to_bf16()']

@pytest.mark.parametrize('percent,noise,expected', [
    (0, .2, 'equivalent'), (.3, .2, 'equivalent'), (-.3, .2, 'equivalent'), # a small difference is one, and equivalent
    (1, .2, 'higher'), (-1, .2, 'lower'), (0, 5, 'unclear')])
def test_verdicts(percent, noise, expected):
    base,own = drawn()
    res = compared(base+.07*(percent+noise*(own-own.mean())), base)
    assert (res.verdict,res.margin,res.seeds)==(expected,pytest.approx(.035),12)
    assert res.difference==pytest.approx(percent) and res.low<res.difference<res.high
    res = compared(base[1:], base, ('a task',0,'ours','bf16','error',0))
    assert (res.verdict,res.failed,res.seeds)==('failed',1,11) # the other seeds are compared

def share(percent, noise, *verdicts):
    "Of 200 precisions with this true difference, where pairs differ by `noise` percent besides, how many are called so"
    said = [eq.difference(base+.07*(percent+noise*own), base, 7) for base,own in map(drawn, range(200))]
    return np.mean([eq.verdict(SimpleNamespace(**o, failed=0)) in verdicts for o in said])

def test_level():
    "Where the difference is the margin, about one in twenty is called equivalent"
    assert .02<share(eq.margin, .2, 'equivalent')<.08

@pytest.mark.slow
@pytest.mark.parametrize('noise', [.2,.4])
def test_power(noise):
    "A known effect is found, and none is not"
    assert share(1, noise, 'higher')>.95 and share(-1, noise, 'lower')>.95
    assert share(0, noise, 'equivalent')>.9 and share(0, noise, 'higher', 'lower')<.05

df = pd.read_csv(results/'quality_cpu.csv', comment='#', keep_default_na=False)
labels = {'MLP':'mlp', 'wine':'wine', 'tabular':'cancer', 'tabular with embeddings':'diabetes', 'GPT':'gpt'}
calls,no_scale = [o for o in eq.names.values() if o.startswith('to_')],'float16 without loss scale'
defects = [o for o in eq.controls.values() if o!=no_scale]

def of(names, metric='loss', base=eq.float32):
    res = eq.compare(df, metric, base)
    return res[res.index.get_level_values('precision').isin([*names])]

def equivalent(res): return [(res.verdict=='equivalent').sum(),len(res)]
def found(names): return [of(names).verdict.isin(['higher','lower']).sum(),len(of(names))]
def largest(o): return o.abs().max().max()

def pairs():
    "`to_bf16` and `to_fp16` beside the native call in the same dtype"
    return pd.concat([of([o for o in calls if dtype in o and 'native' not in o], base=('ours',f'autocast-{dtype}'))
                      for dtype in ('bf16','fp16')])

def changed_by_float32():
    "Of a loss, if it is computed in float32 from the same weights: the most, in percent of the mean"
    values = df[df.loop=='ours'].set_index(['case','size','precision','metric']).value.unstack()
    off = (values['loss in float32']-values.loss).abs().groupby('case').max()
    return (100*off/of(calls).float32.groupby('task').first()).max()

def skipped():
    "Steps in a run of ours: the most with each call"
    assert not df.metric.isin(['error','oom']).any() # "No run failed"
    skips = df[(df.metric=='skipped') & (df.loop=='ours')]
    assert {*skips[skips.value>0].case}=={'diabetes'} # "in no other"
    return skips.groupby('precision').value.max()

def n_seeds(): return df[df.metric=='loss'].groupby(['case','loop','precision']).size().unique().item()

claims = [ # page, the figures in a sentence of it, and what the csv says
    ('quality', r'less than (.\.\d+) % of float32', lambda: [eq.margin]),
    ('quality', r'The rule finds (\d+) of (\d+) defects of float32', lambda: found(defects)),
    ('quality', r'is found in (\d+) of (\d+) tasks', lambda: found([no_scale])),
    ('quality', r'With (\d+) seeds, (\d+) of (\d+) comparisons', lambda: [n_seeds(),*equivalent(of(calls))]),
    ('quality', r'is at most (.\.\d+) %, and no interval reaches beyond (.\.\d+) %',
        lambda: [largest(of(calls).difference),largest(of(calls)[['low','high']])]),
    ('quality', r'skipped at most (\d+) steps of a run, the other calls at most (\d+)',
        lambda: [skipped()['autocast-fp16'],skipped().drop('autocast-fp16').max()]),
    ('quality', r'the same loss up to (.\.\d+) %', lambda: [changed_by_float32()]),
    ('quality', r'moves the mean loss by at most (.\.\d+) %', lambda: [largest(of(['float32, nudged']).difference)]),
    ('quality', r'In (\d+) of (\d+) pairs', lambda: [(pairs().high==pairs().low).sum(),len(pairs())]),
    ('quality', r'same\. (\d+) of (\d+) are equivalent', lambda: equivalent(pairs())),
    ('which_precision', r'in small models: (\d+) of (\d+) pairs', lambda: equivalent(pairs()))]

@pytest.mark.parametrize('page,pattern,values', claims, ids=[f'{o[0]}-{i}' for i,o in enumerate(claims)])
def test_sentences(page, pattern, values):
    for said,value in zip(figures(pattern, text(page)), values(), strict=True):
        assert float(said)==round(float(value), len(said.partition('.')[2]))

def test_exceptions():
    "The page names the comparisons that aren't equivalent, and no other: 'unclear: `to_fp16()` (MLP); and lower: ...'"
    said,res = figures(r'The others are (.*?)\. ', text('quality'))[0],of(calls)
    found = {(labels[task],call,verdict) for verdict,part in re.findall(r'(\w+): ([^;]*)', said)
             for call,where in re.findall(r'`([^`]+)` \(([^()]+)\)', part) for task in where.split(', ')}
    assert found=={(*at,o) for at,o in res.verdict.items() if o!='equivalent'}
    assert 'higher' not in {*res.verdict} # "In none does"

def worse(call, base):
    "Tasks in which `call` isn't equivalent to `base`, nor better"
    res = eq.compare(df, base=base).xs(call, level='precision')
    assert len(res)>=2
    return [*res.index[~res.verdict.isin(['equivalent','lower'])]]

kept = 'ours','bf16, embeddings kept'

@pytest.mark.parametrize('page,sentence,call,base,known', [
    ('which_precision', 'computes in bfloat16, use `to_bf16()`', 'to_bf16()', eq.float32, []),
    ('index', 'which only emulates bfloat16 | `to_fp16()` |', 'to_fp16()', eq.float32, ['mlp']), # unclear
    ('which_precision', 'no row of this table applies, use `to_bf16()`', 'to_bf16()', ('ours','autocast-bf16'), []),
    ('quality', 'in the tabular model with embeddings, and the same as float32', 'to_fp16()', ('ours','autocast-fp16'),
        ['diabetes']),
    ('tested_models', 'use `to_bf16(keep=nn.Embedding)` or `to_native_bf16()`', eq.names[kept], ('ours','bf16'), []),
    ('keep', '| embeddings | not needed', 'to_bf16()', kept, [])])
def test_advice(page, sentence, call, base, known):
    "The page says so, and `call` isn't as good as `base` in the `known` tasks only, of which the quality page tells"
    assert sentence in text(page)
    assert worse(call, base)==known
