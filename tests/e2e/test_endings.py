"""The exit matrix, through the installed command: what each ending leaves, and what comes next."""

from pathlib import Path

import pytest

from keepstep.store import list_checkpoints
from tests.helpers import hooks, warm
from tests.helpers.command import events, keepstep, link, losses, outcome, steps

HOOK = f"--run.hooks=['{hooks.CONFIG}']"
RECORD = "--run.hooks=['tests.helpers.hooks:Record']"


def train(config: Path, run: Path, *words: str, acts: tuple[dict, ...] = ()):
    """Train into `run` with the acting hook; return the finished process."""
    hook = [] if any(word.startswith("--run.hooks") for word in words) else [HOOK]
    return keepstep(
        "train", config, f"--checkpoint.dir={run}", *hook, *words, extra=hooks.acting(*acts)
    )


def last_line(done) -> str:
    return done.stdout.strip().splitlines()[-1]


def test_a_clean_finish_off_schedule_saves_exactly_once_at_the_end(config, tmp_path):
    done = train(config, tmp_path, "--checkpoint.interval=1000", "--evaluation.interval=0", RECORD)
    assert done.returncode == 0, done.stdout
    assert steps(tmp_path) == [10]
    assert (tmp_path / "latest").resolve() == tmp_path / "step_10"
    assert link(tmp_path, "best") == "step_10"
    assert [event["step"] for event in events(tmp_path, "saved")] == [10]
    told = outcome(tmp_path)
    assert told.pop("run_id") == list_checkpoints(tmp_path)[0].manifest.run_id
    assert told == {
        "outcome": "finished",
        "code": 0,
        "step": 10,
        "updates": 10,
        "checkpoint": "step_10",
        "reason": "",
    }
    assert last_line(done).startswith("finished at step 10; step_10 is saved")
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls == ["start 0", "snapshot 10", "committed 10", "end finished"]


def test_a_clean_finish_on_schedule_saves_the_last_step_once(config, tmp_path):
    done = train(config, tmp_path, "--checkpoint.interval=5")
    assert done.returncode == 0, done.stdout
    saved = [event["step"] for event in events(tmp_path, "saved")]
    assert saved.count(10) == 1
    assert steps(tmp_path)[-1] == 10


def test_a_last_step_that_is_not_finite_is_not_saved(config, tmp_path):
    poison = {"step": 10, "do": "nan"}
    words = ("--checkpoint.interval=5", "--evaluation.interval=0")
    done = train(config, tmp_path, *words, acts=(poison,))
    assert done.returncode == 6, done.stdout
    assert steps(tmp_path) == [5]
    assert link(tmp_path, "latest") == "step_5"
    found = outcome(tmp_path)
    assert (found["outcome"], found["code"], found["step"]) == ("finished_skipped", 6, 10)
    assert (found["updates"], found["checkpoint"]) == (9, "step_5")
    assert "update was skipped" in last_line(done)
    again = train(config, tmp_path, *words)
    assert again.returncode == 0, again.stdout
    assert steps(tmp_path) == [5, 10]


def test_a_skipped_end_is_saved_where_that_was_asked_for(config, tmp_path):
    poison = {"step": 10, "do": "nan"}
    done = train(config, tmp_path, "--checkpoint.save_after_skipped_end=true", acts=(poison,))
    assert done.returncode == 6, done.stdout
    assert steps(tmp_path)[-1] == 10


@pytest.mark.parametrize("ask", ["stop", "SIGTERM"])
@pytest.mark.parametrize("interval", ["1000", "5"])
def test_a_stop_on_the_last_step_saves_once_and_finishes(config, tmp_path, ask, interval):
    act = {"when": "forward", "step": 10, "do": ask}
    words = (f"--checkpoint.interval={interval}", "--evaluation.at_end=false")
    done = train(config, tmp_path, *words, acts=(act,))
    assert done.returncode == 0, done.stdout
    assert [event["step"] for event in events(tmp_path, "saved")].count(10) == 1
    assert outcome(tmp_path)["outcome"] == "finished"


@pytest.mark.parametrize("limit", [10, 7])
def test_a_run_at_or_past_its_end_saves_nothing_and_says_so(config, tmp_path, limit):
    assert train(config, tmp_path).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("step_*/*")}
    done = train(config, tmp_path, f"--train.max_steps={limit}", "--schedule.warmup_steps=1")
    assert done.returncode == 0, done.stdout
    assert "nothing to do" in last_line(done)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("step_*/*")} == before
    assert outcome(tmp_path)["outcome"] == "nothing_to_do"
    assert len(losses(tmp_path)) == 10


