"""SIGKILL at random instants and at every file operation of the real command.

After each kill the same command is started again. The finished run must equal one that was never
touched: every tensor, every logged loss, the best.
"""

import random
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.command import Session, digests, injecting, keepstep, losses, steps
from tests.helpers.crash import (
    SHORT,
    assert_same_as,
    leaves_more_when_killed,
    logged_operations,
    operations_of_a_save,
    whole,
)

FLAGS = ("--checkpoint.interval=2", "--evaluation.interval=3", "--train.max_steps=40")
KILLS_A_RUN = 13
RUNS = 4


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    done = keepstep("train", config, f"--checkpoint.dir={folder}", *FLAGS)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.timeout(600)
def test_kills_at_random_instants_lose_nothing(config, reference, tmp_path, seed):
    """13 kills in each of 4 runs: 52 in a test run, in start-up, steps, evaluations and saves."""
    draw = random.Random(seed)
    kills, phases = 0, set()
    while kills < KILLS_A_RUN:
        newest = max(steps(tmp_path), default=0)
        with Session("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS) as session:
            if kills == 0 or draw.random() < 0.25:
                delay = draw.uniform(0.0, 1.0 if kills == 0 else 2.5)
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
        phases.add("training" if "\nstep " in session.output else "start-up")
        assert max(steps(tmp_path), default=0) >= newest, "a committed checkpoint is gone"
        assert whole(tmp_path), f"kill {kills} after {delay:.3f} s left a damaged checkpoint"
    assert phases == {"start-up", "training"}, "the kills do not spread; look at the delays"
    done = keepstep("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS)
    assert done.returncode == 0, done.stdout
    assert_same_as(tmp_path, reference)


PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(900)
def test_a_kill_before_every_file_operation_of_a_save_loses_nothing(
    config, killed, short_reference, tmp_path, part
):
    """The save of step 6: data, manifest, commit, links, and the delete of an older one."""
    operations = killed.operations
    save = operations_of_a_save(operations, 6)
    numbers = [number for number in save if leaves_more_when_killed(operations[number - 1])]
    assert len(numbers) >= 12, operations
    for number in numbers[part::PARTS]:
        run = tmp_path / str(number)
        words = ("train", config, f"--checkpoint.dir={run}", *SHORT)
        if number in numbers[:: len(numbers) // 3]:
            run.mkdir()
            done = keepstep(*words, extra=injecting(at=number, action="kill"))
            assert done.returncode == -signal.SIGKILL, f"{number}: {done.stdout}"
            assert shape_of(run) == shape_of(killed.copies / str(number))
        else:
            shutil.copytree(killed.copies / str(number), run, symlinks=True)
        assert whole(run), operations[number - 1]
        assert max(steps(run)) >= 4, operations[number - 1]
        again = warm.keepstep(*words)
        assert again.returncode == 0, f"{operations[number - 1]}: {again.stdout}"
        assert_same_as(run, short_reference)
        leftovers = [path.name for path in run.iterdir() if path.name.startswith(".")]
        assert not leftovers, operations[number - 1]


def shape_of(run: Path) -> list[tuple[str, int]]:
    """Return what a folder holds: names, without their random parts, and sizes of data."""
    return sorted(
        (re.sub("[0-9a-f]{16}", "", str(path.relative_to(run))), size_of(path))
        for path in run.rglob("*")
    )


def size_of(path: Path) -> int:
    return path.lstat().st_size if path.suffix == ".safetensors" else 0


def damaged_newest(run: Path) -> None:
    data = run / "step_6" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])


def nothing_more(_run: Path) -> None:
    return


RESUMES = {
    "damaged newest": (damaged_newest, ()),
    "going back": (nothing_more, ("--checkpoint.on_resume=4",)),
}


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("why", RESUMES)
@pytest.mark.timeout(900)
def test_a_kill_at_every_operation_of_a_resume_that_sets_aside_loses_nothing(
    config, short_reference, tmp_path, why, part
):
    """From the first operation to the first save that follows; the same command then continues."""
    damage, flags = RESUMES[why]
    template = tmp_path / "template"
    shutil.copytree(short_reference, template, symlinks=True)
    damage(template)

    def words(run: Path) -> tuple:
        return ("train", config, f"--checkpoint.dir={run}", *SHORT, *flags)

    logged, copies = tmp_path / "logged", tmp_path / "copies"
    shutil.copytree(template, logged, symlinks=True)
    log = tmp_path / "log"
    operations = logged_operations(log, *words(logged), copies=(logged, copies))
    assert_same_as(logged, short_reference)
    first_save = next(n for n, line in enumerate(operations) if "/.staging-6-" in line)
    assert first_save >= 10, operations
    # What the save does is killed in the test above, but for its last words.
    numbers = [
        number
        for number, line in enumerate(operations[: first_save + 1], 1)
        if leaves_more_when_killed(line)
        # Of a probe and a rehearsal, tests of the store kill each operation.
        and not re.search(r"/\.(probe|rehearsal)-", line)
    ]
    assert len(numbers) >= 8, operations
    for number in numbers[part::2]:
        run = copies / str(number)
        again = warm.keepstep(*words(run))
        assert again.returncode == 0, f"{operations[number - 1]}: {again.stdout}"
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
        killed = warm.keepstep(*words, extra=hooks.acting(act))
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
    assert newest >= 8
    done = keepstep("train", config, f"--checkpoint.dir={tmp_path}", *FLAGS)
    assert f"from step_{newest} (verified)" in done.stdout
