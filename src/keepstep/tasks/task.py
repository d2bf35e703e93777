"""The seam between the run loop and what is trained.

A task is one object of this shape. The loop never asks which task it drives; a third task is one
package and one entry point in the group ``keepstep.tasks`` (see ``tasks/registry.py``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch, as the micro-batches that this rank takes in order.

    ``samples`` and ``tokens`` count the whole global batch, over all ranks.
    Micro-batches are all of the same size, so their losses are averaged with equal weights. The
    n-th here is the one at place `n * count + index` of the global batch (see `DataShare`), so what
    stands in each place does not depend on the number of ranks.
    """

    micro_batches: tuple[Any, ...]
    samples: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class DataShare:
    """Which part of each global batch this rank takes: of `count` micro-batches, the `index`-th.

    ``sum`` adds lists of numbers over the ranks, for metrics over all of them. Where each
    micro-batch has a place of its own in such a list, no rounding depends on the ranks.
    """

    index: int = 0
    count: int = 1
    sum: Callable[[list[float]], list[float]] = lambda values: values


class Task(Protocol):
    """What a run trains. Everything it returns is a pure function of its config and arguments."""

    identity: Mapping[str, str | int]
    """Facts that must be the same when a run is continued (the digest of the data, say)."""

    def build_model(self) -> torch.nn.Module:
        """Build the initial model; called under the random numbers of the stream ``init``."""
        ...

    def batches(self, position: int) -> Iterator[Batch]:
        """Yield global batches without end, the first beginning at global sample ``position``."""
        ...

    def loss(self, model: torch.nn.Module, micro_batch: Any) -> torch.Tensor:
        """Return the mean loss, a scalar that can be differentiated."""
        ...

    def evaluate(
        self, model: torch.nn.Module, stop_requested: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Return the held-out metrics; None where ``stop_requested`` said to stop in the middle."""
        ...
