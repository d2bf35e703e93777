"""One `.pth` file: every damage is found, and nothing in it is ever run."""

import os
import random
import zipfile
from pathlib import Path

import pytest
import torch

from keepstep.errors import CheckpointDamaged, NotFound, UnsafeState
from keepstep.store import apply_best_valid_loss_floor, load_checkpoint, save_checkpoint_atomic
from tests.helpers.single_file import assert_is_state, content_of, state_of


def test_crcs_are_written_whatever_the_process_chose_for_its_other_saves(tmp_path):
    from torch.serialization import get_crc32_options, set_crc32_options

    set_crc32_options(False)
    try:
        save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
        assert get_crc32_options() is False
    finally:
        set_crc32_options(True)
    assert_is_state(load_checkpoint(tmp_path / "latest.pth"), 1)


class Custom:
    """Something that `weights_only` refuses."""


@pytest.mark.parametrize(
    ("value", "named"),
    [(Custom(), "Custom"), (Path("a"), "Path"), (lambda: 0, "lambda"), (open, "open")],
    ids=["object", "path", "lambda", "function"],
)
def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path, value, named):
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
    before = content_of(tmp_path)
    with pytest.raises(UnsafeState, match=named) as caught:
        save_checkpoint_atomic(tmp_path / "latest.pth", {"a": value})
    assert "plain values" in caught.value.hint
    assert content_of(tmp_path) == before


def test_a_part_of_a_sharded_tensor_is_refused_by_name(tmp_path):
    part = _dtensor()
    with pytest.raises(UnsafeState, match=r"state\.model\[0\]\.w is a sharded tensor"):
        save_checkpoint_atomic(tmp_path / "latest.pth", {"model": [{"w": part}]})
    assert not (tmp_path / "latest.pth").exists()


def _dtensor():
    """Return a DTensor in a world of one, which leaves no process group behind."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def test_of_a_thousand_flipped_bits_none_is_loaded_as_something_else(tmp_path):
    path = tmp_path / "latest.pth"
    state = {"w": torch.arange(500.0), "s": "text", "n": 7}
    save_checkpoint_atomic(path, state)
    whole, choose, found = path.read_bytes(), random.Random(20261201), 0
    for _ in range(1000):
        spoiled = bytearray(whole)
        spoiled[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        path.write_bytes(spoiled)
        try:
            loaded = load_checkpoint(path)
        except CheckpointDamaged:
            found += 1
            continue
        # What lies between the records means nothing.
        assert torch.equal(loaded["w"], state["w"])
        assert (loaded["s"], loaded["n"]) == ("text", 7)
    assert found > 500


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_damaged(tmp_path, fraction):
    path = tmp_path / "latest.pth"
    save_checkpoint_atomic(path, state_of(1))
    os.truncate(path, int(path.stat().st_size * fraction))
    with pytest.raises(CheckpointDamaged, match=r"latest\.pth is damaged") as caught:
        load_checkpoint(path)
    assert caught.value.hint


def test_a_missing_file_and_one_of_another_kind_are_clear_errors(tmp_path):
    with pytest.raises(NotFound, match="there is no file"):
        load_checkpoint(tmp_path / "latest.pth")
    with zipfile.ZipFile(tmp_path / "latest.pth", "w") as archive:
        archive.writestr("a/readme", "x")
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint of torch\.save"):
        load_checkpoint(tmp_path / "latest.pth")


def test_a_packed_archive_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "latest.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 50_000_000)
    with pytest.raises(CheckpointDamaged, match=r"record a/data\.pkl is packed"):
        load_checkpoint(path)


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path):
    proof = tmp_path / "it ran"

    class Malicious:
        def __reduce__(self):
            return (Path.touch, (proof,))

    torch.save({"step": 1, "payload": Malicious()}, tmp_path / "latest.pth")
    with pytest.raises(UnsafeState, match="was not loaded") as caught:
        load_checkpoint(tmp_path / "latest.pth")
    assert "run code" in caught.value.hint
    assert not proof.exists()
    # The same file does run where it is trusted: the proof is one.
    torch.load(tmp_path / "latest.pth", weights_only=False)
    assert proof.exists()
    proof.unlink()
    # Neither does a save run it, nor the look at the best.
    with pytest.raises(UnsafeState):
        save_checkpoint_atomic(tmp_path / "steps_1.pth", {"payload": Malicious()})
    (tmp_path / "latest.pth").rename(tmp_path / "best.pth")
    assert apply_best_valid_loss_floor({"best_valid_loss": 1.0}, tmp_path) == 1.0
    assert not proof.exists()
