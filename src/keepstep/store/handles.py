"""Files that stay open while their bytes come: one that only grows, and a new one.

Guarantees: each byte goes through `Disk`; what `NewFile` was left without an error is durable, and
small pieces are gathered.
"""

import os
from pathlib import Path
from typing import Self

from keepstep.store.disk import GATHER_BYTES, Disk


class AppendFile:
    """A file that only grows."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._descriptor = disk.open_for_append(path)

    def write(self, data: bytes) -> None:
        """Append `data`; it is in the kernel's hands, not yet durable, when this returns."""
        self._disk.write(self._descriptor, data, self._path)

    def sync(self) -> None:
        """Make all that was appended durable, and the file's name too."""
        self._disk.sync(self._descriptor, self._path)
        self._disk.sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._descriptor, self._path)

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file."""
        self.close()


class NewFile:
    """A new file; leave its `with` block and its bytes are durable (its name with the folder)."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.error: BaseException | None = None
        """What the first failed write said; a writer in C++ may raise other words in its place."""
        self._disk = disk
        self._path = path
        self._waiting = bytearray()
        self._descriptor = disk.create(path)

    def write(self, data: bytes | memoryview) -> int:
        """Take `data`; small pieces wait until there are enough of them."""
        try:
            if len(data) < GATHER_BYTES:
                self._waiting += data
            if len(data) >= GATHER_BYTES or len(self._waiting) >= GATHER_BYTES:
                self._write_waiting()
            if len(data) >= GATHER_BYTES:
                self._disk.write(self._descriptor, data, self._path)
        except BaseException as error:
            self.error = self.error or error
            raise
        return len(data)

    def flush(self) -> None:
        """Do nothing: what waits is written when the file is closed."""

    def _write_waiting(self) -> None:
        if self._waiting:
            self._disk.write(self._descriptor, bytes(self._waiting), self._path)
            self._waiting.clear()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Make the bytes durable and close; after an error only close."""
        try:
            if error is None:
                self._write_waiting()
                self._disk.sync(self._descriptor, self._path)
        except BaseException:
            os.close(self._descriptor)
            raise
        if error is None:
            self._disk.close(self._descriptor, self._path)
        else:
            # The error is what happened; a second one of the close would hide it.
            os.close(self._descriptor)
