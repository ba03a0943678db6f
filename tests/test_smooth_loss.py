"A loss that is read when it is shown: all numbers as fastai's, to the last bit, and nothing left behind"
import math,pickle,random
from types import SimpleNamespace

import cloudpickle,matplotlib; matplotlib.use('agg')
import pytest
from fastai.callback.tracker import EarlyStoppingCallback,ReduceLROnPlateau,SaveModelCallback
from fastai.learner import AvgLoss,AvgSmoothLoss

import mp_callbacks.smooth_loss as ours
from learners import *
from test_signals import Lines
from copy import copy,deepcopy

pytestmark = pytest.mark.filterwarnings('ignore')
modes = {None: lambda learn, **kwargs: learn, **modes}
each_mode = pytest.mark.parametrize('mode', modes)
inf,nan = float('inf'),float('nan')

def make(mode, late, **kwargs):
    "A learner in `mode` that looks at its loss late, on a CPU too; or one that does as fastai"
    learn = get_learner(**kwargs)
    if mode in (None,'alone'): modes[mode](learn).add_cb(LossOnDevice(late))
    else: modes[mode](learn, loss_on_device=late)
    return learn

@pytest.fixture(params=[0.,.2,1e9], ids=['at_once','now_and_then','at_the_end'])
def every(request, monkeypatch): monkeypatch.setattr(LateNumbers, 'every', request.param)

def same(x, y):
    "Are `x` and `y` bit for bit the same? Also lists of lists, and nan"
    if isinstance(x, (list,tuple,L)): return len(x)==len(y) and all(map(same, x, y))
    if isinstance(x, torch.Tensor): return type(x) is torch.Tensor and (x.dtype,x.shape,x.device)==(y.dtype,y.shape,y.device) and (torch.equal(x, y) or (x.isnan() & y.isnan()).all().item())
    return x==y or x!=x and y!=y

def recorded(learn):
    o = learn.recorder
    return [o.losses,o.values,o.iters,o.lrs,learn.smooth_loss,o.smooth_loss.val,o.smooth_loss.count,o.smooth_loss.value,getattr(o.loss, 'total', None),getattr(o.loss, 'count', None),learn.final_record]

def as_it_was(learn):
    "Nothing of ours is left in what is fastai's"
    cbs = [type(cb) for cb in learn.cbs if cb.name in ('recorder','progress')]
    assert set(cbs)<={Recorder,ProgressCallback}, cbs
    assert (type(learn.recorder.smooth_loss),type(learn.recorder.loss))==(AvgSmoothLoss,AvgLoss)
    assert vars(learn.recorder).keys()<={*vars(get_learner().recorder),'lrs','iters','losses','values','metric_names','cancel_train','cancel_valid','start_epoch','log','hps','run'}

# --- The same numbers

class Logged(Callback):
    "What is printed"
    order = 90
    def before_fit(self):
        self.rows = []
        self.learn.logger = lambda row: self.rows.append([str(o) for o in row])

def fitted(mode, late, n=3, cbs=None, **kwargs):
    learn = make(mode, late, **kwargs)
    learn.recorder.add_time = False
    learn.fit(n, cbs=[cb := Logged(), *L(cbs)])
    return learn,cb.rows

@each_mode
def test_same_numbers(mode, every):
    (a,rows),(b,plain) = (fitted(mode, o, metrics=mae) for o in (True,False))
    assert len(plain)==3 and rows==plain
    assert same(recorded(a), recorded(b)) and same(weights(a), weights(b))
    as_it_was(a)

@pytest.mark.parametrize('kwargs', [dict(train_metrics=True), dict(train_metrics=True, valid_metrics=False), dict(valid_metrics=False), dict(beta=.5)], ids=str)
def test_settings_of_the_recorder(kwargs, every):
    def run(late):
        learn = make('bf16', late, metrics=mae)
        learn.remove_cb(Recorder)
        learn.add_cb(Recorder(add_time=False, **kwargs))
        learn.fit(2)
        return recorded(learn)
    assert same(run(True), run(False))

class Spoil(Callback):
    "A loss that isn't finite, in some batches"
    order,run_valid = -50,False
    def __init__(self, where, x): self.where,self.x = where,x
    def after_loss(self):
        if self.train_iter in self.where: self.learn.loss,self.learn.loss_grad = self.learn.loss+self.x,self.learn.loss_grad*self.x

