"""State to safetensors pieces and back; with the sharded writer the only user of torch here.

Guarantees:
1. A state that holds anything but tensors and plain values is refused before a byte is written.
2. A tensor that is shared (tied weights) is stored once and comes back shared within one state.
3. Every digest is taken from the very bytes that are handed to the disk.
4. Loading looks at the manifest's byte ranges only; the file's own header is compared with its
   digest and never believed, and nothing is allocated before the sizes are known to be right.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import CheckpointDamaged, UnsafeState
from keepstep.store.disk import Disk
from keepstep.store.manifest import FileEntry, Manifest, Piece, TensorEntry, digest_of
from keepstep.store.plain import TensorReference, decode, encode

PIECE_BYTES_MAX = 64 << 20
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
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A state taken apart: its plain tree as JSON, and its tensors by name, shared ones once."""

    plain: Any
    tensors: dict[str, torch.Tensor]


def take_apart(state: Mapping[str, Any]) -> Snapshot:
    """Take a state apart; UnsafeState names the path of what cannot be kept. Copies nothing."""
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def separate(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorReference(_register(value, path, tensors, seen))
        if type(value) is list or type(value) is tuple:
            return type(value)(separate(item, f"{path}.{n}") for n, item in enumerate(value))
        if isinstance(value, Mapping):
            return {
                key: separate(item, f"{path}.{key}" if path else str(key))
                for key, item in value.items()
            }
        return value

    tree = separate(state, "")
    return Snapshot(plain=encode(tree, path="state"), tensors=tensors)


def _register(
    tensor: torch.Tensor,
    path: str,
    tensors: dict[str, torch.Tensor],
    seen: dict[tuple[Any, ...], str],
) -> str:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UnsafeState(f"{path} is a tensor without plain dense bytes ({tensor.layout})")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsafeState(f"{path} is a {type(tensor).__qualname__}, not a plain tensor")
    if tensor.dtype not in _DTYPE_NAMES:
        raise UnsafeState(f"{path} has the type {tensor.dtype}, which safetensors cannot hold")
    place = (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )
    if tensor.numel() and place in seen:
        return seen[place]
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = tensor.detach()
    seen[place] = name
    return name


def write_tensors(
    snapshot: Snapshot, folder: Path, *, file_name: str, disk: Disk
) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
    """Write the tensors into one durable safetensors file; return what the manifest says of it."""
    # Wide types first, as safetensors does, so that every tensor is aligned to its own width.
    names = sorted(
        snapshot.tensors, key=lambda name: (-snapshot.tensors[name].element_size(), name)
    )
    header = _header(snapshot.tensors, names)
    entries: list[TensorEntry] = []

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        position = len(header)
        for name in names:
            tensor = snapshot.tensors[name]
            data, pieces = _bytes_of(tensor), []
            for offset, shape, start, end in _ranges(tuple(tensor.shape), tensor.element_size()):
                part = data[start:end]
                pieces.append(
                    Piece(
                        offset=offset,
                        shape=shape,
                        file=file_name,
                        start=position + start,
                        end=position + end,
                        digest=digest_of(part),
                    )
                )
                yield part
            position += len(data)
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=_DTYPE_NAMES[tensor.dtype],
                    shape=tuple(tensor.shape),
                    pieces=tuple(pieces),
                )
            )

    size = disk.write_new_file(folder / file_name, chunks())
    entry = FileEntry(
        name=file_name, size=size, header_end=len(header), header_digest=digest_of(header)
    )
    return entry, tuple(entries)


def read_state(folder: Path, manifest: Manifest, *, only: str | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint whose sizes were checked, verifying every byte it reads.

    ``only``: the one key at the top of the state that is wanted. Raises CheckpointDamaged.
    """
    tree = decode(manifest.plain)
    if not isinstance(tree, dict):
        raise CheckpointDamaged("the plain state is not a table")
    if only is not None:
        if only not in tree:
            raise CheckpointDamaged(f"the checkpoint holds no {only!r}: only {sorted(tree)}")
        tree = {only: tree[only]}
    check_headers(folder, manifest)
    entries = {entry.name: entry for entry in manifest.tensors}
    loaded: dict[str, torch.Tensor] = {}

    def put_together(value: Any) -> Any:
        if isinstance(value, TensorReference):
            if value.name not in entries:
                raise CheckpointDamaged(f"the tensor {value.name} is not in the manifest")
            if value.name not in loaded:
                loaded[value.name] = _read_tensor(folder, entries[value.name])
            return loaded[value.name]
        if isinstance(value, (list, tuple)):
            return type(value)(put_together(item) for item in value)
        if isinstance(value, dict):
            return {key: put_together(item) for key, item in value.items()}
        return value

    state: dict[str, Any] = put_together(tree)
    return state


def check_headers(folder: Path, manifest: Manifest) -> None:
    """Compare each data file's header with its digest; CheckpointDamaged names the file."""
    for entry in manifest.files:
        with (folder / entry.name).open("rb") as file:
            if digest_of(file.read(entry.header_end)) != entry.header_digest:
                raise CheckpointDamaged(f"the header of {entry.name} does not match its digest")


def _read_tensor(folder: Path, entry: TensorEntry) -> torch.Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointDamaged(f"{entry.name} has an unknown type {entry.dtype!r}")
    stored = sum(piece.end - piece.start for piece in entry.pieces)
    if stored != math.prod(entry.shape) * dtype.itemsize:
        raise CheckpointDamaged(f"{entry.name} has {stored:,} bytes, which is not its shape's")
    tensor = torch.empty(entry.shape, dtype=dtype)
    for piece in entry.pieces:
        _read_piece(folder, entry, piece, tensor)
    return tensor


def _read_piece(folder: Path, entry: TensorEntry, piece: Piece, tensor: torch.Tensor) -> None:
    length = piece.end - piece.start
    inside = all(
        low >= 0 and size > 0 and low + size <= limit
        for low, size, limit in zip(piece.offset, piece.shape, entry.shape, strict=False)
    )
    if length and (not inside or len(piece.offset) != len(entry.shape)):
        raise CheckpointDamaged(f"a piece of {entry.name} lies outside the tensor")
    if length != math.prod(piece.shape) * tensor.element_size():
        raise CheckpointDamaged(f"a piece of {entry.name} has another size than its shape")
    if not length:
        return
    region = tensor
    for axis, (low, size) in enumerate(zip(piece.offset, piece.shape, strict=True)):
        region = region.narrow(axis, low, size)
    target = region if region.is_contiguous() else torch.empty_like(region).contiguous()
    data = _bytes_of(target)
    with (folder / piece.file).open("rb", buffering=0) as file:
        file.seek(piece.start)
        _read_into(data, file.readinto)
    if digest_of(data) != piece.digest:
        raise CheckpointDamaged(
            f"{piece.file}: bytes {piece.start:,} to {piece.end:,} ({entry.name}) do not match"
            " their digest"
        )
    if target is not region:
        region.copy_(target)


def _read_into(data: memoryview, read: Callable[[memoryview], int | None]) -> None:
    filled = 0
    while filled < len(data):
        count = read(data[filled:])
        if not count:
            raise CheckpointDamaged("a data file ended early")
        filled += count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
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
