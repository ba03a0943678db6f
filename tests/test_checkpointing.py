"""`checkpointing` and `memory=`: a batch fits into the memory that was given, as planned, and with the same bits"""
from ranks import *
from mp_callbacks.core.forwards import replaced_forward
from mp_callbacks.learner.memory import free_gb
from mp_callbacks.look.checkpointing import ChangedInput,Checkpoints,Segment,_choose,plan_checkpoints,share_left

class Block(nn.Module):
    "A shortcut around layers that draw, normalize and count"
    def __init__(self, n, p):
        super().__init__()
        self.lin1,self.norm,self.lin2,self.drop = nn.Linear(n,4*n),nn.BatchNorm1d(4*n),nn.Linear(4*n,n),nn.Dropout(p)
        self.gamma,self.calls = nn.Parameter(torch.full((n,), .5)),0
    def forward(self, x):
        self.calls += 1
        return x+self.gamma*self.drop(self.lin2(F.gelu(self.norm(self.lin1(x)))))

def net(n=32, depth=4, p=.3):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8,n), *[Block(n, p) for _ in range(depth)], nn.Linear(n,1))

def big_dls(n=1024, bs=512): return as_dls(*numbers(n), bs=bs)

def segments(learn): return learn.mixed_precision.budget.plan.checkpoints.segments

def assert_same(learn, other):
    "Weights and buffers, to the bit; and nothing stands in the model"
    a,b = [o.model.state_dict() for o in (learn,other)]
    assert a.keys()==b.keys() and all(map(torch.equal, a.values(), b.values()))
    assert not any('forward' in vars(m) for m in learn.model.modules())

pytestmark = pytest.mark.filterwarnings('ignore:Checkpoints|Without checkpoints')

@pytest.mark.parametrize('mode', with_fp8)
def test_same_bits(mode):
    "As without a limit, in a fit with dropout, batch norm, a counter and a parameter of the blocks"
    def _learner(**options): return with_fp8[mode](get_learner(net(), big_dls()), **options)
    free = fitted(_learner(), 2)
    learn = _learner(memory=1e-3)
    with pytest.warns(UserWarning, match='Checkpoints'): fitted(learn, 2)
    assert segments(learn)
    assert_same(learn, free)
    assert [m.calls for m in learn.model[1:-1]]==[m.calls for m in free.model[1:-1]]
    assert log_of(learn).loss.tolist()==log_of(free).loss.tolist()

def halves(block, *, parts):
    "A dict in and a dict out, by keyword"
    return dict(x=parts['x']+block.b(F.gelu(block.a(parts['x']))), y=parts['y'])

def remembers(block, x):
    "It goes on from the state that the last batch has left"
    res,hidden = block.cell(x[:,None].expand(-1,4,-1), block.hidden)
    block.hidden = hidden.detach()
    return x+block.out(F.gelu(res)).mean(1)

class Resets(nn.Sequential):
    def reset(self):
        for m in self[1:-1]: m.hidden = None

def drawing(block, x):
    "By random numbers of Python and NumPy"
    return x+block.b(F.gelu(block.a(x))*random.random())*(np.random.rand()>.5)

def own_numbers(block, x):
    "By generators of its own, in attributes and in an object"
    noise = torch.randn(x.shape, generator=block.gen)*block.other.random()*block.inside.gen.random()
    return x+block.b(F.gelu(block.a(x+noise.to(x.dtype))))

def twice(block, x): return x+block.b(F.gelu(block.a(x)))+block.b(F.gelu(block.a(F.gelu(x)*block.gamma)))
def in_place(block, x): return x.mul_(.9)+block.b(F.gelu(block.a(x)))
def reentrant(block, x): return x+checkpoint(lambda x: block.b(F.gelu(block.a(x))), x, use_reentrant=True)
def part(block, x): return x+checkpoint(block.f, x, use_reentrant=False)
def itself(block, x): return x+checkpoint(lambda x: block.b(F.gelu(block.a(x))), x, use_reentrant=False)

