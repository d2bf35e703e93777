"""The attempts to commit one save: again after an error of the disk, with back-off.

Guarantees: each attempt begins with files and names of its own, from the same bytes; an error that
another attempt cannot mend is raised at once; after the last one every older checkpoint is as it
was, and the error says which is the newest.
"""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.errors import SaveAbandoned, SaveFailed, room_by_prune, way_out
from keepstep.store.disk import Disk
from keepstep.store.manifest import Facts, Manifest
from keepstep.store.methods import Saving
from keepstep.store.ranks import Ranks
from keepstep.store.read_back import read_back

_BACK_OFF_SECONDS = (0.5, 2.0, 8.0)


def commit_with_retries(
    snapshot: Any,
    facts: Facts,
    *,
    commit: Callable[..., tuple[Manifest, bool]],
    folder: Path,
    newest: Manifest | None,
    saving: Saving,
    disk: Disk,
    ranks: Ranks,
    halt: threading.Event,
    on_event: Callable[..., None],
) -> tuple[Manifest, bool]:
    """Commit; return the manifest, and whether it is a new one.

    ``commit``: makes one attempt, from what it takes for a ``snapshot``. ``saving``: how often, and
    whether each is read back from the disk; see `read_back`. ``halt``: set to give up, on any rank:
    SaveAbandoned on all of them.
    """
    for attempt in range(saving.retries + 1):
        try:
            manifest, new = commit(
                snapshot,
                facts,
                folder=folder,
                disk=disk,
                ranks=ranks,
                halt=halt,
                on_event=on_event,
            )
            _tell_refusals(disk, on_event)
            if saving.verify_after_write:
                read_back(
                    folder / manifest.name,
                    step=facts.step,
                    disk=disk,
                    ranks=ranks,
                    halt=halt,
                    on_event=on_event,
                )
            return manifest, new
        except OSError as error:
            _tell_refusals(disk, on_event)
            if attempt == saving.retries:
                raise _save_failed(error, facts.step, folder, newest) from error
            on_event("retry", attempt=attempt + 1, step=facts.step, error=str(error))
            if halt.wait(back_off_seconds(attempt)):
                raise SaveAbandoned(f"the save of step {facts.step} was given up") from error
    raise AssertionError("the loop above returns or raises")


def back_off_seconds(attempt: int) -> float:
    """Return how long to wait after an attempt (from 0) that failed."""
    return _BACK_OFF_SECONDS[min(attempt, len(_BACK_OFF_SECONDS) - 1)]


def _tell_refusals(disk: Disk, on_event: Callable[..., None]) -> None:
    for what in disk.take_refused():
        on_event("disk_refused", what=what)


def _save_failed(error: OSError, step: int, folder: Path, newest: Manifest | None) -> SaveFailed:
    then = "run the same command to continue"
    hint = way_out(error, then=then) or f"Mend the disk, then {then}."
    if newest is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint += f"\n{room_by_prune(folder)}"
    name = newest.name if newest is not None else "none"
    return SaveFailed(
        f"step {step} could not be saved in {folder}: {error};"
        f" the newest checkpoint is {name}, and every older one is as it was",
        hint=hint,
    )
