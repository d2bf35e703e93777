"""State to safetensors pieces; with `reading.py`, the way back, and the ranks' parts, on torch.

Guarantees:
1. A state that holds anything but tensors and plain values is refused before a byte is written.
2. A tensor that is shared (tied weights) is stored once and comes back shared within one state.
3. Every digest is taken from the very bytes that are handed to the disk.
4. What has to be copied to be written, from a GPU or out of order in memory, is copied a piece at
   a time: a save that waits needs some 100 MiB, whatever the size of the state.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import UnsafeState
from keepstep.store.disk import Disk
from keepstep.store.manifest import PIECE_BYTES_MAX, FileEntry, Piece, TensorEntry, digest_of
from keepstep.store.plain import TensorReference, encode, too_deep
from keepstep.store.ranks import OneRank, Ranks
from keepstep.store.shards import Part, part_of, written_here

_HEADER_ALIGNMENT = 4096

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A state taken apart: its plain tree as JSON, and its tensors by name, shared ones once.

    `parts` holds what this process has of every tensor, `written` the names that it writes.
    `confirm`, called when all is written and before it is committed, raises where some of it was
    changed meanwhile.
    """

    plain: Any
    parts: dict[str, Part]
    written: frozenset[str]
    confirm: Callable[[], None] = lambda: None

    def digest(self) -> str:
        """Return the digest of what all ranks must have alike: plain state, names and shapes."""
        shapes = [
            [name, list(part.whole), str(part.local.dtype)] for name, part in self.parts.items()
        ]
        return digest_of(json.dumps([self.plain, shapes], sort_keys=True).encode())


_ONE_RANK = OneRank()


def take_apart(state: Mapping[str, Any], ranks: Ranks = _ONE_RANK) -> Snapshot:
    """Take a state apart; UnsafeState names the path of what cannot be kept. Copies nothing."""
    if not isinstance(state, Mapping):
        raise UnsafeState(
            f"the state is a {type(state).__name__}, and must be a dict",
            hint='Give it a name: {"model": ..., "optimizer": ...}.',
        )
    parts: dict[str, Part] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def separate(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorReference(_register(part_of(value, path, ranks), path, parts, seen))
        if type(value) is list or type(value) is tuple:
            return type(value)(separate(item, f"{path}.{n}") for n, item in enumerate(value))
        if isinstance(value, Mapping):
            return {
                key: separate(item, f"{path}.{key}" if path else str(key))
                for key, item in value.items()
            }
        return value

    try:
        tree = separate(state, "")
    except RecursionError as error:
        raise too_deep("state") from error
    plain = encode(tree, path="state")
    return Snapshot(plain=plain, parts=parts, written=frozenset(written_here(parts)))


def _register(
    part: Part, path: str, parts: dict[str, Part], seen: dict[tuple[Any, ...], str]
) -> str:
    # A conjugate or negative view shares its bytes with what it is a view of.
    tensor = part.local.resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UnsafeState(f"{path} is a tensor without plain dense bytes ({tensor.layout})")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsafeState(f"{path} is a {type(tensor).__qualname__}, not a plain tensor")
    if tensor.dtype not in _DTYPE_NAMES:
        raise UnsafeState(f"{path} has the type {tensor.dtype}, which safetensors cannot hold")
    # By storage and not by address: an empty shard has no address, and is tied all the same.
    storage = tensor.untyped_storage()
    place = (
        tensor.device,
        storage.data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        part.whole,
        part.region,
        tensor.stride(),
    )
    if math.prod(part.whole) and storage.nbytes() and place in seen:
        return seen[place]
    name = path
    while name in parts:
        name += "'"
    parts[name] = part._replace(local=tensor.detach())
    seen[place] = name
    return name


def write_tensors(
    snapshot: Snapshot,
    folder: Path,
    *,
    file_name: str,
    disk: Disk,
    go_on: Callable[[], None] = lambda: None,
) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
    """Write what this process has to write into one durable safetensors file.

    Returns what the manifest says of the file and of its pieces. ``go_on``: called before each
    piece; raises where the rest is not wanted any more.
    """
    parts = {name: snapshot.parts[name] for name in snapshot.written}
    names = in_file_order(snapshot)
    header = _header({name: parts[name].local for name in names}, names)
    entries: list[TensorEntry] = []

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        position = len(header)
        for name in names:
            part_here, tensor = parts[name], parts[name].local
            pieces = []
            for offset, shape, start, end in _ranges(tuple(tensor.shape), tensor.element_size()):
                go_on()
                part = bytes_of(narrowed(tensor, offset, shape))
                pieces.append(
                    Piece(
                        offset=_added(part_here.region.offset, offset),
                        shape=shape,
                        file=file_name,
                        start=position + start,
                        end=position + end,
                        digest=digest_of(part),
                    )
                )
                yield part
            position += bytes_in(tensor)
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=_DTYPE_NAMES[tensor.dtype],
                    shape=part_here.whole,
                    pieces=tuple(pieces),
                )
            )

    size = len(header) + sum(bytes_in(parts[name].local) for name in names)
    disk.write_new_file(folder / file_name, chunks(), size=size)
    entry = FileEntry(
        name=file_name, size=size, header_end=len(header), header_digest=digest_of(header)
    )
    return entry, tuple(entries)


def in_file_order(snapshot: Snapshot) -> list[str]:
    """Return the names that this process writes, in the order in which they lie in its file."""
    sizes = {name: snapshot.parts[name].local.element_size() for name in snapshot.written}
    return sorted(sizes, key=lambda name: _file_order(name, sizes[name]))


def merge(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return one entry a tensor, with the pieces that all ranks wrote of it."""
    found: dict[str, TensorEntry] = {}
    for entry in entries:
        earlier = found.get(entry.name)
        pieces = entry.pieces if earlier is None else earlier.pieces + entry.pieces
        found[entry.name] = replace(entry, pieces=pieces)
    return tuple(
        sorted(found.values(), key=lambda e: _file_order(e.name, DTYPES[e.dtype].itemsize))
    )


def _file_order(name: str, item_bytes: int) -> tuple[int, str]:
    """Order wide types first, as safetensors does: each tensor is aligned to its own width."""
    return -item_bytes, name


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def narrowed(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the view of the block that begins at `offset`."""
    for axis, (low, size) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(axis, low, size)
    return tensor


def bytes_in(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; a contiguous one is not copied."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _header(tensors: Mapping[str, torch.Tensor], names: list[str]) -> bytes:
    """Return a safetensors header, padded with spaces so that the data begin at a block."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _ranges(
    shape: tuple[int, ...], item_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """Yield (offset, shape, start byte, end byte) of the pieces of a contiguous tensor, in order.

    Rows of the first axis go together up to `PIECE_BYTES_MAX`; a row larger than that is cut along
    the next axis, and so on.
    """
    total = math.prod(shape) * item_bytes
    if total <= PIECE_BYTES_MAX or not shape:
        yield (0,) * len(shape), shape, 0, total
        return
    row_bytes = total // shape[0]
    if row_bytes > PIECE_BYTES_MAX:
        for row in range(shape[0]):
            for offset, inner, start, end in _ranges(shape[1:], item_bytes):
                base = row * row_bytes
                yield (row, *offset), (1, *inner), base + start, base + end
        return
    rows = PIECE_BYTES_MAX // row_bytes
    for row in range(0, shape[0], rows):
        count = min(rows, shape[0] - row)
        yield (
            (row, *(0,) * (len(shape) - 1)),
            (count, *shape[1:]),
            row * row_bytes,
            (row + count) * row_bytes,
        )
