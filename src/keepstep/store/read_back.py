"""Reading a committed checkpoint back from the disk, before anything older is let go.

Guarantees: every byte was read past the page cache and compared with its digest, or the checkpoint
is set aside and the attempt has failed, on all ranks alike. The next attempt writes all of it anew,
elsewhere on the disk. Nothing committed is modified: that it was read back is told, not written.

Without it a disk that took the bytes and keeps others is found by the resume, when retention has
deleted what it could have continued from.
"""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.store.archive import fault_of
from keepstep.store.commit import set_aside
from keepstep.store.disk import Disk
from keepstep.store.layout import is_file_name
from keepstep.store.manifest import read_manifest
from keepstep.store.ranks import Ranks, first, together
from keepstep.store.verify import faults_in


def read_back(
    path: Path,
    *,
    step: int,
    disk: Disk,
    ranks: Ranks,
    halt: threading.Event,
    on_event: Callable[..., None],
) -> None:
    """Tell `verified_on_disk`; OSError where a byte differs, the checkpoint then being in aside/.

    Each rank reads its share of the files. Where ``halt`` is set meanwhile the rest is not read,
    which is told as `not_read_back`: the checkpoint is committed all the same.
    """
    begun = time.monotonic()

    def own() -> dict[str, list[str]] | None:
        if is_file_name(path.name):
            fault = fault_of(path, from_disk=True) if ranks.rank == 0 else None
            return {"faults": [f"{path.name}: {fault}"] if fault else []}
        manifest, faults = read_manifest(path), []
        for entry in manifest.files[ranks.rank :: ranks.size]:
            found = faults_in(path, manifest, entry, from_disk=True, give_up=halt.is_set)
            if found is None:
                return None
            faults += [f"{fault.file}: {fault.message}" for fault in found]
        return {"faults": faults}

    answers = together(ranks, "save: read back", own)
    faults = [fault for answer in answers if answer is not None for fault in answer["faults"]]
    if faults:
        name = first(ranks, "save: set aside", lambda: set_aside(path, disk=disk))
        on_event("set_aside", name=path.name, new_name=name)
        more = f" and {len(faults) - 1} more" * (len(faults) > 1)
        text = f"the disk does not hold what was written: {faults[0]}{more}"
        raise OSError(errno.EIO, text, str(path.parent / name))
    if None in answers:
        on_event("not_read_back", step=step)
    else:
        on_event("verified_on_disk", step=step, seconds=time.monotonic() - begun)
