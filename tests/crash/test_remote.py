"""A death at every request to a remote, and a machine that is lost with its disk."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.remote import ObjectStore
from tests.helpers.child import in_a_child
from tests.helpers.command import Session, digests, events, keepstep, losses, steps
from tests.helpers.crash import SHORT
from tests.helpers.recording_objects import DyingObjects
from tests.helpers.s3 import gated_server

LAST = 3


def live(folder: Path, remote: ObjectStore | str, acknowledged: Callable[[int], None]) -> None:
    """Save on to the last step; the second one is the best, and the first one is deleted."""
    with Store(folder, remote=remote, keep_last_n=1, best_metric="loss", save_retries=0) as store:
        found = store.restore()
        for step in range(found.manifest.step + 1 if found else 1, LAST + 1):
            state = {"weight": torch.full((8,), float(step)), "step": step}
            store.save(state, step=step, metrics={"loss": abs(step - 2.0)})
            acknowledged(step)


def assert_sound(folder: Path, url: str, acknowledged: int) -> None:
    """A machine without a disk finds what was acknowledged, or the one after it, whole."""
    with Store(folder, remote=url, keep_last_n=1, best_metric="loss") as store:
        found = store.restore()
        newest = found.manifest.step if found else 0
        assert acknowledged <= newest <= acknowledged + 1
        if found:
            assert store.best.step == min(newest, 2)
    for entry in list_checkpoints(folder):
        assert verify(entry) == []
        assert load_state(entry.path)["step"] == entry.step


def test_a_death_at_every_request_loses_nothing_that_was_acknowledged(tmp_path):
    number, alive = 0, False
    while not alive:
        number += 1
        place = tmp_path / str(number)
        (place / "objects").mkdir(parents=True)
        url, told = f"file://{place}/objects", place / "told"
        told.write_text("0")

        def work(place=place, url=url, told=told, number=number) -> None:
            live(place / "run", DyingObjects(url, number), lambda step: told.write_text(str(step)))

        status = in_a_child(work)
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        # A copy: the look of the new machine must not help the old one, whose disk is still there.
        shutil.copytree(place / "objects", place / "copy", dirs_exist_ok=True)
        assert_sound(place / "new", f"file://{place}/copy", int(told.read_text()))
        live(place / "run", url, lambda _: None)
        assert_sound(place / "last", url, LAST)
        left = {path.parent.name for path in (place / "objects").rglob("rank-*")}
        whole = {path.parent.name for path in (place / "objects").rglob("manifest.json")}
        assert left == whole
        shutil.rmtree(place)
    assert number > 20


def test_a_death_at_every_request_of_a_new_machine_loses_nothing(tmp_path):
    """It fetches the newest and the best."""
    url, number, alive = f"file://{tmp_path}/objects", 0, False
    (tmp_path / "objects").mkdir()
    live(tmp_path / "old", url, lambda _: None)
    while not alive:
        number += 1
        place = tmp_path / str(number)
        status = in_a_child(lambda: live(place, DyingObjects(url, number), lambda _: None))  # noqa: B023
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        assert_sound(place, url, LAST)
    assert number > 10


def test_a_machine_lost_with_its_disk_in_the_middle_of_an_upload_is_continued_by_the_next(
    config, short_reference, tmp_path
):
    """The manifest of step 4 is on its way when the machine dies, and its folder with it."""
    run = tmp_path / "run"
    words = ("train", config, f"--checkpoint.dir={run}", "--checkpoint.remote=s3://bucket/run")
    with gated_server() as (server, gate):
        server.make_bucket("bucket")
        with Session(*words, *SHORT) as session:

            def rule(method: str, path: str) -> str | None:
                if method == "PUT" and "/step_4-" in path and "manifest.json" in path:
                    session.kill_group()
                    return "cut"
                return None

            gate.rule = rule
            assert session.end() == -signal.SIGKILL, session.output
            assert "hidden-secret" not in session.output
        gate.rule = lambda _method, _path: None
        assert steps(run)[-1] == 4
        shutil.rmtree(run)
        done = keepstep(*words, *SHORT)
        assert done.returncode == 0, done.stdout
    assert [event["step"] for event in events(run, "resumed")] == [2]
    assert "fetched, every byte verified" in done.stdout
    assert "was left by a session that died" in done.stdout
    assert digests(run, 6) == digests(short_reference, 6)
    assert losses(run) == losses(short_reference)[2:]
    assert (run / "best").readlink() == (short_reference / "best").readlink()
