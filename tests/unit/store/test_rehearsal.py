"""The rehearsal of a save: what is wrong is told before the first step, and nothing is left."""

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from keepstep.config.schema import OptimizerConfig
from keepstep.errors import CannotSave, UnsafeState, UsageError
from keepstep.optim.optimizer import build_optimizer
from keepstep.state.training_state import TrainingState
from keepstep.store import Store, list_checkpoints
from keepstep.store.disk import Disk
from keepstep.store.rehearsal import Room
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import DyingDisk, FailingDisk, PoorDisk, RecordingDisk

STATE = {
    "weight": torch.zeros(1 << 18),
    "bias": torch.zeros(4),
    "half": torch.zeros(2, dtype=torch.bfloat16),
    "step": 0,
}


def rehearse(folder: Path, disk: Disk | None = None, state=STATE, **settings) -> Room:
    with Store(folder, disk=disk, **settings) as store:
        store.restore()
        return store.rehearse(state)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


@pytest.mark.parametrize("kind", [Disk, PoorDisk])
def test_a_small_state_is_saved_read_and_deleted_and_nothing_is_left(tmp_path, kind):
    room = rehearse(tmp_path, kind())
    assert room.fits > 3
    assert room.wanted == 3
    assert 1 << 20 <= room.checkpoint_bytes < 1.1 * (1 << 20)
    assert left_in(tmp_path) == []


def test_the_smallest_tensor_of_each_type_goes_the_way_of_a_real_save(tmp_path):
    sizes = []

    class Looking(RecordingDisk):
        def rename(self, old, new):
            super().rename(old, new)
            if new.name == "step_0":
                (entry,) = list_checkpoints(new.parent)
                sizes.append(sorted(tensor.name for tensor in entry.manifest.tensors))

    disk = Looking()
    rehearse(tmp_path, disk)
    assert sizes == [["bias", "half"]]
    assert {"symlink", "sync", "sync_folder", "allocate", "unlink"} <= {n for n, _ in disk.log}


def test_a_state_that_no_checkpoint_may_hold_is_named_before_the_first_step(tmp_path):
    with pytest.raises(UnsafeState, match=r"state\.hook"):
        rehearse(tmp_path, state={**STATE, "hook": object()})
    assert left_in(tmp_path) == []


def test_an_error_at_every_operation_is_told_and_leaves_nothing(tmp_path):
    number, met = 0, True
    while met:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        disk = FailingDisk(0, errno.EIO)
        with Store(folder, disk=disk) as store:
            store.restore()
            disk.count, disk.at = 0, number
            try:
                store.rehearse(STATE)
                met = disk.count >= number
                assert not met, f"operation {number} failed and nobody heard of it"
            except CannotSave as error:
                assert "Input/output error" in str(error)
                assert "No step was taken" in str(error)
        assert left_in(folder) == []
    assert number > 30


def test_a_death_at_every_operation_leaves_what_is_swept_and_is_never_a_checkpoint(tmp_path):
    number, alive = 0, False
    while not alive:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        alive = in_a_child(lambda f=folder, n=number: rehearse(f, DyingDisk(n))) == 0
        assert list_checkpoints(folder) == []
        with Store(folder) as store:
            assert store.restore() is None
        assert left_in(folder) == []
    assert number > 40


