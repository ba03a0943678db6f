"How often does the host wait, and for whom? Seen on a CPU, as if it were an accelerator"
import _thread,sys,threading,warnings
from contextlib import contextmanager

import pytest,torch
from torch import nn

from learners import *

ours = {'MixedPrecision','NativeMixedPrecision','ModelToHalf','PrecisionRecorder','LossOnDevice'}
precisions = {**modes, 'bf16_flat': lambda learn: learn.to_bf16(flat_master=True), 'fp16_flat_clip': lambda learn: learn.to_fp16(flat_master=True, clip=1., max_loss_scale=2.**10),
              'native_fp16_fused': lambda learn: learn.to_native_fp16(init_scale=2.**10), 'native_bf16_fused': lambda learn: learn.to_native_bf16(), 'bf16_fused': lambda learn: learn.to_bf16(),
              'fp16_fused': lambda learn: learn.to_fp16(max_loss_scale=2.**10, clip=.1)}

class Steps(LeanCallback):
    "Tell `audit` when a batch begins and ends"
    order,run_valid = -200,True
    def __init__(self, audit): self.audit = audit
    @contextmanager
    def during_batch(self):
        self.audit.step('train' if self.training else 'valid')
        yield
        self.audit.step('between')

def casts():
    "Can this PyTorch make a tensor one of another class under a dispatch mode, as fastai does with each batch? 2.5 can't."
    with SyncAuditor():
        try: return torch.ones(1).as_subclass(torch.Tensor) is not None
        except RuntimeError: return False

def audited(learn, n=1, **kwargs):
    "What the auditor saw of `n` epochs"
    if not casts(): pytest.skip('PyTorch is too old')
    with SyncAuditor(pretend=True) as audit: learn.fit(n, cbs=[Steps(audit)], **kwargs)
    return audit

def of(audit, name, mine):
    "Callback, event and operation of each sync in each step called `name`, either of our callbacks or of all others"
    res = {i:[] for i,o in enumerate(audit.names) if o==name}
    for o in audit.syncs:
        if o.name==name and (o.callback in ours)==mine: res[o.step].append((o.callback, o.event, o.op))
    return list(res.values())

def make(mode, **kwargs):
    opt = dict(opt_func=partial(OptimWrapper, opt=torch.optim.Adam, fused=True)) if mode.endswith('fused') else {}
    return precisions[mode](get_learner(**opt, **kwargs))

# --- The budget of a step

def budget(mode, n=4):
    "Of each of `n` steps, that of the norm: with a fused optimizer, of the first"
    if mode is None: return [[]]*n
    one = [('NativeMixedPrecision' if 'native' in mode else 'MixedPrecision','before_step','cpu')]
    return [one]+[[]]*(n-1) if mode.endswith('fused') else [one]*n

@pytest.mark.parametrize('mode', precisions)
def test_one_sync_per_step(mode):
    "That of the norm, and nothing else of ours: not in the recorder, nor in validation, nor between the batches. None at all with a fused optimizer."
    audit = audited(make(mode))
    assert of(audit, 'train', True)==budget(mode)
    assert {o.function for o in audit.syncs if o.callback in ours}=={'tensor_norms', *(['norms'] if 'flat' in mode else [])} # which the first step has no flat gradients for
    for name in ('valid','between','start'): assert not sum(of(audit, name, True), [])

@pytest.mark.parametrize('mode', [None,*precisions])
def test_what_fastai_adds(mode):
    "Its recorder moves the loss to the host in every batch; its progress bar reads it there"
    learn = get_learner() if mode is None else make(mode)
    learn.create_mbar = True
    learn.add_cb(ProgressCallback())
    with learn.no_logging(): audit = audited(learn)
    assert of(audit, 'train', False)==of(audit, 'valid', False)==[[('Recorder','after_batch','cpu')]]*4
    assert not sum(of(audit, 'between', False), [])

def with_bar(learn):
    learn.create_mbar = True
    learn.add_cb(ProgressCallback())
    return learn

