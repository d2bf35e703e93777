"""Curves as a picture, drawn by matplotlib: PNG and SVG."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from keepstep.errors import UsageError
from keepstep.report.curves import AXIS_LABELS, Axis, Curve, Marks, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

NO_LIBRARY = "Install it with `pip install 'keepstep[report]'`."

_COLORS = ("#0b6fb8", "#d1520f", "#1a8a4e", "#8a4bb5", "#b8860b", "#c2337a", "#4d4d4d", "#2aa5a0")
_WIDTH_INCHES, _PANEL_INCHES, _DOTS_PER_INCH = 9.0, 3.2, 130
_STYLES = ("-", "--", ":", "-.")


def picture(
    panels: Sequence[Panel],
    marks: Sequence[Marks],
    *,
    axis: Axis,
    kind: Literal["png", "svg"],
) -> bytes:
    """Return the picture's bytes; UsageError where matplotlib is not installed.

    An SVG has its text as text and names no place in the network that is fetched. The same curves
    make the same bytes.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError("a picture needs matplotlib", hint=NO_LIBRARY) from error
    size = (_WIDTH_INCHES, _PANEL_INCHES * len(panels))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "keepstep"}):
        figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(len(panels), 1, number + 1)
            label = AXIS_LABELS[axis] if panel is panels[-1] else ""
            _draw(axes, panel, marks, x_label=label, integers=axis == "step")
        return _bytes_of(figure, kind)


def _bytes_of(figure: "Figure", kind: Literal["png", "svg"]) -> bytes:
    file = io.BytesIO()
    # What matplotlib writes of itself and of the hour would make two pictures of the same differ.
    unsaid = ("Creator", "Date", "Format", "Type") if kind == "svg" else ("Software",)
    figure.savefig(file, format=kind, metadata=dict.fromkeys(unsaid))
    return file.getvalue()


def _draw(
    axes: "Axes", panel: Panel, marks: Sequence[Marks], *, x_label: str, integers: bool
) -> None:
    from matplotlib.ticker import MaxNLocator

    handles: list[Line2D] = []
    labels: list[str] = []
    named: dict[str, Line2D] = {}
    for number, curve in enumerate(panel.curves):
        color = _color(curve.run if len(marks) > 1 else number)
        handles += axes.plot(curve.xs, curve.ys, color=color, **_style(curve, number, panel))
        labels.append(curve.label)
    bottom = axes.get_xaxis_transform()
    for mark in marks:
        color = _color(mark.run) if len(marks) > 1 else "#555555"
        kinds = ((mark.saves, "^", 0.03, "saved"), (mark.skips, "x", 0.09, "skipped"))
        for places, sign, height, label in kinds:
            if places:
                (points,) = axes.plot(
                    places,
                    [height] * len(places),
                    linestyle="none", marker=sign, markersize=5, color=color,
                    alpha=0.7, transform=bottom, scalex=False,
                )  # fmt: skip
                named.setdefault(label, points)
        for place in mark.resumes:
            line = axes.axvline(place, color=color, linestyle=(0, (2, 3)), linewidth=1.1)
            named.setdefault("resumed", line)
    handles += named.values()
    labels += named
    axes.set_title(panel.title, loc="left", fontsize=10, parse_math=False)
    axes.set_xlabel(x_label)
    if integers:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # A label that begins with an underscore is one that matplotlib leaves out.
    shown = [f" {label}" if label.startswith("_") else label for label in labels]
    legend = axes.legend(handles, shown, fontsize=8, frameon=False)
    for text in legend.get_texts():
        # A dollar in a run's name is no formula.
        text.set_parse_math(False)


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _style(curve: Curve, number: int, panel: Panel) -> dict[str, Any]:
    kinds = sum(other.run == curve.run for other in panel.curves[:number])
    lonely = curve.sparse or sum(math.isfinite(y) for y in curve.ys) < 3
    return {
        "linestyle": _STYLES[kinds % len(_STYLES)],
        "marker": "o" if lonely else "",
        "markersize": 4,
        "linewidth": 1.6 if curve.sparse else 1.1,
    }
