"""Mixed-precision training for fastai and PyTorch

```python
from fastai.vision.all import *
from mp_callbacks.all import *    # after fastai
learn = vision_learner(dls, resnet34, metrics=accuracy).to_bf16()    # on a T4 or V100: to_fp16()
```

A PyTorch loop of your own doesn't import fastai:

```diff
+from mp_callbacks.core.training_steps import TrainingSteps
+steps = TrainingSteps(model, opt, torch.bfloat16)
 for xb,yb in train_dl:
-    loss = F.cross_entropy(model(xb), yb)
-    loss.backward()
-    opt.step()
-    opt.zero_grad()
+    with steps.batch():
+        loss = F.cross_entropy(model(xb), yb)
+        steps.backward(loss)
+    steps.make()
```

- `to_fp16()` and `to_bf16()` add the callbacks `ModelToHalf` and `MixedPrecision`: float32 master weights, a dynamic
  loss scale, and clipping (`clip=1.`). Layers compute in half precision under autocast; norms, embeddings and
  parameters in no layer by rules.
- `to_native_fp16()` and `to_native_bf16()` add `NativeMixedPrecision`: autocast and a `GradScaler`, as in fastai.
- nbdev exports all of it from
  [notebooks whose cells are the tests](https://example.github.io/mp_callbacks/explanations/architecture.html)."""

__version__ = "0.1.0"