def layers(f, n=32, **parts):
    "A block that computes `f`"
    return Does(f, a=nn.Linear(n,4*n), b=nn.Linear(4*n,n), **parts)

def in_dicts(m, x):
    parts = dict(x=m.start(x), y=x)
    for o in m.blocks: parts = o(parts=parts)
    return m.end(parts['x'])+parts['y'].mean()
def shared(m, x):
    x = m.start(x)
    for _ in range(4): x = m.block(x)
    return m.end(x)
def rotary():
    "Blocks share numbers that never change"
    numbers = Does(noop, cos=nn.Buffer(torch.linspace(0, 1, 32).cos()))
    return of_blocks(lambda: layers(lambda m, x: x+m.b(F.gelu(m.a(x*m.numbers.cos))), numbers=numbers))()
def wrapped():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    def _block(): return layers(lambda m, x: x+m.b(F.gelu(m.a(x))))
    return nn.Sequential(nn.Linear(8,32), checkpoint_wrapper(_block()), *[_block() for _ in range(4)], nn.Linear(32,1))
def recurrent(): return Does(remembers, cell=nn.GRU(32,64,batch_first=True), out=nn.Linear(64,32), hidden=None)
def beside_parts():
    "Some blocks checkpoint a part of themselves, which keeps most of what is left"
    def _part(): return nn.Sequential(nn.Linear(32,32), nn.GELU(), nn.Dropout(.1))
    def _block(i): return Does(part, f=_part()) if i%2 else layers(lambda m, x: x+m.b(F.gelu(m.a(x))))
    return nn.Sequential(nn.Linear(8,32), *map(_block, range(5)), nn.Linear(32,1))
def ends(**parts): return dict(start=nn.Linear(8,32), end=nn.Linear(32,1), **parts)
def normed(): return nn.utils.parametrizations.spectral_norm(nn.Linear(32,128))
def of_blocks(make): return lambda: nn.Sequential(nn.Linear(8,32), *[make() for _ in range(4)], nn.Linear(32,1))
def chain():
    def _part(): return nn.Linear(32,32),nn.BatchNorm1d(32),nn.Hardswish(inplace=True),nn.Dropout()
    return nn.Sequential(nn.Linear(8,32), *[o for _ in range(4) for o in _part()], nn.Linear(32,1))

kinds = dict(
    dicts     = lambda: Does(in_dicts, **ends(blocks=nn.ModuleList([layers(halves) for _ in range(4)]))),
    shared    = lambda: Does(shared, **ends(block=layers(lambda m, x: x+m.b(F.gelu(m.a(x)))))),
    recurrent = lambda: Resets(*of_blocks(recurrent)()),
    drawing   = of_blocks(lambda: layers(drawing)),
    twice     = of_blocks(lambda: layers(twice, gamma=torch.ones(32))),
    spectral  = of_blocks(lambda: Does(lambda m, x: x+m.b(F.gelu(m.a(x))), a=normed(), b=nn.Linear(128,32))),
    in_place  = of_blocks(lambda: layers(in_place)),
    reentrant = of_blocks(lambda: layers(reentrant)),
    itself    = of_blocks(lambda: nn.Sequential(layers(itself), nn.Dropout(.1), nn.GELU())),
    part      = beside_parts,
    own_numbers = of_blocks(lambda: layers(own_numbers, gen=torch.Generator(), other=random.Random(0),
                                           inside=SimpleNamespace(gen=np.random.default_rng(0)))),
    chain     = chain,
    wrapped   = wrapped)

@pytest.mark.parametrize('kind', kinds)
def test_kinds_of_models(kind):
    "The same bits, whatever a block keeps, draws, returns and changes"
    def _fit(**options):
        set_seed(3)
        cbs = [ModelResetter()]*(kind=='recurrent')
        return fitted(in_mode('bf16', kinds[kind](), options, dls=big_dls(bs=256), cbs=cbs), 1)
    free = _fit()
    learn = _fit(memory=2e-4)
    some = segments(learn)
    assert bool(some)==(kind!='reentrant') # which keeps nothing
    if kind=='in_place': assert [o.name for o in some]==[''] and not some[0].first # the first layer changes no input
    assert_same(learn, free)

