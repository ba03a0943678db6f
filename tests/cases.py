"Which cases of a test are slow ones: an ordinary run tries a few of many combinations"
import itertools,pytest

def slow_unless(fast, *args):
    "A case for `parametrize`, a slow one unless `fast`"
    return pytest.param(*args, marks=() if fast else pytest.mark.slow)

def crossed(*values, fast):
    "All combinations of `values` for `parametrize`, those for which `fast` is false as slow tests"
    return [slow_unless(fast(*o), *o) for o in itertools.product(*values)]

def in_turns(names, values):
    "One of `values` for each name, so that a few cases meet all names and all values"
    return dict(zip(names, itertools.cycle(values)))
