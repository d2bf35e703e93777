"""What a session knows of time: when it must end, what saves and steps take, when a save is due.

Guarantees:
1. A run that has an end (`run.time_limit`, that of the Slurm job, the earlier of them) asks for its
   stop while there is time for what may come before the ranks agree on it, and for the save.
2. No rank acts on its own clock: what is asked for here is agreed on by all of them.
3. Only what was measured keeps a save from being begun, never what is assumed.

What it cannot see: a step, or a save, that takes far longer than those before it. A checkpoint is
complete or invisible then too.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from keepstep.config.quantities import seconds
from keepstep.config.schema import Config
from keepstep.errors import UsageError
from keepstep.run.stop import StopRequests

_SLURM_END = "SLURM_JOB_END_TIME"
_SAFETY_SHARE = 0.25
"""What is added to the longest that was measured: the next one may take longer."""
_CLOSE_SECONDS = 2.0
"""From the committed checkpoint to the end of the process: journal, outcome, process group."""
_ASSUMED_BYTES_PER_SECOND = 100e6
"""What a rank is taken to write where no save was measured yet: a slow disk, a busy network."""
_UNMEASURED_SHARE_MAX = 0.5
"""Until this session has measured a save, one is given no more of the time that is left: an
assumption, or one slow save of an earlier session, could leave no time for steps for ever."""
_STEPS_KEPT, SAVES_KEPT = 64, 8


class Clock:
    """Measures, and asks `stop` for a stop before the time is over."""

    def __init__(
        self, config: Config, stop: StopRequests, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._stop = stop
        self._grace = config.run.grace
        interval = config.checkpoint.interval_time
        self._interval_seconds = seconds(interval) if interval else math.inf
        self._ends: list[tuple[float, str]] = []
        if config.run.time_limit:
            ends_at = now() - seconds_of_this_process() + seconds(config.run.time_limit)
            self._ends.append((ends_at, f"run.time_limit ({config.run.time_limit})"))
        self.unheeded = ""
        if config.run.slurm_end_time and os.environ.get(_SLURM_END):
            self._add_slurm_end(os.environ[_SLURM_END])
        # How long it took from one agreement to the next, without saves; and what saves took.
        self._pieces: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._saves: deque[float] = deque(maxlen=SAVES_KEPT)
        self._assumed_seconds = 0.0
        self._save_max = math.inf
        self._looked: float | None = None
        self._in_first_step = False
        self._save_began = now()

    def _add_slurm_end(self, text: str) -> None:
        if not text.isdecimal():
            raise UsageError(
                f"the environment variable {_SLURM_END} is {text!r}, not seconds since 1970",
                hint="Unset it, or use --run.slurm_end_time=false.",
            )
        left = int(text) - time.time()
        if left > 0:
            self._ends.append((self._now() + left, "the end of the Slurm job"))
        else:
            # Of a job that is over, in a shell that outlived it; or a clock is wrong.
            self.unheeded = f"{_SLURM_END} was {-left:,.0f} s ago by this machine's clock: unheeded"

    def begin(self, save_seconds: Sequence[float]) -> None:
        """Take over what the last saves of earlier sessions took, the last one first."""
        self._saves.extend(reversed(save_seconds))

    def rehearsed(self, rehearsal_seconds: float, *, bytes_of_a_rank: float) -> None:
        """Begin to count. Where no save was measured, one is assumed to take as long as this."""
        self._looked = self._save_began = self._now()
        self._pieces.clear()
        self._in_first_step = True
        assumed = rehearsal_seconds + bytes_of_a_rank / _ASSUMED_BYTES_PER_SECOND
        left = min(self._ends)[0] - self._now() if self._ends else math.inf
        self._save_max = max(0.0, left * _UNMEASURED_SHARE_MAX)
        self._assumed_seconds = assumed

    def look(self, *, saving: bool) -> None:
        """Ask for a stop where going on could leave no time to save; call it before an agreement.

        ``saving``: whether a save is in flight, which the last one would wait for.
        """
        now = self._now()
        if self._looked is not None:
            if len(self._pieces) == 1 and self._in_first_step:
                # A session's first step compiles and allocates: the others say nothing of it.
                self._pieces.clear()
                self._in_first_step = False
            self._pieces.append(now - self._looked)
        self._looked = now
        if self.is_late(saving=saving):
            ends_at, what = min(self._ends)
            self._stop.request(f"{what} comes in {max(0.0, ends_at - now):.1f} s")

    def is_late(self, *, saving: bool) -> bool:
        """Tell whether this session is to stop, for there may be no time for another step."""
        left = min(self._ends)[0] - self._now() if self._ends else math.inf
        return left <= self.reserve_seconds(saving=saving)

    def reserve_seconds(self, *, saving: bool) -> float:
        """Return how long before the end a stop is asked for."""
        save = min(max(self._saves, default=self._assumed_seconds), self._save_max)
        longest = max(self._pieces, default=0.0) + save * (1 + saving)
        return (1 + _SAFETY_SHARE) * longest + _CLOSE_SECONDS

    @property
    def save_is_due(self) -> bool:
        """Whether `checkpoint.interval_time` went by since the last save, or the first step."""
        return self._now() - self._save_began >= self._interval_seconds

    def save_begins(self) -> None:
        """Note that a save begins: the state of this instant is what it keeps."""
        self._save_began = self._now()

    def save_ended(self, save_seconds: float) -> None:
        """Note that a save is over, and what it took."""
        self._saves.append(save_seconds)
        self._save_max = math.inf
        # To wait for a save is no part of a step.
        self._looked = self._now()

    @property
    def save_fits(self) -> bool:
        """Whether a save may end before the grace does: the fastest that was measured would."""
        left = self._stop.grace_left_seconds
        return left is None or not self._saves or min(self._saves) <= left

    @property
    def no_time(self) -> str:
        """Say why no save was begun."""
        took = f" (the fastest took {min(self._saves):.1f} s)" if self._saves else ""
        return f"no save was begun: it could not end within the grace of {self._grace}{took}"

    @property
    def notices(self) -> list[tuple[str, str]]:
        """Return what a session has to tell of time when it begins, each with its subject."""
        told = [("time", self.unheeded), ("time", self.end_text), ("grace", self.grace_warning)]
        return [(word, text) for word, text in told if text]

    @property
    def end_text(self) -> str:
        """Say when the run will stop, and what that follows from; empty where it has no end."""
        if not self._ends:
            return ""
        ends_at, what = min(self._ends)
        reserve = self.reserve_seconds(saving=False)
        left = ends_at - self._now()
        text = f"{what} comes in {left:,.0f} s: a session stops {reserve:.1f} s before"
        if self._saves:
            text += f"; a save takes {max(self._saves):.1f} s"
        elif self._assumed_seconds:
            text += (
                f"; a save is assumed to take {self._assumed_seconds:.1f} s until one is measured"
            )
        return text

    @property
    def grace_warning(self) -> str:
        """Say that the grace is shorter than a save was; empty where it is not."""
        longest = max(self._saves, default=0.0)
        if longest <= self._stop.grace_seconds:
            return ""
        return (
            f"a save took {longest:.1f} s, and run.grace is {self._grace}: after a signal there may"
            " be no time for one. Raise run.grace, and the time that the scheduler gives"
        )


def seconds_of_this_process() -> float:
    """Return for how long this process has run: its imports count too."""
    # The name of the program, in brackets, may hold anything.
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
