"""`checkpoint.layout = "files"` through the installed command: kills, a full disk, the ways out."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keepstep.store import list_checkpoints, load_state
from tests.helpers import hooks, warm
from tests.helpers.command import events, injecting, keepstep, losses, outcome
from tests.helpers.crash import SHORT
from tests.helpers.single_file import same_file

FILES = "--checkpoint.layout=files"


def words(config: Path, run: Path, *more: str) -> tuple:
    return ("train", config, f"--checkpoint.dir={run}", FILES, *more)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        else:
            found[name] = value

    walk(load_state(path), "")
    return found


def assert_same_state(path: Path, reference: Path) -> None:
    """Assert that two checkpoints, of whatever layout, hold the same state bit for bit."""
    one, two = tensors(path), tensors(reference)
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if torch.is_tensor(value) else value == two[name]
        assert same, name


def test_three_kills_in_saves_end_as_the_untouched_run_in_folders(
    config, short_reference, tmp_path
):
    """Before the commit, before `latest.pth`, before `best.pth`: each in a session of its own."""
    run = tmp_path / "run"
    for name in ("steps_2.pth", "latest.pth", "best.pth"):
        spec = injecting(at=1, action="kill", only=f"rename {run}/{name}")
        killed = warm.keepstep(*words(config, run, *SHORT), extra=spec)
        assert killed.returncode == -signal.SIGKILL, killed.stdout
    done = keepstep(*words(config, run, *SHORT))
    assert done.returncode == 0, done.stdout
    assert_same_state(run / "latest.pth", short_reference / "step_6")
    assert losses(run) == losses(short_reference)
    best = short_reference.joinpath("best").readlink().name.replace("step_", "steps_")
    assert same_file(run / "best.pth", run / f"{best}.pth")
    assert same_file(run / "latest.pth", run / "steps_6.pth")
    assert [entry.step for entry in list_checkpoints(run)][-2:] == [4, 6]
    assert not list(run.glob(".*"))


def test_a_stop_a_damaged_latest_and_a_finish_off_schedule(config, untouched, tmp_path):
    run, flags = tmp_path / "run", ("--checkpoint.keep_last_n=0", f"--run.hooks=['{hooks.CONFIG}']")
    act = hooks.acting({"when": "forward", "step": 6, "do": "SIGTERM"})
    stopped = keepstep(*words(config, run, *flags), extra=act)
    assert stopped.returncode == 75, stopped.stdout
    assert outcome(run)["checkpoint"] == "steps_6.pth"
    # The step was due as well: it is saved once.
    assert [event["path"] for event in events(run, "saved")][-1:] == ["steps_6.pth"]
    assert [event["step"] for event in events(run, "saved")] == [3, 4, 6]
    os.truncate(run / "latest.pth", 5000)
    verified = keepstep("ckpt", "verify", run, "--json")
    assert verified.returncode == 3
    found = {row["name"]: row["whole"] for row in json.loads(verified.stdout)}
    assert found == {"steps_3.pth": True, "steps_4.pth": True, "steps_6.pth": False}
    done = keepstep(*words(config, run, *flags))
    assert done.returncode == 0, done.stdout
    assert "from steps_4.pth (verified) · steps_6.pth passed over: it is no whole" in done.stdout
    assert_same_state(run / "latest.pth", untouched / "step_10")
    assert losses(run) == losses(untouched)
    listed = json.loads(keepstep("ckpt", "ls", run, "--json").stdout)
    roles = {row["name"]: row["roles"] for row in listed}
    assert roles["steps_10.pth"] == ["latest", "best"]
    assert roles["aside/steps_6.pth"] == ["aside"]
    assert keepstep("ckpt", "diff", run, "9", "10").returncode == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_ends_the_run_clearly_and_with_room_it_continues(config, untouched, small_disk):
    run = small_disk / "run"
    flags = ("--checkpoint.keep_last_n=0", "--checkpoint.save_retries=0")
    done = keepstep(*words(config, run, *flags))
    assert done.returncode == 1, done.stdout
    assert "No space left on device" in done.stdout
    assert "the newest checkpoint is steps_6.pth, and every older one is as it was" in done.stdout
    assert "Make room, then run the same command to continue." in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(run.glob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    again = keepstep(*words(config, run, *flags))
    assert again.returncode == 0, again.stdout
    assert_same_state(run / "latest.pth", untouched / "step_10")


def test_asynchronous_saves_are_refused_with_files(config):
    words = ("--checkpoint.async_mode=async", "--checkpoint.commit_method=manifest-last")
    done = keepstep("config", "check", config, FILES, *words)
    assert done.returncode == 2
    assert "checkpoint.async_mode" in done.stdout
    assert "checkpoint.commit_method" in done.stdout
    assert "needs checkpoint.layout = 'folders'" in done.stdout
