"""Sums over the micro-batches of a global batch whose order does not depend on the ranks.

Guarantees:
1. The gradient of a global batch of n micro-batches is the sum along one binary tree over them, in
   their order: the same additions, and so the same bits, on any number of ranks that is a power
   of two and divides n. Any other number is refused (`require_order`).
2. Micro-batch i belongs to rank i mod R. The R that are taken at once stand side by side, so they
   are a subtree that the ranks sum along the same tree, and each keeps the sum of its shard only.
3. The norm of a gradient is that of its whole tensors, one after the other, on every rank.

Without 1 the sums of a collective, of FSDP2's accumulation and of a norm over shards are made in an
order that follows the ranks, and a run that moves to other ranks has other last bits.

It costs a reduction for each micro-batch, the gradients gathered once a step for their norm, and
memory for 1 + log2(n / R) gradients of a shard.
"""

from collections.abc import Sequence
from typing import Any

import torch

from keepstep.config.schema import Config
from keepstep.distributed.mesh import Layout
from keepstep.distributed.shard import whole
from keepstep.errors import UsageError

Terms = list[torch.Tensor | None]


def require_order(config: Config, layout: Layout) -> None:
    """Raise UsageError where the ranks cannot sum along the tree."""
    count, ranks = config.train.global_batch // config.train.micro_batch, layout.data_ranks
    if ranks & (ranks - 1) or count % ranks:
        raise UsageError(
            f"train.deterministic_reduction: {count} micro-batches (train.global_batch /"
            f" train.micro_batch) cannot be summed in one order on {ranks} data-parallel ranks",
            hint="Start a number of ranks that is a power of two and divides the micro-batches.",
        )


class TreeSum:
    """The sum of what is added, along a binary tree over the terms in their order.

    Two sums are added as soon as both are of as many terms. What is left at the end, sums of fewer
    and fewer terms, is added from the last to the first. A term may itself be the sum along such a
    tree of 2^k terms, if all are: the additions are the same.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Terms]] = []

    def add(self, terms: Terms) -> None:
        """Add one tensor for each sum; None where there is none. They are changed in place."""
        size = 1
        while self._waiting and self._waiting[-1][0] == size:
            _, before = self._waiting.pop()
            terms = _plus(before, terms)
            size *= 2
        self._waiting.append((size, terms))

    def total(self) -> Terms:
        """Return the sums; nothing may be added afterwards."""
        _, total = self._waiting.pop()
        while self._waiting:
            _, before = self._waiting.pop()
            total = _plus(before, total)
        return total


def _plus(first: Terms, second: Terms) -> Terms:
    return [
        two if one is None else one if two is None else one.add_(two)
        for one, two in zip(first, second, strict=True)
    ]


def norm_of_whole(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients together; one at a time is whole here."""
    # Torch's total norm would have all of them whole at once.
    norms = [torch.linalg.vector_norm(whole(gradient)) for gradient in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def reduce_in_order(model: torch.nn.Module) -> None:
    """Have a sharded model's gradients summed, not averaged, along the tree of the ranks."""
    from torch.distributed.fsdp import FSDPModule

    in_order: Any = _InOrder()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(in_order)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class _InOrder:
    """FSDP2's reduction to shards (its `ReduceScatter`), along the tree of the ranks.

    The replicas of HSDP add two such sums, whose order means nothing.
    """

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory of a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Put the sum of this rank's part of every rank's input into the output."""
        del op, async_op
        import torch.distributed as dist

        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        tree = TreeSum()
        for part in received.view(group.size(), -1):
            tree.add([part])
        (total,) = tree.total()
        assert total is not None, "every rank has sent its part"
        output_tensor.copy_(total)
