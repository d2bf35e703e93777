"""Frozen weights: linked from the last checkpoint while every byte of them is the same."""

import errno
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.shards import Part, Region
from keepstep.store.tensors import Snapshot
from keepstep.store.unchanged import Unchanged
from tests.helpers.recording_disk import RecordingDisk

MIB = 1 << 20
FROZEN, MAIN = "rank-00000-frozen.safetensors", "rank-00000.safetensors"


def state_of(step: int, *, encoder: float = 1.0, mib: int = 2) -> dict[str, Any]:
    """Return a frozen encoder, tied to a second name, and a small head that moves."""
    weight = torch.arange(mib * MIB // 4, dtype=torch.float32) * encoder
    return {"encoder": weight, "tied": weight, "head": torch.full((64,), float(step)), "n": step}


class ByteCounter(RecordingDisk):
    """Counts what is written into data files."""

    count = 0

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        if path.suffix == ".safetensors":
            self.count += memoryview(data).nbytes
        super().write(descriptor, data, path)


class Events(list):
    def __call__(self, event: str, **facts: Any) -> None:
        if event == "written_anew":
            self.append(facts["why"])


def inode(folder: Path, step: int) -> int | None:
    path = folder / f"step_{step}" / FROZEN
    return path.stat().st_ino if path.exists() else None


def assert_whole(folder: Path, **state: Any) -> None:
    for entry in list_checkpoints(folder):
        assert verify(entry) == [], entry.name
        found, expected = load_state(entry.path), state_of(entry.step, **state)
        assert torch.equal(found["encoder"], expected["encoder"])
        assert torch.equal(found["head"], expected["head"])
        assert found["tied"] is found["encoder"]


def saved(folder: Path, steps: range, **options: Any) -> Events:
    events = Events()
    with Store(folder, keep_last_n=0, on_event=events, **options) as store:
        store.restore()
        for step in steps:
            store.save(state_of(step), step=step)
    return events


@pytest.mark.parametrize("wait", [True, False])
def test_what_stays_the_same_is_linked_and_only_the_rest_is_written(tmp_path, wait):
    disk, sizes = ByteCounter(), []
    with Store(tmp_path, disk=disk, keep_last_n=0) as store:
        for step in range(1, 6):
            disk.count = 0
            store.save(state_of(step), step=step, wait=wait)
            store.collect()
            sizes.append(disk.count)
    assert all(size > 2 * MIB for size in sizes[:3])
    assert sizes[3:] == [4096 + 256] * 2
    assert inode(tmp_path, 2) is None
    assert inode(tmp_path, 3) == inode(tmp_path, 4) == inode(tmp_path, 5)
    assert_whole(tmp_path)


def test_a_link_is_synced_and_named_before_the_manifest(tmp_path):
    disk = RecordingDisk()
    with Store(tmp_path, disk=disk) as store:
        for step in range(1, 4):
            store.save(state_of(step), step=step)
        disk.log.clear()
        store.save(state_of(4), step=4)
    staging = disk.log[0][1]
    assert disk.log[1:9] == [
        ("link", FROZEN),
        ("sync", FROZEN),
        ("create", MAIN),
        ("write", MAIN),
        ("sync", MAIN),
        ("close", MAIN),
        ("sync_folder", staging),
        ("create", disk.log[8][1]),
    ]


def test_a_session_that_resumes_links_from_the_first_save_on(tmp_path):
    saved(tmp_path, range(1, 4))
    assert saved(tmp_path, range(4, 6)) == []
    assert inode(tmp_path, 3) == inode(tmp_path, 4) == inode(tmp_path, 5)
    assert_whole(tmp_path)


def test_one_changed_byte_makes_a_new_file_and_leaves_the_old_one(tmp_path):
    with Store(tmp_path, keep_last_n=0) as store:
        weight = state_of(0)["encoder"]
        for step in range(1, 8):
            if step == 5:
                weight.view(torch.uint8)[-1] ^= 1
            store.save({**state_of(step), "encoder": weight, "tied": weight}, step=step)
    assert inode(tmp_path, 4) == inode(tmp_path, 3)
    assert inode(tmp_path, 5) is None, "it is not known yet to stay as it is now"
    assert inode(tmp_path, 7) not in (None, inode(tmp_path, 4))
    assert [verify(entry) for entry in list_checkpoints(tmp_path)] == [[]] * 7
    old, new = (load_state(tmp_path / f"step_{n}")["encoder"] for n in (4, 5))
    assert not torch.equal(old, new)
    assert torch.equal(new, weight)


def test_a_part_that_thaws_leaves_the_rest_frozen(tmp_path):
    with Store(tmp_path, keep_last_n=0) as store:
        for step in range(1, 8):
            moving = torch.full((MIB // 4,), float(max(step, 4)))
            store.save({**state_of(step), "layer": moving}, step=step)
    assert inode(tmp_path, 4) == inode(tmp_path, 3)
    assert inode(tmp_path, 5) not in (None, inode(tmp_path, 4))
    assert inode(tmp_path, 5) == inode(tmp_path, 6) == inode(tmp_path, 7)
    assert_whole(tmp_path)


def test_what_freezes_later_joins_once_it_is_the_larger_part(tmp_path):
    with Store(tmp_path, keep_last_n=0) as store:
        for step in range(1, 9):
            small, large = (torch.full((n * MIB,), min(step, 4), dtype=torch.uint8) for n in (1, 4))
            store.save({**state_of(step), "small": small, "large": large}, step=step)
    assert inode(tmp_path, 5) == inode(tmp_path, 3)
    assert inode(tmp_path, 6) not in (None, inode(tmp_path, 5))
    assert inode(tmp_path, 6) == inode(tmp_path, 7) == inode(tmp_path, 8)
    assert (tmp_path / "step_8" / MAIN).stat().st_size == 4096 + 256


def test_a_small_state_stays_one_file(tmp_path):
    with Store(tmp_path) as store:
        for step in range(1, 5):
            store.save({"weight": torch.ones(1000), "n": step}, step=step)
    assert inode(tmp_path, 4) is None


def test_deleting_one_never_hurts_another(tmp_path):
    with Store(tmp_path, keep_last_n=1) as store:
        for step in range(1, 8):
            store.save(state_of(step), step=step)
            assert_whole(tmp_path)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [7]
    assert (tmp_path / "step_7" / FROZEN).stat().st_nlink == 1


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def replace_by_a_damaged_copy(path: Path) -> None:
    times = path.stat()
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut_short(path: Path) -> None:
    times = path.stat()
    os.truncate(path, times.st_size - 1)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("damage", [flip, replace_by_a_damaged_copy, cut_short, Path.unlink])
def test_a_file_that_is_not_what_was_committed_is_never_linked(tmp_path, damage):
    events = Events()
    with Store(tmp_path, keep_last_n=0, on_event=events) as store:
        for step in range(1, 6):
            if step == 5:
                damage(tmp_path / "step_4" / FROZEN)
            store.save(state_of(step), step=step)
        store.save(state_of(6), step=6)
    assert len(events) == 1, "it is told, once"
    whole = [entry.step for entry in list_checkpoints(tmp_path) if not verify(entry)]
    assert whole[-2:] == [5, 6]
    assert inode(tmp_path, 5) == inode(tmp_path, 6)
    with Store(tmp_path) as store:
        assert store.restore().manifest.step == 6


def test_damage_between_sessions_is_found_by_the_resume_and_never_linked(tmp_path):
    with Store(tmp_path, keep_last_n=0) as store:
        for step in range(1, 5):
            store.save(state_of(step), step=step)
    flip(tmp_path / "step_4" / FROZEN)
    with Store(tmp_path, keep_last_n=0) as store:
        found = store.restore()
        assert found.manifest.step == 2, "3 and 4 share the one file"
        store.save(state_of(5), step=5)
    assert [verify(e) for e in list_checkpoints(tmp_path)] == [[]] * 3


class NoLinks(RecordingDisk):
    """A file system that refuses hard links, with a certain error."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def link(self, old: Path, new: Path) -> None:
        self.operation("link", new)
        raise OSError(self.number, os.strerror(self.number), str(new))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
def test_without_hard_links_all_is_written_and_that_is_told_once(tmp_path, number):
    disk = NoLinks(number)
    assert len(saved(tmp_path, range(1, 8), disk=disk)) == 1
    assert [name for name, _ in disk.log].count("link") == 1
    assert_whole(tmp_path)


def test_an_error_of_the_disk_at_the_link_is_an_attempt_that_failed(tmp_path):
    class Once(RecordingDisk):
        failed = False

        def link(self, old: Path, new: Path) -> None:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(new))
            super().link(old, new)

    assert saved(tmp_path, range(1, 6), disk=Once()) == []
    assert inode(tmp_path, 4) == inode(tmp_path, 3)
    assert_whole(tmp_path)


def test_a_copied_run_links_what_it_copied(tmp_path):
    saved(tmp_path / "one", range(1, 5))
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    shutil.rmtree(tmp_path / "one")
    assert saved(tmp_path / "two", range(5, 6)) == []
    assert inode(tmp_path / "two", 5) == inode(tmp_path / "two", 4)
    assert_whole(tmp_path / "two")


def test_saving_again_what_is_there_changes_nothing_and_links_go_on(tmp_path):
    events = Events()
    with Store(tmp_path, keep_last_n=0, on_event=events) as store:
        for step in (1, 2, 2, 3, 4, 4, 5):
            store.save(state_of(step), step=step)
    assert events == []
    assert inode(tmp_path, 5) == inode(tmp_path, 4) == inode(tmp_path, 3)
    assert_whole(tmp_path)


def test_another_state_of_the_same_step_leaves_the_first_one_whole_aside(tmp_path):
    with Store(tmp_path, keep_last_n=0) as store:
        for step in range(1, 5):
            store.save(state_of(step), step=step)
        store.save({**state_of(4), "n": 40}, step=4)
        store.save(state_of(5), step=5)
    assert inode(tmp_path, 5) == inode(tmp_path, 4) == inode(tmp_path, 3)
    assert [verify(e) for e in list_checkpoints(tmp_path, aside=True)] == [[]] * 6


def test_a_disk_with_room_for_the_moving_part_only_is_enough(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=True)
    try:
        with Store(place / "run", keep_last_n=1, save_retries=0) as store:
            for step in range(1, 8):
                store.save(state_of(step, mib=3), step=step)
                if step == 3:
                    (place / "filler").write_bytes(bytes(8 * MIB - 3 * MIB - 256 * 1024))
        assert_whole(place / "run", mib=3)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_role_names_stays_and_stays_whole_whatever_is_deleted(tmp_path, seed):
    """Last 2, best 2, every 5th; weights that thaw and freeze again at random steps."""
    rng, losses, encoder = random.Random(seed), {}, 1.0
    options = {"keep_last_n": 2, "keep_best_n": 2, "keep_every": 5, "best_metric": "loss"}
    with Store(tmp_path, **options) as store:
        for step in range(1, 17):
            encoder += rng.random() < 0.15
            losses[step] = rng.random()
            state = state_of(step, encoder=encoder)
            store.save(state, step=step, metrics={"loss": losses[step]})
            best = sorted(losses, key=losses.__getitem__)[:2]
            roles = {step, step - 1, *best, *range(5, step + 1, 5)} - {0}
            entries = list_checkpoints(tmp_path)
            assert {entry.step for entry in entries} == roles
            assert [verify(entry) for entry in entries] == [[]] * len(roles)


def reshaped(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "encoder": state["encoder"].view(2, -1)}


def as_integers(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "encoder": state["encoder"].view(torch.int32)}


def without(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in ("encoder", "tied")}


@pytest.mark.parametrize("change", [reshaped, as_integers, without])
def test_the_same_bytes_as_something_else_are_not_the_same(tmp_path, change):
    with Store(tmp_path, keep_last_n=0) as store:
        for step in range(1, 6):
            state = state_of(step)
            store.save(state if step < 5 else change(state), step=step)
    assert [verify(entry) for entry in list_checkpoints(tmp_path)] == [[]] * 5
    found, expected = load_state(tmp_path / "step_5"), change(state_of(5))
    held = {tensor.name for tensor in list_checkpoints(tmp_path)[-1].manifest.tensors}
    assert held == {"encoder", "tied", "head"} & expected.keys()
    assert sorted(found) == sorted(expected)
    if "encoder" in expected:
        assert found["encoder"].dtype == expected["encoder"].dtype
        assert torch.equal(found["encoder"], expected["encoder"])


def test_the_same_bytes_of_another_region_are_not_the_same(tmp_path):
    """As after a resume on another mesh: rows of zeros became columns of zeros."""
    unchanged, side = Unchanged(0), 1024
    shapes = [(512, side)] * 4 + [(side, 512)]
    for number, shape in enumerate(shapes):
        region = Region(offset=(0, 0), shape=shape)
        local = torch.zeros(shape)
        part = Part(local=local, whole=(side, side), region=region, copies=1, copy=0)
        snapshot = Snapshot(plain={}, parts={"w": part}, written=frozenset({"w"}))
        folder = tmp_path / str(number)
        folder.mkdir()
        go_on, tell = (lambda: None), Events()
        _, (entry,) = unchanged.write(
            snapshot, folder, disk=RecordingDisk(), go_on=go_on, tell=tell
        )
        unchanged.committed(folder)
        assert [piece.shape for piece in entry.pieces] == [shape]
    assert (tmp_path / "3" / FROZEN).stat().st_nlink == 2


def test_a_file_with_no_room_for_another_name_is_written_anew_and_linked_again(tmp_path):
    class Full(RecordingDisk):
        def link(self, old: Path, new: Path) -> None:
            if new.parent.name.startswith(".staging-5-"):
                raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), str(new))
            super().link(old, new)

    assert len(saved(tmp_path, range(1, 7), disk=Full())) == 1
    assert inode(tmp_path, 5) != inode(tmp_path, 4)
    assert inode(tmp_path, 6) == inode(tmp_path, 5)
    assert_whole(tmp_path)