def test_a_health_failure_on_the_last_step_saves_nothing(config, tmp_path):
    act = {"when": "step", "step": 10, "do": "unhealthy"}
    done = train(config, tmp_path, acts=(act,))
    assert done.returncode == 7, done.stdout
    assert 10 not in steps(tmp_path)
    assert outcome(tmp_path)["outcome"] == "unhealthy"
    assert outcome(tmp_path)["code"] == 7
    assert train(config, tmp_path).returncode == 0
    assert steps(tmp_path)[-1] == 10


@pytest.mark.parametrize(
    ("when", "step"), [("start", 0), ("step", 5), ("evaluated", 4), ("committed", 6), ("end", 10)]
)
def test_a_failing_hook_ends_the_run_as_failed_and_nothing_is_lost(config, tmp_path, when, step):
    act = {"when": when, "step": step, "do": "raise"}
    done = train(config, tmp_path, acts=(act,))
    assert done.returncode == 1, done.stdout
    assert "the hook fails on purpose" in done.stdout
    assert outcome(tmp_path)["outcome"] == "failed"
    standing = steps(tmp_path)
    assert standing == {"start": [], "step": [3, 4], "evaluated": [3]}.get(when, standing)
    assert train(config, tmp_path).returncode == 0
    assert outcome(tmp_path)["outcome"] in ("finished", "nothing_to_do")
    assert steps(tmp_path)[-1] == 10


def test_too_many_steps_in_a_row_that_are_not_finite_end_as_diverged(config, tmp_path):
    acts = tuple({"step": step, "do": "nan"} for step in (5, 6, 7))
    done = train(config, tmp_path, "--nonfinite.max_consecutive=3", acts=acts)
    assert done.returncode == 6, done.stdout
    assert outcome(tmp_path)["outcome"] == "diverged"
    assert outcome(tmp_path)["step"] == 7
    assert steps(tmp_path)[-1] == 4


def test_the_policy_stop_ends_at_the_first_step_that_is_not_finite(config, tmp_path):
    done = train(config, tmp_path, "--nonfinite.policy=stop", acts=({"step": 5, "do": "nan"},))
    assert done.returncode == 6, done.stdout
    assert outcome(tmp_path)["step"] == 5


def test_a_save_and_an_evaluation_due_at_a_skipped_step_move_to_the_next_applied_one(
    config, tmp_path
):
    words = ("--checkpoint.interval=4", "--evaluation.interval=4", "--checkpoint.keep_last_n=0")
    done = train(config, tmp_path, *words, acts=({"step": 4, "do": "nan"},))
    assert done.returncode == 0, done.stdout
    assert [event["step"] for event in events(tmp_path, "evaluation")] == [5, 8, 10]
    assert next(event["step"] for event in events(tmp_path, "saved")) == 5
    skipped = [e["skipped"] for e in events(tmp_path, "step")]
    assert skipped == [False, False, False, True] + [False] * 6
    assert events(tmp_path, "step")[-1]["updates"] == 9
    assert "no update, because not all is finite" in done.stdout


def test_a_hook_can_ask_for_a_save_and_for_a_stop(config, tmp_path):
    acts = (
        {"when": "step", "step": 4, "do": "save"},
        {"when": "step", "step": 6, "do": "stop"},
    )
    words = ("--checkpoint.interval=0", "--evaluation.interval=0", "--checkpoint.keep_last_n=0")
    done = train(config, tmp_path, *words, acts=acts)
    assert done.returncode == 75, done.stdout
    assert steps(tmp_path) == [5, 7]
    assert outcome(tmp_path)["reason"] == "the hook asks for it"


def test_hooks_keep_their_state_and_hear_the_truth_in_its_order(config, tmp_path):
    words = ("--evaluation.interval=0", "--evaluation.at_end=false", RECORD)
    assert train(config, tmp_path, "--train.max_steps=6", *words).returncode == 0
    assert train(config, tmp_path, *words).returncode == 0
    assert (tmp_path / "calls.txt").read_text().splitlines() == [
        "start 0",
        *("snapshot 3", "committed 3", "snapshot 6", "committed 6", "end finished"),
        # The state in step_6 is of the moment before "snapshot 6" was heard.
        "start 3",
        *("snapshot 9", "committed 9", "snapshot 10", "committed 10", "end finished"),
    ]


def test_an_unknown_hook_is_refused_before_anything_is_written(config, tmp_path):
    run = tmp_path / "run"
    done = train(config, run, "--run.hooks=['tests.helpers.hooks:Nothing']")
    assert done.returncode == 2
    assert "tests.helpers.hooks:Nothing" in done.stdout
    assert "Traceback" not in done.stdout
    assert not run.exists()