def limited(model=None, mode='bf16', memory=2e-4, bs=256, **kwargs):
    return in_mode(mode, net() if model is None else model, {} if memory is None else dict(memory=memory),
                   dls=big_dls(bs=bs), **kwargs)

def with_accumulation(learn): return fitted(learn, 2, GradientAccumulation(512))
def with_skips(learn): return fitted(learn, 2, overflow(1, 5))
def with_looks(learn):
    "Between epochs; they say the same, too"
    answers = []
    def _look(learn):
        report = learn.precision_report(1)
        answers.append([repr(learn.find_nonfinite()), repr(report), report.keep])
    fitted(learn, 2, On('after_epoch', _look))
    learn.answers = answers
    return learn
def unfrozen(learn):
    "Blocks are frozen at first"
    for m in learn.model[:3]: m.requires_grad_(False)
    fitted(learn, 1)
    for m in learn.model[:3]: m.requires_grad_(True)
    return fitted(learn, 1)
@pytest.mark.parametrize('use', [with_accumulation,with_skips,with_looks,unfrozen])
def test_uses(use):
    "The same bits, whatever else happens in a fit"
    free,learn = use(limited(memory=None)),use(limited())
    assert segments(learn)
    assert_same(learn, free)
    if use is with_looks: assert learn.answers==free.answers
    assert skipped(learn)==(2 if use is with_skips else 0)

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_kept_block(mode):
    "A block in float32 inside checkpointed ones"
    def _fit(**options): return fitted(in_mode(mode, net(), dict(keep='2', **options), dls=big_dls(bs=256)))
    free,learn = _fit(),_fit(memory=2e-4)
    assert Segment('2') in segments(learn) or any(o.first<=2<(o.last or 0) for o in segments(learn))
    assert_same(learn, free)

def test_gradient_of_a_gradient():
    "Each backward pass computes again"
    def _grads(checkpoints, model):
        x,_ = numbers()
        with checkpoints, half(model): pred = model(x)
        grad, = torch.autograd.grad(pred.sum(), model[0].weight, create_graph=True)
        (pred.square().mean()+grad.square().mean()).backward()
        return [p.grad for p in model.parameters()]
    a,b = mlp(),mlp()
    for x,y in zip(_grads(nullcontext(), a), _grads(Checkpoints(b, [Segment('', 0, 4)]), b)): assert torch.equal(x, y)

class InterruptAt:
    "A hook that interrupts the `n`th call with a whole batch"
    def __init__(self, n): self.n = n
    def __call__(self, m, args, out):
        self.n -= len(out)>200
        if not self.n: raise KeyboardInterrupt

@pytest.mark.parametrize('n', [1,2], ids=['forward','again'])
def test_interrupt(n):
    "In the forward pass of the first batch, or when it computes again: nothing is left, and the next fit is the same"
    def _fit(learn, n):
        with learn.model[2].lin2.register_forward_hook(InterruptAt(n)), pytest.raises(KeyboardInterrupt): learn.fit(1)
        assert not any('forward' in vars(m) for m in learn.model.modules())
        for m in learn.model[1:-1]: m.calls = 0
        set_seed(3)
        return fitted(learn, 1)
    free,learn = _fit(limited(memory=None), 1),_fit(limited(), n)
    assert segments(learn)
    assert_same(learn, free)

def in_ddp(rank, mode, engine):
    "The same bits as without, on each rank"
    def _fit(**options):
        model = Net(norm=nn.LayerNorm)
        if engine=='hand': model = DistributedDataParallel(model)
        set_seed(rank)
        learn = get_learner(model, as_dls(*(rows(rank, 512) if engine=='hand' else all_rows(512)), bs=256))
        modes[mode](learn, **options)
        with together(learn, rank, engine): learn.fit(2)
        return learn
    free,learn = _fit(),_fit(memory=2e-4)
    assert segments(learn)
    assert_same(learn, free)
    agree(params(learn.model))

