"""fastai's own callbacks and methods in each precision, against float32: the same behaviour, the right numbers

Each row of the table is a function here, of the name of what is tried. It is given `make`, for learners in the
precision in question, and returns what has to be the same as in float32, and what has to be near it: within four times
the roundoff of the half dtype, relative to its norm. For the reason why see `test_parity.py`. What fastai's loggers
write is in `test_recorder.py`, `SaveModelCallback` in `test_resume.py`."""
from fastai.vision.augment import Flip
from fastai.vision.core import PILImageBW
from fastai.vision.learner import * # how images are shown with their losses
from learners import *
from sklearn.datasets import load_digits

modes = {**modes, 'bf16_flat': lambda learn, **kwargs: learn.to_bf16(flat_master=True, **kwargs)}
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

images,labels = load_digits(return_X_y=True)
images = (images.reshape(-1,8,8)*15.9).astype('uint8')

def digits():
    "Images of digits to classify, flipped at random while training"
    tfms,splits = [[At(images),PILImageBW.create], [At(labels),Categorize()]],[range(96),range(96,144)]
    kwargs = dict(after_item=ToTensor(), after_batch=[IntToFloatTensor(),Flip()], num_workers=0, device='cpu')
    return Datasets(range(144), tfms, splits=splits).dataloaders(bs=32, shuffle=False, **kwargs)

def classify(make, **kwargs):
    "A learner that classifies digits"
    torch.manual_seed(1)
    layers = nn.Linear(64,32,bias=False),nn.BatchNorm1d(32),nn.GELU(),nn.Linear(32,10)
    model = nn.Sequential(nn.Flatten(), *layers) # not ReLU: rounding switches some of its units on or off
    return make(model, **{'dls':digits(), 'loss_func':CrossEntropyLossFlat(), **kwargs})

def head_and_body(m): return [params(m[:-1]),params(m[-1:])]

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_model_changed_in_a_fit(mode):
    """A part that is float64 from an epoch on is no parameter that the forward pass has rounded

    A new block counts in the next batch, also if the old one has another place in the model."""
    model = Does(lambda m, x: m.last(m.body(x).to(m.last.weight.dtype)), last=nn.Linear(16,1),
                 body=nn.Sequential(nn.Linear(8,16), nn.Linear(16,16)))
    def replace(learn):
        model.old = model.body.pop(1)
        model.body.append(nn.LayerNorm(16))
        seen.append(returned(model.body[1]))
    seen,changes = [],[noop,lambda learn: model.last.requires_grad_(False).double(),replace]
    learn = ask_nothing(modes[mode](get_learner(model), keep=nn.LayerNorm))
    fitted(learn, 3, On('before_train', lambda o: changes[o.epoch](o)))
    assert len(seen[0])==8 and {o.dtype for o in seen[0]}=={torch.float32}
    assert {p.dtype for p in model.last.parameters()}=={torch.float64}

@row
def mixed_data(make):
    "MixUp of images and of numbers, and CutMix"
    same,near = [],[]
    for new,cb in ((partial(classify, make),MixUp()), (make,MixUp()), (partial(classify, make),CutMix())):
        learn = new(cbs=cb)
        loss = learn.loss_func
        learn.fit(2)
        same.append(learn.loss_func is loss)
        near += [went(learn),logged(learn)]
    return same,near

@row
def losses(make):
    res = []
    bce = BCEWithLogitsLossFlat(thresh=.2)
    def one_hot(p, y): return bce(p, F.one_hot(y, 10))
    for f in (LabelSmoothingCrossEntropy(), LabelSmoothingCrossEntropyFlat(), FocalLossFlat(), one_hot):
        learn = fitted(classify(make, loss_func=f), 2)
        res += [went(learn),logged(learn)]
    return None,res

@row
def trackers(make):
    "One ends the fit early, one lowers the learning rate"
    lrs,near = [],[]
    def uphill(learn): learn.opt.set_hyper('lr', .05 if learn.epoch<3 else -.05) # later every step makes it worse
    for cbs in ([On('before_epoch', uphill, 70),EarlyStoppingCallback(patience=2)],
                [ReduceLROnPlateau(min_delta=10., factor=4., min_lr=.01)]):
        learn = fitted(make(cbs=cbs), 7, On('before_batch', lambda o: lrs.append(o.opt.hypers[-1]['lr'])))
        near += [went(learn),logged(learn)]
    return lrs,near

class EMA(Callback):
    """As in many users' code: an exponential average of the weights after each step that was taken, which stands in for
    them in validation"""
    def before_fit(self): self.n,self.avg = 0,[p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        if getattr(self.learn, 'step_stats', None) is not None and not self.learn.step_stats.finite: return
        self.n += 1
        for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .2)
    def swap(self):
        for a,p in zip(self.avg, self.model.parameters()): a.data,p.data = p.data,a.data
    before_validate = after_validate = swap

@row
def ema(make):
    def spoil(learn): # batches that no precision can learn from: in float32 they are left out
        if not hasattr(learn, 'mixed_precision'): raise CancelBatchException
        learn.xb = (learn.x*math.inf,)
    learn = fitted(make(cbs=[avg := EMA(),On('before_batch', spoil, 8, (2,3,5))]), 3)
    return avg.n,[went(learn),flat(avg.avg)-learn.start,[o[1] for o in logged(learn)]]

