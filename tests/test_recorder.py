"`recorder` beside fastai's callbacks and in the middle of batches; what it keeps, draws and says: recorder.ipynb"
from learners import *

def cancel(event, ex, order, at=(1,)): return On(event, raises(ex), order, at)

def _in_between(predict):
    "Call `predict` with a learner in a training batch, which goes on as it was"
    def _predict(learn):
        names = 'xb yb pred loss loss_grad dl iter n_iter training'.split()
        before = {k:v for k,v in vars(learn).items() if k in names}
        with torch.no_grad(): predict(learn)
        vars(learn).update(before)
        learn.model.train()
    return _predict

def _valid_batch(learn):
    learn.training = False
    learn.one_batch(0, learn.dls.one_batch())

@pytest.mark.parametrize('predict', [lambda learn: learn.get_preds(), lambda learn: learn.validate(), _valid_batch])
@pytest.mark.parametrize('event,order', [('before_step',15),('after_step',5),('after_step',70),('after_batch',20)])
def test_predictions_within_a_batch(event, order, predict):
    "Each step has its row, with a loss, and the fit and its row in the table stay whole"
    learn = fitted(get_learner().to_bf16())
    learn.remove_cb(PrecisionRecorder).add_cb(PrecisionRecorder(columns=True))
    fitted(learn)
    fitted(learn, 2, On(event, _in_between(predict), order, at=(1,)))
    recorder = learn.precision_recorder
    assert len(recorder.rows)==12 and len(recorder.last_fit)==recorder.batches==8
    assert recorder.log.loss.notna().all()
    assert len(learn.recorder.values[-1])==4

@pytest.mark.parametrize('event', ['before_fit','before_epoch','after_batch','after_epoch'])
def test_lr_find_inside_a_fit(event):
    "No step of the fit lacks its row"
    def look(learn):
        n = learn.n_epoch
        learn.lr_find(num_it=20, show_plot=False)
        learn.n_epoch,learn.training = n,True
    last = Now(event, look, at=3) # as it leaves the learner in no batch
    assert len(log_of(fitted(get_learner().to_bf16(), 2, last)))>=(5 if event=='after_batch' else 8)

def exported(learn, path):
    learn.export(path)
    res = load_learner(path, cpu=False)
    res.dls,res.create_mbar = learn.dls,False
    return res

@pytest.mark.filterwarnings('ignore:load_learner')
@pytest.mark.parametrize('copied', [lambda o,p: o, lambda o,p: deepcopy(o), exported])
def test_no_row_twice(copied, tmp_path):
    "Batches that only accumulate have no row, and no step has two, also of a copy"
    learn = fitted(get_learner().to_fp16(), 1, GradientAccumulation(32))
    df = log_of(learn)
    assert len(df)==2
    learn = fitted(copied(learn, tmp_path/'export.pkl'), 1, GradientAccumulation(10**6))
    learn.fit(1, cbs=cancel('before_step', CancelStepException, 0, range(4))) # before the gradients are measured
    assert log_of(learn).equals(df)
    learn.fit(1)
    assert len(log_of(learn))==6 and log_of(learn)[:2].equals(df)

def table(columns=True, mode='fp16', **kwargs):
    return in_mode(mode, cbs=PrecisionRecorder(columns=columns), **kwargs)

def values(learn): return [dict(zip(learn.recorder.metric_names[1:], o)) for o in learn.recorder.values]

@pytest.mark.parametrize('mode', modes)
def test_changes_nothing_else(mode):
    "Other columns, weights and the result of `validate` are what they are without"
    a,b = [fitted(table(o, mode, metrics=mae), 2) for o in (True,False)]
    assert b.recorder.metric_names==['epoch','train_loss','valid_loss','mae','time'] and apart(a, b)==0
    assert [o[:3] for o in a.recorder.values]==b.recorder.values
    assert a.validate()==b.validate() and len(a.validate())==2
    assert all(torch.equal(*o) for o in zip(a.get_preds()[0], b.get_preds()[0]))

@pytest.mark.parametrize('kwargs', [dict(train_metrics=True, valid_metrics=False), dict(add_time=False)])
def test_settings_of_fastais_recorder(kwargs):
    learn = fitted(table(metrics=mae).remove_cb(Recorder).add_cb(Recorder(**kwargs)), 1, overflow(0))
    names = learn.recorder.metric_names
    assert len(learn.recorder.log)==len(names) and values(learn)[0]['skipped']==1
    assert ('time' in names)==(names[-1]=='time')==kwargs.get('add_time', True)

def test_table_without_validation():
    "Without validation data, and in a fit after the columns were switched on; `validate` has no steps to count"
    x,y = numbers()
    learn = fitted(table(dls=DataLoaders([*zip(x.split(16), y.split(16))], [])), 1, overflow(0))
    assert len(learn.recorder.log)==len(learn.recorder.metric_names) and values(learn)[0]['skipped']==1
    learn = fitted(table(columns=False))
    learn.precision_recorder.columns = True
    assert len(fitted(learn, 1, cancel('before_batch', CancelFitException, 0)).validate())==1
    assert values(fitted(learn))[0]['skipped']==0

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
    learn.fit(2, cbs=[saved,CSVLogger(),overflow(1,5,6)])
    assert saved.best==min(o[monitor] for o in values(learn))
    csv = pd.read_csv(tmp_path/'history.csv')
    assert list(csv)==learn.recorder.metric_names and list(csv.skipped)==[1,2]
    assert list(csv.loss_scale)==log_of(learn).scale[[3,7]].tolist() and csv.mae.between(0, 10).all()

@pytest.mark.parametrize('columns', [True,False])
def test_tensorboard(columns, tmp_path):
    "Epochs as in the table, and the loss scale of each batch, which is a hyper-parameter of the optimizer"
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn = table(columns)
    learn.fit(2, cbs=[TensorBoardCallback(tmp_path, trace_model=False, log_preds=False),overflow(1,5,6)])
    events = EventAccumulator(str(tmp_path)).Reload()
    # batches of validation repeat what training wrote last
    read = {k:[*{o.step:o.value for o in events.Scalars(k)}.values()] for k in events.Tags()['scalars']}
    if columns: assert read['skipped']==[1,2] and read['loss_scale']==log_of(learn).scale[[3,7]].tolist()
    else: assert not {'skipped','loss_scale'}&{*read}
    assert read['mp_loss_scale_0'][:-1]==log_of(learn).scale[1:].tolist() # the next step's
    assert any(k.startswith('mp_state ') for k in learn.opt.hypers[0]) # a text, which is a name
    assert np.allclose(read['train_loss'], log_of(learn).loss) and len(read['valid_loss'])==2
