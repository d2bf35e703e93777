"""The store alone, with a real folder: what comes back, what is refused, what is kept."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from keepstep.errors import (
    CheckpointDamaged,
    Locked,
    NotFound,
    OtherRun,
    UnsafeState,
    UsageError,
)
from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.tensors import PIECE_BYTES_MAX, _ranges


def save(folder, state, *, step=1, **more):
    with Store(folder) as store:
        store.restore()
        return store.save(state, step=step, **more)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def test_every_type_of_tensor_comes_back_bit_for_bit(tmp_path):
    raw = torch.arange(64, dtype=torch.uint8) % 2
    state = {str(dtype): raw.view(dtype).reshape(2, -1) for dtype in DTYPES}
    saved = save(tmp_path, {"tensors": state})
    found = load_state(saved.path)["tensors"]
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_odd_tensors_come_back_as_they_were(tmp_path):
    base = torch.randn(6, 8)
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    found = load_state(save(tmp_path, state).path)
    for name, tensor in state.items():
        assert found[name].shape == tensor.shape
        bits = tensor.detach().contiguous().flatten().view(torch.uint8)
        assert torch.equal(found[name].flatten().view(torch.uint8), bits)


def test_plain_state_comes_back_type_by_type(tmp_path):
    state = {
        "none": None, "true": True, "int": 2**200, "float": 0.1, "nan": math.nan,
        "inf": -math.inf, "text": "ä\n\"$", "tuple": (1, (2.0, "x")), "list": [1, [None]],
        "keys": {1: "a", (2, 3): "b", None: "c", 1.5: "d"}, "$dollar": {"$tensor": "no tensor"},
        "empty": {}, "nested": {"$tuple": [1]},
    }  # fmt: skip
    found = load_state(save(tmp_path, state).path)
    assert math.isnan(found.pop("nan"))
    state.pop("nan")
    assert found == state
    assert [type(value) for value in found.values()] == [type(v) for v in state.values()]


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (Custom(), "Custom"),
        (lambda: 0, "function"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (torch.float32, "dtype"),
        (torch.randn(3, 3).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "strided"),
    ],
)
def test_what_no_checkpoint_may_hold_is_refused_by_name_and_nothing_is_written(
    tmp_path, value, word
):
    with pytest.raises(UnsafeState, match=word) as error:
        save(tmp_path, {"model": {"deep": [value]}})
    assert "model" in str(error.value)
    assert "deep" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(100, 100)
    saved = save(tmp_path, {"a": weight, "b": {"again": weight}, "part": weight[:50]})
    assert [tensor.name for tensor in saved.manifest.tensors] == ["a", "part"]
    found = load_state(saved.path)
    assert found["a"] is found["b"]["again"]


def test_names_that_meet_when_joined_do_not_mix(tmp_path):
    state = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    found = load_state(save(tmp_path, state).path)
    assert found["a"]["b"].item() == 0
    assert found["a.b"].item() == 1


def test_the_data_file_opens_with_the_safetensors_library(tmp_path):
    from safetensors.torch import load_file

    state = {"w": torch.randn(5, 3), "h": torch.randn(7).bfloat16(), "n": torch.tensor(4)}
    saved = save(tmp_path, state)
    path = saved.path / "rank-00000.safetensors"
    found = load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0


@pytest.mark.parametrize("shape", [(3, 20_000_000), (40_000_000,), (2, 2, 20_000_000), ()])
def test_large_tensors_are_cut_into_pieces_that_cover_them(shape):
    end, total = 0, math.prod(shape) * 4
    for offset, part, start, stop in _ranges(shape, 4):
        assert start == end
        assert stop - start == math.prod(part) * 4 <= PIECE_BYTES_MAX
        assert len(offset) == len(part) == len(shape)
        end = stop
    assert end == total


def test_a_tensor_of_several_pieces_comes_back(tmp_path):
    tensor = torch.arange(20_000_000, dtype=torch.int32).reshape(4, -1)
    saved = save(tmp_path, {"t": tensor})
    assert len(saved.manifest.tensors[0].pieces) == 2
    assert torch.equal(load_state(saved.path)["t"], tensor)


def test_only_the_wanted_part_is_read(tmp_path):
    saved = save(tmp_path, {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}})
    assert list(load_state(saved.path, only="model")) == ["model"]
    with pytest.raises(CheckpointDamaged, match="optimiser"):
        load_state(saved.path, only="optimiser")


def test_saving_the_same_state_again_changes_nothing(tmp_path):
    state = {"w": torch.ones(3)}
    with Store(tmp_path) as store:
        first = store.save(state, step=1)
        before = (first.path / "manifest.json").stat().st_mtime_ns
        again = store.save(state, step=1)
        assert (first.new, again.new) == (True, False)
        assert (first.path / "manifest.json").stat().st_mtime_ns == before
        other = store.save({"w": torch.zeros(3)}, step=1)
        assert other.new
    assert torch.equal(load_state(other.path)["w"], torch.zeros(3))
    assert torch.equal(load_state(tmp_path / "aside" / "step_1")["w"], torch.ones(3))


def test_a_folder_with_checkpoints_is_not_saved_into_before_it_was_looked_at(tmp_path):
    save(tmp_path, {"w": torch.ones(1)})
    with Store(tmp_path) as store:
        with pytest.raises(UsageError, match="restore"):
            store.save({"w": torch.ones(1)}, step=2)
        with pytest.raises(UsageError, match="fresh start"):
            store.restore("fresh")
        with pytest.raises(NotFound, match="step 7"):
            store.restore(7)


@pytest.mark.parametrize("choice", ["best", "2", "oldest", None])
def test_what_cannot_be_restored_is_not_taken_for_the_newest(tmp_path, choice):
    save(tmp_path, {"w": torch.ones(1)})
    with Store(tmp_path) as store, pytest.raises(UsageError, match="cannot be restored"):
        store.restore(choice)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"layout": "file"}, "layout is 'file'"),
        ({"commit_method": "renam"}, "commit_method is 'renam'"),
        ({"save_retries": -1}, "save_retries is -1"),
        ({"save_retries": "x"}, "save_retries is 'x'"),
        ({"keep_last_n": "3"}, "keep_last_n is '3'"),
        ({"keep_last_n": 2.5}, "keep_last_n is 2.5"),
    ],
)
def test_values_that_mean_nothing_are_refused(tmp_path, wrong, text):
    with pytest.raises((UsageError, ValueError), match=text):
        Store(tmp_path, **wrong)


def test_a_folder_that_was_deleted_and_made_anew_is_not_saved_into(tmp_path):
    folder = tmp_path / "run"
    with Store(folder) as first:
        first.restore()
        first.save({"w": torch.ones(1)}, step=1)
        shutil.rmtree(folder)
        with pytest.raises(Locked, match="was deleted or replaced"):
            first.save({"w": torch.ones(1)}, step=2)
        folder.mkdir()
        (folder / "lock").write_text("another session's")
        with pytest.raises(Locked, match="was deleted or replaced"):
            first.save({"w": torch.ones(1)}, step=2)
    assert list(folder.iterdir()) == [folder / "lock"]


def test_another_identity_is_refused_with_the_difference_before_anything_moves(tmp_path):
    save(tmp_path, {"w": torch.ones(1)}, must_match={"seed": 1, "same": "x"})
    with Store(tmp_path) as store, pytest.raises(OtherRun) as error:
        store.restore(must_match={"seed": 2, "same": "x", "new": 3})
    assert "seed: saved 1, now 2" in str(error.value)
    assert "new: saved '(nothing)', now 3" in str(error.value)
    assert "same: " not in str(error.value)


def test_a_checkpoint_of_another_run_of_the_same_config_is_refused(tmp_path):
    save(tmp_path / "mine", {"w": torch.ones(1)}, step=1, must_match={"seed": 1})
    other = save(tmp_path / "other", {"w": torch.zeros(1)}, step=3, must_match={"seed": 1})
    other.path.rename(tmp_path / "mine" / "step_3")
    with Store(tmp_path / "mine") as store, pytest.raises(OtherRun, match="of another run"):
        store.restore(must_match={"seed": 1})
    assert [entry.step for entry in list_checkpoints(tmp_path / "mine")] == [1, 3]


def test_the_best_is_never_nan_never_worse_and_a_tie_keeps_the_older(tmp_path):
    values = [3.0, math.nan, 2.0, 2.0, math.inf, 2.5, -math.inf]
    with Store(tmp_path, keep_last_n=0, best_metric="loss") as store:
        for step, value in enumerate(values, start=1):
            store.save({"w": torch.tensor(step)}, step=step, metrics={"loss": value})
        assert (store.best.step, store.best.value) == (3, 2.0)
    with Store(tmp_path, best_metric="loss") as store:
        store.restore()
        assert store.best.step == 3
        store.save({"w": torch.tensor(8)}, step=8, metrics={"loss": 2.1})
        assert store.best.step == 3
        assert store.mark_best({"loss": 1.0}, step=8)
    assert (tmp_path / "best").readlink().name == "step_8"


def test_the_best_stays_when_retention_would_take_it(tmp_path):
    with Store(tmp_path, keep_last_n=1, best_metric="acc", best_mode="max") as store:
        for step, value in enumerate([0.1, 0.9, 0.5, 0.6], start=1):
            store.save({"w": torch.tensor(step)}, step=step, metrics={"acc": value})
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [2, 4]


def test_going_back_sets_the_later_ones_aside_and_best_with_them(tmp_path):
    with Store(tmp_path, keep_last_n=0, best_metric="loss") as store:
        for step in range(1, 5):
            store.save({"w": torch.tensor(step)}, step=step, metrics={"loss": 5.0 - step})
    with Store(tmp_path, keep_last_n=0, best_metric="loss") as store:
        found = store.restore(2)
        assert found.set_aside == ("step_3", "step_4")
        assert store.best.step == 2
        saved = store.save({"w": torch.tensor(33)}, step=3, metrics={"loss": 9.0})
        assert saved.manifest.sequence == 5, "a number is never given twice"
        assert saved.manifest.parent == 2
    assert (tmp_path / "best").readlink().name == "step_2"
    assert (tmp_path / "latest").readlink().name == "step_3"


def test_links_are_put_right_at_the_next_start(tmp_path):
    save(tmp_path, {"w": torch.ones(1)}, step=4)
    (tmp_path / "latest").unlink()
    os.symlink("step_99", tmp_path / "latest")
    with Store(tmp_path) as store:
        assert store.restore().manifest.step == 4
    assert (tmp_path / "latest").readlink().name == "step_4"


def test_two_stores_do_not_hold_one_folder(tmp_path):
    with Store(tmp_path):
        with pytest.raises(Locked, match=str(os.getpid())):
            Store(tmp_path).open()
        code = "import sys; from keepstep.store import Store; Store(sys.argv[1]).open()"
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
        )
        assert f"process {os.getpid()} on" in other.stderr
    with Store(tmp_path):
        pass


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    """Data workers are such children; a lock of the kind of flock would stay with them."""
    code = """
import os, sys
from keepstep.store import Store
Store(sys.argv[1]).open()
if os.fork() == 0:
    os.read(0, 1)
    os._exit(0)
print("held", flush=True)
os.kill(os.getpid(), 9)
"""
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=read, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout.readline() == b"held\n"
        parent.wait()
        with Store(tmp_path):
            os.write(write, b"x")
    os.close(read)
    os.close(write)


def test_every_flipped_byte_of_a_checkpoint_is_found(tmp_path):
    saved = save(tmp_path, {"w": torch.ones(3), "b": torch.zeros(2).bool()})
    for path in saved.path.iterdir():
        data = path.read_bytes()
        for place in range(0, len(data), 7):
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            assert verify(list_checkpoints(tmp_path)[0]), (path.name, place)
        path.write_bytes(data)
    assert verify(list_checkpoints(tmp_path)[0]) == []


def test_new_files_obey_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        saved = save(tmp_path, {"w": torch.ones(1)})
    finally:
        os.umask(before)
    assert (saved.path / "manifest.json").stat().st_mode & 0o777 == 0o640
    assert saved.path.stat().st_mode & 0o777 == 0o750


def test_importing_the_store_imports_no_torch():
    code = "import sys, keepstep.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
