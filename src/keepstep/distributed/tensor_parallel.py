"""A model's matrices over the ranks of one tensor-parallel group, by the plan of the model itself.

Guarantees:
1. Afterwards every parameter is a DTensor over the group: split where the plan splits it, whole on
   each rank where it does not. One mesh for all is what a gradient norm and a fused update need.
2. A gradient is that of one rank, to rounding. Of what is whole on each rank it is the same on all
   of them: what only this rank's heads gave is summed over the group first.
3. A plan, a style or a size that does not fit is a UsageError that names it. Nothing that the plan
   splits is kept whole instead. A plan that does not say that a gradient is to be summed is found
   before the first update: the ranks' copies of that weight would part, and nothing would show it.

The plan is the model's `tp_plan`, as `transformers` writes it: names of modules, with `*` for the
number of a layer, and names of styles. Activations between modules are plain tensors, so dropout
on what all ranks hold draws the same numbers on each, and on heads the same for each rank's own.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from keepstep.errors import UsageError
from keepstep.store.ranks import Ranks, together

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SPLITS: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""What `transformers` calls a way to split a linear layer or an embedding, in torch's styles."""
_SUMMED = "replicated_with_grad_allreduce"
_WHOLE: Mapping[str, Placement] = {"replicate": Replicate(), _SUMMED: Partial()}
"""Its styles of what stays whole, and what a rank's gradient is of that of all."""
_GATHERED = {"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"}
"""Styles of heads: what they return may be what the model returns."""
_SAME = 0.01
"""By how much of its largest number a gradient may differ between ranks that hold the same weight:
far above rounding, far below what another rank's heads give."""
_INSTEAD = "Leave distributed.tp at 1: FSDP2 shards any model. Or take an architecture"

# Torch warns of two collectives in a row. Those of a norm are one (see `mesh.py`); the others only
# gather, for Muon, a weight whose rows both axes cut.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "all_gather" not in record.getMessage()
)


def split_model(model: torch.nn.Module, mesh: Any) -> None:
    """Split the parameters of `model` in place over the ranks of `mesh`, which has one axis.

    Every rank has built the same whole model, so each takes its part of its own.
    """
    styles = _styles_of(model)
    tied = _names_of_each(model)
    splits = {name: _SPLITS[style]() for name, style in styles.items() if style in _SPLITS}
    parallelize_module(model, mesh, splits, src_data_rank=None)
    for name, module in model.named_modules():
        if styles.get(name) in _GATHERED:
            module.register_forward_hook(_no_view)
        _keep_whole(module, mesh, gradient=_WHOLE.get(styles.get(name, ""), Replicate()))
    _tie_again(model, tied)
    _require_even(model, mesh.size())


def _styles_of(model: torch.nn.Module) -> dict[str, str]:
    """Return the style of each module that the model's plan names."""
    kind = type(model).__name__
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    modules = dict(model.named_modules())
    named = {
        name: plan[general]
        for name in [*modules, *(name for name, _ in model.named_parameters())]
        if (general := _NUMBER.sub("*", name)) in plan
    }
    for name, style in named.items():
        module = modules.get(name)
        simple = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        if (style in _SPLITS and not simple) or style not in {*_SPLITS, *_WHOLE}:
            raise UsageError(
                f"distributed.tp: the plan of {kind} splits {name} by {style!r}, which is not there"
                f" yet for {'a parameter alone' if module is None else type(module).__name__}",
                hint=f"{_INSTEAD} whose plan has linear layers only, such as llama or qwen3.",
            )
    if not any(style in _SPLITS for style in named.values()):
        raise UsageError(
            f"distributed.tp: {kind} has no tensor parallel plan",
            hint=f"{_INSTEAD} that has one in transformers, such as llama or qwen3.",
        )
    return named


def _no_view(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Return a copy: a model of FSDP2 that returns a view loses gradients to an in-place change."""
    return output.clone()


def _keep_whole(module: torch.nn.Module, mesh: Any, *, gradient: Placement) -> None:
    """Make what is not split of a module's own parameters DTensors that are whole on each rank.

    The module computes with plain tensors, as all around it do: they stand in for the parameters
    while its forward pass runs.
    """
    own = dict(module.named_parameters(recurse=False))
    names = [name for name, parameter in own.items() if not isinstance(parameter, DTensor)]
    if not names:
        return
    for name in names:
        whole = distribute_tensor(own[name].detach(), mesh, [Replicate()], src_data_rank=None)
        parameter = torch.nn.Parameter(whole, requires_grad=own[name].requires_grad)
        module.register_parameter(name, parameter)
    held: dict[str, Any] = {}

    def lend(module: torch.nn.Module, _inputs: Any) -> None:
        for name in names:
            held[name] = parameter = module._parameters[name]
            local = parameter.to_local(grad_placements=[gradient])  # type: ignore[union-attr]
            module._parameters[name] = local

    def take_back(module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        module._parameters.update(held)

    module.register_forward_pre_hook(lend)
    module.register_forward_hook(take_back)


def _names_of_each(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie_again(model: torch.nn.Module, tied: list[list[str]]) -> None:
    """Make one parameter again of what was one before each of its modules was split."""
    for first, *others in tied:
        parameter: Any = model.get_parameter(first)
        for name in others:
            other: Any = model.get_parameter(name)
            if other.placements != parameter.placements:
                raise UsageError(
                    f"distributed.tp: {first} and {name} are one weight, and the plan of"
                    f" {type(model).__name__} splits them differently",
                    hint="Set model.tie_word_embeddings to false, or leave distributed.tp at 1.",
                )
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).register_parameter(own, parameter)


def _require_even(model: torch.nn.Module, size: int) -> None:
    """Refuse a split whose parts are not all of one size."""
    for name, parameter in model.named_parameters():
        for placement in parameter.placements:  # type: ignore[attr-defined]
            if placement.is_shard() and parameter.shape[placement.dim] % size:
                axis = "columns" if placement.dim else "rows"
                raise UsageError(
                    f"distributed.tp ({size}) does not divide the"
                    f" {parameter.shape[placement.dim]:,} {axis} of {name}",
                    hint="Change that size in the section [model] (model.vocab_size may be larger"
                    " than the data's), or distributed.tp.",
                )


def require_same_gradients(model: torch.nn.Module, mesh: Any, ranks: Ranks) -> None:
    """Refuse, on all `ranks`, a plan by which what is whole has another gradient on each rank."""

    def compare() -> None:
        for name, parameter in model.named_parameters():
            gradient: Any = parameter.grad
            if gradient is None or not gradient.placements[-1].is_replicate():
                continue
            # The group's ranks hold the same part of it, so they come to the same answer.
            least, most = gradient.to_local().clone(), gradient.to_local().clone()
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group())
            dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
            largest = torch.maximum(least.abs(), most.abs())
            if most.numel() and bool((most - least).max() > _SAME * largest.max()):
                raise UsageError(
                    f"distributed.tp: the model's plan leaves {name} whole, and"
                    " its gradient is another on each rank: it would train as no single rank does",
                    hint="Leave distributed.tp at 1, and tell the authors of the plan.",
                )

    together(ranks, "gradients", compare)
