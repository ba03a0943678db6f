"""Your own rule for the modules that stay in float32

`keep` takes a function of a module's name and the module. Prints how each module computes, and why."""
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

def small_or_head(name, module):
    "Keep the last layer, and layers with fewer than 10,000 weights: they take little time"
    return name=='head' or isinstance(module, nn.Linear) and module.weight.numel()<10_000

set_seed(42)
x,y = load_digits(return_X_y=True)
items = [*zip(tensor(x/16).float(), tensor(y))]
dls = DataLoaders.from_dsets(items[:1500], items[1500:], bs=64, num_workers=0)
layers = dict(wide=nn.Linear(64,256), act=nn.ReLU(), narrow=nn.Linear(256,32), head=nn.Linear(32,10))
learn = Learner(dls, nn.Sequential(OrderedDict(layers)), CrossEntropyLossFlat(), metrics=accuracy)
learn.to_bf16(keep=small_or_head) # instead of a function: 'head', a pattern as '*norm*', a type, or a list of these
with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
print(learn.mixed_precision.policy().to_string(index=False))
print(f'accuracy {learn.final_record[-1]:.2f}')
