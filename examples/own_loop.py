"""Your own loop in float16, without fastai, stopped in the middle of an epoch and resumed bit for bit

The checkpoint has model, optimizer, loss scale and the state of the random numbers. Prints that a run that is stopped
and resumed has the losses of one that isn't."""
import os,torch,torch.nn.functional as F
from pathlib import Path
from sklearn.datasets import load_digits
from torch import nn
from mp_callbacks.core.loss_scale import DynamicLossScale
from mp_callbacks.core.training_steps import TrainingSteps

torch.set_num_threads(1) # faster for so small a net
x,y = load_digits(return_X_y=True)
x,y = torch.tensor(x/16, dtype=torch.float32),torch.tensor(y)

def batches(epoch):
    "The same batches each time that `epoch` is asked for, and no change to the random numbers of dropout"
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(64)

def train(file, epochs=3, every=10, stop=None):
    "Train, from `file` on if it exists; return the loss of each step, and raise after step `stop`"
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64,10))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    steps = TrainingSteps(model, opt, torch.float16, DynamicLossScale(2.**20, period=20), clip=1.)
    saved,start,losses = dict(model=model, opt=opt, steps=steps),0,[]
    if Path(file).exists():
        state = torch.load(file)
        for name,o in saved.items(): o.load_state_dict(state[name])
        torch.set_rng_state(state['random']) # on a GPU torch.cuda.get_rng_state() and set_rng_state(), too
        start,losses = state['step'],state['losses']
        print('goes on from step', start)
    todo = [(epoch,i) for epoch in range(epochs) for i in batches(epoch)]
    for step,(epoch,i) in enumerate(todo[start:], start):
        if step%every==0:
            state = {name:o.state_dict() for name,o in saved.items()}
            torch.save(dict(state, random=torch.get_rng_state(), step=step, losses=losses), f'{file}.new')
            os.replace(f'{file}.new', file) # never an incomplete file
        if step==stop: raise KeyboardInterrupt
        with steps.batch():
            loss = F.cross_entropy(model(x[i]), y[i])
            steps.backward(loss)
        steps.make() # or skips it
        losses.append(loss.item())
    Path(file).unlink() # done
    print(f'{len(losses)} steps, loss {losses[-1]:.3f}, loss scale {steps.loss_scale:g}')
    return losses

whole = train('whole.pt')
try: train('stopped.pt', stop=47)
except KeyboardInterrupt: print('stopped in step 47')
print('losses are equal:', train('stopped.pt')==whole)
