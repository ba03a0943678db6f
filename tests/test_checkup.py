"`checkup`: each line is true, each has its explanation on the page, and the learner is as it was"
from learners import *
from machines import machine,pretend
from mp_callbacks.learner import checkup,looks,precision
from mp_callbacks.learner.checkup import Checkup,Line
from mp_callbacks.core.devices import emulation
from mp_callbacks.learner.looks import BatchTimes
from mp_callbacks.look.noise import AddedNoise
from sick_models import Overflows
from test_looks import untouched

pytestmark = [pytest.mark.filterwarnings('ignore'),pytest.mark.usefixtures('folder')]
titles = 'Machine,Versions,Precision,Modules,Measured,Last fit,Batches,Noise,Memory,Speed,To do'.split(',')
all_modes = {'fp32':noop, **with_fp8}

def lines(report):
    "Title -> text; for 'To do' heading -> text"
    todo = [o for o in report.lines if o.title=='To do']
    return {o.title:o.text for o in report.lines if o not in todo},{o.about:o.text for o in todo}

def check_float32(texts):
    assert texts['Precision'].startswith('float32') and texts['Last fit'].startswith('Not recorded')
    assert texts['Modules']=='As PyTorch does, with parameters in float32.'
    texts,todo = lines(get_learner(cbs=FastaiPrecision()).precision_checkup())
    assert texts['Precision'].startswith('MixedPrecision of fastai') and 'Try half precision' not in todo

@pytest.mark.parametrize('mode', all_modes)
@pytest.mark.parametrize('fitted', [False,True])
def test_any_precision(mode, fitted, capsys):
    "In each precision, before the first fit and after it: all lines in order, and the learner as it was"
    learn = all_modes[mode](get_learner(path=Path('.')))
    if fitted: learn.fit(1)
    capsys.readouterr()
    with untouched(learn): report = learn.precision_checkup()
    assert capsys.readouterr()==('','')
    texts,todo = lines(report)
    assert list(dict.fromkeys(o.title for o in report.lines))==titles and 'Not asked:' not in str(report)
    assert texts['Batches']==str(report.finding)=='All 4 batches of dls.train and 4 of dls.valid are finite.'
    assert texts['Memory']==report.plan.summary() and 'batch size 16' in texts['Memory']
    assert texts['Noise']==str(report.noise) or mode=='fp32' and texts['Noise'].startswith('Nothing to measure')
    if mode=='fp32': return check_float32(texts)
    assert texts['Precision'].startswith(f"learn.to_{mode.removesuffix('_static')}: ")
    counted = sum(int(n) for n in re.findall(r'(?:^|, )(\d+) \w', texts['Modules']))
    assert counted==len(learn.mixed_precision.policy())
    summary = learn.precision_recorder.summary(last_fit=True)
    assert texts['Last fit']==summary.replace('\n', ' ') and summary.startswith('4 steps' if fitted else 'No steps yet')

def test_within_a_minute(monkeypatch):
    "It looks at as many batches as a minute has, and says so; `find_nonfinite` looks at all"
    clock = itertools.count(0, 31)
    monkeypatch.setattr(looks, 'perf_counter', lambda: next(clock))
    learn = get_learner().to_fp16()
    texts,_ = lines(learn.precision_checkup())
    assert texts['Batches']==('The first 2 batches of dls.train and 1 of dls.valid are finite. '
                              'There was no time for more within 60 seconds.')
    assert str(learn.find_nonfinite())=='All 4 batches of dls.train and 4 of dls.valid are finite.'
    learn = get_learner(nn.Sequential(nn.Linear(8,16), Overflows(16,1))).to_fp16()
    assert learn.find_nonfinite(seconds=0).where=='forward' # what is found in time is named

@contextmanager
def on_gpu(name, times=BatchTimes(10., 9., .5)):
    "The learners are on the GPU called `name`, on which a batch takes `times`"
    with pretend(machine(name)) as m, pytest.MonkeyPatch.context() as patch:
        for o in (checkup,precision): patch.setattr(o, 'fit_device', lambda learn: torch.device('cuda'))
        patch.setattr(checkup, 'batch_times', lambda learn, batch: times)
        yield m