@pytest.mark.parametrize('mode', [None,*precisions])
def test_the_whole_fit(mode):
    "With the loss on the device nobody else waits: the bar for its first number, and for the last of an epoch, the record for that of the validation"
    learn = with_bar(get_learner() if mode is None else make(mode))
    learn.remove_cb(LossOnDevice)
    learn.add_cb(LossOnDevice(True))
    with learn.no_logging(): audit = audited(learn, 3)
    shown = ('_DeviceProgress','after_batch','cpu')
    assert of(audit, 'train', False)==[[shown],[],[],[shown]]+[[],[],[],[shown]]*2
    assert of(audit, 'valid', False)==[[]]*12
    between = sum(of(audit, 'between', False), [])
    assert between==[('_DeviceRecorder','after_validate','cpu')]*3
    assert of(audit, 'train', True)==budget(mode, 12) and not sum(of(audit, 'valid', True)+of(audit, 'between', True), [])

@pytest.mark.parametrize('mode', ['bf16','native_bf16'])
@pytest.mark.parametrize('cb', [GradientClip(1.), GradientAccumulation(32)], ids=lambda o: o.name)
def test_with_fastai_callbacks(mode, cb):
    learn = make(mode)
    learn.add_cb(cb)
    seen = of(audited(learn), 'train', True)
    assert sum(seen, [])==[('NativeMixedPrecision' if 'native' in mode else 'MixedPrecision','before_step','cpu')]*(2 if isinstance(cb, GradientAccumulation) else 4)

class Spoil(Callback):
    "Overflow, in the gradients or already in the loss, in the second batch"
    order = -50
    def __init__(self, loss): self.loss = loss
    def after_loss(self):
        if not self.training or self.train_iter!=1: return
        self.learn.loss_grad = self.learn.loss_grad*float('inf')
        if self.loss: self.learn.loss = self.learn.loss_grad.clone()

@pytest.mark.parametrize('loss', [False,True])
@pytest.mark.parametrize('mode', precisions)
def test_a_skipped_step(mode, loss):
    "costs no further one"
    learn = make(mode)
    learn.add_cb(Spoil(loss))
    audit = audited(learn)
    if mode!='alone': assert skipped(learn)==1
    assert of(audit, 'train', True)==(budget(mode) if mode!='fp16_fused' else [*budget(mode)[:2],*budget(mode)[:2]]) # whose headroom is measured again after the overflow

class Halve(Callback):
    "Changes the gradients after they were checked"
    order = 20
    def before_step(self):
        for p in self.model.parameters(): p.grad *= .5

@pytest.mark.parametrize('mode', precisions)
def test_gradients_that_another_callback_changes(mode):
    "are checked again, which costs one more"
    learn = make(mode)
    learn.add_cb(Halve())
    assert [len(o) for o in of(audited(learn), 'train', True)]==[2]*4

def test_data_sent_to_the_device():
    "fastai's copies block, one for each tensor of a batch"
    class Made:
        def __getitem__(self, i): return torch.zeros(8),torch.zeros(1)
        def __len__(self): return 32
    audit = audited(get_learner(dls=DataLoaders.from_dsets(Made(), Made(), bs=16, device='cpu', num_workers=0)))
    assert [o.name for o in audit.syncs if o.op=='to' and o.name!='start']==['between']*2*3 # the first of four is there before the first step

def test_audited_training_is_the_same():
    "bit for bit"
    a,b = make('bf16'),make('bf16')
    a.fit(2)
    audited(b, 2)
    assert all(map(torch.equal, weights(a), weights(b)))
    assert a.recorder.values==b.recorder.values

# --- Who waited

class Asks(Callback):
    def __init__(self, learn=None): self.inner = learn
    def before_batch(self):
        if self.inner is not None: self.inner('before_batch')
        self.x = torch.ones(2, device='cpu', requires_grad=True)
    def after_loss(self): self._ask(lambda: self.x.sum().item())
    def _ask(self, f): return f()
    def after_backward(self):
        y = self.x*2
        y.register_hook(_look)
        y.sum().backward()

