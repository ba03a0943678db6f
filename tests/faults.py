"""Faults by table: every exception of `errors` and `cancels`, at every place of `places`, in each of `precisions`

And what a learner has to be afterwards. A place is an event of training or of validation, before or after the callbacks
that change precision; or the model, the loss, the backward pass, or the optimizer."""
from functools import wraps

from mp_callbacks.learner import optimizers
from learners import *

def asked(kind): return lambda: kind('as asked')

errors  = dict(RuntimeError=asked(RuntimeError), OutOfMemoryError=asked(torch.OutOfMemoryError),
               KeyboardInterrupt=KeyboardInterrupt)
cancels = CancelBatchException,CancelBackwardException,CancelStepException,CancelTrainException,CancelValidException
cancels = {o.__name__:o for o in (*cancels,CancelEpochException,CancelFitException)}
faults  = {**errors, **cancels}

precisions = {k:v for k,v in modes.items() if k!='fp16_static'}
precisions.update( # fused: see `make_learner`
    native_fp16_fused = lambda learn: learn.to_native_fp16(2.**10, growth_interval=2, max_loss_scale=2.**12),
    fp16_flat_clip    = lambda learn: learn.to_fp16(max_loss_scale=2.**10, flat_master=True, clip=.1))

events = dict(
    train = in_batch,
    valid = 'before_batch after_pred after_loss after_batch'.split(),
    fit   = ['before_fit','before_epoch','before_train','after_train','before_validate','after_validate','after_epoch',
             'after_fit'])
code   = 'forward loss backward step'.split()
places = [*[(when,o,order) for when in events for o in events[when] for order in (-50,80)],
          *[('train',o,0) for o in code],*[('valid',o,0) for o in code[:2]]]

class Fault(Callback):
    "Raise `make()` at `place`, in the second batch if it is in one"
    def __init__(self, make, place):
        self.make,(self.when,self.what,self.order),self.raised = make,place,None
        if self.what not in code: setattr(self, self.what, self.event)
    @property
    def at(self): return len(self.dls.train)-1
    def event(self):
        if self.when=='fit' or (self.training==(self.when=='train') and self.iter==self.at): self.go()
    def go(self):
        if self.raised is not None: return
        self.raised = self.make()
        raise self.raised

class Bomb(nn.Module):
    "A layer that goes off at its fault's place"
    fault = None
    def forward(self, x):
        f = self.fault
        if f and f.what=='forward' and self.training==(f.when=='train') and f.iter==f.at: f.go()
        if f and f.what=='backward' and x.requires_grad and f.iter==f.at: x.register_hook(lambda g: f.go())
        return x

class Loss:
    "A loss that does, too"
    fault,activation,decodes = None,staticmethod(noop),staticmethod(noop)
    def __call__(self, pred, y):
        f = self.fault
        if f and f.what=='loss' and f.training==(f.when=='train') and f.iter==f.at: f.go()
        return F.mse_loss(pred, y)

class Steps(Callback):
    "Everything, at the start of each training batch"
    order = -200
    def before_fit(self): self.states = []
    def before_batch(self):
        if self.training: self.states.append(everything(self.learn))

def make_learner(mode, path):
    model,opt_func = mlp(True),fused_adam if mode.endswith('fused') else Adam
    model.insert(2, Bomb())
    learn = get_learner(model, dls=get_dls(bs=8, n=16), loss_func=Loss(), lr=1e-3, path=path, opt_func=opt_func)
    precisions[mode](learn)
    learn.create_opt()
    return learn

class PatientWithTwin:
    "A learner to be hurt, what it has to keep, and a healthy one to compare it with"
    def __init__(self, mode, path):
        self.path,self.twin,self.learn = path,make_learner(mode, path),make_learner(mode, path)
        self.learn.fit(1)
        self.params,self.cbs = list(self.learn.model.parameters()),list(self.learn.cbs)
        self.dtypes = [b.dtype for b in self.learn.model.buffers()]

    def float32(self, what):
        "Is it an ordinary float32 learner?"
        learn = self.learn
        assert_plain(learn.model, what)
        assert identical(learn.model.parameters(), self.params) and identical(opt_params(learn), self.params), what
        for p in self.params:
            assert p.requires_grad and p.isfinite().all() and (p.grad is None or p.grad.isfinite().all()), what
        assert [b.dtype for b in learn.model.buffers()]==self.dtypes, what
        assert all(b.isfinite().all() for b in learn.model.buffers()), what
        assert identical(learn.cbs, self.cbs) and all(getattr(learn, cb.name) is cb for cb in self.cbs), what
        assert not learn.lock.locked(), what
        assert not {'step','zero_grad','state_dict','load_state_dict'}&set(vars(learn.opt)), what
        assert not {'found_inf','grad_scale'}&set(vars(getattr(learn.opt, 'opt', learn.opt))), what

    def suffer(self, name, place):
        "Fit with the fault called `name` at `place`. Returns it, and what came out"
        learn,fault,self.steps = self.learn,Fault(faults[name], place),Steps()
        for o in (learn.model[2], learn.loss_func): o.fault = fault
        fault.learn = learn
        opt,step = type(getattr(learn.opt, 'opt', learn.opt)),'step'
        if isinstance(learn.opt, Optimizer): opt,step = optimizers,'_step_at_once'
        own = getattr(opt, step)
        @wraps(own)
        def _first(*args, **kwargs):
            if fault.what=='step' and fault.iter==fault.at and learn.training: fault.go()
            return own(*args, **kwargs)
        out = None
        with patched.object(opt, step, _first):
            try: learn.fit(1, cbs=[fault,self.steps])
            except BaseException as e: out = e
        for o in (learn.model[2], learn.loss_func): o.fault = None
        return fault,out

    def usable(self, what, export=True):
        "Does all that one does with a learner work, to the bit as in one that has only loaded its checkpoint?"
        learn,twin = self.learn,self.twin
        learn.save('now')
        twin.load('now')
        with torch.serialization.safe_globals([L]): file = torch.load(self.path/'models'/'now.pth', weights_only=True)
        for n,p in file['model'].items(): assert p.dtype in (torch.float32,torch.int64), (what, n)
        assert same(everything(learn), everything(twin)), what
        assert learn.validate()==twin.validate(), what
        assert torch.equal(learn.predict(3)[2], twin.predict(3)[2]), what
        if export:
            learn.export('export.pkl')
            loaded = load_learner(self.path/'export.pkl', cpu=True)
            assert not [cb for cb in loaded.cbs if isinstance(cb, (PrecisionCallback,ModelToHalf))], what
            assert same([*loaded.model.parameters()], self.params), what
            assert quiet(loaded).predict(3)[2].isfinite().all(), what
        assert same(everything(learn), everything(twin)), what
        self.float32(what)
        # as in fastai, a cancelled batch leaves its gradients to the next fit
        for p,q in zip(self.params, twin.model.parameters()): q.grad = None if p.grad is None else p.grad.clone()
        for o in (learn,twin): o.fit(1)
        assert same(everything(learn), everything(twin)), what
        assert list(learn.recorder.values[-1])==list(twin.recorder.values[-1]), what
