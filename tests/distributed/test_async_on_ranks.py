"""Saves in flight on several ranks: their threads talk to each other beside the training."""

import re
import signal
from pathlib import Path

import pytest

from keepstep.store import list_checkpoints, verify
from tests.helpers.command import digests, injecting, keepstep, losses, outcome, steps
from tests.helpers.world import World, run_code, train_on

# Shards so large that they are copied after the cut.
FLAGS = ("--checkpoint.interval=2", "--evaluation.interval=4", "--model.hidden_size=256")
ASYNC = "--checkpoint.async_mode=async"


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory) -> Path:
    """Two ranks that save synchronously, untouched."""
    folder = tmp_path_factory.mktemp("two-ranks")
    assert train_on(2, config, folder, *FLAGS) == [0, 0]
    return folder


def assert_same_as(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    assert digests(run, 10) == digests(reference, 10)


def test_the_run_is_the_same_bit_for_bit(config, reference, tmp_path):
    assert train_on(2, config, tmp_path, *FLAGS, ASYNC) == [0, 0]
    assert_same_as(tmp_path, reference)
    assert steps(tmp_path) == steps(reference)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_a_save_is_in_flight_loses_nothing(
    config, reference, tmp_path, rank
):
    words = (config, f"--checkpoint.dir={tmp_path}", *FLAGS, ASYNC)
    only = f"write {tmp_path}/.staging-6"
    with World(2, *words, extra=injecting(at=1, action="kill", only=only, rank=str(rank))) as world:
        assert world.ranks[rank].end() == -signal.SIGKILL, world.output
        assert world.ranks[1 - rank].end() == 7, world.output
    assert steps(tmp_path)[-1] == 4
    assert keepstep("ckpt", "verify", tmp_path).returncode == 0
    assert train_on(2, config, tmp_path, *FLAGS, ASYNC) == [0, 0]
    assert_same_as(tmp_path, reference)


def test_a_disk_that_is_full_on_one_rank_ends_all_with_that_cause(config, reference, tmp_path):
    extra = injecting(at=1, every=True, action="ENOSPC", only=".staging-6", rank="1")
    words = (config, f"--checkpoint.dir={tmp_path}", *FLAGS, ASYNC, "--checkpoint.save_retries=0")
    with World(2, *words, extra=extra) as world:
        assert world.end() == [1, 1], world.output
        for session in world.ranks:
            assert "step 6 could not be saved" in session.output
            assert "No space left on device" in session.output
    assert steps(tmp_path)[-1] == 4
    assert outcome(tmp_path)["checkpoint"] == "step_4"
    assert train_on(2, config, tmp_path, *FLAGS, ASYNC) == [0, 0]
    assert_same_as(tmp_path, reference)


CHANGED = """
import sys, threading
import torch
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import open_group
from keepstep.errors import SaveFailed
from keepstep.store import Store, list_checkpoints, staging

copy, go_on = staging.Cut.copy, threading.Event()
staging.Cut.copy = lambda cut: (go_on.wait(30), copy(cut))[1]
with open_group(DistributedConfig(), device="cpu") as group:
    # Replicas: of two tensors each rank writes one, and rank 1 changes its own too early.
    state = {name: torch.zeros(100, 100) for name in ("a", "b")}
    with Store(sys.argv[1], ranks=group.ranks) as store:
        store.restore()
        store.save(state, step=1)
        store.save(state, step=2, wait=False)
        if group.rank == 1:
            for tensor in state.values():
                tensor.add_(1)
        go_on.set()
        try:
            store.collect()
        except SaveFailed as error:
            print("RAISED", error, flush=True)
        for tensor in state.values():
            tensor.fill_(2)
        store.save(state, step=3, wait=False)
        assert store.drain(60)
    assert [entry.step for entry in list_checkpoints(sys.argv[1])] == [1, 3]
"""


FOUR = """
import errno, os, signal, sys, time
import torch
import torch.distributed as dist
from keepstep.errors import KeepstepError
from keepstep.store import Store
from keepstep.store.disk import Disk
from keepstep.store.process_group import ranks_of_this_process

dist.init_process_group("gloo")
rank = dist.get_rank()

def fails():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

class Broken(Disk):
    happens = None
    def operation(self, name, path):
        if self.happens and rank == 2 and name == "write" and ".staging" in str(path):
            self.happens()

def collect(store):
    started = time.monotonic()
    try:
        print("TOLD saved", store.collect().manifest.step)
    except KeepstepError as error:
        print("TOLD", type(error).__name__, error.message)
    assert time.monotonic() - started < 10

disk, ranks = Broken(), ranks_of_this_process(deadline_seconds=30)
store = Store(sys.argv[1], ranks=ranks, disk=disk, keep_last_n=0, save_retries=0)
restored = store.restore()
print("TOLD from", restored and int(restored.state["w0"][0]))
for step, happens in eval(sys.argv[2], {"fails": fails, "dies": dies}):
    # Each rank writes two of them.
    state = {f"w{n}": torch.full((5000,), float(step)) for n in range(8)}
    disk.happens = happens
    store.save(state, step=step, wait=False)
    collect(store)
sys.stdout.flush()
os._exit(0)
"""


def test_one_of_four_ranks_that_fails_or_dies_in_a_save_in_flight_is_named_by_all(tmp_path):
    def run(saves: str) -> list[tuple[int, list[str]]]:
        ended = run_code(4, FOUR, tmp_path, saves)
        print(ended)
        return [(code, re.findall("TOLD (.*)", text)) for code, text in ended]

    told = run("[(1, None), (2, fails), (3, None), (4, dies)]")
    assert [code for code, _ in told] == [0, 0, -signal.SIGKILL, 0]
    for rank in (0, 1, 3):
        start, one, two, three, four = told[rank][1]
        assert (start, one, three) == ("from None", "saved 1", "saved 3")
        assert two.startswith("SaveFailed step 2 could not be saved")
        assert "No space left on device (rank 2 on " in two
        assert "the newest checkpoint is step_1, and every older one is as it was" in two
        assert four.startswith(f"Unhealthy rank {rank} lost the others in save: ")
    assert run("[(5, None)]") == [(0, ["from 3", "saved 5"])] * 4
    entries = list_checkpoints(tmp_path)
    assert [(entry.step, verify(entry)) for entry in entries] == [(1, []), (3, []), (5, [])]


def test_a_write_without_the_fence_on_one_rank_fails_the_save_on_all(tmp_path):
    for code, output in run_code(2, CHANGED, tmp_path):
        assert code == 0, output
        assert "changed while being saved" in output
