"`recorder`: what PrecisionRecorder keeps of each step, draws, says, and adds to fastai's table of epochs"
import math,warnings
from copy import deepcopy

import matplotlib.pyplot as plt,numpy as np,pytest
from fastai.callback.tracker import *
from fastai.callback.training import GradientAccumulation
from learners import *
from mp_callbacks.recorder import LogRow,count_outcomes

pytestmark = pytest.mark.filterwarnings('ignore:.*only emulates')

class Overflow(Callback):
    "The gradient of 2.weight overflows in the training batches `at`"
    def __init__(self, *at): self.at = at
    def before_fit(self): self.hook = self.learn.model[2].weight.register_hook(self.change)
    def change(self, grad): return grad*math.inf if self.learn.train_iter in self.at else grad
    def after_fit(self): self.hook.remove()

class Cancel(Callback):
    "Raise `ex` at `event` of the training batches `at`"
    def __init__(self, event, ex, order, at=(1,)):
        self.ex,self.order,self.at = ex,order,at
        setattr(self, event, self.go)
    def go(self):
        if self.learn.training and self.learn.train_iter in self.at: raise self.ex

def log(learn): return learn.precision_recorder.log
def row(i, scale=4., norm=1., skipped=False, culprit='', loss=.5):
    finite = math.isfinite(norm)
    return LogRow(i, scale, norm, finite, skipped or not finite, False, culprit, loss)
def recorder(*rows):
    res = PrecisionRecorder()
    res.rows = [*rows]
    return res

# --- The log

@pytest.mark.parametrize('mode', modes)
def test_log(mode):
    "A row for each step says what `step_stats` said; its loss is what fastai's own recorder has after the batch"
    class Probe(Callback):
        order = 70
        def __init__(self): self.seen = []
        def after_batch(self):
            if not self.learn.training: return
            self.seen.append((self.learn.step_stats,self.learn.recorder.smooth_loss.value.item()))
    learn = modes[mode](get_learner())
    learn.fit(2, cbs=[probe:=Probe(),Overflow(2)])
    df = log(learn)
    stats,losses = zip(*probe.seen)
    assert list(df)==[*LogRow._fields] and len(df)==8
    for o in ('step','scale','finite'): assert list(df[o])==[getattr(s, o) for s in stats]
    assert np.array_equal(df.norm, [s.norm for s in stats], equal_nan=True) and list(df.loss)==[*losses]
    assert list(df.skipped)==[i==2 for i in range(8)]==list(~df.finite)
    assert list(df.culprit)==['2.weight' if i==2 else '' for i in range(8)]
    assert math.isclose(df.loss[2], df.loss[1], rel_tol=1e-6) and df.loss[3]!=df.loss[2]
    assert (df.dtypes[['finite','skipped']]==bool).all()

def test_culprit_outside_the_model():
    "A loss may have parameters of its own"
    class Loss(nn.Module):
        def __init__(self): super().__init__(); self.scale = nn.Parameter(torch.zeros(()))
        def forward(self, p, y): return ((p-y)**2).mean()+self.scale.sqrt() # whose gradient is infinite at 0
    loss = Loss()
    learn = get_learner(loss_func=loss, splitter=lambda m: [[*m.parameters(),*loss.parameters()]]).to_bf16()
    learn.fit(1)
    assert list(log(learn).culprit)==['(outside the model)']*4

def test_step_cancelled_by_another():
    learn = get_learner().to_bf16()
    learn.fit(1, cbs=Cancel('before_step', CancelStepException, 20))
    assert list(log(learn).skipped)==[False,True,False,False]
    assert log(learn).finite.all() and (log(learn).culprit=='').all()
    learn.fit(1, cbs=Cancel('before_batch', CancelBatchException, 0, [2])) # changes nothing in the row before
    assert [*log(learn).loss[4:]]==[learn.recorder.losses[i].item() for i in (0,1,3)]

def exported(learn, path):
    learn.export(path)
    res = load_learner(path, cpu=False)
    res.dls,res.create_mbar = learn.dls,False
    return res

@pytest.mark.filterwarnings('ignore:load_learner')
@pytest.mark.parametrize('copied', [lambda o,p: o, lambda o,p: deepcopy(o), exported])
def test_no_row_twice(copied, tmp_path):
    "Batches that only accumulate have no row, and no step has two, also of a copy"
    learn = get_learner().to_fp16()
    learn.fit(1, cbs=GradientAccumulation(32))
    df = log(learn)
    assert len(df)==2
    learn = copied(learn, tmp_path/'export.pkl')
    learn.fit(1, cbs=GradientAccumulation(10**6))
    learn.fit(1, cbs=Cancel('before_step', CancelStepException, 0, range(4))) # before the gradients are measured
    assert log(learn).equals(df)
    learn.fit(1)
    assert len(log(learn))==6 and log(learn)[:2].equals(df)