@pytest.mark.parametrize('where', [(0,),(0,1,2),(3,),(1,2,7)])
@pytest.mark.parametrize('x', [nan,inf])
@each_mode
def test_losses_that_are_not_finite(mode, where, x, every):
    "are kept out by the callbacks for mixed precision, and without these they are in"
    (a,_),(b,_) = (fitted(mode, late, cbs=Spoil(where, x)) for late in (True,False))
    assert same(recorded(a), recorded(b))
    assert math.isfinite(a.smooth_loss)==(mode is not None)

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_second_fit_and_resumed(mode, tmp_path, every):
    def run(late):
        learn = make(mode, late, path=tmp_path)
        learn.fit_one_cycle(2)
        learn.save('here')
        learn.validate()
        learn.fit(1)
        again = make(mode, late, path=tmp_path).load('here')
        again.fit(1)
        return recorded(learn),recorded(again)
    got,want = run(True),run(False)
    assert same(got, want)

@each_mode
def test_lr_find(mode, every):
    def run(late):
        learn = make(mode, late, dls=get_dls(n=256))
        found = learn.lr_find(start_lr=1e-4, end_lr=100, num_it=60, show_plot=False, suggest_funcs=(minimum,steep,valley,slide))
        learn.recorder.plot_lr_find()
        as_it_was(learn)
        return list(found),recorded(learn),len(learn.recorder.losses)
    got,want = run(True),run(False)
    assert same(got, want) and want[-1]<60 # for it diverges

def test_callbacks_that_look_at_the_record(tmp_path, every):
    def run(late):
        learn = make('bf16', late, path=tmp_path, lr=.3)
        learn.create_mbar = True
        learn.add_cbs([ProgressCallback(), CSVLogger()])
        with learn.no_logging(): learn.fit(6, cbs=[SaveModelCallback(), ReduceLROnPlateau(patience=1), EarlyStoppingCallback(patience=3)])
        learn.recorder.plot_loss()
        return recorded(learn),[o.rpartition(',')[0] for o in (tmp_path/'history.csv').read_text().splitlines()]
    assert same(run(True), run(False))

def test_plots_at_the_end_of_each_epoch(monkeypatch):
    def run(late):
        seen,learn = [],make('bf16', late)
        learn.create_mbar = True
        learn.add_cbs([ProgressCallback(), ShowGraphCallback()])
        class Watch(Callback):
            order = 62
            def before_fit(self): self.progress.mbar.update_graph = lambda graphs,*_: seen.append([list(map(float, o)) for g in graphs for o in g])
        learn.fit(2, cbs=Watch())
        return seen
    got,want = run(True),run(False)
    assert got==want and len(want)==2

# --- Who looks in between

class Look(Callback):
    "See what there is to see, in some batches"
    order = 70
    def __init__(self, event, where): self.where,self.seen = where,[]; setattr(self, event, self.look)
    def look(self):
        o = self.learn.recorder
        if self.learn.iter not in self.where: return
        self.seen.append([getattr(self.learn, 'smooth_loss', None), hasattr(self, 'smooth_loss'), list(o.losses), o.smooth_loss.value, o.smooth_loss.val, o.smooth_loss.count, len(o.lrs)])

@pytest.mark.parametrize('event', ['before_batch','after_loss','after_batch','after_train','after_epoch','before_validate'])
@pytest.mark.parametrize('where', [(0,1,2,3),(2,)])
def test_looked_at(event, where, every):
    "Everybody sees what there would be if it had been read at once"
    looks = [Look(event, (3,) if 'batch' not in event and 'loss' not in event else where) for _ in range(2)]
    for cb,late in zip(looks, (True,False)): fitted('bf16', late, cbs=cb)
    assert looks[0].seen and same(looks[0].seen, looks[1].seen)

def test_kept_numbers_stay(every):
    "A number that was taken is of its moment"
    class Keep(Callback):
        order,run_valid = 70,False
        def before_fit(self): self.kept = []
        def after_batch(self): self.kept.append(self.smooth_loss)
    learn,_ = fitted('bf16', True, cbs=(cb := Keep()))
    assert same(cb.kept, learn.recorder.losses)

