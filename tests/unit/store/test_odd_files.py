"""What is no file, or is going away, under the names of a run's files; links that are refused."""

import ctypes
import errno
import multiprocessing
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keepstep.errors import CheckpointDamaged, KeepstepError
from keepstep.run.journal import Journal, read_journal
from keepstep.store import (
    Store,
    choose_resume_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint_atomic,
    verify,
)
from keepstep.store.catalog import files_in, pointed_at
from keepstep.store.disk import Disk
from keepstep.store.lock import FolderLock
from keepstep.store.pins import read_pins
from keepstep.store.regular import opened
from keepstep.store.roles import roles_of
from tests.helpers.single_file import same_file


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = pytest.mark.parametrize("make", [pipe, listener, device], ids=lambda make: make.__name__)
# A hang is what these are about.
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def short_path(tmp_path, monkeypatch):
    """The name of a socket holds some hundred characters."""
    monkeypatch.chdir(tmp_path)
    return Path()


def save_files(folder: Path, *, until: int, disk: Disk | None = None) -> None:
    with Store(folder, layout="files", best_metric="loss", disk=disk) as store:
        store.restore()
        for step in range(1, until + 1):
            store.save({"step": step}, step=step, metrics={"loss": float(step)})


@ODD
@pytest.mark.parametrize("name", ["latest.pth", "best.pth", "steps_9.pth"])
def test_what_is_no_file_is_a_damaged_checkpoint_and_stops_no_run_of_files(short_path, make, name):
    save_files(short_path, until=2)
    (short_path / name).unlink(missing_ok=True)
    make(short_path / name)
    (fault,) = [entry.fault for entry in list_checkpoints(short_path) if entry.name == name]
    assert "no regular file" in fault or "No such device" in fault
    assert all(verify(entry) for entry in list_checkpoints(short_path) if entry.name == name)
    with Store(short_path, layout="files", best_metric="loss") as store:
        assert store.restore().state["step"] == 2
        store.save({"step": 3}, step=3, metrics={"loss": 0.5})
    assert os.path.lexists(short_path / "aside" / name), "it was not ours to delete"
    assert same_file(short_path / "latest.pth", short_path / "steps_3.pth")
    assert same_file(short_path / "best.pth", short_path / "steps_3.pth")


@ODD
def test_what_is_no_file_is_passed_over_by_a_loop_of_ones_own(short_path, make):
    save_checkpoint_atomic(short_path / "steps_1.pth", {"step": 1})
    make(short_path / "latest.pth")
    assert choose_resume_checkpoint(short_path).name == "steps_1.pth"
    with pytest.raises(KeepstepError):
        load_checkpoint(short_path / "latest.pth")


@ODD
def test_what_is_no_file_holds_up_no_run_of_folders(short_path, make):
    with Store(short_path) as store:
        for step in (1, 2, 3):
            store.save({"step": step}, step=step)
    for name in ("latest.pth", "outcome.json", "pins.json"):
        make(short_path / name)
    (short_path / "latest").unlink()
    make(short_path / "latest")
    heard = []
    with Store(short_path, on_event=lambda event, **_: heard.append(event)) as store:
        assert store.restore().state["step"] == 3
        store.save({"step": 4}, step=4)
    assert [entry.step for entry in list_checkpoints(short_path)] == [2, 3, 4]
    assert "housekeeping_failed" in heard, "where the pins cannot be read, nothing is deleted"
    with pytest.raises(OSError):
        read_pins(short_path)
    entries = list_checkpoints(short_path)
    with pytest.raises(OSError):
        roles_of(entries[-1], entries)
    if make is not device:
        journal = Journal(short_path / "outcome.json", disk=Disk())
        with pytest.raises((OSError, KeepstepError)):
            journal.write("step", step=1)
        with pytest.raises(OSError):
            list(read_journal(short_path / "outcome.json"))


def test_a_pipe_is_not_waited_for_where_a_line_is_appended(tmp_path):
    pipe(tmp_path / "journal.jsonl")
    with pytest.raises(OSError):
        Disk().open_for_append(tmp_path / "journal.jsonl")
    with pytest.raises(OSError):
        Disk().sync_file(tmp_path / "journal.jsonl")


def test_a_long_file_called_latest_is_no_pointer(tmp_path):
    (tmp_path / "latest").write_text("step_" + "9" * 99)
    assert pointed_at(tmp_path / "latest") is None


def test_a_folder_in_the_place_of_a_file_is_called_one(tmp_path):
    with pytest.raises(IsADirectoryError):
        opened(tmp_path)


def test_nesting_that_no_parser_follows_is_damage_in_every_file_of_a_run(tmp_path):
    deep = b"[" * 100_000
    with Store(tmp_path) as store:
        store.save({"step": 1}, step=1)
        for name in ("pins.json", "outcome.json", "journal.jsonl"):
            (tmp_path / name).write_bytes(deep + b"\n")
        with pytest.raises(CheckpointDamaged, match=r"pins\.json cannot be read"):
            read_pins(tmp_path)
        entries = list_checkpoints(tmp_path)
        assert roles_of(entries[0], entries) == ["latest"]
        assert list(read_journal(tmp_path / "journal.jsonl")) == []


