"""Signals at every phase, through the installed command."""

import signal

import pytest

from tests.helpers import hooks
from tests.helpers.command import (
    Session,
    digests,
    events,
    injecting,
    keepstep,
    link,
    losses,
    outcome,
    steps,
)
from tests.helpers.tiny import ROOT

HOOK = f"--run.hooks=['{hooks.CONFIG}']"
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]


def train(config, run, *words, acts=(), extra=None):
    environment = {**hooks.acting(*acts), **(extra or {})}
    return keepstep("train", config, f"--checkpoint.dir={run}", HOOK, *words, extra=environment)


def assert_continues_to_the_untouched_end(config, run, untouched):
    done = train(config, run)
    assert done.returncode == 0, done.stdout
    assert digests(run, 10) == {**digests(untouched, 10), "plain": digests(run, 10)["plain"]}
    assert losses(run) == losses(untouched)
    assert link(run, "best") == link(untouched, "best")
    assert (
        events(run, "evaluation")[-1]["metrics"] == events(untouched, "evaluation")[-1]["metrics"]
    )
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(untouched, "evaluation")]


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_in_a_step_finishes_and_saves_that_step(config, untouched, tmp_path, name):
    done = train(config, tmp_path, acts=({"when": "forward", "step": 5, "do": name},))
    assert done.returncode == 75, done.stdout
    assert steps(tmp_path)[-1] == 5
    found = outcome(tmp_path)
    assert (found["outcome"], found["step"], found["reason"]) == ("stopped", 5, name)
    assert f"{name} (grace 180 s): finishing step 5" in done.stdout
    assert "Run the same command to continue." in done.stdout.splitlines()[-1]
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_in_an_evaluation_cuts_it_short_and_it_is_made_on_resume(
    config, untouched, tmp_path, name
):
    done = train(config, tmp_path, acts=({"when": "evaluating", "step": 8, "do": name},))
    assert done.returncode == 75, done.stdout
    assert steps(tmp_path)[-1] == 8
    assert [event["step"] for event in events(tmp_path, "evaluation")] == [4]
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


def test_a_signal_in_the_last_evaluation_stops_and_the_next_session_finishes(
    config, untouched, tmp_path
):
    done = train(config, tmp_path, acts=({"when": "evaluating", "step": 10, "do": "SIGTERM"},))
    assert done.returncode == 75, done.stdout
    assert steps(tmp_path)[-1] == 10
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)
    assert [event["step"] for event in events(tmp_path, "saved")].count(10) == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_in_a_save_finishes_it_and_takes_it_for_the_last(
    config, untouched, tmp_path, name
):
    done = train(config, tmp_path, acts=({"when": "snapshot", "step": 6, "do": name},))
    assert done.returncode == 75, done.stdout
    assert steps(tmp_path)[-1] == 6
    assert [event["step"] for event in events(tmp_path, "saved")].count(6) == 1
    assert outcome(tmp_path)["step"] == 6
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_torch_is_imported_stops_before_the_first_step(
    config, untouched, tmp_path, name
):
    extra = injecting(signal_at_import=["torch", name])
    done = train(config, tmp_path, extra=extra)
    assert done.returncode == 75, done.stdout
    assert steps(tmp_path) == []
    assert outcome(tmp_path)["outcome"] == "stopped"
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


def test_a_signal_at_the_start_of_a_resumed_session_saves_nothing_again(
    config, untouched, tmp_path
):
    assert train(config, tmp_path, acts=({"when": "step", "step": 6, "do": "stop"},)).returncode
    stopped_at = outcome(tmp_path)["step"]
    done = train(config, tmp_path, acts=({"when": "start", "step": stopped_at, "do": "SIGTERM"},))
    assert done.returncode == 75, done.stdout
    assert [event["step"] for event in events(tmp_path, "saved")].count(stopped_at) == 1
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


