"""How two checkpoints differ: by their manifests, and by values where that is asked for.

Guarantees: two checkpoints are equal where they hold the same state bit for bit, whoever saved it,
when, and on how many ranks. Digests stand for bytes as they were saved; a tensor that was cut into
other pieces is read, every piece against its digest. Needs no torch but for values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.errors import CheckpointDamaged, UsageError
from keepstep.store.catalog import Checkpoint
from keepstep.store.manifest import Manifest, Piece, TensorEntry, digest_of
from keepstep.store.plain import TensorReference, decode
from keepstep.store.regular import opened

_STATE_FIELDS = frozenset({"files", "tensors", "plain", "format_version", "commit_method"})
_MISSING = "(not there)"


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that is not the same: what of it, and how far its values lie apart if looked at."""

    name: str
    what: str
    max_abs: float | None = None
    max_rel: float | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Everything that differs; `facts` are what the manifests say besides the state."""

    tensors: tuple[TensorDifference, ...]
    tensors_compared: int
    plain: tuple[tuple[str, Any, Any], ...]
    facts: tuple[tuple[str, Any, Any], ...]

    @property
    def equal(self) -> bool:
        """Whether both hold the same state."""
        return not self.tensors and not self.plain


def compare(one: Checkpoint, other: Checkpoint, *, values: bool = False) -> Difference:
    """Return how two checkpoints differ; CheckpointDamaged where one has no whole manifest.

    ``values``: read the tensors that differ and measure how far; this needs torch.
    """
    a, b = _manifest(one), _manifest(other)
    mine, theirs = ({t.name: t for t in m.tensors} for m in (a, b))
    found = []
    for name in sorted(set(mine) | set(theirs)):
        what = _tensor_difference(one.path, mine.get(name), other.path, theirs.get(name))
        if what:
            found.append(TensorDifference(name=name, what=what))
    if values:
        found = [_with_values(item, one.path, mine, other.path, theirs) for item in found]
    return Difference(
        tensors=tuple(found),
        tensors_compared=len(set(mine) & set(theirs)),
        plain=tuple(_differing(dict(_leaves(decode(a.plain))), dict(_leaves(decode(b.plain))))),
        facts=tuple(_differing(_facts(a), _facts(b))),
    )


def _manifest(checkpoint: Checkpoint) -> Manifest:
    if checkpoint.manifest is None:
        raise CheckpointDamaged(f"{checkpoint.path}: {checkpoint.fault}")
    if checkpoint.manifest.is_file:
        raise UsageError(
            f"{checkpoint.path} is one file, without the digests by which checkpoints are compared",
            hint="Only checkpoints in folders can be compared.",
        )
    return checkpoint.manifest


def _facts(manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(manifest):
        value = getattr(manifest, item.name)
        if item.name in _STATE_FIELDS:
            continue
        if isinstance(value, dict):
            found.update({f"{item.name}.{key}": entry for key, entry in value.items()})
        else:
            found[item.name] = value
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a plain state by its path; an empty table is a leaf."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for n, item in enumerate(value):
            yield from _leaves(item, f"{path}[{n}]")
    elif isinstance(value, TensorReference):
        yield path, f"(tensor {value.name})"
    else:
        yield path, value


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(set(a) | set(b)):
        pair = a.get(name, _MISSING), b.get(name, _MISSING)
        # By text: nan is itself, and 1, 1.0 and True are three things.
        if repr(pair[0]) != repr(pair[1]):
            yield name, *pair


def _tensor_difference(
    path_a: Path, a: TensorEntry | None, path_b: Path, b: TensorEntry | None
) -> str:
    """Return in words what is not the same of a tensor; empty where all is."""
    if a is None or b is None:
        return "only in the second" if a is None else "only in the first"
    if a.dtype != b.dtype:
        return f"type {a.dtype} and {b.dtype}"
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    cuts_a, cuts_b = ({(p.offset, p.shape): p.digest for p in t.pieces} for t in (a, b))
    if set(cuts_a) == set(cuts_b):
        return "values" if cuts_a != cuts_b else ""
    return "" if np.array_equal(_raw(path_a, a), _raw(path_b, b)) else "values"


def _raw(folder: Path, entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """Return a tensor's bytes, (shape..., bytes of an item), put together from its pieces."""
    stored = sum(piece.end - piece.start for piece in entry.pieces)
    item_bytes, rest = divmod(stored, math.prod(entry.shape) or 1)
    if rest:
        raise CheckpointDamaged(f"{entry.name} has {stored:,} bytes, which is not its shape's")
    whole = np.zeros((*entry.shape, item_bytes), dtype=np.uint8)
    for piece in entry.pieces:
        data = np.frombuffer(_read_piece(folder, entry, piece), dtype=np.uint8)
        place = tuple(
            slice(low, low + size) for low, size in zip(piece.offset, piece.shape, strict=True)
        )
        whole[place] = data.reshape((*piece.shape, item_bytes))
    return whole


def _read_piece(folder: Path, entry: TensorEntry, piece: Piece) -> bytes:
    with opened(folder / piece.file) as file:
        file.seek(piece.start)
        data = file.read(piece.end - piece.start)
    if digest_of(data) != piece.digest:
        raise CheckpointDamaged(
            f"{folder / piece.file}: bytes {piece.start:,} to {piece.end:,} ({entry.name}) do not"
            " match their digest"
        )
    return data


def _with_values(
    item: TensorDifference,
    path_a: Path,
    mine: dict[str, TensorEntry],
    path_b: Path,
    theirs: dict[str, TensorEntry],
) -> TensorDifference:
    if item.name not in mine or item.name not in theirs:
        return item
    if mine[item.name].shape != theirs[item.name].shape:
        return item
    import torch

    from keepstep.store.reading import read_tensor

    wide = torch.complex128 if "C64" in (mine[item.name].dtype, theirs[item.name].dtype) else None
    a = read_tensor(path_a, mine[item.name]).to(wide or torch.float64)
    b = read_tensor(path_b, theirs[item.name]).to(wide or torch.float64)
    apart = (a - b).abs()
    # Where both are the same infinity, or both no number, nothing lies apart.
    apart[(a == b) | (a.isnan() & b.isnan())] = 0
    size = torch.maximum(a.abs(), b.abs())
    relative = torch.where(apart == 0, 0.0, apart / size)
    largest = [float(part.max()) if part.numel() else 0.0 for part in (apart, relative)]
    return replace(item, max_abs=largest[0], max_rel=largest[1])
