"""`keepstep report RUN -o FILE.html`: all about a run on one page that needs nothing else."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from keepstep.cli.ckpt import checkpoints_table
from keepstep.cli.parse import call
from keepstep.cli.plot import require_folder_of
from keepstep.config.resolved import RUN_TOML
from keepstep.errors import NotFound, UsageError
from keepstep.report.page import MARK, page
from keepstep.report.view import view_of
from keepstep.store.disk import Disk
from keepstep.store.regular import opened

_HEAD_BYTES = 1000


def run_report(argv: Sequence[str]) -> int:
    """Write a report; return the exit code."""
    return call("keepstep report", report, argv)


def report(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])],
    overwrite: bool = False,
) -> int:
    """Write a run's curves, checkpoints, sessions, notices, config and environment on one page.

    The page is one file that fetches nothing. Needs `pip install 'keepstep[report]'`.

    Args:
        run: Folder of the run.
        output: Page to write. One that is an earlier report is replaced, in one step.
        overwrite: Replace any file of that name.
    """
    require_folder_of(output)
    if not overwrite:
        _require_no_other(output)
    view = view_of(run)
    checkpoints: list[tuple[str, ...]] | str
    try:
        checkpoints = checkpoints_table(run)
    except NotFound as error:
        checkpoints = error.message
    path = run / RUN_TOML
    config = path.read_text(encoding="utf-8") if path.is_file() else ""
    data = page(view, checkpoints=checkpoints, config=config, now=time.time())
    Disk().replace_file(output, data)
    print(f"wrote {output}")
    return 0


def _require_no_other(output: Path) -> None:
    """Refuse to replace what is there, unless it is an earlier report."""
    if not (output.exists() or output.is_symlink()):
        return
    try:
        with opened(output) as file:
            earlier = MARK.encode() in file.read(_HEAD_BYTES)
    except OSError:
        # What cannot be read is no report of ours.
        earlier = False
    if not earlier:
        raise UsageError(
            f"{output} is there, and is no report of keepstep",
            hint="Choose another name, or replace it with --overwrite.",
        )
