"""A process that dies, or a disk that fails, at every operation of a store's life."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keepstep.errors import SaveFailed
from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.disk import Disk
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import DyingDisk, FailingDisk


def state_of(step: int) -> dict[str, object]:
    return {"weight": torch.full((64,), float(step)), "step": step, "pair": (step, None)}


def live(
    folder: Path, disk: Disk, acknowledged: Callable[[int], None], *, wait: bool = True
) -> None:
    """Restore, and save on to step 5 with evaluation and retention."""
    with Store(folder, disk=disk, keep_last_n=2, best_metric="loss", save_retries=0) as store:
        found = store.restore()
        first = found.manifest.step + 1 if found else 1
        for step in range(first, 6):
            store.save(state_of(step), step=step, wait=wait, metrics={"loss": abs(step - 2.0)})
            if wait or store.collect() is not None:
                acknowledged(step)


def save_twice(folder: Path, disk: Disk, acknowledged: Callable[[int], None]) -> None:
    """Save step 1 in one state, and then again in another one, as after a rewind by hand."""
    with Store(folder, disk=disk, save_retries=0) as store:
        store.restore()
        for number in (10, 20):
            store.save(state_of(number), step=1)
            acknowledged(number)


def assert_sound(folder: Path, acknowledged: int) -> int:
    """Everything visible is whole and nothing acknowledged is lost; return the newest step."""
    entries = list_checkpoints(folder)
    for entry in entries:
        assert verify(entry) == [], entry
    newest = max((entry.step for entry in entries), default=0)
    assert newest >= acknowledged, f"step {acknowledged} was acknowledged, {newest} is there"
    with Store(folder, best_metric="loss") as store:
        found = store.restore()
        if newest:
            assert found.manifest.step == newest
            assert found.state["step"] == newest
            assert torch.equal(found.state["weight"], torch.full((64,), float(newest)))
            assert (folder / "latest").readlink().name == f"step_{newest}"
            best = 2 if newest >= 2 else 1
            assert store.best.step == best
            assert (folder / "best").readlink().name == f"step_{best}"
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
    return newest


@pytest.mark.parametrize("wait", [True, False])
def test_a_death_at_every_operation_loses_nothing_that_was_acknowledged(tmp_path, wait):
    """Also where a thread saves: it dies in the middle of its work like the rest."""
    number, alive = 0, False
    while not alive:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        acknowledgements = tmp_path / f"{number}.ack"
        acknowledgements.write_text("0")

        def work(folder=folder, number=number, told=acknowledgements) -> None:
            note = told.write_text
            live(folder, DyingDisk(number), lambda step: note(str(step)), wait=wait)

        status = in_a_child(work)
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        assert_sound(folder, int(acknowledgements.read_text()))
        # A second and a third session: the resume is killed as well, at another place.
        in_a_child(
            lambda folder=folder, number=number: live(
                folder, DyingDisk(1 + number % 23), lambda step: None
            )
        )
        assert in_a_child(lambda folder=folder: live(folder, Disk(), lambda step: None)) == 0
        assert assert_sound(folder, 5) == 5
        shutil.rmtree(folder)
    assert number > 80, "the store's life has more operations than that"


def assert_both_or_the_first(folder: Path, acknowledged: int) -> None:
    """Whichever has the name, the state that was acknowledged is there, visible or aside."""
    with Store(folder) as store:
        store.restore()
    entries = list_checkpoints(folder, aside=True)
    for entry in entries:
        assert verify(entry) == [], entry
    visible = [load_state(e.path)["step"] for e in entries if not e.aside]
    aside = [load_state(e.path)["step"] for e in entries if e.aside]
    if acknowledged >= 10:
        assert visible in ([10], [20])
        assert 10 in visible + aside, "the first one is gone"
    if acknowledged == 20:
        assert visible == [20]
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_a_step_saved_twice_keeps_both_states_whenever_the_process_dies(tmp_path):
    number, alive = 0, False
    while not alive:
        number += 1
        folder, told = tmp_path / str(number), tmp_path / f"{number}.ack"
        folder.mkdir()
        told.write_text("0")

        def work(folder=folder, number=number, told=told) -> None:
            save_twice(folder, DyingDisk(number), lambda state: told.write_text(str(state)))

        alive = in_a_child(work) == 0
        assert_both_or_the_first(folder, int(told.read_text()))
        shutil.rmtree(folder)
    assert number > 30


def test_a_step_saved_twice_keeps_both_states_whatever_fails(tmp_path):
    number, met = 0, True
    while met:
        number += 1
        folder, told = tmp_path / str(number), [0]
        folder.mkdir()
        disk = FailingDisk(number, errno.EIO)
        try:
            save_twice(folder, disk, told.append)
        except (OSError, SaveFailed):
            assert told[-1] < 20
        met = disk.count >= number
        assert_both_or_the_first(folder, told[-1])
        shutil.rmtree(folder)
    assert number > 30


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_at_every_operation_is_an_error_or_survived_and_loses_nothing(tmp_path, error):
    number, met = 0, True
    while met:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        disk, told = FailingDisk(number, error), [0]
        try:
            live(folder, disk, told.append)
            assert told[-1] == 5
        except (OSError, SaveFailed) as failure:
            assert os.strerror(error) in str(failure)
        met = disk.count >= number
        assert_sound(folder, told[-1])
        live(folder, Disk(), told.append)
        assert assert_sound(folder, 5) == 5
        shutil.rmtree(folder)
    assert number > 80


def test_a_save_is_tried_again_with_back_off_and_then_given_up(tmp_path, monkeypatch):
    from keepstep.store import attempts as module

    monkeypatch.setattr(module, "_BACK_OFF_SECONDS", (0.0,))

    class Broken(Disk):
        def sync(self, descriptor: int, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    heard = []
    with (
        Store(
            tmp_path, disk=Broken(), save_retries=2, on_event=lambda event, **_: heard.append(event)
        ) as store,
        pytest.raises(SaveFailed, match="Input/output error"),
    ):
        store.save(state_of(1), step=1)
    assert heard == ["snapshot", "retry", "retry"]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
