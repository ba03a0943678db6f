"`recorder`: what PrecisionRecorder keeps of each step, draws, says, and adds to fastai's table of epochs"
from learners import *
from mp_callbacks.learner.recorder import LogRow

def cancel(event, ex, order, at=(1,)): return On(event, raises(ex), order, at)
def row(i, scale=4., norm=1., skipped=False, culprit='', loss=.5):
    finite = math.isfinite(norm)
    return LogRow(i, scale, norm, finite, skipped or not finite, False, culprit, loss)
def recorder(run):
    res = PrecisionRecorder()
    res.rows = [*runs[run]]
    return res

@pytest.mark.parametrize('mode', modes)
def test_log(mode):
    "A row for each step says what `step_stats` said; its loss is what fastai's own recorder has after the batch"
    seen = []
    def look(learn): seen.append((learn.step_stats,learn.recorder.smooth_loss.value.item()))
    df = log_of(fitted(in_mode(mode), 2, On('after_batch', look, 70), overflow(2, layer=2)))
    stats,losses = zip(*seen)
    assert list(df)==[*LogRow._fields] and len(df)==8
    for o in ('step','scale','finite'): assert list(df[o])==[getattr(s, o) for s in stats]
    assert np.array_equal(df.norm, [s.norm for s in stats], equal_nan=True) and list(df.loss)==[*losses]
    assert list(df.skipped)==[i==2 for i in range(8)]==list(~df.finite)
    assert list(df.culprit)==['2.weight' if i==2 else '' for i in range(8)]
    assert math.isclose(df.loss[2], df.loss[1], rel_tol=1e-6) and df.loss[3]!=df.loss[2]
    assert (df.dtypes[['finite','skipped']]==bool).all()

def test_culprit_outside_the_model():
    "A loss may have parameters of its own"
    loss = ScaledLoss()
    loss.w.register_hook(lambda grad: grad*math.inf)
    learn = get_learner(loss_func=loss, splitter=lambda m: [[*m.parameters(),*loss.parameters()]]).to_bf16()
    assert list(log_of(fitted(learn)).culprit)==['(outside the model)']*4

def test_step_cancelled_by_another():
    learn = fitted(get_learner().to_bf16(), 1, cancel('before_step', CancelStepException, 20))
    log = log_of(learn)
    assert list(log.skipped)==[False,True,False,False] and log.finite.all() and (log.culprit=='').all()
    learn.fit(1, cbs=cancel('before_batch', CancelBatchException, 0, [2])) # changes nothing in the row before
    assert [*log_of(learn).loss[4:]]==[learn.recorder.losses[i].item() for i in (0,1,3)]

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

@pytest.mark.parametrize('order', [20,70])
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_loss_of_a_skipped_step(mode, order):
    "In `after_batch` it is that of the batch, also if the first steps are skipped; fastai shows the average without it"
    own = []
    def _look(learn): own.append(learn.loss.item())
    learn = fitted(in_mode(mode), 1, On('after_batch', _look, order), overflow(0, 2, layer=2), InfiniteAt(3))
    assert [math.isfinite(o) for o in own]==[True,True,True,False] and len({*own[:3]})==3
    first,*shown = [o.item() for o in learn.recorder.losses]
    assert math.isnan(first) and shown==[pytest.approx(own[1]),shown[0],shown[0]]
    assert learn.recorder.smooth_loss.count==1

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_the_last_skipped_step_has_a_row(mode):
    "The one after which training stops with an error, too"
    learn = in_mode(mode, options=dict(max_skips=3))
    with pytest.raises(FloatingPointError): learn.fit(1, cbs=overflow(*range(4)))
    log = log_of(learn)
    assert [*log.skipped]==[True]*3 and [*log.step]==[0,1,2] and [*log.culprit]==['0.weight']*3
    learn.fit(1)
    assert len(log_of(learn))==7 and learn.precision_recorder.summary(True).startswith('4 steps, numbered 3 to 6, none')

