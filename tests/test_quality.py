"""Does it learn as well? The statistics find what is known, the page has the figures of its csv, and no page advises
what the csv denies"""
import runpy
from types import SimpleNamespace

import numpy as np,pandas as pd,pytest
from scipy import stats
from test_figures import figures,results,root,text

eq = SimpleNamespace(**runpy.run_path(str(root/'bench/equivalence.py')))

# --- The statistics

def drawn(seed=0, n=24):
    "Losses in float32 with a standard deviation of exactly 2, and noise of another precision"
    base,own = np.random.default_rng(seed).normal(size=(2,n))
    return pd.Series(2*base/base.std(ddof=1)+7),pd.Series(own)

def compared(values, base, *more):
    "The row for bfloat16 with losses `values`, where those of float32 are `base`; `more` are rows of the csv file"
    losses = {eq.float32:base, ('ours','bf16'):values}
    rows = [('a task',seed,*key,'loss',o) for key,x in losses.items() for seed,o in x.items()]
    df = pd.DataFrame([*rows,*more], columns=['case','size','loop','precision','metric','value'])
    return eq.compare(df).loc['a task','to_bf16()']

@pytest.mark.parametrize('offset,noise,expected', [
    (0, .2, 'equivalent'), (.4, .2, 'equivalent'), (-.4, .2, 'equivalent'), # a small difference is one, and equivalent
    (2, .2, 'higher'), (-2, .2, 'lower'), (0, 9, 'unclear')])
def test_verdicts(offset, noise, expected):
    base,own = drawn()
    res = compared(base+offset+noise*(own-own.mean()), base)
    assert (res.verdict,res.sd,res.seeds)==(expected,pytest.approx(2),24)
    assert res.difference==pytest.approx(offset/2) and res.low<res.difference<res.high

def test_failed_run():
    "The other seeds are compared, and the failure counts"
    base,_ = drawn()
    res = compared(1.01*base[1:], base, ('a task', 0, 'ours', 'bf16', 'error', 0))
    assert (res.verdict,res.failed,res.seeds)==('failed',1,23)

def many(offset):
    "What `difference` says of 400 precisions that are `offset` off"
    return [eq.difference(base+offset+own, base, 2) for base,own in map(drawn, range(400))]

def test_level():
    "Where the difference is the margin, about one in twenty is called equivalent"
    assert .02<np.mean([o['p']<eq.level for o in many(2*eq.margin)])<.08

def test_interval():
    "It contains the true difference nineteen times of twenty"
    assert .92<np.mean([o['low']<0<o['high'] for o in many(0)])<.98

# --- The page and the advice

df = pd.read_csv(results/'quality_cpu.csv', comment='#', keep_default_na=False)

def of_ours(metric='loss', df=df):
    res = eq.compare(df, metric)
    return res[res.index.get_level_values('precision').str.startswith('to_')]

def equivalent(res): return [(res.verdict=='equivalent').sum(),len(res)]

def pairs():
    "Copies beside autocast in the same dtype"
    calls = {'to_bf16()':'bf16', 'to_bf16(keep=nn.Embedding)':'bf16', 'to_fp16()':'fp16'}
    return pd.concat([eq.compare(df, base=('ours',f'autocast-{o}')).xs(call, level=1, drop_level=False)
                      for call,o in calls.items()])

def missed_zero():
    res = of_ours()
    missed = res[(res.low>0) | (res.high<0)]
    assert (missed.high<0).all() # "all on the side of lower losses"
    return [.05*len(res),len(res),len(missed)]

def with_margin(margin):
    "How many are equivalent with a smaller margin; the others are those that the page names"
    res = of_ours()
    half = (res.high-res.low)/2*stats.t.ppf(.95, res.seeds-1)/stats.t.ppf(.975, res.seeds-1) # of intervals of 90 %
    other = res[res.difference.abs()+half>=margin]
    assert {*other.index}<={('lstm',o) for _,o in res.index}|{('gpt','to_fp8()'),('vit','to_fp8()')}
    return [margin,len(res)-len(other),len(other)]

def largest(res): return [res.difference.abs().max()]

def changed_by_float32():
    "Of a loss, if it is computed in float32 from the same weights: the most, in units of the standard deviation"
    values = df.set_index(['case','size','loop','precision','metric']).value.unstack()
    off = (values['loss in float32']-values.loss).abs().groupby('case').max()
    return (off/of_ours().sd.groupby('task').first()).max()

