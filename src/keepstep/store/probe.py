"""What a file system can do, tried at the start of each session: folders may move between them.

Guarantees: a method is chosen only where the file system refuses the better one; any other error
is an error. What is tried stands in one folder with a leftover's name. Nothing is synced: it is
worth nothing a moment later.

What it cannot see: a rename that is made as a copy (some object stores) looks like one. Where that
is so, `checkpoint.commit_method = "manifest-last"` says it.
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.errors import CannotSave
from keepstep.store.disk import Disk
from keepstep.store.layout import probe_name
from keepstep.store.methods import CommitMethod, Methods, refuses_links

_REFUSALS = frozenset(
    {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EMFILE}
)
"""What file systems say to an operation that they do not have. EMFILE: a rename of a folder is made
as one of each file in it, and those are too many."""


def probe(
    folder: Path,
    disk: Disk,
    wanted: Literal["auto", "file"] | CommitMethod = "auto",
    on_event: Callable[..., None] = lambda _event, **_facts: None,
) -> None:
    """Have `disk` use the methods that work in `folder`; CannotSave where none is safe there.

    ``wanted``: the method of the commit, or auto for the best that works; file: checkpoints are
    single files, which need neither folders that can be renamed nor links. ``on_event`` hears
    `methods` where they are not the usual ones, with the reason, and `housekeeping_failed`.
    """
    place = folder / probe_name()
    disk.make_folder(place)
    try:
        disk.methods = _try(place, disk, wanted)
    except (OSError, CannotSave) as error:
        disk.discard(place, because=error)
        raise
    try:
        disk.remove_tree(place)
    except OSError as error:
        # A leftover harms nobody; the next session sweeps it away.
        on_event("housekeeping_failed", error=str(error))
    if disk.methods != Methods():
        on_event("methods", methods=str(disk.methods), why=_why(disk.methods, wanted))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a folder's file system can do, and how far its clock is from this machine's."""

    methods: Methods
    hard_links: bool
    skew_seconds: float


def try_out(folder: Path, wanted: Literal["auto", "file"] | CommitMethod) -> Tried:
    """Try what a session would try, and leave nothing; CannotSave where no save is safe there."""
    disk = Disk()
    place = folder / probe_name()
    disk.make_folder(place)
    try:
        methods = _try(place, disk, wanted)
        before, file = time.time(), place / "file"
        disk.close(disk.create(file), file)
        made, after = file.stat().st_mtime, time.time()
        tried = Tried(
            methods=methods,
            hard_links=_has_hard_links(file, disk),
            skew_seconds=made - min(max(made, before), after),
        )
    # Also where a person interrupts it: no session may ever come to sweep this place.
    except BaseException as error:
        disk.discard(place, because=error)
        raise
    disk.remove_tree(place)
    return tried


def _has_hard_links(file: Path, disk: Disk) -> bool:
    try:
        disk.link(file, file.with_name("hard"))
    except OSError as error:
        if not refuses_links(error):
            raise
        return False
    return True


def _why(methods: Methods, wanted: str) -> str:
    reasons = []
    if methods.commit == "manifest-last":
        asked = wanted == "manifest-last"
        cannot = "this file system cannot rename a folder"
        reasons.append("checkpoint.commit_method asks for it" if asked else cannot)
    if methods.pointers == "files":
        reasons.append("this file system has no symbolic links")
    return ", and ".join(reasons)


def _try(place: Path, disk: Disk, wanted: str) -> Methods:
    inner, old, new = place / "inner", place / "old", place / "new"
    disk.make_folder(inner)
    # Not empty: some can rename empty folders only.
    for path in (inner / "file", old, new):
        disk.close(disk.create(path), path)
    refusal = _refusal(lambda: disk.rename(old, new))
    if refusal is not None:
        raise CannotSave(
            f"the file system of {place.parent} cannot replace a file by a rename"
            f" ({os.strerror(refusal)}), and without that no save is safe",
            hint="Choose a folder on another file system.",
        )
    if wanted == "file":
        return Methods()
    if wanted != "manifest-last":
        refusal = _refusal(lambda: disk.rename(inner, place / "renamed"))
        if refusal is not None and wanted == "rename":
            raise CannotSave(
                f"the file system of {place.parent} cannot rename a folder"
                f" ({os.strerror(refusal)}), and the commit method is to be `rename`",
                hint="Set checkpoint.commit_method to auto.",
            )
    links = _refusal(lambda: disk.symlink("new", place / "link")) is None
    return Methods(
        commit="manifest-last" if wanted == "manifest-last" or refusal is not None else "rename",
        pointers="links" if links else "files",
    )


def _refusal(operation: Callable[[], None]) -> int | None:
    """Return the error's number where the file system does not have an operation, else None."""
    try:
        operation()
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return error.errno
    return None
