"""fastai's own callbacks and methods in each precision, against float32: the same behaviour, the right numbers

Each row of the table is a function here, of the name of what is tried. It is given `make`, for learners in the
precision in question, and returns what has to be the same as in float32, and what has to be near it: within four times
the roundoff of the half dtype, relative to its norm. For the reason why see `test_parity.py`.

The file takes long because each row trains in each precision."""
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt,pytest
from fastai.callback.hook import ActivationStats
from fastai.interpret import ClassificationInterpretation,Interpretation
from fastai.vision.augment import Flip
from fastai.vision.core import PILImageBW
from fastai.vision.data import IntToFloatTensor,ToTensor
from fastai.vision.learner import * # how images are shown with their losses
from learners import *
from sklearn.datasets import load_digits

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')

modes = {**modes, 'bf16_flat': lambda learn, **kwargs: learn.to_bf16(flat_master=True, **kwargs)}
roundoff = {**dict.fromkeys(modes, 2**-8), **{o:2**-11 for o in modes if 'fp16' in o}}
rows = {}

def row(f): rows[f.__name__] = f; return f

def make(mode, path, model=None, **kwargs):
    "A learner in `mode`, or in float32; the same each time"
    set_seed(0)
    learn = get_learner(model, **{'opt_func':SGD, 'lr':.05, 'path':path, **kwargs})
    learn.start = flat(weights(learn))
    if mode: modes[mode](learn)
    return learn

def went(learn): return flat(weights(learn))-learn.start
def logged(learn): return [o[:2] for o in learn.recorder.values] # losses of training and validation

# --- What the rows are made of

images,labels = load_digits(return_X_y=True)
images = (images.reshape(-1,8,8)*15.9).astype('uint8')

def digits(bs=32):
    "Images of digits to classify, flipped at random while training"
    tfms,splits = [[At(images),PILImageBW.create], [At(labels),Categorize()]],[range(96),range(96,144)]
    kwargs = dict(after_item=ToTensor(), after_batch=[IntToFloatTensor(),Flip()], num_workers=0, device='cpu')
    return Datasets(range(144), tfms, splits=splits).dataloaders(bs=bs, shuffle=False, **kwargs)

def classifier():
    torch.manual_seed(1)
    layers = nn.Linear(64,32,bias=False),nn.BatchNorm1d(32),nn.GELU(),nn.Linear(32,10)
    return nn.Sequential(nn.Flatten(), *layers) # not ReLU: rounding switches some of its units on or off

def classify(make, model=None, **kwargs):
    "A learner that classifies digits"
    if model is None: model = classifier()
    return make(model, **{'dls':digits(), 'loss_func':CrossEntropyLossFlat(), **kwargs})

def head_and_body(m): return [params(m[:-1]),params(m[-1:])]

class When(Callback):
    "Call `f` with the learner in `event` of training, whenever `at(learn)`"
    def __init__(self, event, f, at=lambda learn: True, order=0):
        self.f,self.at,self.order,self.any = f,at,order,event.endswith(('epoch','train'))
        setattr(self, event, self._when)
    def _when(self):
        if (self.any or self.training) and self.at(self.learn): self.f(self.learn)

class Uphill(Callback):
    "From epoch 3 on every step makes it worse"
    order = 70
    def before_epoch(self): self.opt.set_hyper('lr', .05 if self.epoch<3 else -.05)

class Spoil(Callback):
    "Batches that no precision can learn from: in float32 they are left out"
    order = 8
    def __init__(self, *at): self.at = at
    def before_batch(self):
        if not self.training or self.train_iter not in self.at: return
        if not hasattr(self.learn, 'mixed_precision'): raise CancelBatchException
        self.learn.xb = (self.x*float('inf'),)

# --- Callbacks

@row
def gradient_accumulation(make):
    "Three batches to a step, across epochs"
    learn = make(cbs=GradientAccumulation(48))
    steps = []
    learn.fit(3, cbs=When('after_step', lambda o: steps.append(o.train_iter)))
    return steps,[went(learn),logged(learn)]

