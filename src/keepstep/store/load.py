"""Read one checkpoint, for use without a session: verified, without a lock."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import CheckpointDamaged
from keepstep.store.catalog import look_at, pointed_at
from keepstep.store.file_read import read_file
from keepstep.store.layout import ASIDE_NAME
from keepstep.store.manifest import Manifest

if TYPE_CHECKING:
    from keepstep.store.shards import Place


def load_state(path: Path | str, *, only: str | None = None) -> dict[str, Any]:
    """Return the state of one checkpoint's folder or file; ``only``: one key at its top.

    Raises CheckpointDamaged where a byte is not what was saved.
    """

    folder = Path(path)
    if folder.is_file() and (name := pointed_at(folder)) is not None:
        folder = folder.with_name(name)
    folder = folder.resolve()
    entry = look_at(folder, aside=folder.parent.name == ASIDE_NAME)
    if entry.manifest is None:
        raise CheckpointDamaged(f"{path}: {entry.fault}")
    return read_checkpoint(entry.path, entry.manifest, only=only)


def read_checkpoint(
    path: Path,
    manifest: Manifest,
    *,
    only: str | None = None,
    place_of: "Callable[[str, tuple[int, ...]], Place | None]" = lambda _name, _shape: None,
) -> dict[str, Any]:
    """Return the state of a checkpoint of either layout; see `reading.read_state`."""
    if manifest.is_file:
        return read_file(path, only=only, place_of=place_of)
    from keepstep.store.reading import read_state

    return read_state(path, manifest, only=only, place_of=place_of)
