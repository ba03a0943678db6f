"""A walk with two processes: random lives of learners, alike in both, and what may happen to one process alone

    python tests/walk.py --lives 500 --seed 0

A life is a few acts in random order: fits with all processes or with one alone, overflows in one process, exceptions
and cancelled fits in all, changes of precision, files, looks at batches, rescue. It ends with a fit of all. Then
weights, loss scale and counters have to be the same bits in both processes, and nothing of ours may stand in the model.
What hangs ends after a time-out. The message names the life, so that it can be repeated: `--first N --lives 1`."""
import random,tempfile,warnings
from contextlib import nullcontext
from datetime import timedelta

from fastcore.script import call_parse

from mp_callbacks.precision import precision_callback
from ranks import *

calls = dict( # scales that move within a life
    fp16        = lambda learn, rescue: learn.to_fp16(max_loss_scale=2.**12, scale_wait=2, rescue=rescue),
    fp16_flat   = lambda learn, rescue: learn.to_fp16(flat_master=learn.opt_func is not adamw, clip=.5, rescue=rescue),
    native_fp16 = lambda learn, rescue: learn.to_native_fp16(2.**10, growth_interval=2, rescue=rescue),
    bf16        = lambda learn, rescue: learn.to_bf16(),
    native_bf16 = lambda learn, rescue: learn.to_native_bf16(clip=.5),
    fp32        = lambda learn, rescue: learn.to_fp32())
models = dict(
    plain  = lambda: nn.Sequential(nn.Linear(8,8), nn.GELU(), nn.Linear(8,1)),
    layer  = lambda: nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8,1)),
    batch  = lambda: nn.Sequential(nn.Linear(8,8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8,1)),
    sick   = lambda: nn.Sequential(nn.Linear(8,8), Softmax(), nn.Linear(8,1)))
opts = dict(sgd=partial(SGD, mom=0.), adam=Adam, adamw=adamw)
stops = 'after_pred after_loss before_backward after_backward before_step after_step after_batch'.split()

