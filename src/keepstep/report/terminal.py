"""Curves in a terminal, drawn by plotext; without colours each curve has a sign of its own."""

import math
from collections.abc import Sequence
from typing import Any

from keepstep.errors import UsageError
from keepstep.report.curves import AXIS_LABELS, Axis, Marks, Panel
from keepstep.report.figure import NO_LIBRARY

_COLORS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+")
_SIGNS = "*+o#%@"
_SAVED, _SKIPPED, _RESUMED = "▲", "×", "│"
_ROWS_OF_A_PANEL = 20


def drawing(
    panels: Sequence[Panel], marks: Sequence[Marks], *, axis: Axis, columns: int, colors: bool
) -> str:
    """Return the curves as text of so many columns; UsageError where plotext is not installed."""
    try:
        import plotext
    except ModuleNotFoundError as error:
        raise UsageError("curves in the terminal need plotext", hint=NO_LIBRARY) from error
    lines = []
    for panel in panels:
        plotext.clear_figure()
        plotext.limit_size(False, False)
        plotext.plotsize(columns, _ROWS_OF_A_PANEL)
        plotext.theme("clear")
        legend, lowest = [], math.inf
        for number, curve in enumerate(panel.curves):
            points = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(y)]
            if not points:
                continue
            color = _COLORS[number % len(_COLORS)]
            sign = "braille" if colors else _SIGNS[number % len(_SIGNS)]
            xs, ys = zip(*points, strict=True)
            plotext.plot(xs, ys, marker=sign, color=color)
            if curve.sparse and colors:
                plotext.scatter(xs, ys, marker="●", color=color)
            lowest = min(lowest, *ys)
            legend.append(f"{plotext.colorize('━', color) if colors else sign} {curve.label}")
        if math.isfinite(lowest):
            legend += _mark(plotext, marks, lowest)
        plotext.title(panel.title)
        plotext.xlabel(AXIS_LABELS[axis])
        text = plotext.build()
        lines += [(text if colors else plotext.uncolorize(text)).rstrip(), "  ".join(legend)]
    return "\n".join(lines)


def _mark(plotext: Any, marks: Sequence[Marks], lowest: float) -> list[str]:
    """Mark saves, skipped steps and resumes; return what their signs mean."""
    legend = []
    for sign, word, places in (
        (_SAVED, "saved", [place for mark in marks for place in mark.saves]),
        (_SKIPPED, "skipped", [place for mark in marks for place in mark.skips]),
    ):
        if places:
            plotext.scatter(places, [lowest] * len(places), marker=sign, color="gray")
            legend.append(f"{sign} {word}")
    resumes = [place for mark in marks for place in mark.resumes]
    for place in resumes:
        plotext.vline(place, color="gray")
    return legend + ([f"{_RESUMED} resumed"] if resumes else [])
