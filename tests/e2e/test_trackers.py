"""Trackers through the installed command: each step once after kills, and no step waits."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import hooks, tracking, warm
from tests.helpers.command import Session, events, losses, outcome
from tests.helpers.wandb_server import wandb_server

ACT = f"--run.hooks=['{hooks.CONFIG}']"
ALL = "--track.to=['tensorboard', 'wandb', 'trackio']"


def expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What a tracker has to hold of a run that nothing ever touched."""
    steps, evaluations = events(run, "step"), events(run, "evaluation")
    found = {f"train/{name}": [(e["step"], e[name]) for e in steps] for name in ("loss", "rate")}
    for name in ("valid_loss", "valid_perplexity"):
        found[f"evaluation/{name}"] = [(e["step"], e["metrics"][name]) for e in evaluations]
    return found


def assert_holds(series: Any, run: Path) -> None:
    """Assert that each step is there once, with the numbers of that run (float32, if need be)."""
    for name, wanted in expected(run).items():
        assert [step for step, _ in series[name]] == [step for step, _ in wanted], name
        values = [value for _, value in series[name]]
        assert values == pytest.approx([value for _, value in wanted], rel=1e-6), name


def train(config, run, *flags, acts=(), **extra):
    words = ("train", config, f"--checkpoint.dir={run}", "--checkpoint.keep_last_n=0", *flags)
    done = warm.keepstep(*words, ACT, extra={**hooks.acting(*acts), **extra})
    print(done.stdout)
    return done


def test_after_kills_every_tracker_holds_one_run_and_each_step_of_it_once(
    config, untouched, tmp_path
):
    """Killed before the first save and behind the second, with steps told that are taken again."""
    run, database = tmp_path / "run", tmp_path / "trackio"
    flags, own = (ALL,), {"TRACKIO_DIR": str(database)}
    for step in (2, 7):
        acts = (
            {"when": "step", "step": step, "do": "tracked"},
            {"when": "forward", "step": step + 1, "do": "SIGKILL"},
        )
        done = train(config, run, *flags, "--track.offline=true", acts=acts, **own)
        assert done.returncode == -signal.SIGKILL
        # A kill may leave a torn record.
        newest = max((run / "tensorboard").iterdir())
        newest.write_bytes(newest.read_bytes() + b"\x30\0\0\0\0\0\0\0torn")
    # A tracker may also lack what comes before the checkpoint.
    with sqlite3.connect(database / "keepstep.db") as lacking:
        lacking.execute("DELETE FROM metrics WHERE step > 4")
    done = train(config, run, *flags, WANDB_MODE="offline", **own)
    assert done.returncode == 0
    assert events(run, "resumed")[-1]["step"] == 6
    assert [e for e in events(run, "notice") if e["word"] == "track"] == []
    assert losses(run) == losses(untouched)

    shown = tracking.tensorboard(run / "tensorboard")
    assert_holds(shown, untouched)
    assert shown["outcome"] == [(10, "finished")]
    assert "[train]" in shown["config"][-1][1]
    saved = [(e["step"], e["sequence"]) for e in events(run, "saved")]
    assert shown["checkpoint/sequence"] == saved
    assert_holds(tracking.trackio(database), untouched)
    run_id, rows = tracking.wandb(run)
    assert_holds(rows, untouched)
    assert rows["step"] == [(step, step) for step in range(1, 11)]
    folders = [path.name for path in (run / "wandb").glob("offline-run-*")]
    assert len(folders) == 3
    assert {name.rpartition("-")[2] for name in folders} == {run_id}
    assert run_id == outcome(run)["run_id"]


