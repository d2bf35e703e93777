"""Which checkpoints a folder holds. Reads manifests and sizes only; needs no lock.

A folder holds one layout: where there are folders of checkpoints, its `.pth` files are not ours.
Only those need torch.
"""

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import CheckpointDamaged, NotOfARun, UnsafeState, fault_from
from keepstep.store.archive import fault_of
from keepstep.store.file_read import FILES_REMEMBERED, read_facts
from keepstep.store.layout import (
    ASIDE_NAME,
    BEST_FILE,
    CHECKPOINTS_NAME,
    LATEST_FILE,
    file_step_of,
    is_archive_name,
    is_file_name,
    plain_name,
    step_of,
    unfinished_name,
)
from keepstep.store.manifest import Manifest, read_manifest
from keepstep.store.regular import opened

_POINTER_BYTES_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What claims to be a checkpoint: its manifest, or the fault that it has instead.

    A file without a step in its name and in itself has the step -1.
    """

    path: Path
    step: int
    manifest: Manifest | None
    fault: str
    aside: bool = False
    of_a_run: bool = True
    """False: a file that no run saved. It has a fault all the same: no run continues from it."""

    @property
    def name(self) -> str:
        """The name of the folder or file."""
        return self.path.name


def find_checkpoints_folder(folder: Path) -> Path:
    """Return the folder of the checkpoints, given it or the run's folder that holds it."""
    inner = folder / CHECKPOINTS_NAME
    return inner if inner.is_dir() else folder


def list_checkpoints(folder: Path | str, *, aside: bool = False) -> list[Checkpoint]:
    """Return the checkpoints of a run in the order of their commits, damaged ones first.

    ``aside``: also those that were set aside, behind the others.
    """
    return checkpoints_in(find_checkpoints_folder(Path(folder)), aside=aside)


def checkpoints_in(place: Path, *, aside: bool = False) -> list[Checkpoint]:
    """Return the checkpoints that stand in this very folder; see `list_checkpoints`.

    What writes must read here: a search for the folder could find one place and fill another.
    """
    found = _in_folder(place, aside=False)
    if aside:
        found += _in_folder(place / ASIDE_NAME, aside=True)
    return found


def look_at(path: Path, *, aside: bool = False) -> Checkpoint:
    """Return what stands in one checkpoint's folder or file."""
    if is_archive_name(path.name):
        return _look_at_file(path, aside=aside)
    # What was set aside may carry a suffix, where its name was taken.
    step = step_of(path.name.partition(".")[0] if aside else path.name)
    if step is None:
        return Checkpoint(path=path, step=-1, manifest=None, fault="not a checkpoint's name")
    if is_hidden(path):
        fault = "a save or a delete of it is in progress, or was cut short"
        return Checkpoint(path=path, step=-1, manifest=None, fault=fault)
    try:
        manifest, fault = read_manifest(path), ""
    except (CheckpointDamaged, OSError) as error:
        manifest, fault = None, fault_from(error)
    return Checkpoint(path=path, step=step, manifest=manifest, fault=fault, aside=aside)


def sequence_of(folder: Path, step: int) -> int:
    """Return the number of the checkpoint of a step; CheckpointDamaged where it is not whole."""
    entry = next((entry for entry in checkpoints_in(folder) if entry.step == step), None)
    if entry is None or entry.manifest is None:
        fault = "it is not there" if entry is None else entry.fault
        raise CheckpointDamaged(f"step {step:,} in {folder} cannot be the best: {fault}")
    return entry.manifest.sequence


def is_hidden(path: Path) -> bool:
    """Tell whether a file beside it makes a folder invisible, whole or not."""
    return path.with_name(unfinished_name(path.name)).exists()


def is_there(entry: Checkpoint) -> bool:
    """Tell whether a checkpoint that was listed has not been deleted, wholly or in part, since."""
    return entry.path.exists() and not is_hidden(entry.path)


def pointed_at(path: Path) -> str | None:
    """Return the name that `latest` or `best` stands for, as a link or as a file that holds it.

    None where nothing of that name is there, or nothing of ours.
    """
    if path.is_symlink():
        return path.readlink().name
    if not path.is_file():
        return None
    with opened(path) as file:
        text = file.read(_POINTER_BYTES_MAX + 1)
    name = text.decode(errors="replace").rstrip("\n")
    return name if len(text) <= _POINTER_BYTES_MAX and step_of(name) is not None else None


