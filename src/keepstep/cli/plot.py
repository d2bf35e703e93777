"""`keepstep plot RUN ...`: curves of runs in the terminal, or as a picture."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from keepstep.cli.parse import call
from keepstep.errors import UsageError
from keepstep.report.curves import Axis, drawable, marks_of, panels_of
from keepstep.report.view import view_of
from keepstep.store.disk import Disk

_COLUMNS = 100


def run_plot(argv: Sequence[str]) -> int:
    """Draw; return the exit code."""
    return call("keepstep plot", plot, argv)


def plot(
    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(at least one)"),
    ],
    *,
    metric: str = "",
    x: Axis = "step",
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
) -> int:
    """Draw curves of one or more runs, with saves, evaluations, resumes and skipped steps marked.

    In the terminal, or as a picture with -o. Needs `pip install 'keepstep[report]'`.

    Args:
        runs: Folders of runs; their curves are drawn over one another.
        metric: Names with commas between: loss, grad_norm, rate, or one of an evaluation. Left out:
            loss and the metric that decides the best. Losses share a panel.
        x: Axis: steps, tokens, or the time that sessions lived.
        output: Picture to write, .png or .svg; one that is there is replaced.
    """
    if not runs:
        raise UsageError("`keepstep plot` needs the folder of a run")
    views = [view_of(folder) for folder in runs]
    names = [name.strip() for name in metric.split(",") if name.strip()]
    panels, marks = panels_of(views, names, x), marks_of(views, x)
    if not drawable(panels):
        raise UsageError(
            f"there is nothing to draw of {', '.join(map(str, runs))}",
            hint="No step that a journal holds has a finite value.",
        )
    if output is None:
        from keepstep.report.terminal import drawing

        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        columns = shutil.get_terminal_size((_COLUMNS, 0)).columns
        print(drawing(panels, marks, axis=x, columns=columns, colors=colors))
        return 0
    from keepstep.report.figure import picture

    kind = output.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise UsageError(f"{output}: a picture's name ends in .png or .svg")
    require_folder_of(output)
    data = picture(panels, marks, axis=x, kind=cast(Literal["png", "svg"], kind))
    Disk().replace_file(output, data)
    print(f"wrote {output}")
    return 0


def require_folder_of(output: Path) -> None:
    """Refuse a file whose folder is not there."""
    if not output.parent.is_dir():
        raise UsageError(f"{output}: there is no folder {output.parent}", hint="Make it first.")
