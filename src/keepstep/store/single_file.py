"""Checkpoints of one file each, for any loop: `latest.pth`, `best.pth`, `steps_N.pth`.

Guarantees:
1. A file under its name is whole: written beside it, synced, read back against its CRCs, renamed.
   No file is ever rewritten in place, so a hard link to an old one stays what it was.
2. `best` is linked from the verified temporary before the rename: a kill in between leaves it on
   the newer state, never on an older one. Where a link is not possible it is a copy, as atomic.
3. A save that failed leaves every older file as it was, or its error names the one that is new:
   that happens where the disk goes on failing, or has no links to put the old one back from. The
   error, like that of a choice, is raised on every rank of an initialised process group.
4. Nothing is saved that `weights_only` would refuse to load, and nothing else is ever loaded.

One process (one rank 0) saves into a folder at a time: another's temporaries are leftovers here.
"""

import logging
import math
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

from keepstep.errors import (
    CheckpointDamaged,
    KeepstepError,
    NotFound,
    SaveFailed,
    UnsafeState,
    UsageError,
    way_out,
)
from keepstep.store.archive import check_new, fault_in, fault_of, load_archive, write_archive
from keepstep.store.disk import Disk
from keepstep.store.layout import BEST_FILE, LATEST_FILE, file_step_of
from keepstep.store.methods import refuses_links
from keepstep.store.process_group import ranks_of_this_process
from keepstep.store.ranks import first, together
from keepstep.store.regular import opened

BEST_VALID_LOSS = "best_valid_loss"
_SUFFIX = ".pth"
_TEMPORARY_SUFFIX = ".pth.tmp"
_DEADLINE_SECONDS = 600.0
_COPY_BYTES = 4 << 20
_log = logging.getLogger("keepstep.store")


def save_checkpoint_atomic(
    path: Path | str,
    state: Mapping[str, Any],
    *,
    best: Path | str | None = None,
    deadline_seconds: float = _DEADLINE_SECONDS,
    disk: Disk | None = None,
) -> None:
    """Make `path` hold `state`, durably and verified, and `best` too where it is given.

    Called on all ranks; rank 0 writes its state, and the others hear how it went within
    ``deadline_seconds``. Raises SaveFailed, UnsafeState or UsageError with every older file as it
    was.
    """
    target, best_target = Path(path), None if best is None else Path(best)
    ranks = ranks_of_this_process(deadline_seconds=deadline_seconds)
    used = disk if disk is not None else Disk()
    first(ranks, f"save of {target.name}", lambda: _save(target, state, best_target, disk=used))


def choose_resume_checkpoint(
    folder: Path | str, *, deadline_seconds: float = _DEADLINE_SECONDS, disk: Disk | None = None
) -> Path:
    """Return the file to continue from: `latest.pth`, or the newest whole `steps_N.pth`, loudly.

    Called on all ranks when a run starts; leftovers are removed first. Raises NotFound where there
    is no checkpoint at all, and CheckpointDamaged where there are some and none can be chosen.
    """
    place = Path(folder)
    ranks = ranks_of_this_process(deadline_seconds=deadline_seconds)
    used = disk if disk is not None else Disk()
    name: str = first(ranks, f"choice in {place.name}", lambda: _choose(place, disk=used))
    chosen = place / name

    def confirm() -> None:
        if not chosen.is_file():
            raise NotFound(
                f"rank {ranks.rank} does not see {chosen}, which rank 0 chose",
                hint="Put the folder on a file system that all ranks share.",
            )

    together(ranks, f"sight of {chosen.name}", confirm)
    return chosen


def load_checkpoint(path: Path | str, *, map_location: Any = "cpu") -> Any:
    """Return the state of one file, its CRCs checked first; no code of it is ever run.

    Raises NotFound, CheckpointDamaged, or UnsafeState where it holds more than tensors and plain
    values. Each rank loads for itself.
    """
    file_path = Path(path)
    if not file_path.is_file():
        raise NotFound(f"there is no file {file_path}")
    # What was checked is what is loaded, even where the name gets another file in between.
    with opened(file_path) as file:
        fault = fault_in(file)
        if fault is not None:
            raise CheckpointDamaged(
                f"{file_path} is damaged: {fault}",
                hint="choose_resume_checkpoint(folder) finds the newest file that is whole.",
            )
        file.seek(0)
        return load_archive(file, file_path, map_location=map_location)


