"""What a fastai user needs: `from mp_callbacks.all import *`, after fastai's own star import

Importing it replaces `Learner.to_fp16` and its kin."""
from .learner import calls # noqa: F401, as it adds `to_fp16` and its kin to `Learner`
from .names.jmp import Policy
from .core.loss_scale import DynamicLossScale,StaticLossScale
from .core.grads import StepStats
from .core.half import half_precision
from .learner.callback import MixedPrecision,ModelToHalf,NativeMixedPrecision
from .learner.recorder import PrecisionRecorder

__all__ = ['ModelToHalf','MixedPrecision','NativeMixedPrecision','PrecisionRecorder','half_precision','StepStats',
           'Policy','DynamicLossScale','StaticLossScale']
