"""One step on a real model: what a step that is not finite leaves."""

from types import SimpleNamespace

import pytest
import torch

from keepstep.config.schema import NonfiniteConfig, OptimizerConfig, RunConfig, TrainConfig
from keepstep.distributed.group import Group
from keepstep.distributed.mesh import Layout
from keepstep.errors import UsageError
from keepstep.optim.optimizer import build_optimizer
from keepstep.run.step import take_step
from keepstep.state.training_state import TrainingState
from keepstep.tasks.task import Batch


class NormTask:
    """A batch normalisation under a linear layer; its loss is that of the inputs."""

    def loss(self, model, micro_batch):
        return model(micro_batch).square().mean()


def state_and_run(**train):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    state = TrainingState(model=model, optimizer=build_optimizer(OptimizerConfig(), model))
    run = SimpleNamespace(
        config=SimpleNamespace(
            run=RunConfig(), train=TrainConfig(**train), nonfinite=NonfiniteConfig()
        ),
        group=Group(rank=0, world_size=1, local_rank=0),
        layout=Layout(),
        device=torch.device("cpu"),
        stop=SimpleNamespace(requested=False),
        save_requested=False,
        schedule=lambda _update: 1.0,
        store=SimpleNamespace(fence=lambda: None, is_busy=lambda: False, is_saving=False),
        clock=SimpleNamespace(look=lambda saving: None, save_is_due=False),
    )
    return state, run


def test_a_step_that_is_not_finite_changes_no_weight_no_moment_and_no_running_mean():
    state, run = state_and_run()
    good = Batch(micro_batches=(torch.randn(4, 3),), samples=4, tokens=0)
    assert take_step(NormTask(), good, state, run).applied
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    bad = Batch(micro_batches=(torch.full((4, 3), float("nan")),), samples=4, tokens=0)
    result = take_step(NormTask(), bad, state, run)
    assert not result.applied
    for name, value in state.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue  # A count of batches: this one counts.
        assert torch.equal(value, before[name]), name
    assert (state.counters.step, state.counters.updates, state.counters.samples) == (2, 1, 8)


def test_a_model_that_keeps_a_running_mean_has_no_fixed_order():
    state, run = state_and_run(deterministic_reduction=True, micro_batch=4)
    batch = Batch(micro_batches=(torch.randn(4, 3),), samples=4, tokens=0)
    with pytest.raises(UsageError, match="the model keeps a running mean"):
        take_step(NormTask(), batch, state, run)