def test_a_second_session_is_refused_and_told_who_holds_the_folder(config, tmp_path):
    from tests.helpers.command import Session

    with Session("train", config, f"--checkpoint.dir={tmp_path}", "--train.max_steps=100000") as it:
        it.wait_for("step 3/")
        done = keepstep("train", config, f"--checkpoint.dir={tmp_path}")
        assert done.returncode == 5
        assert f"process {it.process.pid} on" in done.stdout
        assert outcome(tmp_path)["outcome"] == "running"
        it.kill_group()
        it.process.wait()
    assert train(config, tmp_path, "--train.max_steps=4").returncode == 0


def test_where_only_the_checkpoint_folder_is_given_it_is_the_runs_folder(config, tmp_path):
    assert train(config, tmp_path / "a", "--train.max_steps=3").returncode == 0
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"run.toml", "journal.jsonl", "outcome.json", "lock", "step_3", "latest"} <= names


def test_a_run_with_a_folder_of_its_own_keeps_its_checkpoints_in_it(config, tmp_path):
    done = keepstep("train", config, f"--run.dir={tmp_path / 'b'}", "--train.max_steps=3")
    assert done.returncode == 0, done.stdout
    assert steps(tmp_path / "b") == [3]
    assert (tmp_path / "b" / "checkpoints" / "latest").resolve().name == "step_3"


@pytest.mark.parametrize("flags", [(), ("--checkpoint.on_resume=fresh",)])
def test_a_run_that_ended_before_its_first_checkpoint_is_the_same_run_after_a_kill(
    config, untouched, tmp_path, flags
):
    """The next session starts over, and its checkpoints are not taken for those of another run."""
    for when, step, do, code in (("start", 0, "stop", 75), ("forward", 5, "SIGKILL", -9)):
        act = {"when": when, "step": step, "do": do}
        words = ("train", config, f"--checkpoint.dir={tmp_path}", HOOK, *flags)
        done = warm.keepstep(*words, extra=hooks.acting(act))
        assert done.returncode == code, done.stdout
    assert steps(tmp_path) == [3, 4]
    assert outcome(tmp_path)["run_id"] == list_checkpoints(tmp_path)[0].manifest.run_id
    done = warm.keepstep("train", config, f"--checkpoint.dir={tmp_path}", HOOK, *flags)
    assert done.returncode == 0, done.stdout
    assert losses(tmp_path) == losses(untouched)


def test_a_moved_run_folder_continues(config, untouched, tmp_path):
    act = {"when": "forward", "step": 6, "do": "SIGTERM"}
    assert train(config, tmp_path / "here", acts=(act,)).returncode == 75
    (tmp_path / "here").rename(tmp_path / "there")
    assert train(config, tmp_path / "there").returncode == 0
    assert losses(tmp_path / "there") == losses(untouched)
    assert events(tmp_path / "there", "resumed")[-1]["step"] == 6


def test_progress_is_plain_lines_where_there_is_no_terminal(config, tmp_path):
    done = train(config, tmp_path, "--train.max_steps=3")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("step 3/3")]
    for word in ("loss", "lr", "grad", "tok/s", "eta"):
        assert f"  {word} " in line
    assert "\x1b" not in done.stdout
    quiet = train(config, tmp_path / "quiet", "--quiet", "--train.max_steps=3")
    assert quiet.stdout.strip().count("\n") == 1, quiet.stdout


def test_a_reader_that_goes_away_does_not_end_the_run(config, tmp_path):
    from tests.helpers.command import Session

    with Session("train", config, f"--checkpoint.dir={tmp_path}") as it:
        it.wait_for("step 1/")
        it.process.stdout.close()
        code = it.process.wait(timeout=60)
    assert code == 0, (outcome(tmp_path), events(tmp_path, "notice"))
    assert steps(tmp_path)[-1] == 10
    assert any(event["word"] == "console" for event in events(tmp_path, "notice"))


def test_a_hook_that_leaves_python_ends_the_run_as_failed(config, tmp_path):
    done = train(config, tmp_path, acts=({"when": "step", "step": 5, "do": "exit"},))
    assert done.returncode == 1, done.stdout
    assert "left the run by SystemExit(0)" in done.stdout
    assert outcome(tmp_path)["code"] == 1


def test_a_failing_hook_at_the_end_does_not_hide_what_ended_the_run(config, tmp_path):
    acts = (
        {"when": "step", "step": 5, "do": "unhealthy"},
        {"when": "end", "step": 5, "do": "raise"},
    )
    done = train(config, tmp_path, acts=acts)
    assert done.returncode == 7, done.stdout
    assert "a peer is gone, says the hook" in done.stdout
    assert "the hook fails on purpose" in done.stdout
    assert outcome(tmp_path)["outcome"] == "unhealthy"