@row
def left_overs(make):
    "Gradients that were accumulated for a step that never came are unscaled, and are added to those of the next fit"
    learn = make()
    learn.fit(1, cbs=GradientAccumulation(48)) # the fourth batch is left over
    grads = [flat([p.grad for p in learn.model.parameters()])]
    learn.fit(1)
    return None,[went(learn),*grads,logged(learn)]

@row
def gradient_clip(make):
    learn = make(cbs=GradientClip(.05))
    norms = []
    class Norm(Callback):
        order = 20
        def before_step(self): norms.append(flat([p.grad for p in self.model.parameters()]).norm().item())
    learn.fit(2, cbs=Norm())
    return [o<=.05 for o in norms],[went(learn),norms,logged(learn)]

@row
def accumulation_and_clip(make):
    learn = make(cbs=[GradientAccumulation(32),GradientClip(.05)])
    learn.fit(3)
    return None,[went(learn),logged(learn)]

@row
def mixup(make):
    learn = classify(make, cbs=MixUp())
    loss = learn.loss_func
    learn.fit(2)
    return learn.loss_func is loss,[went(learn),logged(learn)]

@row
def mixup_of_numbers(make):
    learn = make(cbs=MixUp())
    learn.fit(2)
    return None,[went(learn),logged(learn)]

@row
def cutmix(make):
    learn = classify(make, cbs=CutMix())
    learn.fit(2)
    return None,[went(learn),logged(learn)]

@row
def losses(make):
    res = []
    bce = BCEWithLogitsLossFlat(thresh=.2)
    def one_hot(p, y): return bce(p, F.one_hot(y, 10))
    for f in (LabelSmoothingCrossEntropy(), LabelSmoothingCrossEntropyFlat(), FocalLossFlat(), one_hot):
        learn = classify(make, loss_func=f)
        learn.fit(2)
        res += [went(learn),logged(learn)]
    return None,res

@row
def early_stopping(make):
    learn = make(cbs=[Uphill(),EarlyStoppingCallback(patience=2)])
    learn.fit(9)
    return len(learn.recorder.values),[went(learn),logged(learn)]

@row
def reduce_lr(make):
    learn = make(cbs=ReduceLROnPlateau(min_delta=10., factor=4., min_lr=.01))
    lrs = []
    learn.fit(4, cbs=When('before_batch', lambda o: lrs.append(o.opt.hypers[-1]['lr'])))
    return lrs,[went(learn),logged(learn)]

@row
def save_model(make):
    "The best of them is that of the third epoch, and it is what is loaded in the end"
    learn = make(cbs=[Uphill(),SaveModelCallback(with_opt=True)])
    epochs = []
    learn.fit(5, cbs=When('before_epoch', lambda o: epochs.append(went(o)), lambda o: o.epoch in (1,3)))
    with torch.serialization.safe_globals([L]): file = torch.load(learn.path/'models'/'model.pth', weights_only=True)
    same = [torch.equal(went(learn), epochs[1]), *((k,v.dtype,v.shape) for k,v in file['model'].items())]
    return same,[went(learn),*epochs,logged(learn)]

@row
def save_every_epoch(make):
    learn = make(norm=True, cbs=SaveModelCallback(every_epoch=True))
    learn.fit(3)
    files = [torch.load(learn.path/'models'/f'model_{i}.pth', weights_only=True) for i in range(3)]
    stats = [flat(o[k] for k in o if 'running' in k) for o in files]
    return [(k,v.dtype) for o in files for k,v in o.items()],[*stats,went(learn)]

@row
def terminate_on_nan(make):
    "The fit ends with the batch whose loss isn't a number"
    class Bad(Callback):
        def before_batch(self):
            if self.training and self.train_iter==5: self.learn.xb = (self.x*float('nan'),)
    learn = make(cbs=[Bad(),TerminateOnNaNCallback()])
    seen = []
    learn.fit(3, cbs=When('before_batch', lambda o: seen.append(o.train_iter)))
    return seen,[logged(learn)]