def test_ddp(tmp_path):
    run_cases(tmp_path, [partial(in_ddp, mode=m, engine=e) for m,e in [('bf16','hand'),('fp16','fastai')]])

bad = dict(zero=(0, 'must be a positive number of GB'), text=('16', 'must be a positive'), false=(False, 'must be'),
           nan=(math.nan, 'must be a positive'), cpu=(True, 'asks a GPU how much is free, and this is cpu'))
@pytest.mark.parametrize('name', bad)
@pytest.mark.parametrize('call', calls+['to_fp8'])
def test_bad_memory(call, name):
    "The error comes at the call, and what was on stays on"
    value,match = bad[name]
    learn = get_learner().to_bf16()
    cb,options = learn.mixed_precision,dict(emulate=True) if call=='to_fp8' else {}
    with pytest.raises(ValueError, match=match): getattr(learn, call)(memory=value, **options)
    assert learn.mixed_precision is cb

def test_compiled():
    "Refused with the reason, at the call, or at the start of a fit"
    compiled = torch.compile(mlp(), backend='eager')
    with pytest.raises(ValueError, match='compiled'): get_learner(compiled).to_bf16(memory=1)
    learn = get_learner().to_bf16(memory=1)
    learn.model[0].compile(backend='eager')
    with pytest.raises(ValueError, match='compiled'): learn.fit(1)

def test_scripted_part():
    "Refused, too: PyTorch's checkpoint ends the second pass by an exception, which TorchScript turns into another"
    model = nn.Sequential(torch.jit.script(mlp()), nn.Linear(4, 4))
    with pytest.raises(ValueError, match='scripted part'): get_learner(model).to_bf16(memory=1)

def test_said_once():
    "In a warning, in the first batch; the next fit says nothing, as nothing is new, and plans nothing"
    learn = limited(memory=4e-4)
    with pytest.warns(UserWarning, match=r'of \d blocks: batches of 256 need .* GB') as told: learn.fit(2)
    assert len([o for o in told if 'blocks' in str(o.message)])==1
    plan = learn.mixed_precision.budget.plan
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1)
    assert learn.mixed_precision.budget.plan is plan

def test_chosen_again():
    "When batches are larger by a tenth, other parameters train, or the limit is another"
    learn = fitted(limited())
    plans = [learn.mixed_precision.budget.plan]
    def _fit():
        learn.fit(1)
        plans.append(learn.mixed_precision.budget.plan)
        return plans[-1] is plans[-2]
    learn.dls = big_dls(bs=270)
    assert _fit()
    learn.dls = big_dls(bs=290)
    assert not _fit() and plans[-1].plan.items==290
    learn.model[1].requires_grad_(False)
    assert not _fit() and _fit()
    learn.add_cb(GradientAccumulation(512))
    assert not _fit() and _fit()
    learn.opt,learn.opt_func = None,Adam
    assert not _fit()
    learn.mixed_precision.memory = 1.
    assert not _fit() and not segments(learn)
    learn.mixed_precision.memory = None
    assert not _fit() and learn.mixed_precision.budget.plan is None
    learn.mixed_precision.memory = 1.
    assert not _fit() and learn.mixed_precision.budget.plan.fits

def test_shared_buffer():
    "Its numbers don't change, so a block that keeps it may have its backward pass after another was computed again"
    model,x = rotary(),torch.ones(4,8)
    def grads(*segments):
        model.zero_grad()
        with Checkpoints(model, segments): res = model(x)
        res.sum().backward()
        return [p.grad for p in model.parameters()]
    assert all(map(torch.equal, grads(), grads(Segment('2'))))

def test_no_room():
    "The gradients that add up take more than there is"
    with pytest.warns(UserWarning, match='not even one item would fit'): with_accumulation(limited(memory=1e-5))