@pytest.mark.parametrize('name,mode,word', [('T4','fp16','Nothing to do'), ('H100','bf16','Nothing to do'),
                                            ('T4','fp32','Try half precision'), ('T4','bf16','Emulated')])
def test_machines(name, mode, word):
    "The device says what it computes natively; emulation is named with its way out"
    learn = all_modes[mode](get_learner(opt_func=fused_adam))
    with on_gpu(name) as m:
        facts = checkup.precision_checkup(learn)
        text = emulation('cuda', torch.bfloat16, precision.LearnerHalf.calls)
    texts,todo = lines(facts)
    can = ('native' if name=='H100' else 'emulated'),('native' if name=='H100' else 'no')
    assert texts['Machine']==f'{m.called} (cuda). float16: native, bfloat16: {can[0]}, FP8: {can[1]}.'
    assert [*todo]==[word] and (word!='Emulated' or todo[word]==text)
    if word=='Try half precision': assert 'to_fp16() or to_native_fp16()' in todo[word]

def test_keep_cures():
    "After skipped steps the report names the modules to keep, and with these there is nothing to do about them"
    model = nn.Sequential(nn.Linear(8,16), nn.Linear(16,16), Overflows(16,1))
    learn = fitted(get_learner(model).to_fp16(keep=('0',nn.LayerNorm)))
    texts,todo = lines(report := learn.precision_checkup())
    assert skipped(learn)==4 and texts['Last fit'].startswith('4 steps, 4 skipped.')
    assert report.finding.precision and texts['Batches']==str(report.finding)
    assert todo['Keep in float32']=="Keep modules in float32: learn.to_fp16(keep=['0', LayerNorm, '2'])."
    assert 'Skipped steps' not in todo and 'Not finite' not in todo
    learn.to_fp16(keep=['0',nn.LayerNorm,'2']).fit(1)
    texts,todo = lines(report := learn.precision_checkup())
    assert report.finding.where=='nothing' and re.match(r'4 steps.*, none skipped', texts['Last fit'])
    assert not {'Keep in float32','Skipped steps'}&{*todo}

def test_options():
    "The line to write: `clip` and `keep`, and of the callback in use what is not the default"
    def said(learn): return lines(learn.precision_checkup())[0]['Precision']
    learn = get_learner(norm=True).to_bf16(clip=2., keep=[nn.BatchNorm1d,'5'])
    assert said(learn)==("learn.to_bf16: bfloat16 with autocast and rules, clip=2.0, keep=[BatchNorm1d, '5'], "
                         "no loss scale")
    texts,_ = lines(learn.precision_checkup())
    assert texts['Modules']=='2 layer (cast with all others), 2 float32 (keep)'
    assert all(o in texts['Versions'] for o in (f'torch {torch.__version__}','Python 3.','fastai 2','mp_callbacks 0'))
    assert said(get_learner().to_fp16(flat_master=True, rescue=True)).endswith('), rescue=True, flat_master=True')
    learn = get_learner().to_native_fp16(2.**8, rescue=True, max_skips=9)
    assert said(learn)==(f"learn.to_native_fp16: float16 with autocast, clip=None, keep=(), loss scale 256, "
                         f"at first {learn.mixed_precision.initial}, max_skips=9, rescue=True")

def test_half_before():
    "The report counts what was in half precision before, and has something to do if it trains"
    def report(frozen):
        body = nn.Linear(8,16).bfloat16().requires_grad_(not frozen)
        return lines(get_learner(nn.Sequential(body, nn.Linear(16,1))).to_bf16().precision_checkup())
    said = 'Weights in half precision'
    texts,todo = report(True)
    assert texts['Modules'].endswith('2 parameters were in bfloat16 before, and stay so.') and said not in todo
    assert report(False)[1][said].startswith('2 parameters that train are in bfloat16, which rounds small steps')

