"""Collect what a dead session left behind.

Guarantees: only names that a save, a delete or a rename in progress can have are touched, and
only under the folder's lock, so that whoever made them is gone.
"""

from pathlib import Path

from keepstep.store.disk import Disk
from keepstep.store.layout import is_leftover


def sweep(folder: Path, disk: Disk) -> list[str]:
    """Remove leftovers from a folder; return their names."""
    names = sorted(path.name for path in folder.iterdir() if is_leftover(path.name))
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            disk.remove_tree(path)
        else:
            disk.unlink(path)
    return names
