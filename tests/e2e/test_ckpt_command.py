"""`keepstep ckpt` on a run that the command itself made."""

import json
import shutil

from tests.helpers.command import keepstep

DATA = "rank-00000.safetensors"


def test_a_flipped_bit_is_found_and_named_and_is_exit_code_3(untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    assert keepstep("ckpt", "verify", run).returncode == 0
    path = run / "step_9" / DATA
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = keepstep("ckpt", "verify", run)
    assert done.returncode == 3
    assert "step_9: damaged" in done.stdout
    assert "step_10: whole, every byte" in done.stdout
    (result,) = json.loads(keepstep("ckpt", "verify", run, "9", "--json").stdout)
    (fault,) = result["faults"]
    assert fault["file"] == DATA
    assert fault["tensor"]
    assert 0 < fault["offset"] < len(content)


def test_a_run_whose_checkpoints_lie_elsewhere_is_listed_by_its_folder(config, tmp_path):
    words = [f"--run.dir={tmp_path / 'run'}", f"--checkpoint.dir={tmp_path / 'disk'}"]
    short = ["--train.max_steps=2", "--schedule.warmup_steps=1", "--checkpoint.interval=1"]
    done = keepstep("train", config, *words, *short)
    assert done.returncode == 0, done.stdout
    for place in ("run", "disk"):
        listed = keepstep("ckpt", "ls", tmp_path / place)
        assert listed.returncode == 0, listed.stdout
        assert "step_2" in listed.stdout


def test_reading_changes_nothing(untouched):
    def facts():
        return sorted((str(p), p.lstat().st_mtime_ns) for p in untouched.rglob("*"))

    before = facts()
    for words in (["ls"], ["verify"], ["show", "latest"]):
        verb, *rest = words
        assert keepstep("ckpt", verb, untouched, *rest).returncode == 0
    assert facts() == before
