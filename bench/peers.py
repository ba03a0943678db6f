"The loops of Lightning and Accelerate, where they are installed"
import logging,warnings

import torch
from loops import Variant,build
from models import loss_func

try: import pytorch_lightning as pl
except ImportError: pl = None
try: import accelerate
except ImportError: accelerate = None

peers = [o for o,lib in (('lightning',pl), ('accelerate',accelerate)) if lib is not None]

def peer_variants(dev):
    "What there is to measure. In float16 neither trains on a CPU."
    return [Variant(o, 'fused', p) for o in peers for p in ('fp32','autocast-bf16',*(('autocast-fp16',) if dev=='cuda' else ()))]

class Lightning:
    "A `Trainer` without logger, checkpoints and progress bar"
    def __init__(self, v, model, make_opt):
        class Module(pl.LightningModule):
            def __init__(self): super().__init__(); self.model = model
            def training_step(self, batch, i): return loss_func(self.model(batch[0]).float(), batch[1])
            def configure_optimizers(_): return self.opt
        logging.getLogger('pytorch_lightning').setLevel(logging.ERROR)
        warnings.filterwarnings('ignore', module='.*lightning.*')
        dev = next(model.parameters()).device.type
        self.v,self.model,self.opt,self.module = v,model,make_opt(model.parameters()),Module()
        self.precision,self.dev = {'fp32':'32-true', 'tf32':'32-true', 'autocast-fp16':'16-mixed', 'autocast-bf16':'bf16-mixed'}[v.precision],dict(cuda='gpu').get(dev, dev)

    def __call__(self, batches):
        pl.Trainer(accelerator=self.dev, devices=1, precision=self.precision, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False).fit(self.module, (o for o in batches))

class Accelerate:
    "A loop as its documentation has it"
    def __init__(self, v, model, make_opt):
        from accelerate.state import AcceleratorState
        AcceleratorState._reset_state() # else it keeps the precision of the first
        dev = next(model.parameters()).device.type
        self.v,self.acc = v,accelerate.Accelerator(mixed_precision={'autocast-fp16':'fp16', 'autocast-bf16':'bf16'}.get(v.precision, 'no'), cpu=dev=='cpu')
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
    return (Lightning if v.loop=='lightning' else Accelerate)(v, model, lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True))