def apply_best_valid_loss_floor(
    state: MutableMapping[str, Any],
    folder: Path | str,
    *,
    deadline_seconds: float = _DEADLINE_SECONDS,
) -> float | None:
    """Make `state["best_valid_loss"]` the lower of its own value and the one in `best.pth`.

    Called on all ranks whenever a run resumes, so that a worse epoch cannot take `best`. Returns
    the value; None, with the state as it was, where neither has a finite one.
    """
    place = Path(folder)
    ranks = ranks_of_this_process(deadline_seconds=deadline_seconds)
    recorded = first(ranks, f"best of {place.name}", lambda: _recorded_best(place / BEST_FILE))
    own = _finite(state.get(BEST_VALID_LOSS), where="the state")
    known = [value for value in (own, recorded) if value is not None]
    if not known:
        return None
    state[BEST_VALID_LOSS] = min(known)
    return min(known)


def sweep_temporaries(folder: Path, *, disk: Disk) -> list[str]:
    """Remove every leftover `*.pth.tmp`; return their names. A whole one could be a stale one."""
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name.endswith(_TEMPORARY_SUFFIX) and (path.is_symlink() or not path.is_dir())
    )
    for name in names:
        disk.unlink(folder / name)
    return names


def _save(path: Path, state: Mapping[str, Any], best: Path | None, *, disk: Disk) -> None:
    targets = [path] if best is None else [path, best]
    _refuse_shards(state, "state")
    attempt = _Attempt(disk)
    try:
        _check_targets(targets)
        folders = sorted({target.parent for target in targets})
        for folder in folders:
            disk.make_folders(folder)
            sweep_temporaries(folder, disk=disk)
        temporary = attempt.temporary_of(path)
        write_archive(state, temporary, disk=disk)
        check_new(temporary)
        if best is not None:
            best_temporary = attempt.temporary_of(best)
            if not link_or_copy(temporary, best_temporary, disk=disk):
                check_new(best_temporary)
            attempt.put(best_temporary, best, copy_old=True)
        attempt.put(temporary, path, copy_old=False)
    except BaseException as error:
        attempt.undo(because=error)
        if isinstance(error, OSError | RuntimeError):
            notes = "; ".join(getattr(error, "__notes__", []))
            raise SaveFailed(
                f"{path} could not be saved: {error}"
                + (f"; but {notes}" if notes else "; every older file is as it was"),
                hint=_hint_after(error),
            ) from error
        raise
    attempt.tidy()


def _hint_after(error: OSError | RuntimeError) -> str:
    known = way_out(error, then="save again") if isinstance(error, OSError) else ""
    return known or "Make room or mend the disk, and save again."


class _Attempt:
    """The files of one save: what it made, and what it replaced, until nothing can fail any more.

    What is replaced keeps a second name meanwhile, so that a later failure can put it back.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._temporaries: list[Path] = []
        # The name, its second name, and which file it was.
        self._replaced: list[tuple[Path, Path | None, tuple[int, int] | None]] = []

    def temporary_of(self, target: Path) -> Path:
        """Return the name of the new file, which is removed if the save fails."""
        self._temporaries.append(target.with_name(target.name + ".tmp"))
        return self._temporaries[-1]

    def put(self, new: Path, target: Path, *, copy_old: bool) -> None:
        """Rename the new file to its name, durably."""
        held, existed = None, _identity_of(target)
        if existed is not None:
            held = target.with_name(f".{target.stem}-replaced{_TEMPORARY_SUFFIX}")
            self._temporaries.append(held)
            try:
                self._disk.link(target, held)
            except OSError as error:
                if not refuses_links(error):
                    raise
                if copy_old:
                    _copy(target, held, disk=self._disk)
                else:
                    held = None
        self._replaced.append((target, held, existed))
        self._disk.rename(new, target)
        self._disk.sync_folder(target.parent)

    def undo(self, *, because: BaseException) -> None:
        """Put back what was replaced and remove what was made; what cannot be, the error says."""
        words, stays_new = "may hold the new state, which is whole", False
        for target, held, existed in reversed(self._replaced):
            if stays_new:
                # The best of a latest that stays new: an older one would be behind it.
                because.add_note(f"{target} {words}")
                continue
            try:
                if held is not None:
                    self._disk.rename(held, target)
                elif existed is not None and existed == _identity_of(target):
                    continue
                elif existed is not None:
                    stays_new = True
                    because.add_note(f"{target} {words}")
                elif _is_there(target):
                    self._disk.unlink(target)
                self._disk.sync_folder(target.parent)
            except OSError as second:
                stays_new = True
                because.add_note(f"{target} {words}: {second}")
        for path in self._temporaries:
            self._disk.discard(path, because=because)

    def tidy(self) -> None:
        """Remove the second names; the save is done, and a failure here is only told."""
        for path in self._temporaries:
            try:
                if _is_there(path):
                    self._disk.unlink(path)
            except OSError as error:
                _log.warning("%s was left behind, until the next save: %s", path, error)


def _check_targets(targets: list[Path]) -> None:
    for target in targets:
        if target.suffix != _SUFFIX:
            raise UsageError(
                f"{target} is no name for a checkpoint: it must end in {_SUFFIX}",
                hint=f"Leftovers are found by their ending, {_TEMPORARY_SUFFIX}.",
            )
        if target.is_dir():
            raise UsageError(
                f"{target} is a folder, where a file is to be saved",
                hint="Move it out of the way, or save under another name.",
            )
    if len({target.parent.resolve() / target.name for target in targets}) != len(targets):
        raise UsageError(f"{targets[0]} cannot be the best as well: it is replaced at every save")


def _is_there(path: Path) -> bool:
    return _identity_of(path) is not None


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Return which file a name is of, or None; a link that leads nowhere is there too."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _refuse_shards(value: Any, path: str) -> None:
    """Raise UnsafeState for a tensor of which this rank holds a part: the rest would be lost."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_shards(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _refuse_shards(item, f"{path}[{number}]")
    elif hasattr(value, "full_tensor") and hasattr(value, "placements"):
        raise UnsafeState(
            f"{path} is a sharded tensor: one file would hold rank 0's part of it alone",
            hint="Save it with keepstep.store.Store, or gather it first (full_tensor()).",
        )


