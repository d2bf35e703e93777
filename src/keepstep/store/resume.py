"""Which checkpoint to continue from, and what to say about the others.

Guarantees: the newest by the order of commits whose every byte is right; what is passed over is
named with its fault; where something is there and nothing is whole, nothing is chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keepstep.errors import (
    CheckpointDamaged,
    KeepstepError,
    NotFound,
    OtherRun,
    UsageError,
    is_shortage,
)
from keepstep.store.archive import fault_of
from keepstep.store.catalog import Checkpoint
from keepstep.store.commit import set_aside
from keepstep.store.disk import Disk
from keepstep.store.facts import table_of
from keepstep.store.layout import BEST_FILE, is_file_name
from keepstep.store.line import Line
from keepstep.store.load import read_checkpoint
from keepstep.store.manifest import Manifest
from keepstep.store.ranks import Ranks, first, together
from keepstep.store.standing import look_together

if TYPE_CHECKING:
    from keepstep.store.remote_resume import Homecoming

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


Whole = tuple[Checkpoint, Manifest, dict[str, Any], tuple[Skipped, ...]]
"""A checkpoint, its manifest, its verified state, and what was passed over for it."""


def find(
    folder: Path,
    choice: Literal["newest", "fresh"] | int,
    *,
    files: bool,
    must_match: Mapping[str, Any] | None,
    run_id: str | None,
    like: Like | None,
    ranks: Ranks,
    home: "Homecoming | None",
    ready: Callable[[], None],
) -> tuple[list[Checkpoint], Whole] | None:
    """Return what a folder holds, and the one to continue from; None where nothing is there.

    ``home``: fetches from the remote, if there is one. ``ready``: called when all is known to be
    this run's. For the rest, and what it raises, see `Store.restore`.
    """
    if not isinstance(choice, int) and choice not in ("newest", "fresh"):
        raise UsageError(
            f"{choice!r} cannot be restored: 'newest', 'fresh' or the number of a step can",
            hint="load_state(folder / 'best') reads the best without going back to it.",
        )
    step = choice if isinstance(choice, int) else None
    check = partial(
        check_choice,
        choice=choice,
        folder=folder,
        files=files,
        must_match=must_match,
        run_id=run_id,
    )
    pick = partial(choose, step=step, ranks=ranks, like=like)
    found = look_together(folder, ranks, files=files)
    if home is not None:
        home.check(found, check, look=True)
        ready()
        home.check(found, check, look=False)
        return home.choose(found, pick, step=step)
    check(found, ranks=ranks)
    chosen = (found, pick(found)) if found else None
    ready()
    return chosen


def check_choice(
    found: Sequence[Checkpoint],
    *,
    choice: Literal["newest", "fresh"] | int,
    folder: Path,
    files: bool,
    must_match: Mapping[str, Any] | None,
    run_id: str | None,
    ranks: Ranks,
) -> None:
    """Raise where a folder is not one for that choice, or not this run's; see `Store.restore`."""
    _check_layout(found, files=files, folder=folder)
    if not found:
        if isinstance(choice, int):
            raise NotFound(f"{folder} holds no checkpoint, so none of step {choice}")
        return
    if choice == "fresh":
        raise UsageError(
            f"{folder} holds {len(found)} checkpoints; a fresh start needs an empty one",
            hint="Choose a new folder, or move the checkpoints away.",
        )
    # Before gigabytes are read, and before anything is said about another run's checkpoints.
    _check_one_run(found, folder=folder, run_id=run_id)
    together(
        ranks,
        "restore: identity",
        lambda: _check_identity(found, must_match, folder=folder),
    )


def choose(
    found: Sequence[Checkpoint],
    *,
    step: int | None,
    ranks: Ranks,
    like: Like | None,
) -> Whole:
    """Return the newest whole checkpoint, or that of `step`: itself, manifest, verified state.

    Each rank reads what it needs (see `Store.restore` for ``like``); a checkpoint is whole where
    every rank can.
    """
    from keepstep.store.shards import place_like

    def place_of(name: str, shape: tuple[int, ...]) -> Any:
        model = like(name, shape) if like is not None else None
        return place_like(model) if model is not None else None

    def read(path: Path, manifest: Manifest) -> dict[str, Any]:
        return read_checkpoint(path, manifest, place_of=place_of)

    wanted = [entry for entry in found if step is None or entry.step == step]
    if not wanted:
        names = ", ".join(entry.name for entry in found)
        raise NotFound(f"there is no checkpoint of step {step}; there are {names}")
    skipped: list[Skipped] = []
    whole: tuple[Checkpoint, Manifest, dict[str, Any]] | None = None
    for entry in reversed(wanted):
        if entry.manifest is None:
            skipped.append(Skipped(name=entry.name, fault=entry.fault))
        elif whole is None and entry.name == BEST_FILE and step is None and not _has(entry, found):
            flag = f"--checkpoint.on_resume={entry.step}"
            fault = (
                f"the best, of step {entry.step:,}, is not taken for the newest ({flag} takes it)"
            )
            skipped.append(Skipped(name=entry.name, fault=fault))
        elif whole is None:
            state, fault = _read_together(entry, ranks, read)
            if not fault and skipped and skipped[-1].name == entry.manifest.name:
                instead = f"{skipped[-1].fault}; its copy {entry.name} is whole and takes its place"
                skipped[-1] = Skipped(name=skipped[-1].name, fault=instead)
            if fault:
                skipped.append(Skipped(name=entry.name, fault=fault))
            else:
                whole = entry, entry.manifest, state
    if whole is None:
        faults = "\n".join(f"  {item.name}: {item.fault}" for item in skipped)
        raise CheckpointDamaged(
            f"no checkpoint in {wanted[0].path.parent} can be continued from:\n{faults}",
            hint="No checkpoint was changed. Mend or restore one, or start in a new folder.",
        )
    return *whole, tuple(skipped)


