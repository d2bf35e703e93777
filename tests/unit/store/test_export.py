"""Formats of others, out and in: whole or absent, every value the same, and no code is run."""

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from keepstep.errors import CheckpointDamaged, UnsafeState, UsageError
from keepstep.store.bring_in import read_weights
from keepstep.store.disk import Disk
from keepstep.store.export import WRITERS, _DcpIndex, write_out
from tests.helpers.command import environment
from tests.helpers.recording_disk import FailingDisk, RecordingDisk

LOAD_DCP = """
import sys, torch
from torch.distributed.checkpoint import load
state = {"model": {"w": torch.zeros(2, 3)}, "counters": {"step": 0}}
load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert torch.equal(state["model"]["w"], torch.arange(6.0).reshape(2, 3)), state
assert state["counters"] == {"step": 7}, state
"""


def weights():
    w = torch.arange(6.0).reshape(2, 3)
    return {"w": w, "half": torch.ones(3, dtype=torch.bfloat16), "tied": w, "one": torch.tensor(1)}


def whole():
    return {"model": weights(), "optimizer": {"betas": (0.9, 0.95)}, "counters": {"step": 7}}


def written(folder: Path, name: str, *, disk: Disk | None = None) -> Path:
    output, state = folder / f"out.{name}", weights() if name == "safetensors" else whole()
    used = disk or Disk()
    write_out(output, lambda path: WRITERS[name](state, path, used), disk=used)
    return output


def same(found):
    return set(found) == set(weights()) and all(
        torch.equal(found[n], w) and found[n].dtype == w.dtype for n, w in weights().items()
    )


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_weights_come_back_as_they_went_out(tmp_path, name):
    found, others = read_weights(written(tmp_path, name))
    assert same(found)
    assert set(others) == (set() if name == "safetensors" else {"optimizer", "counters"})


def test_torch_reads_the_pth_without_trusting_it_and_ties_stay_tied(tmp_path):
    found = torch.load(written(tmp_path, "pth"), weights_only=True)
    assert found["optimizer"] == {"betas": (0.9, 0.95)}
    assert found["model"]["w"].data_ptr() == found["model"]["tied"].data_ptr()