def test_a_lock_whose_words_nest_too_deeply_is_refused_as_any_other(tmp_path):
    def hold(ready, done) -> None:
        with FolderLock(tmp_path / "lock"):
            descriptor = os.open(tmp_path / "lock", os.O_WRONLY)
            os.write(descriptor, b"[" * 60_000)
            ready.set()
            done.wait(20)
            os._exit(0)

    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(ready, done))
    other.start()
    assert ready.wait(20)
    with pytest.raises(KeepstepError, match="held by another session: process \\?"):
        FolderLock(tmp_path / "lock").acquire()
    done.set()
    other.join()


def test_the_bytes_of_what_is_being_deleted_are_not_asked_for(tmp_path):
    """As `keepstep ckpt ls` does beside a run that deletes."""
    (tmp_path / "stays").write_text("four")
    stop = multiprocessing.get_context("fork").Event()

    def churn() -> None:
        while not stop.is_set():
            os.link(tmp_path / "stays", tmp_path / "goes")
            os.unlink(tmp_path / "goes")

    other = multiprocessing.get_context("fork").Process(target=churn)
    other.start()
    try:
        for _ in range(3000):
            assert {fact.st_size for fact in files_in(tmp_path)} <= {4}
    finally:
        stop.set()
        other.join()
    assert files_in(tmp_path / "never") == []


@pytest.mark.parametrize("layout", ["folders", "files"])
def test_what_is_deleted_while_it_is_listed_is_not_called_damaged(tmp_path, layout):
    with Store(tmp_path, layout=layout, keep_last_n=0) as store:
        for step in range(60):
            store.save({"step": step}, step=step)
    list_checkpoints(tmp_path)

    def delete() -> None:
        for entry in list_checkpoints(tmp_path)[:-1]:
            os.rename(entry.path, tmp_path / f".trash-{entry.name}")
            list_checkpoints(tmp_path)

    other = multiprocessing.get_context("fork").Process(target=delete)
    other.start()
    seen = 60
    while other.is_alive():
        entries = list_checkpoints(tmp_path)
        assert [entry.fault for entry in entries if entry.manifest is None] == []
        assert len(entries) <= seen
        seen = len(entries)
    other.join()
    assert other.exitcode == 0


def bytes_read() -> int:
    (line,) = [x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar")]
    return int(line.split()[1])


def test_where_there_are_no_links_a_save_reads_what_is_new_and_no_older_copy(tmp_path):
    size, counts = 4 << 20, []
    state = {"weight": torch.zeros(size // 4), "step": 0}
    with Store(
        tmp_path,
        layout="files",
        best_metric="loss",
        keep_last_n=3,
        disk=RefusingDisk(errno.EPERM),
    ) as store:
        for step in range(1, 6):
            state["step"] = step
            before = bytes_read()
            store.save(state, step=step, metrics={"loss": float(step)})
            counts.append((bytes_read() - before) / size)
    print(counts)
    # To check it, to copy it, and to know the copy again.
    assert max(counts[2:]) < 4.5, counts


REFUSALS = [errno.EPERM, errno.EACCES, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK]


class RefusingDisk(Disk):
    """Refuses a hard link in the words of some file system."""

    def __init__(self, number: int) -> None:
        self.number = number

    def link(self, old: Path, new: Path) -> None:
        raise OSError(self.number, os.strerror(self.number), str(new))


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_link_that_is_refused_is_a_copy_in_either_layout(tmp_path, number):
    save_files(tmp_path / "files", until=2, disk=RefusingDisk(number))
    assert load_checkpoint(tmp_path / "files" / "best.pth")["step"] == 1
    told = []
    weights = {"frozen": torch.ones(1 << 19), "moves": torch.zeros(4)}
    folder = tmp_path / "folders"
    with Store(
        folder, disk=RefusingDisk(number), on_event=lambda event, **_: told.append(event)
    ) as store:
        for step in range(1, 6):
            weights["moves"] += 1
            store.save(weights, step=step)
    # Where there are no links at all, it is told once and not tried again.
    assert told.count("written_anew") == (2 if number == errno.EMLINK else 1)
    assert [verify(entry) for entry in list_checkpoints(folder)] == [[], []]


def test_an_error_of_the_disk_is_no_refusal_of_a_link(tmp_path):
    disk = RefusingDisk(errno.EIO)
    heard = []
    with Store(
        tmp_path,
        layout="files",
        disk=disk,
        on_event=lambda event, **facts: heard.append((event, facts.get("error", ""))),
    ) as store:
        store.save({"step": 1}, step=1)
    assert any("Input/output" in error for _, error in heard)


def test_a_signal_does_not_end_the_reservation_of_space(tmp_path, monkeypatch):
    """Some file systems give up what they have reserved when a signal comes, on older kernels."""
    real, interrupted = ctypes.CDLL(None, use_errno=True).fallocate64, []

    def fallocate64(*arguments):
        if len(interrupted) < 2:
            interrupted.append(arguments)
            ctypes.set_errno(errno.EINTR)
            return -1
        return real(*arguments)

    library = SimpleNamespace(fallocate64=fallocate64)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    with (tmp_path / "file").open("wb") as file:
        Disk().allocate(file.fileno(), 1 << 20, tmp_path / "file")
        assert os.fstat(file.fileno()).st_size == 1 << 20
    assert len(interrupted) == 2
