"""Asynchronous saves on their worst days, through the installed command."""

import signal

import pytest

from tests.helpers import hooks, warm
from tests.helpers.command import (
    digests,
    events,
    injecting,
    keepstep,
    losses,
    outcome,
    steps,
)
from tests.helpers.crash import (
    SHORT,
    assert_same_as,
    leaves_more_when_killed,
    logged_operations,
    whole,
)

ASYNC = "--checkpoint.async_mode=async"
HOOK = f"--run.hooks=['{hooks.CONFIG}']"


def words(config, run, *more):
    return ("train", config, f"--checkpoint.dir={run}", *SHORT, ASYNC, *more)


def test_saves_that_return_at_once_change_no_bit_of_the_run(config, tmp_path):
    """Each step saved, of weights so large that they are copied later: every step has to wait."""
    large = ("--model.hidden_size=256", "--checkpoint.keep_last_n=0", "--checkpoint.interval=1")
    for folder, mode in (("sync", "disabled"), ("async", "async"), ("bounded", "bounded")):
        run = f"--checkpoint.dir={tmp_path / folder}"
        words = ("train", config, run, f"--checkpoint.async_mode={mode}", *large)
        # The writer is slower than a step: it would copy what the step left, were there no fence.
        done = warm.keepstep(*words, extra=injecting(at=0, hold_copy=0.3))
        assert done.returncode == 0, done.stdout
        assert steps(tmp_path / folder) == list(range(1, 11))
    one = tmp_path / "sync"
    for other in (tmp_path / "async", tmp_path / "bounded"):
        assert losses(one) == losses(other)
        for step in steps(one):
            assert digests(one, step) == digests(other, step)
        assert [event["step"] for event in events(other, "saved")] == list(range(1, 11))


PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(900)
def test_a_kill_before_every_operation_of_a_save_in_flight_loses_nothing(
    config, short_reference, tmp_path, part
):
    """The save of step 4, while step 5 is taken: data, manifest, commit, links."""
    log = tmp_path / "log"
    operations = logged_operations(log, *words(config, tmp_path / "logged"))
    assert_same_as(tmp_path / "logged", short_reference)
    start = next(n for n, line in enumerate(operations) if "/.staging-4-" in line)
    end = next(n for n, line in enumerate(operations) if "/.staging-6-" in line)
    told = [line.split()[1] for line in operations[start:end] if "journal" not in line]
    assert {"make_folder", "create", "write", "sync", "rename", "symlink"} <= set(told), told
    # The journal's lines come when they come: what the writer does is counted by itself.
    numbers = [
        number for number, name in enumerate(told, 1) if leaves_more_when_killed(f"{number} {name}")
    ]
    for number in numbers[part::PARTS]:
        run = tmp_path / str(number)
        armed = run / "step_2"
        spec = injecting(at=number, action="kill", armed_by=str(armed), **{"not": "journal"})
        killed = warm.keepstep(*words(config, run), extra=spec)
        assert killed.returncode == -signal.SIGKILL, f"{number}: {killed.stdout}"
        assert whole(run), told
        again = warm.keepstep(*words(config, run))
        assert again.returncode == 0, again.stdout
        assert_same_as(run, short_reference)
        assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_a_save_in_flight_that_fails_ends_the_run_and_nothing_older_is_lost(
    config, short_reference, tmp_path
):
    spec = injecting(at=1, action="ENOSPC", only=f"write {tmp_path}/.staging-4", every=True)
    failed = keepstep(*words(config, tmp_path, "--checkpoint.save_retries=0"), extra=spec)
    assert failed.returncode == 1, failed.stdout
    assert "step 4 could not be saved" in failed.stdout
    assert "Make room" in failed.stdout
    assert f"`keepstep ckpt prune {tmp_path} --keep-last 1`" in failed.stdout
    assert "saved 2" in failed.stdout
    assert "saved 4" not in failed.stdout
    assert failed.stdout.count("step 4 could not be saved") == 1
    assert outcome(tmp_path)["code"] == 1
    assert outcome(tmp_path)["checkpoint"] == "step_2"
    assert steps(tmp_path) == [2]
    again = keepstep(*words(config, tmp_path, "--checkpoint.save_retries=0"))
    assert again.returncode == 0, again.stdout
    assert_same_as(tmp_path, short_reference)


def test_a_failed_save_ends_the_run_at_a_step_and_not_at_the_next_save(config, tmp_path):
    spec = injecting(at=1, action="EIO", only=f"create {tmp_path}/.staging-10", every=True)
    flags = ("--checkpoint.interval=10", "--train.max_steps=200", "--evaluation.interval=0")
    failed = keepstep(*words(config, tmp_path, *flags, "--checkpoint.save_retries=0"), extra=spec)
    assert failed.returncode == 1, failed.stdout
    assert losses(tmp_path)[-1][0] < 20


def test_the_last_save_that_fails_is_not_a_finished_run(config, short_reference, tmp_path):
    spec = injecting(at=1, action="EIO", only=f"sync {tmp_path}/.staging-6", every=True)
    flags = ("--checkpoint.save_retries=0", "--evaluation.interval=4")
    failed = keepstep(*words(config, tmp_path, *flags), extra=spec)
    assert failed.returncode == 1, failed.stdout
    assert "finished at" not in failed.stdout
    assert outcome(tmp_path)["checkpoint"] == "step_4"
    again = keepstep(*words(config, tmp_path, *flags))
    assert again.returncode == 0, again.stdout
    assert digests(tmp_path, 6) == digests(short_reference, 6)
    assert losses(tmp_path) == losses(short_reference)


def test_an_error_that_comes_once_is_survived_and_told(config, short_reference, tmp_path):
    spec = injecting(at=1, action="EIO", only=f"sync {tmp_path}/.staging-4")
    done = keepstep(*words(config, tmp_path), extra=spec)
    assert done.returncode == 0, done.stdout
    assert "step 4: attempt 1 to save failed" in done.stdout
    assert_same_as(tmp_path, short_reference)


@pytest.mark.parametrize("do", ["SIGTERM", "raise"])
def test_what_ends_a_run_lets_the_save_in_flight_finish(config, short_reference, tmp_path, do):
    """Step 4 is being written when a signal, or the error of a hook, comes in step 5."""
    act = hooks.acting({"when": "forward", "step": 5, "do": do})
    flags = (HOOK, "--evaluation.interval=0")
    ended = keepstep(*words(config, tmp_path, *flags), extra=act)
    assert ended.returncode == (75 if do == "SIGTERM" else 1), ended.stdout
    assert steps(tmp_path)[-1] == (5 if do == "SIGTERM" else 4)
    assert outcome(tmp_path)["checkpoint"] == f"step_{steps(tmp_path)[-1]}"
    assert whole(tmp_path)
    again = keepstep(*words(config, tmp_path, *flags), extra=hooks.acting())
    assert again.returncode == 0, again.stdout
    assert losses(tmp_path) == losses(short_reference)
    assert digests(tmp_path, 6) == digests(short_reference, 6)
