"""What is drawn of runs: curves and marks, as numbers; the terminal and the pictures draw the same.

A value that is not finite is a gap in its curve. A long curve is thinned so that its spikes stay.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.errors import UsageError
from keepstep.report.history import OF_A_STEP, History
from keepstep.report.view import View, one_line

Axis = Literal["step", "tokens", "time"]

AXIS_LABELS: dict[Axis, str] = {
    "step": "step",
    "tokens": "tokens",
    "time": "hours of sessions, the time between them left out",
}
_POINTS_MAX = 2000
"""Points of a curve: about twice the columns of a picture, so that none of them lacks one."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run; ``run`` is the number of the run among those that are drawn."""

    run: int
    label: str
    xs: list[float]
    ys: list[float]
    sparse: bool
    """Measured now and then, as an evaluation: each point is shown."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Where a run was saved, continued, and where a step was skipped as not finite."""

    run: int
    saves: list[float]
    resumes: list[float]
    skips: list[float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share an axis."""

    title: str
    curves: list[Curve]


def panels_of(views: Sequence[View], metrics: Sequence[str], axis: Axis) -> list[Panel]:
    """Return what to draw; the losses share a panel, every other metric has its own.

    Without ``metrics``: the loss, and the metric that decides the best. UsageError for a metric
    that no run has.
    """
    there = {name for view in views for name in metric_names(view.history)}
    asked = list(dict.fromkeys(metrics))
    if missing := [name for name in asked if name not in there]:
        raise UsageError(
            f"no run has a metric {missing[0]!r}",
            hint=f"There are: {', '.join(sorted(there)) or 'none yet'}.",
        )
    wanted = asked or [n for n in dict.fromkeys(("loss", views[0].metric[0])) if n in there]
    groups: dict[str, list[str]] = {}
    for name in wanted:
        groups.setdefault("loss" if "loss" in name else name, []).append(name)
    return [
        Panel(title=one_line(", ".join(names)), curves=_curves(views, names, axis))
        for names in groups.values()
    ]


def drawable(panels: Sequence[Panel]) -> bool:
    """Tell whether there is any finite value to draw."""
    return any(math.isfinite(y) for panel in panels for curve in panel.curves for y in curve.ys)


def metric_names(history: History) -> list[str]:
    """Return what can be drawn of a run."""
    names = list(OF_A_STEP) if history.steps else []
    return names + sorted({n for e in history.evaluations for n in e.metrics if n not in names})


def _curves(views: Sequence[View], names: Sequence[str], axis: Axis) -> list[Curve]:
    found = []
    for run, view in enumerate(views):
        for name in names:
            xs, ys, sparse = _points(view.history, name, axis)
            label = f"{view.name} {one_line(name)}" if len(views) > 1 else one_line(name)
            if xs:
                found.append(Curve(run=run, label=label, xs=xs, ys=ys, sparse=sparse))
    return found


def _points(history: History, name: str, axis: Axis) -> tuple[list[float], list[float], bool]:
    if name in OF_A_STEP:
        xs, ys = thinned(_column(history, axis), list(history.values[name]), _POINTS_MAX)
        return xs, ys, False
    measured = [(e.step, e.metrics[name]) for e in history.evaluations if name in e.metrics]
    places = places_of(history, [step for step, _ in measured], axis)
    return places, [value for _, value in measured], True


def marks_of(views: Sequence[View], axis: Axis) -> list[Marks]:
    """Return the marks of each run."""
    return [
        Marks(
            run=run,
            saves=places_of(view.history, [save.step for save in view.history.saves], axis),
            resumes=places_of(
                view.history,
                [s.resumed_at for s in view.history.sessions if s.resumed_at is not None],
                axis,
            ),
            skips=places_of(view.history, view.history.skipped, axis),
        )
        for run, view in enumerate(views)
    ]


def places_of(history: History, steps: Sequence[int], axis: Axis) -> list[float]:
    """Return where steps stand on an axis; a step that is in no line stands where it began."""
    column = _column(history, axis)
    places = []
    for step in steps:
        index = bisect_right(history.steps, step)
        places.append(float(step) if axis == "step" else column[index - 1] if index else 0.0)
    return places


def _column(history: History, axis: Axis) -> list[float]:
    if axis == "time":
        return [seconds / 3600 for seconds in history.seconds]
    return [float(count) for count in (history.steps if axis == "step" else history.tokens)]


def thinned(
    xs: Sequence[float], ys: Sequence[float], points_max: int
) -> tuple[list[float], list[float]]:
    """Return about so many points at most: of each stretch the least, the largest and a gap."""
    if len(xs) <= points_max:
        return list(xs), list(ys)
    width = math.ceil(len(xs) * 2 / points_max)
    kept: list[int] = []
    for start in range(0, len(xs), width):
        stretch = range(start, min(start + width, len(xs)))
        finite = [index for index in stretch if math.isfinite(ys[index])]
        gaps = [index for index in stretch if not math.isfinite(ys[index])]
        chosen = {*gaps[:1]}
        if finite:
            chosen |= {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}
        kept += sorted(chosen)
    return [xs[index] for index in kept], [ys[index] for index in kept]
