"""Which checkpoints a folder holds. Reads manifests and sizes only; needs no lock and no torch."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import CheckpointDamaged
from keepstep.store.layout import (
    ASIDE_NAME,
    CHECKPOINTS_NAME,
    step_name,
    step_of,
    unfinished_name,
)
from keepstep.store.manifest import Manifest, read_manifest

_POINTER_BYTES_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder that claims to be a checkpoint: its manifest, or the fault that it has instead."""

    path: Path
    step: int
    manifest: Manifest | None
    fault: str
    aside: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
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
    """Return what stands in one checkpoint's folder; its step is -1 where it is no checkpoint."""
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
        manifest, fault = None, str(error)
    return Checkpoint(path=path, step=step, manifest=manifest, fault=fault, aside=aside)


def sequence_of(folder: Path, step: int) -> int:
    """Return the number of the checkpoint of a step; CheckpointDamaged where it is not whole."""
    entry = look_at(folder / step_name(step))
    if entry.manifest is None:
        raise CheckpointDamaged(f"{entry.path} cannot be the best: {entry.fault}")
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
    if not path.is_file() or path.stat().st_size > _POINTER_BYTES_MAX:
        return None
    name = path.read_bytes().decode(errors="replace").rstrip("\n")
    return name if step_of(name) is not None else None


def files_in(path: Path) -> list[os.stat_result]:
    """Return what the file system says of each file in a checkpoint's folder.

    Frozen weights are one file with a name in each of several checkpoints (`st_nlink`).
    """
    return [file.lstat() for file in path.iterdir()] if path.is_dir() else []


def shared_bytes(entry: Checkpoint) -> int:
    """Return the bytes of a checkpoint that have another name too: deleting it frees none."""
    return sum(fact.st_size for fact in files_in(entry.path) if fact.st_nlink > 1)


def bytes_on_disk(entries: Iterable[Checkpoint]) -> int:
    """Return the bytes that checkpoints take together; a file with several names counts once."""
    facts = [fact for entry in entries for fact in files_in(entry.path)]
    return sum({(fact.st_dev, fact.st_ino): fact.st_size for fact in facts}.values())


def _in_folder(place: Path, *, aside: bool) -> list[Checkpoint]:
    if not place.is_dir():
        return []
    found = [look_at(path, aside=aside) for path in place.iterdir()]
    return sorted((entry for entry in found if entry.step >= 0), key=_order)


def _order(checkpoint: Checkpoint) -> tuple[int, int]:
    sequence = checkpoint.manifest.sequence if checkpoint.manifest is not None else -1
    return sequence, checkpoint.step
