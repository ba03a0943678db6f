"""Faults by table: every exception of `errors` and `cancels`, at every place of `places`, in each of `modes`; and what a learner has to be afterwards

A place is an event of training or of validation, before or after the callbacks that change precision; or the model, the loss, the data, the backward pass, or the optimizer."""
import mp_callbacks.flat
from learners import *
from learners import modes as _modes

def asked(kind): return lambda: kind('as asked')

errors  = dict(RuntimeError=asked(RuntimeError), OutOfMemoryError=asked(torch.OutOfMemoryError), KeyboardInterrupt=KeyboardInterrupt, no_arguments=RuntimeError)
cancels = {o.__name__: o for o in (CancelBatchException,CancelBackwardException,CancelStepException,CancelTrainException,CancelValidException,CancelEpochException,CancelFitException)}
faults  = {**errors, **cancels}

modes = {**{k:v for k,v in _modes.items() if k!='fp16_static'},
         'native_fp16_fused': lambda learn: learn.to_native_fp16(2.**10, growth_interval=2, max_loss_scale=2.**12), # see `make_learner`
         'fp16_flat_clip': lambda learn: learn.to_fp16(max_loss_scale=2.**10, flat_master=True, clip=.1)}

before_the_step = 'before_batch after_pred after_loss before_backward after_backward before_step'.split()
of_training   = before_the_step+'after_step after_batch'.split()
of_validation = 'before_batch after_pred after_loss after_batch'.split()
of_fit        = 'before_fit before_epoch before_train after_train before_validate after_validate after_epoch after_fit'.split()
code          = 'forward loss data backward step zero_grad'.split()
places = ([('train',o,order) for o in of_training for order in (-50,80)]+[('valid',o,order) for o in of_validation for order in (-50,80)]+[('fit',o,order) for o in of_fit for order in (-50,80)]+
          [('train',o,0) for o in code]+[('valid',o,0) for o in code[:3]])

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

class Data(TfmdDL):
    "And data"
    fault,when = None,None
    def __iter__(self):
        for i,b in enumerate(super().__iter__()):
            if self.fault and self.fault.what=='data' and self.fault.when==self.when and i==self.fault.at: self.fault.go()
            yield b

def leaves(x):
    if isinstance(x, dict): return [o for k in sorted(x, key=str) for o in (str(k), *leaves(x[k]))]
    if isinstance(x, (list,tuple,L)): return [o for v in x for o in leaves(v)]
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x]

def everything(learn): return leaves([dict(learn.model.state_dict()), learn.opt.state_dict()['state'], precision_state(learn)])
def same(xs, ys): return len(xs)==len(ys) and all(type(x) is type(y) and (x.dtype==y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x==y) for x,y in zip(xs, ys))

class Steps(Callback):
    "Everything, at the start of each training batch"
    order = -200
    def before_fit(self): self.states = []
    def before_batch(self):
        if self.training: self.states.append(everything(self.learn))

def fused_adam(params, **kwargs): return OptimWrapper(params, torch.optim.Adam, fused=True, **kwargs)

def make_learner(mode, path):
    n = 32
    bs,(x,y) = 16,numbers(n)
    def dl(when):
        res = Data(Datasets(range(n), [[At(x)],[At(y)]]), bs=bs, device='cpu', num_workers=0, shuffle=False)
        res.when = when
        return res
    model = mlp(True)
    model.insert(2, Bomb())
    learn = get_learner(model, dls=DataLoaders(dl('train'), dl('valid'), device='cpu'), loss_func=Loss(), lr=1e-3, path=path, **(dict(opt_func=fused_adam) if mode.endswith('fused') else {}))
    modes[mode](learn)
    learn.create_opt()
    return learn

