"""Work in a forked process, which may die of it."""

import os
import traceback
from collections.abc import Callable

import torch


def in_a_child(work: Callable[[], None]) -> int:
    """Run in a forked process; return its status as the parent sees it.

    On one thread of torch's: the others do not come along, and it would wait for them for ever.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]
