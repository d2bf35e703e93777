"""`keepstep ckpt ls|show|verify RUN`: what a run's folder holds. Needs no torch and no lock."""

import json as json_format
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from keepstep.cli.parse import dispatch
from keepstep.config.quantities import bytes_text
from keepstep.config.resolved import recorded_checkpoint_folder
from keepstep.errors import CheckpointDamaged, NotFound
from keepstep.store import Checkpoint, Manifest, list_checkpoints, verify
from keepstep.store.layout import step_of
from keepstep.store.roles import find_checkpoint, found_checkpoints, label_of, roles_of

Run = Annotated[Path, tyro.conf.Positional]


def run_ckpt(argv: Sequence[str]) -> int:
    """Look at checkpoints; return the exit code."""
    return dispatch("ckpt", {"ls": ls, "show": show, "verify": verify_all}, argv)


def ls(run: Run, *, json: bool = False) -> int:
    """List the checkpoints: step, when, size, whole or not and why, roles, metrics.

    Sizes are compared with the manifest; `verify` reads the bytes.

    Args:
        run: Folder of the run, or of its checkpoints.
        json: Print JSON.
    """
    entries = found_checkpoints(_place(run))
    rows = [_row(entry, roles_of(entry, entries)) for entry in entries]
    if json:
        _print_json(rows)
        return 0
    lines: list[tuple[str, ...]] = [("step", "saved", "size", "state", "role", "metrics")]
    lines += [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def show(run: Run, checkpoint: Annotated[str, tyro.conf.Positional], *, json: bool = False) -> int:
    """Show one checkpoint: its manifest's facts and its tensors.

    Args:
        run: Folder of the run, or of its checkpoints.
        checkpoint: Name (step_10), step (10), `latest` or `best`.
        json: Print JSON, with the digest of every piece.
    """
    place = _place(run)
    entry = find_checkpoint(place, checkpoint)
    if entry.manifest is None:
        raise CheckpointDamaged(f"{entry.path}: {entry.fault}")
    manifest = entry.manifest
    if json:
        _print_json(asdict(manifest))
        return 0
    facts = {
        "step": f"{manifest.step:,}",
        "updates": f"{manifest.updates:,}",
        "samples": f"{manifest.samples:,}",
        "tokens": f"{manifest.tokens:,}",
        "saved": _when(manifest.time),
        "size": bytes_text(manifest.size),
        "run": manifest.run_id,
        "sequence": f"{manifest.sequence} (follows {manifest.parent or 'nothing'})",
        "ranks": str(manifest.world_size),
        "role": ", ".join(roles_of(entry, found_checkpoints(place))) or "-",
        "metrics": _metrics(manifest.metrics) or "-",
        "best so far": _best(manifest),
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
    json: bool = False,
) -> int:
    """Re-read every byte and compare it with its digest; exit with 3 if anything differs.

    Args:
        run: Folder of the run, or of its checkpoints.
        checkpoint: Name, step, `latest` or `best`; all of them if left out.
        json: Print JSON.
    """
    place = _place(run)
    entries = [find_checkpoint(place, checkpoint)] if checkpoint else found_checkpoints(place)
    looked_at = [(entry, verify(entry)) for entry in entries]
    # A live run may delete an old checkpoint while it is read: that is not damage.
    results = [(entry, faults) for entry, faults in looked_at if entry.path.exists()]
    damaged = any(faults for _, faults in results)
    if json:
        _print_json(
            [
                {
                    "name": e.name,
                    "path": str(e.path),
                    "whole": not f,
                    "faults": [asdict(x) for x in f],
                }
                for e, f in results
            ]
        )
    else:
        for entry, faults in results:
            print(f"{label_of(entry)}: {'damaged' if faults else 'whole, every byte'}")
            for fault in faults:
                print(f"  {fault.file}: {fault.message}")
    return CheckpointDamaged.exit_code if damaged else 0


def _place(run: Path) -> Path:
    """Return the folder to look into: the run's, or the one that its `run.toml` names.

    What a run's folder holds comes first: it may have been moved since its config was written.
    """
    if step_of(run.name) is not None and not list_checkpoints(run) and run.is_dir():
        raise NotFound(
            f"{run} is one checkpoint, not the folder of a run",
            hint=f"Give its folder first, as in `keepstep ckpt verify {run.parent} {run.name}`.",
        )
    recorded = recorded_checkpoint_folder(run)
    if recorded is None or list_checkpoints(run, aside=True):
        return run
    return recorded


def _row(entry: Checkpoint, roles: list[str]) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "name": label_of(entry),
        "path": str(entry.path),
        "step": entry.step,
        "sequence": manifest.sequence if manifest else None,
        "time": manifest.time if manifest else None,
        "size": manifest.size if manifest else None,
        "complete": manifest is not None,
        "fault": entry.fault,
        "roles": roles,
        "metrics": manifest.metrics if manifest else {},
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        _when(row["time"]) if row["time"] is not None else "-",
        bytes_text(row["size"]) if row["size"] is not None else "-",
        "complete" if row["complete"] else f"damaged: {row['fault']}",
        ", ".join(row["roles"]) or "-",
        _metrics(row["metrics"]) or "-",
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in sorted(metrics.items()))


def _number(value: float) -> str:
    """Return a metric for people; a small one does not become 0.0000."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.3e}"


def _best(manifest: Manifest) -> str:
    best = manifest.best
    return f"{best.metric} {_number(best.value)} at step {best.step:,}" if best is not None else "-"


def _print_json(data: Any) -> None:
    print(json_format.dumps(_strict(data), indent=2, allow_nan=False))


def _strict(data: Any) -> Any:
    """Return data with "nan", "inf" and "-inf" as text: JSON has no such numbers."""
    if isinstance(data, dict):
        return {name: _strict(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data
