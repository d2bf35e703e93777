"""Read one checkpoint, for use without a session: verified, without a lock."""

from pathlib import Path
from typing import Any

from keepstep.errors import CheckpointDamaged
from keepstep.store.catalog import look_at
from keepstep.store.layout import ASIDE_NAME


def load_state(path: Path | str, *, only: str | None = None) -> dict[str, Any]:
    """Return the state of one checkpoint's folder; ``only``: one key at its top.

    Raises CheckpointDamaged where a byte is not what was saved.
    """
    from keepstep.store.reading import read_state

    folder = Path(path).resolve()
    entry = look_at(folder, aside=folder.parent.name == ASIDE_NAME)
    if entry.manifest is None:
        raise CheckpointDamaged(f"{path}: {entry.fault}")
    return read_state(entry.path, entry.manifest, only=only)
