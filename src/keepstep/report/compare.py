"""How runs differ: config, numbers at the same steps, speed, and the step at which they part.

The losses are compared bit for bit: the journal holds each as it was, and `nan` is like `nan`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.report.history import History
from keepstep.report.view import View


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where another run's losses leave those of the first one; None: at no step that both took."""

    common_steps: int
    step: int | None


def differing_fields(views: Sequence[View]) -> dict[str, list[Any]]:
    """Return each recorded field that is not the same in all runs; None where one has it not."""
    flat = [flat_fields(view.record) for view in views]
    paths = sorted({path for fields in flat for path in fields})
    found = {path: [fields.get(path) for fields in flat] for path in paths}
    # `1` and `true` are equal to Python, and not to TOML.
    return {path: row for path, row in found.items() if len({repr(value) for value in row}) > 1}


def flat_fields(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config by their paths."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update(flat_fields(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def last_common_step(histories: Sequence[History]) -> int | None:
    """Return the last step that all took, or None."""
    return max(set.intersection(*(set(history.steps) for history in histories)), default=None)


def last_common_evaluation(histories: Sequence[History]) -> int | None:
    """Return the last step after which all were evaluated, or None."""
    sets = ({evaluation.step for evaluation in history.evaluations} for history in histories)
    return max(set.intersection(*sets), default=None)


def metrics_after(history: History, step: int) -> dict[str, float]:
    """Return what was measured after a step."""
    return next((e.metrics for e in history.evaluations if e.step == step), {})


def parting(one: History, other: History) -> Parting:
    """Return the first step whose loss is not the same, bit for bit, in two runs."""
    common, first = 0, None
    losses = dict(zip(one.steps, one.values["loss"], strict=True))
    for step, loss in zip(other.steps, other.values["loss"], strict=True):
        if step in losses:
            common += 1
            if first is None and not _same(losses[step], loss):
                first = step
    return Parting(common_steps=common, step=first)


def _same(one: float, other: float) -> bool:
    # 0.0 and -0.0 are equal, and their bits are not.
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
