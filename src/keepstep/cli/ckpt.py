"""`keepstep ckpt`: a run's checkpoints. What only looks is here: no lock, torch for `.pth` only."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from keepstep.cli.ckpt_files import export, import_weights
from keepstep.cli.ckpt_text import (
    Run,
    best_text,
    folder_of,
    metrics_text,
    place_of,
    print_json,
    recorded_policy,
    when_text,
)
from keepstep.cli.ckpt_tools import diff, pin, prune, unpin
from keepstep.cli.parse import dispatch
from keepstep.config.quantities import bytes_text
from keepstep.errors import CheckpointDamaged, UsageError
from keepstep.store import Checkpoint, verify
from keepstep.store.catalog import bytes_on_disk, checkpoints_in, is_there, look_at, shared_bytes
from keepstep.store.prune import kept_because
from keepstep.store.roles import find_checkpoint, found_checkpoints, label_of, roles_of, whose

_HEADINGS = ("step", "saved", "size", "state", "role", "kept because of", "metrics")


def run_ckpt(argv: Sequence[str]) -> int:
    """Do what the first word says; return the exit code."""
    functions: dict[str, Callable[..., int]] = {
        "ls": ls,
        "show": show,
        "verify": verify_all,
        "diff": diff,
        "pin": pin,
        "unpin": unpin,
        "prune": prune,
        "export": export,
        "import": import_weights,
    }
    return dispatch("ckpt", functions, argv)


def ls(run: Run, *, json: bool = False) -> int:
    """List the checkpoints: step, when, size, whole or not, roles, why each is kept, metrics.

    RUN may be one .pth file: then that one is listed. "no run's": saved by a loop of your own with
    `save_checkpoint_atomic`. "another run's": `train` refuses a folder that holds such a one.

    The size is that of all its files. What is "shared" of it are frozen weights: a file that
    another checkpoint has too. Why is by the policy in the run's run.toml. "-": the next save
    deletes it. "?": the policy is not recorded, as by a loop of your own. Sizes are compared with
    the manifest; `verify` reads the bytes.

    Args:
        run: Folder of the run, or of its checkpoints.
        json: Print JSON.
    """
    entries = _looked_at(run)
    rows = _rows(run, entries)
    if json:
        print_json(rows)
        return 0
    lines = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    if any(row["shared"] for row in rows):
        total = bytes_text(bytes_on_disk(entries))
        print(f"on disk: {total}; what checkpoints share counts once")
    return 0


def show(run: Run, checkpoint: Annotated[str, tyro.conf.Positional], *, json: bool = False) -> int:
    """Show one checkpoint: its manifest's facts and its tensors.

    Args:
        run: Folder of the run, or of its checkpoints.
        checkpoint: Name (step_10), step (10), `latest` or `best`.
        json: Print JSON, with the digest of every piece.
    """
    place = place_of(run)
    entry = find_checkpoint(place, checkpoint)
    if not entry.of_a_run:
        raise UsageError(
            f"{entry.path}: no run saved it, so there is nothing to show of it",
            hint="`keepstep.store.load_checkpoint(path)` reads it.",
        )
    if entry.manifest is None:
        raise CheckpointDamaged(f"{entry.path}: {entry.fault}")
    manifest = entry.manifest
    if json:
        print_json(asdict(manifest))
        return 0
    facts = {
        "step": f"{manifest.step:,}",
        "updates": f"{manifest.updates:,}",
        "samples": f"{manifest.samples:,}",
        "tokens": f"{manifest.tokens:,}",
        "saved": when_text(manifest.time),
        "size": _size_text(manifest.size, shared_bytes(entry)),
        "run": manifest.run_id,
        "sequence": f"{manifest.sequence} (follows {manifest.parent or 'nothing'})",
        "ranks": str(manifest.world_size),
        "role": ", ".join(roles_of(entry, found_checkpoints(place))) or "-",
        "metrics": metrics_text(manifest.metrics) or "-",
        "best so far": best_text(manifest),
        "written by": ", ".join(f"{k} {v}" for k, v in manifest.environment.items() if v),
    }
    for name, value in facts.items():
        print(f"{name:<12} {value}")
    print(f"\n{'tensor':<60} {'type':<8} shape")
    for tensor in manifest.tensors:
        print(f"{tensor.name:<60} {tensor.dtype:<8} {list(tensor.shape)}")
    return 0


def verify_all(
    run: Run,
    checkpoint: Annotated[str, tyro.conf.Positional] = "",
    *,
    from_disk: bool = False,
    json: bool = False,
) -> int:
    """Re-read every byte and compare it with its digest; exit with 3 if anything differs.

    Args:
        run: Folder of the run, or of its checkpoints; or one .pth file.
        checkpoint: Name, step, `latest` or `best`; all of them if left out.
        from_disk: Read past the page cache, which may still hold what the disk has lost.
        json: Print JSON.
    """
    entries = [find_checkpoint(place_of(run), checkpoint)] if checkpoint else _looked_at(run)
    looked_at = [(entry, verify(entry, from_disk=from_disk)) for entry in entries]
    # A live run may delete an old checkpoint while it is read: that is not damage.
    results = [(entry, faults) for entry, faults in looked_at if is_there(entry)]
    damaged = any(faults for _, faults in results)
    if json:
        print_json(
            [
                {
                    "name": e.name,
                    "path": str(e.path),
                    "whole": not f,
                    "whose": whose(e, entries),
                    "faults": [asdict(x) for x in f],
                }
                for e, f in results
            ]
        )
    else:
        for entry, faults in results:
            other = whose(entry, entries)
            state = "damaged" if faults else "whole, every byte"
            print(f"{label_of(entry)}: {state}" + (f"; {other}" if other else ""))
            for fault in faults:
                print(f"  {fault.file}: {fault.message}")
    return CheckpointDamaged.exit_code if damaged else 0


def _looked_at(run: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run; where it is one `.pth` file, that one."""
    if run.suffix == ".pth" and run.is_file():
        return [look_at(run)]
    return found_checkpoints(place_of(run))


