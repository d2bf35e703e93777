"""A save that a thread of its own makes durable, and what it has to say for itself.

Guarantees: what the thread raised is raised by `result`, whatever it was; what it told is kept in
order until somebody asks, so that events and hooks are called by the thread that saves. At the end
of the process the thread is waited for, as every thread is that is no daemon.
"""

import threading
from collections.abc import Callable
from typing import Any

from keepstep.store.facts import Saved


class Pending:
    """One save in flight. `copied` is set when the state may be changed again."""

    def __init__(self, work: Callable[["Pending"], Saved]) -> None:
        self.copied = threading.Event()
        self.halt = threading.Event()
        """Set to have the writer give up as soon as it can."""
        self._work = work
        self._told: list[tuple[str, dict[str, Any]]] = []
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="keepstep-save")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the writer is still at work."""
        return self._thread.is_alive()

    def tell(self, event: str, **facts: Any) -> None:
        """Keep an event until it is asked for."""
        self._told.append((event, facts))

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what was told since the last call, in order."""
        told = self._told[:]
        del self._told[: len(told)]
        return told

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the writer; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Saved:
        """Wait for the writer and return what it saved, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None, "a writer that ended without an error has saved"
        return self._saved

    def _run(self) -> None:
        try:
            self._saved = self._work(self)
        # It belongs to the thread that saves, which raises it.
        except BaseException as error:
            self._error = error
        finally:
            # Whoever waits at the fence must not wait for a writer that is gone.
            self.copied.set()
