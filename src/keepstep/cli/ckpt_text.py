"""What the `ckpt` commands share: where checkpoints are, and how things are shown."""

import json as json_format
import math
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from keepstep.config.quantities import number_text
from keepstep.config.resolved import RUN_TOML, recorded_checkpoint_folder, recorded_retention
from keepstep.errors import NotFound
from keepstep.store import Manifest, find_checkpoints_folder, list_checkpoints
from keepstep.store.layout import CHECKPOINTS_NAME, step_of
from keepstep.store.retention import Retention

Run = Annotated[Path, tyro.conf.Positional]
Name = Annotated[str, tyro.conf.Positional]


def place_of(run: Path) -> Path:
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


def folder_of(run: Path) -> Path:
    """Return the very folder in which the checkpoints stand."""
    return find_checkpoints_folder(place_of(run))


def run_folder_of(run: Path) -> Path:
    """Return the run's own folder, given it or that of the checkpoints in it."""
    inside = run.resolve()
    holds = (inside.parent / RUN_TOML).is_file() and not (inside / RUN_TOML).is_file()
    return inside.parent if holds and inside.name == CHECKPOINTS_NAME else run


def recorded_policy(run: Path) -> Retention | None:
    """Return the policy that the run's `run.toml` records; None for a loop that has none."""
    numbers = recorded_retention(run_folder_of(run))
    return Retention(**numbers) if numbers is not None else None


def when_text(seconds: float) -> str:
    """Return a time for people, in their own zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def metrics_text(metrics: dict[str, float]) -> str:
    """Return metrics on one line."""
    return ", ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))


def best_text(manifest: Manifest) -> str:
    """Return the best so far on one line."""
    best = manifest.best
    return (
        f"{best.metric} {number_text(best.value)} at step {best.step:,}"
        if best is not None
        else "-"
    )


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """Print data as strict JSON; on one line without ``indent``."""
    print(json_format.dumps(_strict(data), indent=indent, allow_nan=False))


def _strict(data: Any) -> Any:
    """Return data with "nan", "inf" and "-inf" as text: JSON has no such numbers."""
    if isinstance(data, dict):
        return {name: _strict(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data