@pytest.mark.parametrize("when", ["start", "forward", "evaluating", "snapshot", "committed"])
def test_a_second_signal_leaves_at_once_and_damages_nothing(config, untouched, tmp_path, when):
    step = {"start": 0, "forward": 5, "evaluating": 8, "snapshot": 6, "committed": 6}[when]
    # The main thread never gets to the flag: it sends both and then waits in a system call.
    acts = ({"when": when, "step": step, "do": "SIGTERM+SIGINT+PAUSE"},)
    done = train(config, tmp_path, acts=acts)
    assert done.returncode == -2 or done.returncode == 128 + signal.SIGINT, done.stdout
    assert "second signal; leaving at once" in done.stdout
    assert outcome(tmp_path)["outcome"] == "running"
    assert keepstep("ckpt", "verify", tmp_path).returncode in (0, 4)
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


@pytest.mark.parametrize(("code", "acts"), [(75, [{"step": 5, "do": "stop"}]), (0, [])])
def test_a_signal_after_the_run_leaves_its_code_as_it_is(config, untouched, tmp_path, code, acts):
    """A scheduler reads it: 75 is started again, 143 may not be."""
    late = {"when": "exit", "step": 0, "do": "SIGTERM+SIGINT+SIGUSR1+SIGHUP"}
    done = train(config, tmp_path, acts=(late, *({"when": "step", **act} for act in acts)))
    assert done.returncode == code, done.stdout
    assert outcome(tmp_path)["code"] == code
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


def test_the_end_of_the_grace_leaves_whatever_the_main_thread_is_doing(config, untouched, tmp_path):
    acts = ({"when": "forward", "step": 5, "do": "SIGTERM+PAUSE"},)
    done = train(config, tmp_path, "--run.grace=1s", acts=acts)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout
    assert "the grace of 1 s is over" in done.stdout
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


def test_a_signal_to_the_whole_process_group_stops_once_and_leaves_no_process(
    config, untouched, tmp_path
):
    import os

    words = ("train", config, f"--checkpoint.dir={tmp_path}", "--data.workers=2", HOOK)
    acts = ({"when": "forward", "step": 5, "do": "GROUP_SIGTERM"},)
    with Session(*words, extra=hooks.acting(*acts)) as session:
        assert session.end() == 75, session.output
        with pytest.raises(ProcessLookupError):
            os.killpg(session.process.pid, 0)
    assert steps(tmp_path)[-1] == 5
    assert_continues_to_the_untouched_end(config, tmp_path, untouched)


def test_data_workers_do_not_outlive_a_killed_run(config, tmp_path):
    import os
    import select

    read, write = os.pipe()
    os.set_inheritable(write, True)
    words = ("train", config, f"--checkpoint.dir={tmp_path}", "--data.workers=2")
    with Session(*words, "--train.max_steps=100000", pass_fds=(write,)) as session:
        os.close(write)
        session.wait_for("step 3/")
        session.signal(signal.SIGKILL)
        # The pipe ends when the last process that inherited it is gone.
        ready, _, _ = select.select([read], [], [], 20)
        assert ready, "a data worker is still there 20 s after the run was killed"
        assert os.read(read, 1) == b""
    os.close(read)


def test_the_same_command_works_as_a_module_and_under_a_launcher(config, untouched, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    from tests.helpers.command import environment

    module = [sys.executable, "-m", "keepstep", "train", str(config)]
    subprocess.run(
        [*module, f"--checkpoint.dir={tmp_path}", HOOK],
        env=environment(hooks.acting({"when": "forward", "step": 4, "do": "SIGTERM"})),
        capture_output=True,
        cwd=ROOT,
    )
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=1"]
    done = subprocess.run(
        [*torchrun, "-m", "keepstep", "train", str(config), f"--checkpoint.dir={tmp_path}"],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(tmp_path, "resumed")[-1]["step"] == 4
    assert losses(tmp_path) == losses(untouched)
