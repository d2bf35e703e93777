"""`keepstep runs ls|compare`: what runs there are, and how some of them differ."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from keepstep.cli.ckpt_text import print_json, when_text
from keepstep.cli.parse import dispatch
from keepstep.config.quantities import number_text
from keepstep.errors import KeepstepError, UsageError
from keepstep.report.compare import (
    differing_fields,
    last_common_evaluation,
    last_common_step,
    metrics_after,
    parting,
)
from keepstep.report.view import View, find_runs, one_line, view_of

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN [RUN ...]")]


_HEADINGS = ("run", "task", "state", "step", "loss", "best", "newest", "sessions", "last line")


def run_runs(argv: Sequence[str]) -> int:
    """Do what the first word says; return the exit code."""
    functions: dict[str, Callable[..., int]] = {"ls": ls, "compare": compare}
    return dispatch("runs", functions, argv)


def ls(
    root: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROOT")] = Path("runs"),
    *,
    json: bool = False,
) -> int:
    """List the runs in a folder: state, step, loss, best, newest checkpoint, sessions.

    States: starting and running (a live process holds the run's lock), lost (it was killed: the
    same command continues it), unknown, or how it ended: finished, stopped, diverged, ...

    Args:
        root: Folder that holds runs, also one level further in; or one run.
        json: Print JSON.
    """
    rows = [_row(folder) for folder in find_runs(root)]
    if json:
        print_json(rows)
        return 0
    print_table([_HEADINGS, *map(_cells, rows)])
    return 0


def compare(runs: Runs, *, json: bool = False) -> int:
    """Compare runs: config fields that differ, numbers at the same steps, where losses part.

    Losses are compared bit for bit with those of the first run.

    Args:
        runs: Folders of two or more runs.
        json: Print JSON.
    """
    if len(runs) < 2:
        raise UsageError(
            f"one run cannot be compared: {runs[0]}" if runs else "there is no run to compare",
            hint="usage: keepstep runs compare RUN RUN [RUN ...]",
        )
    views = [view_of(folder) for folder in runs]
    found = _comparison(views)
    if json:
        print_json(found)
        return 0
    _print_comparison(views, found)
    return 0


def _row(folder: Path) -> dict[str, Any]:
    """Return what is known of a run; of one that cannot be read, its fault."""
    try:
        view = view_of(folder)
    except (KeepstepError, OSError) as error:
        return {"path": str(folder), "name": folder.name, "fault": one_line(str(error))}
    return {"path": str(folder), **facts_of(view), "fault": None}


def facts_of(view: View) -> dict[str, Any]:
    """Return the facts of a run as data."""
    history, (metric, mode) = view.history, view.metric
    best, speed = history.best(metric, mode), history.speed()
    return {
        "name": view.name,
        "task": view.field("task"),
        "state": view.state.word,
        "why": view.state.why,
        "code": view.state.code,
        "step": history.step,
        "max_steps": view.max_steps,
        "loss": history.value("loss", history.step),
        "best": {"metric": metric, "step": best[0], "value": best[1]} if best else None,
        "checkpoint": view.checkpoint(),
        "sessions": len(history.sessions),
        "steps_per_second": speed[0] if speed else None,
        "last_activity": history.last_time if history.events or history.steps else None,
        "unreadable_lines": history.unreadable,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["fault"] is not None:
        return (one_line(row["path"]), "-", f"damaged: {row['fault']}", *["-"] * 6)
    best, when = row["best"], row["last_activity"]
    return (
        one_line(row["path"]),
        one_line(str(row["task"] or "-")),
        row["state"],
        step_text(row["step"], row["max_steps"]),
        number_text(row["loss"]) if row["loss"] is not None else "-",
        f"{best['metric']} {number_text(best['value'])} at {best['step']:,}" if best else "-",
        row["checkpoint"] or "-",
        str(row["sessions"]),
        when_text(when) if when is not None else "-",
    )


def step_text(step: int, max_steps: int | None) -> str:
    """Return a step of the last one, as `1,200/2,000`."""
    return f"{step:,}" + (f"/{max_steps:,}" if max_steps is not None else "")


def print_table(lines: list[tuple[str, ...]]) -> None:
    """Print rows with their cells under one another."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _comparison(views: Sequence[View]) -> dict[str, Any]:
    histories = [view.history for view in views]
    step, evaluated = last_common_step(histories), last_common_evaluation(histories)
    partings = [parting(histories[0], history) for history in histories[1:]]
    return {
        "runs": [{"path": str(view.folder), **facts_of(view)} for view in views],
        "config": differing_fields(views),
        "last_common_step": step,
        "losses": [h.value("loss", step) for h in histories] if step is not None else None,
        "last_common_evaluation": evaluated,
        "metrics": [metrics_after(h, evaluated) for h in histories]
        if evaluated is not None
        else None,
        "losses_part": [
            {"run": str(view.folder), "step": found.step, "common_steps": found.common_steps}
            for view, found in zip(views[1:], partings, strict=True)
        ],
    }


def _print_comparison(views: Sequence[View], found: dict[str, Any]) -> None:
    rows = found["runs"]
    lines: list[tuple[str, ...]] = [("", *(one_line(row["path"]) for row in rows))]

    def line(name: str, cells: Sequence[str]) -> None:
        lines.append((name, *cells))

    line("state", [view.state.text for view in views])
    line("step", [step_text(row["step"], row["max_steps"]) for row in rows])
    line("steps/s", [_number(row["steps_per_second"]) for row in rows])
    line("sessions", [str(row["sessions"]) for row in rows])
    line("best", [_cells({**row, "fault": None})[5] for row in rows])
    if found["losses"] is not None:
        line(f"loss at {found['last_common_step']:,}", [_number(loss) for loss in found["losses"]])
    for name in sorted({name for metrics in found["metrics"] or [] for name in metrics}):
        cells = [_number(metrics.get(name)) for metrics in found["metrics"]]
        line(f"{one_line(name)} at {found['last_common_evaluation']:,}", cells)
    for path, values in found["config"].items():
        line(one_line(path), ["-" if value is None else one_line(repr(value)) for value in values])
    print_table(lines)
    print()
    first = one_line(rows[0]["path"])
    for part in found["losses_part"]:
        print(f"{one_line(part['run'])}: {_parting_text(part, first)}")


def _parting_text(part: dict[str, Any], first: str) -> str:
    if not part["common_steps"]:
        return f"no step in common with {first}"
    if part["step"] is None:
        same = f"all {part['common_steps']:,} common steps have the losses of {first}"
        return f"{same}, bit for bit"
    return f"the losses part from those of {first} at step {part['step']:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else number_text(value)
