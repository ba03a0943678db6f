"""Everything in mp_callbacks: `from mp_callbacks.all import *`, after fastai's own star import

This is what turns `learn.to_fp16()` and its kin into ours: fastai's methods of those names are replaced on import."""
from .dtypes import *
from .loss_scale import *
from .grads import *
from .master import *
from .functional import *
from .flat import *
from .syncs import *
from .compact_masters import *
from .callback import *
from .recorder import *
from .smooth_loss import *
from .learner import *