class Life:
    "A learner of this process, and what happens to it; `rng` is the same in both processes"
    def __init__(self, rng, rank, path):
        self.rng,self.rank,self.path = rng,rank,path
        self.by_hand,self.rescue,self.story = rng.random()<.4,rng.random()<.5,[]
        model = rng.choice([*models])
        torch.manual_seed(rng.randrange(1000))
        net,x,y = models[model](),*(rows(rank, 24) if self.by_hand else numbers(48))
        if model=='sick' and (rank==0 or not self.by_hand): x = x*.1 # else one process has batches beyond float16
        self.learn = get_learner(net, as_dls(x, y, 8), path=path, opt_func=opts[rng.choice([*opts])])
        self.stale = False # has a process trained alone, so that optimizers remember different things?
        self.note('made', model, 'by hand' if self.by_hand else 'fastai')
        self.precision()

    def note(self, *args): self.story.append(' '.join(map(str, args)))

    def precision(self):
        call = self.rng.choice([*calls])
        self.note(call, self.rescue)
        calls[call](self.learn, self.rescue)
        if call!='fp32': self.learn.mixed_precision.warn_skips = 2

    def faults(self):
        "Callbacks for a fit, with the name of the first, and the exception that ends the fit"
        kind = self.rng.choice(['none','overflow','overflow','error','interrupt','cancel'])
        rank,at,event,order = self.rng.randrange(2),self.rng.randrange(3),self.rng.choice(stops),self.rng.choice([5,15])
        self.note(kind, event if kind in ('error','interrupt','cancel') else (rank,at))
        # in float32 all weights would be nan
        if kind=='none' or kind=='overflow' and precision_callback(self.learn) is None: return []
        if kind=='overflow': return [Spoil(rank, at)]
        e = dict(error=RuntimeError('as asked'), interrupt=KeyboardInterrupt(), cancel=CancelFitException())[kind]
        return [Now(event, raises(e), order)]

    def fit(self, ctx, cbs, **kwargs):
        try:
            with ctx: self.learn.fit(1, cbs=cbs, **kwargs)
        except (RuntimeError,KeyboardInterrupt) as e:
            if isinstance(e, RuntimeError) and 'as asked' not in str(e): raise

    @property
    def wrapped(self):
        "Would a fit alone wait? By hand on purpose; with fastai after an exception, which leaves its wrappers there."
        wrappers = DistributedDataParallel,DistributedDL
        return any(isinstance(o, wrappers) for o in (self.learn.model,*self.learn.dls.loaders))

    def alone(self):
        "One process trains, or both do, each for itself"
        who,cbs = self.rng.choice([(0,),(1,),(0,1)]),self.faults()
        if self.wrapped: return self.note('not alone: wrapped')
        self.note('alone', who)
        self.stale = True
        if self.rank in who: self.fit(nullcontext(), cbs)

    def together(self, cbs=None):
        if cbs is None: cbs = self.faults()
        self.note('together')
        if self.by_hand and not isinstance(self.learn.model, DistributedDataParallel):
            self.learn.model = DistributedDataParallel(self.learn.model)
        # the momentum of the optimizer isn't made equal by anybody
        reset,self.stale = self.stale,False
        with torchrun(self.rank):
            self.fit(nullcontext() if self.by_hand else fastai_ctx(self.learn), cbs, reset_opt=reset)
        self.learn.remove_cb(ProgressCallback) # fastai adds one again

    def files(self):
        "The first process writes, all read"
        self.note('files')
        with torchrun(self.rank): # without its environment fastai knows of no other process
            self.learn.save('walk')
            self.learn.load('walk')
            dist.barrier() # before the next act writes again

    def look(self):
        "One process looks, or both do; nothing changes"
        who,f = self.rng.choice([(0,),(1,),(0,1)]),self.rng.choice(['find_nonfinite','find_nonfinite','precision_plan'])
        self.note(f, who)
        if self.rank not in who: return
        before = [params(self.learn.model),state(self.learn)]
        getattr(self.learn, f)()
        assert same(before, [params(self.learn.model),state(self.learn)]), f'{f} has changed the learner'

    def validate(self):
        self.note('validate')
        if not self.wrapped: self.learn.validate()

    def live(self):
        acts = [self.alone,self.together,self.together,self.precision,self.files,self.look,self.validate]
        for _ in range(self.rng.randrange(2, 6)): self.rng.choice(acts)()
        self.together([])
        if isinstance(self.learn.model, DistributedDataParallel): self.learn.model = self.learn.model.module
        assert_plain(self.learn.model)
        return params(self.learn.model),state(self.learn)

def state(learn): return {} if precision_callback(learn) is None else precision_state(learn)

def work(rank, path, first, lives, seed):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    dist.init_process_group('gloo', f'file://{path}/init', timedelta(seconds=20), rank=rank, world_size=2)
    skips = rescues = 0
    for i in range(first, first+lives):
        life = None
        try:
            life = Life(random.Random(f'{seed} {i}'), rank, Path(path))
            end = life.live()
            ends = [None,None]
            dist.all_gather_object(ends, end)
            apart = [k for a,b in zip(*ends) for k in {*a,*b} if not same(a.get(k), b.get(k))]
            assert not apart, f'the processes differ in {apart}'
        except BaseException:
            story = ', '.join(life.story) if life else 'not made'
            print(f'Life {i} of seed {seed}, process {rank}: {story}', flush=True)
            raise
        log = getattr(getattr(life.learn, 'precision_recorder', None), 'log', None)
        skips += 0 if log is None else int(log.skipped.sum())
        rescues += any(o.startswith('rescued_') for o in end[1])
    if rank==0: print(f'{lives} lives without a difference, {skips} skipped steps, {rescues} ended rescued', flush=True)
    dist.destroy_process_group()

@call_parse
def main(
    lives:int=500, # Number of lives
    seed:int=0, # Of the random numbers
    first:int=0, # Number of the first life
):
    "Two processes live `lives` lives of learners, and end alike"
    with tempfile.TemporaryDirectory() as path:
        mp.start_processes(work, (path,first,lives,seed), nprocs=2, start_method=start_method)
