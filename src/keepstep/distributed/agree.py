"""What all ranks decide together.

Guarantees:
1. No rank acts on what it alone knows: every decision that changes what a step does goes through
   `agree`, one small all-reduce at one place of the step.
2. Where a peer is gone, an agreement raises Unhealthy with the lost rank, its host and what it
   was doing; it never waits without a deadline.
3. Only plain values travel, as JSON: no rank can make another run code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from keepstep.distributed.health import Health, NoHealth
from keepstep.distributed.rendezvous import COLLECTIVE_DEADLINE
from keepstep.errors import KeepstepError
from keepstep.store.process_group import SAME_ORDER, gather_plain

if TYPE_CHECKING:
    from keepstep.distributed.group import Group


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What a rank knows at a point of agreement; after it, what is true of all of them."""

    nonfinite: bool = False
    """The loss or the gradient norm is not finite (on any rank)."""
    stop: bool = False
    """A stop was asked for, by a signal, a hook or the clock (on any rank)."""
    save: bool = False
    """A hook asked for a save, or one is due by the clock (on any rank)."""
    busy: bool = False
    """A save is still being written (on any rank)."""
    late: bool = False
    """A save could not end within the grace (on any rank)."""
    loss: float = 0.0
    """The loss of this rank's part of the batch; afterwards the mean over all ranks."""
    losses: tuple[float, ...] = ()
    """Where the order counts: the loss of each micro-batch of the global batch, 0 in the places of
    other ranks. Afterwards those of all, and `loss` is their mean."""


def agree(group: "Group", facts: StepFacts) -> StepFacts:
    """Return the facts that hold on any rank, and the mean of the losses."""
    if group.world_size == 1:
        return facts
    flags = [facts.nonfinite, facts.stop, facts.save, facts.busy, facts.late]
    sums = group.sum([*flags, facts.loss, *facts.losses])
    losses = sums[6:]
    return StepFacts(
        nonfinite=sums[0] > 0,
        stop=sums[1] > 0,
        save=sums[2] > 0,
        busy=sums[3] > 0,
        late=sums[4] > 0,
        loss=sum(losses) / len(losses) if losses else sums[5] / group.world_size,
        losses=tuple(losses),
    )


class TorchRanks:
    """The ranks of a torch process group (gloo) that exchanges small plain values."""

    def __init__(
        self,
        process_group: Any,
        *,
        rank: int,
        size: int,
        health: Health | NoHealth,
        meet_seconds: float | None = None,
    ) -> None:
        """``meet_seconds``: how long `meet` waits for the others; None does not meet at all."""
        self.rank = rank
        self.size = size
        self._group = process_group
        self._health = health
        self._meet_seconds = meet_seconds

    def meet(self, what: str) -> None:
        """Return when all ranks are in `what`; KeepstepError names those that stay away."""
        if self._meet_seconds is None:
            return
        import torch.distributed as dist

        try:
            dist.monitored_barrier(
                self._group, timedelta(seconds=self._meet_seconds), wait_all_ranks=True
            )
        except RuntimeError as error:
            raise KeepstepError(
                f"rank {self.rank} waited {self._meet_seconds:g} s for the others in {what}:"
                f" {error}",
                hint=SAME_ORDER,
            ) from error

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums over the ranks, in float64, the same bits on each."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
        with self._lost_peers_named():
            dist.all_reduce(tensor, group=self._group)
        sums: list[float] = tensor.tolist()
        return sums

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """Return every rank's plain value, by rank, on every rank.

        Raises KeepstepError on all where the ranks are not in the same exchange.
        """
        lost = self._lost_peers_named()
        return gather_plain(value, what=what, group=self._group, size=self.size, lost=lost)

    def apart(self) -> "TorchRanks":
        """Return the same ranks with a group of their own, which another thread may use."""
        import torch.distributed as dist

        group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_DEADLINE)
        return TorchRanks(group, rank=self.rank, size=self.size, health=self._health)

    @contextmanager
    def _lost_peers_named(self) -> Iterator[None]:
        try:
            yield
        # Every backend has its own class for a lost peer, all below this one.
        except RuntimeError as error:
            raise self._health.explain(error) from error
