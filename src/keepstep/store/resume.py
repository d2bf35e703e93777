"""Which checkpoint to continue from, and what to say about the others.

Guarantees: the newest by the order of commits whose every byte is right; what is passed over is
named with its fault; where something is there and nothing is whole, nothing is chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import CheckpointDamaged, NotFound, OtherRun
from keepstep.store.catalog import Checkpoint
from keepstep.store.manifest import Manifest

_NOTHING = "(nothing)"


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


def choose(
    found: Sequence[Checkpoint], *, step: int | None
) -> tuple[Manifest, dict[str, Any], tuple[Skipped, ...]]:
    """Return the manifest and the verified state of the newest whole checkpoint, or of `step`."""
    from keepstep.store.tensors import read_state

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
            try:
                whole = entry.manifest, read_state(entry.path, entry.manifest)
            except (CheckpointDamaged, OSError) as error:
                skipped.append(Skipped(name=entry.name, fault=str(error)))
    if whole is None:
        faults = "\n".join(f"  {item.name}: {item.fault}" for item in skipped)
        raise CheckpointDamaged(
            f"none of the checkpoints in {wanted[0].path.parent} is whole:\n{faults}",
            hint="No checkpoint was changed. Mend or restore one, or start in a new folder.",
        )
    return *whole, tuple(skipped)


def check_one_run(found: Sequence[Checkpoint], *, folder: Path, run_id: str | None) -> None:
    """Raise OtherRun where the folder mixes checkpoints of several runs, or holds another run's.

    ``run_id``: which run an earlier session in the run's folder was, if one is known. Two runs of
    one config are still two runs: rates may differ, and a copied checkpoint would be taken for
    this run's newest.
    """
    runs = {entry.manifest.run_id for entry in found if entry.manifest is not None}
    if run_id is not None and runs == {run_id}:
        return
    if len(runs) > 1 or run_id is not None:
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
    manifest: Manifest, must_match: Mapping[str, Any] | None, *, folder: Path
) -> None:
    """Raise OtherRun with the difference where the checkpoint belongs to another config."""
    if must_match is None:
        return
    saved = manifest.must_match
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
