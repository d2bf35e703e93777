"""How many of the worst days a test run lives through: a part that changes daily, or all of them.

`make worst-days` sets `KEEPSTEP_WORST_DAYS=all`. `KEEPSTEP_TEST_SEED` repeats the draw of another
day, which every test prints.
"""

import os
import random
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

Item = TypeVar("Item")

ALL = os.environ.get("KEEPSTEP_WORST_DAYS") == "all"
SEED = int(os.environ.get("KEEPSTEP_TEST_SEED") or date.today().toordinal())


def generator(name: str) -> random.Random:
    """Return random numbers of a test's own, a function of its name and the seed."""
    print(f"KEEPSTEP_TEST_SEED={SEED}")
    return random.Random(f"{name} {SEED}")


def some(items: Sequence[Item], *, of: int) -> list[Item]:
    """Return every `of`-th item, beginning at another one each day; all of them where asked."""
    return list(items) if ALL else list(items[SEED % of :: of])
