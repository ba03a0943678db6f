"""Ctrl-C at any moment, between two lines of anybody's code, and what a callback may do to the learner in the middle of a batch"""
import contextlib,gc,random,sys
from pathlib import Path

import pytest
from faults import *

pytestmark = pytest.mark.filterwarnings('ignore')
each_mode = pytest.mark.parametrize('mode', modes)

@each_mode
def test_left_open(mode, tmp_path, monkeypatch):
    "An interrupt that keeps a `with` from being left: nothing of it happens later, when the traceback is dropped and what it held is collected"
    patient,own,done = Patient(mode, tmp_path),contextlib._GeneratorContextManager.__exit__,[]
    def late(self, *args):
        if done or self.gen.__name__!='during_batch': return own(self, *args)
        done.append(1)
        monkeypatch.setattr(contextlib._GeneratorContextManager, '__exit__', own)
        raise KeyboardInterrupt
    monkeypatch.setattr(contextlib._GeneratorContextManager, '__exit__', late)
    held = []
    with pytest.raises(KeyboardInterrupt) as e: patient.learn.fit(1)
    held.append(e.value)
    del e
    class Drop(Callback):
        order = 80
        def after_backward(self): held.clear(); gc.collect()
    patient.learn.save('now')
    patient.twin.load('now')
    for o in (patient.learn,patient.twin): o.fit(1, cbs=Drop())
    assert same(everything(patient.learn), everything(patient.twin))
    patient.float32(mode)

class Lines:
    "Count the lines that our code, and what Python and PyTorch have for `with`, goes through; raise KeyboardInterrupt before line number `at`"
    def __init__(self, at=None): self.at,self.n = at,0
    def __call__(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if path.parent.name!='mp_callbacks' and path.name not in ('contextlib.py','autocast_mode.py','grad_mode.py'): return
        if event=='line':
            self.n += 1
            if self.n==self.at: raise KeyboardInterrupt
        return self
    def __enter__(self): sys.settrace(self); return self
    def __exit__(self, *_): sys.settrace(None)

@each_mode
def test_any_moment(mode, tmp_path):
    "An interrupt before any line, sixty of them: the learner, and the switches of this process, are what they were"
    rng,patient = random.Random(0),Patient(mode, tmp_path)
    patient.learn.fit(1) # which runs some lines that a later one doesn't
    with Lines() as all_lines: patient.learn.fit(1)
    assert all_lines.n>1000
    for at in sorted(rng.sample(range(all_lines.n), 60)):
        with pytest.raises(KeyboardInterrupt), Lines(at+1): patient.learn.fit(1)
        patient.learn.logger,patient.learn.create_mbar = noop,False
        patient.float32((mode, at))
    patient.usable(mode)

class Now(Callback):
    "Call `f` with the learner, once, in `event` of the second batch"
    def __init__(self, event, order, f):
        self.f,self.order = f,order
        setattr(self, event, self.now)
    def now(self):
        if not self.training or self.iter!=1: return
        f,self.f = self.f,noop
        f(self.learn)

moments = pytest.mark.parametrize('event,order', [(e,o) for e in of_training for o in (-50,20)])

@moments
@each_mode
def test_save_inside_a_batch(mode, event, order, tmp_path):
    "A file has the real weights, whenever it is written, and nobody notices that it was"
    learn,other = (make_learner(mode, tmp_path) for _ in range(2))
    got = []
    def save(o): got.append(flat(p for pg in o.opt.param_lists for p in pg)); o.save('mid')
    learn.fit(1, cbs=Now(event, order, save))
    other.fit(1)
    with torch.serialization.safe_globals([L]): state = torch.load(tmp_path/'models'/'mid.pth', weights_only=True)['model']
    names = [n for n,_ in learn.model.named_parameters()]
    assert {state[n].dtype for n in names}=={torch.float32} and torch.equal(flat(state[n] for n in names), got[0])
    assert same(everything(learn), everything(other))

@pytest.mark.parametrize('event,order', [('before_batch',-50), ('before_batch',20), ('after_backward',-50), ('after_backward',20), ('before_step',20), ('after_batch',20)])
@each_mode
def test_load_inside_a_batch(mode, event, order, tmp_path):
    "What is loaded is there, as in float32"
    def run(mode):
        learn = make_learner('bf16', tmp_path).to_fp32()
        learn.opt_func,learn.lr,learn.opt = SGD,.05,None
        learn.create_opt()
        start = flat(weights(learn))
        learn.save('start')
        if mode: modes[mode](learn)
        learn.fit(2)
        learn.fit(1, cbs=Now(event, order, lambda o: o.load('start')))
        return flat(weights(learn))-start
    want,got = run(None),run(mode)
    if 'clip' not in mode: assert (got-want).norm()<=.02*want.norm()+1e-6

@moments
@each_mode
def test_new_optimizer_inside_a_batch(mode, event, order, tmp_path):
    "It is for the real parameters, and goes on training them"
    learn = make_learner(mode, tmp_path)
    ps = list(learn.model.parameters())
    learn.fit(1, cbs=Now(event, order, lambda o: o.create_opt()))
    assert all(p is q for p,q in zip([p for pg in learn.opt.param_lists for p in pg], ps, strict=True))
    before = weights(learn)
    learn.fit(1)
    assert not any(map(torch.equal, weights(learn), before))

@moments
@each_mode
def test_removed_inside_a_batch(mode, event, order, tmp_path):
    "To take the callback away in the middle of a batch is refused, or works; in no case is there a step with gradients that are still scaled"
    def run(mode, remove):
        learn = make_learner('bf16', tmp_path).to_fp32()
        learn.opt_func,learn.lr,learn.opt = SGD,1e-3,None
        start = flat(weights(learn))
        if mode: modes[mode](learn)
        try: learn.fit(1, cbs=Now(event, order, lambda o: o.remove_cb(o.mixed_precision)) if remove else None)
        except RuntimeError: pass
        assert {p.dtype for p in learn.model.parameters()}=={torch.float32}
        return (flat(weights(learn))-start).norm().item()
    assert run(mode, True)<1.1*run(None, False)