def failures():
    "fastai's, all of the same kind: of ours there is none"
    bad = df[df.metric=='error']
    assert {*zip(bad.case, bad.loop, bad.precision)}=={('lstm','fastai','autocast-fp16')}
    return [len(bad)]

def most_skipped():
    "Steps in a run of ours under autocast to float16; the other calls skip none"
    skips = df[(df.metric=='skipped') & (df.loop=='ours')].groupby('precision').value.max()
    assert (skips.drop('autocast-fp16')==0).all()
    return [skips['autocast-fp16']]

claims = [ # page, the figures in a sentence of it, and what the csv says
    ('quality', r'With (\d+) seeds, (\d+) of (\d+) comparisons', lambda: [df['size'].nunique(),*equivalent(of_ours())]),
    ('index', r'(\d+) of (\d+) comparisons are equivalent, over (\d+) seeds',
        lambda: [*equivalent(of_ours()),df['size'].nunique()]),
    ('quality', r'is at most (.\.\d+) SD, that of the AWD-LSTM in bfloat16', lambda: largest(of_ours().loc[['lstm']])),
    ('quality', r'is at most (.\.\d+) SD', lambda: largest(of_ours())),
    ('quality', r'reaches beyond (.\.\d+) SD', lambda: [of_ours()[['low','high']].abs().max().max()]),
    ('quality', r'By their metrics (\d+) of (\d+)', lambda: equivalent(of_ours('metric'))),
    ('quality', r'the same loss up to (.\.\d+) SD, and also (\d+) of (\d+)',
        lambda: [changed_by_float32(),*equivalent(of_ours('loss in float32'))]),
    ('quality', r'by chance, (\d+) of (\d+)\. (\d+) do', missed_zero),
    ('quality', r'with (.\.\d+) SD, (\d+) are equivalent, and the other (\d+)', lambda: with_margin(.3)),
    ('quality', r'makes the AWD-LSTM differ by (.\.\d+) SD',
        lambda: [eq.compare(df).loc['lstm','float32, nudged'].difference]),
    ('quality', r'All (\d+) runs of its', failures),
    ('quality', r'skipped at most (\d+) steps of a run, the other calls none', most_skipped),
    ('quality', r'In (\d+) of (\d+) pairs', lambda: [(pairs().high==pairs().low).sum(),len(pairs())]),
    ('quality', r'same\. (\d+) of (\d+) are equivalent', lambda: equivalent(pairs())),
    ('which_precision', r'in small models: (\d+) of (\d+) pairs', lambda: equivalent(pairs()))]

@pytest.mark.parametrize('page,pattern,values', claims, ids=[f'{o[0]}-{i}' for i,o in enumerate(claims)])
def test_sentences(page, pattern, values):
    for found,value in zip(figures(pattern, text(page)), values(), strict=True):
        assert float(found)==round(float(value), len(found.partition('.')[2]))

def worse(call, base=eq.float32, df=df):
    "Tasks in which `call` isn't equivalent to `base`, nor better"
    res = eq.compare(df, base=base).xs(call, level='precision')
    assert len(res)>=3
    return [*res.index[~res.verdict.isin(['equivalent','lower'])]]

kept = 'ours','bf16, embeddings kept'

@pytest.mark.parametrize('page,sentence,call,base', [
    ('which_precision', 'computes in bfloat16, use `to_bf16()`', 'to_bf16()', eq.float32),
    ('index', '| `to_fp16()` | these only emulate bfloat16', 'to_fp16()', eq.float32),
    ('which_precision', 'no row of this table applies, use `to_bf16()`', 'to_bf16()', ('ours','autocast-bf16')),
    ('which_precision', 'no row of this table applies, use `to_bf16()`', 'to_fp16()', ('ours','autocast-fp16')),
    ('tested_models', 'use `to_bf16(keep=nn.Embedding)` or `to_native_bf16()`', eq.names[kept], ('ours','bf16')),
    ('keep', '| embeddings | not needed', 'to_bf16()', kept)])
def test_advice(page, sentence, call, base):
    "The page advises `call`, and no task is worse with it than with `base`"
    assert sentence in text(page)
    assert worse(call, base)==[]

def test_bad_advice():
    "A call with which a task is worse is found"
    at = (df.case=='gpt') & (df.precision=='bf16') & (df.metric=='loss')
    assert worse('to_bf16()', df=df.assign(value=df.value+at))==['gpt']
