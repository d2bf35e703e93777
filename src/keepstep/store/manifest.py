"""The on-disk format of a checkpoint: its commit record, `manifest.json`.

Invariants, checked on the way out and on the way in:
1. The text ends in the digest of all before it: a torn or changed manifest is found.
2. A checkpoint's folder is named after the manifest's step: a manifest that was put there from
   another checkpoint is found.
3. Every byte of every data file belongs to a digest: the file's header to one, each piece of a
   tensor to one, with no gap between them and nothing after them.
4. Names of files are names that a rank can have: no manifest leads out of its folder.
5. The pieces of a tensor lie inside it, do not overlap, and cover it: none of its memory is left
   as it was found.
6. No number and no depth is one that a reader chokes on: what is hostile is refused as what is
   damaged, so that a checkpoint that is whole is found behind it.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import xxhash

from keepstep.errors import CheckpointDamaged
from keepstep.store.layout import MANIFEST_NAME, file_name, is_data_name, step_name, step_of
from keepstep.store.plain import is_too_deep
from keepstep.store.regular import opened

FORMAT_VERSION = 1
FILE_METHOD = "file"
"""The commit method of a checkpoint that is one file."""
_DIGEST_KEY = b',"digest":"'
_DIGEST = re.compile(r"[0-9a-f]{32}")
MANIFEST_BYTES_MAX = 1 << 30
"""A manifest has some 200 bytes a tensor; beyond this it is not one, and is not read."""
PIECE_BYTES_MAX = 64 << 20
"""A piece is read as a whole before it is believed."""
_HEADER_BYTES_MAX = 1 << 30
"""A header has some 100 bytes a tensor; it is read as a whole too."""
_AXES_MAX = 64
"""Torch's own limit."""
_CORNERS_MAX = 1 << 22
"""A tensor of a million pieces, cut along two axes, has 64 TB."""
_COUNT_MAX = 2**63 - 1
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""A value of another type fails wherever it is first used as what it should be."""
_TIME_MAX = 253402300799
"""The last second of the year 9999, beyond which no date can be shown."""


def digest_of(data: bytes | memoryview) -> str:
    """Return the xxh3-128 digest of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A contiguous part of a tensor: where it lies in the tensor, and where in which file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    end: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor: `dtype` as safetensors names it, its global shape, its pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A data file: its size, and the digest of its first `header_end` bytes."""

    name: str
    size: int
    header_end: int
    header_digest: str


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of a metric so far in a run, and the checkpoint that had it."""

    metric: str
    mode: Literal["min", "max"]
    value: float
    sequence: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The part of a manifest that is known before its files are written.

    `sequence` is the order of commits, `parent` the one that it followed.
    """

    run_id: str
    sequence: int
    parent: int | None
    step: int
    updates: int
    samples: int
    tokens: int
    mesh: dict[str, int]
    must_match: dict[str, Any]
    fingerprint: str
    environment: dict[str, Any]
    metrics: dict[str, float]
    best: Best | None
    milestone: bool


@dataclass(frozen=True, kw_only=True)
class Manifest(Facts):
    """What a checkpoint is."""

    time: float
    world_size: int
    commit_method: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    plain: Any = field(repr=False)
    format_version: int = FORMAT_VERSION

    @property
    def is_file(self) -> bool:
        """Whether the checkpoint is one file, and no folder."""
        return self.commit_method == FILE_METHOD

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder or file."""
        return file_name(self.step) if self.is_file else step_name(self.step)

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(entry.size for entry in self.files)

    def content_digest(self) -> str:
        """Return the digest of the state alone: equal for equal states, whenever saved."""
        tensors = [
            [t.name, t.dtype, t.shape, [[p.offset, p.shape, p.digest] for p in t.pieces]]
            for t in self.tensors
        ]
        return digest_of(_canonical([tensors, self.plain]))


def fingerprint_of(must_match: Mapping[str, Any]) -> str:
    """Return a short name for everything that must be the same when a run is continued."""
    return digest_of(_canonical(dict(must_match)))


def to_bytes(manifest: Manifest) -> bytes:
    """Return the canonical text of a manifest, ending in its own digest."""
    _check(manifest)
    data = vars(manifest) | {
        "metrics": {name: _number_out(value) for name, value in manifest.metrics.items()},
        "best": None if manifest.best is None else vars(manifest.best),
        "files": [vars(entry) for entry in manifest.files],
        "tensors": [tensor_to_data(entry) for entry in manifest.tensors],
    }
    # Not sorted: the order of a state's dicts is part of it.
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return body[:-1] + _DIGEST_KEY + digest_of(body).encode() + b'"}\n'