def test_no_step_in_a_fit():
    "Accumulation over more than it has is said, also after a validation and a look; a later fit counts anew"
    learn = fitted(get_learner().to_fp16(max_loss_scale=2.**10), 1, GradientAccumulation(10**6))
    text = '4 batches, no step: accumulation is longer than the epoch.'
    for look in (noop, learn.validate, lambda: learn.lr_find(num_it=4, show_plot=False)):
        look()
        assert learn.precision_recorder.summary()==learn.precision_recorder.summary(last_fit=True)==text
    learn.fit(2, cbs=cancel('before_batch', CancelBatchException, 0, range(8)))
    assert learn.precision_recorder.summary()=='8 batches, no step.'
    learn.fit(1)
    assert learn.precision_recorder.summary().startswith('4 steps, none skipped.')
    for cb in ([], InfiniteAt(0)): # the second has no step left at the end
        learn.fit(1, cbs=[GradientAccumulation(10**6), *L(cb)])
        assert learn.precision_recorder.summary(last_fit=True)==text

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

@pytest.mark.parametrize('ex', [CancelFitException, CancelTrainException, KeyboardInterrupt])
def test_batch_that_stops_after_its_step(ex):
    "Its row is there, and isn't given the loss of a later batch"
    learn = get_learner().to_fp16()
    try: learn.fit(1, cbs=cancel('after_step', ex, 70))
    except KeyboardInterrupt: pass
    assert len(log_of(learn))==2 and log_of(learn).loss.isna().tolist()==[False,True]
    learn.fit(1, cbs=GradientAccumulation(10**6))
    assert len(log_of(learn))==2 and math.isnan(log_of(learn).loss[1])

def test_without_fastais_recorder():
    log = log_of(fitted(table(mode='bf16').remove_cb(Recorder)))
    assert len(log)==4 and log.loss.isna().all()

runs = dict(
    none = [],
    one = [row(0)],
    bf16 = [row(i, 1.) for i in range(5)],
    fp16 = [row(0, 8., math.inf, culprit='a', loss=math.nan), row(1, norm=1e-3),
            row(2, 8., math.nan, culprit='b'), row(3)],
    cancelled = [row(0), row(1, skipped=True), row(2)],
    skipped = [row(i, 2.**-i, math.nan, culprit='a', loss=math.nan) for i in range(3)],
    zero = [row(i, norm=0.) for i in range(3)],
    streaks = [row(i, norm=math.inf if i in (1,3,4,5,8,9) else 1.)._replace(bad_loss=i in (5,6)) for i in range(10)])

@pytest.mark.parametrize('run', runs)
def test_plot(run):
    "Without a warning; as many panels as there is something to see in; skipped steps are marks, not values"
    o = recorder(run)
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

def test_plot_marks_what_was_measured():
    learn = fitted(get_learner().to_bf16())
    line = learn.precision_recorder.plot()[0].lines[-1]
    assert line.get_label()=='measured: 1' and [*line.get_xdata()]==[0]
    plt.close('all')

def test_plot_on_axes():
    "Those of the user are drawn on, and returned; too few or too many are refused"
    axs = plt.subplots(1, 3)[1]
    assert recorder('fp16').plot(axs) is axs and all(ax.lines for ax in axs) and len(plt.get_fignums())==1
    with pytest.raises(ValueError, match='axs has 2 axes, and needs 3: for training loss, gradient norm, loss scale'):
        recorder('fp16').plot(axs[:2])
    plt.close('all')

def test_summary():
    def said(run): return recorder(run).summary().split('\n')
    assert said('none')==['No steps yet.']
    assert said('one')==['1 step, none skipped.', 'The loss scale was always 4.',
                         'The median gradient norm was 1, the largest 1 (step 0).']
    assert said('fp16')==['4 steps, 2 skipped.',
        'The first skipped step was 0, the last 2. The longest run has length 1.',
        "The last parameter whose gradient wasn't finite was mostly a (1 of 2). For the cause: learn.find_nonfinite().",
        'The loss scale went from 8 to 4 (smallest 4, largest 8, growths: 1).',
        'The median gradient norm was 0.5, the largest 1 (step 3).']
    assert len(said('cancelled'))==4 and 'finite' not in recorder('cancelled').summary()
    assert said('skipped')[-1].startswith('The loss scale went from 1 to 0.25')
    assert said('streaks')[:2]==['10 steps, 6 skipped.',
                                 'The first skipped step was 1, the last 9. The longest run has length 3.']
    assert 'The loss of 1 step was not finite, though the gradients were' in recorder('streaks').summary()