class Patient:
    "A learner to be hurt, and a healthy one to compare it with"
    def __init__(self, mode, path):
        self.path,self.learn,self.twin = path,make_learner(mode, path),make_learner(mode, path)
        self.learn.fit(1)
        self.params,self.cbs = list(self.learn.model.parameters()),list(self.learn.cbs)
        self.names = set(vars(self.learn))|{'precision_recorder'}

    def suffer(self, name, place):
        "Fit with the fault called `name` at `place`. Returns it, and what came out"
        learn,fault,self.steps = self.learn,Fault(faults[name], place),Steps()
        for o in (learn.model[2], learn.loss_func, *learn.dls): o.fault = fault
        fault.learn,out = learn,None
        opt = getattr(learn.opt, 'opt', learn.opt)
        targets = {k:(type(opt),k) for k in ('step','zero_grad')}
        if getattr(learn.mixed_precision, 'flat_master', False): targets['step'] = mp_callbacks.flat,'_step_groups'
        own = {k:getattr(*o) for k,o in targets.items()}
        if place[1] in own: setattr(*targets[place[1]], self._first(own[place[1]], fault))
        try: learn.fit(1, cbs=[fault,self.steps])
        except BaseException as e: out = e
        finally:
            for o in (learn.model[2], learn.loss_func, *learn.dls): o.fault = None
            for k,f in own.items(): setattr(*targets[k], f)
        return fault,out

    def _first(self, f, fault):
        def _f(*args, **kwargs):
            if fault.iter==fault.at and fault.learn.training: fault.go()
            return f(*args, **kwargs)
        _f.__module__,_f.__name__,_f.elementwise = f.__module__,f.__name__,True
        return _f

    def float32(self, what):
        "Is it an ordinary float32 learner?"
        learn = self.learn
        assert all(p is q for p,q in zip(learn.model.parameters(), self.params, strict=True)), what
        assert all(p is q for p,q in zip([p for pg in learn.opt.param_lists for p in pg], self.params, strict=True)), what
        for p in self.params:
            assert p.dtype==torch.float32 and p.requires_grad and p.isfinite().all() and type(p) is nn.Parameter, what
            assert p.untyped_storage().nbytes()==4*p.numel(), what # its own
        assert all(b.dtype==c.dtype and b.isfinite().all() for b,c in zip(learn.model.buffers(), self.twin.model.buffers(), strict=True)), what
        assert not torch.is_autocast_enabled('cpu') and torch.is_autocast_cache_enabled() and torch.is_grad_enabled(), what
        nesting = torch.autocast_increment_nesting()-1
        torch.autocast_decrement_nesting()
        assert nesting==0, (what, nesting)
        assert nn.Linear(2,2)(torch.zeros(1,2)).dtype==torch.float32, what
        assert not [n for n,m in learn.model.named_modules() if 'forward' in vars(m)], what
        assert all(a is b for a,b in zip(learn.cbs, self.cbs, strict=True)) and all(getattr(learn, cb.name) is cb for cb in self.cbs), what
        assert not learn.lock.locked() and not {'step','zero_grad','state_dict','load_state_dict'}&set(vars(learn.opt)), what
        assert not {'found_inf','grad_scale'}&set(vars(getattr(learn.opt, 'opt', learn.opt))), what

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
            assert all(torch.equal(p, q) and p.dtype==torch.float32 for p,q in zip(loaded.model.parameters(), learn.model.parameters(), strict=True)), what
            loaded.logger,loaded.create_mbar = noop,False
            loaded.remove_cb(ProgressCallback)
            assert loaded.predict(3)[2].isfinite().all(), what
        assert same(everything(learn), everything(twin)), what
        self.float32(what)
        # as in fastai, a cancelled batch leaves its gradients to the next fit
        for p,q in zip(learn.model.parameters(), twin.model.parameters()): q.grad = None if p.grad is None else p.grad.clone()
        for o in (learn,twin): o.fit(1)
        assert same(everything(learn), everything(twin)), what
        assert list(learn.recorder.values[-1])==list(twin.recorder.values[-1]), what

__all__ = [o for o in globals() if not o.startswith(('test','_'))]
