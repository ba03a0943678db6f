"""How large a batch is worth having: what the noise of batches says, and how many epochs a goal takes

Three tasks of quality.py train in bfloat16 with batches of four sizes, until the validation loss is as low as the goal,
which each of the sizes reaches: each with the best of some learning rates, as the median of some seeds. After each of
the first epochs `batch_noise` says up to how many items larger batches save steps. Where batches are smaller, twice the
size should take about the same epochs, and half the steps; where they are larger, it takes about twice the epochs."""
import warnings

from fastai.basics import *

import quality
from common import *
from loops import Variant
from mp_callbacks.learner.looks import batch_noise

sizes = 8,32,128,256
goals = dict(mlp=.3, gpt=2.7, diabetes=.55) # validation losses
rates = 1e-3,3e-3,1e-2
most_epochs = 40

def learner(name, bs):
    "A learner of the task, with batches of `bs` items"
    make,dev = quality.tasks[name].learner,torch.device('cpu')
    plain = quality.loaders
    try:
        quality.loaders = lambda train, valid, _, dev: plain(train, valid, bs, dev)
        return make(dev).to_bf16()
    finally: quality.loaders = plain

def epochs_to(name, bs, lr, seed, epochs):
    "How many epochs the goal takes; inf if it isn't reached"
    torch.manual_seed(seed)
    learn = learner(name, bs)
    with learn.no_bar(),learn.no_logging():
        for i in range(epochs):
            learn.fit(1, lr, reset_opt=False)
            if learn.recorder.values[-1][0]<=goals[name]: return i+1
    return math.inf

def said(name, bs, epochs, seed=0):
    "Rows of (metric, value, note): what the noise says after some epochs"
    torch.manual_seed(seed)
    learn = learner(name, bs)
    for i in range(epochs+1):
        if i:
            with learn.no_bar(),learn.no_logging(): learn.fit(1, rates[1], reset_opt=False)
        with learn.no_bar(): worth = batch_noise(learn, 32).worth
        if worth is None: yield f'worth after {i}',0,''
        else: yield f'worth after {i}',worth[1],f'{worth[0]:.0f} to {worth[2]:.0f}'

def run(name, seeds, epochs):
    "Rows of (variant, seed, metric, value, note)"
    for bs in sizes:
        variant = Variant('ours','',f'{bs}')
        for lr in rates:
            for seed in range(seeds): yield variant,seed,f'epochs at {lr:g}',epochs_to(name, bs, lr, seed, epochs),''
    for bs in (32,128):
        for row in said(name, bs, min(epochs, 3)): yield Variant('ours','',f'{bs}'),0,*row

def table(df):
    "A row for each task and size of batches: epochs to the goal, and what the noise says"
    rows = {}
    for (task,bs),o in df.groupby(['case','precision'], sort=False):
        epochs = o[o.metric.str.startswith('epochs')].groupby('metric').value.median()
        worth = o[o.metric.str.startswith('worth')].set_index('metric')
        row = {'epochs to the goal':epochs.min(), 'learning rate':epochs.idxmin().removeprefix('epochs at ')}
        row |= {k:f'{v.value:.0f} ({v.note})' if v.value else 'not clear' for k,v in worth.iterrows()}
        rows[task,bs] = row
    res = pd.DataFrame(rows).T.fillna('')
    return res.rename_axis(['task','batch size'])

def main():
    p = arguments(__doc__)
    p.add_argument('--only', nargs='*', choices=goals, default=[*goals], help='tasks [all]')
    p.add_argument('--seeds', type=int, default=3, help='how many seeds [3]')
    torch.set_num_threads(1)
    args,_,results = start(p, 'batch_size_cpu')
    warnings.filterwarnings('ignore')
    seeds,epochs = (1,1) if args.tiny else (args.seeds,most_epochs)
    for name in args.only: results.measure('batch size', name, '', run(name, seeds, epochs))
    results.write('How large a batch is worth having', [markdown(table(results.read()))], of='all seeds')

if __name__=='__main__': main()
