"""Damaged, foreign and changed checkpoints, through the installed command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import hooks, warm
from tests.helpers.command import Session, digests, events, link, losses, steps

MANIFEST, DATA = "manifest.json", "rank-00000.safetensors"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "manifest cut short": lambda new, old: (new / MANIFEST).write_bytes(
        (new / MANIFEST).read_bytes()[:-20]
    ),
    "manifest empty": lambda new, old: (new / MANIFEST).write_bytes(b""),
    "manifest flipped": lambda new, old: flip(new / MANIFEST, 100),
    "manifest removed": lambda new, old: (new / MANIFEST).unlink(),
    "manifest of an older one": lambda new, old: shutil.copy(old / MANIFEST, new / MANIFEST),
    "data cut short": lambda new, old: (new / DATA).write_bytes((new / DATA).read_bytes()[:-1]),
    "data longer": lambda new, old: (new / DATA).write_bytes((new / DATA).read_bytes() + b"\0"),
    "data empty": lambda new, old: (new / DATA).write_bytes(b""),
    "data flipped at the end": lambda new, old: flip(new / DATA, -1),
    "data flipped in the middle": lambda new, old: flip(new / DATA, 40_000),
    "header flipped": lambda new, old: flip(new / DATA, 20),
    "header's padding flipped": lambda new, old: flip(new / DATA, 4090),
    "data zeroed": lambda new, old: (new / DATA).write_bytes(bytes((new / DATA).stat().st_size)),
    "data removed": lambda new, old: (new / DATA).unlink(),
    "data of an older one": lambda new, old: shutil.copy(old / DATA, new / DATA),
    "data a link": lambda new, old: (
        (new / DATA).unlink(),
        (new / DATA).symlink_to(old / DATA),
    ),
}
NEWEST, BEFORE = 10, 9


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(config, untouched, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    DAMAGES[damage](run / f"step_{NEWEST}", run / f"step_{BEFORE}")
    verified = warm.keepstep("ckpt", "verify", run, f"step_{NEWEST}")
    assert verified.returncode == 3, verified.stdout
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", "--checkpoint.keep_last_n=0")
    assert done.returncode == 0, done.stdout
    assert f"from step_{BEFORE} (verified)" in done.stdout
    assert f"step_{NEWEST} passed over: " in done.stdout
    assert events(run, "resumed")[-1]["set_aside"] == [f"step_{NEWEST}"]
    assert (run / "aside" / f"step_{NEWEST}").is_dir()
    assert digests(run, NEWEST) == digests(untouched, NEWEST)
    assert losses(run) == losses(untouched)
    assert link(run, "best") == link(untouched, "best")


def test_where_none_is_whole_the_run_is_refused_with_the_list_and_nothing_changes(
    config, untouched, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    for step in steps(run):
        flip(run / f"step_{step}" / DATA, -1)
    before = {p: p.read_bytes() for p in run.rglob("step_*/*")}
    journal = (run / "journal.jsonl").read_bytes()
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}")
    assert done.returncode == 3, done.stdout
    for step in steps(run):
        assert f"step_{step}: {DATA}: bytes" in done.stdout
    assert "Traceback" not in done.stdout
    assert {p: p.read_bytes() for p in run.rglob("step_*/*")} == before
    assert (run / "journal.jsonl").read_bytes().startswith(journal)
    assert json.loads((run / "outcome.json").read_text())["code"] == 3


def test_where_no_manifest_is_whole_that_is_damage_and_no_other_run(config, untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    for step in steps(run):
        (run / f"step_{step}" / MANIFEST).unlink()
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}")
    assert done.returncode == 3, done.stdout
    assert f"step_{NEWEST}: {MANIFEST} is missing" in done.stdout


def test_the_verifier_names_the_file_the_tensor_and_the_place(untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    flip(run / "step_9" / DATA, -1)
    done = warm.keepstep("ckpt", "verify", run, "--json")
    assert done.returncode == 3
    found = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert found["step_10"]["whole"]
    (fault,) = found["step_9"]["faults"]
    assert fault["file"] == DATA
    assert fault["tensor"]
    assert fault["offset"] > 4096


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--model.hidden_size=32", "model.hidden_size"),
        ("--run.seed=4", "run.seed"),
        ("--data.sequence_length=16", "data.sequence_length"),
        ("--optimizer.name=sgd", "optimizer.name"),
    ],
)
def test_another_configs_folder_is_refused_with_the_difference(
    config, untouched, tmp_path, flag, name
):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    # What a dead session left is the other run's too: it is not swept by one that is refused.
    leftover = run / ".staging-11-0123456789abcdef"
    leftover.mkdir()
    (leftover / DATA).write_bytes(b"half")
    before = contents(run)
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", flag)
    assert done.returncode == 2, done.stdout
    assert f"{name}: saved " in done.stdout
    assert ", now " in done.stdout
    assert contents(run) == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_checkpoints_of_another_run_with_the_same_config_are_refused(config, untouched, tmp_path):
    run = tmp_path / "run"
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", "--train.max_steps=3")
    assert done.returncode == 0, done.stdout
    shutil.rmtree(run / "step_3")
    shutil.copytree(untouched / "step_9", run / "step_9")
    before = contents(run)
    refused = warm.keepstep("train", config, f"--checkpoint.dir={run}")
    assert refused.returncode == 2, refused.stdout
    assert "holds checkpoints of another run" in refused.stdout
    assert contents(run) == before
    # In a folder of their own they continue.
    new = tmp_path / "new"
    new.mkdir()
    shutil.copytree(untouched / "step_9", new / "step_9")
    assert warm.keepstep("train", config, f"--checkpoint.dir={new}").returncode == 0
    assert digests(new, 10) == digests(untouched, 10)


def test_checkpoints_that_are_all_gone_are_missed_and_a_fresh_start_must_be_asked_for(
    config, untouched, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    for step in steps(run):
        shutil.rmtree(run / f"step_{step}")
    words = ("train", config, f"--checkpoint.dir={run}", "--checkpoint.keep_last_n=0")
    refused = warm.keepstep(*words)
    assert refused.returncode == 4, refused.stdout
    assert "tells of a checkpoint of step 10" in refused.stdout
    assert losses(run) == losses(untouched)
    words = (*words, "--checkpoint.on_resume=fresh")
    first = warm.keepstep(*words, "--train.max_steps=4")
    assert "no checkpoint here: starting at step 0" in first.stdout
    again = warm.keepstep(*words)
    assert again.returncode == 0, again.stdout
    assert "from step_4 (verified)" in again.stdout
    assert steps(run)[-1] == 10


def test_other_data_under_the_same_name_are_refused(config, untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    text = tmp_path / "text"
    text.write_text("another text altogether. " * 400)
    other = tmp_path / "tokens"
    words = ("language", "prepare", text, "-o", other, "--vocab-size", 300)
    assert warm.keepstep(*words).returncode == 0
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", f"--data.source={other}")
    assert done.returncode == 2, done.stdout
    assert "data.digest: saved " in done.stdout


def test_what_changes_on_purpose_takes_effect_and_is_journaled(config, untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    flags = ("--train.max_steps=13", "--optimizer.rate=2e-3", "--optimizer.weight_decay=0.05")
    constant = ("--schedule.name=constant", "--schedule.warmup_steps=0")
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", *flags, *constant)
    assert done.returncode == 0, done.stdout
    assert [event["rate"] for event in events(run, "step")][10:] == [2e-3] * 3
    told = " ".join(e["text"] for e in events(run, "notice") if e["word"] == "config")
    assert "optimizer.weight_decay: 0.1 -> 0.05" in told
    assert "optimizer.rate: 0.01 -> 0.002" in told
    assert "schedule.name: 'cosine' -> 'constant'" in told
    assert "train.max_steps: 10 -> 13" in told
    assert "run.dir" not in told
    assert steps(run)[-1] == 13
    # The weights moved by the new rate and the new decay, from the first resumed update on: as in
    # a run of which only the one differs, they differ from what they would be.
    moved = digests(run, 13)
    for flag in ("--optimizer.rate=1e-2", "--optimizer.weight_decay=0.1"):
        other = tmp_path / flag
        shutil.copytree(untouched, other, symlinks=True)
        words = ("train", config, f"--checkpoint.dir={other}", *flags, *constant, flag)
        assert warm.keepstep(*words).returncode == 0
        weights = "model.model.layers.0.mlp.up_proj.weight"
        assert digests(other, 13)[weights] != moved[weights]


def test_going_back_to_a_step_is_done_once_and_the_same_command_then_continues(
    config, untouched, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    command = ("train", config, f"--checkpoint.dir={run}", "--checkpoint.on_resume=6")
    partly = warm.keepstep(*command, "--train.max_steps=8", "--schedule.warmup_steps=1")
    assert partly.returncode == 0, partly.stdout
    assert "from step_6 (verified)" in partly.stdout
    assert sorted(p.name for p in (run / "aside").iterdir()) == ["step_10", "step_8", "step_9"]
    done = warm.keepstep(*command)
    assert done.returncode == 0, done.stdout
    assert "from step_8 (verified)" in done.stdout
    assert warm.keepstep(*command).stdout.count("nothing to do") == 1
    missing = warm.keepstep(*command[:-1], "--checkpoint.on_resume=5")
    assert missing.returncode == 4
    assert "there are step_9, step_10" in missing.stdout


def test_a_fresh_start_in_a_full_folder_is_refused(config, untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    command = ("train", config, f"--checkpoint.dir={run}", "--checkpoint.on_resume=fresh")
    done = warm.keepstep(*command)
    assert done.returncode == 2, done.stdout
    assert steps(run) == steps(untouched)
    fresh = ("train", config, f"--checkpoint.dir={tmp_path / 'new'}", command[-1])
    assert warm.keepstep(*fresh, "--train.max_steps=3").returncode == 0
    again = warm.keepstep(*fresh, "--train.max_steps=4")
    assert again.returncode == 0, again.stdout
    assert "from step_3" in again.stdout


def test_names_that_are_not_ours_are_never_touched(config, tmp_path):
    run = tmp_path / "run"
    for name in ("step_best", "step_1200_backup", ".staging-mine", ".trash", "step_07"):
        (run / name).mkdir(parents=True)
        (run / name / "notes.txt").write_text("mine")
    (run / "latest.txt").write_text("mine")
    (run / ".staging-3-0123456789abcdef").mkdir()
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", "--checkpoint.interval=1")
    assert done.returncode == 0, done.stdout
    for name in ("step_best", "step_1200_backup", ".staging-mine", ".trash", "step_07"):
        assert (run / name / "notes.txt").read_text() == "mine"
    assert not (run / ".staging-3-0123456789abcdef").exists()
    assert ".staging-3-0123456789abcdef was left by a session that died" in done.stdout


def test_a_runs_folder_is_no_place_for_the_checkpoints_of_the_same_run(config, tmp_path):
    run = tmp_path / "run"
    first = warm.keepstep("train", config, f"--run.dir={run}", "--train.max_steps=3")
    assert first.returncode == 0, first.stdout
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", "--train.max_steps=4")
    assert done.returncode == 2, done.stdout
    assert f"Use --run.dir={run} to continue that run" in done.stdout
    assert [path.name for path in run.glob("**/step_*")] == ["step_3"]


def test_a_best_that_is_gone_is_told_and_the_best_of_the_others_takes_its_place(
    config, untouched, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    assert link(run, "best") == "step_10"
    shutil.rmtree(run / "step_10")
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", "--train.max_steps=9")
    assert done.returncode == 0, done.stdout
    # Step 9's manifest knows the best of its time, step 8; that one goes now.
    shutil.rmtree(run / "step_8")
    again = warm.keepstep("train", config, f"--checkpoint.dir={run}", "--train.max_steps=9")
    assert "the best so far, step 8" in again.stdout
    assert link(run, "best") in ("step_4", None)


def test_two_sessions_cannot_share_a_folder_of_checkpoints_by_any_path(config, tmp_path):
    run = tmp_path / "run"
    act = hooks.acting({"when": "forward", "step": 5, "do": "PAUSE"})
    words = ("train", config, f"--run.dir={run}", f"--run.hooks=['{hooks.CONFIG}']")
    with Session(*words, extra=act) as session:
        session.wait_for("step 4/")
        for flag in (f"--checkpoint.dir={run}/checkpoints", f"--run.dir={run}"):
            done = warm.keepstep("train", config, flag)
            assert done.returncode == 5, done.stdout
            assert "is held by another session" in done.stdout