@pytest.mark.parametrize('what', [lambda learn: learn.validate(), lambda learn: learn.get_preds(), lambda learn: learn.get_preds(inner=True)], ids=['validate','get_preds','inner'])
@pytest.mark.parametrize('event', ['after_batch','after_train','after_epoch'])
def test_validation_in_the_middle(what, event, every):
    def run(late):
        class Now(Callback):
            order,done = 95,False
            def now(self):
                if self.done or event=='after_batch' and self.learn.iter<2: return
                self.done = True
                what(self.learn)
        cb = Now()
        setattr(cb, event, cb.now)
        learn = make('bf16', late)
        try: learn.fit(2, cbs=cb)
        except Exception as e: return type(e),learn.recorder.losses
        return recorded(learn)
    assert same(run(True), run(False))

def test_fetched_predictions(every):
    def run(late):
        learn = make('bf16', late, cbs=(cb := FetchPredsCallback()))
        learn.add_cb(ProgressCallback())
        learn.fit(2)
        as_it_was(learn)
        return recorded(learn),cb.preds[0]
    assert same(run(True), run(False))

# --- The queue

class Slow(LateNumbers):
    "A device that has done what was asked before the last but `lag` copies"
    lag,marks = 1,0
    def _mark(self, device):
        self.marks = n = self.marks+1
        self.asked = 0
        def passed(): self.asked += 1; return self.asked>self.lag
        return passed

@pytest.mark.parametrize('lag', [0,1,5,100])
def test_order(lag, monkeypatch):
    monkeypatch.setattr(LateNumbers, 'every', 0.)
    late = Slow()
    late.lag = lag
    come = []
    for i in range(50):
        late.put(torch.tensor(float(i)), i)
        late.poll()
        while late.ready: come.append(late.ready.popleft())
    assert (len(come)<50) and len(come)+len(late.waiting)==50 and bool(come)==(lag<50)
    late.wait()
    come += late.ready
    assert [(x.item(),o) for x,o in come]==[(i,i) for i in range(50)] and not late.waiting

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16,torch.float64])
def test_other_dtypes(dtype):
    "fastai's average of the training loss takes float32 and raises for others; here each counts as float32. That of validation has its dtype."
    x,y = torch.tensor(1.3, dtype=dtype),torch.rand(3)
    smooth,plain = DeviceSmoothLoss(AvgSmoothLoss()),AvgSmoothLoss()
    smooth.accumulate(SimpleNamespace(loss=x))
    plain.accumulate(SimpleNamespace(loss=x.float()))
    assert same(smooth.value, plain.value)
    loss,plain = DeviceAvgLoss(AvgLoss()),AvgLoss()
    for o in (loss,plain):
        o.reset()
        for _ in range(3): o.accumulate(SimpleNamespace(loss=x, yb=(y,), to_detach=to_detach))
    assert same(loss.value, plain.value)

def test_no_graph_and_no_heap(monkeypatch):
    "What waits has no graph, and isn't much: what has come is let go"
    monkeypatch.setattr(LateNumbers, 'every', 0.)
    most = []
    class Count(Callback):
        order,run_valid = 70,False
        def after_batch(self):
            late = self.learn.recorder.smooth_loss.late
            most.append(len(late.waiting))
            assert not any(x.requires_grad or x.ndim for x,_ in late.waiting)
    fitted('fp16', True, n=8, cbs=Count())
    assert len(most)==32 and max(most)<=2

# --- The progress bar

class Bar(Callback):
    "What the progress bar says after each batch"
    order = 80
    def before_fit(self): self.said = []
    def after_batch(self): self.said.append((self.learn.training,self.learn.progress.pbar.comment))

def with_bar(late, cls=ProgressCallback, n=2):
    learn = make('bf16', late)
    learn.create_mbar = True
    learn.add_cb(cls())
    cb = Bar()
    with learn.no_logging(): learn.fit(n, cbs=cb)
    if cls is ProgressCallback: as_it_was(learn)
    return cb.said,learn

