"""Collect what a dead session left behind.

Guarantees: only names that a save, a delete or a rename in progress can have are touched, with the
folders that a file of ours hides, and only under the folder's lock, so that whoever made them is
gone. A leftover harms nobody: one that cannot be removed is told, and stops nothing.
"""

from collections.abc import Callable
from pathlib import Path

from keepstep.store.commit import remove
from keepstep.store.disk import Disk
from keepstep.store.layout import ASIDE_NAME, is_leftover, unfinished_of


def sweep(folder: Path, disk: Disk, on_event: Callable[..., None]) -> None:
    """Remove leftovers from a folder and tell `swept`, or `housekeeping_failed`, of each."""
    for place in (folder, folder / ASIDE_NAME):
        for path in sorted(place.iterdir()) if place.is_dir() else []:
            hidden = unfinished_of(path.name)
            if hidden is None and not is_leftover(path.name):
                continue
            try:
                if hidden is not None:
                    remove(path.with_name(hidden), disk=disk)
                elif path.is_dir() and not path.is_symlink():
                    disk.remove_tree(path)
                else:
                    disk.unlink(path)
            except OSError as error:
                on_event("housekeeping_failed", error=str(error))
            else:
                on_event("swept", name=hidden or path.name)
