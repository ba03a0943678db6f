"Is training in a precision as good as in float32? Differences over seeds, two one-sided tests, and their picture"
import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

margin = .5 # of the standard deviation of float32 over the seeds
level = .05 # of the two one-sided tests, and what is outside of an interval

float32 = 'fastai','fp32'
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

def difference(x, base, sd):
    """Of the values `x` and `base` for the same seeds, in units of `sd`

    Its mean, the interval of 95 %, and `p`, the larger one of two one-sided t tests that it is within `margin`."""
    d = ((x-base)/sd).dropna()
    half = stats.t.ppf(1-level/2, len(d)-1)*d.std()/len(d)**.5
    p = max(stats.ttest_1samp(d, end, alternative=side).pvalue for end,side in ((-margin,'greater'), (margin,'less')))
    return dict(seeds=len(d), difference=d.mean(), low=d.mean()-half, high=d.mean()+half, p=p)

def verdict(o):
    if o.failed:  return 'failed'
    if o.p<level: return 'equivalent'
    return 'higher' if o.low>0 else 'lower' if o.high<0 else 'unclear'

def compare(df, metric='loss', base=float32):
    """A row for each task and precision: the mean of `metric`, its `difference` from `base`, failures and the verdict

    Beside float32's mean and standard deviation, which is the unit of the differences."""
    values = df[df.metric==metric].set_index(['case','size','loop','precision']).value.unstack([2,3])
    bad = df[df.metric.isin(['error','oom'])].groupby(['case','loop','precision']).size()
    rows = []
    for task in df.case.unique():
        o = values.loc[task].dropna(axis=1, how='all')
        if base not in o: continue
        sd = o[float32].std()
        for key,name in names.items():
            row = dict(task=task, precision=name, float32=o[float32].mean(), sd=sd, failed=bad.get((task,*key), 0))
            if key in o: row |= dict(mean=o[key].mean(), **difference(o[key], o[base], sd))
            if key in o or row['failed']: rows.append(row)
    res = pd.DataFrame(rows).set_index(['task','precision'])
    return res.assign(verdict=res.apply(verdict, axis=1))

panels = [['float32, nudged'], ['to_bf16()','to_bf16(keep=nn.Embedding)'], ['to_native_bf16()',"fastai's to_bf16()"],
          ['to_fp8()'],        ['to_fp16()'],                              ['to_native_fp16()',"fastai's to_fp16()"]]

def forest(res, tasks=None):
    "Differences with their intervals, a panel for each kind of precision, the margin shaded; `tasks` are labels"
    found = res.index.unique('task')
    fig,axs = plt.subplots(2, 3, figsize=(9,7), sharex=True, sharey=True, layout='constrained')
    for ax,shown in zip(axs.flat, panels):
        ax.axvspan(-margin, margin, color='tab:green', alpha=.15, lw=0)
        ax.axvline(0, color='gray', lw=1)
        for i,name in enumerate(shown):
            o = res.xs(name, level='precision').reindex(found)
            y = [k+.3*i for k in range(len(found))]
            ends = [o.difference-o.low,o.high-o.difference]
            ax.errorbar(o.difference, y, xerr=ends, fmt='o', ms=4, color=f'C{i}', label=name)
        ax.legend(loc='lower center', bbox_to_anchor=(.5,1), frameon=False)
    axs[0,0].set_yticks(range(len(found)), [(tasks or {}).get(o, o) for o in found])
    axs[0,0].invert_yaxis()
    fig.supxlabel("difference of the final validation loss, in standard deviations of float32's")
    return fig
