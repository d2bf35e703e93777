"""Optimizers by name, behind one face: step, rate, state by parameter name.

A parameter's weight is decayed if it is a matrix (two dimensions or more); norms and biases are
not. Muon updates the hidden matrices and leaves embeddings, the output layer and everything else
to an AdamW of its own, so one `Optimizer` may hold two of torch's.

Schedule-free AdamW (Defazio et al. (2024), "The Road Less Scheduled") trains at y and evaluates
the average x. Outside of `averaged` the model holds y, and so does every checkpoint.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from keepstep.config.schema import SCHEDULE_FREE, OptimizerConfig
from keepstep.errors import CheckpointDamaged, UsageError
from keepstep.optim.ordered import Muon, round_alike
from keepstep.state.optimizer_state import (
    groups_to_come,
    hyperparameters_of,
    names_of,
    restore_state,
    state_by_name,
)

_PEAK = "peak_rate"
_NOT_SAVED = frozenset({"params", "lr", "param_names"})
_MOMENTS = {"AdamW": 2, "AdamWScheduleFree": 2, "Lion": 1}
"""Tensors of a parameter's shape that the first update makes."""


@runtime_checkable
class Averaging(Protocol):
    """What an optimizer has whose weights are others in training than in evaluation."""

    param_groups: list[dict[str, Any]]

    def eval(self) -> None:
        """Put the averaged weights into the model."""

    def train(self) -> None:
        """Put the weights that are trained into the model."""


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
            if isinstance(part, Averaging):
                part.train()

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

    def forget(self) -> None:
        """Drop every moment: what takes their place needs the memory."""
        for part in self._parts.values():
            part.state.clear()

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
                "groups": [self._group(group) for group in part.param_groups],
            }
            for name, part in self._parts.items()
        }

    def bytes_to_come(self) -> int:
        """Return the size of the moments that the first update makes; a fresh optimizer has none.

        Frozen parameters get none. SGD and Muon keep one of each other one where there is momentum.
        """
        return sum(
            (_MOMENTS.get(type(part).__name__) or int(group["momentum"] != 0))
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
            before = saved[name]["groups"]
            told = {*hyperparameters_of(type(part)), _PEAK, "parameters"}
            to_come = groups_to_come(
                part, self._names, before, hyperparameters={*told, *_NOT_SAVED}
            )
            parameters = [p for group in before for p in group["parameters"]]
            restore_state(part, self._names, saved[name]["state"], saved_parameters=parameters)
            for group, values in zip(part.param_groups, to_come, strict=True):
                group.update(values)
            if isinstance(part, Averaging):
                _keep_average(part, [group["betas"] for group in before])
            groups = [self._group(group) for group in part.param_groups]
            changes += _differences(name, before, groups, keys=told)
        return changes

    @contextmanager
    def averaged(self, *, before: Callable[[], None]) -> Iterator[None]:
        """Have the model hold averaged weights, if there are any, and then what it held before.

        ``before`` is called before a weight changes. The weights come back by a copy: the
        optimizer's own way back rounds, and an evaluation would change what is trained.
        """
        parts = [part for part in self._parts.values() if isinstance(part, Averaging)]
        if not parts:
            yield
            return
        before()
        parameters = [p for part in parts for group in part.param_groups for p in group["params"]]
        trained = [parameter.detach().clone() for parameter in parameters]
        for part in parts:
            part.eval()
        try:
            yield
        finally:
            for part in parts:
                part.train()
            with torch.no_grad():
                for parameter, weights in zip(parameters, trained, strict=True):
                    parameter.copy_(weights)

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in group.items() if key not in _NOT_SAVED}
        return {**kept, "parameters": [self._names[id(p)] for p in group["params"]]}


def build_optimizer(
    config: OptimizerConfig, model: torch.nn.Module, *, ordered: bool = False
) -> Optimizer:
    """Return the optimizer that a config names, over every parameter that wants gradients.

    ``ordered``: have it round alike on any number of ranks (see `ordered.py`).
    """
    parts = _parts(config, model, muon=Muon if ordered else torch.optim.Muon)
    if ordered:
        round_alike(parts.values())
    return Optimizer(parts, model=model)


def _parts(
    config: OptimizerConfig, model: torch.nn.Module, *, muon: type[torch.optim.Muon]
) -> dict[str, torch.optim.Optimizer]:
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
            parts["muon"] = muon(
                matrices,
                lr=config.rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                nesterov=config.nesterov,
            )
        if rest:
            parts["adamw"] = _adamw(config, rest, rate=config.adamw_rate)
        return parts
    parameters = [p for _, p in named]
    if config.name == "sgd":
        sgd = torch.optim.SGD(
            _groups(parameters, config.weight_decay),
            lr=config.rate,
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        return {"sgd": sgd}
    if config.name in ("lion", SCHEDULE_FREE):
        return {config.name: _of_a_library(config, parameters)}
    return {"adamw": _adamw(config, parameters, rate=config.rate)}


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


def _of_a_library(
    config: OptimizerConfig, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of the extra `optim`, whose packages are imported here only."""
    made: torch.optim.Optimizer
    groups, betas = _groups(parameters, config.weight_decay), (config.beta1, config.beta2)
    if config.name == "lion":
        from pytorch_optimizer.optimizer.lion import Lion

        made = Lion(groups, lr=config.rate, betas=betas)
    else:
        from schedulefree import AdamWScheduleFree

        # Its own warm-up rises as the schedule's does, which the journal tells of.
        made = AdamWScheduleFree(groups, lr=config.rate, betas=betas, eps=config.eps)
    return made


def _keep_average(part: Averaging, betas: list[tuple[float, float]]) -> None:
    """Go from the saved y to the y of this config's beta1, at the same average x.

    y lies between z and x by beta1: with another one, the saved y would stand for another average.
    """
    now = [group["betas"] for group in part.param_groups]
    if [beta1 for beta1, _ in now] == [beta1 for beta1, _ in betas]:
        return
    for group, saved in zip(part.param_groups, betas, strict=True):
        group["betas"] = saved
    part.eval()
    for group, own in zip(part.param_groups, now, strict=True):
        group["betas"] = own
    part.train()


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


def _differences(
    part: str, saved: list[Any], now: list[Any], *, keys: Collection[str]
) -> list[str]:
    if len(saved) != len(now):
        return [f"{part}: {len(saved)} groups of parameters -> {len(now)}"]
    found: dict[str, None] = {}
    for old, new in zip(saved, now, strict=True):
        for key in sorted((set(old) | set(new)) & set(keys)):
            if old.get(key) != new.get(key):
                found[f"{part}.{key}: {old.get(key)} -> {new.get(key)}"] = None
    return list(found)
