"""Files that somebody made to do harm: refused, nothing run, nothing allocated."""

import copy
import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch

from keepstep.errors import CheckpointDamaged, UnsafeState
from keepstep.store import (
    Store,
    list_checkpoints,
    load_state,
    save_checkpoint_atomic,
    verify,
)
from keepstep.store.bring_in import read_weights
from keepstep.store.manifest import digest_of

NASTY = [
    None, True, False, -1, 1.5, float("nan"), float("inf"), 1 << 40, 1 << 63, 10**400, 1e300, "",
    "../../etc/passwd", "/etc/passwd", "\0", [], [[]], [-2, -2], [1 << 62, 0], {}, {"$tensor": "x"},
    {"$dict": [[[], 1]]}, {"$dict": [[{"$tensor": "w"}, 1]]}, {"$class": "os.system"},
]  # fmt: skip
ALLOCATED_MAX = 64 << 20


def signed(body):
    """Return the text of a manifest with a right digest, as only ill will makes it."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return text[:-1] + b',"digest":"' + digest_of(text).encode() + b'"}\n'


@pytest.fixture
def newest(tmp_path):
    """The newest of two checkpoints."""
    with Store(tmp_path / "run", best_metric="loss", keep_last_n=0) as store:
        for step in (1, 2):
            state = {"w": torch.ones(3, 4) * step, "t": ({"a": [1.5, {1: 2}]},), "n": step}
            saved = store.save(state, step=step, metrics={"loss": 1.0}, must_match={"a": 1})
    return saved.path


def body_of(folder):
    body = json.loads((folder / "manifest.json").read_bytes())
    body.pop("digest")
    return body


def places(value, path=()):
    """Yield the path of every value in a tree, containers too."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, (dict, list)) else ():
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


def with_value(body, path, value):
    spoiled = copy.deepcopy(body)
    place = spoiled
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return spoiled


def test_whatever_stands_at_any_place_of_a_manifest_is_refused_or_harmless(newest):
    """No other error than damage comes out, so the older checkpoint is found behind it."""
    body, count, refused = body_of(newest), 0, 0
    for path in places(body):
        for value in NASTY:
            (newest / "manifest.json").write_bytes(signed(with_value(body, path, value)))
            count += 1
            try:
                load_state(newest)
            except CheckpointDamaged:
                refused += 1
            entry = list_checkpoints(newest.parent)[-1]
            if entry.manifest is not None:
                entry.manifest.content_digest()
                verify(entry)
    assert count > 1500
    assert refused > count * 2 // 3


def pieces_that_overlap(body):
    (tensor,) = body["tensors"]
    half = {**tensor["pieces"][0], "shape": [3, 2]}
    middle = half["start"] + 24
    tensor["pieces"] = [{**half, "end": middle}, {**half, "offset": [0, 1], "start": middle}]


def pieces_that_leave_a_gap(body):
    body["tensors"][0]["shape"] = [4, 4]


def a_piece_outside(body):
    body["tensors"][0]["pieces"][0]["offset"] = [1, 0]


def of_another_width(body):
    body["tensors"][0]["dtype"] = "F64"


def absurd_axes(body):
    tensor = body["tensors"][0]
    tensor["shape"] = [1] * 100_000 + tensor["shape"]
    tensor["pieces"][0].update(shape=tensor["shape"], offset=[0] * len(tensor["shape"]))


def absurd_strides(body):
    empty = {"dtype": "F32", "shape": [1 << 62, 1 << 62, 0], "pieces": [], "name": "empty"}
    body["tensors"].append(empty)
    body["plain"]["empty"] = {"$tensor": "empty"}


def deep(body):
    value = []
    for _ in range(400):
        value = [value]
    body["plain"]["deep"] = value


def of_no_listed_file(body):
    body["tensors"][0]["pieces"][0].update(file="rank-00009.safetensors", start=None)


