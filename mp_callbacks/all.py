"""What a fastai user needs: `from mp_callbacks.all import *`, after fastai's own star import

Importing it replaces `Learner.to_fp16` and its kin."""
from . import learner
from .jmp import Policy
from .loss_scale import DynamicLossScale,StaticLossScale
from .grads import StepStats
from .half import half_precision
from .callback import MixedPrecision,ModelToHalf,NativeMixedPrecision
from .recorder import PrecisionRecorder

__all__ = ['ModelToHalf','MixedPrecision','NativeMixedPrecision','PrecisionRecorder','half_precision','StepStats',
           'Policy','DynamicLossScale','StaticLossScale']