def _look(g): assert g.sum()>0

def events(*cbs):
    with SyncAuditor(pretend=True) as audit:
        for cb in cbs:
            for o in ('before_batch','after_loss','after_backward'): cb(o)
    return [(o.callback,o.event,o.function) for o in audit.syncs]

def test_callback_and_event():
    "also through a helper, and in a hook of the backward pass"
    assert events(Asks())==[('Asks','after_loss','<lambda>'),('Asks','after_backward','_look')]

def test_innermost_callback_counts():
    class Inner(Callback):
        def before_batch(self): torch.ones(2, device='cpu').sum().item()
    assert events(Asks(Inner()))[0]==('Inner','before_batch','before_batch')

def test_line_and_function():
    if not casts(): pytest.skip('PyTorch is too old')
    t = TensorBase(torch.ones(2)) # a subclass, which hands on what is done to it
    with SyncAuditor(pretend=True) as audit:
        line = sys._getframe().f_lineno; t.sum().item()
    o, = audit.syncs
    assert (o.file,o.line,o.function,o.callback,o.event)==(__file__,line,'test_line_and_function','','')
    assert o.where==f'test_syncs.py:{line}' and o.who==o.function and o.op=='aten._local_scalar_dense'
    assert o.where in repr(audit) and 't.sum().item()' in repr(audit)

class Backward(Callback):
    "As PyTorch does on an accelerator: in a thread that doesn't come from Python's `threading`"
    def __init__(self, start, f): self.start,self.f = start,f
    def after_backward(self):
        done = threading.Event()
        f = self.f
        def run(): f(); done.set()
        self.start(run)
        done.wait()

@pytest.mark.parametrize('theirs', [False,True])
def test_thread_of_the_backward_pass(theirs):
    "belongs to whoever waits for it, another one doesn't"
    start = (lambda f: _thread.start_new_thread(f, ())) if theirs else (lambda f: threading.Thread(target=f).start())
    with SyncAuditor(pretend=True) as audit: Backward(start, lambda: look(audit))('after_backward')
    o, = audit.syncs
    assert o[3:6]==(('look','Backward','after_backward') if theirs else ('look','',''))

def look(audit): audit.add('aten.item')

# --- The auditor itself

x = torch.arange(3.)
def wait(): return x[1].item()
def untouched(): return torch.utils._python_dispatch._get_current_dispatch_mode() is None and torch.overrides._get_current_function_mode() is None

def test_steps():
    audit = SyncAuditor(pretend=True)
    with audit:
        wait()
        for n in (0,2,1):
            audit.step('train')
            for _ in range(n): wait()
        audit.step('valid')
    assert audit.by_step()==[1,0,2,1,0] and audit.by_step('train')==[0,2,1] and audit.by_step('valid')==[0] and audit.by_step('other')==[]
    (where,n), = audit.by_line('train').items()
    assert n==3 and where.function=='wait' and sum(audit.by_line().values())==4

def test_nothing_happened():
    with SyncAuditor(pretend=True) as audit: x+1
    assert audit.syncs==[] and audit.by_step()==[0] and not audit.by_line() and repr(audit)=='0 host syncs in 1 step'
    assert SyncAuditor(pretend=True).by_step()==[0]

def test_again_and_nested():
    audit,other = SyncAuditor(pretend=True),SyncAuditor(pretend=True)
    with audit:
        with audit: wait()
        wait()
        with other: wait()
    assert (len(audit.syncs),len(other.syncs))==(3,1) and audit.syncs[2]==other.syncs[0]
    with audit: wait()
    wait()
    assert len(audit.syncs)==4 and untouched()

@pytest.mark.parametrize('error', [ValueError,KeyboardInterrupt])
def test_interrupted(error):
    audit = SyncAuditor(pretend=True)
    with pytest.raises(error):
        with audit, audit:
            wait()
            raise error
    wait()
    assert len(audit.syncs)==1 and untouched()

