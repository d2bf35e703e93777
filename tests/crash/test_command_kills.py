"""SIGKILL at random instants and at every file operation of the real command.

After each kill the same command is started again. The finished run must equal one that was never
touched: every tensor, every logged loss, the best.
"""

import random
import signal
import threading
from pathlib import Path

import pytest

from tests.helpers.command import (
    Session,
    digests,
    events,
    injecting,
    keepstep,
    link,
    losses,
    steps,
)

FLAGS = ("--checkpoint.interval=2", "--evaluation.interval=3", "--train.max_steps=40")
KILLS_A_RUN = 13
RUNS = 4


def whole(run: Path) -> bool:
    return keepstep("ckpt", "verify", run).returncode in (0, 4)


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    done = keepstep("train", config, f"--checkpoint.dir={folder}", *FLAGS)
    assert done.returncode == 0, done.stdout
    return folder


def assert_same_as(run: Path, reference: Path) -> None:
    assert steps(run)[-1] == steps(reference)[-1]
    last = steps(run)[-1]
    assert digests(run, last) == digests(reference, last)
    assert losses(run) == losses(reference)
    assert link(run, "best") == link(reference, "best")
    assert link(run, "latest") == f"step_{last}"
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(reference, "evaluation")]


@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.timeout(600)
def test_kills_at_random_instants_lose_nothing(config, reference, tmp_path, seed):
    """13 kills in each of 4 runs: 52 in a test run, in start-up, steps, evaluations and saves."""
    draw = random.Random(seed)
    kills = 0
    while kills < KILLS_A_RUN:
        newest = max(steps(tmp_path), default=0)
        with Session("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS) as session:
            if draw.random() < 0.25:
                delay = draw.uniform(0.0, 2.5)
            else:
                # The interesting part is short; begin to count where the steps begin.
                session.wait_for("run ")
                delay = draw.expovariate(1 / 0.08)
            timer = threading.Timer(delay, session.signal, [signal.SIGKILL])
            timer.start()
            code = session.end()
            timer.cancel()
        if code == 0:
            print(f"seed {seed}: the run ended before kill {kills + 1}; it begins anew")
            assert_same_as(tmp_path, reference)
            tmp_path = tmp_path / "next"
            tmp_path.mkdir()
            continue
        assert code == -signal.SIGKILL, session.output
        kills += 1
        assert max(steps(tmp_path), default=0) >= newest, "a committed checkpoint is gone"
        assert whole(tmp_path), f"kill {kills} after {delay:.3f} s left a damaged checkpoint"
    done = keepstep("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS)
    assert done.returncode == 0, done.stdout
    assert_same_as(tmp_path, reference)


@pytest.fixture(scope="module")
def operations(config, tmp_path_factory) -> list[str]:
    """Every file operation of a short run, in order."""
    folder = tmp_path_factory.mktemp("operations")
    log = folder / "log"
    done = keepstep(
        "train",
        config,
        f"--checkpoint.dir={folder / 'run'}",
        *SHORT,
        extra=injecting(log=str(log), at=0),
    )
    assert done.returncode == 0, done.stdout
    return log.read_text().splitlines()


SHORT = ("--checkpoint.interval=2", "--evaluation.interval=2", "--train.max_steps=6")


@pytest.fixture(scope="module")
def short_reference(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    done = keepstep("train", config, f"--checkpoint.dir={folder}", *SHORT)
    assert done.returncode == 0, done.stdout
    return folder


def operations_of_a_save(operations: list[str], step: int) -> range:
    """The numbers of all operations from a save's first to the next step's first."""
    first = next(n for n, line in enumerate(operations) if f"/.staging-{step}-" in line)
    last = next(n for n, line in enumerate(operations[first:], first) if "remove_folder" in line)
    # One more: the journal's line that tells of the save.
    return range(first + 1, last + 4)


PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(900)
def test_a_kill_before_every_file_operation_of_a_save_loses_nothing(
    config, operations, short_reference, tmp_path, part
):
    """The save of step 6: data, manifest, commit, links, and the delete of an older one."""
    numbers = operations_of_a_save(operations, 6)
    assert len(numbers) >= 20, operations
    for number in numbers[part::PARTS]:
        run = tmp_path / str(number)
        words = ("train", config, f"--checkpoint.dir={run}", *SHORT)
        done = keepstep(*words, extra=injecting(at=number, action="kill"))
        assert done.returncode == -signal.SIGKILL, f"{number}: {done.stdout}"
        assert whole(run), operations[number - 1]
        assert max(steps(run)) >= 4, operations[number - 1]
        again = keepstep(*words)
        assert again.returncode == 0, f"{operations[number - 1]}: {again.stdout}"
        assert_same_as(run, short_reference)
        leftovers = [path.name for path in run.iterdir() if path.name.startswith(".")]
        assert not leftovers, operations[number - 1]


def test_a_kill_at_every_operation_of_a_resume_that_sets_aside_loses_nothing(
    config, short_reference, tmp_path
):
    """The newest checkpoint is damaged; the resume moves it aside, and is killed while it does."""
    import shutil

    template = tmp_path / "template"
    shutil.copytree(short_reference, template, symlinks=True)
    data = template / "step_6" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    for number in range(1, 12):
        run = tmp_path / str(number)
        shutil.copytree(template, run, symlinks=True)
        words = ("train", config, f"--checkpoint.dir={run}", *SHORT)
        keepstep(*words, extra=injecting(at=number, action="kill"))
        again = keepstep(*words)
        assert again.returncode == 0, again.stdout
        assert_same_as(run, short_reference)
        assert (run / "aside" / "step_6").is_dir()


def test_three_kills_within_one_epoch_and_kills_on_its_boundary(config, tmp_path):
    """An epoch is 61 samples, so it ends inside a step; kills fall on both sides of it."""
    from tests.helpers import hooks

    hook = f"--run.hooks=['{hooks.CONFIG}']"
    flags = (
        "--data.sequence_length=64",
        "--train.max_steps=20",
        "--checkpoint.interval=1",
        "--evaluation.interval=0",
    )
    reference = tmp_path / "reference"
    done = keepstep("train", config, f"--checkpoint.dir={reference}", *flags)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "run"
    # Just before a save, just after it, inside the step that crosses the epoch, and thrice in one.
    plan = [
        ("snapshot", 3),
        ("committed", 5),
        ("step", 8),
        ("forward", 13),
        ("committed", 14),
        ("step", 15),
        ("forward", 16),
        ("committed", 20),
    ]
    for when, step in plan:
        act = {"when": when, "step": step, "do": "SIGKILL"}
        words = ("train", config, f"--checkpoint.dir={run}", hook, *flags)
        killed = keepstep(*words, extra=hooks.acting(act))
        assert killed.returncode == -signal.SIGKILL, killed.stdout
    done = keepstep("train", config, f"--checkpoint.dir={run}", *flags)
    assert done.returncode == 0, done.stdout
    assert "nothing to do" in done.stdout
    assert losses(run) == losses(reference)
    assert {k: v for k, v in digests(run, 20).items() if k != "plain"} == {
        k: v for k, v in digests(reference, 20).items() if k != "plain"
    }


def test_the_cost_of_a_kill_is_bounded_by_the_last_save(config, tmp_path):
    """A resumed session takes up at the newest checkpoint, not before it."""
    with Session("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS) as session:
        session.wait_for("step 9/")
        session.signal(signal.SIGKILL)
        session.end()
    newest = steps(tmp_path)[-1]
    done = keepstep("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS)
    assert f"from step_{newest} (verified)" in done.stdout
