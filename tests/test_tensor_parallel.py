"""Tensor parallel (`parallelize_module`) in a loop: parts of a layer's weights compute as the whole layer does

Under autocast, with `half_precision` and with `TrainingSteps`; and what is not finite in one process is skipped by
all. The page about several GPUs promises it."""
from ranks import *
from torch.distributed.tensor.parallel import ColwiseParallel,RowwiseParallel,parallelize_module

def parallel(parts=True):
    "A layer parted by its outputs, then one by its inputs, of which only the results are summed; or both whole"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8,32), nn.GELU(), nn.Linear(32,1))
    return parallelize_module(model, mesh(), {'0':ColwiseParallel(), '2':RowwiseParallel()}) if parts else model

def full(t): return t.full_tensor() if hasattr(t, 'full_tensor') else t.clone()
def weights(model): return [full(p.detach()) for p in model.parameters()]

def losses(model, how, dtype, n=20):
    "Of `n` batches: in float32 ('plain'), under 'autocast', in a 'with', or with 'steps'"
    opt,(x,y) = torch.optim.SGD(model.parameters(), .05),all_rows(8)
    half = None if how in ('plain','autocast') else half_precision(model, dtype)
    steps = TrainingSteps(model, opt, half) if how=='steps' else None
    def _step():
        if steps is not None:
            with steps.batch(): steps.backward(loss := F.mse_loss(model(x), y))
            assert steps.make().finite
            return loss
        around = {'plain':nullcontext(), 'autocast':torch.autocast('cpu', dtype)}.get(how, half)
        with around: pred = model(x).float()
        (loss := F.mse_loss(pred, y)).backward()
        opt.step()
        opt.zero_grad()
        return loss
    return [_step().item() for _ in range(n)]

def trained(rank, dtype, how):
    "The losses of the whole model within rounding, and of tensor parallel under autocast"
    whole,autocast = losses(parallel(False), 'plain', dtype),losses(parallel(), 'autocast', dtype)
    got = losses(model := parallel(), how, dtype)
    assert got[-1]<.9*got[0] and got==pytest.approx(autocast, rel=.01) and got==pytest.approx(whole, rel=.02)
    agree(weights(model), got)

def skipped(rank, dtype, at=1):
    "What is not finite in one process's part of a gradient: all skip, and measure the same norms in other steps"
    model,(x,y),log = parallel(),all_rows(8),[]
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), .05), dtype, clip=.5)
    for i in range(4):
        with steps.batch(): steps.backward(F.mse_loss(model(x), y))
        if (i,rank)==(at,1): model[0].weight.grad.to_local()[0,0] = math.inf
        before,stats = weights(model),steps.make()
        log.append((stats.finite, stats.norm if stats.finite else None, steps.loss_scale))
        assert same(before, weights(model))==(i==at)
    assert [o for o,*_ in log]==[i!=at for i in range(4)]
    agree(weights(model), log)

halves = torch.float16,torch.bfloat16
cases = [*[partial(trained, dtype=d, how=how) for d in halves for how in ('with','steps')],
         *[partial(skipped, dtype=d) for d in halves]]

@pytest.mark.slow
def test_tensor_parallel(tmp_path): run_cases(tmp_path, cases)
