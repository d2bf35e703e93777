"""What a run did, from its journal, also while the journal is written this moment.

Guarantees:
1. Only whole lines are read. A line that is being written is read when its end is there; one that
   a kill left torn is passed over and counted.
2. A step stands in the history once. Where a session takes steps again, the journal is shortened,
   and the history is read anew: what was taken back is in it no longer.
3. Nothing is written, locked or waited for.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from keepstep.run.journal import parsed_line
from keepstep.store.regular import opened

Event = dict[str, Any]

_COUNT_MAX = 1 << 63
_SECONDS_MAX = 1e11
OF_A_STEP = ("loss", "grad_norm", "rate")
"""What the journal holds of each step and can be drawn."""


@dataclass(kw_only=True)
class Session:
    """One session: when it began (seconds since 1970), in which process, how it ended."""

    start: float
    pid: int | None
    environment: Event
    resumed_at: int | None = None
    outcome: Event | None = None
    last: float = 0.0
    """When the last line of it was written."""


@dataclass(kw_only=True)
class Evaluation:
    """Held-out metrics after a step."""

    step: int
    metrics: dict[str, float]


@dataclass(kw_only=True)
class Save:
    """A checkpoint that was committed, by its name."""

    step: int
    name: str


@dataclass
class History:
    """The steps as columns, one entry a step in their order, and everything else as it came."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    times: "array[float]" = field(default_factory=lambda: array("d"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    """Of each step: how long sessions had lived when it ended; between them time stands still."""
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    session: "array[int]" = field(default_factory=lambda: array("q"))
    """Of each step: the index of its session."""
    values: "dict[str, array[float]]" = field(
        default_factory=lambda: {name: array("d") for name in OF_A_STEP}
    )
    skipped: list[int] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Every line that is no step."""
    last_time: float = -math.inf
    unreadable: int = 0
    """Lines that are no event: torn by a kill, or damaged."""

    def add(self, event: Event) -> bool:
        """Take one event; return False for one that lacks what its kind has: it is only counted."""
        try:
            time = float(event["time"])
            if not 0 <= time < _SECONDS_MAX:
                raise ValueError("no time of a run")
            match event["kind"]:
                case "step":
                    self._add_step(event, time)
                case "evaluation":
                    metrics = {str(k): float(v) for k, v in event["metrics"].items()}
                    found = Evaluation(step=_count(event["step"]), metrics=metrics)
                    self.evaluations.append(found)
                case "saved":
                    self.saves.append(Save(step=_count(event["step"]), name=str(event["path"])))
                case "session":
                    environment = dict(event["environment"])
                    begun = Session(start=time, pid=_count(event["pid"]), environment=environment)
                    self.sessions.append(begun)
                case "resumed":
                    self._now(time).resumed_at = _count(event["step"])
                case "outcome":
                    self._now(time).outcome = event
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            self.unreadable += 1
            return False
        if event["kind"] != "step":
            self.events.append(event)
        if self.sessions:
            self.sessions[-1].last = time
        self.last_time = max(self.last_time, time)
        return True

    def _now(self, time: float) -> Session:
        """Return the session that lives; one without a beginning where that line is unreadable."""
        if not self.sessions:
            self.sessions.append(Session(start=time, pid=None, environment={}))
        return self.sessions[-1]

    def _add_step(self, event: Event, time: float) -> None:
        step, tokens = _count(event["step"]), _count(event["tokens"])
        numbers = [float(event[name]) for name in OF_A_STEP]
        now = self._now(time)
        if self.steps and step <= self.steps[-1]:
            self._take_back(step)
        index = len(self.sessions) - 1
        same = bool(self.session) and self.session[-1] == index
        before = self.times[-1] if same else now.start
        lived = self.seconds[-1] if self.seconds else 0.0
        self.steps.append(step)
        self.times.append(time)
        # A clock that was set back makes no time.
        self.seconds.append(lived + max(time - before, 0.0))
        self.tokens.append(tokens)
        self.session.append(index)
        for name, number in zip(OF_A_STEP, numbers, strict=True):
            self.values[name].append(number)
        if event.get("skipped"):
            self.skipped.append(step)

    def _take_back(self, step: int) -> None:
        """Forget what was told of `step` and later ones: it is taken again."""
        keep = bisect_left(self.steps, step)
        for counts in (self.steps, self.tokens, self.session):
            del counts[keep:]
        for numbers in (self.times, self.seconds, *self.values.values()):
            del numbers[keep:]
        self.skipped = [s for s in self.skipped if s < step]
        self.evaluations = [e for e in self.evaluations if e.step < step]
        self.saves = [s for s in self.saves if s.step < step]

    @property
    def step(self) -> int:
        """The last step; 0 where none was taken."""
        return self.steps[-1] if self.steps else 0

    def index_of(self, step: int) -> int | None:
        """Return where a step stands in the columns, or None."""
        index = bisect_left(self.steps, step)
        return index if index < len(self.steps) and self.steps[index] == step else None

    def value(self, name: str, step: int) -> float | None:
        """Return what the journal holds of a step under a name of `OF_A_STEP`, or None."""
        index = self.index_of(step)
        return None if index is None else self.values[name][index]

    def speed(self, *, last: int = 0) -> tuple[float, float] | None:
        """Return steps and tokens a second, evaluations and saves included; None where unknown.

        ``last``: of so many steps at the end, all in the last session; 0 takes all of all sessions.
        A session's first step is left out: what comes before it is no step.
        """
        first = max(1, len(self.steps) - last if last else 1)
        steps, tokens, total = 0, 0, 0.0
        for index in range(first, len(self.steps)):
            same = self.session[index] == self.session[index - 1]
            if same and (not last or self.session[index] == self.session[-1]):
                steps += 1
                tokens += self.tokens[index] - self.tokens[index - 1]
                total += self.seconds[index] - self.seconds[index - 1]
        return (steps / total, tokens / total) if total > 0 else None

    def best(self, metric: str, mode: Literal["min", "max"]) -> tuple[int, float] | None:
        """Return the step and value of the best evaluation; nan and inf never win, ties are old."""
        found = [
            (e.step, e.metrics[metric])
            for e in self.evaluations
            if math.isfinite(e.metrics.get(metric, math.nan))
        ]
        sign = 1 if mode == "min" else -1
        return min(found, key=lambda pair: sign * pair[1], default=None)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _COUNT_MAX:
        raise ValueError(f"{value!r} is no count")
    return value


