"""The order in which a checkpoint becomes durable: each sync and rename stands where it must."""

import re
from pathlib import Path

import pytest
import torch

from keepstep.store import Store, list_checkpoints, verify
from tests.helpers.recording_disk import PoorRecordingDisk, RecordingDisk

STATE = {"model": {"weight": torch.arange(6.0)}, "note": "first"}


def recorded(tmp_path: Path) -> list[tuple[str, str]]:
    disk = RecordingDisk()
    with Store(tmp_path, disk=disk) as store:
        store.save(STATE, step=1)
        disk.log.clear()
        store.save({**STATE, "note": "second"}, step=2)
    return [(name, re.sub(r"-[0-9a-f]{16}", "-ID", path)) for name, path in disk.log]


def test_a_save_does_these_operations_in_this_order_and_no_others(tmp_path):
    assert recorded(tmp_path) == [
        ("make_folder", ".staging-2-ID"),
        ("create", "rank-00000.safetensors"),
        ("write", "rank-00000.safetensors"),
        ("sync", "rank-00000.safetensors"),
        ("close", "rank-00000.safetensors"),
        ("sync_folder", ".staging-2-ID"),
        ("create", ".manifest.json-ID.tmp"),
        ("write", ".manifest.json-ID.tmp"),
        ("sync", ".manifest.json-ID.tmp"),
        ("close", ".manifest.json-ID.tmp"),
        ("rename", "manifest.json"),
        ("sync_folder", ".staging-2-ID"),
        ("rename", "step_2"),
        ("sync_folder", tmp_path.name),
        ("symlink", ".latest-ID.tmp"),
        ("rename", "latest"),
        ("sync_folder", tmp_path.name),
    ]


def test_where_folders_cannot_be_renamed_a_save_does_these_operations_in_this_order(tmp_path):
    """And the delete of the older one: hidden, durably, before its first file goes."""
    disk = PoorRecordingDisk()
    with Store(tmp_path, disk=disk, keep_last_n=1) as store:
        store.save(STATE, step=1)
        disk.log.clear()
        store.save({**STATE, "note": "second"}, step=2)
    found = [(name, re.sub(r"-[0-9a-f]{16}", "-ID", path)) for name, path in disk.log]
    assert found == [
        ("create", ".unfinished-step_2"),
        ("sync", ".unfinished-step_2"),
        ("close", ".unfinished-step_2"),
        ("sync_folder", tmp_path.name),
        ("make_folder", "step_2"),
        ("create", "rank-00000.safetensors"),
        ("write", "rank-00000.safetensors"),
        ("sync", "rank-00000.safetensors"),
        ("close", "rank-00000.safetensors"),
        ("sync_folder", "step_2"),
        ("create", ".manifest.json-ID.tmp"),
        ("write", ".manifest.json-ID.tmp"),
        ("sync", ".manifest.json-ID.tmp"),
        ("close", ".manifest.json-ID.tmp"),
        ("rename", "manifest.json"),
        ("sync_folder", "step_2"),
        ("unlink", ".unfinished-step_2"),
        ("sync_folder", tmp_path.name),
        ("create", ".latest-ID.tmp"),
        ("write", ".latest-ID.tmp"),
        ("sync", ".latest-ID.tmp"),
        ("close", ".latest-ID.tmp"),
        ("rename", "latest"),
        ("sync_folder", tmp_path.name),
        ("create", ".unfinished-step_1"),
        ("sync", ".unfinished-step_1"),
        ("close", ".unfinished-step_1"),
        ("sync_folder", tmp_path.name),
        ("unlink", "manifest.json"),
        ("unlink", "rank-00000.safetensors"),
        ("remove_folder", "step_1"),
        ("sync_folder", tmp_path.name),
        ("unlink", ".unfinished-step_1"),
    ]


def test_a_save_is_announced_as_committed_only_after_the_parent_is_synced(tmp_path):
    disk, at = RecordingDisk(), []

    def on_event(event: str, **facts: object) -> None:
        if event == "committed":
            at.append(list(disk.log))

    with Store(tmp_path, disk=disk, on_event=on_event) as store:
        store.save(STATE, step=1)
    (before,) = at
    assert before[-2:] == [("rename", "step_1"), ("sync_folder", tmp_path.name)]


def test_a_delete_is_durably_invisible_before_its_first_file_goes(tmp_path):
    disk = RecordingDisk()
    with Store(tmp_path, disk=disk, keep_last_n=1) as store:
        store.save(STATE, step=1)
        disk.log.clear()
        store.save({**STATE, "note": "second"}, step=2)
    names = [name for name, _ in disk.log]
    first_gone = names.index("unlink")
    trash = [n for n, path in enumerate(disk.log) if path[1].startswith(".trash-")]
    assert disk.log[trash[0]][0] == "rename"
    assert disk.log[trash[0] + 1] == ("sync_folder", tmp_path.name)
    assert trash[0] + 1 < first_gone
    committed = disk.log.index(("rename", "step_2"))
    assert committed < trash[0], "the old one may go only after the new one is durable"


def test_a_replaced_step_is_never_without_its_name(tmp_path):
    disk = RecordingDisk()
    with Store(tmp_path, disk=disk) as store:
        store.save(STATE, step=1)
        disk.log.clear()
        store.save({**STATE, "note": "other"}, step=1)
    names = [name for name, path in disk.log if path == "step_1"]
    # Into `aside/`, where it is not chosen, and from there into the place of the old one.
    assert names == ["rename", "exchange"]
    assert [entry.path.parent.name for entry in list_checkpoints(tmp_path, aside=True)] == [
        tmp_path.name,
        "aside",
    ]


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_failed_sync_of_the_parent_begins_again_with_new_files(tmp_path, attempts):
    class Failing(RecordingDisk):
        left = attempts

        def sync_folder(self, path: Path) -> None:
            super().sync_folder(path)
            if path == tmp_path and self.log[-2] == ("rename", "step_1") and self.left:
                self.left -= 1
                raise OSError(5, "Input/output error", str(path))

    disk = Failing()
    with Store(tmp_path, disk=disk, save_retries=2) as store:
        saved = store.save(STATE, step=1)
    assert saved.new
    assert disk.log.count(("create", "rank-00000.safetensors")) == attempts + 1
    assert disk.log.count(("rename", "step_1")) == attempts + 1
    assert verify(list_checkpoints(tmp_path)[0]) == []