def test_bar_of_a_fast_device(monkeypatch):
    "What is asked for in one batch has come in the next"
    monkeypatch.setattr(LateNumbers, 'every', 0.)
    got,want = with_bar(True)[0],with_bar(False)[0]
    train,plain = ([o for t,o in s if t] for s in (got,want))
    assert train[0]==plain[0] and train[3]==plain[3] and train[7]==plain[7] and set(train)<=set(plain)
    assert [o for t,o in got if not t]==[o for t,o in want if not t]

def test_bar_of_a_slow_device(monkeypatch):
    "The first number is waited for, and the last of each epoch; in between it is that which has come. None costs a sync."
    monkeypatch.setattr(LateNumbers, 'every', 0.)
    monkeypatch.setattr(LateNumbers, '_mark', lambda self, device: lambda: False)
    got,want = with_bar(True)[0],with_bar(False)[0]
    plain = [o for t,o in want if t]
    assert [o for t,o in got if t]==[plain[i] for i in (0,0,0,3,3,3,3,7)]
    assert [o for t,o in got if not t]==[o for t,o in want if not t]

def test_a_bar_of_your_own(every):
    "reads the loss as ever, and so do a recorder and metrics of your own"
    class Mine(ProgressCallback): name = 'progress'
    assert with_bar(True, Mine)[0]==with_bar(False, Mine)[0]

class OtherRecorder(Recorder): name = 'recorder'
class OtherLoss(AvgSmoothLoss): pass

@pytest.mark.parametrize('kind', ['recorder','smooth_loss'])
def test_left_alone(kind):
    seen = []
    class Kind(Callback):
        def after_batch(self): seen.append((type(self.learn.recorder),type(self.learn.recorder.smooth_loss)))
    learn = make('bf16', True)
    if kind=='recorder': learn.remove_cb(Recorder); learn.add_cb(OtherRecorder())
    else: vars(learn.recorder)['smooth_loss'] = OtherLoss()
    learn.fit(1, cbs=Kind())
    assert set(seen)=={(OtherRecorder,AvgSmoothLoss) if kind=='recorder' else (Recorder,OtherLoss)}

@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_without_a_recorder(mode):
    learn = make(mode, True)
    learn.remove_cb(Recorder)
    learn.fit(1)
    assert not hasattr(learn, 'smooth_loss') and not hasattr(learn, 'recorder')

# --- On and off

def seen_type(learn, **kwargs):
    seen = []
    class Kind(Callback):
        def before_batch(self): seen.append(type(self.learn.recorder))
    learn.fit(1, cbs=Kind())
    kind, = set(seen)
    return kind

@pytest.mark.parametrize('call', calls)
def test_default(call, monkeypatch):
    "On an accelerator, unless it is turned off; not on a CPU, unless it is turned on"
    def learner(**kwargs): return getattr(get_learner(), call)(**kwargs)
    assert seen_type(learner()) is Recorder and seen_type(learner(loss_on_device=True)) is ours._DeviceRecorder
    monkeypatch.setattr(ours, 'fit_device', lambda learn: torch.device('cuda'))
    assert seen_type(learner()) is ours._DeviceRecorder and seen_type(learner(loss_on_device=False)) is Recorder

@pytest.mark.parametrize('call', calls)
def test_gone(call):
    "with to_fp32; and a new precision has its own setting"
    learn = get_learner()
    was,cbs = set(vars(learn)),[type(cb) for cb in learn.cbs]
    getattr(learn, call)(loss_on_device=True)
    for o in calls: getattr(learn, o)(loss_on_device=False)
    assert [cb.on for cb in learn.cbs if isinstance(cb, LossOnDevice)]==[False]
    learn.fit(1)
    getattr(learn, call)(loss_on_device=True).to_fp32()
    as_it_was(learn)
    assert [type(cb) for cb in learn.cbs]==cbs and set(vars(learn))-was<={'epoch','loss','train_iter','pct_train','n_iter','iter','dl','xb','yb','pred','loss_grad','smooth_loss','final_record'}
    assert seen_type(learn) is Recorder

@pytest.mark.parametrize('bad', [1,'cuda',0.])
@pytest.mark.parametrize('call', calls)
def test_argument(call, bad):
    learn = get_learner().to_bf16()
    cbs = list(learn.cbs)
    with pytest.raises(TypeError, match='must be True, False or None'): getattr(learn, call)(loss_on_device=bad)
    assert list(learn.cbs)==cbs

