"""When to save and when to evaluate: pure functions of the step and the config."""

from enum import StrEnum

from keepstep.config.schema import CheckpointConfig, EvaluationConfig
from keepstep.config.strategies import find_strategy


class SaveDue(StrEnum):
    """Whether a save is due, and whether it is a milestone that retention leaves alone."""

    NO = "no"
    SCHEDULED = "scheduled"
    MILESTONE = "milestone"


def save_due(step: int, checkpoint: CheckpointConfig) -> SaveDue:
    """Decide the scheduled save of `step`: inside the window by its strategy, outside by interval.

    Step 0 is saved only as the start of a window: it can be made again from the seed.
    """
    window = checkpoint.dyn_ckpt_window
    if window is not None and window.start <= step <= window.stop:
        saved = find_strategy(window.strategy)(step, window)
        return SaveDue.MILESTONE if saved else SaveDue.NO
    scheduled = step > 0 and checkpoint.interval > 0 and step % checkpoint.interval == 0
    return SaveDue.SCHEDULED if scheduled else SaveDue.NO


def evaluation_due(step: int, max_steps: int, evaluation: EvaluationConfig) -> bool:
    """Tell whether held-out data are looked at after `step`."""
    if step == max_steps and evaluation.at_end:
        return True
    return step > 0 and evaluation.interval > 0 and step % evaluation.interval == 0
