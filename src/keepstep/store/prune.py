"""A plan of what to delete by hand, and carrying it out.

Guarantees: planning changes nothing. What is best, pinned, or the newest checkpoint whose every
byte is right never goes: where the newest one is damaged inside, an older one stays for it, or a
prune could leave a run with nothing to continue from. A damaged one is left for people to look at.
Each deletion is a commit, and looks at the pins again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import CheckpointDamaged
from keepstep.store.catalog import Checkpoint, checkpoints_in
from keepstep.store.disk import Disk
from keepstep.store.lock import FolderLock
from keepstep.store.pins import Pins, delete_unless_pinned, identity_of, read_pins
from keepstep.store.retention import Retention, reasons_to_keep
from keepstep.store.roles import best_sequence
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
    standing = [entry.manifest for entry in entries if entry.manifest and not entry.aside]
    reasons: dict[int, list[str]] = {}
    if standing:
        newest = max(standing, key=lambda manifest: manifest.sequence)
        reasons = reasons_to_keep(
            standing,
            policy or Retention(keep_last_n=1),
            now=now,
            best=best_sequence(folder, newest),
            pinned={m.sequence for m in standing if identity_of(m) in pins},
        )
    return {entry.path: _reasons_of(entry, reasons, pins, policy) for entry in entries}


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
    for item in planned:
        if not item.reasons:
            lock.confirm()
            if delete_unless_pinned(folder, item.entry, disk=disk):
                on_deleted(item)


def _newest_whole(entries: list[Checkpoint]) -> Checkpoint | None:
    standing = [entry for entry in entries if not entry.aside]
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
    files = path.iterdir() if path.is_dir() else [path]
    facts = [file.lstat() for file in files if file.is_file()]
    return sum(fact.st_size for fact in facts if fact.st_nlink == 1)
