"The loops of Lightning and Accelerate, where they are installed"
import logging,warnings
from importlib.util import find_spec

import torch
from loops import Variant,build,lr
from models import loss_func

peers = [o for o,lib in (('lightning','pytorch_lightning'), ('accelerate','accelerate')) if find_spec(lib)]

def peer_variants(dev):
    "What there is to measure. In float16 neither trains on a CPU."
    precisions = ['fp32','autocast-bf16']+['autocast-fp16']*(dev=='cuda')
    return [Variant(o, 'fused', p) for o in peers for p in precisions]

class Lightning:
    "A `Trainer` without logger, checkpoints and progress bar"
    def __init__(self, v, model, make_opt):
        import pytorch_lightning as pl # here, as it takes seconds
        class Module(pl.LightningModule):
            def __init__(self): super().__init__(); self.model = model
            def training_step(self, batch, i): return loss_func(self.model(batch[0]).float(), batch[1])
            def configure_optimizers(_): return self.opt
        logging.getLogger('pytorch_lightning').setLevel(logging.ERROR)
        warnings.filterwarnings('ignore', module='.*lightning.*')
        self.model,self.opt,self.module = model,make_opt(model.parameters()),Module()
        names,self.pl = {'autocast-fp16':'16-mixed', 'autocast-bf16':'bf16-mixed'},pl
        self.dev,self.precision = next(model.parameters()).device.type,names.get(v.precision, '32-true')

    def __call__(self, batches):
        trainer = self.pl.Trainer(accelerator=dict(cuda='gpu').get(self.dev, self.dev), devices=1,
                                  precision=self.precision, max_epochs=1, logger=False, enable_checkpointing=False,
                                  enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(self.module, (o for o in batches))

class Accelerate:
    "A loop as its documentation has it"
    def __init__(self, v, model, make_opt):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        AcceleratorState._reset_state() # else it keeps the precision of the first
        precision = v.precision.removeprefix('autocast-') if v.precision.startswith('autocast-') else 'no'
        on_cpu = next(model.parameters()).device.type=='cpu'
        self.acc = Accelerator(mixed_precision=precision, cpu=on_cpu)
        self.model,self.opt = self.acc.prepare(model, make_opt(model.parameters()))

    def __call__(self, batches):
        for x,y in batches:
            loss = loss_func(self.model(x).float(), y)
            self.acc.backward(loss)
            self.opt.step()
            self.opt.zero_grad()

def build_any(v, model):
    "As `build` does, for `lightning` and `accelerate` too"
    if v.loop not in peers: return build(v, model)
    loop = Lightning if v.loop=='lightning' else Accelerate
    return loop(v, model, lambda ps: torch.optim.AdamW(ps, lr=lr, fused=True))
