"""The one door to the file system: every write, sync, rename, link and delete goes through it.

Guarantees:
1. A primitive is one file operation, announced by `operation` before it happens; tests record,
   fail or die there. Nothing in production looks at it.
2. A file that `replace_file` or `write_new_file` returned from is durable under its name.
3. An fsync that failed is never tried again on the same descriptor: the kernel forgets the error,
   and the second call would report a success that is not one. The caller starts a new file.

What breaks without it: a rename whose data are not synced leaves an empty file after a power cut;
a synced file whose folder is not synced has no name.
"""

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from keepstep.store.direct import BLOCK_BYTES, set_direct, write_blocks
from keepstep.store.layout import temporary_name
from keepstep.store.methods import Methods
from keepstep.store.regular import open_regular

_LARGE_BYTES = 1 << 20
"""Files below this are written at once, through the page cache: that costs less than a thread."""
GATHER_BYTES = 1 << 20
"""Writes below this are gathered: a system call then costs less than copying what it writes."""
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2


class Disk:
    """The real file system."""

    methods = Methods()
    """What is used of it for commits; a session sets what its probe found."""
    writes_direct: bool = True
    """Whether large files go past the page cache; False from the first refusal on."""
    reserves_space: bool = True
    """Whether the space of large files is reserved; False from the first refusal on."""
    _refused: tuple[str, ...] = ()

    def operation(self, name: str, path: Path) -> None:
        """Announce a file operation that is about to happen; the seam of the tests."""

    # Primitives: one operation each.

    def create(self, path: Path) -> int:
        """Create a file that is not there yet; return its descriptor."""
        self.operation("create", path)
        # O_NOFOLLOW and O_EXCL: a link planted under our name must not lead the bytes elsewhere.
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)

    def open_for_append(self, path: Path) -> int:
        """Open a file to write at its end, creating it where it is missing."""
        self.operation("open_for_append", path)
        # O_NONBLOCK: a pipe planted under our name must not be waited for.
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        """Write all of `data`; the kernel may take it in several parts."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while len(view):
            self.operation("write", path)
            view = view[os.write(descriptor, view) :]

    def truncate(self, descriptor: int, size: int, path: Path) -> None:
        """Give a file its size."""
        self.operation("truncate", path)
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int, path: Path) -> None:
        """Make a file's bytes durable (not its name)."""
        self.operation("sync", path)
        os.fsync(descriptor)

    def close(self, descriptor: int, path: Path) -> None:
        """Close a descriptor; some file systems report a failed write only here."""
        self.operation("close", path)
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        self.operation("sync_folder", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Create one folder that is not there yet."""
        self.operation("make_folder", path)
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file, link or folder another name, replacing a file of that name."""
        self.operation("rename", new)
        os.rename(old, new)

    def rename_new(self, old: Path, new: Path) -> None:
        """Give a file or folder a name that nothing has; FileExistsError where something has it."""
        self.operation("rename", new)
        try:
            _renameat2(old, new, _RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
            # A file system without it: a name that is taken between the look and the rename is
            # replaced, if it is a file.
            if new.is_symlink() or new.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from error
            os.rename(old, new)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap the names of two files or folders in one step (Linux' renameat2).

        OSError (ENOSYS, EINVAL) where the system or the file system cannot: a swap by two renames
        would leave, for an instant, neither under its name.
        """
        self.operation("exchange", other)
        _renameat2(one, other, _RENAME_EXCHANGE)

    def symlink(self, target: str, path: Path) -> None:
        """Create a symbolic link at `path`."""
        self.operation("symlink", path)
        os.symlink(target, path)

    def unlink(self, path: Path) -> None:
        """Remove a file or link."""
        self.operation("unlink", path)
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        self.operation("remove_folder", path)
        os.rmdir(path)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name that is not there yet; a link is linked itself."""
        self.operation("link", new)
        os.link(old, new, follow_symlinks=False)

    def allocate(self, descriptor: int, count: int, path: Path) -> None:
        """Reserve room for `count` bytes in a file (Linux' fallocate).

        OSError: EOPNOTSUPP or ENOSYS where the file system cannot say; ENOSPC, EDQUOT or EFBIG
        where there is none. Python's `posix_fallocate` writes to every block in the first case.
        """
        self.operation("allocate", path)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_int64(count)
        while libc.fallocate64(descriptor, 0, ctypes.c_int64(0), size) != 0:
            code = ctypes.get_errno()
            # Python asks again by itself only for calls of its own; its handler has run by now.
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), str(path))

    # Built from the primitives.

    def make_folders(self, path: Path) -> None:
        """Create a folder and its parents where they are missing, each durable in its parent."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        try:
            self.make_folder(path)
        except FileExistsError:
            if not path.is_dir():
                raise
        self.sync_folder(path.parent)

    def write_new_file(
        self, path: Path, chunks: Iterable[bytes | memoryview], *, size: int = 0
    ) -> int:
        """Write a new file and make its bytes durable; return its size.

        The name becomes durable with the folder: the caller syncs that once for all its files.
        ``size``: where it is known before; a large file then has its space reserved, and goes
        past the page cache where the file system takes that.
        """
        descriptor = self.create(path)
        try:
            if size >= _LARGE_BYTES:
                size = self._write_large(descriptor, chunks, size, path)
            else:
                size = self._write_small(descriptor, chunks, path)
            self.sync(descriptor, path)
        except BaseException:
            # The first error is what happened; a second one of the close would hide it.
            os.close(descriptor)
            raise
        self.close(descriptor, path)
        return size

    def _write_small(
        self, descriptor: int, chunks: Iterable[bytes | memoryview], path: Path
    ) -> int:
        size = 0
        for chunk in _gathered(chunks):
            self.write(descriptor, chunk, path)
            size += len(chunk)
        return size

    def _write_large(
        self, descriptor: int, chunks: Iterable[bytes | memoryview], size: int, path: Path
    ) -> int:
        if self.reserves_space:
            self._reserve(descriptor, size + -size % BLOCK_BYTES, path)
        direct = self.writes_direct and set_direct(descriptor)
        if self.writes_direct and not direct:
            self._refuse_direct("O_DIRECT is refused")
        try:
            written = write_blocks(chunks, lambda data: self.write(descriptor, data, path))
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                # The next attempt is a file of its own, and begins through the page cache.
                self._refuse_direct("a write with O_DIRECT is refused")
            raise
        self.truncate(descriptor, written, path)
        return written

    def _reserve(self, descriptor: int, count: int, path: Path) -> None:
        try:
            self.allocate(descriptor, count, path)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self.reserves_space = False
            self._refused += ("space cannot be reserved: a full disk is found while writing",)

    def _refuse_direct(self, why: str) -> None:
        self.writes_direct = False
        self._refused += (f"large writes go through the page cache: {why}",)

    def take_refused(self) -> tuple[str, ...]:
        """Return what the file system refused since the last call, and how writing goes on."""
        refused, self._refused = self._refused, ()
        return refused

    def replace_file(self, path: Path, data: bytes) -> None:
        """Make `path` hold `data`, durably; a crash leaves the old content or the new one."""
        temporary = path.with_name(temporary_name(path.name))
        try:
            self.write_new_file(temporary, [data])
            self.rename(temporary, path)
        except OSError as error:
            self.discard(temporary, because=error)
            raise
        self.sync_folder(path.parent)

    def rewrite_tail(self, path: Path, start: int, data: bytes) -> None:
        """Make a file end in `data` from byte `start` on, durably.

        For a file of lines whose readers pass over a torn one: a crash may leave the old end, the
        new one, or the new one with some of the old behind it.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.lseek(descriptor, start, os.SEEK_SET)
            self.write(descriptor, data, path)
            self.truncate(descriptor, start + len(data), path)
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)

    def point_link(self, path: Path, target: str) -> None:
        """Make `path` a link to `target`, durably; a crash leaves the old link or the new one."""
        if path.is_symlink() and os.readlink(path) == target:
            return
        temporary = path.with_name(temporary_name(path.name))
        try:
            self.symlink(target, temporary)
            self.rename(temporary, path)
        except OSError as error:
            self.discard(temporary, because=error)
            raise
        self.sync_folder(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all that is in it; links in it are removed, not followed."""
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.unlink(Path(entry.path))
        self.remove_folder(path)

    def sync_tree(self, path: Path) -> None:
        """Make a folder that something else has written durable: every file and every name."""
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            inner = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                self.sync_tree(inner)
            else:
                self.sync_file(inner)
        self.sync_folder(path)

    def sync_file(self, path: Path) -> None:
        """Make the bytes of a file that something else has written durable."""
        descriptor = open_regular(path, flags=os.O_NOFOLLOW)
        try:
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)

    def discard(self, path: Path, *, because: BaseException) -> None:
        """Remove what a failed operation left behind; where that fails too, the error says so.

        Whatever stays has a leftover's name, and the next session sweeps it away.
        """
        try:
            if path.is_dir() and not path.is_symlink():
                self.remove_tree(path)
            elif path.is_symlink() or path.exists():
                self.unlink(path)
        except OSError as second:
            because.add_note(f"{path} was left behind: {second}")


def _renameat2(one: Path, other: Path, flags: int) -> None:
    """Call Linux' renameat2, which Python has no function for."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags)
    if libc.renameat2(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot rename: {os.strerror(code)}", str(other))


def _gathered(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes in fewer parts: a model may have thousands of small tensors."""
    waiting = bytearray()
    for chunk in chunks:
        if len(chunk) >= GATHER_BYTES:
            if waiting:
                yield bytes(waiting)
                waiting.clear()
            yield chunk
        else:
            waiting += chunk
            if len(waiting) >= GATHER_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
