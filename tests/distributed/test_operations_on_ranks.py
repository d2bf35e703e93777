"""Each file operation of one rank fails or is its last: all ranks end alike, nothing is lost."""

import json
import signal
from pathlib import Path

import pytest

from keepstep.store import list_checkpoints, verify
from tests.helpers.world import run_code

BEGIN = """
import errno, json, sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import open_group
from keepstep.store import Store, list_checkpoints, verify
from keepstep.store.disk import Disk
from tests.helpers.recording_disk import DyingDisk, FailingDisk

folder, layout, who, numbers = *sys.argv[1:3], int(sys.argv[3]), json.loads(sys.argv[4])

def state_of(step):
    whole = torch.arange(30.0).reshape(10, 3) + step
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": [step, whole]}

def like(name, shape):
    return state_of(0)["sharded"] if name == "sharded" else None

def save_two(place, disk, told):
    settings = {"ranks": group.ranks, "layout": layout, "keep_last_n": 1, "save_retries": 0}
    with Store(place, disk=disk, **settings) as store:
        found = store.restore(like=like if layout == "folders" else None)
        step = found.manifest.step if found else 0
        if found:
            sharded = found.state["sharded"]
            sharded = sharded.full_tensor() if layout == "folders" else sharded
            assert torch.equal(sharded, found.state["plain"][1])
            assert found.state["plain"][0] == step
        for step in (step + 1, step + 2):
            store.save(state_of(step), step=step)
            told(step)

with open_group(DistributedConfig(lost_after="3s"), device="cpu") as group:
    mesh = init_device_mesh("cpu", (group.world_size,))
"""
FAIL = """
    number, met = 0, True
    while met:
        number += 1 if group.world_size == 2 else 3
        place, acknowledged, error = f"{folder}/{number}", [0], ""
        disk = FailingDisk(number, errno.EIO) if group.rank == who else Disk()
        try:
            save_two(place, disk, acknowledged.append)
        except Exception as found:
            error = str(found)
        met = group.ranks.gather(group.rank == who and disk.count >= number, what="met")[who]
        views = group.ranks.gather([acknowledged[-1], bool(error)], what="views")
        assert all(view == views[0] for view in views), (number, views, error)
        assert not error or "Input/output error" in error, (number, error)
        if met and group.rank == 0:
            entries = list_checkpoints(place)
            assert all(verify(entry) == [] for entry in entries), number
            newest = entries[-1].step if entries else 0
            # What became of a save that failed after its commit is for the next session to say.
            assert acknowledged[-1] <= newest <= acknowledged[-1] + 1, (number, entries)
        group.ranks.gather(None, what="looked")
        save_two(place, Disk(), lambda step: None)
    print("OPERATIONS", number, flush=True)
"""
DIE = """
    told = open(f"{folder}.told-{group.rank}", "a")
    def tell(step):
        told.write(f"{step}\\n")
        told.flush()
    number = numbers[0]
    save_two(folder, DyingDisk(number) if group.rank == who and number else Disk(), tell)
"""


def run(size: int, code: str, *words: object) -> list[tuple[int, str]]:
    return run_code(size, BEGIN + code, *words)


@pytest.mark.parametrize(
    ("size", "layout", "who"),
    [(2, "folders", 0), (2, "folders", 1), (2, "files", 0), (4, "folders", 0), (4, "folders", 3)],
)
def test_an_error_at_any_operation_of_one_rank_is_the_same_on_all(tmp_path, size, layout, who):
    ended = run(size, FAIL, tmp_path, layout, who, "[]")
    assert all(code == 0 for code, _ in ended), ended
    # The first rank holds the folder, commits and tidies up; the others write their parts.
    (count,) = {int(text.split("OPERATIONS ")[1].split()[0]) for _, text in ended}
    assert count > {"folders": (50, 8), "files": (30, 0)}[layout][who > 0]


@pytest.mark.parametrize(("size", "who", "number"), [(2, 0, 40), (2, 1, 8), (4, 0, 55), (4, 3, 5)])
def test_a_rank_that_dies_at_an_operation_ends_all_and_the_next_session_goes_on(
    tmp_path: Path, size, who, number
):
    folder = tmp_path / "run"
    ended = run(size, DIE, folder, "folders", who, json.dumps([number]))
    for rank, (code, text) in enumerate(ended):
        assert code == (-signal.SIGKILL if rank == who else 1), (rank, text)
        if rank != who:
            assert "keepstep.errors.Unhealthy: rank" in text
    told = max(
        int(line)
        for rank in range(size)
        for line in ["0", *(tmp_path / f"run.told-{rank}").read_text().split()]
    )
    entries = list_checkpoints(folder)
    assert [verify(entry) for entry in entries] == [[]] * len(entries)
    newest = entries[-1].step if entries else 0
    assert told <= newest <= told + 1
    for _ in range(2):
        ended = run(size, DIE, folder, "folders", who, "[0]")
        assert all(code == 0 for code, _ in ended), ended
    assert list_checkpoints(folder)[-1].step == newest + 4
