"""The store alone on several ranks: any number of them reads what any other number wrote."""

import json
import math

import pytest

from keepstep.store import list_checkpoints, load_state, verify
from tests.helpers.world import run_code

BEGIN = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import join_ranks, open_group
from keepstep.optim.optimizer import build_optimizer
from keepstep.config.schema import OptimizerConfig
from keepstep.state.training_state import TrainingState
from keepstep.store import Store

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.layer = torch.nn.Linear(4, 6)
        self.narrow = torch.nn.Linear(6, 1)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3.0))
    def forward(self, x):
        h = self.embed(x)
        return self.head(h).sum() + self.narrow(self.layer(h)).square().sum()

def build(seed, size):
    torch.manual_seed(seed)
    model = Model()
    if size > 1:
        axes = tuple(int(n.strip("t")) for n in mesh_shape.split("x"))
        if "t" in mesh_shape:
            mesh = init_device_mesh("cpu", axes, mesh_dim_names=("shard", "tensor"))
            plan = {"layer": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            mesh = mesh["shard"]
        else:
            names = ("replicate", "shard")[-len(axes):]
            mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
        fully_shard(model, mesh=mesh)
    return TrainingState(model=model, optimizer=build_optimizer(OptimizerConfig(), model))

def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value

def flat(state):
    found = {}
    for name, value in state.model.state_dict().items():
        found[f"model.{name}"] = whole(value).tolist()
    for name, part in state.optimizer.state_dict().items():
        for parameter, entries in part["state"].items():
            for key, value in entries.items():
                found[f"{name}.{parameter}.{key}"] = whole(value).tolist()
    return found

folder, action, mesh_shape = sys.argv[1:4]
with open_group(DistributedConfig(), device="cpu") as group:
    store = Store(folder, ranks=group.ranks, keep_last_n=0)
"""
SAVE = """
    state = build(1, group.world_size)
    for step in (1, 2):
        state.model(torch.tensor([[1, 2, 6]])).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    saved = store.save(state.capture(), step=2, metrics={"loss": 1.0})
    found = flat(state)
"""
LOAD = """
    state = build(2, group.world_size)
    before = flat(state)
    restored = store.restore(like=state.like)
    state.load(restored.state)
    found = flat(state)
    assert found != before
    store.save(state.capture(), step=3)
"""
END = """
    store.close()
    state.release()
    print("RESULT", json.dumps(found), flush=True)
"""


def run(size: int, code: str, folder, mesh: str = "") -> list[dict]:
    ended = run_code(size, BEGIN + code + END, folder, "", mesh or str(size))
    for exit_code, output in ended:
        assert exit_code == 0, output
    return [json.loads(text.split("RESULT ")[1].splitlines()[0]) for _, text in ended]


def ranks_in(mesh: str) -> int:
    return math.prod(int(n.strip("t")) for n in mesh.split("x"))


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    found = run(ranks_in(request.param), SAVE, folder, request.param)
    assert all(one == found[0] for one in found)
    return folder, found[0]


# `t` marks tensor parallel ranks: beside FSDP's, one axis is cut twice.
FROM_AND_TO = [
    ("1", "2"), ("1", "2xt2"), ("3", "1"), ("3", "2x2"), ("2x2", "2"), ("2x2", "1xt2"),
    ("1xt2", "2"), ("2xt2", "1"), ("2xt2", "3"), ("2xt2", "2x2"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "mesh"), FROM_AND_TO, indirect=["saved"])
def test_any_number_of_ranks_reads_what_any_other_wrote_bit_for_bit(saved, tmp_path, mesh):
    import shutil

    folder, expected = saved
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    for found in run(ranks_in(mesh), LOAD, tmp_path / "copy", mesh):
        assert found == expected
    entries = list_checkpoints(tmp_path / "copy")
    assert [entry.step for entry in entries] == [2, 3]
    assert [verify(entry) for entry in entries] == [[], []]
    # Read whole, as one process reads it, the two are equal too, and tied weights are one.
    one, two = (load_state(entry.path) for entry in entries)
    assert one["model"]["embed.weight"] is one["model"]["head.weight"]
    for name, value in one["model"].items():
        assert (value == two["model"][name]).all()


def test_sharded_tensors_stand_whole_in_one_file_and_come_back_sharded(tmp_path):
    begin = BEGIN.replace("keep_last_n=0", 'keep_last_n=0, layout="files"')
    results = []
    for code in (SAVE, LOAD):
        ended = run_code(2, begin + code + END, tmp_path, "", "2")
        assert all(exit_code == 0 for exit_code, _ in ended), ended
        results += [json.loads(text.split("RESULT ")[1].splitlines()[0]) for _, text in ended]
    assert all(found == results[0] for found in results)
    entries = list_checkpoints(tmp_path)
    assert [entry.name for entry in entries] == ["steps_2.pth", "steps_3.pth"]
    for entry in entries:
        model = load_state(entry.path)["model"]
        for name, value in model.items():
            assert value.tolist() == results[0][f"model.{name}"]


def test_a_first_rank_without_room_for_the_whole_is_an_error_on_all(tmp_path):
    begin = BEGIN.replace("keep_last_n=0", 'keep_last_n=0, layout="files"')
    full = (
        "    def refuse(tensor): raise MemoryError('no room for it')\n"
        "    if group.rank == 0: torch.Tensor.cpu = refuse\n"
    )
    code = SAVE.replace("    saved = store.save", full + "    saved = store.save")
    ended = run_code(2, begin + code + END, tmp_path, "", "2")
    assert all(exit_code != 0 for exit_code, _ in ended), ended
    assert all("no room for it" in output for _, output in ended), ended
    assert list_checkpoints(tmp_path) == []


def test_of_copies_one_is_written_and_the_bytes_are_spread(tmp_path):
    run(2, SAVE, tmp_path)
    (entry,) = list_checkpoints(tmp_path)
    assert entry.manifest is not None
    stored = {t.name: sum(p.end - p.start for p in t.pieces) for t in entry.manifest.tensors}
    assert stored["model.embed.weight"] == 7 * 4 * 4
    assert stored["model.count"] == 3 * 4
    assert "model.head.weight" not in stored
    assert len(entry.manifest.files) == 2


def test_a_save_on_one_rank_only_is_named_within_seconds(tmp_path):
    code = SAVE.replace("    saved = store.save", "    if group.rank == 0: store.save")
    begin = BEGIN.replace("ranks=group.ranks", "ranks=join_ranks(meet_seconds=2)")
    # The other one is in a collective that nobody answers, and ends all the same.
    ended = run_code(2, begin + code + END, tmp_path, "", "2")
    assert all(exit_code != 0 for exit_code, _ in ended), ended
    assert "rank 0 waited 2 s for the others in the save of step 2" in ended[0][1]
    assert "Ranks 1 failed to pass monitoredBarrier" in ended[0][1]
    assert list_checkpoints(tmp_path) == []


def test_ranks_that_meet_in_different_exchanges_all_raise(tmp_path):
    code = SAVE.replace("    saved = store.save", "    if group.rank == 0: store.save")
    code += "    group.ranks.gather('the other one goes on', what='next step')\n"
    code = code.replace("    found = flat(state)\n", "    found = {}\n")
    ended = run_code(2, BEGIN + code + END, tmp_path, "", "2")
    for exit_code, output in ended:
        assert exit_code != 0, output
        assert "rank 0 is in 'open', rank 1 in 'next step'" in output
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("layout", ["folders", "files"])
def test_ranks_that_hold_another_plain_state_are_refused(tmp_path, layout):
    code = SAVE.replace("state.capture()", "{**state.capture(), 'extra': group.rank}")
    begin = BEGIN.replace("keep_last_n=0", f'keep_last_n=0, layout="{layout}"')
    ended = run_code(2, begin + code + END, tmp_path, "", "2")
    assert all(exit_code != 0 for exit_code, _ in ended), ended
    assert all("ranks [1] hold another plain state" in output for _, output in ended), ended
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_know_a_save_as_something_else_are_refused(tmp_path, size):
    """Each would have a best of its own; the next save, with means, is that of all."""
    code = SAVE.replace(
        "    saved = store.save",
        """
    last = group.rank == group.world_size - 1
    for facts in ({"metrics": {"loss": float(last)}}, {"milestone": last}, {"tokens": last}):
        for wait in (True, False):
            try:
                store.save(state.capture(), step=2, wait=wait, **facts)
            except UsageError as error:
                told = f"rank {group.world_size - 1} saves {next(iter(facts))} "
                assert error.message.startswith(told), error.message
            else:
                raise AssertionError(facts)
    saved = store.save""",
    )
    begin = BEGIN.replace("import Store", "import Store\nfrom keepstep.errors import UsageError")
    ended = run_code(size, begin + code + END, tmp_path, "", str(size))
    assert all(exit_code == 0 for exit_code, _ in ended), ended
    assert [verify(entry) for entry in list_checkpoints(tmp_path)] == [[]]


def test_a_folder_that_is_not_shared_is_found(tmp_path):
    run(2, SAVE, tmp_path / "0")
    code = LOAD.replace("store.restore", "store.restore")
    begin = BEGIN.replace("Store(folder,", "Store(f'{folder}/{group.rank}',")
    ended = run_code(2, begin + code + END, tmp_path, "", "2")
    assert all(exit_code != 0 for exit_code, _ in ended), ended
    assert all("put it on a shared file system" in output for _, output in ended), ended


def test_a_part_that_is_damaged_for_one_rank_is_passed_over_by_all(tmp_path):
    run(2, SAVE, tmp_path)
    run(2, LOAD, tmp_path)
    data = tmp_path / "step_3" / "rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    code = LOAD.replace("    store.save(state.capture(), step=3)\n", "") + (
        "    assert [item.name for item in restored.skipped] == ['step_3'], restored.skipped\n"
        "    assert 'rank-00001.safetensors: bytes' in restored.skipped[0].fault\n"
        "    assert restored.set_aside == ('step_3',)\n"
    )
    run(2, code, tmp_path)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [2]
