"""Safetensors pieces back to a state: on torch, as `tensors.py` is.

Guarantees:
1. Every byte that is returned was compared with its digest; a difference is CheckpointDamaged,
   with the file, the bytes and the tensor.
2. Only the manifest's byte ranges are looked at; the file's own header is compared with its
   digest and never believed, and nothing is allocated before the sizes are known to be right.
3. At most `_AHEAD_BYTES` and one tensor are read before the oldest of them is where it belongs.

Several threads each read a piece and take its digest, so that the disk is asked for the next ones
meanwhile: loading takes as long as reading, and verifying adds nothing to it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from keepstep.errors import CheckpointDamaged
from keepstep.store.direct import Reader
from keepstep.store.manifest import Manifest, Piece, TensorEntry, digest_of
from keepstep.store.plain import TensorReference, decode
from keepstep.store.regular import opened
from keepstep.store.shards import Place, Region, all_of
from keepstep.store.tensors import DTYPES, bytes_in, bytes_of, narrowed

_THREADS = 4
"""Two are with the disk while two take digests and copy."""
_AHEAD_BYTES = 256 << 20
"""Four pieces, one a thread."""


def read_state(
    folder: Path,
    manifest: Manifest,
    *,
    only: str | None = None,
    place_of: Callable[[str, tuple[int, ...]], Place | None] = lambda _name, _shape: None,
) -> dict[str, Any]:
    """Return the state of a checkpoint whose sizes were checked, verifying every byte it reads.

    ``only``: the one key at the top of the state that is wanted. ``place_of(name, shape)``: where
    a tensor goes, if this process wants a region of it only. Raises CheckpointDamaged.
    """
    tree = decode(manifest.plain)
    if not isinstance(tree, dict):
        raise CheckpointDamaged("the plain state is not a table")
    if only is not None:
        if only not in tree:
            raise CheckpointDamaged(f"the checkpoint holds no {only!r}: only {sorted(tree)}")
        tree = {only: tree[only]}
    _check_headers(folder, manifest)
    names = set(_names_in(tree))
    # As they lie in their files: a disk reads on faster than it seeks.
    wanted = [entry for entry in manifest.tensors if entry.name in names]
    missing = sorted(names - {entry.name for entry in wanted})
    if missing:
        raise CheckpointDamaged(f"the tensor {missing[0]} is not in the manifest")
    places = [(entry, place_of(entry.name, entry.shape)) for entry in wanted]
    loaded = _read_tensors(folder, places)

    def put_together(value: Any) -> Any:
        if isinstance(value, TensorReference):
            return loaded[value.name]
        if isinstance(value, (list, tuple)):
            return type(value)(put_together(item) for item in value)
        if isinstance(value, dict):
            return {key: put_together(item) for key, item in value.items()}
        return value

    state: dict[str, Any] = put_together(tree)
    return state


def _names_in(value: Any) -> Iterable[str]:
    if isinstance(value, TensorReference):
        yield value.name
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _names_in(item)


def _check_headers(folder: Path, manifest: Manifest) -> None:
    """Compare each data file's header with its digest; CheckpointDamaged names the file."""
    for entry in manifest.files:
        with opened(folder / entry.name) as file:
            if digest_of(file.read(entry.header_end)) != entry.header_digest:
                raise CheckpointDamaged(f"the header of {entry.name} does not match its digest")


def read_tensor(folder: Path, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor, every piece read and verified."""
    return _read_tensors(folder, [(entry, None)])[entry.name]


def _read_tensors(
    folder: Path, wanted: Iterable[tuple[TensorEntry, Place | None]]
) -> dict[str, torch.Tensor]:
    """Return the tensors by name, or the parts of them that their places want."""
    loaded: dict[str, torch.Tensor] = {}
    begun: deque[_Begun] = deque()
    ahead = 0
    with _Files(folder) as files:
        for entry, place in wanted:
            begun.append(_begin(files, entry, place))
            ahead += bytes_in(begun[-1].tensor)
            while ahead > _AHEAD_BYTES:
                oldest = begun.popleft()
                ahead -= bytes_in(oldest.tensor)
                loaded[oldest.name] = oldest.finish()
        for item in begun:
            loaded[item.name] = item.finish()
    return loaded


class _Files:
    """The data files of a checkpoint, each opened once, and the threads that read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[str, Reader] = {}
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="keepstep-read")

    def reader(self, name: str) -> Reader:
        """Return the reader of a file."""
        if name not in self._readers:
            self._readers[name] = Reader(self._folder / name)
        return self._readers[name]

    def __enter__(self) -> Self:
        """Return the files themselves."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the files, when no thread reads them any more."""
        self.pool.shutdown(cancel_futures=True)
        for reader in self._readers.values():
            reader.close()


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A tensor whose pieces are being read."""

    name: str
    tensor: torch.Tensor
    place: Place | None
    pieces: list[Future[None]]

    def finish(self) -> torch.Tensor:
        """Return it when it is whole and verified."""
        for piece in self.pieces:
            piece.result()
        return self.tensor if self.place is None else self.place.assemble(self.tensor)


def _begin(files: _Files, entry: TensorEntry, place: Place | None) -> _Begun:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointDamaged(f"{entry.name} has an unknown type {entry.dtype!r}")
    for piece in entry.pieces:
        if piece.end - piece.start != math.prod(piece.shape) * dtype.itemsize:
            raise CheckpointDamaged(f"a piece of {entry.name} has another size than its shape")
    whole = all_of(entry.shape)
    region = whole if place is None else place.region
    tensor, pieces = torch.empty(region.shape, dtype=dtype), []
    # The manifest's pieces cover the tensor (its invariant 5).
    for piece in entry.pieces:
        common = _common(Region(offset=piece.offset, shape=piece.shape), region)
        if math.prod(common.shape):
            wanted = narrowed(tensor, _from(common.offset, region.offset), common.shape)
            reader = files.reader(piece.file)
            pieces.append(files.pool.submit(_read_piece, reader, entry, piece, common, wanted))
    return _Begun(name=entry.name, tensor=tensor, place=place, pieces=pieces)


def _common(one: Region, other: Region) -> Region:
    """Return the part that two regions have in common; its shape holds a 0 where there is none."""
    low = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    high = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    return Region(offset=low, shape=tuple(max(0, h - n) for n, h in zip(low, high, strict=True)))


def _from(offset: tuple[int, ...], begin: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(offset, begin, strict=True))


def _read_piece(
    reader: Reader, entry: TensorEntry, piece: Piece, common: Region, wanted: torch.Tensor
) -> None:
    """Read and verify a whole piece, and put the part of it that is `common` in `wanted`."""
    direct = common.shape == piece.shape and wanted.is_contiguous()
    target = wanted if direct else torch.empty(piece.shape, dtype=wanted.dtype)
    data = bytes_of(target)
    if reader.read_into(data, piece.start) < len(data):
        raise CheckpointDamaged("a data file ended early")
    if digest_of(data) != piece.digest:
        raise CheckpointDamaged(
            f"{piece.file}: bytes {piece.start:,} to {piece.end:,} ({entry.name}) do not match"
            " their digest"
        )
    if not direct:
        wanted.copy_(narrowed(target, _from(common.offset, piece.offset), common.shape))
