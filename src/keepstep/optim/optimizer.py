"""Optimizers by name, behind one face: step, rate, state by parameter name.

A parameter's weight is decayed if it is a matrix (two dimensions or more); norms and biases are
not. Muon updates the hidden matrices and leaves embeddings, the output layer and everything else
to an AdamW of its own, so one `Optimizer` may hold two of torch's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from keepstep.config.schema import OptimizerConfig
from keepstep.errors import CheckpointDamaged, UsageError
from keepstep.state.optimizer_state import names_of, restore_state, state_by_name

_PEAK = "peak_rate"
_NOT_HYPERPARAMETERS = frozenset({"params", "lr", "param_names"})


class Optimizer:
    """One or two of torch's optimizers over the parameters of a model, by part name."""

    def __init__(
        self, parts: Mapping[str, torch.optim.Optimizer], *, model: torch.nn.Module
    ) -> None:
        self._parts = dict(parts)
        self._names = names_of(model)
        self._paths: dict[str, torch.Tensor] | None = None
        for part in self._parts.values():
            for group in part.param_groups:
                group[_PEAK] = group["lr"]

    @property
    def rate(self) -> float:
        """The learning rate of the first group, as the next `step` uses it."""
        part = next(iter(self._parts.values()))
        return float(part.param_groups[0]["lr"])

    def set_factor(self, factor: float) -> None:
        """Set every group's rate to its peak times `factor`."""
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = group[_PEAK] * factor

    def step(self) -> None:
        """Apply one update."""
        for part in self._parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self._parts.values():
            part.zero_grad(set_to_none=True)

    def register_step_pre_hook(self, hook: Callable[[], None]) -> None:
        """Call `hook` before each update, before the first parameter changes."""
        first = next(iter(self._parts.values()))
        first.register_step_pre_hook(lambda *_: hook())

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyper-parameters of each part; parameters by name, nothing copied."""
        return {
            name: {
                "kind": type(part).__name__,
                "state": state_by_name(part, self._names),
                "groups": [self._hyperparameters(group) for group in part.param_groups],
            }
            for name, part in self._parts.items()
        }

    def bytes_to_come(self) -> int:
        """Return the size of the moments that the first update makes; a fresh optimizer has none.

        Frozen parameters get none. AdamW keeps two of each other one, SGD and Muon one where there
        is momentum.
        """
        return sum(
            (2 if isinstance(part, torch.optim.AdamW) else int(group["momentum"] != 0))
            * parameter.numel()
            * parameter.element_size()
            for part in self._parts.values()
            for group in part.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and not part.state.get(parameter)
        )

    def parameter_of(self, path: str) -> torch.Tensor | None:
        """Return the parameter whose state stands at `path` in a checkpoint, if there is one."""
        if self._paths is None:
            self._paths = {
                f"optimizer.{name}.state.{self._names[id(parameter)]}": parameter
                for name, part in self._parts.items()
                for group in part.param_groups
                for parameter in group["params"]
            }
        return self._paths.get(path)

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take the saved state; keep this one's hyper-parameters and return which differ.

        Raises CheckpointDamaged where the optimizers or the parameters are not the same.
        """
        kinds = {name: type(part).__name__ for name, part in self._parts.items()}
        saved_kinds = {name: part["kind"] for name, part in saved.items()}
        if kinds != saved_kinds:
            raise CheckpointDamaged(f"the optimizer was {saved_kinds}, and is now {kinds}")
        changes: list[str] = []
        for name, part in self._parts.items():
            parameters = [p for group in saved[name]["groups"] for p in group["parameters"]]
            restore_state(part, self._names, saved[name]["state"], saved_parameters=parameters)
            groups = [self._hyperparameters(group) for group in part.param_groups]
            changes += _differences(name, saved[name]["groups"], groups)
        return changes

    def _hyperparameters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
        return {**kept, "parameters": [self._names[id(p)] for p in group["params"]]}


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> Optimizer:
    """Return the optimizer that a config names, over every parameter that wants gradients."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UsageError("no parameter of the model wants a gradient: there is nothing to train")
    if config.name == "muon":
        embeddings = _embedding_weights(model)
        matrices = [p for _, p in named if p.dim() == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            parts["muon"] = torch.optim.Muon(
                matrices,
                lr=config.rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                nesterov=config.nesterov,
            )
        if rest:
            parts["adamw"] = _adamw(config, rest, rate=config.adamw_rate)
        return Optimizer(parts, model=model)
    parameters = [p for _, p in named]
    if config.name == "sgd":
        sgd = torch.optim.SGD(
            _groups(parameters, config.weight_decay),
            lr=config.rate,
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        return Optimizer({"sgd": sgd}, model=model)
    return Optimizer({"adamw": _adamw(config, parameters, rate=config.rate)}, model=model)


def _adamw(
    config: OptimizerConfig, parameters: list[torch.nn.Parameter], *, rate: float
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        _groups(parameters, config.weight_decay),
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def _groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _embedding_weights(model: torch.nn.Module) -> set[int]:
    """Return the ids of the weights that look up or score tokens, which Muon is not made for."""
    found = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return found | ({id(output.weight)} if output is not None else set())


def _differences(part: str, saved: list[Any], now: list[Any]) -> list[str]:
    if len(saved) != len(now):
        return [f"{part}: {len(saved)} groups of parameters -> {len(now)}"]
    found: dict[str, None] = {}
    for old, new in zip(saved, now, strict=True):
        for key in sorted(set(old) | set(new)):
            if old.get(key) != new.get(key):
                found[f"{part}.{key}: {old.get(key)} -> {new.get(key)}"] = None
    return list(found)
