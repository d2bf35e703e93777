"""Which states are not finite: the one number that is not is found wherever it stands."""

import pytest
import torch

from keepstep.config.schema import OptimizerConfig
from keepstep.optim.optimizer import build_optimizer
from keepstep.state.training_state import TrainingState

NAN, INF = float("nan"), float("inf")


def trained(name="adamw", dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(dtype)
    model.register_buffer("mask", torch.full((3,), -INF))
    model.register_buffer("empty", torch.empty(0))
    state = TrainingState(model=model, optimizer=build_optimizer(OptimizerConfig(name=name), model))
    model(torch.randn(4, 8, dtype=dtype)).square().mean().backward()
    state.optimizer.step()
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_number_of_a_weight_is_found_and_named(dtype, value):
    state = trained(dtype=dtype)
    assert state.not_finite() == ""
    weight = state.model.state_dict()["0.weight"]
    weight[3, 5] = value
    assert state.not_finite() == "model.0.weight"


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion", "schedulefree_adamw"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_one_number_of_any_moment_is_found_and_named(name, value):
    state = trained(name)
    assert state.not_finite() == ""
    moments = [
        (f"optimizer.{part}.state.{parameter}.{key}", tensor)
        for part, one in state.optimizer.state_dict().items()
        for parameter, entries in one["state"].items()
        for key, tensor in entries.items()
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    ]
    assert moments
    for path, tensor in moments:
        before = tensor.flatten()[-1].item()
        tensor.view(-1)[-1] = value
        assert state.not_finite() == path
        tensor.view(-1)[-1] = before
    assert state.not_finite() == ""


def test_a_buffer_may_hold_infinity_and_no_nan():
    state = trained()
    state.model.mask[1] = INF
    assert state.not_finite() == ""
    state.model[1].running_var[2] = NAN
    assert state.not_finite() == "model.1.running_var"
