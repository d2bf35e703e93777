"""What is changed on purpose between two sessions is told, whatever it is."""

import shutil
import signal

import pytest

from tests.helpers.command import events, injecting, keepstep


@pytest.fixture
def run(untouched, tmp_path):
    return shutil.copytree(untouched, tmp_path / "run", symlinks=True)


def told(run):
    return [event["text"] for event in events(run, "notice") if event["word"] == "config"]


def test_every_changed_field_is_told_and_journaled_with_both_values(config, run):
    changed = {
        "run.grace": ("'180s'", "'90s'"),
        "train.max_steps": ("10", "11"),
        "train.global_batch": ("4", "8"),
        "train.micro_batch": ("0", "2"),
        "train.grad_clip": ("1.0", "0.5"),
        "train.precision": ("'float32'", "'bfloat16'"),
        "train.deterministic": ("true", "false"),
        "optimizer.rate": ("0.01", "0.02"),
        "schedule.name": ("'cosine'", "'linear'"),
        "evaluation.batches": ("2", "1"),
        "evaluation.metric": ("'valid_loss'", "'valid_perplexity'"),
        "evaluation.mode": ("'min'", "'max'"),
        "checkpoint.keep_last_n": ("0", "3"),
        "checkpoint.dyn_ckpt_window.start": ("none", "11"),
        "checkpoint.dyn_ckpt_window.stop": ("none", "12"),
        "data.workers": ("1", "0"),
    }
    flags = [f"--{path}={new.strip(chr(39))}" for path, (_, new) in changed.items()]
    words = ("train", config, f"--run.dir={run}", f"--checkpoint.dir={run}")
    done = keepstep(*words, *flags)
    assert done.returncode == 0, done.stdout
    for path, (old, new) in changed.items():
        line = f"changed since the last session: {path}: {old} -> {new}"
        assert line in told(run)
        assert f"config   {line}\n" in done.stdout
    # Nothing is told twice, and nothing that did not change.
    fields = [text.removeprefix("changed since the last session: ") for text in told(run)]
    names = [text.partition(":")[0] for text in fields]
    beside = {"checkpoint.dyn_ckpt_window.strategy"}
    assert set(names) <= set(changed) | beside
    assert len(names) == len(set(names))
    again = keepstep(*words, *flags)
    assert "nothing to do" in again.stdout
    assert "changed since" not in again.stdout


def test_a_change_is_journaled_also_where_the_session_dies_at_once(config, run):
    words = ("train", config, f"--checkpoint.dir={run}", "--train.max_steps=12")
    # The first operation after the record was overwritten.
    dies = injecting(at=1, action="kill", only="outcome.json")
    assert keepstep(*words, extra=dies).returncode == -signal.SIGKILL
    assert "max_steps = 12" in (run / "run.toml").read_text()
    assert "changed since the last session: train.max_steps: 10 -> 12" in told(run)


def test_a_change_is_durable_before_the_record_is_overwritten(config, run, tmp_path):
    log = tmp_path / "log"
    words = ("train", config, f"--checkpoint.dir={run}", "--train.max_steps=12")
    assert keepstep(*words, extra=injecting(log=str(log), at=0)).returncode == 0
    lines = log.read_text().splitlines()
    overwritten = next(n for n, line in enumerate(lines) if line.endswith("run.toml"))
    before = [line.partition(" ")[2] for line in lines[:overwritten]]
    assert f"sync {run}/journal.jsonl" in before


def test_a_record_that_cannot_be_read_is_told_and_harms_nobody(config, run):
    (run / "run.toml").write_text("[train\n")
    done = keepstep("train", config, f"--checkpoint.dir={run}", "--optimizer.rate=0.02")
    assert done.returncode == 0, done.stdout
    assert "what changed is not known" in done.stdout
    # What the optimizer sees is in the checkpoint, so that much is told all the same.
    assert "changed since the checkpoint: adamw.peak_rate: 0.01 -> 0.02" in done.stdout


def test_a_way_back_that_was_taken_is_told_with_what_takes_it_again(config, run):
    words = ("train", config, f"--checkpoint.dir={run}")
    back = keepstep(*words, "--checkpoint.on_resume=9")
    assert "from step_9 (verified)" in back.stdout
    assert "was taken" not in back.stdout
    assert back.stdout.count("on_resume: 'newest' -> '9'") == 1
    assert "changed since the checkpoint" not in back.stdout
    again = keepstep(*words, "--checkpoint.on_resume=9")
    assert "nothing to do" in again.stdout
    assert "the way back to step 9 was taken in an earlier session" in again.stdout
    assert "write --checkpoint.on_resume=09" in again.stdout
    once_more = keepstep(*words, "--checkpoint.on_resume=09")
    assert once_more.returncode == 0, once_more.stdout
    assert "from step_9 (verified)" in once_more.stdout
    assert "was taken" not in once_more.stdout
