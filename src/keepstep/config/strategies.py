"""Strategies of the dense window, by name: which of its steps are saved.

`power2` comes along; others register as an entry point of the group `keepstep.save_strategies`, a
pure function of (step, window) that says whether the step is saved.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from keepstep.config.schema import DenseWindowConfig

SaveStrategy = Callable[[int, "DenseWindowConfig"], bool]

_GROUP = "keepstep.save_strategies"


def power2(step: int, window: "DenseWindowConfig") -> bool:
    """Tell whether `step` is the window's start or 2^k steps after it, for k = 0, 1, 2, ..."""
    offset = step - window.start
    return offset == 0 or (offset > 0 and offset & (offset - 1) == 0)


def strategy_names() -> list[str]:
    """Return the names of all strategies."""
    return sorted({power2.__name__, *(point.name for point in entry_points(group=_GROUP))})


def find_strategy(name: str) -> SaveStrategy:
    """Return the strategy of that name, which a checked config has."""
    if name == power2.__name__:
        return power2
    (point,) = entry_points(group=_GROUP, name=name)
    return cast(SaveStrategy, point.load())