def files_in(path: Path) -> list[os.stat_result]:
    """Return what the file system says of each file of a checkpoint.

    Frozen weights are one file with a name in each of several checkpoints (`st_nlink`).
    """
    found = []
    try:
        for file in path.iterdir() if path.is_dir() else [path]:
            found.append(file.lstat())
    except FileNotFoundError:
        # Deleted since it was listed: what is gone has no bytes, and the rest goes with it.
        return found
    return found


def shared_bytes(entry: Checkpoint) -> int:
    """Return the bytes of a checkpoint's folder that another one has too: a delete frees none."""
    if not entry.path.is_dir():
        return 0
    return sum(fact.st_size for fact in files_in(entry.path) if fact.st_nlink > 1)


def bytes_on_disk(entries: Iterable[Checkpoint]) -> int:
    """Return the bytes that checkpoints take together; a file with several names counts once."""
    facts = [fact for entry in entries for fact in files_in(entry.path)]
    return sum({(fact.st_dev, fact.st_ino): fact.st_size for fact in facts}.values())


def _in_folder(place: Path, *, aside: bool) -> list[Checkpoint]:
    if not place.is_dir():
        return []
    found = [look_at(path, aside=aside) for path in place.iterdir() if _is_folder_name(path.name)]
    found = [entry for entry in found if entry.step >= 0] or _files_in(place, aside=aside)
    return sorted((entry for entry in found if not _is_gone(entry)), key=_order)


def _is_gone(entry: Checkpoint) -> bool:
    """Tell whether what looks damaged was deleted while it was looked at."""
    return entry.manifest is None and not (entry.path.exists() or entry.path.is_symlink())


def _is_folder_name(name: str) -> bool:
    return step_of(name.partition(".")[0]) is not None


def _files_in(place: Path, *, aside: bool) -> list[Checkpoint]:
    """Return the checkpoints of one file; `latest.pth` and `best.pth` where they are no other's."""
    paths = [path for path in place.iterdir() if is_file_name(path.name)]
    named = [path for path in paths if file_step_of(plain_name(path.name)) is not None]
    found = [look_at(path, aside=aside) for path in named]
    roles = [path for path in paths if path not in named]
    alone = [path for path in roles if not any(is_copy(path, entry) for entry in found)]
    return found + [look_at(path, aside=aside) for path in alone]


def is_copy(path: Path, entry: Checkpoint) -> bool:
    """Tell whether a file is another name of a checkpoint, or one of two copies, both whole.

    A file that has not changed since it was last found whole is not read again.
    """
    try:
        if path.samefile(entry.path):
            return True
        if entry.manifest is None or look_at(path).manifest != entry.manifest:
            return False
        return all(_is_whole(one, *_identity(one)) for one in (path, entry.path))
    except OSError:
        # What cannot be looked at is no copy; it is listed, with that as its fault.
        return False


def _identity(path: Path) -> tuple[int, int, int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size


# Where there are no links each save asks this of every copy, and it reads all of a file.
@functools.lru_cache(maxsize=FILES_REMEMBERED)
def _is_whole(path: Path, *_identity: int) -> bool:
    return fault_of(path) is None


def _look_at_file(path: Path, *, aside: bool) -> Checkpoint:
    step = file_step_of(plain_name(path.name))
    of_a_run = True
    try:
        manifest = read_facts(path)
        if step is None or step == manifest.step:
            return Checkpoint(
                path=path, step=manifest.step, manifest=manifest, fault="", aside=aside
            )
        fault = f"it holds step {manifest.step:,}"
    except NotOfARun as error:
        fault, of_a_run = error.message, False
    except (CheckpointDamaged, UnsafeState) as error:
        fault = error.message
    except OSError as error:
        fault = fault_from(error)
    step = -1 if step is None else step
    return Checkpoint(
        path=path, step=step, manifest=None, fault=fault, aside=aside, of_a_run=of_a_run
    )


def _order(checkpoint: Checkpoint) -> tuple[int, int, bool]:
    """Return the order of the commits; a file with a step in its name is newer than its copies."""
    sequence = checkpoint.manifest.sequence if checkpoint.manifest is not None else -1
    return sequence, checkpoint.step, checkpoint.name not in (LATEST_FILE, BEST_FILE)
