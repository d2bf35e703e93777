"""Optimizer state by parameter name, back into a fresh optimizer, bit for bit.

Guarantees:
1. Nothing is converted: a moment comes back in the type it was saved in. (torch's own
   `load_state_dict` casts it to the parameter's type, which rounds a float32 moment of a bfloat16
   parameter.)
2. A fresh optimizer, whose state is still empty, gets all of it; no step on made-up gradients runs.
3. A state without a parameter to go to is an error, and so is a parameter that the saved optimizer
   did not have.
4. Hyper-parameters are not restored: the config's win.
5. What was restored shares no memory with what it came from, and nothing that the optimizer held
   before is left in it. Where it does not fit, the optimizer is as it was.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from keepstep.errors import CheckpointDamaged

Names = Mapping[int, str]
_STEP = "step"  # torch's name for the number of updates of a parameter
_OF_EACH_ELEMENT = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon)
"""Those whose state is known to have the parameter's shape; others may keep anything."""


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id; a tied one has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def state_by_name(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, dict[str, Any]]:
    """Return the state of every parameter that has one: tensors and plain values, not copied."""
    return {
        names[id(parameter)]: dict(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }


def restore_state(
    optimizer: torch.optim.Optimizer,
    names: Names,
    saved: Mapping[str, Mapping[str, Any]],
    *,
    saved_parameters: Collection[str],
) -> None:
    """Give every parameter its saved state; CheckpointDamaged names what does not fit.

    ``saved_parameters``: all parameters that the optimizer had, also those that had no state yet
    (before the first update, or because they never had a gradient).
    """
    parameters = {
        names[id(parameter)]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    homeless = sorted((set(saved) | set(saved_parameters)) - set(parameters))
    unknown = sorted(set(parameters) - set(saved_parameters))
    if homeless or unknown:
        raise CheckpointDamaged(
            f"the state of {type(optimizer).__name__} does not fit the model: no parameter for"
            f" {homeless or 'none'}, nothing saved for {unknown or 'none'}",
            hint="The optimizer or the model's parameters have changed since the checkpoint.",
        )
    beside = {
        names[id(parameter)]: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    of_each_element = isinstance(optimizer, _OF_EACH_ELEMENT)

    def placed(value: Any, key: str, name: str) -> Any:
        """Return a value of a parameter's state, its tensors where the optimizer wants them."""
        if isinstance(value, Mapping):
            return {inner: placed(item, f"{key}.{inner}", name) for inner, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(placed(item, f"{key}.{n}", name) for n, item in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        parameter = parameters[name]
        if value.shape == parameter.shape:
            # A new tensor with the parameter's strides: kernels may round otherwise for another
            # layout.
            return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        is_count = key == _STEP and value.dim() == 0
        if of_each_element and not is_count:
            raise CheckpointDamaged(
                f"the state {key!r} of {name} has the shape {tuple(value.shape)}, the parameter"
                f" {tuple(parameter.shape)}"
            )
        # The count of updates is wanted beside the parameter by fused kernels, by others on the
        # host. It is counted in place, so a shared one would be counted by two optimizers.
        device = "cpu" if is_count and not beside[name] else parameter.device
        return value.to(device, copy=True)

    restored = {
        parameters[name]: {key: placed(value, key, name) for key, value in entries.items()}
        for name, entries in saved.items()
    }
    optimizer.state.clear()
    optimizer.state.update(restored)