@row
def csv_logger(make):
    learn = classify(make, metrics=[accuracy,Perplexity()], cbs=CSVLogger())
    learn.fit(2)
    log = learn.csv_logger.read_log()
    return [*log.columns,*log.epoch],[log[o] for o in ('train_loss','valid_loss','perplexity')]

@row
def show_graph(make):
    learn = make().add_cbs([ProgressCallback(),ShowGraphCallback()])
    learn.create_mbar = True
    graphs = []
    class Draw(Callback):
        order = ProgressCallback.order+1
        def before_fit(self): self.learn.progress.mbar.update_graph = lambda *args: graphs.append(args)
    with redirect_stdout(StringIO()): learn.fit(2, cbs=Draw())
    sizes = [[len(xs) for xs,_ in g] for g,*_ in graphs]
    return sizes,[torch.tensor(ys) for g,*_ in graphs for _,ys in g]+[y for *_,y in graphs]

@row
def activation_stats(make):
    learn = make(cbs=ActivationStats(with_hist=True))
    learn.fit(2)
    stats = learn.activation_stats
    moments = [stats.layer_stats(i)[j] for i in range(3) for j in (0,1)]
    return [len(stats.stats), *(o['hist'].shape for s in stats.stats for o in s)],[*moments,went(learn)]

@row
def bn_freeze(make):
    "The statistics of frozen batch norms don't move"
    learn = classify(make, splitter=head_and_body, train_bn=False, cbs=BnFreeze())
    learn.freeze()
    norm = learn.model[2]
    before = norm.running_mean.clone()
    learn.fit(1)
    frozen = torch.equal(norm.running_mean, before)
    learn.unfreeze()
    learn.fit(1)
    return [frozen,torch.equal(norm.running_mean, before)],[went(learn),logged(learn),norm.running_mean]

@row
def channels_last(make):
    "A convolution's weights are laid out so in the optimizer and in the model"
    torch.manual_seed(1)
    layers = nn.Conv2d(1,4,3),nn.GELU(),nn.Conv2d(4,4,3,stride=2),nn.Flatten(),nn.Linear(16,10)
    learn = classify(make, nn.Sequential(*layers), cbs=ChannelsLast())
    strides = []
    learn.fit(2, cbs=When('after_pred', lambda o: strides.append(o.model[2].weight.stride())))
    return [strides,learn.model[2].weight.stride()],[went(learn),logged(learn)]

@row
def param_scheduler(make):
    learn = make(opt_func=partial(SGD, mom=.9))
    learn.fit(3, cbs=ParamScheduler(dict(lr=SchedLin(.01, .05), mom=SchedCos(.9, .5), wd=SchedNo(.1, .1))))
    return learn.recorder.hps,[went(learn),logged(learn)]

class Recurrent(nn.Module):
    """Remembers from batch to batch, until it is reset; returns the last layer and, for regularisation, all
    activations, as fastai's own do"""
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inp,self.hid,self.out,self.resets = nn.Linear(8,16),nn.Linear(16,16),nn.Linear(16,1),0
        self.reset()
    def reset(self): self.h,self.resets = torch.zeros(16, 16),self.resets+1
    def forward(self, x):
        seq = []
        for i in range(3):
            self.h = torch.tanh(self.inp(x)+self.hid(self.h[:len(x)]))
            seq.append(self.h)
        self.h,seq = self.h.detach(),torch.stack(seq, 1)
        return self.out(seq[:,-1]),seq,seq*.9

@row
def rnn(make):
    learn = make(Recurrent(), cbs=rnn_cbs(alpha=2., beta=1.))
    learn.fit(3)
    return learn.model.resets,[went(learn),logged(learn)]

class Averaging(Callback):
    "As in many users' code: follows the weights after each step that was taken"
    def begin(self): self.n,self.avg = 0,[p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        if getattr(self.learn, 'step_stats', None) is not None and not self.learn.step_stats.finite: return
        self.n += 1
        for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), self.weight())
    def swap(self):
        for a,p in zip(self.avg, self.model.parameters()): a.data,p.data = p.data,a.data

