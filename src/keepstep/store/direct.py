"""Moving large files past the page cache, in whole blocks, at the speed of the disk.

Guarantees:
1. What is written or read is the same bytes as through the page cache; memory beside the data is
   two buffers a file, whatever its size.
2. While a buffer is with the disk the next one is filled, and digests are taken: neither waits.
3. Where the file system or the device does not take direct access, that is said: by `set_direct`
   before the first byte, or by the EINVAL of a transfer, never by other bytes.

Without it a save fills the page cache with what nobody reads again, pays for a copy and a page
fault on each of its pages, and a reader that asks whether the disk has the bytes is answered from
memory.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from keepstep.store.regular import open_regular

BLOCK_BYTES = 4096
"""What offsets, lengths and addresses are multiples of; devices ask for 512 or 4,096."""
WRITE_BYTES = 2 << 20
"""One write: its setup does not count, and both buffers stay in the cache of the processor."""
READ_BYTES = 8 << 20
"""One read of a large file."""


def set_direct(descriptor: int, *, on: bool = True) -> bool:
    """Have an open file go past the page cache, or not; return whether it does what was asked."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def write_blocks(chunks: Iterable[bytes | memoryview], write: Callable[[memoryview], None]) -> int:
    """Hand `write` all bytes of the chunks in whole blocks, the last one filled up with zeros.

    Returns the size without the filling. One buffer is written, by a thread, while the next is
    filled by this one, which also runs `chunks`. After an error no thread writes any more.
    """
    size, filled = 0, 0
    buffers, current = [memoryview(mmap.mmap(-1, WRITE_BYTES)) for _ in range(2)], 0
    with ThreadPoolExecutor(1, thread_name_prefix="keepstep-write") as pool:
        under_way: Future[None] | None = None
        for chunk in chunks:
            rest = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
            size += len(rest)
            while len(rest):
                count = min(len(rest), WRITE_BYTES - filled)
                copy_bytes(buffers[current][filled : filled + count], rest[:count])
                rest, filled = rest[count:], filled + count
                if filled == WRITE_BYTES:
                    if under_way is not None:
                        under_way.result()
                    under_way = _hand_over(pool, write, buffers[current])
                    current, filled = 1 - current, 0
        if under_way is not None:
            under_way.result()
        if filled:
            whole = filled + -filled % BLOCK_BYTES
            buffers[current][filled:whole] = bytes(whole - filled)
            write(buffers[current][:whole])
    return size


def _hand_over(
    pool: ThreadPoolExecutor, write: Callable[[memoryview], None], data: memoryview
) -> "Future[None] | None":
    try:
        return pool.submit(write, data)
    except RuntimeError:
        # The process is ending and begins no thread any more; a save in flight goes on alone.
        write(data)
        return None


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the interpreter's lock, so that the other thread goes on."""
    # Imported where large files are: what only looks around starts without it.
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Reader:
    """One file that is read in ranges, by several threads at a time.

    ``from_disk``: True: the bytes come from the disk, also where memory has them too. False: from
    memory where most of the file is there, since that is faster, and from the disk otherwise.
    """

    def __init__(self, path: Path, *, from_disk: bool = False) -> None:
        self._from_disk = from_disk
        self._own = threading.local()
        self._descriptor = open_regular(path)
        large = os.fstat(self._descriptor).st_size >= READ_BYTES
        self._direct = (from_disk or (large and not is_in_memory(self._descriptor))) and set_direct(
            self._descriptor
        )
        if from_disk and not self._direct:
            forget(self._descriptor)

    def read_into(self, data: memoryview, start: int) -> int:
        """Fill `data` with the bytes from `start` on; return how many there were."""
        if self._direct:
            try:
                return self._read_direct(data, start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A device with larger blocks: the same bytes, more slowly.
                # First the file, then the word: the other threads go by the word.
                set_direct(self._descriptor, on=False)
                self._direct = False
                if self._from_disk:
                    forget(self._descriptor)
        filled = 0
        while filled < len(data):
            count = os.preadv(self._descriptor, [data[filled:]], start + filled)
            if not count:
                break
            filled += count
        return filled

    def _read_direct(self, data: memoryview, start: int) -> int:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, READ_BYTES))
        buffer, filled, end = self._own.buffer, 0, start + len(data)
        while filled < len(data):
            skip = (start + filled) % BLOCK_BYTES
            begin = start + filled - skip
            length = min(READ_BYTES, end - begin + -(end - begin) % BLOCK_BYTES)
            count = os.preadv(self._descriptor, [buffer[:length]], begin)
            got = min(count - skip, len(data) - filled)
            if got <= 0:
                break
            copy_bytes(data[filled : filled + got], buffer[skip : skip + got])
            filled += got
        return filled

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def forget(descriptor: int) -> None:
    """Have the page cache let a file go; its pages are clean, since the file was synced."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def is_in_memory(descriptor: int) -> bool:
    """Tell whether most of a file is in the page cache, without reading any of it (mincore)."""
    import numpy as np

    size = os.fstat(descriptor).st_size
    resident = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as view:
        mapped = np.frombuffer(view, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        place, vector = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_void_p(resident.ctypes.data)
        del mapped
        if libc.mincore(place, ctypes.c_size_t(size), vector) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    return 2 * int((resident & 1).sum()) > len(resident)
