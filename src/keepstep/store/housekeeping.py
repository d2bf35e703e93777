"""What follows a commit: the links for people, and the delete of what has no reason to stay.

Guarantees: it comes after the new checkpoint is durable; what it cannot do is told and makes no
save a failure; roles and pins are looked at again at the moment of a deletion.
"""

from collections.abc import Callable
from pathlib import Path

from keepstep.errors import CheckpointDamaged, Locked
from keepstep.store.catalog import checkpoints_in
from keepstep.store.disk import Disk
from keepstep.store.manifest import Best, Manifest
from keepstep.store.pins import delete_unless_pinned
from keepstep.store.retention import Retention, reasons_to_keep


def point_links(
    folder: Path,
    *,
    newest: Manifest | None,
    best: Best | None,
    point: Callable[..., None],
    disk: Disk,
    on_event: Callable[..., None],
) -> None:
    """Point `latest` and `best`; where that fails it is told: nothing but people needs them."""
    try:
        point(
            folder,
            latest=newest.step if newest is not None else None,
            best=best.step if best is not None else None,
            disk=disk,
        )
    except OSError as error:
        on_event("housekeeping_failed", error=str(error))


def retain(
    folder: Path,
    policy: Retention,
    *,
    now: float,
    best: Best | None,
    disk: Disk,
    on_event: Callable[..., None],
) -> None:
    """Delete every checkpoint that the policy has no reason to keep."""
    entries = {
        entry.manifest.sequence: entry
        for entry in checkpoints_in(folder)
        if entry.manifest is not None
    }
    reasons = reasons_to_keep(
        [entry.manifest for entry in entries.values() if entry.manifest is not None],
        policy,
        now=now,
        best=best.sequence if best is not None else None,
    )
    try:
        for sequence, kept_because in reasons.items():
            entry = entries[sequence]
            if not kept_because and delete_unless_pinned(folder, entry, disk=disk):
                on_event("deleted", name=entry.name)
    except (OSError, CheckpointDamaged, Locked) as error:
        on_event("housekeeping_failed", error=str(error))
