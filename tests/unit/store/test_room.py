"""How much room a rehearsal asks for: what the worst of the saves to come takes, and no more."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from keepstep.errors import CannotSave
from keepstep.store import Store
from keepstep.store.disk import Disk
from tests.unit.store.test_damage import TwoRanks
from tests.unit.store.test_rehearsal import STATE, rehearse, small_disk

__all__ = ["small_disk"]


class Measuring(Disk):
    """A real disk that knows the most bytes that were ever in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def operation(self, name: str, path: Path) -> None:
        facts = [path.lstat() for path in self.folder.rglob("*") if path.is_file()]
        taken = {fact.st_ino: fact.st_size for fact in facts}
        self.most = max(self.most, sum(taken.values()))


class NoLinks(Measuring):
    """Such a disk without hard links."""

    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(new))


@pytest.mark.parametrize("kind", [Measuring, NoLinks])
@pytest.mark.parametrize("layout", ["folders", "files"])
@pytest.mark.parametrize(
    ("last", "best", "metric"), [(2, 1, "loss"), (2, 3, "loss"), (1, 0, "loss"), (2, 1, None)]
)
def test_what_is_asked_for_is_what_the_worst_save_takes(tmp_path, kind, layout, last, best, metric):
    disk = kind(tmp_path)
    policy = {"keep_last_n": last, "keep_best_n": best, "best_metric": metric}
    with Store(tmp_path, layout=layout, disk=disk, **policy) as store:
        store.restore()
        room = store.rehearse(STATE)
        disk.most = 0
        # The best are the first, so that none of them is among the last.
        for step in range(7):
            state = {**STATE, "weight": torch.full((1 << 18,), float(step))}
            store.save(state, step=step, metrics={"loss": float(step)})
    asked = (room.wanted + room.copies) * room.checkpoint_bytes
    assert asked - room.checkpoint_bytes < disk.most <= asked


def test_copies_where_there_are_no_hard_links_are_asked_for(small_disk):
    class NoLink(Disk):
        def link(self, old, new):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(new))

    with pytest.raises(CannotSave, match=r"no room for 2 more checkpoints and 2 copies \(no hard"):
        rehearse(small_disk, NoLink(), keep_last_n=1, layout="files")
    assert rehearse(small_disk, keep_last_n=1, layout="files").fits == 2


def two_ranks(work) -> list:
    """Do `work(ranks)` on two ranks that are threads."""
    barrier, told = threading.Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: work(TwoRanks(rank, barrier, told)), (0, 1)))


FROZEN = {"one": torch.arange(1 << 18), "two": torch.arange(1 << 18) + 1}


def save_frozen(folder, ranks, disk=None) -> int:
    with Store(folder, keep_last_n=1, ranks=ranks, disk=disk) as store:
        store.restore()
        for step in (1, 2, 3):
            store.save({**FROZEN, "head": torch.tensor(step)}, step=step)
        return store.rehearse({**FROZEN, "head": torch.tensor(4)}).checkpoint_bytes


def test_of_frozen_weights_what_this_number_of_ranks_will_link_needs_no_room(tmp_path):
    assert max(two_ranks(lambda ranks: save_frozen(tmp_path, ranks))) < 1 << 20
    with Store(tmp_path, keep_last_n=1) as store:
        store.restore()
        state = {**FROZEN, "head": torch.tensor(4)}
        room = store.rehearse(state)
        before = {path.stat().st_ino for path in (tmp_path / "step_3").iterdir()}
        saved = store.save(state, step=4)
    facts = [path.stat() for path in saved.path.iterdir()]
    written = sum(fact.st_size for fact in facts if fact.st_ino not in before)
    # One rank has the file of the first of the two, and not that of the other.
    assert 2 << 20 < written <= room.checkpoint_bytes < 2.1 * (1 << 20)


def test_without_hard_links_what_is_frozen_needs_room_too(tmp_path):
    with Store(tmp_path, keep_last_n=1) as store:
        for step in (1, 2, 3):
            store.save({**FROZEN, "head": torch.tensor(step)}, step=step)
    with Store(tmp_path, keep_last_n=1, disk=NoLinks(tmp_path)) as store:
        store.restore()
        assert store.rehearse({**FROZEN, "head": torch.tensor(4)}).checkpoint_bytes > 4 << 20


@pytest.mark.parametrize("layout", ["folders", "files"])
def test_each_rank_reserves_what_it_will_write(tmp_path, layout):
    class Reserving(Disk):
        def __init__(self):
            self.bytes = 0

        def allocate(self, descriptor, count, path):
            if path.name.startswith("rank-") and path.suffix == "":
                self.bytes += count
            super().allocate(descriptor, count, path)

    def work(ranks):
        disk = Reserving()
        with Store(tmp_path, layout=layout, ranks=ranks, disk=disk) as store:
            store.restore()
            return disk.bytes, store.rehearse(STATE).checkpoint_bytes, disk.bytes

    (_, size, first), (_, _, second) = two_ranks(work)
    assert (first, second) == ((size, 0) if layout == "files" else (-(-size // 2), -(-size // 2)))
