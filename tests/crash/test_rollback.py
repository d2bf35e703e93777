"""SIGKILL in a rollback, at each of its file operations and by each optimizer.

After each the same command is started again, and the run must end as the one that was not killed.
What was not finite then comes again, or, where the rollback was durable, does not: a fault of the
hardware would not. The decision stands either way.
"""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.store import list_checkpoints
from tests.crash.test_command_files import assert_same_state
from tests.helpers import hooks, warm
from tests.helpers.command import events, injecting, keepstep, losses
from tests.helpers.crash import SHORT, assert_same_as, leaves_more_when_killed

HOOK = f"--run.hooks=['{hooks.CONFIG}']"
ROLLBACK = ("--nonfinite.policy=rollback", "--nonfinite.rollback_rate_factor=0.5")
BAD = {"samples": 12, "do": "nan_loss"}
"""The batch of step 4, at which a save is due; the newest checkpoint is that of step 2."""


def words(config: Path, run: Path, *more: str) -> tuple:
    hook = [] if any(word.startswith("--run.hooks") for word in more) else [HOOK]
    return ("train", config, f"--checkpoint.dir={run}", *hook, *SHORT, *ROLLBACK, *more)


@dataclass(frozen=True)
class RolledBack:
    """A run that was not killed, its file operations, and what each would have found."""

    run: Path
    operations: list[str]
    copies: Path


@pytest.fixture(scope="module")
def rolled_back(config, tmp_path_factory) -> RolledBack:
    folder = tmp_path_factory.mktemp("rolled-back")
    run, copies = folder / "run", folder / "copies"
    run.mkdir()
    spec = injecting(log=str(folder / "log"), at=0, copies=[str(run), str(copies)])
    done = keepstep(*words(config, run), extra={**spec, **hooks.acting(BAD)})
    assert done.returncode == 0, done.stdout
    assert [event["samples"] for event in events(run, "rollback")] == [16]
    return RolledBack(run, (folder / "log").read_text().splitlines(), copies)


def goes_on(config: Path, run: Path, *more: str, acts: tuple[dict, ...] = ()) -> str:
    done = warm.keepstep(*words(config, run, *more), extra=hooks.acting(*acts))
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_rollback_is_durable_before_the_next_step_is_taken(rolled_back):
    """Not only in the kernel's hands: a power cut would take it from there."""
    journal = [
        (number, line.split()[1])
        for number, line in enumerate(rolled_back.operations, 1)
        if line.endswith("journal.jsonl") and "open" not in line.split()[1]
    ]
    told = [bool(events(rolled_back.copies / str(number), "rollback")) for number, _ in journal]
    durable = told.index(True)
    assert [name for _, name in journal[durable - 1 : durable + 1]] == ["write", "sync"]


def test_a_kill_before_every_operation_of_a_rollback_loses_nothing(config, rolled_back):
    """From the line of the step that is not finite to the end of the first save that follows."""
    operations = rolled_back.operations
    first = next(n for n, line in enumerate(operations) if "truncate" in line) - 2
    last = next(n for n, line in enumerate(operations) if "/.staging-6-" in line)
    numbers = [
        number
        for number, line in enumerate(operations[first:last], first + 1)
        if leaves_more_when_killed(line)
        # Of a rehearsal and a save, other tests kill each operation; here each fifth.
        and "/.rehearsal-" not in line
        and ("journal" in line or number % 5 == 0)
    ]
    decided = [bool(events(rolled_back.copies / str(number), "rollback")) for number in numbers]
    assert decided.count(False) >= 3, operations[first:last]
    assert decided.count(True) >= 8, operations[first:last]
    for number, durable in zip(numbers, decided, strict=True):
        run = rolled_back.copies / str(number)
        goes_on(config, run, acts=() if durable else (BAD,))
        assert_same_as(run, rolled_back.run)
        assert len(events(run, "rollback")) == 1, operations[number - 1]


def test_a_run_that_is_killed_again_and_again_in_a_rollback_ends_as_one_that_is_not(
    config, rolled_back, tmp_path
):
    """Before the decision, before it is durable, right after it, before and in the next save."""
    plan = [
        ({"when": "step", "step": 4, "do": "SIGKILL"}, (BAD,)),
        ({"when": "rewound", "samples": 16, "do": "SIGKILL"}, (BAD,)),
        ({"when": "forward", "step": 3, "do": "SIGKILL"}, ()),
        ({"when": "snapshot", "step": 4, "do": "SIGKILL"}, ()),
        ({"when": "committed", "step": 4, "do": "SIGKILL"}, ()),
    ]
    for act, bad in plan:
        killed = warm.keepstep(*words(config, tmp_path), extra=hooks.acting(act, *bad))
        assert killed.returncode == -signal.SIGKILL, killed.stdout
    goes_on(config, tmp_path)
    assert_same_as(tmp_path, rolled_back.run)


def test_people_are_told_of_a_rollback_when_it_is_made_and_when_it_is_taken_up(config, tmp_path):
    kill = {"when": "forward", "step": 3, "samples": 16, "do": "SIGKILL"}
    killed = warm.keepstep(*words(config, tmp_path, "--quiet"), extra=hooks.acting(BAD, kill))
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert (
        "rollback loss nan, gradient norm nan at step 4 (1 in a row not finite); back to step 2"
        " (verified), skipping samples 8..15, rate x0.5 (1 of 3)\n"
    ) in killed.stdout
    told = goes_on(config, tmp_path)
    resumed = "from step_2 (verified) · rolled back: samples 8..15 stay skipped\n"
    assert resumed in told


WAYS = {
    "sgd in files": ("--optimizer.name=sgd", "--checkpoint.layout=files"),
    "muon": ("--optimizer.name=muon", "--train.micro_batch=2"),
    "lion": ("--optimizer.name=lion", "--checkpoint.async_mode=async"),
    "schedule-free from step 0": (
        "--checkpoint.interval=100",
        "--optimizer.name=schedulefree_adamw",
        "--schedule.name=constant",
        "--evaluation.interval=0",
    ),
    "frozen": (f"--run.hooks=['{hooks.CONFIG}','tests.helpers.hooks:FreezeAllButTheHead']",),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rollback_restores_all_that_a_new_process_would(config, tmp_path, way):
    """One goes on in its process; one is killed when it has gone back, and another goes on."""
    here, anew = tmp_path / "here", tmp_path / "anew"
    goes_on(config, here, *WAYS[way], acts=(BAD,))
    kill = {"when": "rewound", "samples": 16, "do": "SIGKILL"}
    killed = warm.keepstep(*words(config, anew, *WAYS[way]), extra=hooks.acting(BAD, kill))
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    goes_on(config, anew, *WAYS[way])
    assert [e["samples"] for e in events(here, "rollback")] == [16]
    ends = [list_checkpoints(run)[-1] for run in (here, anew)]
    assert [entry.step for entry in ends] == [6, 6]
    assert_same_state(*(entry.path for entry in ends))
    assert losses(here) == losses(anew)