@pytest.mark.parametrize('ex', [CancelFitException, CancelTrainException, KeyboardInterrupt])
def test_batch_that_stops_after_its_step(ex):
    "Its row is there, and isn't given the loss of a later batch"
    learn = get_learner().to_fp16()
    try: learn.fit(1, cbs=Cancel('after_step', ex, 70))
    except KeyboardInterrupt: pass
    assert len(log(learn))==2 and log(learn).loss.isna().tolist()==[False,True]
    learn.fit(1, cbs=GradientAccumulation(10**6))
    assert len(log(learn))==2 and math.isnan(log(learn).loss[1])

def test_without_fastais_recorder():
    learn = get_learner(cbs=PrecisionRecorder(columns=True)).to_bf16()
    learn.remove_cb(Recorder)
    learn.fit(1)
    assert len(log(learn))==4 and log(learn).loss.isna().all()

# --- The picture

runs = dict(
    none = [],
    one = [row(0)],
    bf16 = [row(i, 1.) for i in range(5)],
    fp16 = [row(0, 8., math.inf, culprit='a', loss=math.nan), row(1, norm=1e-3),
            row(2, 8., math.nan, culprit='b'), row(3)],
    cancelled = [row(0), row(1, skipped=True), row(2)],
    skipped = [row(i, 2.**-i, math.nan, culprit='a', loss=math.nan) for i in range(3)],
    zero = [row(i, norm=0.) for i in range(3)])

@pytest.mark.parametrize('run', runs)
def test_plot(run):
    "Without a warning; as many panels as there is something to see in; skipped steps are marks, not values"
    o = recorder(*runs[run])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', category=DeprecationWarning) # older matplotlib with newer pyparsing
        axs = o.plot()
        axs[0].figure.canvas.draw()
    labels = ['training loss','gradient norm','loss scale'][:2 if run in ('none','bf16') else 3]
    assert [ax.get_ylabel() for ax in axs]==labels
    skips = [i for i,r in enumerate(o.rows) if r.skipped]
    for ax in axs: assert [s[0][0] for s in ax.collections[0].get_segments()]==skips
    plt.close('all')

def test_plot_on_axes():
    "Those of the user are drawn on, and returned; too few or too many are refused"
    axs = plt.subplots(1, 3)[1]
    assert recorder(*runs['fp16']).plot(axs) is axs and all(ax.lines for ax in axs) and len(plt.get_fignums())==1
    with pytest.raises(ValueError, match='axs has 2 axes, and needs 3: for training loss, gradient norm, loss scale'):
        recorder(*runs['fp16']).plot(axs[:2])
    plt.close('all')

# --- In sentences

def said(run): return recorder(*runs[run]).summary().split('\n')

def test_summary():
    assert said('none')==['No steps yet.']
    assert said('one')==['1 step, none skipped.', 'The loss scale was always 4.',
                         'The median gradient norm was 1, the largest 1 (step 0).']
    assert said('fp16')==['4 steps, 2 skipped.',
        'The first skipped step was 0, the last 2. The longest run has length 1.',
        "The last parameter whose gradient wasn't finite was mostly a (1 of 2). For the cause: learn.find_nonfinite().",
        'The loss scale went from 8 to 4 (smallest 4, largest 8, growths: 1).',
        'The median gradient norm was 0.5, the largest 1 (step 3).']
    assert len(said('cancelled'))==4 and 'finite' not in recorder(*runs['cancelled']).summary()
    assert said('skipped')[-1].startswith('The loss scale went from 1 to 0.25')

def test_outcomes():
    "What the summary, the picture and the checkup count"
    rows = [row(i, norm=math.inf if i in (1,3,4,5,8,9) else 1.)._replace(bad_loss=i in (5,6)) for i in range(10)]
    skips,longest,at_end,bad = count_outcomes(recorder(*rows).log)
    assert ([*skips],longest,at_end,[*bad])==([1,3,4,5,8,9],3,2,[6])
    skips,longest,at_end,bad = count_outcomes(recorder().log)
    assert (len(skips),longest,at_end,len(bad))==(0,0,0,0)