HOSTILE = [
    pieces_that_overlap, pieces_that_leave_a_gap, a_piece_outside, of_another_width, absurd_axes,
    absurd_strides, deep, of_no_listed_file,
]  # fmt: skip


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_a_hostile_manifest_is_passed_over_for_the_older_checkpoint(newest, spoil):
    body = body_of(newest)
    spoil(body)
    for piece in (piece for tensor in body["tensors"] for piece in tensor["pieces"]):
        if piece["start"] is not None and (newest / piece["file"]).is_file():
            data = (newest / piece["file"]).read_bytes()[piece["start"] : piece["end"]]
            piece["digest"] = digest_of(data)
    (newest / "manifest.json").write_bytes(signed(body))
    with Store(newest.parent) as store:
        restored = store.restore()
    assert restored.manifest.step == 1
    assert [item.name for item in restored.skipped] == ["step_2"]


def test_nesting_that_no_parser_follows_is_damage(newest):
    body = body_of(newest)
    body["plain"]["deep"] = "here"
    text = json.dumps(body, separators=(",", ":")).encode()
    text = text.replace(b'"here"', b"[" * 100_000 + b"]" * 100_000)
    text = text[:-1] + b',"digest":"' + digest_of(text).encode() + b'"}\n'
    (newest / "manifest.json").write_bytes(text)
    assert ["malformed" in entry.fault for entry in list_checkpoints(newest.parent)] == [
        True,
        False,
    ]


LIMITED = """
import resource, sys
import torch
from keepstep.errors import CheckpointDamaged, UnsafeState
from keepstep.store import load_checkpoint, load_state
from keepstep.store.bring_in import read_weights
kind, path = sys.argv[1:]
from pathlib import Path
load = {"folder": load_state, "file": load_checkpoint, "weights": read_weights}[kind]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
try:
    load(Path(path))
except (CheckpointDamaged, UnsafeState) as error:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(type(error).__name__, grown << 10)
"""


