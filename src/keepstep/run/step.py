"""One step: forward, backward, the agreement, and the update if everything is finite.

Guarantees:
1. Random numbers are set at the start of the step from (seed, rank, step): what ran before, an
   evaluation or a resume, leaves no trace in them. With `train.deterministic_reduction` they are
   set for each micro-batch, from its place in the global batch.
2. The loss and the gradient norm are looked at before the update: weights and moments are never
   poisoned. A step that is not finite counts its batch and changes nothing else.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from keepstep.distributed.agree import StepFacts, agree
from keepstep.distributed.ordered import TreeSum, norm_of_whole
from keepstep.distributed.shard import reduce_gradients, whole
from keepstep.errors import UsageError
from keepstep.run.run import Run
from keepstep.state.rng import seed_everything
from keepstep.state.training_state import TrainingState

if TYPE_CHECKING:
    from keepstep.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found; `agreed` is what all ranks know at its end."""

    loss: float
    grad_norm: float
    rate: float
    agreed: StepFacts

    @property
    def applied(self) -> bool:
        """Whether the optimizer's update was made."""
        return not self.agreed.nonfinite


def take_step(task: "Task", batch: "Batch", state: TrainingState, run: Run) -> StepResult:
    """Take one step with `batch` and count it."""
    counters = state.counters
    seed_everything(run.config.run.seed, "step", run.layout.data_index, counters.step)
    buffers = [(buffer, buffer.clone()) for buffer in _floating_buffers(state.model)]
    ordered = run.config.train.deterministic_reduction
    backward = _backward_in_order if ordered else _backward
    loss_tensors = backward(task, batch, state, run)
    if ordered:
        _require_unchanged(buffers)
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    norm_tensor = norm_of_whole(gradients) if ordered else whole(get_total_norm(gradients))
    # One transfer for all numbers: on a GPU each of its own would wait for the device.
    *losses, norm = torch.stack([x.float() for x in (*loss_tensors, norm_tensor)]).tolist()
    loss = sum(losses) / len(losses)
    run.clock.look(saving=run.store.is_saving)
    agreed = agree(
        run.group,
        StepFacts(
            nonfinite=not (math.isfinite(loss) and math.isfinite(norm)),
            stop=run.stop.requested,
            save=run.save_requested or run.clock.save_is_due,
            busy=run.store.is_busy(),
            loss=loss,
            losses=_at_their_places(losses, run) if ordered else (),
        ),
    )
    state.optimizer.set_factor(
        run.schedule(counters.updates)
        * run.config.nonfinite.rollback_rate_factor**counters.rollbacks
    )
    rate = state.optimizer.rate
    if not agreed.nonfinite:
        if run.config.train.grad_clip > 0:
            clip_grads_with_norm_(state.model.parameters(), run.config.train.grad_clip, norm_tensor)
        run.store.fence()
        state.optimizer.step()
        counters.updates += 1
    else:
        # A running mean is updated in the forward pass, and would carry the nan from here on.
        for buffer, before in buffers:
            buffer.copy_(before)
    state.optimizer.zero_grad()
    counters.skips_in_a_row = counters.skips_in_a_row + 1 if agreed.nonfinite else 0
    counters.step += 1
    counters.samples += batch.samples
    counters.tokens += batch.tokens
    return StepResult(loss=agreed.loss, grad_norm=norm, rate=rate, agreed=agreed)


def _backward(task: "Task", batch: "Batch", state: TrainingState, run: Run) -> list[torch.Tensor]:
    """Accumulate the gradient of the batch's mean loss; return the losses of its parts here."""
    share = 1.0 / len(batch.micro_batches)
    losses = []
    for number, micro_batch in enumerate(batch.micro_batches, 1):
        reduce_gradients(state.model, now=number == len(batch.micro_batches))
        with autocast(run):
            loss = task.loss(state.model, _on_device(micro_batch, run.device))
        torch.autograd.backward(loss * share)
        losses.append(loss.detach())
    return losses


def _backward_in_order(
    task: "Task", batch: "Batch", state: TrainingState, run: Run
) -> list[torch.Tensor]:
    """Do as `_backward`, with the same bits on any number of ranks."""
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    ranks = run.layout.data_ranks
    places = range(run.layout.data_index, ranks * len(batch.micro_batches), ranks)
    tree, losses = TreeSum(), []
    for place, micro_batch in zip(places, batch.micro_batches, strict=True):
        seed_everything(run.config.run.seed, "step", place, state.counters.step)
        with autocast(run):
            loss = task.loss(state.model, _on_device(micro_batch, run.device))
        torch.autograd.backward(loss)
        tree.add([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        losses.append(loss.detach())
    share = 1.0 / (ranks * len(losses))
    for parameter, gradient in zip(parameters, tree.total(), strict=True):
        parameter.grad = None if gradient is None else gradient.mul_(share)
    return losses


def _at_their_places(losses: list[float], run: Run) -> tuple[float, ...]:
    """Return the losses of the global batch's micro-batches, 0 for those of other ranks."""
    ranks = run.layout.data_ranks
    all_losses = [0.0] * (ranks * len(losses))
    all_losses[run.layout.data_index :: ranks] = losses
    return tuple(all_losses)


def _require_unchanged(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Refuse a forward pass that leaves something in the model: ranks see other samples."""
    if not all(torch.equal(buffer, before) for buffer, before in buffers):
        raise UsageError(
            "train.deterministic_reduction: the model keeps a running mean in a buffer, which would"
            " be that of each rank's own samples",
            hint="Use a normalisation without running means, or turn the option off.",
        )


def _floating_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def autocast(run: Run) -> contextlib.AbstractContextManager[Any]:
    """Return the precision of the forward pass as a context."""
    if run.config.train.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(run.device.type, dtype=torch.bfloat16)


def _on_device(micro_batch: Any, device: torch.device) -> Any:
    if isinstance(micro_batch, torch.Tensor):
        return micro_batch.to(device, non_blocking=True)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in micro_batch.items()}