class EMA(Averaging):
    "An exponential average, which stands in for the weights in validation"
    def before_fit(self): self.begin()
    def weight(self): return .2
    def before_validate(self): self.swap()
    def after_validate(self): self.swap()

class SWA(Averaging):
    "The mean over the last epochs, which is what is left in the end"
    def before_epoch(self):
        if self.epoch==1: self.begin()
    def after_step(self):
        if self.epoch>=1: super().after_step()
    def weight(self): return 1/self.n
    def after_fit(self): self.swap()

@row
def ema(make):
    learn = make(cbs=[Spoil(2,3,5),EMA()])
    learn.fit(3)
    return learn.ema.n,[went(learn),flat(learn.ema.avg)-learn.start,[o[1] for o in logged(learn)]]

@row
def ema_of_accumulated(make):
    learn = make(cbs=[GradientAccumulation(32),EMA()])
    learn.fit(3)
    return learn.ema.n,[went(learn),flat(learn.ema.avg)-learn.start]

@row
def swa(make):
    learn = make(cbs=[Spoil(2,5),SWA()])
    learn.fit(3)
    return learn.swa.n,[went(learn),learn.validate()[0]]

@row
def copied_in_place(make):
    "An average that is copied into the weights and back, number by number"
    class Copied(EMA):
        def swap(self):
            with torch.no_grad():
                for a,p in zip(self.avg, self.model.parameters()): new = a.clone(); a.copy_(p); p.copy_(new)
    learn = make(cbs=Copied())
    learn.fit(3)
    return learn.copied.n,[went(learn),flat(learn.copied.avg)-learn.start,logged(learn)]

# --- Ways to fit

@row
def one_cycle(make):
    learn = make(opt_func=partial(SGD, mom=.9))
    learn.fit_one_cycle(3, .05)
    return learn.recorder.hps,[went(learn),logged(learn)]

@row
def flat_cos(make):
    learn = make()
    learn.fit_flat_cos(3, .05)
    return learn.recorder.hps,[went(learn),logged(learn)]

@row
def sgdr(make):
    learn = make()
    learn.fit_sgdr(2, 1, .05)
    return learn.recorder.hps,[went(learn),logged(learn)]

@row
def fine_tune(make):
    learn = classify(make, splitter=head_and_body)
    moved = []
    learn.fine_tune(2, .1, cbs=When('after_train', lambda o: moved.append((went(o)[:64*32]!=0).any().item())))
    return [moved,learn.recorder.hps['lr'][-1].tolist()],[went(learn),logged(learn)]

@row
def start_epoch(make):
    "The epochs before it are passed over"
    learn = make()
    learn.fit_one_cycle(4, .05, start_epoch=2)
    return len(learn.recorder.losses),[went(learn)]

@row
def freeze_between(make):
    learn = make(splitter=head_and_body, opt_func=partial(SGD, mom=.9))
    moved = []
    for f in (learn.freeze, learn.unfreeze, partial(learn.freeze_to, 1), learn.unfreeze):
        f()
        before = weights(learn)
        learn.fit(1, .02)
        moved.append([not torch.equal(a, b) for a,b in zip(weights(learn), before)])
    return moved,[went(learn),logged(learn)]

def freeze_and_unfreeze(make, freeze, unfreeze, order=0):
    """Frozen in event `freeze` of the second batch, unfrozen in event `unfreeze` of the fourth one: which parameters
    moved in which batch?"""
    learn = make(splitter=head_and_body)
    moved,before = [],weights(learn)
    def see(o):
        moved.append([not torch.equal(a, b) for a,b in zip(weights(o), before)])
        before[:] = weights(o)
    cbs = [When(freeze, lambda o: o.freeze(), lambda o: o.train_iter==1, order),
           When(unfreeze, lambda o: o.unfreeze(), lambda o: o.train_iter==3, order), When('after_batch', see, order=20)]
    learn.fit(2, cbs=cbs)
    return moved,[went(learn),logged(learn)]