def from_bytes(text: bytes, *, folder_name: str | None = None) -> Manifest:
    """Return the manifest that `text` holds; CheckpointDamaged says what is wrong with it."""
    head, separator, tail = text.rpartition(_DIGEST_KEY)
    body = head + b"}"
    if not separator or tail != digest_of(body).encode() + b'"}\n':
        raise CheckpointDamaged("the manifest does not match its own digest")
    try:
        data = json.loads(body, parse_float=_finite, parse_constant=_finite)
        if data.get("format_version") != FORMAT_VERSION:
            raise CheckpointDamaged(
                f"the manifest has format version {data.get('format_version')!r};"
                f" this version of keepstep reads {FORMAT_VERSION}"
            )
        manifest = _from_data(data)
        _check(manifest)
    except _MALFORMED as error:
        raise CheckpointDamaged(f"the manifest is malformed: {error}") from error
    if folder_name is not None and step_of(folder_name) != manifest.step:
        raise CheckpointDamaged(f"the manifest is that of step {manifest.step}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and compare the sizes of its files with the real ones.

    Raises CheckpointDamaged with the fault; reads no data.
    """
    path = folder / MANIFEST_NAME
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointDamaged("not a folder")
    if path.is_symlink() or not path.is_file():
        raise CheckpointDamaged(f"{MANIFEST_NAME} is missing")
    if path.stat().st_size > MANIFEST_BYTES_MAX:
        raise CheckpointDamaged(f"{MANIFEST_NAME} has an absurd size")
    try:
        with opened(path) as file:
            # What was set aside may carry a suffix behind a dot, where its name was taken.
            manifest = from_bytes(file.read(), folder_name=folder.name.partition(".")[0])
        _require(not manifest.is_file, "it is that of a single file")
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: {error.message}") from error
    for entry in manifest.files:
        data_path = folder / entry.name
        if data_path.is_symlink() or not data_path.is_file():
            raise CheckpointDamaged(f"{entry.name} is missing")
        size = data_path.stat().st_size
        if size != entry.size:
            raise CheckpointDamaged(f"{entry.name} is {size:,} bytes, not {entry.size:,}")
    return manifest


def _from_data(data: dict[str, Any]) -> Manifest:
    known = {f.name for f in fields(Manifest)}
    if set(data) != known:
        raise ValueError(f"fields {sorted(set(data) ^ known)}")
    best = data["best"]
    return Manifest(
        **{
            **data,
            "metrics": {name: float(value) for name, value in data["metrics"].items()},
            "best": None if best is None else Best(**best),
            "files": tuple(file_from_data(entry) for entry in data["files"]),
            "tensors": tuple(tensor_from_data(entry) for entry in data["tensors"]),
        }
    )


def file_from_data(data: dict[str, Any]) -> FileEntry:
    """Return a file's entry as its `vars` and JSON gave it."""
    return FileEntry(**data)


def tensor_to_data(entry: TensorEntry) -> dict[str, Any]:
    """Return a tensor's entry as JSON takes it, without a copy of anything in it."""
    return {**vars(entry), "pieces": [vars(piece) for piece in entry.pieces]}


def tensor_from_data(data: dict[str, Any]) -> TensorEntry:
    """Return a tensor's entry as `tensor_to_data` and JSON gave it."""
    pieces = [
        Piece(**{**piece, "offset": tuple(piece["offset"]), "shape": tuple(piece["shape"])})
        for piece in data["pieces"]
    ]
    return TensorEntry(
        name=data["name"], dtype=data["dtype"], shape=tuple(data["shape"]), pieces=tuple(pieces)
    )


def _check(manifest: Manifest) -> None:
    """Hold the invariants; they guard reading as much as writing."""
    for name in ("sequence", "step", "updates", "samples", "tokens", "world_size"):
        value = getattr(manifest, name)
        _require(_is_count(value), f"{name} is {value!r}")
    for name in ("must_match", "environment", "metrics", "mesh"):
        _require(isinstance(getattr(manifest, name), dict), f"{name} is not a table")
    for name in ("run_id", "fingerprint", "commit_method"):
        _require(isinstance(getattr(manifest, name), str), f"{name} is not a text")
    _require(manifest.parent is None or _is_count(manifest.parent), "parent is no number")
    is_time = type(manifest.time) in (int, float) and 0 <= manifest.time <= _TIME_MAX
    _require(is_time, "time is no time")
    _require(type(manifest.milestone) is bool, "milestone is neither true nor false")
    sizes = manifest.mesh.values()
    _require(all(type(size) is int and size > 0 for size in sizes), "mesh has impossible sizes")
    for name in ("plain", "must_match", "environment"):
        _require(not is_too_deep(getattr(manifest, name)), f"{name} is nested too deeply")
    _require_best(manifest.best)
    names = {tensor.name for tensor in manifest.tensors}
    _require(len(names) == len(manifest.tensors), "a tensor is named twice")
    for tensor in manifest.tensors:
        _require(isinstance(tensor.name, str), "a tensor's name is not a text")
        _require(isinstance(tensor.dtype, str), f"the type of {tensor.name} is not a text")
        _require_tiling(tensor)
    _require_every_byte(manifest)


def _require_tiling(tensor: TensorEntry) -> None:
    """Hold the pieces of a tensor to what a tensor of its shape can have."""
    name = tensor.name
    _require(len(tensor.shape) <= _AXES_MAX, f"{name} has {len(tensor.shape)} axes")
    _require(all(_is_count(size) for size in tensor.shape), f"{name} has an impossible shape")
    # Strides are products of sizes, with 1 for an empty axis.
    extent = math.prod(max(size, 1) for size in tensor.shape)
    _require(extent <= _COUNT_MAX, f"{name} has an absurd shape")
    covered = 0
    for piece in tensor.pieces:
        place = (*piece.offset, *piece.shape)
        axes = {len(piece.offset), len(piece.shape)}
        _require(axes == {len(tensor.shape)}, f"a piece of {name} has an impossible place")
        _require(all(_is_count(n) for n in place), f"a piece of {name} has an impossible place")
        ends = zip(piece.offset, piece.shape, tensor.shape, strict=True)
        inside = all(low + size <= limit for low, size, limit in ends)
        _require(inside, f"a piece of {name} lies outside the tensor")
        covered += math.prod(piece.shape)
    _require(covered == math.prod(tensor.shape), f"the pieces of {name} do not cover it")
    _require_apart(tensor)


def _require_apart(tensor: TensorEntry) -> None:
    """Hold pieces that have as many elements as the tensor to share none: each is in one piece.

    By their corners, each with its sign: a sum of boxes is the whole if and only if all corners
    but the whole's cancel. That costs 2^axes a piece, of those axes that are cut; pairs, a square.
    """
    whole = tuple(0 for _ in tensor.shape), tensor.shape
    boxes = [(p.offset, p.shape) for p in tensor.pieces if math.prod(p.shape)]
    sizes = enumerate(tensor.shape)
    axes = [axis for axis, size in sizes if any(shape[axis] != size for _, shape in boxes)]
    _require(len(boxes) << len(axes) <= _CORNERS_MAX, f"{tensor.name} is cut too finely")
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offset, shape) in [(-1, whole), *((1, box) for box in boxes)]:
        ends = [((offset[axis], 1), (offset[axis] + shape[axis], -1)) for axis in axes]
        for corner in itertools.product(*ends):
            place = tuple(position for position, _ in corner)
            corners[place] += sign * math.prod(side for _, side in corner)
    _require(not boxes or not any(corners.values()), f"pieces of {tensor.name} overlap")


