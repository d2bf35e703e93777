"""Optimizers of the extra `optim` on shards of FSDP2: state, and what an evaluation leaves."""

from tests.helpers.world import run_code

CODE = """
import sys
import torch
from keepstep.config.schema import DistributedConfig, OptimizerConfig
from keepstep.distributed.group import open_group
from keepstep.distributed.mesh import lay_out
from keepstep.distributed.shard import shard_model, whole
from keepstep.optim.optimizer import build_optimizer
from keepstep.state.training_state import TrainingState
from keepstep.store import Store

class Block(torch.nn.Linear):
    pass

class Model(torch.nn.Module):
    # The embedding is the root's own: FSDP2 leaves it gathered after a forward pass alone.
    _no_split_modules = ["Block"]

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 8)
        self.block = Block(8, 8)

    def forward(self, ids):
        return self.block(self.embed(ids)).square().mean()

def made(name, layout):
    model = Model()
    shard_model(model, layout, bfloat16=False)
    config = OptimizerConfig(name=name, rate=0.05)
    return TrainingState(model=model, optimizer=build_optimizer(config, model))

def weights(state):
    return {name: whole(value).clone() for name, value in state.model.state_dict().items()}

def advance(state, first, last, *, evaluate):
    ids = torch.arange(6)
    for step in range(first, last):
        torch.manual_seed(step)
        state.model(torch.randint(0, 6, (5,))).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if evaluate:
            with state.averaged(before=lambda: None), torch.no_grad():
                alone = Model()
                alone.load_state_dict(weights(state))
                # Last, for the state dict above has FSDP2 let go of what is gathered.
                torch.testing.assert_close(state.model(ids), alone(ids))

def assert_same(one, other):
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name

with open_group(DistributedConfig(), device="cpu") as group:
    layout = lay_out(DistributedConfig(), rank=group.rank, world_size=2, device="cpu")
    for name in ("lion", "schedulefree_adamw"):
        evaluated, trained, resumed = (made(name, layout) for _ in range(3))
        advance(trained, 0, 6, evaluate=False)
        with Store(f"{sys.argv[1]}/{name}", ranks=group.ranks) as store:
            store.restore()
            advance(evaluated, 0, 3, evaluate=True)
            store.save(evaluated.capture(), step=3)
            advance(evaluated, 3, 6, evaluate=True)
        assert_same(evaluated, trained)
        with Store(f"{sys.argv[1]}/{name}", ranks=group.ranks) as store:
            assert resumed.load(store.restore(like=resumed.like).state) == []
        advance(resumed, 3, 6, evaluate=False)
        assert_same(resumed, trained)
    for state in (evaluated, trained, resumed):
        state.release()
print("the same", flush=True)
"""


def test_shards_resume_to_the_same_bits_and_an_evaluation_changes_none(tmp_path):
    for code, output in run_code(2, CODE, tmp_path):
        assert code == 0, output
        assert "the same" in output