@row
def freeze_in_before_batch(make): return freeze_and_unfreeze(make, 'before_batch', 'before_batch')
@row
def freeze_in_after_batch(make): return freeze_and_unfreeze(make, 'after_batch', 'after_batch', order=30)
@row
def freeze_late_in_before_batch(make): return freeze_and_unfreeze(make, 'before_batch', 'after_batch', order=30)
@row
def unfreeze_late_in_before_batch(make): return freeze_and_unfreeze(make, 'after_batch', 'before_batch', order=30)
@row
def freeze_in_after_pred(make): return freeze_and_unfreeze(make, 'after_pred', 'before_batch')
@row
def freeze_in_before_step(make): return freeze_and_unfreeze(make, 'before_step', 'before_batch')

# --- Looking at the learner in a fit and afterwards

@row
def predict_in_a_fit(make):
    "After each epoch, and before the first"
    learn = make(norm=True)
    preds = []
    def see(o): preds.append(o.get_preds(inner=True)[0])
    learn.fit(2, cbs=[When('after_train', see)])
    return None,[went(learn),*preds]

@row
def validate_between(make):
    learn = make(norm=True)
    res = []
    for _ in range(3):
        learn.fit(1)
        res += [learn.validate()[0],learn.validate(0)[0],learn.get_preds()[0],learn.loss_func(*learn.get_preds())]
    return None,[went(learn),*res]

@row
def tta(make):
    learn = classify(make)
    learn.fit(2)
    set_seed(0)
    return None,[learn.tta()[0],*learn.tta(beta=None)[0],learn.tta(use_max=True)[0]]

@row
def interpretation(make):
    learn = classify(make)
    learn.fit(6)
    res,cls = Interpretation.from_learner(learn),ClassificationInterpretation.from_learner(learn)
    inps,preds,targs,decoded,loss = cls[[3,1,4]]
    confusion = cls.confusion_matrix()
    same = [list(cls.vocab),confusion.shape,confusion.sum(1).tolist(),inps.tolist(),targs.tolist()]
    near = [res.losses,cls.losses,preds,loss,res.top_losses(5)[0]]
    return [*same,(confusion.diagonal().sum()>24).item()],near

@row
def show_results(make):
    learn = classify(make)
    learn.fit(6)
    learn.show_results(max_n=4, shuffle=False)
    titles = [o.get_title().split('\n')[0] for o in plt.gcf().axes]
    Interpretation.from_learner(learn).plot_top_losses(3)
    n = len(plt.gcf().axes)
    plt.close('all')
    return [titles,n],[]

@row
def summary(make):
    learn = classify(make)
    before = str(learn.summary()).split('Callbacks')[0]
    learn.fit(1)
    return [before,str(learn.summary()).split('Callbacks')[0]],[went(learn)]

@row
def predict(make):
    learn = classify(make)
    learn.fit(6)
    (word,i,preds) = learn.predict(100)
    return [word,i.item(),preds.dtype],[preds]

@row
def quiet(make):
    learn = make()
    learn.logger = lambda o: 1/0
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    return None,[went(learn),logged(learn)]

@row
def short_epoch(make):
    "fastai's way to try things: a part of an epoch"
    learn = make()
    learn.fit(2, cbs=ShortEpochCallback(.5))
    return len(learn.recorder.losses),[went(learn)]

@row
def gather_and_fetch(make):
    "What callbacks collect while validating"
    learn = make(norm=True)
    fetch = FetchPredsCallback()
    learn.fit(2, cbs=fetch)
    return None,[fetch.preds[0]]

@lru_cache(None)
def in_float32(name):
    with TemporaryDirectory() as d: return rows[name](partial(make, None, Path(d)))

def plain(o):
    "With lists for arrays, to be compared"
    if isinstance(o, dict): return {k:plain(v) for k,v in o.items()}
    return [plain(x) for x in o] if isinstance(o, (list,tuple,L)) else o.tolist() if hasattr(o, 'tolist') else o

def off(a, b):
    a,b = (o.double() if isinstance(o, torch.Tensor) else torch.tensor(np.array(o), dtype=torch.float64) for o in (a,b))
    return ((a-b).norm()/b.norm()).item()

