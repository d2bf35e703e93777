"""The thread that ends the process when a stop cannot.

Guarantees: a second signal ends the process at once, and so does the end of the grace time, even
while the main thread is blocked in a collective, a system call or a compiler. The process leaves
by `os._exit`: nothing is cleaned up, and nothing needs to be, because a checkpoint is complete or
invisible at every instant.
"""

import math
import select
import signal
import socket
import threading
import time

from keepstep.distributed.leave import leave

_END = b"\0"


class Watchdog(threading.Thread):
    """Reads signals from the wake-up socket and enforces the deadline.

    ``repeat_seconds``: a signal so soon after the first is taken for the launcher's copy of it.
    """

    def __init__(
        self,
        wakeup: socket.socket,
        *,
        stop_signals: frozenset[int],
        grace_seconds: float,
        repeat_seconds: float,
    ) -> None:
        super().__init__(name="keepstep-watchdog", daemon=True)
        self._wakeup = wakeup
        self._stop_signals = stop_signals
        self._grace_seconds = grace_seconds
        self._repeat_seconds = repeat_seconds
        self._first: tuple[int, float] | None = None

    def set_grace(self, seconds: float) -> None:
        """Change the grace time; `run` looks at it anew at least once a second."""
        self._grace_seconds = seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; without end as long as none runs."""
        first = self._first
        if first is None:
            return math.inf
        return max(first[1] + self._grace_seconds - time.monotonic(), 0.0)

    def end(self, writer: socket.socket) -> None:
        """End the thread; no deadline is enforced afterwards."""
        writer.setblocking(True)
        writer.send(_END)
        self.join()

    def run(self) -> None:
        """Wait for signals, the deadline or the end, whichever comes first."""
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

    def _seconds_to_look_again(self) -> float | None:
        return min(self.seconds_left, 1.0) if self._first is not None else None

    def _heard(self, number: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
        elif now - self._first[1] >= self._repeat_seconds:
            _leave(number, "second signal")


def _leave(number: int, why: str) -> None:
    name = signal.Signals(number).name
    leave(128 + number, f"stop     {name}: {why}; leaving at once. Checkpoints are whole.")
