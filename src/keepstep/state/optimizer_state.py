"""Optimizer state by parameter name, back into a fresh optimizer, bit for bit.

Guarantees:
1. Nothing is converted: a moment comes back in the type it was saved in. (torch's own
   `load_state_dict` casts it to the parameter's type, which rounds a float32 moment of a bfloat16
   parameter.)
2. A fresh optimizer, whose state is still empty, gets all of it; no step on made-up gradients runs.
3. A state without a parameter or group to go to is an error, and so is a parameter, or a value of
   a group, that the saved optimizer did not have.
4. Hyper-parameters are not restored: the config's win. What else an optimizer keeps in its groups
   (a count, the sum of weights of an average) is state, and comes back as it was.
5. What was restored shares no memory with what it came from, and nothing that the optimizer held
   before is left in it. Where it does not fit, the optimizer is as it was.
"""

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
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


def hyperparameters_of(kind: type[torch.optim.Optimizer]) -> set[str]:
    """Return the keys of a group that an argument of the constructor sets.

    Any other key holds what the optimizer found on its way. Classes that pass arguments on take
    them in the constructor of another, so all of a class's are looked at.
    """
    makers = [vars(c)["__init__"] for c in kind.__mro__ if "__init__" in vars(c)]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def groups_to_come(
    optimizer: torch.optim.Optimizer,
    names: Names,
    saved: Sequence[Mapping[str, Any]],
    *,
    hyperparameters: Collection[str],
) -> list[dict[str, Any]]:
    """Return the saved state of each group, for it to be updated with; changes nothing.

    ``saved``: groups, the names of their parameters under ``parameters``. A key that a fresh
    optimizer does not have is taken too: some make theirs at the first update. CheckpointDamaged
    where the groups are others, or one of them lacks what a fresh one has.
    """

    def placed(value: Any, group: Mapping[str, Any], key: str) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        like = group[key] if isinstance(group.get(key), torch.Tensor) else group["params"][0]
        return value.to(like.device, copy=True)

    groups = optimizer.param_groups
    held = [set(group) - set(hyperparameters) for group in groups]
    kept = [set(group) - set(hyperparameters) for group in saved]
    if not any(held) and not any(kept):
        return [{} for _ in groups]
    now = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    if now != [group["parameters"] for group in saved]:
        raise CheckpointDamaged(
            f"{type(optimizer).__name__} keeps state of groups of parameters"
            f" ({', '.join(sorted(set().union(*held, *kept)))}), and the groups were others",
            hint="The optimizer or the model's parameters have changed since the checkpoint.",
        )
    missing = sorted(set().union(*(a - b for a, b in zip(held, kept, strict=True))))
    if missing:
        raise CheckpointDamaged(f"nothing was saved for {missing} of {type(optimizer).__name__}")
    return [
        {key: placed(before[key], group, key) for key in keys}
        for group, before, keys in zip(groups, saved, kept, strict=True)
    ]