turns = in_turns(rows, modes) # the one mode of each row that isn't slow

@pytest.mark.parametrize('name,mode', crossed(rows, modes, fast=lambda name,mode: mode==turns[name]))
def test_row(name, mode, tmp_path):
    (same32,near32),(same,near) = in_float32(name),rows[name](partial(make, mode, tmp_path))
    assert plain(same)==plain(same32)
    offs = [off(a, b) for a,b in zip(near, near32, strict=True)]
    assert all(o<4*roundoff[mode] for o in offs), [o/roundoff[mode] for o in offs]

# --- What float32 doesn't do, or doesn't do well

@pytest.mark.parametrize('mode', modes)
def test_spoilt_window(mode, tmp_path):
    "One bad batch of those that are accumulated for a step: it is skipped, and the others are what they are without it"
    learn = make(mode, tmp_path, cbs=[GradientAccumulation(32),Spoil(2)])
    other = make(None, tmp_path, cbs=GradientAccumulation(32))
    other.dls = DataLoaders(list(other.dls.train)[:2], other.dls.valid, device='cpu')
    for o in (learn,other): o.fit(1)
    assert off(went(learn), went(other))<4*roundoff[mode]

def settled(learn):
    "All that training changes"
    return plain([learn.model.state_dict(), learn.opt.state_dict()['state'], precision_state(learn)])

suggest_funcs = (minimum,steep,valley,slide)

@lru_cache(None)
def found_in_float32():
    with TemporaryDirectory() as d:
        learn = make(None, Path(d), norm=True, opt_func=Adam)
        learn.fit(1, 1e-3)
        return learn.lr_find(show_plot=False, suggest_funcs=suggest_funcs),learn.recorder.losses

@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o=='native_fp16'))
def test_lr_find(mode, tmp_path):
    "The same learning rates are suggested, and afterwards the learner is what it was, bit for bit"
    learn = make(mode, tmp_path, norm=True, opt_func=Adam)
    learn.fit(1, 1e-3)
    before = settled(learn)
    got = learn.lr_find(suggest_funcs=suggest_funcs)
    plt.close('all')
    assert settled(learn)==before and not list((tmp_path/'models').iterdir())
    want,losses = found_in_float32()
    n = len(losses)//2
    assert off(learn.recorder.losses[:n], losses[:n])<roundoff[mode]
    for a,b in zip(got, want, strict=True): assert .5<a/b<2, (got, want)

bads = crossed(modes, [(),(0,),(1,2,3)], fast=lambda mode,bad: (mode,bad)==('fp16',(1,2,3)))

high = dict(fp16=dict(max_loss_scale=2.**24, headroom=None), native_fp16=dict(init_scale=2.**24),
            fp16_static=dict(loss_scale=2.**10))

class Cancelled(Callback):
    "How many steps were skipped, as `lr_find` leaves no rows in the recorder"
    n = 0
    def after_cancel_step(self): self.n += 1

@pytest.mark.parametrize('mode,bad', bads, ids=str)
def test_lr_find_overflow(mode, bad, tmp_path):
    """Batches that overflow in the beginning, whether for their data or for the scale, don't end the search; and the
    scale is again what it was"""
    cancelled = Cancelled()
    learn = make(None, tmp_path, norm=True, cbs=[Spoil(*bad),cancelled])
    modes[mode](learn, **high.get(mode, {}))
    learn.create_opt()
    before,scale = settled(learn),learn.mixed_precision.loss_scale
    got = learn.lr_find(suggest_funcs=suggest_funcs, show_plot=False)
    assert settled(learn)==before and learn.mixed_precision.loss_scale==scale
    assert all(1e-7<=o<=10 for o in got) and len(learn.recorder.losses)>50, got
    assert cancelled.n>=len(bad)+(mode in ('fp16','native_fp16')) and not len(learn.precision_recorder.log)
    learn.remove_cb(Spoil)
    loss = learn.validate()[0]
    learn.fit(4)
    assert learn.validate()[0]<loss
