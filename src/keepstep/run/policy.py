"""When to save and when to evaluate: pure functions of the step and the config."""

from collections.abc import Callable
from enum import StrEnum

from keepstep.config.schema import CheckpointConfig, DenseWindowConfig, EvaluationConfig

SaveStrategy = Callable[[int, DenseWindowConfig], bool]


class SaveDue(StrEnum):
    """Whether a save is due, and whether it is a milestone that retention leaves alone."""

    NO = "no"
    SCHEDULED = "scheduled"
    MILESTONE = "milestone"


def power2(step: int, window: DenseWindowConfig) -> bool:
    """Tell whether `step` is the window's start or 2^k steps after it, for k = 0, 1, 2, ..."""
    offset = step - window.start
    return offset == 0 or (offset > 0 and offset & (offset - 1) == 0)


STRATEGIES: dict[str, SaveStrategy] = {"power2": power2}
"""Strategies of the dense window by name; register another by adding it from a hook's module."""


def save_due(step: int, checkpoint: CheckpointConfig) -> SaveDue:
    """Decide the scheduled save of `step`: inside the window by its strategy, outside by interval.

    Step 0 is saved only as the start of a window: it can be made again from the seed.
    """
    window = checkpoint.dyn_ckpt_window
    if window is not None and window.start <= step <= window.stop:
        return SaveDue.MILESTONE if STRATEGIES[window.strategy](step, window) else SaveDue.NO
    scheduled = step > 0 and checkpoint.interval > 0 and step % checkpoint.interval == 0
    return SaveDue.SCHEDULED if scheduled else SaveDue.NO


def evaluation_due(step: int, max_steps: int, evaluation: EvaluationConfig) -> bool:
    """Tell whether held-out data are looked at after `step`."""
    if step == max_steps and evaluation.at_end:
        return True
    return step > 0 and evaluation.interval > 0 and step % evaluation.interval == 0
