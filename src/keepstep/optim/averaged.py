"""A checkpoint's weights as they were evaluated, for whatever uses them without training on.

A checkpoint holds what the next update needs. Of schedule-free AdamW these are y and z, and what
was evaluated, and what `best` means, is the average x = lerp(y, z, 1 - 1 / beta1): Defazio et al.
(2024), "The Road Less Scheduled", y = (1 - beta1) z + beta1 x solved for x. It is computed with
the very operation of the optimizer's own `eval`, so it has the bits that were evaluated.
"""

from typing import Any

from keepstep.config.schema import SCHEDULE_FREE
from keepstep.store import Checkpoint, load_state

_MODEL = "model"


def load_averaged(entry: Checkpoint, *, only: str | None = None) -> dict[str, Any]:
    """Return a checkpoint's state as `load_state` does, with averaged weights where it has them."""
    named = entry.manifest.must_match.get("optimizer.name") if entry.manifest else None
    if named != SCHEDULE_FREE or only not in (None, _MODEL):
        return load_state(entry.path, only=only)
    state = load_state(entry.path)
    _average(state[_MODEL], state["optimizer"][SCHEDULE_FREE])
    return state if only is None else {only: state[only]}


def _average(weights: dict[str, Any], part: dict[str, Any]) -> None:
    """Change loaded weights in place, so that tied ones stay tied, and say so in the groups."""
    for group in part["groups"]:
        beta1, _ = group["betas"]
        for name in group["parameters"]:
            if name in part["state"]:
                weights[name].lerp_(part["state"][name]["z"], 1 - 1 / beta1)
        group["train_mode"] = False
