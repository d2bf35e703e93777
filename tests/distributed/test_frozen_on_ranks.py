"""Frozen weights on several ranks: each links its own file, and another world starts anew."""

from pathlib import Path

import torch

from keepstep.store import list_checkpoints, load_state, verify
from tests.helpers.world import run_code

CODE = """
import sys
import torch
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import open_group
from keepstep.store import Store

folder, begin, end, wait = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "wait"
with open_group(DistributedConfig(), device="cpu") as group:
    with Store(folder, ranks=group.ranks, keep_last_n=0) as store:
        restored = store.restore()
        assert (restored.manifest.step if restored else 0) == begin - 1
        for step in range(begin, end):
            encoder = {str(n): torch.full((1 << 18,), float(n)) for n in range(5)}
            head = torch.full((64,), float(step))
            store.save({"encoder": encoder, "head": head}, step=step, wait=wait)
            store.collect()
"""


def save(size: int, folder: Path, begin: int, end: int, wait: str = "wait") -> None:
    for exit_code, output in run_code(size, CODE, folder, begin, end, wait):
        assert exit_code == 0, output


def inode(folder: Path, step: int, rank: int) -> int:
    return (folder / f"step_{step}" / f"rank-{rank:05d}-frozen.safetensors").stat().st_ino


def assert_whole(folder: Path, count: int) -> None:
    entries = list_checkpoints(folder)
    assert [verify(entry) for entry in entries] == [[]] * count
    for entry in entries:
        state = load_state(entry.path)
        assert torch.equal(state["head"], torch.full((64,), float(entry.step)))
        for n in range(5):
            assert torch.equal(state["encoder"][str(n)], torch.full((1 << 18,), float(n)))


def test_each_rank_links_its_own_file_also_in_the_next_session(tmp_path):
    save(2, tmp_path, 1, 5, "later")
    save(2, tmp_path, 5, 6)
    for rank in (0, 1):
        assert len({inode(tmp_path, step, rank) for step in (3, 4, 5)}) == 1
    sizes = [path.stat().st_size for path in (tmp_path / "step_5").glob("*-frozen.*")]
    assert len(set(sizes)) == 2, "five parts on two ranks are uneven"
    assert_whole(tmp_path, 5)
    save(1, tmp_path, 6, 9)
    assert_whole(tmp_path, 8)
    assert [p.name for p in (tmp_path / "step_8").glob("*-frozen.*")] == [
        "rank-00000-frozen.safetensors"
    ]
