"""What all ranks decide together, once a step.

Guarantees: no rank acts on what it alone knows. Every decision that changes what a step does goes
through `agree`, in one place of the step. On one rank the facts are already everyone's; on many,
this is where the one small all-reduce of a step belongs.
"""

from dataclasses import dataclass

from keepstep.distributed.group import Group


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a rank knows at a point of agreement; after it, what is true of any rank."""

    nonfinite: bool = False
    """The loss or the gradient norm is not finite."""
    stop: bool = False
    """A stop was asked for, by a signal or a hook."""
    save: bool = False
    """A hook asked for a save."""


def agree(group: Group, facts: StepFacts) -> StepFacts:
    """Return the facts that hold on any rank."""
    assert group.world_size == 1, "more ranks need the all-reduce"
    return facts
