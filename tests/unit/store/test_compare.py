"""Two checkpoints are equal where they hold the same state, bit for bit, and not otherwise."""

import math
from dataclasses import replace

import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.store import Store, list_checkpoints
from keepstep.store import tensors as tensors_module
from keepstep.store.compare import compare


def saved(folder, state, **facts):
    with Store(folder) as store:
        store.save(state, step=1, **facts)
    return list_checkpoints(folder)[0]


def pair(tmp_path, one, other):
    return saved(tmp_path / "a", one), saved(tmp_path / "b", other)


def test_the_same_state_saved_by_two_runs_is_equal_and_the_facts_are_shown(tmp_path):
    state = {"model": {"w": torch.arange(4.0)}, "rate": math.nan, "n": [1, (2, {})]}
    one = saved(tmp_path / "a", state, samples=3)
    found = compare(one, saved(tmp_path / "b", state, samples=4))
    assert found.equal
    assert found.tensors_compared == 1
    facts = {name: (a, b) for name, a, b in found.facts}
    assert facts["samples"] == (3, 4)
    assert "run_id" in facts


def test_each_way_in_which_tensors_differ_is_named(tmp_path):
    one = {"same": torch.ones(2), "v": torch.tensor([1.0, -2.0]), "t": torch.ones(2)}
    one |= {"s": torch.ones(2), "mine": torch.ones(1)}
    other = {"same": torch.ones(2), "v": torch.tensor([1.0, -1.0]), "t": torch.ones(2).double()}
    other |= {"s": torch.ones(3), "theirs": torch.ones(1)}
    found = compare(*pair(tmp_path, one, other), values=True)
    whats = {t.name: t.what for t in found.tensors}
    assert whats == {
        "mine": "only in the first",
        "theirs": "only in the second",
        "s": "shape [2] and [3]",
        "t": "type F32 and F64",
        "v": "values",
    }
    (v,) = [t for t in found.tensors if t.name == "v"]
    assert (v.max_abs, v.max_rel) == (1.0, 0.5)
    assert not found.equal


def test_bits_decide_and_not_values(tmp_path):
    found = compare(*pair(tmp_path, {"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}))
    assert not found.equal
    assert found.tensors[0].max_abs is None


def test_no_number_lies_apart_from_itself(tmp_path):
    a = torch.tensor([math.nan, math.inf, 1.0])
    b = torch.tensor([math.nan, math.inf, 3.0])
    (found,) = compare(*pair(tmp_path, {"w": a}, {"w": b}), values=True).tensors
    assert found.max_abs == 2.0
    assert found.max_rel == pytest.approx(2 / 3)


def test_a_number_where_one_has_none_is_not_measured_as_nothing(tmp_path):
    pairs = pair(tmp_path, {"w": torch.tensor([1.0])}, {"w": torch.tensor([math.nan])})
    (found,) = compare(*pairs, values=True).tensors
    assert math.isnan(found.max_abs)


def test_plain_values_differ_by_path_and_type(tmp_path):
    one = {"n": {"a": 1, "b": [1, 2], "c": {}}, "same": math.inf}
    other = {"n": {"a": 1.0, "b": [1, 3], "d": None}, "same": math.inf}
    found = compare(*pair(tmp_path, one, other))
    assert [(name, a, b) for name, a, b in found.plain] == [
        ("n.a", 1, 1.0),
        ("n.b[1]", 2, 3),
        ("n.c", {}, "(not there)"),
        ("n.d", "(not there)", None),
    ]


def cut_otherwise(tmp_path, monkeypatch, other):
    state = {"w": torch.arange(12.0).reshape(6, 2)}
    one = saved(tmp_path / "a", state)
    monkeypatch.setattr(tensors_module, "PIECE_BYTES_MAX", 16)
    two = saved(tmp_path / "b", {"w": other})
    assert len(two.manifest.tensors[0].pieces) == 3
    return one, two


def test_a_tensor_that_was_cut_into_other_pieces_is_equal_if_its_bytes_are(tmp_path, monkeypatch):
    same = torch.arange(12.0).reshape(6, 2)
    assert compare(*cut_otherwise(tmp_path / "x", monkeypatch, same)).equal
    monkeypatch.undo()
    other = same.clone()
    other[5, 1] = 0
    found = compare(*cut_otherwise(tmp_path / "y", monkeypatch, other))
    assert [t.what for t in found.tensors] == ["values"]


def test_bytes_that_are_read_to_compare_are_verified(tmp_path, monkeypatch):
    one, two = cut_otherwise(tmp_path, monkeypatch, torch.arange(12.0).reshape(6, 2))
    path = two.path / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="do not match their digest"):
        compare(one, two)


def test_a_torn_checkpoint_is_compared_with_nothing(tmp_path):
    one = saved(tmp_path / "a", {"w": torch.ones(1)})
    with pytest.raises(CheckpointDamaged, match="torn"):
        compare(one, replace(one, manifest=None, fault="torn"))