@pytest.mark.parametrize('mode', ['fp32','fp16','bf16'])
def test_not_finite(mode):
    "What is no matter of precision: the line Batches has the way out"
    learn = all_modes[mode](get_learner())
    x,y = numbers(16)
    texts,todo = lines(report := learn.precision_checkup((x,y*math.nan)))
    assert report.finding.where=='targets' and 'targets' in texts['Batches']
    assert todo['Not finite'].startswith('Look for inf and nan in the data') and 'Nothing to do' not in todo

def test_infinite_losses():
    "The steps are made, and nothing of it is left in the batches"
    def loss(pred, y): return F.mse_loss(pred, y)+(loss.now and pred.new_tensor(math.inf))
    loss.now = True
    learn = fitted(get_learner(loss_func=loss).to_bf16())
    _,todo = lines(learn.precision_checkup())
    assert 'Not finite' in todo and 'Infinite losses' not in todo # still there: the line Batches knows more
    loss.now = False
    texts,todo = lines(learn.precision_checkup())
    assert 'The loss of 4 steps was not finite' in texts['Last fit']
    assert todo['Infinite losses'].startswith('Losses of the last fit were not finite, and the batches are finite now')

def test_skipped_steps():
    "Single ones are normal; several of a few, a fit that ends in some, or a constant scale is not"
    def todo(at, **kwargs):
        learn = fitted(get_learner().to_fp16(**kwargs or dict(max_loss_scale=2.**10)), 1, *map(InfiniteAt, at))
        assert skipped(learn)==len(at)
        return lines(learn.precision_checkup())[1].get('Skipped steps', '')
    assert todo([1])==todo([3])=='' and todo([0,1]).startswith('Many steps of the last fit were skipped')
    for text in (todo([0,2,3]),todo([1], dynamic=False)):
        assert 'teps of the last fit were skipped, and the batches are finite now: train on' in text
    learn = fitted(get_learner().to_native_fp16(2.**24))
    texts,found = lines(learn.precision_checkup())
    assert 'loss scale' in texts['Batches'] and 'Not finite' not in found
    assert found['Skipped steps'].startswith('Steps of the last fit were skipped, and the loss scale is still too')

def test_last_fit():
    "Neither those before, nor a validation, predictions and a search for a learning rate, with fit's events, too"
    learn = fitted(get_learner().to_fp16(max_loss_scale=2.**10), 1, InfiniteAt(2), InfiniteAt(3))
    learn.fit(2)
    for look in (noop, learn.validate, learn.get_preds, lambda: learn.lr_find(num_it=10, show_plot=False)):
        look()
        texts,todo = lines(learn.precision_checkup())
        assert texts['Last fit'].startswith('8 steps, numbered 4 to 11, none skipped.') and 'Skipped steps' not in todo
    assert lines(fitted(learn).precision_checkup())[0]['Last fit'].startswith('4 steps')

fast = partial(get_learner, opt_func=fused_adam)
def conv_net():
    return nn.Sequential(nn.Unflatten(1, (2,2,2)), nn.Conv2d(2,8,3,padding=1), nn.Flatten(), nn.Linear(32,1))
def sized(n): return nn.Sequential(nn.Linear(8,n), nn.Linear(n,8), nn.Linear(8,1))
def loaded(**kwargs): return fast(dls=DataLoaders(get_dls().train.new(**kwargs), get_dls().valid, device='cpu'))

quick,waits,loads = BatchTimes(10., 9., .5),BatchTimes(10., 4., .5),BatchTimes(10., 9., 2.)
adamw,sgd = [f'opt_func=partial(OptimWrapper, opt={o}, fused=True).' for o in ('torch.optim.AdamW','torch.optim.SGD')]
tf32 = "such as 4, without TF32: torch.set_float32_matmul_precision('high')."

