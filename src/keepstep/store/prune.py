"""A plan of what to delete by hand, and carrying it out.

Guarantees: planning changes nothing. What is best, pinned, or the newest checkpoint whose every
byte is right never goes: where the newest one is damaged inside, an older one stays for it, or a
prune could leave a run with nothing to continue from. A damaged one is left for people to look at,
as is one that is not this run's.
Each deletion is a commit, and looks at the pins again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import CheckpointDamaged, OtherRun
from keepstep.store.catalog import Checkpoint, checkpoints_in, files_in
from keepstep.store.disk import Disk
from keepstep.store.lock import FolderLock
from keepstep.store.pins import Pins, delete_unless_pinned, identity_of, read_pins
from keepstep.store.probe import probe
from keepstep.store.retention import Retention, reasons_to_keep
from keepstep.store.roles import best_sequence, whose
from keepstep.store.verify import verify

DAMAGED, ASIDE, NEWEST_WHOLE, PINNED = "damaged", "aside", "newest whole", "pinned"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A checkpoint, why it stays (nothing: it goes), and the bytes that it holds alone."""

    entry: Checkpoint
    reasons: tuple[str, ...]
    bytes: int


def kept_because(
    folder: Path, entries: list[Checkpoint], policy: Retention | None, *, now: float
) -> dict[Path, tuple[str, ...] | None]:
    """Return for each checkpoint why retention keeps it; nothing where the next save deletes it.

    None where it depends on a policy that is not known.
    """
    pins = read_pins(folder)
    foreign = {entry.path: whose(entry, entries) for entry in entries}
    standing = [
        entry.manifest
        for entry in entries
        if entry.manifest and not entry.aside and not foreign[entry.path]
    ]
    reasons: dict[int, list[str]] = {}
    if standing:
        reasons = reasons_to_keep(
            standing,
            policy or Retention(keep_last_n=1),
            now=now,
            best=best_sequence(folder, standing),
            pinned={m.sequence for m in standing if identity_of(m) in pins},
        )
    return {
        entry.path: (foreign[entry.path],)
        if foreign[entry.path]
        else _reasons_of(entry, reasons, pins, policy)
        for entry in entries
    }


def _reasons_of(
    entry: Checkpoint, reasons: dict[int, list[str]], pins: Pins, policy: Retention | None
) -> tuple[str, ...] | None:
    if entry.manifest is None:
        return (ASIDE, DAMAGED) if entry.aside else (DAMAGED,)
    if entry.aside:
        return (ASIDE, PINNED) if identity_of(entry.manifest) in pins else (ASIDE,)
    found = reasons[entry.manifest.sequence]
    if policy is None:
        # The policy that stood in for the unknown one is no reason.
        return tuple(reason for reason in found if reason != "last 1") or None
    return tuple(found)


def plan(folder: Path, policy: Retention, *, aside: bool, now: float) -> list[Planned]:
    """Return what would stay and why, and what would go. Reads every byte of the newest one.

    Raises CheckpointDamaged where no checkpoint is whole: each may hold what a person can save.
    """
    entries = checkpoints_in(folder, aside=True)
    found = kept_because(folder, entries, policy, now=now)
    whole = _newest_whole(entries)
    planned = []
    for entry in entries:
        reasons = found[entry.path] or ()
        if entry is whole:
            reasons = (*reasons, NEWEST_WHOLE)
        if aside and entry.aside:
            reasons = tuple(reason for reason in reasons if reason == PINNED)
        planned.append(Planned(entry=entry, reasons=reasons, bytes=_bytes_alone(entry.path)))
    return planned


def carry_out(
    folder: Path,
    planned: list[Planned],
    *,
    lock: FolderLock,
    disk: Disk,
    on_deleted: Callable[[Planned], None],
) -> None:
    """Delete what the plan lets go, oldest first; only under the lock under which it was made."""
    manifests = [item.entry.manifest for item in planned if item.entry.manifest]
    hidden = any(manifest.commit_method.startswith("manifest-last") for manifest in manifests)
    # A rename that is a copy looks like one: only the run's own choice tells of it.
    probe(folder, disk, "manifest-last" if hidden else "auto")
    for item in planned:
        if not item.reasons:
            lock.confirm()
            if delete_unless_pinned(folder, item.entry, disk=disk):
                on_deleted(item)


def _newest_whole(entries: list[Checkpoint]) -> Checkpoint | None:
    standing = [entry for entry in entries if not entry.aside]
    if standing and all(whose(entry, entries) for entry in standing):
        raise OtherRun(
            f"{standing[0].path.parent} holds no checkpoint of this run; nothing is deleted",
            hint="`keepstep ckpt ls` shows whose each one is.",
        )
    standing = [entry for entry in standing if not whose(entry, entries)]
    for entry in reversed(standing):
        if entry.manifest is not None and not verify(entry):
            return entry
    if standing:
        raise CheckpointDamaged(
            f"none of the checkpoints in {standing[0].path.parent} is whole; nothing is deleted",
            hint="`keepstep ckpt verify` names what is damaged.",
        )
    return None


def _bytes_alone(path: Path) -> int:
    """Return the bytes that a delete frees: a file with another name elsewhere frees none."""
    return sum(fact.st_size for fact in files_in(path) if fact.st_nlink == 1)
