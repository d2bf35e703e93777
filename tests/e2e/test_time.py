"""Runs that end by the clock, saves by the clock, and stops that leave no time to save."""

import json
import time
from pathlib import Path

from tests.helpers import hooks, warm
from tests.helpers.command import digests, events, keepstep, link, losses, outcome, steps
from tests.helpers.world import free_port, place_of

ACT = f"--run.hooks=['{hooks.CONFIG}']"
PATIENT = "--distributed.lost_after=60s"
LIMIT_SECONDS = 5
"""Enough to begin on a busy machine; each session takes it whole."""


def train(config, run, *words, acts=(), size=1, only_last=None, **variables):
    """Run the command on `size` ranks; return the exit codes. ``only_last``: the last knows it."""
    port, jobs = free_port(), []
    for rank in range(size):
        place = place_of(rank, size, port) if size > 1 else {}
        own = only_last or {} if rank == size - 1 else {}
        extra = {**hooks.acting(*acts), **variables, **place, **own}
        command = ("train", config, f"--checkpoint.dir={run}", ACT, PATIENT, *words)
        jobs.append(warm.Job(command, extra))
    ended = warm.run_together(jobs)
    for rank, done in enumerate(ended):
        print(f"-- rank {rank}\n{done.stdout}")
    return [done.returncode for done in ended]


def assert_same_as(run: Path, reference: Path) -> None:
    ours, theirs = digests(run, 10), digests(reference, 10)
    assert {**ours, "plain": ""} == {**theirs, "plain": ""}
    assert losses(run) == losses(reference)
    assert link(run, "best") == link(reference, "best")
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(reference, "evaluation")]


def test_a_run_that_its_limit_stops_three_times_ends_with_the_same_bits(
    config, untouched, tmp_path
):
    acts = (
        {"when": "forward", "step": 2, "do": "late"},
        {"when": "evaluating", "step": 4, "do": "late"},
        {"when": "forward", "step": 9, "do": "late"},
    )
    for act, step in zip(acts, (2, 4, 9), strict=True):
        assert train(config, tmp_path, f"--run.time_limit={LIMIT_SECONDS}s", acts=(act,)) == [75]
        found = outcome(tmp_path)
        assert (found["outcome"], found["step"], found["checkpoint"]) == (
            "stopped", step, f"step_{step}",
        )  # fmt: skip
        assert found["reason"].startswith(f"run.time_limit ({LIMIT_SECONDS}s) comes in ")
        # It was asked for before the end, and not when it was there.
        assert "comes in 0.0 s" not in found["reason"]
    assert train(config, tmp_path) == [0]
    assert [e["step"] for e in events(tmp_path, "resumed")] == [2, 4, 9]
    assert_same_as(tmp_path, untouched)
    assert all(event["seconds"] > 0 for event in events(tmp_path, "saved"))
    told = [e["text"] for e in events(tmp_path, "notice") if e["word"] == "time"]
    assert len(told) == 3
    assert "a save is assumed to take" in told[0]
    assert "a save takes" in told[1]


def test_a_limit_that_is_over_before_the_first_step_stops_and_says_so(config, tmp_path):
    assert train(config, tmp_path, "--run.time_limit=1s") == [75]
    assert steps(tmp_path) == []
    assert outcome(tmp_path)["reason"].startswith("run.time_limit (1s) comes in ")


def test_two_ranks_save_and_stop_at_one_step_by_what_one_clock_says(config, tmp_path):
    """The first finds a save due, and the last alone knows of the end of the job."""
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 15)}
    acts = (
        {"when": "forward", "step": 3, "do": "due", "rank": 0},
        {"when": "forward", "step": 5, "do": "late", "rank": 1},
    )
    words = ("--checkpoint.interval=0", "--checkpoint.interval_time=2s", "--evaluation.interval=0")
    assert train(config, tmp_path, *words, size=2, acts=acts, only_last=end) == [75, 75]
    found = outcome(tmp_path)
    # On a busy machine the time may be over before the fifth step; never after it.
    assert 0 < found["step"] <= 5
    assert found["checkpoint"] == f"step_{found['step']}"
    assert found["reason"].startswith("the end of the Slurm job comes in ")
    assert found["step"] < 3 or 3 in [event["step"] for event in events(tmp_path, "saved")]
    assert keepstep("ckpt", "verify", tmp_path).returncode == 0