slow = [ # heading, a part of what is said or '' for not a word, a learner, and the times of its batches
    ('Fused optimizer', "fastai's optimizer steps on 6 parameters one after the other. PyTorch has one that steps on "
                        f'all at once: {adamw}', get_learner, quick),
    ('Fused optimizer', f"fastai's optimizer steps on 6 parameters. A fused one of PyTorch is faster: {adamw}",
        lambda: get_learner().to_bf16(), quick),
    ('Fused optimizer', sgd, lambda: get_learner(opt_func=SGD).to_fp16(), quick),
    ('Fused optimizer', 'opt=torch.optim.Adam, fused=True).',
        lambda: get_learner(opt_func=partial(Adam, decouple_wd=False)), quick),
    ('Fused optimizer', f"AdamW of PyTorch isn't fused here: {adamw.replace('torch.optim.', '')}",
        lambda: get_learner(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), quick),
    ('The GPU waits', "The GPU works 4 of the 10 ms that a batch takes, and else waits for the host: larger batches, "
                      "or learn.model.compile(mode='reduce-overhead').", lambda: fast().to_bf16(), waits),
    ('Loading', 'To load a batch takes 2 ms, to compute it 10, with num_workers=0: dataloaders(…, num_workers=',
        loaded, loads),
    ('Loading', 'with num_workers=1: faster transforms, or more num_workers.', lambda: loaded(num_workers=1), loads),
    ('Channels last', "The weights of 1 of 1 convolutions aren't channels last: learn.to_channelslast().",
        lambda: fast(conv_net()).to_bf16(), quick),
    ('TF32', f'1 layers with matrix products compute in float32, {tf32}', lambda: fast().to_bf16(keep='4'), quick),
    ('TF32', f"3 layers with matrix products compute in float32, {tf32.replace('4', '0')}", fast, quick),
    ('Sizes', 'The sizes of 3 of 3 layers, with 91% of the parameters, are no multiples of 8, as 0 has 8 and 15. '
              'Round up what you choose.', lambda: fast(sized(15)).to_bf16(), quick),
    ('Fused optimizer', '', lambda: fast().to_bf16(), quick),
    ('Fused optimizer', '', lambda: get_learner(opt_func=RAdam), quick),
    ('Fused optimizer', '', lambda: get_learner().to_bf16(flat_master=True), quick),
    ('Fused optimizer', '', lambda: get_learner(opt_func=ranger), quick),
    ('The GPU waits', '', lambda: fast().to_bf16(), quick),
    ('The GPU waits', '', lambda: fast().to_bf16(), quick._replace(gpu=None)),
    ('Loading', '', loaded, quick), ('Loading', '', loaded, quick._replace(load=None)),
    ('Channels last', '', lambda: fast(conv_net()).to_bf16().to_channelslast(), quick),
    ('Channels last', '', lambda: fast(conv_net().to(memory_format=torch.channels_last)).to_bf16(), quick),
    ('Channels last', '', lambda: fast().to_bf16(), quick),
    ('TF32', '', lambda: fast().to_bf16(), quick), ('TF32', '', lambda: fast(cbs=FastaiPrecision()), quick),
    ('Sizes', '', lambda: fast(sized(16)).to_bf16(), quick), ('Sizes', '', lambda: fast(sized(15)), quick)]

@pytest.mark.parametrize('about,text,make,times', slow, ids=[f"{'' if o[1] else 'not '}{o[0]}" for o in slow])
def test_slow(about, text, make, times):
    "The report names what it has seen, and the line to write"
    learn = make()
    with on_gpu('H100', times): texts,todo = lines(checkup.precision_checkup(learn))
    assert texts['Speed']==str(times) and (text in todo[about] if text else about not in todo)

def test_tf32_is_on(monkeypatch):
    "Or the GPU has none: nothing is said"
    for name,set_to in (('H100','high'), ('T4','highest')):
        monkeypatch.setattr(torch, 'get_float32_matmul_precision', lambda: set_to)
        with on_gpu(name): assert 'TF32' not in lines(checkup.precision_checkup(fast()))[1]