def test_torch_s_own_load_reads_the_dcp_folder(tmp_path):
    output = written(tmp_path, "dcp")
    words = [sys.executable, "-c", LOAD_DCP, str(output)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_safetensors_file_has_every_name(tmp_path):
    assert same(load_file(written(tmp_path, "safetensors")))


def test_a_safetensors_file_of_what_is_no_tensor_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="optimizer is a dict"):
        write_out(
            tmp_path / "out",
            lambda path: WRITERS["safetensors"]({"optimizer": {}}, path, Disk()),
            disk=Disk(),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_name_that_is_taken_is_never_written_over(tmp_path, name):
    class Late(Disk):
        """Something takes the name when all but the last rename is done."""

        def operation(self, what, path):
            if what == "rename" and path.name == f"out.{name}":
                path.write_text("mine")

    (tmp_path / "before").mkdir()
    (tmp_path / "before" / f"out.{name}").symlink_to("nowhere")
    for folder, disk in (("before", Disk()), ("late", Late())):
        with pytest.raises(UsageError, match="is there already"):
            written(tmp_path / folder, name, disk=disk)
        assert [p.name for p in (tmp_path / folder).iterdir()] == [f"out.{name}"]
    assert (tmp_path / "late" / f"out.{name}").read_text() == "mine"


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_what_is_written_is_durable_before_it_has_its_name(tmp_path, name):
    disk = RecordingDisk()
    output = written(tmp_path, name, disk=disk)
    renamed = disk.log.index(("rename", output.name))
    synced = {path for what, path in disk.log[:renamed] if what == "sync"}
    files = {p.name for p in output.iterdir()} if output.is_dir() else set()
    assert files <= synced
    assert len(synced) >= 1
    assert disk.log[renamed + 1] == ("sync_folder", tmp_path.name)
    if output.is_dir():
        assert disk.log[renamed - 1][0] == "sync_folder"


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_disk_that_fails_at_any_operation_leaves_nothing(tmp_path, name):
    counting = FailingDisk(at=0, number=0)
    (tmp_path / "count").mkdir()
    written(tmp_path / "count", name, disk=counting)
    for at in range(1, counting.count + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        with pytest.raises(OSError, match="No space"):
            written(folder, name, disk=FailingDisk(at=at, number=errno.ENOSPC))
        # After the rename it is whole; only the folder's sync can still fail.
        left = [p.name for p in folder.iterdir()]
        assert left == ([f"out.{name}"] if at == counting.count else []), at


def index_of(folder):
    with (folder / ".metadata").open("rb") as file:
        return _DcpIndex(file).load()


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/keepstep-was-run",))


@pytest.fixture
def unharmed():
    mark = Path("/tmp/keepstep-was-run")
    assert not mark.exists()
    yield
    harmed = mark.exists()
    if harmed:
        mark.rmdir()
    assert not harmed, "the file has run code"


def test_a_pth_that_would_run_code_is_refused(tmp_path, unharmed):
    torch.save({"model": {"w": torch.ones(1)}, "x": Evil()}, tmp_path / "a.pth")
    with pytest.raises(UnsafeState, match="more than tensors and plain values"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("where", ["all", "planner", "storage"])
def test_a_dcp_index_that_would_run_code_is_refused(tmp_path, unharmed, where):
    folder = written(tmp_path, "dcp")
    index = index_of(folder)
    if where == "planner":
        index.planner_data = Evil()
    if where == "storage":
        index.storage_data = {"x": Evil()}
    (folder / ".metadata").write_bytes(pickle.dumps(Evil() if where == "all" else index))
    with pytest.raises(CheckpointDamaged, match=r"names posix\.mkdir"):
        read_weights(folder)


def test_what_is_pickled_in_a_dcp_folder_besides_tensors_is_not_opened(tmp_path, unharmed):
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = tmp_path / "dcp"
    with pytest.warns(UserWarning, match="single process"):
        save({"model": weights(), "x": Evil()}, checkpoint_id=folder, no_dist=True)
    found, others = read_weights(folder)
    assert same(found)
    assert others == ["x"]


def test_a_dcp_index_that_leads_out_of_its_folder_is_refused(tmp_path):
    folder = written(tmp_path, "dcp")
    index = index_of(folder)
    for place in index.storage_data.values():
        place.relative_path = f"../{folder.name}/{place.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointDamaged, match="outside its folder"):
        read_weights(folder)


@pytest.mark.parametrize("size", [(1 << 40,), (-4, 1 << 40)])
def test_a_dcp_index_of_absurd_sizes_allocates_nothing(tmp_path, size):
    size = torch.Size(size)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    entry = TensorStorageMetadata(TensorProperties(), size, [chunk])
    index = Metadata({"w": entry, "b": BytesStorageMetadata()}, {}, {})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointDamaged, match=r"bytes; the folder holds|negative size"):
        read_weights(tmp_path)


def test_a_dcp_folder_that_was_cut_short_is_damage(tmp_path):
    folder = written(tmp_path, "dcp")
    (data,) = folder.glob("*.distcp")
    (folder / "padding").write_bytes(bytes(data.stat().st_size))
    data.write_bytes(data.read_bytes()[:700])
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        read_weights(folder)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_file_that_was_cut_short_is_damage(tmp_path, suffix):
    path = written(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointDamaged, match="no whole"):
        read_weights(path)


def test_a_flat_dcp_folder_of_names_with_dots_is_one_table(tmp_path):
    state = {"model.norm": torch.ones(2), "lm_head": torch.zeros(2)}
    write_out(tmp_path / "d", lambda p: WRITERS["dcp"](state, p, Disk()), disk=Disk())
    assert read_weights(tmp_path / "d")[0].keys() == state.keys()


@pytest.mark.parametrize("name", ["../away.safetensors", "/etc/x.safetensors", "", 3])
def test_an_index_of_shards_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    import json

    index = json.dumps({"weight_map": {"w": name}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointDamaged, match="outside its folder"):
        read_weights(tmp_path)


def test_where_the_weights_are_can_be_said_and_must_be_tensors(tmp_path):
    torch.save({"ema": {"w": torch.ones(1)}, "step": 3}, tmp_path / "a.pth")
    found, others = read_weights(tmp_path / "a.pth", key="ema")
    assert (list(found), others) == (["w"], ["step"])
    with pytest.raises(UsageError, match="'ema' is a dict"):
        read_weights(tmp_path / "a.pth")
    with pytest.raises(UsageError, match="holds no 'model'"):
        read_weights(tmp_path / "a.pth", key="model")
