"""Which checkpoint to continue from, and what to say about the others.

Guarantees: the newest by the order of commits whose every byte is right; what is passed over is
named with its fault; where something is there and nothing is whole, nothing is chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import CheckpointDamaged, KeepstepError, NotFound, OtherRun
from keepstep.store.catalog import Checkpoint, checkpoints_in, look_at
from keepstep.store.commit import set_aside
from keepstep.store.disk import Disk
from keepstep.store.facts import table_of
from keepstep.store.manifest import Manifest
from keepstep.store.ranks import Ranks, first

_NOTHING = "(nothing)"
Like = Callable[[str, tuple[int, ...]], Any]
"""By name and shape: the tensor like which a saved one is to be sharded, or None."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    name: str
    fault: str


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state to continue from, where it came from, and what was passed over or set aside."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    skipped: tuple[Skipped, ...]
    set_aside: tuple[str, ...]


def look_together(folder: Path, ranks: Ranks) -> list[Checkpoint]:
    """Return the checkpoints in the order of their commits, as the first rank finds them.

    Raises where another rank sees something else under these names: the folder is not shared, or
    its host has not heard of the newest yet.
    """
    if ranks.size == 1:
        return checkpoints_in(folder)
    names: list[str] = first(
        ranks, "restore: list", lambda: [entry.name for entry in checkpoints_in(folder)]
    )
    found = [look_at(folder / name) for name in names]
    seen = [
        [entry.manifest.run_id, entry.manifest.sequence, entry.manifest.content_digest()]
        if entry.manifest is not None
        else None
        for entry in found
    ]
    views = ranks.gather(seen, what="restore: compare")
    for rank, view in enumerate(views):
        differing = [name for name, a, b in zip(names, views[0], view, strict=True) if a != b]
        if differing:
            raise KeepstepError(
                f"rank {rank} does not see the same as rank 0 in {folder}: {', '.join(differing)}",
                hint="All ranks need the same folder: put it on a shared file system.",
            )
    return found


def choose(
    found: Sequence[Checkpoint],
    *,
    step: int | None,
    ranks: Ranks,
    like: Like | None,
) -> tuple[Manifest, dict[str, Any], tuple[Skipped, ...]]:
    """Return the manifest and the verified state of the newest whole checkpoint, or of `step`.

    Each rank reads what it needs (see `Store.restore` for ``like``); a checkpoint is whole where
    every rank can.
    """
    from keepstep.store.reading import read_state
    from keepstep.store.shards import place_like

    def place_of(name: str, shape: tuple[int, ...]) -> Any:
        model = like(name, shape) if like is not None else None
        return place_like(model) if model is not None else None

    def read(path: Path, manifest: Manifest) -> dict[str, Any]:
        return read_state(path, manifest, place_of=place_of)

    wanted = [entry for entry in found if step is None or entry.step == step]
    if not wanted:
        names = ", ".join(entry.name for entry in found)
        raise NotFound(f"there is no checkpoint of step {step}; there are {names}")
    skipped: list[Skipped] = []
    whole: tuple[Manifest, dict[str, Any]] | None = None
    for entry in reversed(wanted):
        if entry.manifest is None:
            skipped.append(Skipped(name=entry.name, fault=entry.fault))
        elif whole is None:
            state, fault = _read_together(entry, ranks, read)
            if fault:
                skipped.append(Skipped(name=entry.name, fault=fault))
            else:
                whole = entry.manifest, state
    if whole is None:
        faults = "\n".join(f"  {item.name}: {item.fault}" for item in skipped)
        raise CheckpointDamaged(
            f"none of the checkpoints in {wanted[0].path.parent} is whole:\n{faults}",
            hint="No checkpoint was changed. Mend or restore one, or start in a new folder.",
        )
    return *whole, tuple(skipped)


def _read_together(
    entry: Checkpoint, ranks: Ranks, read: Callable[[Path, Manifest], dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Return the state, or the fault that any rank found."""
    assert entry.manifest is not None, "only a checkpoint with a manifest is read"
    state: dict[str, Any] = {}
    fault = ""
    try:
        state = read(entry.path, entry.manifest)
    except (CheckpointDamaged, OSError) as error:
        fault = str(error)
    return state, next(filter(None, ranks.gather(fault, what="restore: read")), "")


def check_one_run(found: Sequence[Checkpoint], *, folder: Path, run_id: str | None) -> None:
    """Raise OtherRun where the folder mixes checkpoints of several runs, or holds another run's.

    ``run_id``: which run an earlier session in the run's folder was, if one is known. Two runs of
    one config are still two runs: rates may differ, and a copied checkpoint would be taken for
    this run's newest.
    """
    runs = {entry.manifest.run_id for entry in found if entry.manifest is not None}
    known = {run_id} if run_id is not None else set()
    # Damaged manifests name no run; whether any checkpoint is whole is another question.
    if len(runs | known) > 1:
        whose = "\n".join(
            f"  {entry.name}: run {entry.manifest.run_id}"
            for entry in found
            if entry.manifest is not None
        )
        expected = f"; this is run {run_id}" if run_id is not None else ""
        raise OtherRun(
            f"{folder} holds checkpoints of another run{expected}:\n{whose}",
            hint="Nothing was changed. Move those of the other run away; to continue them in a"
            " folder of their own, copy them into a new one.",
        )


def check_identity(
    found: Sequence[Checkpoint], wanted: Mapping[str, Any] | None, *, folder: Path
) -> None:
    """Raise OtherRun with the difference where the newest checkpoint belongs to another config."""
    if wanted is None:
        return
    must_match = table_of("must_match", wanted)
    saved = next((e.manifest.must_match for e in reversed(found) if e.manifest is not None), None)
    if saved is None:
        return
    differing = [
        f"  {name}: saved {saved.get(name, _NOTHING)!r}, now {must_match.get(name, _NOTHING)!r}"
        for name in sorted(set(saved) | set(must_match))
        if saved.get(name) != must_match.get(name) or (name in saved) != (name in must_match)
    ]
    if differing:
        raise OtherRun(
            f"{folder} belongs to another config; these must be the same to continue:\n"
            + "\n".join(differing),
            hint="Use the config that the run was started with, or a new run.dir.",
        )


def set_aside_others(
    found: Sequence[Checkpoint], chosen: Manifest, disk: Disk, on_event: Callable[..., None]
) -> list[str]:
    """Move aside what the chosen one does not follow from, damaged or later; return its names."""
    others = [
        entry
        for entry in found
        if entry.step != chosen.step
        and (entry.manifest is None or entry.manifest.sequence > chosen.sequence)
    ]
    for entry in others:
        on_event("set_aside", name=entry.name, new_name=set_aside(entry.path, disk=disk))
    return [entry.name for entry in others]
