"What a user does first: train with all calls, save, load, a skipped step, Ctrl-C, report and doctor"
import platform
from tempfile import TemporaryDirectory

import fastcore,fastai
from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits
from mp_callbacks.all import *

torch.set_num_threads(1) # the model is small

def learner(**kwargs):
    x,y = load_digits(return_X_y=True)
    items = list(zip(tensor(x/16).float(), tensor(y)))
    dls = DataLoaders.from_dsets(items[:1500], items[1500:], bs=64, num_workers=0, device='cpu')
    model = nn.Sequential(nn.Linear(64,100), nn.LayerNorm(100), nn.ReLU(), nn.Linear(100,10))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kwargs)

class InfiniteOnce(Callback):
    def after_loss(self):
        if self.training and self.train_iter==3: self.learn.loss_grad = self.loss_grad*float('inf')

class Interrupt(Callback):
    def before_step(self): raise KeyboardInterrupt

def float32(learn): return {o.dtype for o in learn.model.state_dict().values()}=={torch.float32}

with TemporaryDirectory() as tmp:
    for call in 'to_fp16 to_bf16 to_native_fp16 to_native_bf16'.split():
        learn = getattr(learner(path=tmp), call)()
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(2, 1e-2)
            assert learn.final_record[-1]>.8, f'{call}: accuracy {learn.final_record[-1]}'
            learn.fit(1, cbs=InfiniteOnce())
            assert not learn.precision_recorder.log.finite.all(), f'{call}: no step was skipped'
            try: learn.fit(1, cbs=Interrupt())
            except KeyboardInterrupt: pass
            assert float32(learn) and not torch.is_autocast_enabled('cpu'), call
            learn.fit(1)
            learn.save('digits')
            weight = learn.model[0].weight.detach().clone()
            loaded = getattr(learner(path=tmp), call)().load('digits')
            looks = learn.precision_checkup(),learn.precision_report(),learn.find_nonfinite()
        assert torch.equal(loaded.model[0].weight, weight), call
        assert 'steps' in learn.precision_recorder.summary()
        assert all(map(repr, looks)), call
    assert float32(learner(path=tmp).to_fp16().to_fp32())

print(f'All calls work. Python {platform.python_version()}, torch {torch.__version__}, fastai {fastai.__version__}, '
      f'fastcore {fastcore.__version__}')
