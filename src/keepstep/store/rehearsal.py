"""The rehearsal of a save: what would end a run at its first save is told before its first step.

Guarantees:
1. Every rank has written, committed, read back and deleted a small checkpoint of the true state:
   the whole plain state, and of each type of tensor the smallest. Rights, links, renames, syncs, a
   folder that is not shared and a state that no checkpoint may hold are found there.
2. There is room for the checkpoints to come: the last, the best, and the one that is written before
   an older one goes. Free space is compared, and the room of one is reserved and given back, which
   also finds quotas and limits on the size of a file.
3. It happens in a folder with a leftover's name, so nothing of it can be taken for a checkpoint.
4. No rank decides alone: the first one does, from what all told, and the others hear of it.

It does not foresee a disk that others fill later, nor what time alone makes: milestones, pins, and
what is kept of every so many steps, hours or days.
"""

import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import CannotSave, room_by_prune
from keepstep.store import commit
from keepstep.store.catalog import checkpoints_in, look_at
from keepstep.store.disk import Disk
from keepstep.store.file_commit import commit_file, point_files
from keepstep.store.layout import BEST_FILE, LATEST_FILE, file_name, rehearsal_name, step_name
from keepstep.store.line import Line
from keepstep.store.manifest import Facts
from keepstep.store.ranks import Ranks, first, require_alike, together
from keepstep.store.retention import Retention
from keepstep.store.single_file import link_or_copy
from keepstep.store.unchanged import Unchanged
from keepstep.store.verify import verify

if TYPE_CHECKING:
    from keepstep.store.tensors import Snapshot

