"""Work in a forked process, which may die of it."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

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


def as_nobody(work: Callable[[], None], place: Path) -> int:
    """Run `work` in a child without root's rights; return how that ended.

    The folders of the tests above `place`, which are the user's own, are opened to all first.
    """
    for folder in place.parents:
        if folder.name.startswith(("test_", "popen-", "pytest-")):
            folder.chmod(0o755)

    def without_rights() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        work()

    return in_a_child(without_rights)
