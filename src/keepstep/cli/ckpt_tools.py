"""`keepstep ckpt pin|unpin|prune|diff`: what stays, what goes, and how two checkpoints differ."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keepstep.cli.ckpt_text import (
    Name,
    Run,
    folder_of,
    place_of,
    print_json,
    recorded_policy,
)
from keepstep.config.quantities import bytes_text
from keepstep.errors import NotFound, UsageError
from keepstep.store import Checkpoint
from keepstep.store.catalog import look_at
from keepstep.store.compare import Difference, compare
from keepstep.store.disk import Disk
from keepstep.store.layout import ASIDE_NAME, LOCK_NAME, MANIFEST_NAME
from keepstep.store.lock import FolderLock
from keepstep.store.pins import identity_of, read_pins
from keepstep.store.pins import pin as pin_checkpoint
from keepstep.store.pins import unpin as unpin_checkpoint
from keepstep.store.prune import Planned, carry_out, plan
from keepstep.store.retention import Retention
from keepstep.store.roles import find_checkpoint, found_checkpoints, label_of

_DIFFERENT = 1


def pin(run: Run, checkpoint: Name, *, json: bool = False) -> int:
    """Keep a checkpoint until it is unpinned: neither a live run nor `prune` deletes it.

    Works while the run is live. The pin is a line in pins.json, beside the checkpoints.

    Args:
        run: Folder of the run, or of its checkpoints.
        checkpoint: Name (step_10), step (10), `latest` or `best`: the one that it is now.
        json: Print JSON.
    """
    entry = find_checkpoint(place_of(run), checkpoint)
    new = pin_checkpoint(folder_of(run), entry, disk=Disk())
    _tell(json, f"{label_of(entry)} is pinned{'' if new else ' already'}", label_of(entry), True)
    return 0


def unpin(run: Run, checkpoint: Name, *, json: bool = False) -> int:
    """Let retention decide again about a checkpoint that was pinned.

    Args:
        run: Folder of the run, or of its checkpoints.
        checkpoint: Name, step or role; or the name in a pin whose checkpoint is gone.
        json: Print JSON.
    """
    folder = folder_of(run)
    pins = read_pins(folder)
    try:
        entry = find_checkpoint(place_of(run), checkpoint)
    except NotFound:
        gone = [key for key, name in pins.items() if checkpoint in (name, name.rpartition("_")[2])]
        if not gone:
            raise
        unpin_checkpoint(folder, gone[-1], disk=Disk())
        _tell(json, f"{checkpoint} is not pinned any more; it was gone", checkpoint, False)
        return 0
    label = label_of(entry)
    if entry.manifest is None or identity_of(entry.manifest) not in pins:
        raise NotFound(f"{label} is not pinned", hint="`keepstep ckpt ls` shows what is.")
    unpin_checkpoint(folder, identity_of(entry.manifest), disk=Disk())
    _tell(json, f"{label} is not pinned any more", label, False)
    return 0


def _tell(json: bool, text: str, name: str, pinned: bool) -> None:
    if json:
        print_json({"name": name, "pinned": pinned})
    else:
        print(text)


def prune(
    run: Run,
    *,
    keep_last: int | None = None,
    keep_best: int | None = None,
    keep_every: int | None = None,
    keep_hourly: int | None = None,
    keep_daily: int | None = None,
    aside: bool = False,
    apply: bool = False,
    json: bool = False,
) -> int:
    """Show what would be deleted and why the rest stays; delete it with --apply.

    What is not given is as in the run's run.toml. These never go: the newest checkpoint whose
    every byte is right, or there would be nothing to continue from; the best; milestones of a dense
    window; what is pinned. What is damaged, or not this run's, is left for you; so is what was set
    aside, without --aside. With --apply the folder must not be in use (exit code 5).

    Args:
        run: Folder of the run, or of its checkpoints.
        keep_last: Number of newest checkpoints to keep; 0 keeps all.
        keep_best: Number of best checkpoints to keep.
        keep_every: Keep checkpoints whose step is a multiple of this.
        keep_hourly: Keep the newest of each of the last so many hours (UTC).
        keep_daily: Keep the newest of each of the last so many days (UTC).
        aside: Delete what was set aside too, unless it is pinned.
        apply: Carry the plan out.
        json: Print JSON.
    """
    given = {
        "keep_last_n": keep_last,
        "keep_best_n": keep_best,
        "keep_every": keep_every,
        "keep_hourly": keep_hourly,
        "keep_daily": keep_daily,
    }
    policy = _policy(run, {name: value for name, value in given.items() if value is not None})
    # NotFound where there is nothing, before a lock is made in a folder that is none of ours.
    found_checkpoints(place_of(run))
    folder = folder_of(run)
    if not apply:
        planned = plan(folder, policy, aside=aside, now=time.time())
        _show_plan(planned, gone=None, json=json)
        return 0
    deleted: list[Planned] = []
    with FolderLock(folder / LOCK_NAME) as lock:
        # Made anew under the lock: nobody commits between this look and the deletions.
        planned = plan(folder, policy, aside=aside, now=time.time())
        carry_out(folder, planned, lock=lock, disk=Disk(), on_deleted=deleted.append)
    _show_plan(planned, gone=deleted, json=json)
    return 0


def _policy(run: Path, given: dict[str, int]) -> Retention:
    recorded = recorded_policy(run)
    if recorded is None and "keep_last_n" not in given:
        raise UsageError(
            f"{run} records no policy, so what to keep is not known",
            hint="Say how many of the newest to keep, as in --keep-last 2.",
        )
    try:
        return replace(recorded or Retention(), **given)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _show_plan(planned: list[Planned], *, gone: list[Planned] | None, json: bool) -> None:
    """Print the plan, or what became of it where `gone` is given."""
    goes = [item for item in planned if not item.reasons]
    freed = sum(item.bytes for item in (goes if gone is None else gone))
    if json:
        rows = [
            {
                "name": label_of(item.entry),
                "goes": not item.reasons,
                "kept_because": list(item.reasons),
                "bytes": item.bytes,
                "deleted": gone is not None and item in gone,
            }
            for item in planned
        ]
        print_json({"applied": gone is not None, "bytes_freed": freed, "checkpoints": rows})
        return
    width = max(len(label_of(item.entry)) for item in planned)
    for item in planned:
        name = label_of(item.entry).ljust(width)
        if item.reasons:
            print(f"{name}  stays  {', '.join(item.reasons)}")
        elif gone is None:
            print(f"{name}  goes   {bytes_text(item.bytes)}")
        else:
            word = (
                f"deleted  {bytes_text(item.bytes)}" if item in gone else "stays  pinned just now"
            )
            print(f"{name}  {word}")
    if gone is not None:
        print(f"{len(gone)} deleted, {bytes_text(freed)} freed")
    elif goes:
        print(f"{len(goes)} would go, {bytes_text(freed)}; nothing was changed (--apply does it)")
    else:
        print("nothing would go")


def diff(run: Run, one: Name, other: Name, *, values: bool = False, json: bool = False) -> int:
    """Compare two checkpoints; exit with 0 if they hold the same state, with 1 if not.

    Tensors are compared by their digests, bit for bit. Facts (time, metrics, ranks, versions) are
    shown, and do not count.

    Args:
        run: Folder of the run, or of its checkpoints.
        one: Name, step, `latest` or `best`; or the path of a checkpoint of any run (RUN/step_9).
        other: The same for the second one.
        values: Read the tensors that differ and show how far apart they are.
        json: Print JSON.
    """
    entries = [_named(run, one), _named(run, other)]
    found = compare(*entries, values=values)
    if json:
        print_json({"equal": found.equal, **asdict(found)})
    else:
        _show_difference(found, *entries)
    return 0 if found.equal else _DIFFERENT


def _named(run: Path, name: str) -> Checkpoint:
    """Return a checkpoint of the run, or the one that a path leads to."""
    path = Path(name)
    if len(path.parts) < 2 or path.parts[0] == ASIDE_NAME:
        return find_checkpoint(place_of(run), name)
    if (path / MANIFEST_NAME).exists():
        # Through links: `RUN/checkpoints/best` is one.
        resolved = path.resolve()
        return look_at(resolved, aside=resolved.parent.name == ASIDE_NAME)
    if path.parent.name == ASIDE_NAME:
        return find_checkpoint(place_of(path.parent.parent), f"{ASIDE_NAME}/{path.name}")
    return find_checkpoint(place_of(path.parent), path.name)


def _show_difference(found: Difference, one: Checkpoint, other: Checkpoint) -> None:
    print(f"first   {one.path}\nsecond  {other.path}")
    same = found.tensors_compared - sum(t.what[:4] != "only" for t in found.tensors)
    print(f"\ntensors: {same:,} the same, {len(found.tensors):,} not")
    for item in found.tensors:
        apart = ""
        if item.max_abs is not None and item.max_rel is not None:
            apart = f"  at most {item.max_abs:.3e} apart, relative {item.max_rel:.3e}"
        print(f"  {item.name}: {item.what}{apart}")
    for title, rows in (("plain state", found.plain), ("facts (do not count)", found.facts)):
        print(f"\n{title}: {len(rows):,} differ")
        for name, a, b in rows:
            print(f"  {name}: {_short(a)} -> {_short(b)}")
    print("\nthe same state" if found.equal else "\nthe states differ")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
