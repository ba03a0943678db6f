"""Your own loss scale: a subclass of DynamicLossScale that is saved and loaded with the learner

This one remembers the scale that overflowed, and stays below it. Prints how many steps each scale skips, and that the
memory comes back from a checkpoint."""
from dataclasses import dataclass,replace
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

@dataclass(frozen=True, repr=False)
class CarefulLossScale(DynamicLossScale):
    "A `DynamicLossScale` that doesn't grow to `ceiling`, the smallest scale that has overflowed"
    ceiling:float = float('inf')
    state_fields = (*DynamicLossScale.state_fields, 'ceiling') # what `adjust` changes, and a checkpoint has

    def adjust(self, finite, amax=None):
        "The scale of the next step: a new value, as this one is frozen"
        new = super().adjust(finite, amax)
        if not finite: return replace(new, ceiling=min(self.ceiling, self.loss_scale))
        return new if new.loss_scale<self.ceiling else replace(new, loss_scale=self.loss_scale)

def get_learner(scale):
    set_seed(42)
    x,y = load_digits(return_X_y=True)
    items = [*zip(tensor(x/16).float(), tensor(y))]
    dls = DataLoaders.from_dsets(items[:1500], items[1500:], bs=64, num_workers=0)
    model = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,10))
    return Learner(dls, model, CrossEntropyLossFlat()).to_fp16(scale)

for scale in DynamicLossScale(2.**20, period=5),CarefulLossScale(2.**20, period=5):
    learn = get_learner(scale)
    with learn.no_bar(), learn.no_logging(): learn.fit(5, 1e-2)
    print(f'{type(scale).__name__}: {learn.precision_recorder.log.skipped.sum()} of 115 steps skipped')

learn.save('careful')
print('saved: ', learn.mixed_precision.scaling)
other = get_learner(scale).load('careful')
print('loaded:', other.mixed_precision.scaling)
