"Ctrl-C in a dozen places of our own code; and in the middle of a batch a file"
import signal

from faults import *
from mp_callbacks.core import backward,checked_steps,chosen_ways,forwards,half
from test_inputs import trains
from tracing import interrupted

pytestmark = pytest.mark.filterwarnings('ignore')
some_modes = pytest.mark.parametrize('mode', ['fp16_flat_clip','native_bf16'])

places = dict( # what runs in a training batch, in this order: name -> owner, or None for the precision callback
    do_batch      = None,
    hold          = half.half_precision,
    __call__      = forwards.WrappedForward,
    linear        = F, # inside a module's own `forward`
    _returned_float32 = chosen_ways,
    after_pred    = None,
    mul_grads     = backward,
    before_step   = None,
    prepare_grads = checked_steps,
    adjust        = DynamicLossScale,
    after_step    = None,
    after_batch   = None)
stepped = 'adjust','after_step','after_batch'

@some_modes
def test_interrupt(mode, tmp_path, monkeypatch):
    "The learner, and the switches of this process, are what they were; before the step, so are all numbers"
    patient = PatientWithTwin(mode, tmp_path)
    for name,owner in places.items():
        owner = owner or type(patient.learn.mixed_precision)
        if name in ('adjust','mul_grads') and 'bf16' in mode: continue # bfloat16 has no scale
        own,steps = getattr(owner, name),Steps()
        def interrupted(*args, own=own, **kwargs):
            if patient.learn.training and getattr(patient.learn, 'iter', 0)==1: signal.raise_signal(signal.SIGINT)
            return own(*args, **kwargs)
        with monkeypatch.context() as m:
            m.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt): patient.learn.fit(1, cbs=steps)
        patient.learn.logger,patient.learn.create_mbar = noop,False
        patient.float32((mode, name))
        if name not in stepped: assert same(everything(patient.learn), steps.states[-1]), (mode, name)
    patient.usable(mode)

def test_interrupt_while_the_scale_is_stored():
    "The next fit goes on with a whole state: that of before the step, or after it"
    learn,n = fitted(get_learner(dls=get_dls(bs=64)).to_fp16()),1
    before = precision_state(learn)
    while interrupted(lambda: learn.fit(1), n, 'clear_state','write_state'):
        now,n = precision_state(learn),n+1
        assert now.keys()==before.keys() and now['steps']-before['steps'] in (0,1), n
        before = now
    assert n>1 and learn.mixed_precision.state.steps==before['steps']+1

switches = 'learner/precision.py','core/checked_steps.py','core/half.py','core/switch.py','core/forwards.py','_inside'

def learner(mode):
    "A learner's steps, and a fit"
    learn = fitted(in_mode(mode, norm=True, dls=get_dls(bs=32, n=32)))
    return learn.mixed_precision.steps,lambda: learn.fit(1)

def loop(mode):
    "Steps of a loop, and three more of them"
    model = mlp(norm=True)
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), .1), f16 if mode=='fp16' else bf16)
    return train_steps(steps, [numbers(32)]),lambda: train_steps(steps, [numbers(32)]*3)

@pytest.mark.slow
@pytest.mark.parametrize('make', [learner,loop])
@pytest.mark.parametrize('mode', ['fp16','native_bf16'])
def test_interrupt_at_each_line(mode, make):
    "Nobody holds half precision afterwards, no batch is open, and nothing of ours stands in the model"
    (steps,train),n = make(mode),1
    while interrupted(train, n, 'core/training_steps.py', *switches):
        assert_plain(steps.model, n)
        assert not steps.half._holders and not steps.open_batches, n
        n += 1
    assert n>300

moments = [('before_batch',20), ('after_pred',-50), ('after_backward',20), ('before_step',20), ('after_step',-50),
           ('after_batch',20)]

@some_modes
def test_save_inside_a_batch(mode, tmp_path):
    "A file has the real weights, whenever it is written, and saving changes nothing"
    learn,other = make_learner(mode, tmp_path),make_learner(mode, tmp_path)
    for event,order in moments:
        def save(o): want.update(deepcopy(dict(o.model.named_parameters()))); o.save('mid')
        want = {}
        learn.fit(1, cbs=Now(event, save, order))
        other.fit(1)
        with torch.serialization.safe_globals([L]):
            file = torch.load(tmp_path/'models'/'mid.pth', weights_only=True)['model']
        assert same({n:file[n] for n in want}, {n:p.data for n,p in want.items()}), event
        assert same(everything(learn), everything(other)), event

@some_modes
def test_new_optimizer_inside_a_batch(mode, tmp_path):
    "It is for the real parameters, and goes on training them"
    for event,order in moments:
        learn = make_learner(mode, tmp_path)
        ps = [*learn.model.parameters()]
        learn.fit(1, cbs=Now(event, lambda o: o.create_opt(), order))
        assert identical(opt_params(learn), ps), event
        trains(learn)