@pytest.mark.parametrize("rewinds", [True, False])
def test_a_server_of_wandb_hears_of_one_run_and_takes_back_what_the_run_does(
    config, untouched, tmp_path, rewinds
):
    """Where it refuses to, that is told, and `step` tells the rows apart."""
    flags = ("--track.to=wandb", "--track.wait=30s", "--checkpoint.async_mode=async")
    with wandb_server(rewinds=rewinds) as server:
        stop = {"when": "forward", "step": 7, "do": "SIGTERM"}
        done = train(config, tmp_path, *flags, acts=[stop], **server.variables)
        assert done.returncode == 75
        (data,) = (tmp_path / "step_7").glob("*.safetensors")
        data.write_bytes(data.read_bytes()[:-1])
        assert train(config, tmp_path, *flags, **server.variables).returncode == 0
    assert events(tmp_path, "resumed")[-1]["step"] == 6
    ((run_id, rows),) = server.rows.items()
    assert run_id == outcome(tmp_path)["run_id"]
    assert server.asked.count("RewindRun") == 1
    assert server.exit_codes[-1] == 0
    assert 75 in server.exit_codes
    names = {name for row in rows for name in row}
    found = {n: [(row["step"], row[n]) for row in rows if n in row] for n in names}
    if rewinds:
        assert_holds(found, untouched)
        assert [row["_step"] for row in rows] == [row["step"] for row in rows]
        assert told(tmp_path) == []
    else:
        taken = [step for step, _ in found["train/loss"]]
        assert taken == [*range(1, 8), *range(7, 11)]
        assert_holds({name: dict(sorted(found[name])).items() for name in found}, untouched)
        (text,) = told(tmp_path)
        assert text == (
            "wandb: steps that are taken again lie over the others: failed to rewind run: input:"
            " rewind is not enabled here"
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 kB, which are taken."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    (place / "filler").write_bytes(b"\0" * 4096)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def told(run: Path) -> list[str]:
    return [event["text"] for event in events(run, "notice") if event["word"] == "track"]


def test_a_tracker_on_a_full_disk_is_told_once_and_supplied_when_there_is_room(
    config, untouched, tmp_path, small_disk
):
    run = tmp_path / "run"
    flags = ("--track.to=tensorboard", f"--track.dir={small_disk}")
    done = train(config, run, *flags, acts=[])
    assert done.returncode == 0
    assert losses(run) == losses(untouched)
    error, lack = told(run)
    assert error.startswith("tensorboard: OSError: [Errno 28] No space left on device")
    assert lack == "tensorboard: holds no step after 0; the same command supplies the others"
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    assert "nothing to do" in train(config, run, *flags).stdout
    assert_holds(tracking.tensorboard(small_disk / "tensorboard"), untouched)
    assert len(told(run)) == 2


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that accepts every connection and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_holds_up_neither_a_step_nor_the_end(
    config, untouched, tmp_path, silent_server
):
    """Also where the run ends by an error, or has not much time left; the exit code stands."""
    run = tmp_path / "run"
    online = {"WANDB_BASE_URL": silent_server, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    words = ["train", config, f"--checkpoint.dir={run}", "--track.to=wandb", "--track.wait=1s"]
    acts = hooks.acting({"when": "step", "step": 5, "do": "raise"})
    with Session(*words, ACT, extra={**acts, **online}) as session:
        session.wait_for("failed at step 5")
        said = time.monotonic()
        assert session.end() == 1
        assert time.monotonic() - said < 10, "the library waited for its server as Python ended"
    assert "ValueError: the hook fails on purpose" in session.output
    assert outcome(run)["outcome"] == "failed"
    left, lack = told(run)
    assert left == "wandb: not done after 1.0 s, and left behind"
    assert lack == "wandb: holds no step after 0; the same command supplies the others"
    # Of the grace at least half is for the outcome, whatever `track.wait` is.
    act = {"when": "forward", "step": 8, "do": "SIGTERM"}
    flags = ("--track.to=wandb", "--track.wait=60s", "--run.grace=8s")
    began = time.monotonic()
    done = train(config, run, *flags, acts=[act], **online)
    assert done.returncode == 75
    assert time.monotonic() - began < 40
    # Nothing is told after the last line.
    assert done.stdout.splitlines()[-1].startswith("stopped  at step 8")
    assert outcome(run)["step"] == 8
    assert losses(run) == losses(untouched)[:8]
    waited = re.fullmatch("wandb: not done after ([0-9.]+) s, and left behind", told(run)[2])
    assert waited is not None
    assert float(waited[1]) <= 4


BROKEN = """
import sys
sys.path.insert(0, {!r})
from keepstep.cli.main import main
sys.exit(main())
"""


def test_a_tracker_whose_package_is_broken_is_left_out_and_told(config, untouched, tmp_path):
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio/__init__.py").write_text("raise RuntimeError('built for another Python')")
    run = tmp_path / "run"
    words = ("train", config, f"--checkpoint.dir={run}", "--track.to=['trackio', 'tensorboard']")
    (done,) = warm.run_together([warm.Job(words, code=BROKEN.format(str(tmp_path)))])
    assert done.returncode == 0, done.stdout
    assert told(run) == [
        "trackio: cannot be started, and is left out: RuntimeError: built for another Python"
    ]
    assert_holds(tracking.tensorboard(run / "tensorboard"), untouched)


WITHOUT = """
import sys
sys.modules["wandb"] = None
from keepstep.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--track.to=wandb"],
            "--track.to: 'wandb' needs the package wandb, which is not installed:"
            " pip install keepstep[trackers]",
        ),
        (
            ["--track.to=tensorbord"],
            "--track.to: must name tensorboard or wandb or trackio, not 'tensorbord'; did you mean"
            " `tensorboard`?",
        ),
        (["--track.to=['trackio', 'trackio']"], "--track.to: names 'trackio' twice"),
        (["--track.wait=0s"], "--track.wait: must be more than 0 and at most a year, not '0s'"),
        (
            ["--track.project=a/b"],
            "--track.project: must be letters, digits, `.`, `_` and `-`, not 'a/b'",
        ),
        (
            ["--track.to=tensorboard", "--track.dir=/dev/null/x"],
            "--track.dir: /dev/null is a file, not a folder",
        ),
        (["--track.dir=a\tb"], "--track.dir: must be the name of a folder, not 'a\\tb'"),
    ],
)
def test_what_cannot_be_tracked_is_refused_before_anything_is_made(config, tmp_path, flags, said):
    words = ("train", config, f"--checkpoint.dir={tmp_path / 'run'}", *flags)
    (done,) = warm.run_together([warm.Job(words, code=WITHOUT)])
    assert done.returncode == 2
    assert done.stdout == f"error: {said}\n"
    assert not (tmp_path / "run").exists()
