"""Models split over tensor parallel ranks: gradients, norms, updates, and what is refused."""

from tests.helpers.world import run_code

BEGIN = """
import sys
from types import SimpleNamespace
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from keepstep.config.schema import DistributedConfig, OptimizerConfig
from keepstep.distributed.group import open_group
from keepstep.distributed.mesh import lay_out
from keepstep.distributed.shard import (
    before_first_update, drop_gathered, reduce_gradients, shard_model, whole
)
from keepstep.errors import UsageError
from keepstep.optim.optimizer import build_optimizer
from keepstep.state.training_state import TrainingState
from keepstep.store import Store
from keepstep.train import share_of

PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.before": "replicate",
    "blocks.*.up": "colwise",
    "blocks.*.norm": "replicated_with_grad_allreduce",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
OTHER_PLAN = {
    "embed": "embedding_colwise",
    "blocks.*.up": "colwise_gather_output",
    "blocks.*.down": "rowwise_split_input",
    "head": "rowwise_split_input",
}

class Block(torch.nn.Module):
    # The norm works on each head alone: its weight sees this rank's heads only.
    def __init__(self):
        super().__init__()
        self.before = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(4)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        heads = self.up(self.before(x)).unflatten(-1, (-1, 4))
        return x + self.down(torch.tanh(self.norm(heads)).flatten(-2))

class Model(torch.nn.Module):
    _no_split_modules = ["Block"]
    tp_plan = PLAN

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(12, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.last = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

def layout_of(group, **sizes):
    config = DistributedConfig(**sizes)
    return lay_out(config, rank=group.rank, world_size=group.world_size, device="cpu")
"""
TRAIN = """
IDS = torch.randint(0, 12, (3, 8, 5), generator=torch.Generator().manual_seed(1))

def made(name, group=None, layout=None, plan=PLAN):
    model = Model()
    model.tp_plan = plan
    if layout:
        shard_model(model, layout, bfloat16=False)
    config = OptimizerConfig(name=name, rate=0.01)
    state = TrainingState(model=model, optimizer=build_optimizer(config, model))
    if layout:
        hook = before_first_update(model, layout, group.ranks)
        state.optimizer.register_step_pre_hook(hook)
    return state

def advance(state, first, last, index=0, count=1):
    # Two micro-batches a rank; the gradient is clipped to a third of its norm or less.
    norms = []
    for step in range(first, last):
        for n, ids in enumerate(IDS[step].chunk(count)[index].chunk(2)):
            reduce_gradients(state.model, now=n == 1)
            logits = state.model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / 2).backward()
        norms.append(whole(get_total_norm([p.grad for p in state.model.parameters()])))
        clip_grads_with_norm_(state.model.parameters(), 0.2, norms[-1])
        state.optimizer.step()
        state.optimizer.zero_grad()
    return torch.stack(norms)

def weights(state):
    return {name: whole(value).clone() for name, value in state.model.state_dict().items()}

def check(group, folder, name, plan=PLAN, **sizes):
    layout = layout_of(group, tp=2, **sizes)
    assert layout.data_ranks == 2
    place = (layout.data_index, layout.data_ranks)
    alone, split, resumed = made(name), *(made(name, group, layout, plan) for _ in range(2))
    norms = advance(alone, 0, 3)
    with torch.no_grad():
        # Without a backward pass the root's weights stay gathered from one to the next.
        once, again = (split.model(IDS[0]) for _ in range(2))
    assert torch.equal(once, again)
    drop_gathered(split.model)
    with Store(f"{folder}/{name}", ranks=group.ranks) as store:
        store.restore()
        found = advance(split, 0, 2, *place)
        store.save(split.capture(), step=2)
        found = torch.cat([found, advance(split, 2, 3, *place)])
    # Muon orthogonalises in bfloat16, and here in parts.
    about = {"rtol": 3e-2, "atol": 3e-3} if name == "muon" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, norms, **about)
    one, whole_again = weights(alone), weights(split)
    torch.testing.assert_close(whole_again, one, **about)
    with Store(f"{folder}/{name}", ranks=group.ranks) as store:
        assert resumed.load(store.restore(like=resumed.like).state) == []
    advance(resumed, 2, 3, *place)
    for key, value in weights(resumed).items():
        assert torch.equal(value, whole_again[key]), (name, key)
    # What is whole has the same bits on every rank of a group.
    held = {
        key: parameter.to_local().tolist()
        for key, parameter in split.model.named_parameters()
        if parameter.placements[-1].is_replicate()
    }
    told = group.ranks.gather([layout.data_index, held], what="whole")
    assert all(other == held for index, other in told if index == layout.data_index)
    assert share_of(SimpleNamespace(layout=layout, group=group)).sum([1.0]) == [2.0]
    for state in (split, resumed):
        state.release()

with open_group(DistributedConfig(), device="cpu") as group:
    for name in ("adamw", "sgd", "muon", "lion", "schedulefree_adamw"):
        check(group, sys.argv[1] + "/shards", name)
    check(group, sys.argv[1] + "/replicas", "adamw", OTHER_PLAN, dp_replicate=2)
print("the same", flush=True)
"""
REFUSED = """
def refusal(group, plan, *, heads=2, tied=True, other_rows_on=None):
    model = Model()
    model.tp_plan = plan
    if not tied:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    if heads == 3:
        model.blocks[1].up = torch.nn.Linear(8, 15)
    layout = layout_of(group, tp=2)
    try:
        shard_model(model, layout, bfloat16=False)
        model(torch.arange(4)[None]).square().sum().backward()
        if group.rank == other_rows_on:
            model.blocks[0].before.weight.grad.to_local().add_(1)
        before_first_update(model, layout, group.ranks)()
    except UsageError as error:
        return error.message
    return "nothing"

with open_group(DistributedConfig(), device="cpu") as group:
    found = [
        refusal(group, {}),
        refusal(group, {**PLAN, "blocks.*.up": "colwisee"}),
        refusal(group, {**PLAN, "blocks.*.before": "colwise"}),
        refusal(group, {**PLAN, "blocks.*.up.weight": "rowwise"}),
        refusal(group, PLAN, heads=3),
        refusal(group, {name: style for name, style in PLAN.items() if name != "embed"}),
        refusal(group, {name: style for name, style in PLAN.items() if "norm" not in name}),
        refusal(group, {name: s for name, s in PLAN.items() if name != "embed"}, tied=False),
        refusal(group, PLAN),
        refusal(group, PLAN, other_rows_on=3),
    ]
print("\\n".join(f"refused: {one}" for one in found), flush=True)
"""


