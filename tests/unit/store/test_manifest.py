"""The on-disk format: what is damaged, hostile or foreign in it is refused."""

import dataclasses
import json
import math

import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.store import load_state
from keepstep.store.manifest import from_bytes, read_manifest, to_bytes
from tests.unit.store.test_store import save


def test_every_field_of_a_manifest_is_guarded(tmp_path):
    saved = save(tmp_path, {"w": torch.ones(3)})
    path = saved.path / "manifest.json"
    good = path.read_bytes()
    assert to_bytes(read_manifest(saved.path)) == good
    body = json.loads(good)
    body.pop("digest")
    for name in body:
        for wrong in ("removed", "nonsense"):
            bad = {**body}
            if wrong == "removed":
                bad.pop(name)
            else:
                bad[name] = {"nonsense": -1}
            text = json.dumps(bad, sort_keys=True, separators=(",", ":"))
            path.write_bytes(good.replace(good[: good.index(b',"digest"')], text[:-1].encode()))
            with pytest.raises(CheckpointDamaged, match="own digest"):
                read_manifest(saved.path)


HOSTILE = {
    "a path that leads out": lambda b: b["files"][0].update(name="../../secret"),
    "another file's name": lambda b: b["files"][0].update(name="manifest.json"),
    "an absurd size": lambda b: b["files"][0].update(size=1 << 60),
    "an absurd shape": lambda b: b["tensors"][0].update(shape=[1 << 40, 1 << 40]),
    "a gap": lambda b: b["tensors"][0]["pieces"][0].update(start=5000),
    "another version": lambda b: b.update(format_version=99),
    "a negative step": lambda b: b.update(step=-1),
    "a header beyond the file": lambda b: b["files"][0].update(header_end=1 << 30),
    "a reference to nothing": lambda b: b.update(plain={"w": {"$tensor": "nothing"}}),
    "an unknown tag": lambda b: b.update(plain={"w": {"$class": "os.system"}}),
    "an unknown type": lambda b: b["tensors"][0].update(dtype="PICKLE"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_with_a_right_digest_is_refused(tmp_path, name):
    from keepstep.store.manifest import digest_of

    saved = save(tmp_path, {"w": torch.ones(3)})
    path = saved.path / "manifest.json"
    body = json.loads(path.read_bytes())
    body.pop("digest")
    HOSTILE[name](body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(text[:-1] + b',"digest":"' + digest_of(text).encode() + b'"}\n')
    with pytest.raises(CheckpointDamaged):
        load_state(saved.path)


def test_a_manifest_survives_its_own_text(tmp_path):
    saved = save(tmp_path, {"w": torch.ones(3)}, metrics={"a": math.nan, "b": 0.1})
    text = (saved.path / "manifest.json").read_bytes()
    found = from_bytes(text)
    assert math.isnan(found.metrics["a"])
    assert dataclasses.replace(found, metrics={}) == dataclasses.replace(saved.manifest, metrics={})
