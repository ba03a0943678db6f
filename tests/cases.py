"Which cases of a test are slow ones: an ordinary run tries a few of many combinations"
import itertools,pytest

def slow_unless(fast, *args):
    "A case for `parametrize`, a slow one unless `fast`"
    return pytest.param(*args, marks=() if fast else pytest.mark.slow)

def crossed(*values, fast, thin=1):
    "Of all combinations of `values` those for which `fast` is true, and as slow tests one in `thin` of the others"
    res = []
    for numbered in itertools.product(*map(enumerate, values)):
        at,o = zip(*numbered)
        if fast(*o) or sum(at)%thin==0: res.append(slow_unless(fast(*o), *o))
    return res

def in_turns(names, values):
    "One of `values` for each name, so that a few cases meet all names and all values"
    return dict(zip(names, itertools.cycle(values)))