def _require_every_byte(manifest: Manifest) -> None:
    """Hold every byte of every file to one digest, with no gap and nothing after them."""
    ends = {}
    for entry in manifest.files:
        _require(is_data_name(entry.name), f"file name {entry.name!r}")
        _require(entry.name not in ends, f"file {entry.name} is named twice")
        sizes = _is_count(entry.size) and _is_count(entry.header_end)
        fits = sizes and 0 < entry.header_end <= min(entry.size, _HEADER_BYTES_MAX)
        _require(fits, f"{entry.name} has an impossible header")
        _require_digest(entry.header_digest)
        ends[entry.name] = entry.header_end
    pieces = [piece for tensor in manifest.tensors for piece in tensor.pieces]
    for piece in sorted(pieces, key=lambda p: (p.file, p.start, p.end)):
        _require_digest(piece.digest)
        _require(piece.file in ends, f"file {piece.file!r} is not listed")
        _require(_is_count(piece.start) and _is_count(piece.end), "a piece has impossible bytes")
        _require(piece.start == ends[piece.file], f"bytes of {piece.file} lie between pieces")
        _require(0 <= piece.end - piece.start <= PIECE_BYTES_MAX, "a piece has an absurd size")
        ends[piece.file] = piece.end
    for entry in manifest.files:
        _require(ends[entry.name] == entry.size, f"{entry.name} has bytes behind its pieces")


def _require_best(best: Best | None) -> None:
    if best is not None:
        _require(best.mode in ("min", "max"), f"best has the mode {best.mode!r}")
        _require(isinstance(best.metric, str), "best has no metric")
        is_number = type(best.value) in (int, float) and math.isfinite(best.value)
        _require(is_number, "best has no value")
        numbers = (best.sequence, best.step)
        _require(all(_is_count(n) for n in numbers), "best names no checkpoint")


def _is_count(value: Any) -> bool:
    # A bool is an int, and so is a number that no machine counts to.
    return type(value) is int and 0 <= value <= _COUNT_MAX


def _require_digest(text: Any) -> None:
    _require(isinstance(text, str) and _DIGEST.fullmatch(text) is not None, f"digest {text!r}")


def _require(holds: bool, what: str) -> None:
    # A statement of its own and no assert, because `python -O` removes those.
    if not holds:
        raise CheckpointDamaged(f"the manifest is malformed: {what}")


def _finite(text: str) -> float:
    # What is not finite is written as a text: see `_number_out` and `store/plain.py`.
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text}")
    return number


def _number_out(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
