"""What the file system cannot do, and has no room for, through the installed command."""

import os
import subprocess

import pytest

from keepstep.store import list_checkpoints
from tests.helpers.command import digests, events, injecting, keepstep, losses, outcome


def test_a_run_whose_folders_cannot_be_renamed_is_the_same_run(config, untouched, tmp_path):
    words = ("train", config, f"--checkpoint.dir={tmp_path}")
    refused = injecting(at=1, action="EPERM", only="/renamed")
    done = keepstep(*words, extra=refused)
    assert done.returncode == 0, done.stdout
    assert (
        "commits are made by manifest-last: this file system cannot rename a folder" in done.stdout
    )
    assert "commit by manifest-last · room for" in done.stdout
    entries = list_checkpoints(tmp_path)
    assert {entry.manifest.commit_method for entry in entries} == {"manifest-last"}
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert digests(tmp_path, 10) == digests(untouched, 10)
    assert losses(tmp_path) == losses(untouched)
    # Moved to a better place: the next session looks anew.
    again = keepstep(*words, "--train.max_steps=11")
    assert again.returncode == 0, again.stdout
    assert "rehearse commit by rename · room for" in again.stdout
    assert list_checkpoints(tmp_path)[-1].manifest.commit_method == "rename"


def test_a_run_without_room_for_its_checkpoints_ends_before_its_first_step(config, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        done = keepstep("train", config, f"--checkpoint.dir={place}")
        assert done.returncode == 1, done.stdout
        assert "no room for 4 more checkpoints" in done.stdout
        assert "Make room, keep fewer checkpoints" in done.stdout
        assert "Traceback" not in done.stdout
        assert events(place, "step") == []
        assert outcome(place)["outcome"] == "failed"
        assert not [path.name for path in place.iterdir() if path.name.startswith(".")]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
