"""What sending gradients in half precision changes in the weights: torchrun --nproc-per-node 2 bench/compression.py

Trains `examples/distributed.py` in each precision, with communication hooks of PyTorch and without, from the same
weights and with the same batches. Prints a Markdown table."""
import os,sys,tempfile
from importlib.util import module_from_spec,spec_from_file_location
from pathlib import Path

from fastai.basics import *
from fastai.callback.all import *
from fastai.distributed import teardown_distrib

from common import machine

spec = spec_from_file_location('example', Path(__file__).resolve().parent.parent/'examples/distributed.py')
example = module_from_spec(spec)
spec.loader.exec_module(example)
epochs,sends = 5,('no','bf16','fp16')

class Record(Callback):
    "The gradients of the first step, and the weights at the start and after each epoch, on one vector each"
    order = 20
    def flat(self, ts): return torch.cat([o.detach().double().flatten() for o in ts])
    def before_fit(self): self.grads,self.weights = None,[self.flat(self.model.parameters())]
    def before_step(self):
        if self.grads is None: self.grads = self.flat(p.grad for p in self.model.parameters())
    def after_train(self): self.weights.append(self.flat(self.model.parameters()))

def train(precision, send):
    rec = Record()
    learn = example.train(precision, epochs, 32, 1e-2, send, False, rec)
    return rec,learn.recorder.values[-1][-1]

def off(got, want, start=0): return ((got-want).norm()/(want-start).norm()).item()

def main():
    os.chdir(tempfile.mkdtemp())
    sys.stdout = open(os.devnull, 'w')
    runs = {(p,s):train(p, s) for p in ('fp32','bf16','fp16') for s in sends}
    sys.stdout = sys.__stdout__
    teardown_distrib()
    if rank_distrib(): return
    print(f'`torchrun --nproc-per-node 2 bench/compression.py`: {machine()}, 2 processes, gloo.\n')
    print('| computes in | sends | bytes per step | gradients, step 1 | weights, epoch 1 | weights, epoch 5 '
          '| accuracy |')
    print('|---|---|---|---|---|---|---|')
    start = runs['fp32','no'][0].weights[0]
    for (p,s),(rec,acc) in runs.items():
        ref = runs['fp32' if s=='no' else p, 'no'][0]
        diffs = off(rec.grads, ref.grads),*(off(rec.weights[i], ref.weights[i], start) for i in (1,epochs))
        size = len(start)*(4 if s=='no' else 2)
        numbers = ' | '.join(f'{o:.2g}' for o in diffs)
        print(f'| {p} | {"float32" if s=="no" else s} | {size} | {numbers} | {acc:.3f} |')

if __name__=='__main__': main()