def link_or_copy(old: Path, new: Path, *, disk: Disk) -> bool:
    """Make `new` another name of a file, or a durable copy; tell whether it is a link."""
    try:
        disk.link(old, new)
    except OSError as error:
        if not refuses_links(error):
            raise
        _copy(old, new, disk=disk)
        return False
    return True


def _copy(old: Path, new: Path, *, disk: Disk) -> None:
    def chunks(file: IO[bytes]) -> Iterator[bytes]:
        while data := file.read(_COPY_BYTES):
            yield data

    with opened(old) as file:
        disk.write_new_file(new, chunks(file))


def _choose(folder: Path, *, disk: Disk) -> str:
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    try:
        sweep_temporaries(folder, disk=disk)
    except OSError as error:
        # It is never chosen, so it stops nothing; the next save, which it would stop, says so.
        _log.warning("a leftover in %s could not be removed: %s", folder, error)
    found = {path.name for path in folder.iterdir()}
    steps = [(step, name) for name in found if (step := file_step_of(name)) is not None]
    candidates = [LATEST_FILE, *(name for _, name in sorted(steps, reverse=True))]
    faults: list[str] = []
    for name in candidates:
        fault = fault_of(folder / name) if name in found else "it is missing"
        if fault is None:
            if faults:
                listed = "\n".join(f"  {line}" for line in faults)
                _log.warning("%s: continuing from %s, because\n%s", folder, name, listed)
            return name
        faults.append(f"{name}: {fault}")
    if not found & {LATEST_FILE, BEST_FILE} and not steps:
        raise NotFound(
            f"{folder} holds no checkpoint: neither {LATEST_FILE} nor any steps_N.pth",
            hint="Check the path; for a new run, start without resuming.",
        )
    best = BEST_FILE in found and fault_of(folder / BEST_FILE) is None
    raise CheckpointDamaged(
        f"no checkpoint in {folder} can be continued from:\n"
        + "\n".join(f"  {line}" for line in faults),
        hint="Nothing was changed. "
        + (
            f"{BEST_FILE} is whole: copy it to {LATEST_FILE} to go on from it, or b"
            if best
            else "B"
        )
        + "ring one back from a copy, or start in a new folder.",
    )


def _recorded_best(path: Path) -> float | None:
    if not path.is_file():
        return None
    fault = fault_of(path)
    try:
        if fault is None:
            # Mapped: of a large model, one number is wanted.
            state = load_archive(str(path), path, map_location="cpu", mmap=True)
            value = state.get(BEST_VALID_LOSS) if isinstance(state, Mapping) else None
            return _finite(value, where=str(path))
    except KeepstepError as error:
        fault = error.message
    _log.warning("the best so far is the state's alone, because %s is not whole: %s", path, fault)
    return None


def _finite(value: Any, *, where: str) -> float | None:
    """Return a recorded loss as a float, None where there is none or it is nan or infinite."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{BEST_VALID_LOSS} in {where} is {value!r}, not a number") from error
    return number if math.isfinite(number) else None
