"""Updates of the parts of a tensor: the bits of an update of all of it."""

import pytest
import torch

from keepstep.config.schema import OptimizerConfig
from keepstep.optim.optimizer import build_optimizer
from tests.unit.optim.test_optimizer import Model, advance

# Parts of which no kernel's width is a divisor.
ROWS, ROWS_OF_A_PART, COLUMNS = 96, 3, 7


class Weights(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.matrix = torch.nn.Parameter(values.clone())
        self.vector = torch.nn.Parameter(values[:, 0].clone())


def updated(name, rows, *, ordered):
    """Return the weights of some rows after three updates, as a shard of so many rows has them."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4, ROWS, COLUMNS, generator=generator)
    model = Weights(values[0, rows])
    optimizer = build_optimizer(OptimizerConfig(name=name, rate=0.03), model, ordered=ordered)
    for gradient in values[1:, rows]:
        model.matrix.grad, model.vector.grad = gradient.clone(), gradient[:, 1].clone()
        optimizer.step()
    return torch.cat([model.matrix.detach(), model.vector.detach()[:, None]], 1)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "schedulefree_adamw"])
def test_every_lane_rounds_alike(name):
    parts = [
        updated(name, slice(first, first + ROWS_OF_A_PART), ordered=True)
        for first in range(0, ROWS, ROWS_OF_A_PART)
    ]
    whole = updated(name, slice(None), ordered=True)
    assert torch.equal(torch.cat(parts).view(torch.int32), whole.view(torch.int32))
    torch.testing.assert_close(whole, updated(name, slice(None), ordered=False))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion", "schedulefree_adamw"])
def test_no_kernel_takes_a_list_of_tensors(name):
    optimizer = build_optimizer(OptimizerConfig(name=name), Model(), ordered=True)
    for part in optimizer._parts.values():
        for group in part.param_groups:
            assert not group.get("foreach")
            assert not group.get("fused")


def test_muon_is_torchs_own_bit_for_bit_and_takes_over_its_state():
    config, models = OptimizerConfig(name="muon", rate=0.01), [Model(), Model()]
    plain, ordered = (build_optimizer(config, m, ordered=m is models[1]) for m in models)
    advance(models[0], plain, 2)
    advance(models[1], ordered, 2)
    ordered.load_state_dict(plain.state_dict())
    models[1].load_state_dict(models[0].state_dict())
    for step in (2, 3):
        advance(models[0], plain, 1, first=step)
        advance(models[1], ordered, 1, first=step)
        hidden = [model.hidden.weight for model in models]
        assert torch.equal(*hidden)
