"""What a training loop of your own needs: `from mp_callbacks.core.all import *`

It imports neither fastai nor matplotlib."""
from .loss_scale import DynamicLossScale,StaticLossScale
from .grads import prepare_grads
from .half import half_precision
from .training_steps import TrainingSteps

__all__ = ['half_precision','TrainingSteps','DynamicLossScale','StaticLossScale','prepare_grads']
