"""Full disks and failing ones, through the installed command."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import hooks, warm
from tests.helpers.command import (
    digests,
    injecting,
    keepstep,
    losses,
    outcome,
    steps,
)
from tests.helpers.crash import SHORT, assert_same_as, operations_of_a_save

STAGED = ".staging-6"


def run_words(config: Path, run: Path, *more: str) -> tuple:
    return ("train", config, f"--checkpoint.dir={run}", "--checkpoint.keep_last_n=0", *more)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    "operation", ["make_folder", "create", "write", "sync", "close", "sync_folder", "rename"]
)
def test_an_error_in_a_save_that_comes_once_is_survived_by_the_retry(
    config, untouched, tmp_path, operation, error
):
    spec = injecting(at=1, action=error, only=f"{operation} {tmp_path}/{STAGED}")
    if operation == "rename":
        spec = injecting(at=1, action=error, only=f"rename {tmp_path}/step_6")
    done = warm.keepstep(*run_words(config, tmp_path), extra=spec)
    assert done.returncode == 0, done.stdout
    assert "step 6: attempt 1 to save failed" in done.stdout
    assert digests(tmp_path, 10) == digests(untouched, 10)
    assert digests(tmp_path, 6) == digests(untouched, 6)
    assert losses(tmp_path) == losses(untouched)


PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(600)
def test_an_error_at_any_file_operation_around_a_save_loses_nothing(
    config, operations, short_reference, tmp_path, part
):
    """Data, manifest, commit, links, the delete of an older one, the journal.

    A save is tried again, tidying up is put off, and a journal that cannot be written ends the
    run, which the same command continues.
    """
    numbers = operations_of_a_save(operations, 6)
    seen = {operations[number - 1].split()[1] for number in numbers}
    assert {"symlink", "unlink", "remove_folder", "write", "rename"} <= seen, operations
    for number in numbers[part::PARTS]:
        run, what = tmp_path / str(number), operations[number - 1]
        run.mkdir()
        words = ("train", config, f"--checkpoint.dir={run}", *SHORT)
        done = warm.keepstep(*words, extra=injecting(at=number, action="EIO"))
        assert "Traceback" not in done.stdout, what
        if what.endswith("journal.jsonl"):
            assert done.returncode == 1, f"{what}: {done.stdout}"
            assert "the journal" in done.stdout
        else:
            assert done.returncode == 0, f"{what}: {done.stdout}"
            told = ("attempt 1 to save failed", "tidying up failed")
            assert any(words in done.stdout for words in told), f"{what}: {done.stdout}"
        assert warm.keepstep("ckpt", "verify", run).returncode == 0, what
        if "attempt 1 to save failed" not in done.stdout:
            # What was put off is for the next session.
            again = warm.keepstep(*words)
            assert again.returncode == 0, f"{what}: {again.stdout}"
        assert_same_as(run, short_reference)
        leftovers = [path.name for path in run.iterdir() if path.name.startswith(".")]
        assert not leftovers, what


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_disk_that_stays_broken_ends_the_run_with_everything_older_intact(
    config, untouched, tmp_path, error
):
    spec = injecting(at=1, every=True, action=error, only=STAGED)
    done = keepstep(*run_words(config, tmp_path), "--checkpoint.save_retries=1", extra=spec)
    assert done.returncode == 1, done.stdout
    assert "step 6 could not be saved" in done.stdout
    assert os.strerror({"EIO": 5, "ENOSPC": 28}[error]) in done.stdout
    assert "run the same command to continue" in done.stdout
    assert steps(tmp_path) == [3, 4]
    assert outcome(tmp_path)["outcome"] == "failed"
    assert outcome(tmp_path)["checkpoint"] == "step_4"
    assert keepstep("ckpt", "verify", tmp_path).returncode == 0
    again = keepstep(*run_words(config, tmp_path))
    assert again.returncode == 0, again.stdout
    assert digests(tmp_path, 10) == digests(untouched, 10)
    assert losses(tmp_path) == losses(untouched)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB: four of the tiny checkpoints do not fit."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_ends_the_run_clearly_and_with_room_it_continues(config, untouched, small_disk):
    run = small_disk / "run"
    words = run_words(config, run, "--checkpoint.save_retries=0")
    done = keepstep(*words)
    assert done.returncode == 1, done.stdout
    assert "No space left on device" in done.stdout
    assert "Make room, then run the same command to continue." in done.stdout
    assert "Traceback" not in done.stdout
    saved = steps(run)
    assert saved
    assert saved[-1] < 10
    assert keepstep("ckpt", "verify", run).returncode == 0
    remount = ["mount", "-o", "remount,size=8m", str(small_disk)]
    subprocess.run(remount, check=True)
    again = keepstep(*words)
    assert again.returncode == 0, again.stdout
    assert f"from step_{saved[-1]} (verified)" in again.stdout
    assert digests(run, 10) == digests(untouched, 10)
    assert losses(run) == losses(untouched)


def test_a_disk_that_is_full_for_the_journal_too_still_ends_clearly(config, untouched, small_disk):
    run = small_disk / "run"
    words = run_words(config, run, "--checkpoint.save_retries=0")
    act = hooks.acting({"when": "forward", "step": 3, "do": "SIGTERM"})
    assert keepstep(*words, f"--run.hooks=['{hooks.CONFIG}']", extra=act).returncode == 75
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 4096)
        except OSError:
            size = filler.tell()
    assert size
    done = keepstep(*words)
    assert done.returncode == 1, done.stdout
    assert "No space left on device" in done.stdout
    assert "Traceback" not in done.stdout
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    again = keepstep(*words)
    assert again.returncode == 0, again.stdout
    assert losses(run) == losses(untouched)


def test_what_a_checkpoint_stands_on_is_durable_before_it_is_committed(operations):
    """The journal's lines of the steps up to it, and the journal's name."""
    commit = next(n for n, line in enumerate(operations) if "rename" in line and "/step_6" in line)
    told = [n for n, line in enumerate(operations[:commit]) if line.endswith("/journal.jsonl")]
    kinds = [operations[n].split()[1] for n in told]
    assert kinds[-1] == "sync", kinds
    names = [line.split()[1] for line in operations[told[-1] + 1 : commit]]
    assert names[0] == "sync_folder"
