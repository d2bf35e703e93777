"""Real objects of fsspec, recorded, failed, or the death of the process at a request."""

import errno
import os
import re
import signal
from collections.abc import Callable
from typing import Any

from keepstep.store.remote import ObjectStore


class RecordingObjects(ObjectStore):
    """Does everything for real; `log` holds (request, key) in order, digests as ID."""

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(url, **more)
        self.log: list[tuple[str, str]] = []

    def operation(self, name: str, key: str) -> None:
        self.log.append((name, re.sub("-[0-9a-f]{16}", "-ID", key)))


class FailingObjects(ObjectStore):
    """Fails at the n-th request (from 1), once; `count` goes on."""

    def __init__(self, url: str, at: int, number: int = errno.EIO) -> None:
        super().__init__(url)
        self.at, self.count, self.number = at, 0, number

    def operation(self, name: str, key: str) -> None:
        self.count += 1
        if self.count == self.at:
            raise OSError(self.number, os.strerror(self.number), key)


class OvertakenObjects(FailingObjects):
    """Does something else, once, before the n-th request."""

    def __init__(self, url: str, at: int, first: Callable[[], None]) -> None:
        super().__init__(url, at)
        self.first = first

    def operation(self, name: str, key: str) -> None:
        self.count += 1
        if self.count == self.at:
            self.first()


class DyingObjects(FailingObjects):
    """Kills its process before the n-th request."""

    def operation(self, name: str, key: str) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
