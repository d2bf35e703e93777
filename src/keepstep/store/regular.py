"""Opening what has the name of a file of ours, whoever put it there.

Guarantees: an open waits for nobody, and what is read is a regular file: a pipe, a socket or a
device under one of our names is an error, and is not read.

Without it a pipe called `latest.pth` holds up a listing, a save or a resume for ever.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO


def opened(path: Path) -> IO[bytes]:
    """Return a regular file, open for reading; OSError where there is none."""
    return os.fdopen(open_regular(path), "rb")


def open_regular(path: Path, *, flags: int = 0) -> int:
    """Return a descriptor that reads a regular file; OSError where there is none.

    ``flags``: what `os.open` is given besides.
    """
    # Without O_NONBLOCK the open of a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
