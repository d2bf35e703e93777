"""The thread that writes a save in flight: its errors, its events, its end, what it leaves."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from keepstep.errors import SaveFailed, UnsafeState
from keepstep.store import Store, list_checkpoints, load_state
from keepstep.store.disk import Disk
from tests.helpers.recording_disk import FailingDisk

ROWS = 100
"""A square of so many is large enough to be copied later."""


def test_the_same_state_twice_is_one_checkpoint(tmp_path):
    with Store(tmp_path) as store:
        store.restore()
        store.save({"w": torch.ones(ROWS, ROWS)}, step=1)
        store.save({"w": torch.ones(ROWS, ROWS)}, step=1, wait=False)
        assert not store.collect().new
    assert [entry.name for entry in list_checkpoints(tmp_path, aside=True)] == ["step_1"]


def memory_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_fifty_saves_grow_neither_memory_nor_descriptors_nor_threads(tmp_path):
    state = {"weight": torch.randn(1 << 22)}
    seen = []
    with Store(tmp_path, keep_last_n=2) as store:
        store.restore()
        for step in range(1, 51):
            store.save(state, step=step, wait=False)
            store.fence()
            state["weight"].add_(1)
            if step in (5, 50):
                store.collect()
                seen.append((memory_bytes(), len(os.listdir("/proc/self/fd"))))
                # Allocated anew it would be touched anew, page by page, at each save.
                arena = store._writer._arena._memory.data_ptr()
                seen[-1] += (threading.active_count(), arena)
    (memory, *things), (more_memory, *more_things) = seen
    assert more_things == things
    assert more_memory - memory < 8 << 20, "the state has 16 MiB"


MEMORY = """
import sys
from pathlib import Path

import torch

from keepstep.store import Store


def high_water_bytes():
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) << 10


state = {str(n): torch.ones(16 << 20) for n in range(4)}
with Store(sys.argv[1], bounded_memory=sys.argv[2] == "bounded") as store:
    store.restore()
    store.save({"w": torch.ones(1 << 20)}, step=1, wait=False)
    before = high_water_bytes()
    store.save(state, step=2, wait=False)
    store.collect()
    arena = store._writer._arena._memory.numel()
    print((high_water_bytes() - before) >> 20, arena >> 20)
"""


@pytest.mark.parametrize(("mode", "low", "high"), [("bounded", 0, 64), ("copied", 240, 384)])
def test_a_save_in_flight_needs_the_memory_that_is_said(tmp_path, mode, low, high):
    """The state has 256 MiB: it is held a second time, or not at all."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path, mode], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    grown, arena = map(int, done.stdout.split())
    assert low <= grown <= high
    # What is never touched is no memory yet, but on a GPU's host it would be pinned.
    assert arena == (256 if mode == "copied" else 0)


class FailingOnce(Disk):
    """Fails the first operation of a name on what is being saved."""

    def __init__(self, name):
        self.name = name

    def operation(self, name, path):
        if name == self.name and ".staging-1" in str(path):
            self.name = ""
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_what_is_not_copied_is_held_until_an_attempt_succeeds(tmp_path, failing):
    """The second attempt reads the state again: had the fence been open, it would be another."""
    weight = torch.zeros(ROWS, ROWS)
    with Store(tmp_path, disk=FailingOnce(failing), bounded_memory=True) as store:
        store.restore()
        store.save({"w": weight}, step=1, wait=False)
        store.fence()
        assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
        weight.add_(1)
        assert store.collect().new
        assert store._disk.name == "", "nothing failed"
    assert not load_state(tmp_path / "step_1")["w"].any()


class SlowToDelete(Disk):
    """Waits before a delete until it is let go."""

    def __init__(self):
        self.waiting, self.let_go = threading.Event(), threading.Event()

    def operation(self, name, path):
        if name == "unlink" and ".trash" in str(path):
            self.waiting.set()
            self.let_go.wait(10)


def test_what_is_not_copied_is_held_no_longer_than_until_it_is_durable(tmp_path):
    disk = SlowToDelete()
    with Store(tmp_path, disk=disk, keep_last_n=1, bounded_memory=True) as store:
        store.restore()
        store.save({"w": torch.zeros(ROWS, ROWS)}, step=1)
        store.save({"w": torch.ones(ROWS, ROWS)}, step=2, wait=False)
        disk.waiting.wait(10)
        store.fence()
        assert store.is_saving and not disk.let_go.is_set()
        assert store.is_busy(), "the fence opened only when the old one was deleted"
        disk.let_go.set()


class Asked:
    """The four ways in which the error of a save in flight comes to light."""

    @staticmethod
    def collect(store):
        store.collect()

    @staticmethod
    def save(store):
        store.save({"w": torch.ones(1)}, step=9)

    @staticmethod
    def restore(store):
        store.restore()

    @staticmethod
    def close(store):
        store.close()


