"""What trackers are told, and how: each follows the journal, in a thread of its own.

Guarantees:
1. No step waits for a tracker and none ends by its error: a tracker reads the journal, which is
   written anyway, and the step loop does nothing for it.
2. Nothing is dropped. What a tracker could not take (a kill, a network that is gone, a full disk)
   stands in the journal, and is supplied when it can take it: half a minute after an error, or by
   the next session.
3. What the run takes back, by a resume or a rollback, is taken back in the tracker (`rewind`), so
   that it holds each step once.
4. The end of the run waits for a tracker for `track.wait` at the most, and for half of what is left
   of the grace. One that hangs is left behind, and so is what its library would wait for at exit.

An error is told once, in the journal and on the terminal, and told to be over when it is.
"""

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keepstep.config.quantities import seconds
from keepstep.distributed.leave import leave_behind
from keepstep.run.journal import events_from, near
from keepstep.store.layout import JOURNAL_NAME

if TYPE_CHECKING:
    from keepstep.run.outcome import Outcome
    from keepstep.run.run import Run

_LOOK_SECONDS = 0.5
"""A tracker lags so far behind: nobody sees it, and the lines of many quick steps go together."""
_RETRY_SECONDS = 30.0
_WORD = "track"
_NUMBERS = ("loss", "grad_norm", "rate", "updates", "tokens")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a tracker shows of one line of the journal; `time` in seconds since 1970."""

    step: int
    time: float
    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def ended(outcome: "Outcome") -> Record:
    """Return what a tracker shows of the end of a session."""
    text = f"{outcome.ending} {outcome.reason}".strip()
    return Record(step=outcome.step, time=time.time(), texts={"outcome": text})


class Tracker(Protocol):
    """Where records go. Called by one thread; any error is raised, and followed by `rewind`.

    Each is a module of this folder with a function `build(run, tell)`: it is called in the main
    thread and imports the library; `tell` is for what people should know.
    """

    def rewind(self, step: int) -> int:
        """Take back what is held of later steps than `step`; return the first step to be written.

        What is held from there on is taken back as well. Also called first of all.
        """
        ...

    def write(self, records: Sequence[Record]) -> None:
        """Show records, in the order of the journal."""
        ...

    def close(self, outcome: "Outcome") -> None:
        """Show how the session ended, and keep what is held."""
        ...


class Trackers:
    """The hook that starts the trackers of `track.to`, and tells of their troubles."""

    first_rank_only = True

    def __init__(self) -> None:
        self._followers: list[Follower] | None = None
        self._words: deque[str] = deque()

    def on_rewound(self, run: "Run", step: int) -> None:
        """Have every tracker take back what is later than `step`."""
        if self._followers is None:
            self._followers = list(self._started(run, step))
        else:
            for follower in self._followers:
                follower.rewind(step)

    def on_run_start(self, run: "Run") -> None:
        """Start the trackers of a run that has nothing behind it."""
        if self._followers is None:
            self.on_rewound(run, 0)

    def on_step_end(self, run: "Run", step: int, metrics: Mapping[str, Any]) -> None:
        """Tell what the trackers' threads have to tell."""
        del step, metrics
        self._tell(run)

    def on_run_end(self, run: "Run", outcome: "Outcome") -> None:
        """Give the trackers some time to write what they have not written yet."""
        followers = self._followers or []
        left = run.stop.grace_left_seconds
        wait = seconds(run.config.track.wait)
        if left is not None:
            wait = min(wait, max(left, 0.0) / 2)
        deadline = time.monotonic() + wait
        for follower in followers:
            follower.end(outcome)
        for follower in followers:
            follower.join(max(deadline - time.monotonic(), 0.0))
        for follower in followers:
            if follower.is_alive():
                leave_behind()
                self._words.append(f"{follower.name}: not done after {wait:.1f} s, and left behind")
            if not follower.is_done:
                self._words.append(f"{follower.name}: {follower.lack()}")
        self._tell(run)

    def _started(self, run: "Run", step: int) -> "Iterator[Follower]":
        for name in run.config.track.to:
            tell = partial(self._note, name)
            try:
                # Here, not in the follower's thread: a data worker that is forked in the middle of
                # an import would wait for its lock for ever.
                module = importlib.import_module(f"keepstep.report.{name}")
                tracker: Tracker = module.build(run, tell)
            # Whatever a library raises, training goes on.
            except Exception as error:
                tell(f"cannot be started, and is left out: {_said(error)}")
                continue
            journal = run.folder / JOURNAL_NAME
            follower = Follower(name, tracker, journal=journal, step=step, tell=tell)
            follower.start()
            yield follower

    def _note(self, name: str, text: str) -> None:
        self._words.append(f"{name}: {text}")

    def _tell(self, run: "Run") -> None:
        while self._words:
            run.notice(_WORD, self._words.popleft())