def test_off_in_the_middle(every):
    "of a fit, between its epochs: the numbers go on"
    def run(late):
        class Off(Callback):
            order = 95
            def after_epoch(self):
                if self.epoch==0: self.learn.to_fp32()
        learn = make('bf16', late)
        learn.fit(3, cbs=Off())
        as_it_was(learn)
        return recorded(learn)
    assert same(run(True), run(False))

# --- Left in the middle

events = 'before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch after_train before_validate after_validate after_epoch after_fit'.split()

@pytest.mark.parametrize('error', [KeyboardInterrupt,CancelFitException,CancelTrainException,CancelBatchException])
@pytest.mark.parametrize('order', [-60,80])
def test_interrupted(error, order):
    "in any event: what was recorded by then is there, and the next fit is a fit like any other"
    class Stop(Callback):
        def __init__(self, event): self.order,self.event = order,event; setattr(self, event, self.stop)
        def stop(self):
            if self.event in ('before_fit','before_epoch','before_train') or self.learn.training==('valid' not in self.event) and self.learn.iter==1 or self.event in events[-5:]: raise error('as asked')
    def run(late, event):
        learn = make('fp16', late)
        learn.create_mbar = True
        learn.add_cb(ProgressCallback())
        raised = None
        with learn.no_logging():
            try: learn.fit(1, cbs=Stop(event))
            except BaseException as e: raised = type(e)
        as_it_was(learn)
        there = [raised,list(getattr(learn.recorder, 'losses', [])),list(getattr(learn.recorder, 'lrs', [])),getattr(learn, 'smooth_loss', None),learn.recorder.smooth_loss.count]
        learn.logger,learn.create_mbar = noop,False
        learn.fit(1)
        return there,recorded(learn)
    for event in events: assert same(run(True, event), run(False, event)), event

def test_any_moment():
    "An interrupt before any line of it: nothing is left, and the next fit records what it should"
    learn = make('bf16', True)
    class Mine(Lines):
        def __call__(self, frame, event, arg): return super().__call__(frame, event, arg) if frame.f_code.co_filename==ours.__file__ else None
    learn.fit(1)
    with Mine() as all_lines: learn.fit(1)
    assert all_lines.n>100
    for at in sorted(random.Random(0).sample(range(1, all_lines.n+1), 150)):
        with pytest.raises(KeyboardInterrupt), Mine(at): learn.fit(1)
        as_it_was(learn)
        assert not learn.recorder.lrs or abs(len(learn.recorder.losses)-len(learn.recorder.lrs))<=1
    learn.fit(1)
    assert len(learn.recorder.losses)==len(learn.recorder.lrs)==4

# --- Copies

@pytest.mark.parametrize('event', [None,'after_epoch'])
def test_exported(event, tmp_path, every):
    "after a fit or in the middle of one, the file has a learner of fastai's with our callbacks"
    learn = make('bf16', True, path=tmp_path)
    learn.add_cb(ProgressCallback())
    class Copy(Callback):
        order = 95
        def now(self): self.pickled,self.other,self.bar = cloudpickle.dumps(self.learn, 2),deepcopy(self.learn.recorder),copy(self.learn.progress)
    if event is None:
        learn.fit(1)
        learn.export('e.pkl')
        for cpu in (True,False):
            other = load_learner(tmp_path/'e.pkl', cpu=cpu)
            assert (type(other.recorder),type(other.progress))==(Recorder,ProgressCallback) and hasattr(other, 'loss_on_device')!=cpu
            other.dls = learn.dls
            assert len(other.validate())==1
        return
    cb = Copy()
    setattr(cb, event, cb.now)
    learn.fit(1, cbs=cb)
    again = pickle.loads(cb.pickled)
    assert type(again.progress) is ProgressCallback and again.recorder in again.cbs and again.recorder.learn is again
    for o in (cb.other, again.recorder):
        assert (type(o),type(o.smooth_loss),type(o.loss))==(Recorder,AvgSmoothLoss,AvgLoss) and o.smooth_loss.count==4
    assert type(cb.bar) is ProgressCallback
    as_it_was(learn)