class JournalReader:
    """Reads a journal into `history`, from where it stopped the last time."""

    def __init__(self, path: Path) -> None:
        self.history = History()
        self._path = path
        self._end = 0
        self._last_line = b""

    def poll(self) -> Iterator[Event]:
        """Yield the events that are new since the last poll; each is in `history` by then.

        Where the journal was shortened or replaced, `history` is another: it is read from the
        start, and what was written since is yielded.
        """
        try:
            file = opened(self._path)
        except FileNotFoundError:
            return  # Before a run's first line.
        with file:
            seen = -math.inf
            if not self._continues(file):
                seen = self.history.last_time
                self.history = History()
                self._end = 0
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # It is being written, or was torn: it counts when its end is there.
                self._end += len(line)
                self._last_line = line
                event = parsed_line(line)
                if event is None:
                    self.history.unreadable += line != b"\n"
                    continue
                if self.history.add(event) and self.history.last_time > seen:
                    yield event

    def _continues(self, file: IO[bytes]) -> bool:
        """Tell whether the last line that was read still stands where it stood."""
        file.seek(self._end - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line


def read_history(path: Path) -> History:
    """Return all that a journal tells; that of a run without a journal is empty."""
    reader = JournalReader(path)
    for _ in reader.poll():
        pass
    return reader.history
