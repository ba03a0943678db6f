"""Press Ctrl-C in the middle of an epoch, and go on later, with SaveModelCallback and EarlyStoppingCallback

`Resumable` saves a run every ten batches. Prints that a run that is interrupted and resumed ends as one that isn't."""
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

class Resumable(Callback):
    "Save the run to `file` every `every` batches, and go on from there if it exists. Load no file of others like this."
    order = -100 # so that other callbacks don't see the batches that are passed over
    def __init__(self, file, every=10):
        self.file,self.every = Path(file),every
        self.saved = torch.load(file, map_location='cpu', weights_only=False) if self.file.exists() else {}
        self.at = self.saved.get('at', (0,0))
    def trackers(self): return [cb for cb in self.learn.cbs if isinstance(cb, TrackerCallback)]
    def before_epoch(self):
        set_seed(self.epoch), self.dls.train.rng.seed(self.epoch) # the same batches each time
        for cb in self.trackers(): cb.run = self.epoch>=self.at[0] # epochs that are passed over have no losses
        if not self.saved or self.epoch!=self.at[0]: return
        self.model.load_state_dict(self.saved['model'])
        self.opt.load_state_dict(self.saved['opt']) # has the loss scale, too
        for cb in self.trackers(): vars(cb).update(self.saved[cb.name])
    def before_batch(self):
        if not self.training: return
        now,loss = (self.epoch,self.iter),vars(self.recorder.smooth_loss)
        if now<self.at: raise CancelBatchException
        if self.saved and now==self.at: loss.update(self.saved['loss']) # the average that fastai shows
        torch.manual_seed(self.epoch*self.n_iter+self.iter) # the same dropout each time
        if self.iter%self.every: return
        found = {cb.name: {k:v for k,v in vars(cb).items() if k in ('best','wait')} for cb in self.trackers()}
        state = dict(model=self.model.state_dict(), opt=self.opt.state_dict(), at=now, loss=loss, **found)
        torch.save(state, f'{self.file}.new')
        os.replace(f'{self.file}.new', self.file) # never an incomplete file
    def after_fit(self): # Ctrl-C doesn't lead here
        self.last = deepcopy(self.model.state_dict()) # `SaveModelCallback` loads the best epoch later
        self.file.unlink(missing_ok=True)

def train(name, *cbs):
    "Train a small net on scikit-learn's digits, from the file `name`.pth on if there is one"
    set_seed(42)
    x,y = load_digits(return_X_y=True)
    items,resumable = [*zip(tensor(x/16).float(), tensor(y))],Resumable(f'{name}.pth')
    dls = DataLoaders.from_dsets(items[:1500], items[1500:], bs=64, num_workers=0)
    model = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64,10))
    learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy).to_bf16()
    what = dict(monitor='accuracy', min_delta=.05)
    cbs = [resumable, SaveModelCallback(**what, fname=name), EarlyStoppingCallback(**what, patience=2), *cbs]
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(9, .1, cbs=cbs, start_epoch=resumable.at[0])
    return resumable.last.values()

class CtrlC(Callback):
    def before_batch(self):
        if self.training and (self.epoch,self.iter)==(3,16): raise KeyboardInterrupt

whole = train('whole')
try: train('stopped', CtrlC())
except KeyboardInterrupt: print('Ctrl-C, and on from epoch {}, batch {}:'.format(*Resumable('stopped.pth').at))
print('Last weights are equal:', all(map(torch.equal, whole, train('stopped'))))
