"""Whether the other ranks are alive, and what ended them if they are not.

Guarantees:
1. A rank that is killed or frozen is named (rank, host, what it was doing) within
   `deadline_seconds`, and so is the error of a rank that failed.
2. No process outlives that by more than a moment, even if its main thread is blocked in a
   collective that nobody will ever answer: the watching thread then leaves by `os._exit`.
3. That holds too where the process that holds the rendezvous store is frozen, or its host gone:
   a request to it has no deadline, so one thread asks and another one watches the clock.
4. No rank leaves before every other one that lives has heard how the run ends: with the rank that
   holds the rendezvous store, its words would go too.
5. Time in which this process was frozen itself is nobody's silence: a job that is suspended as a
   whole, and goes on, loses nobody.

Each rank tells the rendezvous store every second that it is alive and what it is doing, and
watches the next rank in a ring, so the store has a few requests a second from each. What someone
finds is written under one key, which all look at: every rank ends for the same reason.

Without this a killed peer is a hang until a backend's timeout, and then an address without a name.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from keepstep.distributed.leave import leave
from keepstep.errors import KeepstepError, Unhealthy

_BEAT_SECONDS = 1.0
_LEAVE_SECONDS = 4.0
_AWAKE_SECONDS = 1.5 * _BEAT_SECONDS
"""More than this between two looks at the clock was not spent awake."""
_FIND_SECONDS = 5 * _BEAT_SECONDS
"""How long after the deadline all know who is lost: a beat each until the last sign of it is seen,
until its silence is, and until others hear of that; and two more on a busy machine."""
_VERDICT = "verdict"
_DONE = "done"


def _parted(rank: int) -> str:
    """Return the key that says that a rank needs the others no more."""
    return f"parted/{rank}"


class NoHealth:
    """The health of a single process: there is nobody to watch."""

    phase = ""

    def explain(self, error: BaseException) -> BaseException:
        """Return the error itself."""
        return error

    def report(self, error: BaseException, code: int) -> None:
        """Tell nobody."""

    def leave_with(self, on_lost: Callable[[KeepstepError], None]) -> None:
        """Nobody can be lost."""


class Health(threading.Thread):
    """Tells the others that this rank lives, and watches the next one.

    ``store``: a connection to the rendezvous store of its own. ``store_host``: who holds it.
    """

    def __init__(
        self, *, rank: int, size: int, deadline_seconds: float, store: Any, store_host: str
    ) -> None:
        super().__init__(name="keepstep-health", daemon=True)
        self.phase = "start-up"
        self._rank = rank
        self._size = size
        self._deadline_seconds = deadline_seconds
        self._store = store
        self._store_host = store_host
        self._host = socket.gethostname()
        self._asker = threading.Thread(target=self._ask, name="keepstep-beat", daemon=True)
        self._looked = 0.0
        self._awake = 0.0
        self._answered = 0.0
        self._over = threading.Event()
        self._verdict: dict[str, Any] | None = None
        self._found = threading.Event()
        self._last_seen: dict[int, tuple[str, float]] = {}
        self._on_lost: Callable[[KeepstepError], None] | None = None

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._looked = time.monotonic()
        self._asker.start()
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching, and part from the others once they need this process no more.

        What leaves by an error nobody has told of is told: they may be waiting for this rank.
        """
        if error is not None:
            self.report(error, error.exit_code if isinstance(error, KeepstepError) else 1)
        self._over.set()
        self.join()
        while self._asker.is_alive() and self._silence_of_store() <= self._deadline_seconds:
            self._asker.join(_BEAT_SECONDS)
            self._look_at_clock()

    def leave_with(self, on_lost: Callable[[KeepstepError], None]) -> None:
        """Call `on_lost(error)` before the process is left because the main thread is blocked."""
        self._on_lost = on_lost

    def explain(self, error: BaseException) -> BaseException:
        """Return the error that ends the run, given what this rank sees: the cause, if it is known.

        Waits past the deadline for someone to find out who is lost, if a collective failed.
        """
        if not is_collective_failure(error):
            return error
        self._found.wait(self._deadline_seconds + _FIND_SECONDS)
        if self._verdict is not None:
            return as_error(self._verdict)
        return Unhealthy(f"a collective failed on rank {self._rank} ({self._host}): {error}")

    def report(self, error: BaseException, code: int) -> None:
        """Tell the others that this rank fails, and why; the first to report is the cause."""
        if self._found.is_set():
            return
        self._decide(
            {
                "rank": self._rank,
                "host": self._host,
                "code": code,
                "text": f"{type(error).__name__}: {error}",
            }
        )

    def run(self) -> None:
        """Look at the clock until this rank is done or someone is lost."""
        while not self._over.wait(_BEAT_SECONDS):
            self._look_at_clock()
            silent = self._silence_of_store()
            if not self._found.is_set() and silent > self._deadline_seconds:
                self._lose_store(f"has not answered for {silent:.0f} s")
            if self._found.is_set():
                self._leave_if_blocked()
                return

    def _ask(self) -> None:
        """Beat, watch and listen until this rank is done or someone is lost; then part."""
        try:
            while not self._found.is_set() and not self._over.is_set():
                self._beat(self.phase)
                self._watch()
                self._listen()
                self._answered = self._awake
                self._over.wait(_BEAT_SECONDS)
        except RuntimeError as error:
            self._lose_store(f"is gone ({error})")
            return
        try:
            self._part()
        except RuntimeError:
            # Who held the store has left: nobody is waiting for this rank any more.
            return

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        self._awake += min(now - self._looked, _AWAKE_SECONDS)
        self._looked = now

    def _silence_of_store(self) -> float:
        """Return how long it has not answered, on a clock that stands while this process does."""
        return self._awake - self._answered

    def _lose_store(self, what: str) -> None:
        # It lives in the first rank, or in its launcher.
        words = f"the rendezvous store on {self._store_host} {what}"
        self._verdict = self._lost(0, words, host=self._store_host)
        self._found.set()

    def _part(self) -> None:
        """Say that this rank needs nobody any more; return when no other that lives needs it."""
        from torch.distributed import DistStoreError

        self._beat(_DONE)
        self._store.set(_parted(self._rank), "")
        lost = self._verdict["rank"] if self._verdict and is_loss(self._verdict) else None
        waiting = [other for other in range(self._size) if other not in (self._rank, lost)]
        while waiting:
            try:
                keys = [_parted(other) for other in waiting]
                self._store.wait(keys, timedelta(seconds=_BEAT_SECONDS))
                return
            except DistStoreError:
                # Not all have parted yet. One that is silent never will.
                self._answered = self._awake
                waiting = [
                    other for other in waiting if self._hear(other)[1] <= self._deadline_seconds
                ]

    def _beat(self, phase: str) -> None:
        beat = {"time": time.time(), "phase": phase, "host": self._host}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _watch(self) -> None:
        other = (self._rank + 1) % self._size
        facts, silent = self._hear(other)
        if facts.get("phase") != _DONE and silent > self._deadline_seconds:
            where = (
                f"{silent:.0f} s without a sign of life, last in {facts.get('phase', 'start-up')}"
            )
            self._decide(self._lost(other, where, host=facts.get("host", "?")))

    def _hear(self, other: int) -> tuple[dict[str, Any], float]:
        """Return the last beat of another rank, and how many seconds it has stayed the last."""
        key = f"beat/{other}"
        beat = self._store.get(key).decode() if self._store.check([key]) else "{}"
        now = self._awake
        if other not in self._last_seen or self._last_seen[other][0] != beat:
            self._last_seen[other] = (beat, now)
        return json.loads(beat), now - self._last_seen[other][1]

    def _lost(self, rank: int, what: str, *, host: str = "?") -> dict[str, Any]:
        return {"rank": rank, "host": host, "code": Unhealthy.exit_code, "text": what}

    def _decide(self, verdict: dict[str, Any]) -> None:
        """Write the verdict unless another rank was first; hear what stands."""
        try:
            stands = self._store.compare_set(_VERDICT, "", json.dumps(verdict))
            self._verdict = json.loads(stands)
        except RuntimeError:
            self._verdict = verdict
        self._found.set()

    def _listen(self) -> None:
        if self._store.check([_VERDICT]):
            self._verdict = json.loads(self._store.get(_VERDICT))
            self._found.set()

    def _leave_if_blocked(self) -> None:
        """Give the main thread a moment to end the run by itself; then end the process."""
        if self._over.wait(_LEAVE_SECONDS):
            return
        assert self._verdict is not None, "someone is lost"
        error = as_error(self._verdict)
        if self._on_lost is not None:
            self._on_lost(error)
        leave(error.exit_code, f"error: {error}\nLeaving at once; checkpoints are whole.")


def is_collective_failure(error: BaseException) -> bool:
    """Tell whether an error says that a collective failed, and not that this rank did."""
    from torch.distributed import DistError

    # Gloo has no class of its own: it raises RuntimeError with the place in its source.
    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def is_loss(verdict: dict[str, Any]) -> bool:
    """Tell whether a verdict says that a rank is gone, and not that it failed and said so."""
    return bool(verdict["code"] == Unhealthy.exit_code)


def as_error(verdict: dict[str, Any]) -> KeepstepError:
    """Return the error that a verdict stands for."""
    where = f"rank {verdict['rank']} on {verdict['host']}"
    if is_loss(verdict):
        return Unhealthy(
            f"{where} is lost: {verdict['text']}",
            hint="Run the same command to continue.",
        )
    error = KeepstepError(f"{where} failed: {verdict['text']}")
    error.exit_code = verdict["code"]
    return error
