"""The way out of a process that cannot be ended in order.

Nothing is cleaned up, and nothing needs to be: a checkpoint is complete or invisible at every
instant.
"""

import contextlib
import os
import threading
from typing import NoReturn

_LAST_LINE_SECONDS = 0.5


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