def table(columns=True, mode='fp16', **kwargs):
    return in_mode(mode, cbs=PrecisionRecorder(columns=columns), **kwargs)

def values(learn): return [dict(zip(learn.recorder.metric_names[1:], o)) for o in learn.recorder.values]

def test_columns():
    "They stand between the metrics and the time, and count what happened in each epoch; a second fit begins again"
    learn = fitted(table(metrics=mae), 2, overflow(1,2,6))
    names = ['epoch','train_loss','valid_loss','mae','skipped','loss_scale','time']
    assert learn.recorder.metric_names==names and len(learn.recorder.log)==len(names)
    assert [o['skipped'] for o in values(learn)]==[2,1]
    assert [o['loss_scale'] for o in values(learn)]==log_of(learn).scale[[3,7]].tolist()
    learn.fit(1)
    assert learn.recorder.metric_names==names and values(learn)[0]['skipped']==0

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

def tensor_log(learn): return learn.precision_recorder.tensor_log

@pytest.mark.parametrize('mode', modes)
def test_tensors(mode):
    "Every so many steps a row for each parameter, with what its gradient, weight and update are; and nobody notices"
    rows,before,after = [],[],[]
    def look(learn): before.append([(p.detach().clone(),p.grad.clone()) for p in params(learn.model)])
    looks = On('after_backward', look, 54),On('after_step', lambda learn: after.append(weights(learn)), 54)
    def train(*cbs, **kwargs): return fitted(in_mode(mode, cbs=PrecisionRecorder(**kwargs)), 2, *cbs)
    learn,plain = train(*looks, tensors=3, log_tensors=rows.extend),train()
    df,names = tensor_log(learn),[name for name,_ in learn.model.named_parameters()]
    assert same_weights(learn, plain) and tensor_log(plain).empty
    assert [*df.step]==[i for i in (0,3,6) for _ in names] and [*df.name]==names*3 and len(rows)==len(df)
    assert [*df.itertuples(index=False)]==[*rows]
    for row,((w,g),new) in zip(rows, [o for i in (0,3,6) for o in zip(before[i], after[i])]):
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
    def tensors(mode, cb): return tensor_log(fitted(in_mode(mode, cbs=[PrecisionRecorder(tensors=1),cb])))
    df = tensors('fp16', overflow(1, layer=2))
    bad = df[df.inf+df.nan>0]
    assert {*bad.step}=={1} and '2.weight' in {*bad.name} and (df[df.step==1].change==0).all() and len(df)==4*6
    assert [*tensors('bf16', GradientAccumulation(32)).step.unique()]==[0,1]

def test_subnormal():
    "Shares count with the loss scale"
    def share(**kwargs):
        learn = get_learner(cbs=PrecisionRecorder(tensors=1), loss_func=lambda p,y: F.mse_loss(p, y)*1e-5)
        return tensor_log(fitted(learn.to_fp16(dynamic=False, **kwargs))).subnormal.mean()
    assert share(loss_scale=1)>.7>.1>share(loss_scale=2**20)

@pytest.mark.parametrize('tensors', [0,-1,1.5,True,'100'])
def test_tensors_refused(tensors):
    with pytest.raises(ValueError, match=f'tensors={tensors!r} must be an int, at least 1. Use tensors=100'):
        PrecisionRecorder(tensors=tensors)

def test_tensors_of_shards(monkeypatch):
    "Each process has a part: refused, with a way out"
    monkeypatch.setattr('mp_callbacks.learner.recorder.is_sharded', lambda model: True)
    with pytest.raises(ValueError, match='tensors=9 measures whole parameters.* Use tensors=None'):
        get_learner(cbs=PrecisionRecorder(tensors=9)).fit(1)
