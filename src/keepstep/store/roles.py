"""Which checkpoint is the latest and the best, and which one a person means by a name.

The manifests decide. The pointers `latest` and `best` are written for people; one case alone reads
one: an evaluation that was made after its checkpoint was committed stands in no manifest until
the next save, and only where `best` points at the newest checkpoint itself.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from keepstep.errors import NotFound
from keepstep.store.best import BestSoFar
from keepstep.store.catalog import Checkpoint, is_copy, list_checkpoints, look_at, pointed_at
from keepstep.store.layout import (
    BEST_FILE,
    BEST_NAME,
    CHECKPOINTS_NAME,
    LATEST_FILE,
    LATEST_NAME,
    OUTCOME_NAME,
    step_name,
)
from keepstep.store.manifest import Manifest
from keepstep.store.regular import opened

NO_RUNS, ANOTHER_RUNS = "no run's", "another run's"


def found_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return all checkpoints of a run, aside ones last; NotFound where there are none."""
    if folder.exists() and not folder.is_dir():
        raise NotFound(
            f"{folder} is a file, not the folder of a run",
            hint="`keepstep ckpt ls` and `verify` take one .pth file; all else takes a folder.",
        )
    if not folder.is_dir():
        raise NotFound(
            f"there is no folder {folder}",
            hint="Check the path; `keepstep train` makes the folder of a run, runs/NAME.",
        )
    entries = list_checkpoints(folder, aside=True)
    if not entries:
        raise NotFound(
            f"{folder} holds no checkpoints",
            hint="Give the folder of a run (runs/NAME), or that of its checkpoints.",
        )
    return entries


def find_checkpoint(folder: Path, name: str) -> Checkpoint:
    """Return the checkpoint of that name, step or role; NotFound lists what there is."""
    entries = found_checkpoints(folder)
    for entry in entries:
        names = [label_of(entry), *roles_of(entry, entries)]
        if not entry.aside:
            names.append(str(entry.step))
        if name in names:
            return entry
    listed = ", ".join(label_of(entry) for entry in entries)
    raise NotFound(f"{folder} holds no checkpoint {name!r}; it holds {listed}")


def roles_of(entry: Checkpoint, entries: Sequence[Checkpoint]) -> list[str]:
    """Return what a checkpoint is among the others: latest, best, milestone, aside."""
    if entry.aside:
        return ["aside"]
    kept = [
        other.manifest
        for other in entries
        if other.manifest and not other.aside and not whose(other, entries)
    ]
    if entry.manifest is None or whose(entry, entries):
        return []
    newest = max(manifest.sequence for manifest in kept)
    roles = [LATEST_NAME] if entry.manifest.sequence == newest else []
    if best_sequence(entry.path.parent, kept) == entry.manifest.sequence:
        roles.append(BEST_NAME)
    return roles + (["milestone"] if entry.manifest.milestone else [])


def whose(entry: Checkpoint, entries: Sequence[Checkpoint]) -> str:
    """Return whose a checkpoint is where it is not this run's: no run's, another's; else nothing.

    Another run's has no role and no reason of this run's retention: their numbers are not one
    order. Which run is this one: `outcome.json` says it; else the names that hold a step do, if
    they are of one run. Where they are not, each is another run's.
    """
    if not entry.of_a_run:
        return NO_RUNS
    if entry.aside or entry.manifest is None:
        return ""
    return "" if entry.manifest.run_id == _this_run(entry.path.parent, entries) else ANOTHER_RUNS


def _this_run(folder: Path, entries: Sequence[Checkpoint]) -> str | None:
    home = folder.absolute().parent if folder.absolute().name == CHECKPOINTS_NAME else folder
    try:
        with opened(home / OUTCOME_NAME) as file:
            outcome = json.load(file)
    except (FileNotFoundError, ValueError, RecursionError):
        # A loop of one's own leaves none, and `train` says so of one that is damaged.
        outcome = None
    recorded = outcome.get("run_id") if isinstance(outcome, dict) else None
    if isinstance(recorded, str):
        return recorded
    standing = [entry for entry in entries if entry.manifest and not entry.aside]
    named = [entry for entry in standing if entry.name not in (LATEST_FILE, BEST_FILE)]
    runs = {entry.manifest.run_id for entry in named or standing if entry.manifest}
    return runs.pop() if len(runs) == 1 else None


def label_of(entry: Checkpoint) -> str:
    """Return the name that a person uses: `step_10`, or `aside/step_10`."""
    return f"{entry.path.parent.name}/{entry.name}" if entry.aside else entry.name


def best_sequence(folder: Path, kept: Sequence[Manifest]) -> int | None:
    """Return the number of the best of these checkpoints, of which there is one.

    Where the best so far is not among them, because it is damaged, it is the one that a resume
    takes in its place.
    """
    newest = max(kept, key=lambda manifest: manifest.sequence)
    if newest.is_file and is_copy(folder / BEST_FILE, look_at(folder / newest.name)):
        return newest.sequence
    if pointed_at(folder / BEST_NAME) == step_name(newest.step):
        return newest.sequence
    if newest.best is None:
        return None
    best = BestSoFar(metric=newest.best.metric, mode=newest.best.mode)
    best.restore(newest, kept, must_stand=True)
    return best.best.sequence if best.best is not None else None