def test_holds_no_batch():
    learn = fitted(limited())
    learn.get_preds()
    assert learn.mixed_precision.budget.batch is None

def test_batch_without_tensors():
    learn = limited()
    learn.dls = DataLoaders([['a','b']]*2, [], device='cpu')
    with pytest.raises(ValueError, match='This batch has no tensors'): learn.fit(1)

def test_sparse():
    "Sparse inputs of a block, as in a graph network, are left out of what it keeps"
    torch.manual_seed(0)
    def part(m, x, adjacency): return x+m.b(F.gelu(m.a(torch.sparse.mm(adjacency, x))))
    def graph(m, x):
        adjacency = torch.eye(len(x)).to_sparse()
        for o in m.blocks: x = o(x, adjacency)
        return x
    model = Does(graph, blocks=nn.ModuleList([layers(part) for _ in range(4)]))
    def compute_loss(n): return model(torch.ones(n,32)).square().mean()
    plan = plan_checkpoints(model, compute_loss, torch.optim.SGD(model.parameters()), 64, 3e-4)
    assert plan.checkpoints.segments

of_whom,copies = [],[]
def copy_now(m, args, out):
    if of_whom and len(copies)<2: copies.extend([deepcopy(of_whom[0]),by_pickle(of_whom[0])])

def test_copies(tmp_path):
    "Nothing of it is in copies, pickles and exports, also those that are made in the middle of a batch"
    learn = in_mode('bf16', net(), dict(memory=2e-4), dls=get_dls(256, n=512), path=tmp_path)
    learn.fit(1)
    of_whom.append(learn.model)
    with learn.model[0].register_forward_hook(copy_now): learn.fit(1)
    learn.export('model.pkl')
    assert len(copies)>1
    for o in [*copies,load_learner(tmp_path/'model.pkl').model]:
        assert not any(map(replaced_forward, o.modules()))
        assert o(numbers()[0]).dtype==torch.float32

def counted(learn, *cbs):
    "GB that tensors take at most in a fit of four batches, which are there from the start"
    x,y = numbers(512)
    learn.dls = DataLoaders([(x,y)]*4, [], device='cpu')
    with LiveBytes() as live:
        for t in (*learn.model.parameters(),*learn.model.buffers(),x,y): live.add(t)
        learn.fit(1, cbs=[*cbs])
    return max(live.log)/2**30

wide = dict(
    blocks   = lambda: net(32, 6),
    sequence = lambda: nn.Sequential(nn.Linear(8,64), *[o for _ in range(8) for o in (nn.Linear(64,64), nn.GELU())],
                                     nn.Linear(64,1)))

@pytest.mark.parametrize('name', wide)
@pytest.mark.parametrize('share', [.8,.65])
@pytest.mark.parametrize('opt_func', [fused_adam,slow_unless(False, Adam)])
@pytest.mark.parametrize('cbs', [(),slow_unless(False, (GradientAccumulation(1024),))])
def test_fits(name, share, opt_func, cbs):
    "What is planned is counted in a fit, with the state that the optimizer makes in its first step"
    def _learner(memory): return in_mode('bf16', wide[name](), dict(memory=memory), opt_func=opt_func)
    room = share*counted(_learner(None), *cbs)
    learn = _learner(room/(1-share_left))
    peak,plan = counted(learn, *cbs),learn.mixed_precision.budget.plan
    used = peak/plan.need-1
    assert plan.fits and segments(learn) and .8*room<peak<1.02*room and abs(used)<.03

def test_free_on_a_gpu(monkeypatch):
    "`memory=True`: what is free, what PyTorch holds for nobody, and what model and optimizer have already"
    for name,gb in dict(mem_get_info=(6*2**30,16*2**30), memory_reserved=5*2**30, memory_allocated=2*2**30).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, gb=gb: gb)
    learn = fitted(get_learner(opt_func=fused_adam))
    n = sum(p.numel() for p in learn.model.parameters())
    steps = 4*len([*learn.model.parameters()]) # Adam's counts
    assert free_gb(learn)==9+(12*n+steps)/2**30

