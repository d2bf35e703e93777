"""The thread that ends the process when a stop cannot.

Guarantees: a second signal ends the process at once, and so does the end of the grace time or of
the launcher that started it, even while the main thread is blocked in a collective, a system call
or a compiler. The process leaves by `os._exit`: nothing is cleaned up, and nothing needs to be,
because a checkpoint is complete or invisible at every instant.
"""

import math
import os
import select
import signal
import socket
import threading
import time

from keepstep.distributed.leave import leave
from keepstep.errors import Unhealthy

_END = b"\0"


class Watchdog(threading.Thread):
    """Reads signals from the wake-up socket and enforces the deadline.

    ``repeat_seconds``: a signal so soon after the first is taken for the launcher's copy of it.
    ``launcher``: the process without which this one has no business; None where there is none.
    """

    def __init__(
        self,
        wakeup: socket.socket,
        *,
        stop_signals: frozenset[int],
        grace_seconds: float,
        repeat_seconds: float,
        launcher: int | None,
    ) -> None:
        super().__init__(name="keepstep-watchdog", daemon=True)
        self._wakeup = wakeup
        self._stop_signals = stop_signals
        self._grace_seconds = grace_seconds
        self._repeat_seconds = repeat_seconds
        self._launcher = launcher
        self._first: tuple[int, float] | None = None

    def set_grace(self, seconds: float) -> None:
        """Change the grace time; `run` looks at it anew at least once a second."""
        self._grace_seconds = seconds

    @property
    def seconds_left(self) -> float | None:
        """Seconds of the grace that are left; None before the first signal."""
        first = self._first
        return None if first is None else first[1] + self._grace_seconds - time.monotonic()

    def end(self, writer: socket.socket) -> None:
        """End the thread; no deadline is enforced afterwards."""
        writer.setblocking(True)
        writer.send(_END)
        self.join()

    def run(self) -> None:
        """Wait for signals, the deadline, the launcher's end or our own, whichever comes first."""
        # Not select, which knows no descriptor above 1,023.
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        while True:
            seconds = self._seconds_to_look_again()
            ready = poll.poll(None if seconds is None else math.ceil(seconds * 1000))
            for number in self._wakeup.recv(4096) if ready else b"":
                if number == _END[0]:
                    return
                if number in self._stop_signals:
                    self._heard(number)
            if self._first is not None:
                number, since = self._first
                if time.monotonic() >= since + self._grace_seconds:
                    _leave(number, f"the grace of {self._grace_seconds:g} s is over")
            # A child whose parent has died is given to another one.
            if self._launcher not in (None, os.getppid()):
                leave(
                    Unhealthy.exit_code,
                    f"error: the launcher (process {self._launcher}) is gone; leaving at once."
                    " Checkpoints are whole.",
                )

    def _seconds_to_look_again(self) -> float | None:
        if self._first is None:
            return None if self._launcher is None else 1.0
        left = self._first[1] + self._grace_seconds - time.monotonic()
        return min(max(left, 0.0), 1.0)

    def _heard(self, number: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
        elif now - self._first[1] >= self._repeat_seconds:
            _leave(number, "second signal")


def _leave(number: int, why: str) -> None:
    name = signal.Signals(number).name
    leave(128 + number, f"stop     {name}: {why}; leaving at once. Checkpoints are whole.")