@pytest.mark.parametrize('threads,cores,has', [(1,2,False),(1,4,True),(4,8,False),(8,8,False)])
def test_threads(threads, cores, has, monkeypatch):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)
    monkeypatch.setattr(checkup, 'num_cpus', lambda: cores)
    texts,todo = lines(get_learner().precision_checkup())
    assert texts['Speed']==f'PyTorch computes with {threads} of {cores} cores. Only GPUs are timed.'
    assert ('Threads' in todo)==has
    if has: assert todo['Threads'].endswith(f'torch.set_num_threads({cores//2}).')

class Clock:
    "A clock that goes on when a batch is computed, and when an item is loaded"
    now = 0. # of the class, as what the object has is put back
    def __call__(self): return Clock.now
    def forward(self, *args): Clock.now += 3
    def __len__(self): return 64
    def __getitem__(self, i):
        Clock.now += .5
        return [o[i] for o in numbers()]

def kernel(seconds, device='CUDA', **kwargs):
    "An event of PyTorch's profiler"
    return SimpleNamespace(device_type=getattr(torch.autograd.DeviceType, device),
                           time_range=SimpleNamespace(elapsed_us=lambda: seconds*1e6), **kwargs)

@pytest.mark.parametrize('mode', ['fp32',*modes])
def test_batch_times(mode, monkeypatch):
    """A batch is computed and loaded as in training, and the learner is as it was

    What the GPU works is the time of its kernels; names that code gives to its parts don't count."""
    clock = Clock()
    monkeypatch.setattr(looks, 'perf_counter', clock)
    events = [kernel(1), kernel(.5, is_user_annotation=False), kernel(20, is_user_annotation=True), kernel(90, 'CPU')]
    monkeypatch.setattr(looks, 'profile', lambda **kwargs: nullcontext(SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(torch.cuda, 'synchronize', noop)
    dls = DataLoaders.from_dsets(clock, clock, bs=16, num_workers=0, device='cpu')
    learn = all_modes[mode](get_learner(dls=dls))
    learn.model.register_forward_pre_hook(clock.forward)
    batch = dls.one_batch()
    with untouched(learn):
        assert looks.batch_times(learn)==(3000,None,8000)
        assert looks.batch_times(learn, batch)==(3000,None,None)
        monkeypatch.setattr(looks, 'fit_device', lambda learn: torch.device('cuda'))
        assert looks.batch_times(learn)==(3000,1500,8000)

def test_does_not_fit(monkeypatch):
    "A plan that needs more than the GPU has, but for a tenth, leads to `memory=`"
    learn,memory = get_learner().to_native_bf16(),{}
    monkeypatch.setattr(checkup, 'fit_device', lambda learn: torch.device('cuda'))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(total_memory=memory['now']))
    plan = learn.precision_plan()
    peak = plan.table.peak.to_native_bf16*2**20
    def _advice(share):
        memory['now'] = peak/share
        return [*checkup._about_memory(learn, learn.mixed_precision, plan)]
    (about,text), = _advice(.95)
    assert about=='Does not fit' and 'learn.to_native_bf16(memory=True)' in text and not _advice(.85)

def test_what_fits(monkeypatch):
    "Beside how large a batch is worth it, where a limit is known: `memory=`, or that of the GPU, but for a tenth"
    learn = get_learner().to_bf16()
    plan,cb = learn.precision_plan(),learn.mixed_precision
    noise = AddedNoise('bfloat16', .001, 0., 8, worth=(80.,100.,129.))
    monkeypatch.setitem(checkup._findings, 'Noise', lambda *args: noise)
    def _line(): return {o.title:o.text for o in learn.precision_checkup().lines}['Noise']
    assert _line()==str(noise)
    gb = .9*.001
    cb.memory = .001
    fits = plan.batch_size(gb).to_bf16
    assert _line()==f'{noise} {fits:,} would fit into 0.001 GB.' and fits>9
    cb.memory = None
    monkeypatch.setattr(checkup, '_gpu_gb', lambda learn: .002)
    assert _line().endswith(f'{plan.batch_size(.9*.002).to_bf16:,} would fit into 0.002 GB.')

@pytest.mark.cuda
def test_on_a_gpu():
    "The profiler sees kernels, which take no longer than the batch"
    learn = get_learner(dls=get_dls(device='cuda')).to_bf16()
    times = looks.batch_times(learn)
    assert 0<times.gpu<times.compute and times.load>0
    assert lines(learn.precision_checkup())[0]['Speed'].startswith('A batch takes')

def test_not_asked(tmp_path):
    "The line has the error, and nobody says that there is nothing to do"
    learn = fitted(get_learner().to_bf16())
    learn.dls = DataLoaders([], [])
    texts,todo = lines(report := learn.precision_checkup())
    assert texts['Batches'].startswith('Not asked: ValueError: There was no batch with targets')
    assert texts['Memory'].startswith('Not asked') and texts['Last fit'].startswith('4 steps')
    assert 'Nothing to do' not in todo and report.finding is report.plan is None
    learn = get_learner(path=tmp_path).to_bf16()
    learn.model[0].forward = raises(KeyError('as asked'))
    texts,_ = lines(learn.precision_checkup()) # whatever a model raises
    assert texts['Batches'].startswith('Not asked: KeyError') and texts['Modules'].startswith('3 layer')
    learn.export()
    if hasattr(Exception, 'add_note'): # Python 3.11
        zeros = Does(lambda m,x: torch.zeros(len(x),8).index_add(0, torch.arange(len(x)), m.layer(x))[:,:1],
                     layer=nn.Linear(8,8))
        texts,todo = lines(get_learner(zeros).to_bf16().precision_checkup())
        note = todo['An error of the model']
        assert 'make it by h.new_zeros(…)' in note and texts['Batches'].endswith(f'same scalar type {note}')
    texts,_ = lines(load_learner(tmp_path/'export.pkl').precision_checkup()) # without data
    assert texts['Precision'].startswith('float32') and texts['Batches'].startswith('Not asked')
    texts,todo = lines(get_learner(cbs=MixedPrecision()).precision_checkup()) # the next fit would say the same
    assert texts['Batches'].startswith('Not asked: ValueError: MixedPrecision of mp_callbacks needs ModelToHalf')

def test_links():
    "Each line that there can be has an explanation, on the page where the links lead"
    text = '\n'.join(cells_of('learner/checkup.ipynb', 'markdown'))
    found = [o.lower().replace(' ', '-') for o in re.findall('^#+ (.*)$', text, re.M)]
    urls = re.findall('<a href="(.*?)">', get_learner().to_fp16().precision_checkup()._repr_html_())
    assert len(urls)>=len(titles) and {o.partition('#')[0] for o in urls}=={checkup.page}
    assert {o.partition('#')[2] for o in urls}<={*found}
    headings = re.findall("yield '(.*?)'", Path(checkup.__file__).read_text())
    headings += re.findall("notes.setdefault\\('(.*?)'", Path(checkup.__file__).read_text())
    headings += [o for kind in checkup._slow.values() for o in kind]
    assert len(headings)==17 and {o.lower().replace(' ', '-') for o in headings}<={*found} and len({*found})==len(found)
    site = re.search('Documentation = "(.*)"', (root/'pyproject.toml').read_text())[1]
    assert checkup.page==f'{site}learner/checkup.html'

def test_text():
    "Short lines, in columns; HTML is escaped"
    report = Checkup((Line('Machine', 'a<b '*60, 'Machine'),Line('To do', 'Nothing to do.', 'Nothing to do')))
    rows = str(report).splitlines()
    assert max(map(len, rows))<=95 and rows[0].startswith('Machine    a<b') and rows[1].startswith(' '*11+'a<b')
    assert checkup.page in rows[-1] and rows[-2]=='To do      Nothing to do.' and repr(report)==str(report)
    assert 'a&lt;b' in report._repr_html_() and '<b ' not in report._repr_html_()