def test_a_loop_of_ones_own():
    "Enter the checkpoints before half precision; the plan says what it takes, and which batch size would fit"
    model,(x,y) = net(64, 6),numbers(512)
    h,opt = half(model),torch.optim.Adam(model.parameters())
    def compute_loss(n): return F.mse_loss(model(x[:n]), y[:n])
    def _plan(gb): return plan_checkpoints(model, compute_loss, opt, 512, gb, h)
    plain = _plan(1.)
    assert plain.fits and not plain.checkpoints.segments
    assert str(plain).startswith(f'Without checkpoints: batches of 512 need {plain.peak:.3g} of 1 GB, of which 0.1 GB')
    few,less,none = [_plan(share*plain.peak/(1-share_left)) for share in (.9,.5,.01)]
    assert few.fits and less.fits and 1<few.time<less.time<4/3 and plain.peak>few.peak>less.peak
    assert not none.fits and str(none).endswith('That is too much: not even one item would fit.')
    assert none.peak<=less.peak
    tight = _plan(.95*none.peak/(1-share_left))
    n = int(re.search(r'batches of (\d+) would fit', str(tight))[1])
    assert plan_checkpoints(model, compute_loss, opt, n, tight.gb, h).fits
    with h, pytest.raises(RuntimeError, match='Enter the checkpoints first'):
        Checkpoints(model, [Segment('', 1, 3)]).turn_on()
    with less.checkpoints, h: loss = compute_loss(512)
    assert not any('forward' in vars(m) for m in model.modules())
    with h: loss.backward()

by_hand = { # bytes with some of two levels, the larger segments of work 6 and the smaller ones of 2
    '':100, 'A':60,'AB':40,'ABC':40, 'a':85,'ab':75,'abc':70,'abcd':65}
@pytest.mark.parametrize('target,chosen', [(90,'a'),(80,'ab'),(70,'A'),(50,'AB'),(40,'AB'),(30,'AB')])
def test_choice_by_hand(target, chosen):
    "What fits with the least work; if nothing does, as few as it takes to come as low as any"
    levels = [[*'ABC'],[*'abcd']]
    def _peak(some): return by_hand[''.join(some)]
    some,n = _choose(levels, lambda o: 6 if o.isupper() else 2, _peak, target)
    assert ''.join(some)==chosen and n==(3 if chosen.isupper() else 4)

class Drawing(nn.Module):
    "A hook of it draws from the generator of another module, of which a part computed again doesn't know"
    def __init__(self, at, n=64):
        super().__init__()
        torch.manual_seed(2)
        self.gen,self.out = torch.Generator(),nn.Linear(n,1)
        self.blocks = nn.Sequential(nn.Linear(8,n), *[Block(n, 0) for _ in range(4)])
        def _noise(m, args, out): return out+.1*torch.randn(out.shape, generator=self.gen)
        self.blocks[at].lin1.register_forward_hook(_noise)
    def forward(self, x): return self.out(self.blocks(x))

@pytest.mark.parametrize('call', ['to_fp16','to_native_bf16'])
def test_other_bits_are_not_chosen(call):
    "All but the part that isn't the same when it is computed again, and training has the bits of that without a limit"
    def _new(): return get_learner(Drawing(2), big_dls())
    learn,free = getattr(_new(), call)(memory=1e-3),getattr(_new(), call)()
    for o in (learn,free): fitted(o)
    def _has_hook(o): return o.name in ('blocks.2','blocks.2.lin1') if o.last is None else o.first<=2<o.last
    assert segments(learn) and not any(map(_has_hook, segments(learn)))
    assert_same(learn, free)

