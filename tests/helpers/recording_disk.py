"""A real disk that writes down what it does, and one that fails at a given operation."""

import os
from pathlib import Path

from keepstep.store.disk import Disk


class RecordingDisk(Disk):
    """Does everything for real; `log` holds (operation, name) in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def operation(self, name: str, path: Path) -> None:
        self.log.append((name, path.name))


class FailingDisk(Disk):
    """Fails with an error at the n-th operation (from 1), once; `count` goes on."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.count = at, number, 0

    def operation(self, name: str, path: Path) -> None:
        self.count += 1
        if self.count == self.at:
            raise OSError(self.number, os.strerror(self.number), str(path))
