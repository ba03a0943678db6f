"""One precision at a time: every ordered pair of calls that change it, fastai's own among them, once and twice"""
from fastai.callback import fp16
from mp_callbacks.learner.precision import is_precision
from learners import *

pytestmark = pytest.mark.filterwarnings('ignore')

to = {**{o: methodcaller(o) for o in (*calls, 'to_fp32', 'to_channelslast', 'to_contiguous')},
      'to_bf16 flat':           methodcaller('to_bf16', flat_master=True),
      'to_channelslast no amp': methodcaller('to_channelslast', use_amp=False),
      'to_contiguous fp32':     methodcaller('to_contiguous', to_fp32=True)}
class Subclass(fp16.MixedPrecision): "As in somebody's own package"

foreign = dict( # fastai's own methods, which ours have taken the place of, add its own callbacks
    amp        = lambda learn: learn.add_cb(fp16.MixedPrecision()),
    amp_bf16   = lambda learn: learn.add_cb(fp16.MixedPrecision('bf16')),
    subclass   = lambda learn: learn.add_cb(Subclass()),
    non_native = lambda learn: learn.add_cbs([fp16.ModelToHalf(),fp16.NonNativeMixedPrecision()]))

def kinds(learn):
    "Names of the callbacks that have to do with precision, and where they come from"
    found = [type(cb) for cb in learn.cbs if is_precision(cb) or isinstance(cb, ChannelsLast)]
    return sorted(o.__module__.split('.')[0]+'.'+o.__name__ for o in found)

pairs = [o for o in crossed({**to, **foreign}, to, fast=lambda *names: not re.search('contiguous|no amp', str(names)))
         if o.values!=('non_native','to_channelslast')] # both are fastai's own, and add up to two precisions

@pytest.mark.parametrize('a,b', pairs, ids=lambda o: str(o).replace(' ', '_'))
def test_pair(a, b):
    learn,alone,plain = [get_learner(norm=True) for _ in range(3)]
    first,second = {**to, **foreign}[a],to[b]
    first(learn); second(learn); second(alone)
    once = kinds(learn)
    assert sum(o.endswith('Precision') for o in once)<=1, once
    if b.startswith('to_') and 'channels' not in b and 'contiguous' not in b:
        assert [o for o in once if 'Channels' not in o]==kinds(alone), once # nothing is left of the first
    # where channels last is on, fastai adds no precision
    if a not in foreign and (a,b)!=('to_fp32','to_channelslast'):
        first(learn); second(learn)
        assert kinds(learn)==once
    on = [o for o in once if o.endswith('Precision')]
    if not on or on[0].startswith('mp_callbacks'):
        learn.fit(1)
        assert all(p.isfinite().all() and p.dtype==torch.float32 for p in learn.model.parameters())
    learn.to_fp32().remove_cb(ChannelsLast)
    assert kinds(learn)==[] and [type(cb) for cb in learn.cbs]==[type(cb) for cb in plain.cbs]
    assert_plain(learn.model)
    assert not any(vars(p) or p._backward_hooks for p in learn.model.parameters())
    if learn.opt is not None:
        plain.fit(1)
        assert vars(learn.opt).keys()==vars(plain.opt).keys()
    assert vars(learn).keys()==vars(plain).keys(), vars(learn).keys()^vars(plain).keys()
    learn.fit(1)
