"""Saves in flight on several ranks: their threads talk to each other beside the training."""

import signal
from pathlib import Path

import pytest

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


def test_a_write_without_the_fence_on_one_rank_fails_the_save_on_all(tmp_path):
    for code, output in run_code(2, CHANGED, tmp_path):
        assert code == 0, output
        assert "changed while being saved" in output