# --- Columns of fastai's table

def table(columns=True, mode='fp16', **kwargs):
    return modes[mode](get_learner(cbs=PrecisionRecorder(columns=columns), **kwargs))

def values(learn): return [dict(zip(learn.recorder.metric_names[1:], o)) for o in learn.recorder.values]

def test_columns():
    "They stand between the metrics and the time, and count what happened in each epoch; a second fit begins again"
    learn = table(metrics=mae)
    learn.fit(2, cbs=Overflow(1,2,6))
    names = ['epoch','train_loss','valid_loss','mae','skipped','loss_scale','time']
    assert learn.recorder.metric_names==names and len(learn.recorder.log)==len(names)
    assert [o['skipped'] for o in values(learn)]==[2,1]
    assert [o['loss_scale'] for o in values(learn)]==log(learn).scale[[3,7]].tolist()
    learn.fit(1)
    assert learn.recorder.metric_names==names and values(learn)[0]['skipped']==0

@pytest.mark.parametrize('mode', modes)
def test_changes_nothing_else(mode):
    "Other columns, weights and the result of `validate` are what they are without"
    a,b = [table(o, mode, metrics=mae) for o in (True,False)]
    for o in (a,b): o.fit(2)
    assert b.recorder.metric_names==['epoch','train_loss','valid_loss','mae','time'] and apart(a, b)==0
    assert [o[:3] for o in a.recorder.values]==b.recorder.values
    assert a.validate()==b.validate() and len(a.validate())==2
    assert all(torch.equal(*o) for o in zip(a.get_preds()[0], b.get_preds()[0]))

@pytest.mark.parametrize('kwargs', [dict(train_metrics=True, valid_metrics=False), dict(add_time=False)])
def test_settings_of_fastais_recorder(kwargs):
    learn = table(metrics=mae)
    learn.remove_cb(Recorder)
    learn.add_cb(Recorder(**kwargs)).fit(1, cbs=Overflow(0))
    names = learn.recorder.metric_names
    assert len(learn.recorder.log)==len(names) and values(learn)[0]['skipped']==1
    assert ('time' in names)==(names[-1]=='time')==kwargs.get('add_time', True)

def test_table_without_validation():
    "Without validation data, and in a fit after the columns were switched on; `validate` has no steps to count"
    x,y = numbers()
    learn = table(dls=DataLoaders.from_dsets([*zip(x,y)], [], bs=16, device='cpu', num_workers=0))
    learn.fit(1, cbs=Overflow(0))
    assert len(learn.recorder.log)==len(learn.recorder.metric_names) and values(learn)[0]['skipped']==1
    learn = table(columns=False)
    learn.fit(1)
    learn.precision_recorder.columns = True
    learn.fit(1, cbs=Cancel('before_batch', CancelFitException, 0))
    assert len(learn.validate())==1
    learn.fit(1)
    assert values(learn)[0]['skipped']==0

def test_graph():
    "`ShowGraphCallback` takes the second value for the validation loss"
    learn = table().add_cb(ProgressCallback())
    learn.create_mbar,graphs = True,[]
    class Graph(ShowGraphCallback):
        def after_train(self):
            super().after_train()
            self.progress.mbar.update_graph = lambda graphs_, *args: graphs.append(graphs_[1][1])
    learn.fit(2, cbs=Graph())
    assert graphs[-1]==[o['valid_loss'] for o in values(learn)]

@pytest.mark.parametrize('monitor', ['valid_loss','skipped'])
def test_monitors(monitor, tmp_path):
    "Callbacks that look for a column by its name find theirs, may monitor ours, and write them"
    learn = table(metrics=mae, path=tmp_path)
    saved = SaveModelCallback(monitor=monitor, comp=np.less)
    learn.fit(2, cbs=[saved,CSVLogger(),Overflow(1,5,6)])
    assert saved.best==min(o[monitor] for o in values(learn))
    csv = pd.read_csv(tmp_path/'history.csv')
    assert list(csv)==learn.recorder.metric_names and list(csv.skipped)==[1,2]
    assert list(csv.loss_scale)==log(learn).scale[[3,7]].tolist() and csv.mae.between(0, 10).all()