class Now_and_then(nn.Module):
    "Sparse gradients, and a layer that has gradients in every third call only, which nobody puts back"
    def __init__(self):
        super().__init__()
        self.aux,self.emb,self.body = nn.Linear(8,1),nn.Embedding(4,8,sparse=True),net()
    def forward(self, x):
        calls[0] += 1
        res = self.body(x+self.emb(torch.zeros(len(x), dtype=torch.int)))
        return res if calls[0]%3 else res+self.aux(x)
calls = [0]

def test_gradients_of_any_kind():
    "Sparse ones are compared, too, and a parameter may have none"
    model,(x,y) = Now_and_then(),numbers(64)
    dense = [*model.body.parameters(),*model.aux.parameters()]
    opts = [torch.optim.SparseAdam(model.emb.parameters()),torch.optim.Adam(dense)]
    def compute_loss(n): return F.mse_loss(model(x[:n]), y[:n])
    for i in range(3):
        calls[0] = i
        assert plan_checkpoints(model, compute_loss, opts, 4096, .02).checkpoints.segments

def test_choice_asks_for_little():
    "Of 64 segments, 40 of which fit, 7 numbers are tried; if none saves anything, none is taken"
    asked = []
    def _peak(some):
        asked.append(len(some))
        return 100-len(some)
    some,_ = _choose([[*range(64)]], lambda o: 1, _peak, 60)
    assert len(some)==40 and len(asked)<=7
    assert _choose([[*range(64)]], lambda o: 1, lambda some: 100, 60)==([],0)

def test_float32():
    "The function plans float32, too"
    model,(x,y) = net(),numbers(64)
    opt = torch.optim.Adam(model.parameters())
    def compute_loss(n): return F.mse_loss(model(x[:n]), y[:n])
    plain,few = [plan_checkpoints(model, compute_loss, opt, 4096, gb) for gb in (1,.02)]
    assert few.fits and few.checkpoints.segments and few.plan.table.peak.checkpointed<few.plan.table.peak['all kept']
    for o in (0,-1,'1'):
        with pytest.raises(ValueError, match=f'gb={o!r} must be a positive number'):
            plan_checkpoints(model, compute_loss, opt, 64, o)

def test_changed_later():
    "An input that is changed after the forward pass is an error, in place of other gradients"
    model = Does(lambda m, x: (m.f(x),x.mul_(2))[0], f=mlp())
    x = torch.randn(4,8)
    with Checkpoints(model, [Segment('f')]): loss = model(x+1).sum()
    with pytest.raises(ChangedInput, match='An input of f was changed in place'): loss.backward()

def test_measured_before(monkeypatch):
    "The plan is made for modules that compute as the first batch has shown"
    def _plan(model, compute_loss, opt, n, gb, half, others):
        asked.append((half.to_measure,half.measured))
        return plan_checkpoints(model, compute_loss, opt, n, gb, half, others)
    asked = []
    monkeypatch.setattr('mp_callbacks.learner.memory.plan_checkpoints', _plan)
    learn = fitted(limited())
    assert asked==[(False,learn.mixed_precision.half.measured)] and asked[0][1].passes>0

def test_no_global_hooks():
    "A plan leaves none, of which PyTorch warns whoever compiles a model later"
    assert segments(fitted(limited()))
    assert not torch.nn.modules.module._has_any_global_hook()

def test_warning_as_error():
    "What the plan says ends the fit then; the next one plans anew"
    learn = limited()
    with warnings.catch_warnings(), pytest.raises(UserWarning, match=r'Checkpoints \d'):
        warnings.simplefilter('error', UserWarning)
        learn.fit(1)
    learn.precision_report()
    assert segments(fitted(learn))

@has_notes
def test_no_memory_to_plan(monkeypatch):
    "The error says so, and nothing is left"
    no_memory = raises(torch.OutOfMemoryError('no memory'))
    monkeypatch.setattr('mp_callbacks.learner.memory.plan_checkpoints', no_memory)
    learn = limited()
    assert 'plan of memory=' in note_of(learn.fit, 1, raises=torch.OutOfMemoryError)
    assert_same(learn, limited())
