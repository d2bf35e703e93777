"""Work in a forked process, which may die of it."""

import os
import traceback
from collections.abc import Callable


def in_a_child(work: Callable[[], None]) -> int:
    """Run in a forked process; return its status as the parent sees it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]
