"""What a run shows: a bar on a terminal, the same numbers as plain lines elsewhere.

Guarantees: a terminal that goes away (a closed pipe, a lost connection) never ends the run; the
console falls silent and the journal, which holds every number, says so.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from keepstep.config.quantities import number_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from keepstep.run.outcome import Outcome
    from keepstep.run.run import Run

_WORD_WIDTH = 9
_STEPS_OF_THE_RATE = 100
"""The speed shown is that of the last so many steps: a stall or the start do not stay in it."""
_WORDS_SHOWN_WHEN_QUIET = frozenset(
    {"resume", "rollback", "store", "config", "hooks", "grace", "track"}
)


class Console:
    """A hook that prints. `quiet` leaves out progress and saves, not what went wrong."""

    first_rank_only = True

    def __init__(self, *, quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        if isinstance(self._stream, TextIOWrapper):
            # A terminal that knows no `·` shows something else for it, and the run goes on.
            self._stream.reconfigure(errors="replace")
        self._quiet = quiet
        self._lost = False
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None
        # Of each recent step: when it ended, its number, the tokens up to it.
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=_STEPS_OF_THE_RATE + 1)

    def on_run_start(self, run: "Run") -> None:
        """Say what is about to be trained."""
        assert run.position is not None, "a run starts with a state"
        parameters = sum(p.numel() for p in run.position.model.parameters())
        config = run.config
        self._line(
            run,
            "run",
            f"{config.run.name} · {config.task} · {_count(parameters)} parameters"
            f" · {run.group.description} on {run.device.type} · {run.folder}",
        )
        counters = run.position.counters
        if not self._quiet and self._stream.isatty():
            self._start_bar(run, counters.step)

    def on_rewound(self, run: "Run", step: int) -> None:
        """Measure the speed from here on."""
        assert run.position is not None, "only a state goes back"
        self._recent.clear()
        self._recent.append((time.monotonic(), step, run.position.counters.tokens))

    def on_step_end(self, run: "Run", step: int, metrics: Mapping[str, Any]) -> None:
        """Show the numbers of a step, every `train.log_interval` steps and at the last one."""
        assert run.position is not None, "a step has a state"
        self._recent.append((time.monotonic(), step, metrics["tokens"]))
        config = run.config.train
        if metrics["skipped"]:
            self._line(
                run,
                "skip",
                f"step {step:,}: no update, because not all is finite: loss"
                f" {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}",
            )
        if self._bar is None and step % config.log_interval and step != config.max_steps:
            return
        numbers = self._numbers(run, step, metrics)
        if self._bar is not None and self._bar_task is not None:
            bar, task = self._bar, self._bar_task
            self._guarded(run, lambda: bar.update(task, completed=step, description=numbers))
        elif not self._quiet:
            self._print(run, f"step {step:,}/{config.max_steps:,}  {numbers}")

    def on_evaluated(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Show the held-out metrics."""
        if not self._quiet:
            numbers = "  ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
            self._line(run, "evaluate", f"step {step:,}  {numbers}")

    def on_notice(self, run: "Run", word: str, text: str) -> None:
        """Show what the run has to tell."""
        if not self._quiet or word in _WORDS_SHOWN_WHEN_QUIET:
            self._line(run, word, text)

    def on_run_end(self, run: "Run", outcome: "Outcome") -> None:
        """Say how it ended, what is saved and where, and the command that continues."""
        self._guarded(run, self._stop_bar)
        self._print(run, last_line(outcome, run.store.folder))

    def _numbers(self, run: "Run", step: int, metrics: Mapping[str, Any]) -> str:
        since, first_step, first_tokens = self._recent[0]
        seconds = max(self._recent[-1][0] - since, 1e-9)
        rate = (metrics["tokens"] - first_tokens) / seconds
        left = (run.config.train.max_steps - step) * seconds / max(step - first_step, 1)
        # What the line follows from is durable; a save that was only begun is not.
        newest = run.store.newest
        saved = f"  saved {newest.step:,}" if newest is not None else ""
        return (
            f"loss {number_text(metrics['loss'])}  lr {metrics['rate']:.1e}"
            f"  grad {number_text(metrics['grad_norm'], digits=2)}  tok/s {rate:,.0f}"
            f"  eta {duration_text(left)}{saved}"
        )

    def _start_bar(self, run: "Run", step: int) -> None:
        # Imported here because rich is wanted on a terminal only, and start-up counts.
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=RichConsole(file=self._stream),
        )
        self._bar_task = self._bar.add_task("", total=run.config.train.max_steps, completed=step)
        self._bar.start()

    def _line(self, run: "Run", word: str, text: str) -> None:
        self._print(run, f"{word:<{_WORD_WIDTH}}{text}")

    def _print(self, run: "Run", line: str) -> None:
        self._guarded(run, lambda: self._write(line))

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()

    def _guarded(self, run: "Run", show: Callable[[], None]) -> None:
        """Show something; where the reader is gone, fall silent.

        Losing hours of training over a line of text helps nobody.
        """
        if self._lost:
            return
        try:
            show()
        except (OSError, ValueError) as error:
            self._lost = True
            self._bar = None
            run.journal.write("notice", word="console", text=f"output is lost: {error}")


def last_line(outcome: "Outcome", checkpoints: Path) -> str:
    """Return the last line of a session: how it ended, what stands, how to go on."""
    again = "Run the same command to continue."
    saved = f"{outcome.checkpoint} is saved" if outcome.checkpoint else "nothing is saved"
    where = f"{saved} in {checkpoints}" if outcome.checkpoint else saved
    match str(outcome.ending):
        case "finished":
            return f"finished at step {outcome.step:,}; {where}."
        case "finished_skipped":
            return (
                f"finished at step {outcome.step:,}, whose update was skipped: {outcome.reason};"
                f" {where}."
            )
        case "nothing_to_do":
            return f"nothing to do: {outcome.reason} is done; {where}."
        case "stopped":
            return f"stopped  at step {outcome.step:,} ({outcome.reason}); {where}. {again}"
        case "diverged":
            return f"diverged at step {outcome.step:,}: {outcome.reason}; {where}."
        case ending:
            # What the error says follows on its own.
            return f"{ending} at step {outcome.step:,}; {where}."


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)


def duration_text(seconds: float) -> str:
    """Return a duration for people: `1h05m`, `6m12s`."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    if hours:
        return f"{hours}h{rest // 60:02d}m"
    return f"{rest // 60}m{rest % 60:02d}s"