def test_what_comes_back_otherwise_than_it_was_saved_is_told(tmp_path):
    class Rotten(Disk):
        def write(self, descriptor, data, path):
            is_data = path.name.endswith(".safetensors")
            super().write(descriptor, b"\1" * len(data) if is_data else data, path)

    with pytest.raises(CannotSave, match="is not what was saved"):
        rehearse(tmp_path, Rotten())
    assert left_in(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_room_for_all_that_are_kept_and_one_more_is_asked_for(small_disk):
    with pytest.raises(CannotSave, match=r"no room for 3 more checkpoints: 3,\d+,\d+ bytes"):
        rehearse(small_disk, keep_last_n=2)
    assert left_in(small_disk) == []
    assert rehearse(small_disk, keep_last_n=0).fits == 2
    with Store(small_disk, keep_last_n=1) as store:
        store.restore()
        assert store.rehearse(STATE).wanted == 2
        store.save(STATE, step=1)
        # One more fits, and goes before this one does.
        room = store.rehearse(STATE)
        assert (room.fits, room.wanted) == (1, 1)
        (small_disk / "filler").write_bytes(b"x" * (1 << 20))
        with pytest.raises(CannotSave, match="no room for one more checkpoint: 1,"):
            store.rehearse(STATE)


def test_what_will_be_linked_needs_no_room(tmp_path):
    state = {"encoder": torch.arange(1 << 18), "n": 1}
    with Store(tmp_path, keep_last_n=1) as store:
        for step in (1, 2):
            store.save({**state, "head": torch.tensor(step)}, step=step)
        before = store.rehearse(state).checkpoint_bytes
        store.save({**state, "head": torch.tensor(3)}, step=3)
        assert store.newest.files[0].size > 2 << 20
        room = store.rehearse(state)
    assert room.checkpoint_bytes < 1 << 16 < 2 << 20 < before
    with Store(tmp_path, keep_last_n=1) as store:
        store.restore()
        assert store.rehearse(state).checkpoint_bytes == room.checkpoint_bytes


def test_in_single_files_such_a_file_is_rehearsed(tmp_path):
    disk = RecordingDisk()
    with Store(tmp_path, layout="files", disk=disk) as store:
        store.restore()
        store.rehearse({"w": torch.ones(3), "n": [1, {"a": 2}]})
    assert {("rename", "steps_0.pth"), ("rename", "latest.pth")} <= set(disk.log)
    assert left_in(tmp_path) == []


def test_a_limit_on_the_size_of_a_file_is_found(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
    try:
        with pytest.raises(CannotSave, match=r"bytes cannot be reserved: File too large"):
            rehearse(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_in(tmp_path) == []


def test_a_file_system_that_cannot_reserve_says_so(tmp_path):
    class Simple(Disk):
        def allocate(self, descriptor, count, path):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))

    assert not rehearse(tmp_path, Simple()).reserved


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_an_error_that_is_no_refusal_chooses_no_other_method(tmp_path, number):
    class Broken(Disk):
        def rename(self, old, new):
            if old.is_dir():
                raise OSError(number, os.strerror(number), str(new))
            super().rename(old, new)

    with pytest.raises(OSError, match=os.strerror(number)):
        rehearse(tmp_path, Broken())
    assert left_in(tmp_path) == []


def test_a_file_system_that_cannot_replace_a_file_is_refused(tmp_path):
    class NoRename(Disk):
        def rename(self, old, new):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(new))

    with pytest.raises(CannotSave, match="cannot replace a file by a rename"):
        rehearse(tmp_path, NoRename())
    assert left_in(tmp_path) == []


def test_a_method_that_is_asked_for_is_taken_or_refused(tmp_path):
    with pytest.raises(UsageError, match="manifest-last is for folders"):
        Store(tmp_path, commit_method="manifest-last", layout="files")
    with Store(tmp_path, commit_method="manifest-last") as store:
        assert store.save(STATE, step=1).manifest.commit_method == "manifest-last"
    with pytest.raises(CannotSave, match="cannot rename a folder"):
        rehearse(tmp_path / "poor", PoorDisk(), commit_method="rename")


def test_in_files_only_what_files_need_is_tried_and_said(tmp_path):
    told, disk = [], PoorDisk()
    with Store(
        tmp_path, layout="files", disk=disk, on_event=lambda e, **_: told.append(e)
    ) as store:
        store.restore()
        store.rehearse(STATE)
    assert str(disk.methods) == "rename"
    assert "methods" not in told


def test_a_key_that_files_need_for_themselves_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(UnsafeState, match="the state has a key 'keepstep'"):
        rehearse(tmp_path, state={**STATE, "keepstep": 1}, layout="files")
    rehearse(tmp_path, state={**STATE, "keepstep": 1})


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_moments_of_the_first_update_are_foreseen(tmp_path, name, frozen):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 3))
    state = TrainingState(model=model, optimizer=build_optimizer(OptimizerConfig(name=name), model))
    model[0].requires_grad_(not frozen)
    with Store(tmp_path) as store:
        store.restore()
        room = store.rehearse(state.capture(), bytes_to_come=state.optimizer.bytes_to_come())
        model(torch.ones(2, 128)).sum().backward()
        state.optimizer.step()
        saved = store.save(state.capture(), step=1)
    size = sum(path.stat().st_size for path in saved.path.iterdir())
    assert size <= room.checkpoint_bytes < 1.3 * size
    assert state.optimizer.bytes_to_come() == 0
