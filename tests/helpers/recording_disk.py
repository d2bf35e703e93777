"""A real disk that writes down what it does, one that fails at an operation, one that dies."""

import errno
import os
import signal
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


class DyingDisk(Disk):
    """Sends its process a signal before the n-th operation: kills it, or freezes it."""

    def __init__(self, at: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.at, self.number, self.count = at, number, 0

    def operation(self, name: str, path: Path) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), self.number)


class PoorDisk(Disk):
    """Refuses what many FUSE mounts do not have: the rename of a folder, and symbolic links."""

    def rename(self, old: Path, new: Path) -> None:
        if old.is_dir() and not old.is_symlink():
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(new))
        super().rename(old, new)

    def symlink(self, target: str, path: Path) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))


class PoorRecordingDisk(PoorDisk, RecordingDisk):
    """Writes down what a poor disk does."""


class PoorFailingDisk(PoorDisk, FailingDisk):
    """A poor disk that fails at the n-th operation."""


class PoorDyingDisk(PoorDisk, DyingDisk):
    """A poor disk that kills its process before the n-th operation."""
