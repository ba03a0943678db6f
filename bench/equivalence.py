"Is training in a precision as good as in float32? Differences over seeds, two one-sided tests, and their picture"
import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

margin = .5 # of the standard deviation of float32 over the seeds
level = .05 # of the two one-sided tests, and what is outside of an interval

names = { # (loop, precision) -> what it is called
    ('fastai','fp32, nudged'):        'float32, nudged',
    ('ours','bf16'):                  'to_bf16()',
    ('ours','bf16, embeddings kept'): 'to_bf16(keep=nn.Embedding)',
    ('ours','autocast-bf16'):         'to_native_bf16()',
    ('fastai','autocast-bf16'):       "fastai's to_bf16()",
    ('ours','fp16'):                  'to_fp16()',
    ('ours','autocast-fp16'):         'to_native_fp16()',
    ('fastai','autocast-fp16'):       "fastai's to_fp16()",
    ('ours','fp8-tensorwise'):        'to_fp8()'}

panels = [names['fastai','fp32, nudged']],['to_bf16()','to_bf16(keep=nn.Embedding)'],\
         ['to_native_bf16()',"fastai's to_bf16()"],['to_fp16()'],['to_native_fp16()',"fastai's to_fp16()"],['to_fp8()']

def difference(x, base):
    """Of the values `x` to those of float32 for the same seeds, in units of the latter's standard deviation

    Its mean, the interval of 95 %, and `p`, the larger one of two one-sided t tests that it is within `margin`."""
    d = ((x-base)/base.std()).dropna()
    n,error = len(d),d.std()/len(d)**.5
    half = stats.t.ppf(1-level/2, n-1)*error
    p = max(stats.ttest_1samp(d, end, alternative=side).pvalue for end,side in ((-margin,'greater'), (margin,'less')))
    return dict(seeds=n, difference=d.mean(), low=d.mean()-half, high=d.mean()+half, p=p)

def verdict(o):
    if o.failed:   return f'{o.failed:.0f} failed'
    if o.p<level:  return 'equivalent'
    return 'higher' if o.low>0 else 'lower' if o.high<0 else 'unclear'

def compare(df, metric='loss'):
    "A row for each task and precision: the mean of `metric`, float32's with its standard deviation, and `difference`"
    values = df[df.metric==metric].set_index(['case','size','loop','precision']).value.unstack([2,3])
    bad = df[df.metric.isin(['error','oom'])].groupby(['case','loop','precision']).size()
    rows = []
    for case in values.index.unique('case'):
        o = values.loc[case]
        base = o['fastai','fp32']
        for key,name in names.items():
            failed = bad.get((case,*key), 0)
            if key not in o or o[key].count()<2:
                if failed: rows.append(dict(task=case, precision=name, failed=failed))
                continue
            rows.append(dict(task=case, precision=name, float32=base.mean(), sd=base.std(), mean=o[key].mean(),
                             **difference(o[key], base), failed=failed))
    res = pd.DataFrame(rows)
    res['verdict'] = res.apply(verdict, axis=1)
    return res.set_index(['task','precision'])

def forest(res, tasks=None):
    "Differences with their intervals, a panel for each kind of precision; the margin is shaded"
    tasks = [*(tasks or res.index.unique('task'))]
    fig,axs = plt.subplots(2, 3, figsize=(9,6), sharex=True, sharey=True, layout='constrained')
    for ax,shown in zip(axs.flat, panels):
        ax.axvspan(-margin, margin, color='tab:green', alpha=.15, lw=0)
        ax.axvline(0, color='gray', lw=1)
        for i,name in enumerate(shown):
            o = res[res.index.get_level_values('precision')==name].droplevel('precision').reindex(tasks)
            y = [k+.25*i for k in range(len(tasks))]
            ends = [o.difference-o.low,o.high-o.difference]
            ax.errorbar(o.difference, y, xerr=ends, fmt='o', ms=4, color=f'C{i}', label=name)
        ax.legend(loc='upper left', fontsize=8)
    axs[0,0].set_yticks(range(len(tasks)), tasks)
    axs[0,0].invert_yaxis()
    fig.supxlabel("difference of the final validation loss, in standard deviations of float32's")
    return fig
