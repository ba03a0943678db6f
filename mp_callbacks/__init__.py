import sys

__version__ = "0.1.0"

moved = { # module of 0.1.0 before its release -> where it is now
    **{o:f'core.{o}' for o in 'dtypes devices own loss_scale grads modules cast ways half fp8 training_steps'.split()},
    **{o:f'look.{o}' for o in 'nonfinite half_report fp8_report plan'.split()},
    **{o:f'names.{o}' for o in 'functional jmp mpx emily fastai16'.split()},
    **{o:f'learner.{o}' for o in 'precision callback recorder looks checkup'.split()},
    'inside':'learner.fastai_internals', 'step':'learner.opt_state', 'skipped':'learner.explain_skips',
    'flat':'learner.optimizers', 'learner':'learner.calls'}

class Moved:
    "Says where a module is now: Python asks no `__getattr__` of the package for `from mp_callbacks.half import …`"
    @staticmethod
    def find_spec(name, path=None, target=None):
        parent,_,old = name.rpartition('.')
        if parent==__name__ and old in moved: raise ImportError(f'{name} is {parent}.{moved[old]} now.', name=name)

sys.meta_path.append(Moved) # asked last, for what nobody has found
