"""What a run's checkpoint of one file says of itself, and its state.

Guarantees: what is returned of a file was checked first: the facts against their own digest, the
state against the CRC of every record; no code of a file is run.

Beside the state's own keys the file holds `keepstep`, the facts of a manifest as plain values:
`torch.load(path, weights_only=True)` gives both. Of digests a file has none but that of the facts.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import CheckpointDamaged, NotOfARun, UnsafeState
from keepstep.store.archive import fault_in, load_archive
from keepstep.store.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    digest_of,
    from_bytes,
    to_bytes,
)
from keepstep.store.regular import opened
from keepstep.store.single_file import load_checkpoint

if TYPE_CHECKING:
    from keepstep.store.shards import Place

FACTS_KEY = "keepstep"
FILES_REMEMBERED = 1024


def check_keys(state: Mapping[str, Any]) -> None:
    """Raise UnsafeState where a state has our key at its top."""
    if FACTS_KEY in state:
        raise UnsafeState(
            f"the state has a key {FACTS_KEY!r}, where one file holds the facts of the save",
            hint="Give it another name, or save in folders.",
        )


def with_facts(state: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Return what a file of that state holds."""
    return {**state, FACTS_KEY: json.loads(to_bytes(manifest))}


def sized(manifest: Manifest, size: int) -> Manifest:
    """Return the manifest of a file with the file in it, which cannot know its own size."""
    entry = FileEntry(name=manifest.name, size=size, header_end=size, header_digest="")
    return replace(manifest, files=(entry,))


def read_facts(path: Path) -> Manifest:
    """Return the facts of a file and its tensors' names; CheckpointDamaged says what is wrong.

    The bytes of the tensors are not read.
    """
    with opened(path) as file:
        fault = fault_in(file, whole=False)
        found = os.fstat(file.fileno())
    if fault is not None:
        raise CheckpointDamaged(fault)
    return _facts_of(path, found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


# Each save looks at all of them, and unpickling takes milliseconds a file.
@functools.lru_cache(maxsize=FILES_REMEMBERED)
def _facts_of(path: Path, _device: int, _inode: int, _changed: int, size: int) -> Manifest:
    # Mapped: of the tensors, only names and shapes are wanted.
    content = load_archive(str(path), path, map_location="cpu", mmap=True)
    facts = content.pop(FACTS_KEY, None) if isinstance(content, dict) else None
    if not isinstance(facts, dict):
        raise NotOfARun("no run saved it: it has no facts of one")
    try:
        text = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
        manifest = replace(from_bytes(text + b"\n"), tensors=tuple(_tensors(content, "")))
    except RecursionError as error:
        raise _too_deep() from error
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"its facts are malformed: {error}") from error
    if not manifest.is_file:
        raise CheckpointDamaged("its facts are those of a folder")
    return sized(manifest, size)


def state_digest(path: Path) -> str:
    """Return the digest of the state in a whole file: equal for equal states, whenever saved."""
    from keepstep.store.tensors import bytes_of, take_apart

    # Mapped: one tensor at a time is in memory.
    content = load_archive(str(path), path, map_location="cpu", mmap=True)
    del content[FACTS_KEY]
    snapshot = take_apart(content)
    tensors = [digest_of(bytes_of(part.local)) for part in snapshot.parts.values()]
    return digest_of(json.dumps([snapshot.digest(), tensors]).encode())


def _too_deep() -> CheckpointDamaged:
    """Return the error for what no save can have written: `take_apart` refuses such a state."""
    return CheckpointDamaged("it is nested too deeply")


def _tensors(value: Any, name: str) -> Iterator[TensorEntry]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}.{number}")
    elif hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        yield TensorEntry(name=name, dtype=dtype, shape=tuple(value.shape), pieces=())


def read_file(
    path: Path,
    *,
    only: str | None,
    place_of: Callable[[str, tuple[int, ...]], "Place | None"],
) -> dict[str, Any]:
    """Return the state of a file, every byte checked; ``only``: one key at its top.

    ``place_of``: where a tensor of that name and shape goes, or None for one that is whole.
    """
    state: dict[str, Any] = load_checkpoint(path)
    state.pop(FACTS_KEY, None)
    if only is not None:
        if only not in state:
            raise CheckpointDamaged(f"{path.name} holds no {only!r}: only {sorted(state)}")
        state = {only: state[only]}
    try:
        return {key: _placed(value, str(key), place_of) for key, value in state.items()}
    except RecursionError as error:
        raise _too_deep() from error


def _placed(value: Any, name: str, place_of: Callable[..., "Place | None"]) -> Any:
    """Return a tree in which every tensor is at its place, this rank's region of it."""
    if isinstance(value, dict):
        return {key: _placed(item, f"{name}.{key}", place_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(
            _placed(item, f"{name}.{number}", place_of) for number, item in enumerate(value)
        )
    place = place_of(name, tuple(value.shape)) if hasattr(value, "dtype") else None
    if place is None:
        return value
    region, part = place.region, value
    for axis, (start, length) in enumerate(zip(region.offset, region.shape, strict=True)):
        part = part.narrow(axis, start, length)
    return place.assemble(part.contiguous().clone())