class Follower(threading.Thread):
    """Reads the journal and writes to one tracker; works half of the time at the most."""

    def __init__(
        self, name: str, tracker: Tracker, *, journal: Path, step: int, tell: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.is_done = False
        """Whether everything was written, and the tracker closed."""
        self.written = step
        """The last step that the tracker holds, with all before it."""
        self._tracker = tracker
        self._journal = journal
        self._tell = tell
        self._wake = threading.Event()
        self._rewinds: deque[int] = deque()
        self._outcome: Outcome | None = None
        self._in_trouble = False

    def rewind(self, step: int) -> None:
        """Take back what is later than `step`, soon."""
        self._rewinds.append(step)
        self._wake.set()

    def end(self, outcome: "Outcome") -> None:
        """Write what is there, then end."""
        self._outcome = outcome
        self._wake.set()

    def lack(self) -> str:
        """Say what the tracker does not hold, and how it comes to."""
        return f"holds no step after {self.written:,}; the same command supplies the others"

    def run(self) -> None:
        """Follow the journal to the end, also over errors: the last try is made after the end."""
        while not self.is_done:
            is_last = self._outcome is not None
            try:
                self._follow()
                self.is_done = True
            # Whatever a library raises, training goes on.
            except Exception as error:
                if not self._in_trouble:
                    self._tell(f"{_said(error)}; tried again every {_RETRY_SECONDS:g} s")
                self._in_trouble = True
                if is_last:
                    return
                self._pause(_RETRY_SECONDS)

    def _follow(self) -> None:
        """Write every line from the end of what the tracker holds; return after the last one."""
        lines: Lines | None = None
        while True:
            if lines is None or self._rewinds:
                lines = self._taken_back()
            # Before the look: all that comes before the end is in the journal by then.
            outcome = self._outcome
            began = time.monotonic()
            records = lines.next()
            if records:
                self._tracker.write(records)
                self.written = max(self.written, *(record.step for record in records))
            if not lines.at_end:
                # The interpreter is left to the steps for as long as it was taken.
                self._pause(time.monotonic() - began)
                continue
            if outcome is not None:
                self._tracker.close(outcome)
            if self._in_trouble:
                self._in_trouble = False
                self._tell("goes on, and lacks nothing")
            if outcome is not None:
                return
            self._pause(_LOOK_SECONDS)

    def _taken_back(self) -> "Lines":
        """Have the tracker take back what the run does; return the lines that it lacks."""
        while self._rewinds:
            self.written = min(self.written, self._rewinds.popleft())
        first = self._tracker.rewind(self.written)
        self.written = max(first - 1, 0)
        return Lines(self._journal, first)

    def _pause(self, seconds: float) -> None:
        """Wait so long, or until there is a reason not to."""
        if self._outcome is None and not self._rewinds:
            self._wake.wait(seconds)
        self._wake.clear()


class Lines:
    """The lines of a journal from one step on, as records."""

    def __init__(self, journal: Path, first: int) -> None:
        self.at_end = False
        """Whether the last look found nothing."""
        self._journal = journal
        self._first = first
        self._start = near(journal, first)
        self._before: dict[str, Any] | None = None

    def next(self) -> list[Record]:
        """Return the records of the next lines, some of them."""
        events, start = events_from(self._journal, self._start)
        self.at_end = start == self._start
        self._start = start
        return [record for event in events for record in self._records(event)]

    def _records(self, event: dict[str, Any]) -> Iterator[Record]:
        numbers: dict[str, float] = {}
        match event["kind"]:
            case "step":
                numbers = {f"train/{name}": float(event[name]) for name in _NUMBERS}
                numbers |= self._speed(event)
                self._before = event
            case "evaluation":
                found = event["metrics"].items()
                numbers = {f"evaluation/{name}": float(value) for name, value in found}
            case "saved":
                numbers = {"checkpoint/sequence": float(event["sequence"])}
            case "session":
                # The time between two sessions is not that of a step.
                self._before = None
        if numbers and event["step"] >= self._first:
            yield Record(step=event["step"], time=event["time"], numbers=numbers)

    def _speed(self, event: dict[str, Any]) -> dict[str, float]:
        """Return the tokens a second of a step, where the line before tells when it began."""
        if self._before is None or event["time"] <= self._before["time"]:
            return {}
        spent = event["time"] - self._before["time"]
        return {"train/tokens_per_second": (event["tokens"] - self._before["tokens"]) / spent}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
