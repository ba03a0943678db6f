"""Log loss, gradient norm, loss scale and skipped steps of each step to CSV, TensorBoard and Weights & Biases

    pip install tensorboard wandb

Writes to `steps.csv` and to the folders `runs` and `wandb`, without an account or a network, and leaves out what isn't
installed. Prints the first steps. The loss is the running average that fastai shows, of the steps that were made."""
import csv
from importlib.util import find_spec
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

columns = 'step loss norm scale skipped'.split()

class LogSteps(Callback):
    "Pass each new row of `precision_recorder`, which has one for each step, to the functions `logs`"
    order = 56 # after `PrecisionRecorder`, with order 55
    def __init__(self, *logs): self.logs = logs
    def before_fit(self): self.seen = len(self.precision_recorder.rows)
    def after_batch(self):
        rows = self.precision_recorder.rows
        if len(rows)==self.seen: return # in validation, and before the step when gradients accumulate
        self.seen = len(rows)
        row = {k:getattr(rows[-1], k) for k in columns}
        for log in self.logs: log(row)

def to_csv(path):
    file = open(path, 'w', newline='', buffering=1) # a line is in the file as soon as it is written
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    return writer.writerow

def to_tensorboard(folder):
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(folder)
    def _log(row):
        for k in columns[1:]: writer.add_scalar(f'precision/{k}', row[k], row['step'])
        writer.flush()
    return _log

def to_wandb(project):
    import wandb
    run = wandb.init(project=project, mode='offline') # leave out `mode` to send it
    return lambda row: run.log({f'precision/{k}':row[k] for k in columns[1:]}, step=row['step'])

logs = [to_csv('steps.csv')]
for module,make,where in (('tensorboard',to_tensorboard,'runs'), ('wandb',to_wandb,'digits')):
    if find_spec(module): logs.append(make(where))
    else: print(f'{module} is not installed')

set_seed(42)
x,y = load_digits(return_X_y=True)
items = [*zip(tensor(x/16).float(), tensor(y))]
dls = DataLoaders.from_dsets(items[:1500], items[1500:], bs=128, num_workers=0)
model = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,10))
learn = Learner(dls, model, CrossEntropyLossFlat()).to_native_fp16(init_scale=2.**22)
with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2, cbs=LogSteps(*logs))
print(pd.read_csv('steps.csv').head().to_string(index=False))
