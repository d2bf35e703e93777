"""A file system without renames of folders and without links: a death or an error everywhere."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keepstep.errors import CheckpointDamaged, KeepstepError, SaveFailed, Unhealthy
from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.catalog import pointed_at
from keepstep.store.disk import Disk
from keepstep.store.ranks import OneRank
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import (
    PoorDisk,
    PoorDyingDisk,
    PoorFailingDisk,
    PoorRecordingDisk,
)

LAST = 4


def state_of(step: int) -> dict[str, object]:
    return {"weight": torch.full((8,), float(step)), "step": step}


def live(folder: Path, disk: Disk, acknowledged: Callable[[int], None]) -> None:
    """Save on to the last step; the second one is the best, so that a middle one is deleted."""
    with Store(folder, disk=disk, keep_last_n=1, best_metric="loss", save_retries=0) as store:
        found = store.restore()
        for step in range(found.manifest.step + 1 if found else 1, LAST + 1):
            store.save(state_of(step), step=step, metrics={"loss": abs(step - 2.0)})
            acknowledged(step)


def go_back(folder: Path, disk: Disk) -> None:
    """Go back to step 2: what is later is set aside."""
    with Store(folder, disk=disk, best_metric="loss") as store:
        store.restore(2)


def assert_sound(folder: Path, acknowledged: int) -> None:
    """All that is listed is whole, nothing acknowledged is lost, nothing else is left."""
    entries = list_checkpoints(folder)
    for entry in entries:
        assert verify(entry) == [], entry
        assert load_state(entry.path)["step"] == entry.step
    newest = max((entry.step for entry in entries), default=0)
    assert newest >= acknowledged, f"step {acknowledged} was acknowledged, {newest} is there"
    with Store(folder, disk=PoorDisk(), best_metric="loss") as store:
        found = store.restore()
        assert (found.manifest.step if found else 0) == newest
        if found:
            assert store.best.step == min(newest, 2)
            assert pointed_at(folder / "latest") == f"step_{newest}"
            assert pointed_at(folder / "best") == f"step_{min(newest, 2)}"
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_a_death_at_every_operation_loses_nothing_that_was_acknowledged(tmp_path):
    number, alive = 0, False
    while not alive:
        number += 1
        folder, told = tmp_path / str(number), tmp_path / f"{number}.ack"
        folder.mkdir()
        told.write_text("0")

        def work(folder=folder, number=number, told=told) -> None:
            live(folder, PoorDyingDisk(number), lambda step: told.write_text(str(step)))

        status = in_a_child(work)
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        assert_sound(folder, int(told.read_text()))
        live(folder, PoorDisk(), lambda _: None)
        assert_sound(folder, LAST)
        shutil.rmtree(folder)
    assert number > 80


def test_an_error_at_every_operation_is_told_or_survived_and_loses_nothing(tmp_path):
    number, met = 0, True
    while met:
        number += 1
        folder, told = tmp_path / str(number), [0]
        folder.mkdir()
        disk = PoorFailingDisk(number, errno.EIO)
        try:
            live(folder, disk, told.append)
        except (OSError, SaveFailed) as failure:
            assert "Input/output error" in str(failure)
        met = disk.count >= number
        assert_sound(folder, told[-1])
        live(folder, PoorDisk(), told.append)
        assert_sound(folder, LAST)
        shutil.rmtree(folder)
    assert number > 80


@pytest.fixture
def lived(tmp_path) -> Path:
    folder = tmp_path / "lived"
    folder.mkdir()
    live(folder, PoorDisk(), lambda _: None)
    return folder


def test_a_death_at_every_operation_of_a_way_back_keeps_every_byte(tmp_path, lived):
    """The files of a checkpoint go to `aside/` one by one; the next session moves the rest."""
    before = {p.name: p.read_bytes() for p in (lived / "step_4").iterdir()}
    number, alive = 0, False
    while not alive:
        number += 1
        folder = shutil.copytree(lived, tmp_path / str(number))
        alive = in_a_child(lambda f=folder, n=number: go_back(f, PoorDyingDisk(n))) == 0
        go_back(folder, PoorDisk())
        assert [entry.name for entry in list_checkpoints(folder)] == ["step_2"]
        (aside,) = list_checkpoints(folder, aside=True)[1:]
        assert aside.path == folder / "aside" / "step_4", number
        assert {p.name: p.read_bytes() for p in aside.path.iterdir()} == before
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        shutil.rmtree(folder)
    assert number > 15


@pytest.mark.parametrize(
    "said", [b"../../out", b"step_4/../../out", b"", b"step_3", b"step_4.x", b"\xff" * 9999, None]
)
def test_a_note_that_leads_elsewhere_moves_nothing(lived, said):
    note = lived / "step_4" / ".moving-to"
    if said is None:
        os.mkfifo(note)
    else:
        note.write_bytes(said)
    before = sorted(p.name for p in (lived / "step_4").iterdir())
    with pytest.raises(CheckpointDamaged, match="does not say where the rest of step_4"):
        go_back(lived, PoorDisk())
    assert sorted(p.name for p in (lived / "step_4").iterdir()) == before
    assert not (lived.parent / "out").exists()


def test_what_a_failed_save_leaves_is_away_for_good_before_it_is_shown(tmp_path):
    class Failing(PoorRecordingDisk):
        def sync(self, descriptor: int, path: Path) -> None:
            super().sync(descriptor, path)
            if path.name.endswith(".safetensors"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk = Failing()
    with pytest.raises(SaveFailed), Store(tmp_path, disk=disk, save_retries=0) as store:
        store.save(state_of(1), step=1)
    gone = disk.log.index(("remove_folder", "step_1"))
    assert disk.log[gone + 1 : gone + 3] == [
        ("sync_folder", tmp_path.name), ("unlink", ".unfinished-step_1")
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [Disk, PoorDisk])
def test_a_file_called_latest_that_is_not_ours_stays(tmp_path, kind):
    (tmp_path / "latest").write_text("step_1 was the last good one\n")
    with Store(tmp_path, disk=kind()) as store:
        store.save(state_of(1), step=1)
    assert (tmp_path / "latest").read_text() == "step_1 was the last good one\n"


class LosesItsPeer(OneRank):
    """Two ranks, of which the second is lost when the commit is durable, before it is told."""

    size = 2

    def gather(self, value, *, what):
        if what == "save: commit":
            raise Unhealthy("rank 1 is lost")
        if what == "save: write":
            nothing = {**value["result"], "files": [], "tensors": []}
            return [value, {**value, "result": nothing}]
        return [value, value]


def test_what_is_durable_stays_where_a_peer_is_lost_before_it_is_told(tmp_path):
    store = Store(tmp_path, disk=PoorDisk(), ranks=LosesItsPeer())
    with pytest.raises(Unhealthy), store:
        store.save(state_of(1), step=1)
    (entry,) = list_checkpoints(tmp_path)
    assert verify(entry) == []


def test_a_failed_sync_of_the_parent_hides_it_again_and_begins_with_new_files(tmp_path):
    class Failing(PoorRecordingDisk):
        left = 1

        def sync_folder(self, path: Path) -> None:
            super().sync_folder(path)
            if self.left and self.log[-2] == ("unlink", ".unfinished-step_1"):
                self.left -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk = Failing()
    with Store(tmp_path, disk=disk, save_retries=2, best_metric="loss") as store:
        assert store.save(state_of(1), step=1, metrics={"loss": 1.0}).new
    assert disk.log.count(("create", "rank-00000.safetensors")) == 2
    assert_sound(tmp_path, 1)


@pytest.mark.parametrize("kind", [Disk, PoorDisk])
def test_what_an_older_delete_left_hides_no_new_checkpoint(tmp_path, kind):
    """A sweep that fails stops nothing; what it could not remove is in the way of its step only."""

    class Stuck(kind):
        def remove_folder(self, path: Path) -> None:
            if path.name == "step_1" and not self.mended:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            super().remove_folder(path)

    (tmp_path / "step_1").mkdir()
    (tmp_path / ".unfinished-step_1").touch()
    disk = Stuck()
    disk.mended = False
    with Store(tmp_path, disk=disk, save_retries=0, best_metric="loss") as store:
        assert store.restore() is None
        with pytest.raises(SaveFailed, match="Input/output error"):
            store.save(state_of(1), step=1)
        disk.mended = True
        store.save(state_of(1), step=1, metrics={"loss": 1.0})
    assert_sound(tmp_path, 1)


def test_another_state_under_a_name_that_is_taken_is_refused_and_the_same_is_nothing_new(lived):
    with Store(lived, disk=PoorDisk(), best_metric="loss") as store:
        store.restore()
        assert not store.save(state_of(4), step=4).new
        with pytest.raises(KeepstepError, match="cannot swap two folders"):
            store.save(state_of(5), step=4)
        store.save(state_of(5), step=5)
    assert_sound(lived, 5)
    assert load_state(lived / "step_4")["step"] == 4


def test_checkpoints_of_both_methods_stand_side_by_side_when_a_folder_moves(tmp_path, lived):
    with Store(lived, keep_last_n=0, best_metric="loss") as store:
        assert store.restore().manifest.step == 4
        store.save(state_of(5), step=5, metrics={"loss": 3.0})
    entries = list_checkpoints(lived)
    methods = [entry.manifest.commit_method for entry in entries]
    assert methods == ["manifest-last, pointer files"] * 2 + ["rename"]
    assert (lived / "latest").readlink().name == "step_5"
    with Store(lived, disk=PoorDisk(), keep_last_n=1, best_metric="loss") as store:
        assert store.restore().manifest.step == 5
        store.save(state_of(6), step=6, metrics={"loss": 4.0})
    assert [entry.step for entry in list_checkpoints(lived)] == [2, 6]
    assert (lived / "latest").read_text() == "step_6\n"
