"""`keepstep watch RUN`: follow a run that another process trains."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Annotated

import tyro

from keepstep.cli.ckpt_text import print_json
from keepstep.cli.parse import call
from keepstep.cli.runs import facts_of
from keepstep.config.quantities import seconds
from keepstep.errors import UsageError
from keepstep.report.live import Watch, event_line, last_line, status_lines


def run_watch(argv: Sequence[str]) -> int:
    """Watch; return the exit code."""
    return call("keepstep watch", watch, argv)


def watch(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    interval: str = "1s",
    once: bool = False,
    json: bool = False,
) -> int:
    """Follow a run: progress, loss, speed, checkpoints, notices; nothing of it is touched.

    On a terminal the state is shown in place; elsewhere each event is a line. Ends with code 0
    when no process trains the run any more, and says how it ended or that it was lost. Ctrl-C
    leaves the run alone.

    Args:
        run: Folder of the run.
        interval: Time between two looks, as "1s" or "5min".
        once: Show the state as it is now, and leave.
        json: Print each event of the journal as a line of JSON; a line of the kind `status` comes
            first, and one of the kind `ended` last.
    """
    try:
        pause = seconds(interval)
    except ValueError as error:
        raise UsageError(f"--interval is {interval!r}: it {error}") from error
    if pause <= 0:
        raise UsageError(f"--interval is {interval!r}: it must be more than nothing")
    watched = Watch(run)
    if json:
        _follow_as_json(watched, pause, once=once)
    elif once:
        print("\n".join(status_lines(watched.view)))
    elif sys.stdout.isatty():
        _follow_in_place(watched, pause)
    else:
        _follow_as_lines(watched, pause)
    return 0


def _follow_as_json(watched: Watch, pause: float, *, once: bool) -> None:
    status = {"kind": "status", "path": str(watched.view.folder), **facts_of(watched.view)}
    print_json(status, indent=None)
    while not once and watched.view.live:
        _wait(pause)
        for event in watched.look():
            print_json(event, indent=None)
    if not once:
        state = watched.view.state
        ended = {"kind": "ended", "state": state.word, "why": state.why, "code": state.code}
        print_json({**ended, "step": watched.view.history.step}, indent=None)


def _follow_as_lines(watched: Watch, pause: float) -> None:
    print("\n".join(status_lines(watched.view)))
    while watched.view.live:
        _wait(pause)
        for event in watched.look():
            line = event_line(event, watched.view)
            if line is not None:
                print(line)
    print(last_line(watched.view))


def _follow_in_place(watched: Watch, pause: float) -> None:
    # Imported here because they are wanted on a terminal only, and start-up counts.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def shown() -> Text:
        first, *others = status_lines(watched.view)
        text = Text(first, style="bold", no_wrap=True, overflow="ellipsis")
        return text.append("\n" + "\n".join(others), style="not bold")

    no_color = bool(os.environ.get("NO_COLOR"))
    with Live(shown(), console=Console(no_color=no_color), auto_refresh=False) as live:
        while watched.view.live:
            _wait(pause)
            watched.look()
            live.update(shown(), refresh=True)
    print(last_line(watched.view))


def _wait(pause: float) -> None:
    # What was printed is for whoever reads a pipe now.
    sys.stdout.flush()
    Event().wait(pause)