@row
def schedules(make):
    "And a part of an epoch, fastai's way to try things"
    schedule = ParamScheduler(dict(lr=SchedLin(.01, .05), mom=SchedCos(.9, .5), wd=SchedNo(.1, .1)))
    rates,near = [],[]
    see = On('before_batch', lambda o: rates.append((o.opt.hypers[-1]['lr'],o.opt.hypers[-1]['mom'])), order=70)
    for mom,f in ((.9, lambda o: o.fit_one_cycle(3, .05, cbs=see)), (0., lambda o: o.fit_flat_cos(3, .05, cbs=see)),
                  (0., lambda o: o.fit_sgdr(2, 1, .05, cbs=see)), (.9, lambda o: o.fit(3, cbs=[see,schedule])),
                  (0., lambda o: o.fit(2, cbs=[see,ShortEpochCallback(.5)]))):
        learn = make(opt_func=partial(SGD, mom=mom))
        f(learn)
        near += [went(learn),learn.recorder.losses]
    return rates,near

@row
def fine_tune(make):
    learn = classify(make, splitter=head_and_body)
    moved = []
    learn.fine_tune(2, .1, cbs=On('after_train', lambda o: moved.append((went(o)[:64*32]!=0).any().item())))
    return [moved,learn.recorder.hps['lr'][-1].tolist()],[went(learn),logged(learn)]

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

@row
def predict_in_a_fit(make):
    "After each epoch, by the learner's own method, after the fit, and by what a callback collects while validating"
    learn,preds,fetch = make(norm=True),[],FetchPredsCallback()
    learn.fit(2, cbs=On('after_train', lambda o: preds.append(o.get_preds(inner=True)[0])))
    learn.fit(1, cbs=fetch)
    return None,[went(learn),*preds,fetch.preds[0],learn.get_preds()[0],learn.validate()[0]]

@row
def looks_at_a_classifier(make):
    "Test-time augmentation, interpretation, a look at results"
    learn = fitted(classify(make), 6)
    set_seed(0)
    near = [learn.tta()[0],learn.tta(use_max=True)[0]]
    res = ClassificationInterpretation.from_learner(learn)
    inps,preds,targs,decoded,loss = res[[3,1,4]]
    confusion = res.confusion_matrix()
    learn.show_results(max_n=4, shuffle=False)
    titles = [o.get_title().split('\n')[0] for o in plt.gcf().axes]
    plt.close('all')
    same = [list(res.vocab),confusion.sum(1).tolist(),confusion.diagonal().sum()>24,inps.tolist(),targs.tolist(),titles]
    return same,[*near,res.losses,preds,loss,res.top_losses(5)[0]]

@functools.cache
def in_float32(name):
    with TemporaryDirectory() as d: return rows[name](partial(make, None, Path(d)))

def off(a, b):
    a,b = (o.double() if isinstance(o, torch.Tensor) else torch.tensor(np.array(o), dtype=torch.float64) for o in (a,b))
    return ((a-b).norm()/b.norm()).item()

turns = in_turns(rows, modes) # the one mode of each row that isn't slow

@pytest.mark.parametrize('name,mode', crossed(rows, modes, fast=lambda name,mode: mode==turns[name], thin=3))
def test_row(name, mode, tmp_path):
    (equal32,near32),(equal,near) = in_float32(name),rows[name](partial(make, mode, tmp_path))
    assert same(equal, equal32)
    offs = [off(a, b) for a,b in zip(near, near32, strict=True)]
    assert all(o<4*roundoff(mode) for o in offs), [o/roundoff(mode) for o in offs]

# --- What float32 doesn't do, or doesn't do well

suggest_funcs = (minimum,steep,valley,slide)

@pytest.mark.parametrize('mode', crossed(modes, fast=lambda o: o=='native_fp16'))
def test_lr_find(mode, tmp_path):
    "The same learning rates are suggested, and afterwards the learner is what it was, bit for bit"
    def find(mode):
        learn = fitted(make(mode, tmp_path, norm=True, opt_func=Adam), lr=1e-3)
        before = everything(learn) if mode else None
        res = learn.lr_find(show_plot=False, suggest_funcs=suggest_funcs)
        if mode: assert same(everything(learn), before) and not list((tmp_path/'models').iterdir())
        return res,torch.tensor(learn.recorder.losses)
    (want,losses32),(got,losses) = find(None),find(mode)
    n = len(losses32)//2
    assert off(losses[:n], losses32[:n])<roundoff(mode)
    for a,b in zip(got, want, strict=True): assert .5<a/b<2, (got, want)

def test_lr_find_overflow(tmp_path):
    """Batches that overflow in the beginning, whether for their data or for the scale, don't end the search; and the
    scale is again what it was"""
    cancelled,bad = [],InfiniteAt(1,2,3) # as `lr_find` leaves no rows in the recorder
    learn = make(None, tmp_path, norm=True, cbs=[bad,On('after_cancel_step', cancelled.append)])
    ask_nothing(learn.to_fp16(max_loss_scale=2.**24, headroom=None)).create_opt()
    with stays(lambda: [everything(learn),learn.mixed_precision.loss_scale]):
        got = learn.lr_find(suggest_funcs=suggest_funcs, show_plot=False)
    assert all(1e-7<=o<=10 for o in got) and len(learn.recorder.losses)>50, got
    assert len(cancelled)>3 and not len(learn.precision_recorder.log)
    learn.remove_cb(bad)
    loss = learn.validate()[0]
    learn.fit(4)
    assert learn.validate()[0]<loss
