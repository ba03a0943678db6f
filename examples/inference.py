"""Predict in half precision or in float32, with a learner or with the model alone

A learner in mixed precision predicts as it trains, in half precision. Prints in which dtype the first layer computed
in each case, and how many predictions are those of float32."""
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

set_seed(42)
x,y = load_digits(return_X_y=True)
items = [*zip(tensor(x/16).float(), tensor(y))]
dls = DataLoaders.from_dsets(items[:1500], items[1500:], bs=64, num_workers=0)
learn = Learner(dls, nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,10)), CrossEntropyLossFlat()).to_bf16()
with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
computed = []
learn.model[0].register_forward_hook(lambda module, args, out: computed.append(out.dtype))
batch = dls.valid.one_batch()[0]

@torch.no_grad()
def predict(model): return model(batch).argmax(-1)

def report(name, predicted):
    print(f'{name:32} {str(computed[-1]):15} {(predicted==expected).sum()} of {len(expected)} as in float32')

expected = predict(learn.model.eval()) # outside a batch the model computes in float32
report('learn.model(x)', expected)

with learn.no_bar(): preds,_ = learn.get_preds(act=noop) # so do `validate` and `predict`
report('learn.get_preds()', preds[:len(expected)].argmax(-1).to(expected.device))

with half_precision(learn.model, torch.bfloat16): report('with half_precision(model, …)', predict(learn.model))

# for good: it takes loss scale and record away, too, and another `to_bf16()` begins anew
with learn.to_fp32().no_bar(): preds,_ = learn.get_preds(act=noop)
report('learn.to_fp32().get_preds()', preds[:len(expected)].argmax(-1).to(expected.device))

small = deepcopy(learn.model).to(torch.bfloat16) # half the memory; for good, so not for training
batch = batch.to(torch.bfloat16)
report('model.to(torch.bfloat16)(x)', predict(small))