@pytest.mark.parametrize("asked", ["collect", "save", "restore", "close"])
def test_an_error_of_the_writer_is_raised_once_by_whoever_comes_next(tmp_path, asked):
    disk = FailingDisk(at=0, number=28)
    store = Store(tmp_path, disk=disk, save_retries=0)
    store.restore()
    store.save({"w": torch.zeros(ROWS, ROWS)}, step=1)
    disk.at = disk.count + 5
    store.save({"w": torch.ones(ROWS, ROWS)}, step=2, wait=False)
    with pytest.raises(SaveFailed, match=r"step 2 could not be saved.*newest checkpoint is step_1"):
        getattr(Asked, asked)(store)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    with store:
        store.restore()
        store.save({"w": torch.ones(ROWS, ROWS)}, step=3, wait=False)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1, 3]


def test_an_error_in_the_block_is_not_replaced_by_one_of_the_writer(tmp_path):
    disk = FailingDisk(at=0, number=28)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        Store(tmp_path, disk=disk, save_retries=0) as store,
    ):
        store.restore()
        disk.at = disk.count + 5
        store.save({"w": torch.ones(ROWS, ROWS)}, step=2, wait=False)
        raise ZeroDivisionError
    assert "the last save: SaveFailed: step 2 could not be saved" in caught.value.__notes__[0]


def test_an_unsafe_state_is_refused_at_the_call(tmp_path):
    with Store(tmp_path) as store:
        store.restore()
        with pytest.raises(UnsafeState, match="bad"):
            store.save({"bad": object()}, step=1, wait=False)
        assert not store.is_saving


def test_events_are_told_in_order_by_the_thread_that_saves(tmp_path):
    told = []

    def hear(event, **_):
        told.append((event, threading.current_thread() is threading.main_thread()))

    with Store(tmp_path, on_event=hear, keep_last_n=1) as store:
        store.restore()
        for step in (1, 2):
            store.save({"w": torch.ones(ROWS, ROWS)}, step=step, wait=False)
            store.collect()
    words = ["snapshot", "written", "committed", "snapshot", "written", "committed", "deleted"]
    assert told == [(word, True) for word in words]


def test_a_retry_succeeds_with_the_bytes_of_the_cut(tmp_path):
    disk = FailingDisk(at=0, number=5)
    weight = torch.zeros(ROWS, ROWS)
    with Store(tmp_path, disk=disk) as store:
        store.restore()
        disk.at = disk.count + 4
        store.save({"w": weight}, step=1, wait=False)
        store.fence()
        weight.add_(1)
        assert store.collect().manifest.step == 1
    assert not load_state(tmp_path / "step_1")["w"].any()


class WaitingDisk(Disk):
    """Waits at the first write of a data file, until it is told to go on."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def operation(self, name, path):
        if name == "write" and path.suffix == ".safetensors" and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(60)


def test_a_save_that_is_drained_too_late_is_given_up_and_nothing_is_left_of_it(tmp_path):
    disk = WaitingDisk()
    disk.reached.set()
    with Store(tmp_path, disk=disk) as store:
        store.restore()
        store.save({"w": torch.zeros(4)}, step=1)
        assert store.drain(0)
        disk.reached.clear()
        store.save({str(n): torch.zeros(1 << 20) for n in range(4)}, step=2, wait=False)
        assert disk.reached.wait(60)
        assert store.is_busy()
        halt = store._writer._pending.halt
        release = threading.Thread(target=lambda: (halt.wait(60), disk.go_on.set()))
        release.start()
        assert not store.drain(0)
        release.join()
        assert store.collect() is None
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        store.save({"w": torch.ones(4)}, step=3, wait=False)
        assert store.drain(60)
        assert store.collect().manifest.step == 3
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1, 3]


def test_the_best_is_judged_after_the_save_in_flight(tmp_path):
    with Store(tmp_path, best_metric="loss", keep_last_n=1) as store:
        store.restore()
        store.save({"w": torch.ones(ROWS, ROWS)}, step=1, wait=False, metrics={"loss": 1.0})
        assert not store.would_be_best({"loss": 2.0})
        store.save({"w": torch.zeros(ROWS, ROWS)}, step=2, wait=False, metrics={"loss": 2.0})
        store.save({"w": torch.zeros(ROWS, ROWS)}, step=3, wait=False, metrics={"loss": 3.0})
        assert store.collect().manifest.step == 3
        assert store.best.step == 1
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1, 3]


ENDS = """
import sys, torch
from keepstep.store import Store
store = Store(sys.argv[1])
store.restore()
store.save({"w": torch.ones(1 << 22)}, step=1, wait=False)
"""


def test_a_process_that_ends_without_a_word_still_finishes_its_save(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], timeout=120)
    assert done.returncode == 0
    assert load_state(tmp_path / "step_1")["w"].sum() == 1 << 22