def checkpoints_table(run: Path) -> list[tuple[str, ...]]:
    """Return what `ls` prints of a run, with its headings; NotFound where there is nothing."""
    return [_HEADINGS, *map(_cells, _rows(run, _looked_at(run)))]


def _rows(run: Path, entries: list[Checkpoint]) -> list[dict[str, Any]]:
    home, around = run, entries
    if run.is_file():
        home = run.parent
        # Once only, also where it is another name of one that is listed.
        others = [e for e in checkpoints_in(home) if e.manifest != entries[0].manifest]
        around = [*others, *entries]
    kept = kept_because(folder_of(home), around, recorded_policy(home), now=time.time())
    return [_row(entry, around, kept[entry.path]) for entry in entries]


def _row(
    entry: Checkpoint, entries: list[Checkpoint], kept: tuple[str, ...] | None
) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "name": label_of(entry),
        "path": str(entry.path),
        "step": entry.step,
        "sequence": manifest.sequence if manifest else None,
        "time": manifest.time if manifest else None,
        "size": manifest.size if manifest else None,
        "shared": shared_bytes(entry),
        "complete": manifest is not None or not entry.of_a_run,
        "whose": whose(entry, entries),
        "fault": entry.fault if entry.of_a_run else "",
        "roles": roles_of(entry, entries),
        "kept_because": None if kept is None else list(kept),
        "metrics": manifest.metrics if manifest else {},
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        when_text(row["time"]) if row["time"] is not None else "-",
        _size_text(row["size"], row["shared"]) if row["size"] is not None else "-",
        _state_text(row),
        ", ".join(row["roles"]) or "-",
        "?" if row["kept_because"] is None else ", ".join(row["kept_because"]) or "-",
        metrics_text(row["metrics"]) or "-",
    )


def _state_text(row: dict[str, Any]) -> str:
    if not row["complete"]:
        return f"damaged: {row['fault']}"
    return f"complete, {row['whose']}" if row["whose"] else "complete"


def _size_text(size: int, shared: int) -> str:
    return bytes_text(size) + (f" ({bytes_text(shared)} shared)" if shared else "")
