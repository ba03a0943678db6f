"""Export a model that was trained in half precision: TorchScript, torch.export and ONNX, and compare ways to serve it

Between batches `learn.model` is an ordinary float32 model, so it is exported like any other. Prints how far the
outputs of each file are from the model's own. ONNX needs `pip install onnx onnxscript`, and onnxruntime to run it."""
from importlib.util import find_spec
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

model = learn.model.cpu().eval() # float32 weights; without `eval`, dropout and batch norm would train
batch = dls.valid.one_batch()[0].cpu()
with torch.no_grad(): expected = model(batch)
def report(name, out): print(f'{name}: largest difference {(out-expected).abs().max():.0e}')

with learn.no_bar(): print(learn.precision_serving().round(5).to_string()) # served so, beside as it was trained

torch.jit.trace(model, batch).save('digits.pt')
report('TorchScript ', torch.jit.load('digits.pt')(batch))

sizes = ({0: torch.export.Dim('n')},) # batches of any size
torch.export.save(torch.export.export(model, (batch,), dynamic_shapes=sizes), 'digits.pt2')
report('torch.export', torch.export.load('digits.pt2').module()(batch))

if not (find_spec('onnx') and find_spec('onnxscript')): print('ONNX: left out, onnx and onnxscript are not installed')
else:
    torch.onnx.export(model, (batch,), 'digits.onnx', dynamic_shapes=sizes, dynamo=True, verbose=False)
    if not find_spec('onnxruntime'): print('ONNX: written but not compared, onnxruntime is not installed')
    else:
        import onnxruntime
        session = onnxruntime.InferenceSession('digits.onnx')
        report('ONNX        ', tensor(session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0]))
