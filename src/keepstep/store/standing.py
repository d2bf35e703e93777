"""What stands in a run's folder and in its remote, whole or not, before one of it is chosen."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import KeepstepError, UsageError
from keepstep.store.catalog import Checkpoint, checkpoints_in, look_at
from keepstep.store.layout import file_step_of, is_file_name
from keepstep.store.manifest import Manifest
from keepstep.store.methods import Saving
from keepstep.store.ranks import Ranks, first, together

if TYPE_CHECKING:
    from keepstep.store.remote_resume import Homecoming


def look_together(folder: Path, ranks: Ranks, *, files: bool) -> list[Checkpoint]:
    """Return the checkpoints in the order of their commits, as the first rank finds them.

    Without ``files``, not those files that may be a person's own, which folders leave alone.

    Raises where another rank sees something else under these names: the folder is not shared, or
    its host has not heard of the newest yet.
    """
    if ranks.size == 1:
        return _runs_own(folder, files=files)
    names: list[str] = first(
        ranks, "restore: list", lambda: [entry.name for entry in _runs_own(folder, files=files)]
    )
    found: list[Checkpoint] = []

    def see() -> list[Any]:
        found.extend(look_at(folder / name) for name in names)
        manifests = [entry.manifest for entry in found]
        return [m and [m.run_id, m.sequence, m.content_digest()] for m in manifests]

    views = together(ranks, "restore: compare", see)
    for rank, view in enumerate(views):
        differing = [name for name, a, b in zip(names, views[0], view, strict=True) if a != b]
        if differing:
            raise KeepstepError(
                f"rank {rank} does not see the same as rank 0 in {folder}: {', '.join(differing)}",
                hint="All ranks need the same folder: put it on a shared file system.",
            )
    return found


def _runs_own(folder: Path, *, files: bool) -> list[Checkpoint]:
    """Return what only a run can have left; with ``files`` all that has one of their names.

    A torn file with a step in its name may be the last of a run. Every loop has a `best.pth`.
    """
    return [
        entry
        for entry in checkpoints_in(folder)
        if files
        or entry.manifest is not None
        or not is_file_name(entry.name)
        or (entry.of_a_run and file_step_of(entry.name) is not None)
    ]


def newest_known(folder: Path, home: "Homecoming | None") -> Manifest | None:
    """Return the newest manifest of folder and remote, as this rank sees them, whole or not."""
    found = checkpoints_in(folder) + (home.look() if home is not None else [])
    known = [entry.manifest for entry in found if entry.manifest is not None]
    return max(known, key=lambda manifest: manifest.sequence, default=None)


def next_sequence(folder: Path) -> int:
    """Return a number that no checkpoint in the folder ever had, also in `aside/`."""
    found = checkpoints_in(folder, aside=True)
    return 1 + max((entry.manifest.sequence for entry in found if entry.manifest), default=0)


def require_none(folder: Path, saving: Saving, home: "Homecoming | None") -> None:
    """Raise UsageError where a session would save beside checkpoints that it never looked at."""
    places = [str(folder)] if _runs_own(folder, files=saving.files) else []
    if home is not None and home.look():
        places.append(home.remote.objects.shown)
    if places:
        raise UsageError(
            f"{' and '.join(places)} holds checkpoints, and this session has not looked at them",
            hint="Call restore() before the first save, or choose an empty folder.",
        )
