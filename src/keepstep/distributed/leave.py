"""The ways out of a process that cannot be ended in order.

Nothing is cleaned up, and nothing needs to be: a checkpoint is complete or invisible at every
instant.
"""

import contextlib
import os
import sys
import threading
from typing import NoReturn

_LAST_LINE_SECONDS = 0.5
_left_behind = threading.Event()


def leave(code: int, words: str) -> NoReturn:
    """End the process now, after a last line if the terminal still takes one.

    Written by a thread of its own: a lost terminal raises, and a full pipe never returns.
    """
    writer = threading.Thread(target=_say, args=(words,), daemon=True)
    writer.start()
    writer.join(_LAST_LINE_SECONDS)
    os._exit(code)


def _say(words: str) -> None:
    # The terminal is gone, and the exit code says it too.
    with contextlib.suppress(OSError):
        os.write(2, (words + "\n").encode())


def leave_behind() -> None:
    """Note that a thread may never end: nothing waits for it at the end of the process."""
    _left_behind.set()


def must_leave() -> bool:
    """Tell whether a thread was left behind."""
    return _left_behind.is_set()


def ended(code: int) -> int:
    """Return `code`; where a thread was left behind, end the process with it instead.

    As Python ends, the library of such a thread would wait for it: W&B's does for minutes.
    """
    if must_leave():
        # The terminal may be gone, and the exit code says it too.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code
