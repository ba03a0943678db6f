"""Whatever ends a fit, wherever: the learner is as one that has only loaded the checkpoint it can still write

Each exception of the table at each place of the table, in each precision, and after each one all that a learner is for:
`faults.py` says what is looked at. Each exception is met at each place, in one of the precisions. A learner is exported
after one of its exceptions. The file takes long because each place has learners of its own."""
from faults import *

pytestmark = pytest.mark.filterwarnings('ignore')

# A batch that is left there has not stepped. The data fail before it has begun.
unstepped = [('train',o) for o in before_the_step+'forward loss backward step'.split()]
quick = dict(fp16=('train','backward',0), native_fp16=('train','before_step',80))
cases = crossed(precisions, places, fast=lambda mode,place: quick.get(mode)==place, thin=2)

@pytest.mark.parametrize('mode,place', cases, ids=lambda o: '-'.join(map(str, o)) if isinstance(o, tuple) else o)
def test_faults(mode, place, tmp_path):
    "A learner of its own goes through its exceptions at one place, and so has to survive each"
    patient,turn = PatientWithTwin(mode, tmp_path),[*precisions].index(mode)//2
    some = [*faults] if quick.get(mode)==place else [*faults][turn::3] # each place has three of the six precisions
    for i,name in enumerate(some):
        what = mode,place,name
        fault,out = patient.suffer(name, place)
        assert fault.raised is not None, what
        assert out is fault.raised or name in cancels and out is None, (what, out)
        patient.float32(what)
        if name in errors and place[:2] in unstepped:
            assert same(everything(patient.learn), patient.steps.states[-1]), what
        patient.usable(what, export=i==places.index(place)%len(some))