def test_other_threads_are_not_seen():
    with SyncAuditor(pretend=True) as audit:
        t = threading.Thread(target=wait)
        t.start(); t.join()
    assert not audit.syncs

def test_cpu_does_not_wait():
    with SyncAuditor(pretend=False) as audit: wait(); x.cpu(); x.tolist(); x[x>1]
    assert not audit.syncs and x.cpu() is x

@pytest.mark.parametrize('pretend', ['cuda',0,1.])
def test_pretend_is_checked(pretend):
    with pytest.raises(TypeError, match='must be True, False or None'): SyncAuditor(pretend=pretend)

@pytest.mark.parametrize('name', ['Adam','AdamW','SGD','RMSprop','Adagrad'])
@pytest.mark.parametrize('foreach', [False,True])
def test_optimizers_of_pytorch(name, foreach):
    "keep their counters on the host"
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with SyncAuditor(pretend=True) as audit:
        opt = getattr(torch.optim, name)([p], foreach=foreach)
        for _ in range(2): opt.step()
    assert not audit.syncs

# --- The debug mode of CUDA, without CUDA

@pytest.fixture
def cuda(monkeypatch):
    "The debug mode as a list with one number"
    mode = [0]
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_sync_debug_mode', lambda: mode[0])
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', lambda o: mode.__setitem__(0, o if isinstance(o, int) else ['default','warn','error'].index(o)))
    return mode

def sync(n=1):
    for _ in range(n): warnings.warn('called a synchronizing CUDA operation (Triggered internally)')

def state(mode): return mode[0],warnings.showwarning,list(warnings.filters)

def test_warnings_of_cuda(cuda):
    was = state(cuda)
    with SyncAuditor() as audit:
        assert cuda==[1]
        sync(2)
    assert [(o.op,o.function,o.seen) for o in audit.syncs]==[('cuda','sync','cuda')]*2 and audit.syncs[0].file==__file__
    assert state(cuda)==was

def test_seen_by_both_is_one(cuda):
    with SyncAuditor() as audit:
        for _ in range(2): audit.add('aten.item'); sync_here = warnings.warn('called a synchronizing CUDA operation')
        audit.add('aten.equal')
        sync()
    assert [(o.op,o.seen) for o in audit.syncs]==[('aten.item','both')]*2+[('aten.equal','op'),('cuda','cuda')]

def test_other_warnings_are_handed_on(cuda):
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        with SyncAuditor() as audit: warnings.warn('something else'); sync()
        sync()
    assert [str(o.message)[:9] for o in ws]==['something','called a '] and len(audit.syncs)==1

def test_nested_debug_mode(cuda):
    was = state(cuda)
    with SyncAuditor() as audit:
        with SyncAuditor() as other: sync()
        sync()
    assert (len(audit.syncs),len(other.syncs))==(2,1) and state(cuda)==was

@pytest.mark.parametrize('mode', [0,1,2])
@pytest.mark.parametrize('error', [ValueError,KeyboardInterrupt])
def test_debug_mode_is_put_back(cuda, mode, error):
    cuda[0] = mode
    was = state(cuda)
    with pytest.raises(error):
        with SyncAuditor() as audit: raise error
    assert state(cuda)==was and untouched()

def test_debug_mode_that_fails(cuda, monkeypatch):
    "leaves nothing behind, and the auditor can be opened later"
    was,good = state(cuda),torch.cuda.set_sync_debug_mode
    audit = SyncAuditor()
    def broken(o):
        good(o)
        if o=='warn': raise RuntimeError('no debug mode')
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', broken)
    with pytest.raises(RuntimeError, match='no debug mode'): audit.__enter__()
    assert state(cuda)==was and untouched()
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', good)
    with audit: sync()
    assert len(audit.syncs)==1 and state(cuda)==was

def test_pretending_leaves_cuda_alone(cuda):
    with SyncAuditor(pretend=True): assert cuda==[0]