def test_gradients_norms_and_updates_are_those_of_one_rank_to_rounding(tmp_path):
    """Over two shards of data by two of each matrix, and over two replicas by two."""
    for code, output in run_code(4, BEGIN + TRAIN, tmp_path):
        assert code == 0, output
        assert output == "the same\n"


def test_a_plan_a_style_or_a_size_that_does_not_fit_is_refused_by_name_on_every_rank():
    for code, output in run_code(4, BEGIN + REFUSED):
        assert code == 0, output
        # An error of another rank names it.
        assert [line.split(" (rank ")[0] for line in output.splitlines()] == [
            "refused: distributed.tp: Model has no tensor parallel plan",
            "refused: distributed.tp: the plan of Model splits blocks.0.up by 'colwisee', which is"
            " not there yet for Linear",
            "refused: distributed.tp: the plan of Model splits blocks.0.before by 'colwise', which"
            " is not there yet for LayerNorm",
            "refused: distributed.tp: the plan of Model splits blocks.0.up.weight by 'rowwise',"
            " which is not there yet for a parameter alone",
            "refused: distributed.tp (2) does not divide the 15 rows of blocks.1.up.weight",
            "refused: distributed.tp: embed.weight and head.weight are one weight, and the plan of"
            " Model splits them differently",
            "refused: distributed.tp: the model's plan leaves blocks.0.norm.weight whole, and its"
            " gradient is another on each rank: it would train as no single rank does",
            "refused: nothing",
            "refused: nothing",
            "refused: distributed.tp: the model's plan leaves blocks.0.before.weight whole, and its"
            " gradient is another on each rank: it would train as no single rank does",
        ]