def slow_saves(run: Path, step: int) -> None:
    """Have the journal tell that every save so far took longer than any grace."""
    path = run / "journal.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    told.append({"kind": "saved", "time": 1.0, "step": step, "sequence": 1})
    slow = [{**event, "seconds": 500.0} if event["kind"] == "saved" else event for event in told]
    path.write_text("".join(json.dumps(event) + "\n" for event in slow))


def test_a_save_that_cannot_end_within_the_grace_is_not_begun(config, untouched, tmp_path):
    stop = {"when": "evaluated", "step": 4, "do": "SIGTERM"}
    assert train(config, tmp_path, acts=(stop,)) == [75]
    slow_saves(tmp_path, 4)
    late = {"when": "forward", "step": 5, "do": "SIGTERM"}
    assert train(config, tmp_path, "--checkpoint.interval=5", acts=(late,)) == [75]
    assert steps(tmp_path) == [3, 4], "the one that is due at this step is held back too"
    found = outcome(tmp_path)
    assert (found["outcome"], found["step"], found["checkpoint"]) == ("stopped", 5, "step_4")
    assert found["reason"] == (
        "SIGTERM; no save was begun: it could not end within the grace of 180s"
        " (the fastest took 500.0 s)"
    )
    (warned,) = [e["text"] for e in events(tmp_path, "notice") if e["word"] == "grace"]
    assert "a save took 500.0 s, and run.grace is 180s" in warned
    assert train(config, tmp_path) == [0]
    assert_same_as(tmp_path, untouched)


def test_no_rank_begins_a_save_that_one_of_them_has_no_time_for(config, tmp_path):
    slow_saves(tmp_path, 0)
    acts = [{"when": "forward", "step": 2, "do": "SIGTERM", "rank": 1}]
    fresh = "--checkpoint.on_resume=fresh"
    assert train(config, tmp_path, fresh, size=2, acts=acts) == [75, 75]
    assert steps(tmp_path) == []
    found = outcome(tmp_path)
    assert (found["step"], found["checkpoint"]) == (2, None)
    assert "no save was begun" in found["reason"]


def test_a_last_step_that_there_is_no_time_to_save_is_not_called_finished(config, tmp_path):
    words = ("--evaluation.at_end=false", "--evaluation.interval=0", "--checkpoint.interval=0")
    stop = {"when": "forward", "step": 3, "do": "SIGTERM"}
    assert train(config, tmp_path, *words, acts=(stop,)) == [75]
    slow_saves(tmp_path, 3)
    late = {"when": "forward", "step": 10, "do": "SIGTERM"}
    assert train(config, tmp_path, *words, acts=(late,)) == [75]
    found = outcome(tmp_path)
    assert (found["outcome"], found["step"], found["checkpoint"]) == ("stopped", 10, "step_3")


def test_saves_by_the_clock_are_scheduled_saves_of_the_step_in_which_they_are_due(
    config, untouched, tmp_path
):
    acts = [{"when": "forward", "step": step, "do": "due"} for step in (3, 7)]
    words = ("--checkpoint.interval=0", "--checkpoint.interval_time=1.5s")
    keep = ("--checkpoint.keep_last_n=0", "--checkpoint.keep_best_n=0")
    assert train(config, tmp_path, *words, *keep, acts=acts) == [0]
    # Those of 4 and 8 are the best so far.
    assert {3, 7, 10} <= set(steps(tmp_path)) <= {3, 4, 7, 8, 10}
    assert_same_as(tmp_path, untouched)
