"Is training in a precision as good as in float32? Differences over seeds, two one-sided tests, and their picture"
import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

margin = .5 # percent of the mean in float32
level = .05 # of the two one-sided tests, and what is outside of an interval

float32 = 'fastai','fp32'
precisions = { # (loop, precision) -> what it is called
    ('fastai','fp32, nudged'):        'float32, nudged',
    ('ours','bf16'):                  'to_bf16()',
    ('ours','bf16, embeddings kept'): 'to_bf16(keep=nn.Embedding)',
    ('ours','autocast-bf16'):         'to_native_bf16()',
    ('ours','fp16'):                  'to_fp16()',
    ('ours','autocast-fp16'):         'to_native_fp16()',
    ('ours','fp8-tensorwise'):        'to_fp8()'}
controls = {('control',o):o for o in ( # float32 with a defect that the method should find
    'no master weights', 'every tenth step lost', '30 % gradient noise', 'learning rate × 1.1', 'learning rate × 1.3',
    'float16 without loss scale')}
names = precisions|controls

def difference(x, base, unit):
    """Of the values `x` and `base` for the same seeds, in percent of `unit`

    Its mean, the interval of 95 %, and `p`, the larger one of two one-sided t tests that it is within `margin`."""
    d = (100*(x-base)/unit).dropna()
    half = stats.t.ppf(1-level/2, len(d)-1)*d.std()/len(d)**.5
    p = max(stats.ttest_1samp(d, end, alternative=side).pvalue for end,side in ((-margin,'greater'), (margin,'less')))
    return dict(seeds=len(d), difference=d.mean(), low=d.mean()-half, high=d.mean()+half, p=p)

def verdict(o):
    "Only `higher` and `lower` say that something was found. `unclear` says that there are too few seeds."
    if o.failed:  return 'failed'
    if o.p<level: return 'equivalent'
    return 'higher' if o.low>0 else 'lower' if o.high<0 else 'unclear'

def compare(df, metric='loss', base=float32):
    """A row for each task and precision: the mean of `metric`, its `difference` from `base`, failures and the verdict

    Beside float32's mean, of which the differences are percents, its standard deviation over the seeds, and what
    the margin is in the unit of `metric`."""
    values = df[df.metric==metric].set_index(['case','size','loop','precision']).value.unstack([2,3])
    bad = df[df.metric.isin(['error','oom'])].groupby(['case','loop','precision']).size()
    rows = []
    for task in df.case.unique():
        o = values.loc[task].dropna(axis=1, how='all')
        if base not in o: continue
        mean = o[float32].mean()
        for key,name in names.items():
            row = dict(task=task, precision=name, float32=mean, sd=o[float32].std(), margin=margin/100*mean,
                       failed=bad.get((task,*key), 0))
            if key in o: row |= dict(mean=o[key].mean(), **difference(o[key], o[base], mean))
            if key in o or row['failed']: rows.append(row)
    res = pd.DataFrame(rows).set_index(['task','precision'])
    return res.assign(verdict=res.apply(verdict, axis=1))

panels = [['float32, nudged'], ['to_bf16()','to_bf16(keep=nn.Embedding)'], ['to_native_bf16()'],
          ['to_fp8()'], ['to_fp16()'], ['to_native_fp16()'], *[[o] for o in controls.values()]]

def forest(res, tasks=None):
    """Differences with their intervals, a panel for each kind of precision and each control, the margin shaded

    `tasks` are labels. Outside of the margin the axis is logarithmic."""
    found = res.index.unique('task')
    fig,axs = plt.subplots(4, 3, figsize=(9,10), sharex=True, sharey=True, layout='constrained')
    for ax,shown in zip(axs.flat, panels):
        ax.axvspan(-margin, margin, color='tab:green', alpha=.15, lw=0)
        ax.axvline(0, color='gray', lw=1)
        color = 'tab:red' if shown[0] in controls.values() else None
        for i,name in enumerate(shown):
            o = res[res.index.get_level_values('precision')==name].droplevel('precision').reindex(found)
            y = [k+.3*i for k in range(len(found))]
            ends = [o.difference-o.low,o.high-o.difference]
            ax.errorbar(o.difference, y, xerr=ends, fmt='o', ms=4, color=color or f'C{i}', label=name)
        ax.legend(loc='lower center', bbox_to_anchor=(.5,1), frameon=False)
    axs[0,0].set_xscale('symlog', linthresh=margin)
    ticks = [-10,-1,0,1,10]
    axs[0,0].set_xticks(ticks, [f'{o}'.replace('-', '−') for o in ticks])
    axs[0,0].set_yticks(range(len(found)), [(tasks or {}).get(o, o) for o in found])
    axs[0,0].invert_yaxis()
    fig.supxlabel('difference of the final validation loss, % of that in float32')
    return fig
