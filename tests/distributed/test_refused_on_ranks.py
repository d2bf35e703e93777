"""What a session is refused for, and what changes on purpose, is the same on all ranks."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.store.lock import FolderLock
from tests.helpers import hooks, warm
from tests.helpers.command import events, losses, outcome, steps
from tests.helpers.crash import SHORT
from tests.helpers.world import free_port, place_of, train_on

ACT = f"--run.hooks=['{hooks.CONFIG}']"
SIZES = [1, 2, 4]


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory) -> Path:
    """A run on two ranks that was stopped at step 4."""
    folder = tmp_path_factory.mktemp("stopped")
    act = {"when": "forward", "step": 4, "do": "SIGTERM", "rank": 1}
    assert train_on(2, config, folder, *SHORT, ACT, extra=hooks.acting(act)) == [75, 75]
    return folder


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run", symlinks=True)


def content(run: Path) -> dict[str, bytes]:
    """Every file but the lock, the journal and outcome.json."""
    written = ("lock", "journal.jsonl", "outcome.json")
    kept = [path for path in run.rglob("*") if path.is_file() and path.name not in written]
    return {str(path): path.read_bytes() for path in kept}


@contextmanager
def damaged(run: Path) -> Iterator[None]:
    for path in run.glob("step_*/rank-00000.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    yield


@contextmanager
def gone(run: Path) -> Iterator[None]:
    for path in run.glob("step_*"):
        shutil.rmtree(path)
    yield


@contextmanager
def locked(run: Path) -> Iterator[None]:
    lock = FolderLock(run / "lock")
    lock.acquire()
    yield
    lock.release()


@contextmanager
def nothing(_run: Path) -> Iterator[None]:
    yield


REFUSED = {
    "damaged": (damaged, (), 3, "bytes, not", "failed"),
    "not found": (gone, (), 4, "tells of a checkpoint of step 4", "stopped"),
    "locked": (locked, (), 5, "process ", "stopped"),
    "another run": (nothing, ("--run.seed=4",), 2, "run.seed", "stopped"),
    "another optimizer": (nothing, ("--optimizer.name=sgd",), 2, "optimizer.name", "stopped"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("why", REFUSED)
def test_a_session_that_is_refused_is_refused_on_all_ranks_and_changes_nothing(
    config, run, why, size
):
    change, flags, code, text, told = REFUSED[why]
    with change(run):
        before = content(run)
        words = ("train", config, f"--checkpoint.dir={run}", *SHORT, *flags)
        port = free_port()
        jobs = [warm.Job(words, place_of(rank, size, port)) for rank in range(size)]
        ended = warm.run_together(jobs)
        assert [done.returncode for done in ended] == [code] * size, ended
        assert all(text in done.stdout for done in ended), ended
        assert not any("Traceback" in done.stdout for done in ended), ended
        assert content(run) == before
        assert outcome(run)["outcome"] == told
        assert outcome(run)["code"] == (code if told == "failed" else 75)


CHANGED = {
    "train.max_steps": 8,
    "optimizer.rate": 0.02,
    "optimizer.weight_decay": 0.5,
    "schedule.name": "linear",
    "schedule.warmup_steps": 4,
}


@pytest.mark.parametrize("path", CHANGED)
def test_what_is_changed_on_purpose_takes_effect_from_the_first_resumed_update_on_ranks(
    config, run, stopped, tmp_path, path
):
    """The loss of step 5 is of the weights of step 4; what differs after it is the change's."""
    plain = shutil.copytree(stopped, tmp_path / "plain", symlinks=True)
    assert train_on(2, config, plain, *SHORT) == [0, 0]
    assert train_on(2, config, run, *SHORT, f"--{path}={CHANGED[path]}") == [0, 0]
    assert losses(run)[:5] == losses(plain)[:5]
    assert losses(run)[5][1] != losses(plain)[5][1]
    found, before = ([e["rate"] for e in events(folder, "step")] for folder in (run, plain))
    assert found[:4] == before[:4]
    assert (found[4] == before[4]) == (path == "optimizer.weight_decay")
    assert steps(run)[-1] == (8 if path == "train.max_steps" else 6)
    told = [event["text"] for event in events(run, "notice") if event["word"] == "config"]
    assert [line for line in told if path in line and json.dumps(CHANGED[path])[1:-1] in line]
