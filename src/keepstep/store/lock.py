"""One live session a folder.

Guarantees: while a session holds the lock, another one that asks for it is refused and told who
holds it; a session that dies in any way holds it no longer. The lock is a POSIX record lock: a
data worker that outlives its killed parent does not keep it (a flock it would), and it works over
NFS. Two pitfalls of such locks are handled here: within one process they do not conflict, and
closing any descriptor of the file drops them; so a process-wide register of held paths is asked
first, and `confirm` takes the lock again before anything is committed or deleted.
"""

import errno
import fcntl
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keepstep.errors import Locked
from keepstep.store.regular import open_regular

_FLOCK = "hhqqi4x"
"""Linux' `struct flock` on 64 bits: type, whence, start, length, pid, and what fills it up."""

_held: set[Path] = set()


class FolderLock:
    """The lock of a run's folder, a file named `lock` in it."""

    def __init__(self, path: Path) -> None:
        # Absolute from the start: a session may change its folder before it lets go.
        self._path = path.absolute()
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Hold the lock from here on; Locked says who has it instead."""
        path = self._path.resolve()
        if path in _held:
            raise _locked(path, {"pid": os.getpid(), "host": socket.gethostname()})
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _locked(path, holder) from error
            raise
        words = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": " ".join(sys.argv),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(words) + "\n").encode(), 0)
        self._descriptor = descriptor
        _held.add(path)

    def confirm(self) -> None:
        """Take the lock again, which changes nothing while it is held; Locked if it was lost.

        Any code of this process that opens and closes the file, such as a copy of the folder,
        drops a lock of this kind. A file that is not the one under its name any more, because the
        folder was deleted and made anew, keeps nobody out.
        """
        if self._descriptor is None:
            return
        held = os.fstat(self._descriptor)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            raise Locked(
                f"{self._path} was deleted or replaced: {self._path.parent} is not this session's"
                " any more",
                hint="Nothing was saved there. Look at who did it, then run the command again.",
            )
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _locked(self._path, _read_holder(self._descriptor)) from error
            raise

    def release(self) -> None:
        """Let the lock go; the file stays, since removing it would let two sessions hold one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self._path.resolve())

    def __enter__(self) -> Self:
        """Acquire the lock."""
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self.release()


def seen_lock(path: Path) -> tuple[bool, dict[str, Any]]:
    """Return whether a live session holds a lock, and what the last one to take it wrote in it.

    Nothing is taken, and nobody waits. A holder on another host is seen where the file system
    carries locks between hosts, as NFS does.
    """
    if path.resolve() in _held:
        # To open the file and close it again would drop the lock of this very process.
        return True, {"pid": os.getpid(), "host": socket.gethostname()}
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return False, {}
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
        return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK, _read_holder(descriptor)
    finally:
        os.close(descriptor)


def _read_holder(descriptor: int) -> dict[str, Any]:
    try:
        words = json.loads(os.pread(descriptor, 65536, 0))
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}


def _locked(path: Path, holder: dict[str, Any]) -> Locked:
    return Locked(
        f"{path.parent} is held by another session: {_who(holder)}",
        hint="Wait for it to end or stop it; a session that was killed does not hold the lock.",
    )


def _who(holder: dict[str, Any]) -> str:
    since = f" since {holder['since']}" if "since" in holder else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{since}"


def who_holds(path: Path) -> str:
    """Return who holds the lock of that name, in words, or nothing; nobody is kept from it."""
    held, holder = seen_lock(path)
    return _who(holder) if held else ""
