"""Updates that round alike on any number of ranks.

Guarantees: an element's update has the same bits wherever the shard that it lies in begins and
ends. Torch's elementwise kernels round alike in all lanes, with one exception: on a CPU the fused
AdamW has other code for the last elements of a tensor, and each rank has other last elements.
Kernels over lists of tensors are not used either: torch takes them for whole tensors only.

Muon's update of a matrix is made of products of all of it. Here each rank gathers the matrix, its
gradient and its momentum, one matrix at a time, and computes what one rank would; torch's own Muon
multiplies shards, which adds in another order.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from keepstep.distributed.shard import whole

_MOMENTUM = "momentum_buffer"


def round_alike(parts: Iterable[torch.optim.Optimizer]) -> None:
    """Have optimizers take one operation at a time, one tensor at a time."""
    for part in parts:
        for group in part.param_groups:
            group.update({key: False for key in ("fused", "foreach") if key in group})


class Muon(torch.optim.Muon):
    """Torch's Muon, by the same name in a checkpoint, on whole matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update."""
        assert closure is None, "the loss is known"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
        alone = torch.nn.Parameter(whole(parameter.detach()))
        alone.grad = whole(parameter.grad)  # type: ignore[arg-type]
        muon = torch.optim.Muon([{**group, "params": [alone]}])
        muon.state[alone][_MOMENTUM] = whole(state[_MOMENTUM])
        muon.step()  # type: ignore[no-untyped-call]
        _keep_part(parameter, alone.detach())
        _keep_part(state[_MOMENTUM], muon.state[alone][_MOMENTUM])


def _keep_part(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor the values of a whole one that every rank has."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            values = distribute_tensor(values, mesh, placements, src_data_rank=None)
    tensor.copy_(values)
