"""Saves that return at the cut: what is stored is the cut, or the save fails loudly."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from keepstep.errors import SaveFailed, UnsafeState
from keepstep.store import Store, list_checkpoints, load_state, staging
from keepstep.store.disk import Disk
from tests.helpers.recording_disk import FailingDisk

ROWS = 100


class Training:
    """A model and an optimizer with state, both large enough to be copied later."""

    def __init__(self, kind="adamw", **options):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(ROWS, ROWS), torch.nn.Linear(ROWS, ROWS))
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        self.optimizer = kinds[kind](self.model.parameters(), lr=0.1, **options)
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, ROWS)).square().sum().backward()
        self.optimizer.step()

    def state(self):
        moments = {
            str(number): dict(self.optimizer.state[parameter])
            for number, parameter in enumerate(self.model.parameters())
        }
        return {"model": self.model.state_dict(), "moments": moments}


def copied(state):
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.detach().clone() if torch.is_tensor(state) else state


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[name], value)
        else:
            assert torch.equal(found[name], value), name


@pytest.fixture
def held(monkeypatch):
    """Hold the writer before it copies, until the event is set or a second has passed."""
    event, copy = threading.Event(), staging.Cut.copy

    def late(cut):
        event.wait(1.0)
        return copy(cut)

    monkeypatch.setattr(staging.Cut, "copy", late)
    return event


OPTIMIZERS = {
    "sgd": ("sgd", {"momentum": 0.9, "foreach": False}),
    "foreach": ("adamw", {"foreach": True}),
    "fused": ("adamw", {"fused": True}),
    "one by one": ("adamw", {"foreach": False}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_waits_at_the_fence_and_what_is_stored_is_the_cut(tmp_path, held, optimizer):
    kind, options = OPTIMIZERS[optimizer]
    training = Training(kind, **options)
    with Store(tmp_path, keep_last_n=0) as store:
        store.fence_before(training.optimizer)
        store.restore()
        cuts = []
        for step in (1, 2):
            cuts.append(copied(training.state()))
            assert store.save(training.state(), step=step, wait=False) is None
            training.step()
            # Had the step not waited, the writer would copy what it left.
            held.set()
        assert store.collect().manifest.step == 2
        assert store.collect() is None
    for step, cut in enumerate(cuts, 1):
        assert_equal(load_state(tmp_path / f"step_{step}"), cut)
    assert not torch.equal(cuts[0]["model"]["0.weight"], cuts[1]["model"]["0.weight"])


def in_place(training):
    with torch.no_grad():
        training.model[0].weight.add_(1.0)


def through_data(training):
    training.model[0].weight.data.add_(1.0)


def through_numpy(training):
    training.model[0].weight.detach().numpy()[:] += 1.0


WRITES = {"in place": in_place, ".data": through_data, "numpy": through_numpy}


@pytest.mark.parametrize("write", [*WRITES, *OPTIMIZERS])
def test_a_write_without_the_fence_fails_the_save_by_name(tmp_path, held, write):
    kind, options = OPTIMIZERS.get(write, ("adamw", {"fused": True}))
    training = Training(kind, **options)
    with Store(tmp_path) as store:
        store.restore()
        store.save(training.state(), step=1)
        store.save(training.state(), step=2, wait=False)
        WRITES.get(write, Training.step)(training)
        held.set()
        with pytest.raises(SaveFailed, match=r"model\.0\.weight.* changed while being saved"):
            store.collect()
        assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
        cut = copied(training.state())
        store.save(training.state(), step=3, wait=False)
    assert_equal(load_state(tmp_path / "step_3"), cut)


@pytest.mark.parametrize("row", [0, -1])
def test_a_row_at_either_end_is_watched(tmp_path, held, row):
    weight = torch.zeros(ROWS, ROWS)
    with Store(tmp_path) as store:
        store.restore()
        store.save({"weight": weight}, step=1, wait=False)
        weight.numpy()[row] += 1
        held.set()
        with pytest.raises(SaveFailed, match="weight"):
            store.collect()


def test_a_single_element_that_no_sample_holds_is_noticed_by_its_version(tmp_path, held):
    weight = torch.zeros(ROWS * ROWS)
    with Store(tmp_path) as store:
        store.restore()
        store.save({"weight": weight}, step=1, wait=False)
        weight[5] += 1
        held.set()
        with pytest.raises(SaveFailed, match="weight"):
            store.collect()


def test_small_tensors_and_plain_values_are_of_the_cut_without_a_fence(tmp_path, held):
    small, plain = torch.zeros(4), {"steps": [1]}
    with Store(tmp_path) as store:
        store.restore()
        store.save({"small": small, "plain": plain}, step=1, wait=False)
        small.add_(1)
        plain["steps"].append(2)
        held.set()
    found = load_state(tmp_path / "step_1")
    assert found["small"].tolist() == [0, 0, 0, 0]
    assert found["plain"] == {"steps": [1]}


@pytest.mark.parametrize("copy_now", [True, ("running",)])
def test_what_is_copied_now_may_change_at_once(tmp_path, held, copy_now):
    running = torch.zeros(ROWS, ROWS)
    with Store(tmp_path) as store:
        store.restore()
        store.save({"running": running}, step=1, wait=False, copy_now=copy_now)
        running.add_(1)
        held.set()
    assert not load_state(tmp_path / "step_1")["running"].any()


def odd_tensors():
    base = torch.randn(64, 96, 3)
    return {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1::3],
        "channels last": torch.randn(8, 16, 8, 8).to(memory_format=torch.channels_last),
        "bfloat16": torch.randn(200, 100).to(torch.bfloat16),
        "bool": torch.rand(200, 100) > 0.5,
        "complex": torch.randn(100, 100, dtype=torch.complex64),
        "float8": torch.randn(200, 100).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.0),
        "inference": torch.inference_mode()(lambda: torch.randn(100, 100))(),
    }


def test_tensors_of_every_kind_come_back_as_a_synchronous_save_stores_them(tmp_path):
    state = odd_tensors()
    state["tied"] = state["bfloat16"]
    with Store(tmp_path, keep_last_n=0) as store:
        store.restore()
        store.save(state, step=1)
        store.save(state, step=2, wait=False)
        now, later = store.newest, store.collect().manifest
    assert now.content_digest() == later.content_digest()
    assert [entry.pieces for entry in now.tensors] == [entry.pieces for entry in later.tensors]


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
