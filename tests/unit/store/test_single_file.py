"""Checkpoints of one file: what is written, chosen, refused and kept."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.errors import CheckpointDamaged, NotFound, SaveFailed, UsageError
from keepstep.store import (
    apply_best_valid_loss_floor,
    choose_resume_checkpoint,
    load_checkpoint,
    save_checkpoint_atomic,
)
from keepstep.store.disk import Disk
from tests.helpers.recording_disk import RecordingDisk
from tests.helpers.single_file import assert_is_state, content_of, same_file, state_of


class LinklessDisk(RecordingDisk):
    """A file system without hard links, as some say it."""

    def __init__(self, number: int = errno.EPERM) -> None:
        super().__init__()
        self.number = number

    def operation(self, name: str, path: Path) -> None:
        super().operation(name, path)
        if name == "link":
            raise OSError(self.number, os.strerror(self.number), str(path))


class SpoilingDisk(Disk):
    """Turns one bit of what it is given to write, without a word, in the n-th file."""

    def __init__(self, nth: int) -> None:
        self.nth, self.files = nth, 0

    def create(self, path: Path) -> int:
        self.files += 1
        return super().create(path)

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        if self.files == self.nth and len(data) > 1000:
            data = bytearray(data)
            data[len(data) // 2] ^= 4
        super().write(descriptor, data, path)


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint_atomic(folder / f"steps_{step}.pth", state_of(step))


def tear(path: Path) -> None:
    """Leave the first half of a file, in place."""
    os.truncate(path, path.stat().st_size // 2)


# The save.


def test_a_state_comes_back_and_only_its_file_is_there(tmp_path):
    save_checkpoint_atomic(tmp_path / "new" / "latest.pth", state_of(3))
    assert_is_state(load_checkpoint(tmp_path / "new" / "latest.pth"), 3)
    assert list(content_of(tmp_path / "new")) == ["latest.pth"]


def test_the_order_is_write_sync_best_rename_sync_folder(tmp_path):
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1), best=tmp_path / "best.pth")
    disk = RecordingDisk()
    save_checkpoint_atomic(
        tmp_path / "latest.pth", state_of(2), best=tmp_path / "best.pth", disk=disk
    )
    steps = [entry for n, entry in enumerate(disk.log) if entry not in disk.log[:n]]
    held = (".best-replaced.pth.tmp", ".latest-replaced.pth.tmp")
    folder = ("sync_folder", tmp_path.name)
    assert disk.log.count(folder) == 2
    assert [s for s in steps if s != folder] == [
        ("create", "latest.pth.tmp"),
        ("write", "latest.pth.tmp"),
        ("sync", "latest.pth.tmp"),
        ("close", "latest.pth.tmp"),
        ("link", "best.pth.tmp"),
        ("link", held[0]),
        ("rename", "best.pth"),
        ("link", held[1]),
        ("rename", "latest.pth"),
        ("unlink", held[0]),
        ("unlink", held[1]),
    ]
    log = disk.log
    assert log[log.index(("rename", "best.pth")) + 1] == folder
    assert log[log.index(("rename", "latest.pth")) + 1] == folder


def test_best_costs_nothing_and_stays_what_it_was_when_latest_goes_on(tmp_path):
    latest, best = tmp_path / "latest.pth", tmp_path / "best.pth"
    save_checkpoint_atomic(latest, state_of(1), best=best)
    assert same_file(latest, best)
    save_checkpoint_atomic(latest, state_of(2))
    assert_is_state(load_checkpoint(best), 1)
    assert_is_state(load_checkpoint(latest), 2)
    save_checkpoint_atomic(latest, state_of(3), best=best)
    assert same_file(latest, best)
    assert_is_state(load_checkpoint(best), 3)
    assert list(content_of(tmp_path)) == ["best.pth", "latest.pth"]


def test_no_file_is_rewritten_in_place(tmp_path):
    latest, kept = tmp_path / "latest.pth", tmp_path / "kept.pth"
    save_checkpoint_atomic(latest, state_of(1))
    kept.hardlink_to(latest)
    with latest.open("rb") as open_before:
        save_checkpoint_atomic(latest, state_of(2))
        assert open_before.read() == kept.read_bytes()
    assert_is_state(load_checkpoint(kept), 1)


def test_a_link_of_that_name_is_replaced_and_not_followed(tmp_path):
    save_steps(tmp_path, 1)
    before = (tmp_path / "steps_1.pth").read_bytes()
    (tmp_path / "latest.pth").symlink_to("steps_1.pth")
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(2))
    assert (tmp_path / "steps_1.pth").read_bytes() == before
    assert not (tmp_path / "latest.pth").is_symlink()
    assert_is_state(load_checkpoint(tmp_path / "latest.pth"), 2)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
def test_where_links_are_refused_the_best_is_a_copy_made_as_safely(tmp_path, number):
    latest, best = tmp_path / "latest.pth", tmp_path / "best.pth"
    save_checkpoint_atomic(latest, state_of(1), best=best, disk=LinklessDisk(number))
    disk = LinklessDisk(number)
    save_checkpoint_atomic(latest, state_of(2), best=best, disk=disk)
    assert not same_file(latest, best)
    for path in (latest, best):
        assert_is_state(load_checkpoint(path), 2)
    log = disk.log
    assert log.index(("sync", "best.pth.tmp")) < log.index(("rename", "best.pth"))
    assert log.index(("rename", "best.pth")) < log.index(("rename", "latest.pth"))
    assert list(content_of(tmp_path)) == ["best.pth", "latest.pth"]


def test_another_error_of_a_link_is_an_error(tmp_path):
    with pytest.raises(SaveFailed, match="Input/output error"):
        save_checkpoint_atomic(
            tmp_path / "latest.pth",
            state_of(1),
            best=tmp_path / "best.pth",
            disk=LinklessDisk(errno.EIO),
        )
    assert content_of(tmp_path) == {}


def test_the_best_may_be_in_another_folder_and_both_are_swept(tmp_path):
    latest, best = tmp_path / "a" / "latest.pth", tmp_path / "b" / "best.pth"
    for folder in (latest.parent, best.parent):
        folder.mkdir()
        (folder / "old.pth.tmp").write_bytes(b"left behind")
    disk = RecordingDisk()
    save_checkpoint_atomic(latest, state_of(1), best=best, disk=disk)
    assert same_file(latest, best)
    assert list(content_of(latest.parent)) == ["latest.pth"]
    assert list(content_of(best.parent)) == ["best.pth"]
    assert [name for what, name in disk.log if what == "sync_folder"] == ["b", "a"]


def test_the_umask_decides_the_mode_of_link_and_copy(tmp_path):
    before = os.umask(0o027)
    try:
        for folder, disk in ((tmp_path / "link", Disk()), (tmp_path / "copy", LinklessDisk())):
            save_checkpoint_atomic(
                folder / "latest.pth", state_of(1), best=folder / "best.pth", disk=disk
            )
            for name in ("latest.pth", "best.pth"):
                assert (folder / name).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_byte_that_did_not_reach_the_disk_is_found_before_anything_is_replaced(tmp_path, nth):
    latest, best = tmp_path / "latest.pth", tmp_path / "best.pth"
    save_checkpoint_atomic(latest, state_of(1), best=best)
    before = content_of(tmp_path)

    class Spoiling(SpoilingDisk):
        def link(self, old: Path, new: Path) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(new))

    # The second file that is created is the copy for `best`.
    with pytest.raises(SaveFailed, match="CRC of the record"):
        save_checkpoint_atomic(latest, state_of(2), best=best, disk=Spoiling(nth))
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("name", ["latest.pt", "latest", ".pth", "latest.pth.tmp"])
def test_a_name_whose_leftovers_would_not_be_found_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"must end in \.pth"):
        save_checkpoint_atomic(tmp_path / name, state_of(1))
    assert content_of(tmp_path) == {}


def test_a_folder_of_that_name_and_a_best_that_is_the_file_itself_are_refused(tmp_path):
    (tmp_path / "latest.pth").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
    with pytest.raises(UsageError, match="cannot be the best as well"):
        save_checkpoint_atomic(
            tmp_path / "a.pth", state_of(1), best=tmp_path / "b" / ".." / "a.pth"
        )
    assert content_of(tmp_path) == {}


def test_leftovers_are_removed_before_a_save_and_nothing_else_is(tmp_path):
    names = ["latest.pth.tmp", "old.pth.tmp", ".best-replaced.pth.tmp"]
    kept = ["notes.txt", "a.tmp", "other.pth.tmp.txt"]
    for name in names + kept:
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.pth.tmp").mkdir()
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
    assert sorted(content_of(tmp_path)) == sorted([*kept, "latest.pth"])
    assert (tmp_path / "folder.pth.tmp").is_dir()


# The choice.


def test_latest_is_chosen_without_a_word_whatever_the_times_of_the_files_say(tmp_path, caplog):
    save_steps(tmp_path, 1, 2)
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(2))
    os.utime(tmp_path / "latest.pth", (0, 0))
    assert choose_resume_checkpoint(tmp_path) == tmp_path / "latest.pth"
    assert caplog.records == []


@pytest.mark.parametrize("missing", [True, False])
def test_without_a_whole_latest_the_highest_whole_number_is_chosen_loudly(
    tmp_path, caplog, missing
):
    save_steps(tmp_path, 9, 100, 20, 1000)
    for age, name in enumerate(["steps_100.pth", "steps_20.pth", "steps_9.pth"]):
        os.utime(tmp_path / name, (age * 100, age * 100))
    tear(tmp_path / "steps_1000.pth")
    if not missing:
        save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1000))
        tear(tmp_path / "latest.pth")
    # Names that are not ours are no checkpoints, however high.
    (tmp_path / "steps_9999.pth.bak").write_bytes((tmp_path / "steps_9.pth").read_bytes())
    (tmp_path / "xsteps_9999.pth").write_bytes((tmp_path / "steps_9.pth").read_bytes())
    assert choose_resume_checkpoint(tmp_path) == tmp_path / "steps_100.pth"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "continuing from steps_100.pth" in text
    assert ("latest.pth: it is missing" if missing else "latest.pth: it is no whole") in text
    assert "steps_1000.pth: it is no whole archive" in text


def test_nothing_there_and_nothing_whole_are_two_errors(tmp_path):
    with pytest.raises(NotFound, match="no folder"):
        choose_resume_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="holds no checkpoint"):
        choose_resume_checkpoint(tmp_path)
    save_steps(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        tear(path)
    before = content_of(tmp_path)
    with pytest.raises(CheckpointDamaged, match=r"(?s)latest.*steps_2.*steps_1") as caught:
        choose_resume_checkpoint(tmp_path)
    assert "Nothing was changed" in caught.value.hint
    assert content_of(tmp_path) == before


def test_a_best_alone_is_no_fresh_start_and_is_pointed_at(tmp_path):
    save_checkpoint_atomic(tmp_path / "best.pth", state_of(1))
    with pytest.raises(CheckpointDamaged) as caught:
        choose_resume_checkpoint(tmp_path)
    assert "best.pth is whole: copy it to latest.pth" in caught.value.hint


def test_a_leftover_is_removed_when_a_run_starts_and_never_chosen(tmp_path):
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
    (tmp_path / "latest.pth").rename(tmp_path / "latest.pth.tmp")
    with pytest.raises(NotFound):
        choose_resume_checkpoint(tmp_path)
    assert content_of(tmp_path) == {}


def test_a_leftover_that_cannot_be_removed_stops_no_choice(tmp_path, caplog):
    class Stuck(Disk):
        def unlink(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
    (tmp_path / "latest.pth.tmp").write_text("x")
    assert choose_resume_checkpoint(tmp_path, disk=Stuck()).name == "latest.pth"
    assert "Read-only file system" in caplog.text


# The floor.


@pytest.mark.parametrize(
    ("own", "recorded", "kept"),
    [(0.5, 0.3, 0.3), (0.3, 0.5, 0.3), (float("nan"), 0.5, 0.5), (0.5, float("nan"), 0.5),
     (None, 0.5, 0.5), (float("inf"), 0.5, 0.5), (0.5, None, 0.5), (float("nan"), None, None)],
)  # fmt: skip
def test_the_lower_of_the_two_bests_is_kept(tmp_path, own, recorded, kept):
    best = {} if recorded is None else {"best_valid_loss": recorded}
    save_checkpoint_atomic(tmp_path / "best.pth", best)
    state = {} if own is None else {"best_valid_loss": own}
    assert apply_best_valid_loss_floor(state, tmp_path) == kept
    if kept is not None:
        assert state["best_valid_loss"] == kept


def test_without_a_best_the_state_keeps_its_own(tmp_path):
    state = {"best_valid_loss": torch.tensor(0.5)}
    assert apply_best_valid_loss_floor(state, tmp_path) == 0.5


def test_a_best_that_is_damaged_is_told_and_the_state_keeps_its_own(tmp_path, caplog):
    save_checkpoint_atomic(tmp_path / "best.pth", {"best_valid_loss": 0.1})
    tear(tmp_path / "best.pth")
    state = {"best_valid_loss": 0.5}
    assert apply_best_valid_loss_floor(state, tmp_path) == 0.5
    assert "best.pth is not whole" in caplog.text


def test_a_best_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(UsageError, match="'low', not a number"):
        apply_best_valid_loss_floor({"best_valid_loss": "low"}, tmp_path)


def test_the_names_are_exported_and_import_no_torch():
    code = (
        "import sys\n"
        "from keepstep.store import (save_checkpoint_atomic, choose_resume_checkpoint,\n"
        "    load_checkpoint, apply_best_valid_loss_floor)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
