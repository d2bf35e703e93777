"""A model over the ranks of a mesh: FSDP2, HSDP where the mesh has an axis of replicas, and below
them tensor parallel where it has one of those.

Every rank builds the whole initial model from the same random numbers first, so the weights of
step 0 do not depend on the number of ranks.
"""

import sys
from collections.abc import Callable

import torch

from keepstep.distributed.mesh import Layout
from keepstep.store.ranks import Ranks


def shard_model(
    model: torch.nn.Module, layout: Layout, *, bfloat16: bool, ordered: bool = False
) -> None:
    """Shard every parameter of `model` in place over the layout's mesh; nothing on one rank.

    ``ordered``: sum gradients in an order that does not depend on the ranks (see `ordered.py`), and
    gather weights in float32, which are rounded where one rank would round them.
    """
    if layout.mesh is None:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if layout.tp > 1:
        from keepstep.distributed.tensor_parallel import split_model

        split_model(model, layout.tp_mesh)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 and not ordered else None, reduce_dtype=torch.float32
    )
    mesh = layout.data_mesh
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if ordered:
        from keepstep.distributed.ordered import reduce_in_order

        reduce_in_order(model)


def before_first_update(model: torch.nn.Module, layout: Layout, ranks: Ranks) -> Callable[[], None]:
    """Return what is to be called before each update; at the first it finds a plan that is wrong.

    Raises UsageError on all ranks; see `tensor_parallel.require_same_gradients`.
    """
    to_do = [layout.tp_mesh] if layout.tp > 1 else []

    def confirm() -> None:
        while to_do:
            from keepstep.distributed.tensor_parallel import require_same_gradients

            require_same_gradients(model, to_do.pop(), ranks)

    return confirm


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that are gathered one at a time: those that the library calls unsplit."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all ranks hold whole: a sharded or partial one is reduced."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
    return tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a word to the others."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.to_local()
    return tensor


def drop_gathered(model: torch.nn.Module) -> None:
    """Have the next forward pass gather all weights anew.

    A forward pass without a backward one leaves those of the root module gathered, and the next
    one would use them, whatever became of the shards.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.reshard()


def reduce_gradients(model: torch.nn.Module, *, now: bool) -> None:
    """Say whether the next backward pass reduces gradients over the ranks.

    With several micro-batches only the last one needs to: the sum is the same, the traffic less.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