def refused_in_a_small_process(kind, path):
    """Assert that a load is refused in a process that cannot allocate, and did not try."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, kind, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) < ALLOCATED_MAX, done.stdout


def test_absurd_sizes_of_files_that_are_there_allocate_nothing(newest):
    """A sparse file is as long as it says, and its header and its piece are said to be all of it.

    A reader would take it whole before it knows better.
    """
    data = newest / "rank-00000.safetensors"
    os.truncate(data, 1 << 40)
    for header_end in (4096, (1 << 40) - 48):
        body = body_of(newest)
        (file,), (piece,) = body["files"], body["tensors"][0]["pieces"]
        file.update(size=1 << 40, header_end=header_end)
        piece.update(start=header_end, end=1 << 40)
        body["tensors"][0].update(shape=[((1 << 40) - header_end) // 4])
        piece.update(shape=body["tensors"][0]["shape"], offset=[0])
        (newest / "manifest.json").write_bytes(signed(body))
        refused_in_a_small_process("folder", newest)


def holds_itself():
    state = {}
    state["again"] = [state]
    return state


def nested():
    value = torch.ones(1)
    for _ in range(150):
        value = {"a": [value]}
    return {"value": value}


@pytest.mark.parametrize("make", [holds_itself, nested])
def test_a_state_that_no_reader_could_follow_is_refused_when_it_is_saved(tmp_path, make):
    with Store(tmp_path) as store, pytest.raises(UnsafeState, match="nested more than"):
        store.save(make(), step=1)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("folder_too", [False, True])
def test_planted_links_are_not_followed(newest, tmp_path, folder_too):
    name = "rank-00000.safetensors"
    (tmp_path / "outside").mkdir()
    target = newest if folder_too else newest / name
    moved = tmp_path / "outside" / target.name
    target.rename(moved)
    target.symlink_to(moved)
    with Store(newest.parent) as store:
        assert store.restore().manifest.step == 1
    assert moved.exists()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(newest):
    for name in ("rank-00000.safetensors", "manifest.json"):
        (newest / name).unlink()
        os.mkfifo(newest / name)
        entries = {entry.step: entry for entry in list_checkpoints(newest.parent)}
        assert entries[2].fault == f"{name} is missing"
        assert verify(entries[2])


def test_facts_of_a_file_in_a_folder_and_of_a_folder_in_a_file_are_damage(newest, tmp_path):
    body = body_of(newest)
    (newest / "manifest.json").write_bytes(signed({**body, "commit_method": "file"}))
    with Store(tmp_path / "files", layout="files") as store:
        file = store.save({"n": 1}, step=1).path
    content = torch.load(file, weights_only=True)
    facts = {key: value for key, value in content["keepstep"].items() if key != "digest"}
    signed_facts = json.loads(signed({**facts, "commit_method": "rename"}))
    torch.save({**content, "keepstep": signed_facts}, file)
    (entry, _) = list_checkpoints(newest.parent)
    assert "that of a single file" in entry.fault
    (entry,) = list_checkpoints(file.parent)
    assert "those of a folder" in entry.fault


@pytest.mark.parametrize("where", ["state", "facts"])
def test_a_pth_that_nests_deeper_than_any_save_is_damage(tmp_path, where):
    mark, depth = "MARKER", 200_000
    words = {"environment": {"m": mark}} if where == "facts" else {}
    with Store(tmp_path, layout="files") as store:
        path = store.save({"n": mark if where == "state" else 1}, step=1, **words).path
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            # A list in a list in a list, in the place of a text.
            text = b"X\x06\x00\x00\x00" + mark.encode()
            assert text in data or not name.endswith("/data.pkl")
            archive.writestr(name, data.replace(text, b"]" * depth + b"a" * (depth - 1)))
    (entry,) = list_checkpoints(tmp_path)
    assert entry.fault == "it is nested too deeply"
    with Store(tmp_path, layout="files") as store, pytest.raises(CheckpointDamaged):
        store.restore()


BOMBS = {
    "bytearray": b"cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x02tR",
    "Tensor": b"ctorch\nTensor\n(\x8a\x05\x00\x00\x00\x00\x02tR",
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("kind", ["file", "weights"])
def test_a_pth_that_asks_for_memory_is_refused_before_it_gets_any(tmp_path, name, kind):
    """`weights_only` lets these be called with any size."""
    path = tmp_path / "latest.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}X\x01\x00\x00\x00w" + BOMBS[name] + b"s.")
        archive.writestr("a/version", b"3\n")
    refused_in_a_small_process(kind, path)


def test_a_state_with_a_bytearray_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(UnsafeState, match="bytearray"):
        save_checkpoint_atomic(tmp_path / "latest.pth", {"raw": bytearray(b"abc")})
    assert not (tmp_path / "latest.pth").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"weight_map": {"w": ["x"]}}',
        b'{"weight_map": {"w": {"a": 1}, "v": "x.safetensors"}}',
        b'{"weight_map": {"w": 3, "v": "x.safetensors"}}',
    ],
)
def test_a_hostile_index_of_shards_is_damage(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointDamaged):
        read_weights(tmp_path)


SIZES = [1 << 40, (1 << 63) - 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_safetensors_header_of_absurd_sizes_allocates_nothing(tmp_path, size):
    path = tmp_path / "model.safetensors"
    table = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    text = json.dumps(table).encode()
    for length in (len(text), size):
        path.write_bytes(length.to_bytes(8, "little") + text)
        refused_in_a_small_process("weights", path)


@pytest.mark.parametrize(
    "index",
    [
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"),
        b"\x80\x04Nr" + (0x7FFFFFF0).to_bytes(4, "little") + b".",
        b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    ],
    ids=["bytes", "memo", "frame"],
)
def test_a_dcp_index_of_absurd_sizes_allocates_nothing(tmp_path, index):
    (tmp_path / ".metadata").write_bytes(index)
    refused_in_a_small_process("weights", tmp_path)