def _has(copy: Checkpoint, found: Sequence[Checkpoint]) -> bool:
    """Tell whether the file stands there whose copy another is: it is listed because one is torn.

    Then the copy is that very checkpoint, and no older one.
    """
    assert copy.manifest is not None, "only a checkpoint with a manifest is a copy"
    name = copy.manifest.name
    return any(o.name == name and o.manifest in (None, copy.manifest) for o in found)


def _read_together(
    entry: Checkpoint, ranks: Ranks, read: Callable[[Path, Manifest], dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Return the state, or the fault that any rank found; any other error is that of all ranks.

    For lack of memory nothing is passed over: an older checkpoint would be taken for the newest.
    """
    manifest = entry.manifest
    assert manifest is not None, "only a checkpoint with a manifest is read"
    state: dict[str, Any] = {}

    def read_here() -> str:
        try:
            state.update(read(entry.path, manifest))
        except CheckpointDamaged as error:
            # Without its hint: what is done about it is what happens here.
            return error.message
        except (OSError, MemoryError, RuntimeError) as error:
            if is_shortage(error):
                raise KeepstepError(
                    f"{entry.path} could not be read, which is no fault of it: {error!r}",
                    hint="No older one is taken for it. Make memory free, or raise the limit on"
                    " open files (`ulimit -n`), then run the same command.",
                ) from error
            if not isinstance(error, OSError):
                raise
            return str(error)
        return ""

    return state, next(filter(None, together(ranks, "restore: read", read_here)), "")


def _check_one_run(found: Sequence[Checkpoint], *, folder: Path, run_id: str | None) -> None:
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


def _check_identity(
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


def take_up(
    found: Sequence[Checkpoint],
    whole: Whole,
    *,
    line: Line,
    best_must_stand: bool,
    disk: Disk,
    ranks: Ranks,
    on_event: Callable[..., None],
) -> Restored:
    """Make `line` follow the chosen checkpoint, and set aside what does not lead to it."""
    chosen, manifest, state, skipped = whole
    line.run_id, line.newest = manifest.run_id, manifest
    faults: dict[str, str] = first(
        ranks,
        "restore: set aside",
        lambda: _set_aside_others(found, chosen, disk, on_event),
    )
    kept = [entry.manifest for entry in found if entry.manifest and entry.name not in faults]
    gone = line.best.restore(manifest, kept, must_stand=best_must_stand)
    if gone is not None:
        at_fault = [e.name for e in found if e.step == gone.step or e.name == BEST_FILE]
        fault = next(filter(None, (faults.get(name) for name in at_fault)), "")
        on_event("best_gone", gone=gone, fault=fault, instead=line.best.best)
    return Restored(
        path=chosen.path.with_name(manifest.name),
        manifest=manifest,
        state=state,
        skipped=skipped,
        set_aside=tuple(faults),
    )


def _set_aside_others(
    found: Sequence[Checkpoint], chosen: Checkpoint, disk: Disk, on_event: Callable[..., None]
) -> dict[str, str]:
    """Move aside what the chosen one does not follow from; return names, with faults if torn.

    That is what is damaged or later. Of a file and a copy, of which one is torn, the whole one
    stays. A file that stands alone as `latest.pth` or `best.pth` gets its step's name: retention
    is about those, and the next save takes the other.
    """
    assert chosen.manifest is not None, "only a whole checkpoint is chosen"
    torn = _torn_of_two(found, whole=chosen)
    others = [
        entry
        for entry in found
        if entry.manifest is None
        or entry.name in torn
        or (
            entry.manifest.sequence >= chosen.manifest.sequence
            and entry.manifest != chosen.manifest
        )
    ]
    for entry in others:
        if entry.name in torn:
            on_event("damaged", name=entry.name, fault=torn[entry.name])
        on_event("set_aside", name=entry.name, new_name=set_aside(entry.path, disk=disk))
    for entry in found:
        if entry in others or entry.manifest is None or entry.name == entry.manifest.name:
            continue
        named = entry.path.with_name(entry.manifest.name)
        if not named.exists():
            disk.rename(entry.path, named)
            disk.sync_folder(named.parent)
    return {entry.name: torn.get(entry.name, entry.fault) for entry in others}


def _torn_of_two(found: Sequence[Checkpoint], *, whole: Checkpoint) -> dict[str, str]:
    """Return which of a file and its copies are torn, and how: they are listed because one is."""
    copied = [
        e.manifest
        for e in found
        if e.manifest and e.name != e.manifest.name and is_file_name(e.name)
    ]
    looked_at = [e for e in found if e is not whole and e.manifest and e.manifest in copied]
    faults = {entry.name: fault_of(entry.path) for entry in looked_at}
    return {name: fault for name, fault in faults.items() if fault is not None}


def _check_layout(found: Sequence[Checkpoint], *, files: bool, folder: Path) -> None:
    """Raise UsageError where a folder holds checkpoints of the other layout."""
    other = next((entry for entry in found if is_file_name(entry.name) != files), None)
    if other is not None:
        mine, theirs = ("files", "folders") if files else ("folders", "files")
        raise UsageError(
            f"{folder} holds checkpoints in {theirs} ({other.name}), and the layout is {mine}",
            hint=f"Continue that run with the layout {theirs}, or choose a new folder.",
        )
