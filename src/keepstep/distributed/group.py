"""Which rank this process is, and of how many.

Guarantees: the answer comes from the launcher's environment (torchrun's variables) before any
model exists, and a world that this version cannot train on is refused there.
"""

import os
from dataclasses import dataclass

from keepstep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of a run, as this process sees them."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def description(self) -> str:
        """Say the group in the words of the terminal: `1 rank`."""
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"


def open_group() -> Group:
    """Return this process's place among the ranks; UsageError for more than one rank."""
    group = Group(
        rank=_from_environment("RANK", 0),
        world_size=_from_environment("WORLD_SIZE", 1),
        local_rank=_from_environment("LOCAL_RANK", 0),
    )
    if group.world_size != 1:
        raise UsageError(
            f"the launcher started {group.world_size} ranks; this version trains on one",
            hint="Start it with `--nproc_per_node=1`, or without a launcher.",
        )
    return group


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}, not a whole number")
    return int(text)
