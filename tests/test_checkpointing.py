"""`checkpointing` and `memory=`: a batch fits into the memory that was given, as planned, and with the same bits"""
from learners import *
from mp_callbacks.learner.memory import MemoryBudget
from mp_callbacks.look.checkpointing import ChangedInput,Checkpoints,Segment,plan_checkpoints,share_left
from mp_callbacks.look.plan import LiveBytes

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

def gb_for(learn, share):
    "Memory of which tensors get `share` of what the learner takes without checkpoints"
    plan = learn.precision_plan()
    return share*plan.table.peak.iloc[-1 if 'native' in str(type(learn.mixed_precision)).lower() else 1]/1024/(1-share_left)

@pytest.mark.parametrize('mode', modes)
def test_same_bits(mode):
    "As without a limit, in a fit with dropout, batch norm, a counter and a parameter of the blocks"
    def _learner(**options): return in_mode(mode, net(), options, dls=big_dls())
    free = fitted(_learner(), 2)
    learn = _learner(memory=1e-3)
    with pytest.warns(UserWarning, match='Checkpoints'): fitted(learn, 2)
    assert learn.mixed_precision.budget.plan.checkpoints.segments
    assert same_weights(learn, free)
    for a,b in zip(learn.model.state_dict().values(), free.model.state_dict().values()): assert torch.equal(a, b)
    assert [m.calls for m in learn.model[1:-1]]==[m.calls for m in free.model[1:-1]]
    assert log_of(learn).loss.tolist()==log_of(free).loss.tolist()
    assert not any('forward' in vars(m) for m in learn.model.modules())