_FILE_BYTES, _TENSOR_BYTES = 8192, 512
"""What a checkpoint takes besides its tensors and plain state: headers, the manifest's entries."""
_FEWER = (
    "Make room, keep fewer checkpoints (checkpoint.keep_last_n, keep_best_n), or choose another"
    " folder."
)


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many more checkpoints a folder has room for, and how many must fit at the most."""

    folder: Path
    checkpoint_bytes: int
    free_bytes: int
    wanted: int
    copies: int = 0
    """How many come beside them as `latest.pth` and `best.pth`, where there are no hard links."""
    reserved: bool = True
    """Whether the room of one could be reserved; else quotas are not looked at."""

    @property
    def fits(self) -> int:
        """How many more checkpoints fit, beside the copies."""
        return max(0, self.free_bytes // self.checkpoint_bytes - self.copies)

    def require(self, count: int, *, hint: str) -> None:
        """Raise CannotSave where fewer than `count` fit."""
        if self.fits < count:
            more = "one more checkpoint" if count == 1 else f"{count} more checkpoints"
            if self.copies:
                more += f" and {self.copies} copies (no hard links here)"
            needed = (count + self.copies) * self.checkpoint_bytes
            raise CannotSave(
                f"{self.folder} has no room for {more}: {needed:,} bytes"
                f" are needed, and {self.free_bytes:,} are free",
                hint=hint,
            )


def rehearse(
    take: Callable[[], tuple[Facts, "Snapshot"]],
    *,
    folder: Path,
    policy: Retention,
    line: Line,
    files: bool,
    bytes_linked: Callable[["Snapshot"], int],
    bytes_to_come: int,
    disk: Disk,
    ranks: Ranks,
) -> Room:
    """Rehearse a save of what `take` takes; CannotSave, on all ranks, says what is wrong.

    A ``line`` that has a checkpoint has been saved here: then only the room is looked at, and one
    more must fit. ``bytes_linked``: how much of a state a rank would link. ``bytes_to_come``: what
    the state will grow by.
    """
    begun, judged = line.newest is not None, line.best.metric is not None
    taken: list[tuple[Facts, Snapshot]] = []

    def take_here() -> dict[str, Any]:
        taken.append(take())
        snapshot = taken[0][1]
        size = _size_of(snapshot, ranks) + bytes_to_come
        return {"state": snapshot.digest(), "bytes": size, "linked": bytes_linked(snapshot)}

    told = together(ranks, "rehearsal: state", take_here)
    require_alike(told)
    facts, snapshot = taken[0]

    def decide() -> dict[str, Any]:
        has_links = _has_links(scratch, disk)
        linked = sum(one["linked"] for one in told) if has_links else 0
        size = max(_FILE_BYTES, max(one["bytes"] for one in told) - linked)
        copies = _copies(folder, judged=judged) if files and not has_links else 0
        room = look_at_room(folder, size, wanted=policy.at_once(judged=judged), copies=copies)
        if begun:
            hint = f"Make room, then run the same command to continue.\n{room_by_prune(folder)}"
            room.require(1, hint=hint)
        else:
            room.require(room.wanted, hint=_FEWER)
        return {**asdict(room), "folder": str(folder)}

    try:
        scratch = folder / first(ranks, "rehearsal: begin", lambda: _begin(folder, disk))
        try:
            if not begun:
                facts = replace(facts, step=0)
                _save_read_delete(snapshot, facts, scratch, files=files, disk=disk, ranks=ranks)
            found = first(ranks, "rehearsal: room", decide)
            room = Room(**{**found, "folder": folder})
            path, share = scratch / f"rank-{ranks.rank}", _share(room, files=files, ranks=ranks)
            reserved = together(ranks, "rehearsal: reserve", lambda: _reserve(path, share, disk))
            first(ranks, "rehearsal: end", lambda: disk.remove_tree(scratch))
        except BaseException as error:
            if ranks.rank == 0:
                disk.discard(scratch, because=error)
            raise
    except OSError as error:
        raise CannotSave(
            f"no checkpoint can be saved in {folder}: {error}",
            hint="No step was taken. Mend that, then run the same command.",
        ) from error
    return replace(room, reserved=all(reserved))


def _begin(folder: Path, disk: Disk) -> str:
    scratch = folder / rehearsal_name()
    disk.make_folder(scratch)
    return scratch.name


def _save_read_delete(
    snapshot: "Snapshot", facts: Facts, scratch: Path, *, files: bool, disk: Disk, ranks: Ranks
) -> None:
    """Do with a small state all that is done with a checkpoint in its life."""
    chosen: list[str] = first(ranks, "rehearsal: sample", lambda: _sample(snapshot))
    parts = {name: snapshot.parts[name] for name in chosen}
    save: Callable[..., object]
    if files:
        state = {name: part.local for name, part in parts.items()}
        save = partial(commit_file, {"state": state, "plain": snapshot.plain})
    else:
        small = replace(snapshot, parts=parts, written=snapshot.written & set(chosen))
        save = partial(commit.commit, small, unchanged=Unchanged(ranks.rank))
    save(
        facts,
        folder=scratch,
        disk=disk,
        ranks=ranks,
        halt=threading.Event(),
        on_event=lambda _event, **_facts: None,
    )
    path = scratch / (file_name if files else step_name)(facts.step)
    together(ranks, "rehearsal: read", lambda: _read_back(path))

    def tidy() -> None:
        point = point_files if files else commit.point_links
        point(scratch, latest=facts.step, best=facts.step, disk=disk)
        commit.remove(commit.hide(path, into=scratch, disk=disk), disk=disk)

    first(ranks, "rehearsal: delete", tidy)


def _sample(snapshot: "Snapshot") -> list[str]:
    """Return the names of the smallest tensors, one of each type and number of holders."""
    found: dict[tuple[Any, int], str] = {}
    for name, part in sorted(snapshot.parts.items(), key=lambda item: (item[1].bytes, item[0])):
        if part.bytes:
            found.setdefault((part.local.dtype, part.copies), name)
    return list(found.values())


def _read_back(path: Path) -> None:
    faults = verify(look_at(path))
    if faults:
        raise CannotSave(
            f"{path} was just saved and is not what was saved: {faults[0].message}",
            hint="All ranks need the same folder, on a file system that returns what it was given.",
        )


def _size_of(snapshot: "Snapshot", ranks: Ranks) -> int:
    """Return about how many bytes a checkpoint of all of the state takes."""
    tensors = sum(part.bytes + _TENSOR_BYTES for part in snapshot.parts.values())
    return tensors + len(json.dumps(snapshot.plain)) + _FILE_BYTES * (ranks.size + 1)


def _has_links(scratch: Path, disk: Disk) -> bool:
    """Tell whether files can have a second name here."""
    old = scratch / "file"
    disk.close(disk.create(old), old)
    return link_or_copy(old, scratch / "link", disk=disk)


def _copies(folder: Path, *, judged: bool) -> int:
    """Return how many copies of a checkpoint come beside it: one is made before an old one goes."""
    names = (LATEST_FILE, BEST_FILE) if judged else (LATEST_FILE,)
    return 1 + sum(not (folder / name).exists() for name in names)


def look_at_room(folder: Path, size: int, *, wanted: int, copies: int) -> Room:
    """Return what is free, and how many more must fit: of one that stands there is one less.

    ``wanted``: how many stand at once at the most; 0 where there is no limit.
    """
    facts = os.statvfs(folder)
    # Some have no size of their own, such as a tmpfs without a limit.
    free = facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize
    return Room(
        folder=folder,
        checkpoint_bytes=size,
        free_bytes=free,
        wanted=max(1, wanted - len(checkpoints_in(folder))),
        copies=copies,
    )


def _share(room: Room, *, files: bool, ranks: Ranks) -> int:
    """Return how much of a checkpoint this rank writes: the first one all of a single file."""
    if files:
        return room.checkpoint_bytes if ranks.rank == 0 else 0
    return -(-room.checkpoint_bytes // ranks.size)


def _reserve(path: Path, count: int, disk: Disk) -> bool:
    """Reserve room in a new file of this rank's; return False where that cannot be asked for."""
    if count == 0:
        return True
    descriptor = disk.create(path)
    try:
        disk.allocate(descriptor, count, path)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        why = f"{count:,} bytes cannot be reserved: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, why, str(path)) from error
    finally:
        os.close(descriptor)
    return True
