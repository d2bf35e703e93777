"""Collect what a dead session left behind.

Guarantees: only names that a save, a delete or a rename in progress can have are touched, and
only under the folder's lock, so that whoever made them is gone. A leftover harms nobody: one that
cannot be removed is told, and stops nothing.
"""

from collections.abc import Callable
from pathlib import Path

from keepstep.store.disk import Disk
from keepstep.store.layout import is_leftover


def sweep(folder: Path, disk: Disk, on_event: Callable[..., None]) -> None:
    """Remove leftovers from a folder and tell `swept`, or `housekeeping_failed`, of each."""
    for name in sorted(path.name for path in folder.iterdir() if is_leftover(path.name)):
        path = folder / name
        try:
            if path.is_dir() and not path.is_symlink():
                disk.remove_tree(path)
            else:
                disk.unlink(path)
        except OSError as error:
            on_event("housekeeping_failed", error=str(error))
        else:
            on_event("swept", name=name)
