"""A step that is saved twice as a file: at every instant its file is there, whole, old or new."""

import errno
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keepstep.errors import SaveFailed
from keepstep.store import Store, list_checkpoints, load_checkpoint, verify
from keepstep.store.disk import Disk
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import DyingDisk, FailingDisk, RecordingDisk


def refuse(path: Path) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))


class LinklessDyingDisk(DyingDisk):
    def link(self, old: Path, new: Path) -> None:
        refuse(new)


class LinklessFailingDisk(FailingDisk):
    def link(self, old: Path, new: Path) -> None:
        refuse(new)


KINDS = pytest.mark.parametrize(
    ("dying", "failing"),
    [(DyingDisk, FailingDisk), (LinklessDyingDisk, LinklessFailingDisk)],
    ids=["links", "no links"],
)


def state_of(number: int) -> dict[str, object]:
    return {"weight": torch.full((64,), float(number)), "number": number, "pair": (number, None)}


def save_twice(folder: Path, disk: Disk, acknowledged: Callable[[int], object]) -> None:
    """Save step 1 in one state, and then again in another one, as after a rewind by hand."""
    with Store(folder, layout="files", disk=disk, save_retries=0) as store:
        store.restore()
        for number in (10, 20):
            store.save(state_of(number), step=1)
            acknowledged(number)


def number_in(path: Path) -> int:
    number: int = load_checkpoint(path)["number"]
    return number


def assert_both_or_the_first(folder: Path, acknowledged: int) -> None:
    """Before any session looks: whichever has the name is whole; what was acknowledged is there."""
    for entry in list_checkpoints(folder, aside=True):
        assert verify(entry) == [], entry
    if acknowledged:
        visible = number_in(folder / "steps_1.pth")
        aside = [number_in(path) for path in (folder / "aside").glob("steps_1.pth*")]
        assert visible in (10, 20)
        assert visible == 10 or 10 in aside, "the first one is gone"
        assert acknowledged == 10 or visible == 20
    with Store(folder, layout="files") as store:
        store.restore()
    assert not [p.name for p in folder.rglob(".*")]


@KINDS
def test_a_file_saved_twice_keeps_its_name_whenever_the_process_dies(tmp_path, dying, failing):
    number, alive = 0, False
    while not alive:
        number += 1
        folder, told = tmp_path / str(number), tmp_path / f"{number}.ack"
        folder.mkdir()
        told.write_text("0")

        def work(folder=folder, number=number, told=told) -> None:
            save_twice(folder, dying(number), lambda state: told.write_text(str(state)))

        status = in_a_child(work)
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        assert_both_or_the_first(folder, int(told.read_text()))
        shutil.rmtree(folder)
    assert number > 25


@KINDS
def test_a_file_saved_twice_keeps_its_name_whatever_fails(tmp_path, dying, failing):
    number, met = 0, True
    while met:
        number += 1
        folder, told, disk = tmp_path / str(number), [0], failing(number, errno.EIO)
        folder.mkdir()
        try:
            save_twice(folder, disk, told.append)
        except (OSError, SaveFailed):
            assert told[-1] < 20
            if told[-1] == 10:
                assert number_in(folder / "steps_1.pth") == 10
                assert not list((folder / "aside").glob("*")), "a second name was left"
        met = disk.count >= number
        assert_both_or_the_first(folder, told[-1])
        shutil.rmtree(folder)
    assert number > 25


def test_the_old_file_is_aside_for_good_before_the_new_one_has_its_name(tmp_path):
    disk = RecordingDisk()
    save_twice(tmp_path, disk, lambda state: disk.log.clear() if state == 10 else None)
    first = disk.log.index(("rename", "steps_1.pth"))
    assert disk.log[first + 1 : first + 4] == [
        ("sync_folder", "aside"), ("rename", "steps_1.pth"), ("sync_folder", tmp_path.name)
    ]  # fmt: skip
    old, new = tmp_path / "aside" / "steps_1.pth", tmp_path / "steps_1.pth"
    assert (number_in(old), number_in(new)) == (10, 20)


def test_a_file_of_this_very_state_is_not_saved_again(tmp_path):
    with Store(tmp_path, layout="files") as store:
        state = {**state_of(10), "nan": float("nan"), "half": torch.tensor([float("nan"), -0.0])}
        kept = store.save(state, step=1, metrics={"loss": 1.0})
        facts = kept.path.stat().st_ino, kept.path.stat().st_mtime_ns
        again = store.save(dict(state), step=1, metrics={"loss": 2.0})
        assert (kept.new, again.new) == (True, False)
        assert replace(again.manifest, tensors=()) == kept.manifest
        assert facts == (kept.path.stat().st_ino, kept.path.stat().st_mtime_ns)
        assert not (tmp_path / "aside").exists()
        for change in (
            {"half": torch.tensor([float("nan"), 0.0])},
            {"number": 10.0},
            {"weight": state["weight"].to(torch.int32)},
        ):
            state.update(change)
            assert store.save(state, step=1).new
        assert len(list((tmp_path / "aside").iterdir())) == 3


@pytest.mark.parametrize("what", ["another run's", "another config's", "torn"])
def test_the_same_state_is_saved_again_over_what_is_no_checkpoint_of_this(tmp_path, what):
    seed = {"seed": 2 if what == "another config's" else 1}
    if what == "another run's":
        with Store(tmp_path / "other", layout="files") as store:
            other = store.save(state_of(1), step=1, must_match={"seed": 1}).path
    with Store(tmp_path, layout="files") as store:
        path = store.save(state_of(1), step=1, must_match=seed).path
        if what == "another run's":
            os.replace(other, path)
        if what == "torn":
            data = path.read_bytes()
            # In a record that no reader looks at: the state is all there, and the CRC is not right.
            with zipfile.ZipFile(path) as archive:
                (name,) = [n for n in archive.namelist() if n.endswith("serialization_id")]
                at = data.index(archive.read(name))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert store.save(state_of(1), step=1, must_match={"seed": 1}).new
        assert store.newest.must_match == {"seed": 1}
    assert (tmp_path / "aside" / "steps_1.pth").exists()
    assert number_in(tmp_path / "steps_1.pth") == 1