@pytest.mark.parametrize('columns', [True,False])
def test_tensorboard(columns, tmp_path):
    "Epochs as in the table, and the loss scale of each batch, which is a hyper-parameter of the optimizer"
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn = table(columns)
    learn.fit(2, cbs=[TensorBoardCallback(tmp_path, trace_model=False, log_preds=False),Overflow(1,5,6)])
    events = EventAccumulator(str(tmp_path)).Reload()
    # batches of validation repeat what training wrote last
    read = {k:[*{o.step:o.value for o in events.Scalars(k)}.values()] for k in events.Tags()['scalars']}
    if columns: assert read['skipped']==[1,2] and read['loss_scale']==log(learn).scale[[3,7]].tolist()
    else: assert not {'skipped','loss_scale'}&{*read}
    assert read['mp_loss_scale_0'][:-1]==log(learn).scale[1:].tolist() # the next step's
    assert np.allclose(read['train_loss'], log(learn).loss) and len(read['valid_loss'])==2

# --- Tensors

@pytest.mark.parametrize('mode', modes)
def test_tensors(mode):
    "Every so many steps a row for each parameter, with what its gradient, weight and update are; and nobody notices"
    class Probe(Callback):
        order = 54
        def __init__(self): self.seen = []
        def after_backward(self): self.before = [(p.detach().clone(),p.grad.clone()) for p in params(self.model)]
        def after_step(self): self.seen.append([(*o,p) for o,p in zip(self.before, weights(self.learn))])
    def train(*cbs, **kwargs):
        learn = modes[mode](get_learner(cbs=PrecisionRecorder(**kwargs)))
        learn.fit(2, cbs=cbs)
        return learn
    rows = []
    learn,plain = train(probe:=Probe(), tensors=3, log_tensors=rows.extend),train()
    df,names = learn.precision_recorder.tensor_log,[name for name,_ in learn.model.named_parameters()]
    assert all(map(torch.equal, weights(learn), weights(plain))) and plain.precision_recorder.tensor_log.empty
    assert [*df.step]==[i for i in (0,3,6) for _ in names] and [*df.name]==names*3 and len(rows)==len(df)
    assert [*df.itertuples(index=False)]==[*rows]
    for row,(w,g,new) in zip(rows, [o for i in (0,3,6) for o in probe.seen[i]]):
        size = g.abs()
        want = [g.norm(),size[size>0].min(),size.max(),(size==0).float().mean(),w.norm(),(new-w).norm()]
        got = row.norm,row.smallest,row.largest,row.zero,row.weight,row.change
        assert got==pytest.approx(tuple(o.item() for o in want))
        assert row.inf==row.nan==0
    axes = learn.precision_recorder.plot_tensors('zero')
    assert [o.get_text() for o in axes.get_yticklabels()]==names and axes.get_xlabel()=='step'
    plt.close('all')

def test_tensors_of_a_skipped_step():
    "What is infinite, and where; nothing is updated. With accumulation the gradients are those of the whole step"
    learn = get_learner(cbs=[PrecisionRecorder(tensors=1),Overflow(1)]).to_fp16(max_loss_scale=2.**10)
    learn.fit(1)
    df = learn.precision_recorder.tensor_log
    bad = df[df.inf+df.nan>0]
    assert {*bad.step}=={1} and '2.weight' in {*bad.name} and (df[df.step==1].change==0).all() and len(df)==4*6
    learn = get_learner(cbs=[PrecisionRecorder(tensors=1),GradientAccumulation(32)]).to_bf16()
    learn.fit(1)
    assert [*learn.precision_recorder.tensor_log.step.unique()]==[0,1]

def test_subnormal():
    "Shares count with the loss scale"
    def share(**kwargs):
        learn = get_learner(cbs=PrecisionRecorder(tensors=1), loss_func=lambda p,y: F.mse_loss(p, y)*1e-5)
        learn.to_fp16(dynamic=False, **kwargs).fit(1)
        return learn.precision_recorder.tensor_log.subnormal.mean()
    assert share(loss_scale=1)>.7>.1>share(loss_scale=2**20)

@pytest.mark.parametrize('tensors', [0,-1,1.5,True,'100'])
def test_tensors_refused(tensors):
    with pytest.raises(ValueError, match=f'tensors={tensors!r} must be an int, at least 1. Use tensors=100'):
        PrecisionRecorder(tensors=tensors)

def test_tensors_of_shards(monkeypatch):
    "Each process has a part: refused, with a way out"
    monkeypatch.setattr('mp_callbacks.recorder.is_sharded', lambda model: True)
    with pytest.raises(ValueError, match='tensors=9 measures whole parameters.* Use tensors=None'):
        get_learner(cbs=PrecisionRecorder(tensors=9)).fit(1)
