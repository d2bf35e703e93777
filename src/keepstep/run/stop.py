"""How a run hears that it should stop.

Guarantees:
1. A handler sets a flag and nothing else; the run reads the flag at its own safe places.
2. Earlier handlers are called too, and put back when the run is over.
3. From the first signal on, a deadline runs (``watchdog.py``), so a stop always comes to an end.

Without the wake-up descriptor a signal that arrives while the main thread sits in a long call
would be seen by nobody until the call returns.
"""

import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from keepstep.run.watchdog import Watchdog

GRACE_SECONDS_UNTIL_CONFIGURED = 180.0
_LAUNCHER_REPEATS_WITHIN_SECONDS = 1.0


class StopRequests:
    """The flag that says "stop at the next safe place", and who raised it.

    Use it as a context manager in the main thread: signals are heard from `__enter__` on.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._earlier: dict[signal.Signals, Any] = {}
        self._earlier_wakeup_fd = -1
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._watchdog: Watchdog | None = None
        self._grace_seconds = GRACE_SECONDS_UNTIL_CONFIGURED

    @property
    def requested(self) -> bool:
        """Whether anyone asked for a stop."""
        return bool(self.reason)

    @property
    def grace_seconds(self) -> float:
        """Seconds from the first signal to the end of the process, whatever it is doing then."""
        return self._grace_seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the end of the grace; without end as long as no signal came."""
        return self._watchdog.seconds_left if self._watchdog is not None else math.inf

    def set_grace(self, seconds: float) -> None:
        """Make the deadline `seconds` after the first signal, also when one came already."""
        self._grace_seconds = seconds
        if self._watchdog is not None:
            self._watchdog.set_grace(seconds)

    def request(self, reason: str) -> None:
        """Ask for a stop without a signal; the first reason stands."""
        self.reason = self.reason or reason

    def __enter__(self) -> Self:
        """Install the handlers and start the watchdog."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can only be heard from the main thread")
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._watchdog = Watchdog(
            reader,
            stop_signals=frozenset(int(number) for number in _stop_signals()),
            grace_seconds=self._grace_seconds,
            repeat_seconds=_launcher_repeat_seconds(),
        )
        self._watchdog.start()
        self._earlier_wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in _stop_signals():
            earlier = signal.getsignal(number)
            self._earlier[number] = earlier
            signal.signal(number, self._handler(number, earlier))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put every earlier handler back and end the watchdog."""
        for number, earlier in self._earlier.items():
            # A handler that was not installed from Python reads as None and cannot be put back.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        signal.set_wakeup_fd(self._earlier_wakeup_fd)
        if self._watchdog is not None and self._wakeup is not None:
            self._watchdog.end(self._wakeup[1])
            for end in self._wakeup:
                end.close()

    def _handler(self, number: signal.Signals, earlier: Any) -> Callable[[int, Any], None]:
        chained = callable(earlier) and earlier is not signal.default_int_handler

        def on_signal(received: int, frame: FrameType | None) -> None:
            self.reason = self.reason or number.name
            if chained:
                earlier(received, frame)

        return on_signal


def _stop_signals() -> list[signal.Signals]:
    """Return the signals that mean "stop"; one that was ignored from outside stays ignored."""
    wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
    return [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]


def _launcher_repeat_seconds() -> float:
    # On Ctrl-C torchrun forwards to its workers the signal that the terminal has already sent
    # them; without this the copy would count as the second signal and cut the save off.
    return _LAUNCHER_REPEATS_WITHIN_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
