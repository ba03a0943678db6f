"The host waits for the device once a step because of us: whatever reads a number from a tensor is counted, by who asks"
import mp_callbacks.learner.fastai_internals as inside
from mp_callbacks.core.dtypes import map_tensors
from learners import *

reads = 'cpu item tolist numpy __bool__ __float__ __int__'.split()

@pytest.fixture
def ours(monkeypatch):
    "Counts what modules of mp_callbacks read, by method"
    seen = Counter()
    def counted(name):
        f = getattr(torch.Tensor, name)
        def _f(self, *args, **kwargs):
            if 'mp_callbacks' in sys._getframe(1).f_globals.get('__name__', ''): seen[name] += 1
            return f(self, *args, **kwargs)
        return _f
    for o in reads: monkeypatch.setattr(torch.Tensor, o, counted(o))
    return seen

@pytest.mark.parametrize('clip', [None, .1])
@pytest.mark.parametrize('mode', modes)
def test_one_per_step(mode, clip, ours):
    "One copy from the device, of the norms. The first step of a scale to be found has a second one."
    learn = fitted(in_mode(mode, norm=True, options=dict(clip=clip)))
    ours.clear()
    steps = 2*len(fitted(learn, 2).dls.train)
    assert ours['tolist']==steps and {*ours}=={'tolist','item'} # `item` of fastai's average, on the CPU

def test_skipped_steps(ours):
    """A skipped step has a second one, for the parameter that is to blame: the optimizer has nothing to do meanwhile.
    The end of the fit has one, for the weights that its warning is about."""
    learn = fitted(get_learner().to_bf16()) # the first fit measures the weights, once
    ours.clear()
    with pytest.warns(UserWarning, match='All 4 steps of this fit'): learn.fit(1, cbs=InfiniteAt(*range(4)))
    assert ours['tolist']==2*len(learn.dls.train)+1

def test_several_dtypes(ours):
    ps = [nn.Parameter(torch.randn(10, dtype=o)) for o in (torch.float32,torch.float16,torch.float64,torch.bfloat16)]
    for p in ps: p.grad = torch.ones_like(p)
    prepare_grads(ps, 2., 1.)
    assert ours=={'tolist':1}

class Elsewhere(TensorBase):
    "A tensor that says that it is on a GPU"
    device = property(lambda self: torch.device('cuda'))

def penalty(learn): learn.loss_grad = learn.loss_grad+3.
def negative(learn): learn.loss = learn.loss_grad = learn.loss_grad-100.
def infinite(learn): learn.loss = learn.loss*math.inf
def overflow(learn):
    if learn.iter==2: learn.loss,learn.loss_grad = learn.loss*math.inf,learn.loss_grad*math.inf
def two_numbers(learn): learn.loss = torch.stack([learn.loss,-learn.loss/3])

class Later(Callback):
    "Change the loss after the check"
    order = 20
    def after_step(self): self.learn.loss = self.learn.loss*2
    def after_batch(self):
        if self.training: self.learn.loss += 1.

def told(mode, far, change=noop, *cbs):
    """Curve, table, what callbacks see of the loss, and weights, as text; and in which batches the loss was handed over

    It is changed as `change` says, and on a GPU if it is to be `far`."""
    seen,handed = [],[]
    def move(learn):
        change(learn)
        if far: learn.loss = learn.loss.as_subclass(Elsewhere)
    def look(cb):
        if cb.training: handed.append(not cb.learn.loss.requires_grad)
        seen.append((str(cb.learn.loss.dtype),cb.learn.loss,cb.smooth_loss))
    see = Callback(after_batch=look)
    see.order = 60 # after fastai's recorder
    cbs = [On('after_loss', move, 60),see,*[o() for o in cbs]]
    learn = in_mode(mode, cbs=cbs, metrics=[mse,AvgLoss()], norm=True)
    learn.recorder.train_metrics = True
    learn.fit(2)
    res = learn.recorder.losses,learn.recorder.values,learn.recorder.smooth_loss.value,seen,weights(learn)
    return repr(map_tensors(torch.Tensor.tolist, res)),handed

@pytest.mark.parametrize('mode,change', crossed(modes, [noop,penalty,negative,infinite,overflow],
    fast=lambda mode,change: mode=='bf16' or change in (noop,overflow)))
def test_loss_is_handed_over(mode, change):
    "The check has read it. Curve, table, and what callbacks see are bit for bit what they are where fastai reads it."
    (want,own),(got,handed) = told(mode, False, change),told(mode, True, change)
    assert got==want and all(handed) and not any(own)

@pytest.mark.parametrize('n,cbs', [(1,[Later]), (1,[TerminateOnNaNCallback]), (2,[]), (2,[Later])])
def test_loss_is_handed_over_beside(n, cbs):
    "Callbacks that read or change it; between the `n` batches of a step nothing has been read, so fastai does it"
    if n>1: cbs = [partial(GradientAccumulation, 16*n),*cbs]
    (want,own),(got,handed) = told('bf16', False, noop, *cbs),told('bf16', True, noop, *cbs)
    assert got==want and not any(own) and handed==[i%n==n-1 for i in range(8)]

@pytest.mark.parametrize('change,ranks', [(two_numbers,False),(noop,True)])
def test_loss_is_not_handed_over(change, ranks, monkeypatch):
    "A loss that is no number, or that several processes gather from their devices"
    monkeypatch.setattr(inside, 'several_ranks', lambda: ranks)
    (want,own),(got,handed) = told('bf16', False, change),told('bf16', True, change)
    assert got==want and not any(own) and not any(handed)
