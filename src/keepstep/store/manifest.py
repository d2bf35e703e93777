"""The on-disk format of a checkpoint: its commit record, `manifest.json`.

Invariants, checked on the way out and on the way in:
1. The text ends in the digest of all before it: a torn or changed manifest is found.
2. A checkpoint's folder is named after the manifest's step: a manifest that was put there from
   another checkpoint is found.
3. Every byte of every data file belongs to a digest: the file's header to one, each piece of a
   tensor to one, with no gap between them and nothing after them.
4. Names of files are names that a rank can have: no manifest leads out of its folder.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from keepstep.errors import CheckpointDamaged
from keepstep.store.layout import MANIFEST_NAME, file_name, is_data_name, step_name, step_of

FORMAT_VERSION = 1
FILE_METHOD = "file"
"""The commit method of a checkpoint that is one file."""
_DIGEST_KEY = b',"digest":"'
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MANIFEST_BYTES_MAX = 1 << 30
"""A manifest has some 200 bytes a tensor; beyond this it is not one, and is not read."""


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
    mode: str
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
    data = asdict(manifest)
    data["metrics"] = {name: _number_out(value) for name, value in manifest.metrics.items()}
    _check(manifest)
    # Not sorted: the order of a state's dicts is part of it.
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return body[:-1] + _DIGEST_KEY + digest_of(body).encode() + b'"}\n'


def from_bytes(text: bytes, *, folder_name: str | None = None) -> Manifest:
    """Return the manifest that `text` holds; CheckpointDamaged says what is wrong with it."""
    head, separator, tail = text.rpartition(_DIGEST_KEY)
    body = head + b"}"
    if not separator or tail != digest_of(body).encode() + b'"}\n':
        raise CheckpointDamaged(f"{MANIFEST_NAME} does not match its own digest")
    try:
        data = json.loads(body)
        if data.get("format_version") != FORMAT_VERSION:
            raise CheckpointDamaged(
                f"{MANIFEST_NAME} has format version {data.get('format_version')!r};"
                f" this version of keepstep reads {FORMAT_VERSION}"
            )
        manifest = _from_data(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is malformed: {error}") from error
    _check(manifest)
    if folder_name is not None and step_of(folder_name) != manifest.step:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is that of step {manifest.step}")
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
    if path.stat().st_size > _MANIFEST_BYTES_MAX:
        raise CheckpointDamaged(f"{MANIFEST_NAME} has an absurd size")
    # What was set aside may carry a suffix behind a dot, where its name was taken.
    manifest = from_bytes(path.read_bytes(), folder_name=folder.name.partition(".")[0])
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
    """Return a file's entry as `asdict` and JSON gave it."""
    return FileEntry(**data)


def tensor_from_data(data: dict[str, Any]) -> TensorEntry:
    """Return a tensor's entry as `asdict` and JSON gave it."""
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
        _require(type(value) is int and value >= 0, f"{name} is {value!r}")
    for name in ("must_match", "environment", "metrics", "mesh"):
        _require(isinstance(getattr(manifest, name), dict), f"{name} is not a table")
    for name in ("run_id", "fingerprint", "commit_method"):
        _require(isinstance(getattr(manifest, name), str), f"{name} is not a text")
    _require(manifest.parent is None or type(manifest.parent) is int, "parent is no number")
    _require(type(manifest.time) in (int, float), "time is no number")
    _require(type(manifest.milestone) is bool, "milestone is neither true nor false")
    sizes = manifest.mesh.values()
    _require(all(type(size) is int and size > 0 for size in sizes), "mesh has impossible sizes")
    _require_best(manifest.best)
    ends = {}
    for entry in manifest.files:
        _require(is_data_name(entry.name), f"file name {entry.name!r}")
        _require(entry.name not in ends, f"file {entry.name} is named twice")
        _require(0 < entry.header_end <= entry.size, f"{entry.name} has an impossible header")
        _require_digest(entry.header_digest)
        ends[entry.name] = entry.header_end
    names = {tensor.name for tensor in manifest.tensors}
    _require(len(names) == len(manifest.tensors), "a tensor is named twice")
    pieces = [piece for tensor in manifest.tensors for piece in tensor.pieces]
    for piece in sorted(pieces, key=lambda p: (p.file, p.start, p.end)):
        _require_digest(piece.digest)
        _require(piece.start == ends.get(piece.file), f"bytes of {piece.file} lie between pieces")
        _require(piece.end >= piece.start, "a piece ends before it starts")
        _require(len(piece.offset) == len(piece.shape), "a piece has an impossible place")
        ends[piece.file] = piece.end
    for entry in manifest.files:
        _require(ends[entry.name] == entry.size, f"{entry.name} has bytes behind its pieces")


def _require_best(best: Best | None) -> None:
    if best is not None:
        _require(best.mode in ("min", "max"), f"best has the mode {best.mode!r}")
        _require(isinstance(best.metric, str), "best has no metric")
        _require(type(best.value) in (int, float), "best has no value")
        numbers = (best.sequence, best.step)
        _require(all(type(n) is int and n >= 0 for n in numbers), "best names no checkpoint")


def _require_digest(text: Any) -> None:
    _require(isinstance(text, str) and _DIGEST.fullmatch(text) is not None, f"digest {text!r}")


def _require(holds: bool, what: str) -> None:
    # A statement of its own and no assert, because `python -O` removes those.
    if not holds:
        raise CheckpointDamaged(f"{MANIFEST_NAME} is malformed: {what}")


def _number_out(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _canonical(data: Any) -> bytes:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
