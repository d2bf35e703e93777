"""A process that dies, or a disk that fails, at every operation of saves that link."""

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.errors import SaveFailed
from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.disk import Disk
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import DyingDisk, FailingDisk

FROZEN = "rank-00000-frozen.safetensors"
ENCODER = torch.arange(1 << 18, dtype=torch.float32)


def live(folder: Path, disk: Disk, acknowledged: Callable[[int], None], **options: Any) -> None:
    """Restore, and save on to step 8: linked, thawed at step 6, frozen again."""
    with Store(folder, disk=disk, keep_last_n=2, **options) as store:
        found = store.restore()
        first = found.manifest.step + 1 if found else 1
        for step in range(first, 9):
            store.save(state_of(step), step=step)
            acknowledged(step)


def state_of(step: int) -> dict[str, Any]:
    encoder = ENCODER if step < 6 else ENCODER + 1
    return {"encoder": encoder, "head": torch.full((64,), float(step)), "step": step}


def assert_sound(folder: Path, acknowledged: int) -> int:
    entries = list_checkpoints(folder)
    for entry in entries:
        assert verify(entry) == [], entry
        state = load_state(entry.path)
        assert all(torch.equal(state[k], state_of(entry.step)[k]) for k in ("encoder", "head"))
    newest = max((entry.step for entry in entries), default=0)
    assert newest >= acknowledged
    return newest


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of three steps, whose frozen weights have a file of their own."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    with Store(folder, keep_last_n=2) as store:
        for step in range(1, 4):
            store.save(state_of(step), step=step)
    assert (folder / "step_3" / FROZEN).exists()
    return folder


def test_a_death_at_every_operation_loses_nothing_that_was_acknowledged(begun, tmp_path):
    number, alive = 0, False
    while not alive:
        number += 1
        folder, told = tmp_path / str(number), tmp_path / f"{number}.ack"
        shutil.copytree(begun, folder, symlinks=True)
        told.write_text("3")

        def work(folder=folder, number=number, note=told.write_text) -> None:
            live(folder, DyingDisk(number), lambda step: note(str(step)))

        status = in_a_child(work)
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        assert_sound(folder, int(told.read_text()))
        live(folder, Disk(), lambda step: None)
        assert assert_sound(folder, 8) == 8
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        shutil.rmtree(folder)
    assert number > 100, "the store's life has more operations than that"


def test_an_error_at_every_operation_leaves_every_older_checkpoint_whole(begun, tmp_path):
    number, reached = 0, True
    while reached:
        number += 1
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder, symlinks=True)
        disk, acknowledged = FailingDisk(number, errno.EIO), [3]
        with contextlib.suppress(SaveFailed, OSError):
            live(folder, disk, acknowledged.append, save_retries=0)
        assert_sound(folder, acknowledged[-1])
        live(folder, Disk(), lambda step: None)
        assert assert_sound(folder, 8) == 8
        reached = disk.count >= number
        shutil.rmtree(folder)
    assert number > 100
