"""What an optimizer keeps in its groups: state comes back, hyper-parameters are the config's."""

import math

import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.optim.optimizer import Optimizer
from keepstep.state.optimizer_state import hyperparameters_of
from keepstep.store import Store, load_state


class Searching(torch.optim.Optimizer):
    """Finds its own rate, as Prodigy does: all of its state is in the groups."""

    def __init__(self, parameters, lr=0.1, power=2.0) -> None:
        super().__init__(parameters, {"lr": lr, "power": power})
        for group in self.param_groups:
            group["found"], group["past"] = torch.zeros(2), [math.inf]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
            for p in group["params"]:
                group["found"] += p.grad.abs().mean() ** group["power"]
                group["past"].append(p.grad.abs().max().item())
                size = group["lr"] * group["found"][0] / group["updates"] / group["past"][-1]
                p -= size * p.grad


def made(split=1, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:split]}, {"params": parameters[split:]}]
    return model, Optimizer({"searching": Searching(groups, **options)}, model=model)


def advance(model, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def saved_after(updates, folder):
    model, optimizer = made()
    advance(model, optimizer, 0, updates)
    with Store(folder) as store:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = store.save(state, step=updates).path
    return model, optimizer, load_state(path)


@pytest.mark.parametrize("before", [0, 3])
def test_state_in_the_groups_comes_back_and_is_not_shared(tmp_path, before):
    model, optimizer, saved = saved_after(before, tmp_path)
    fresh_model, fresh = made()
    fresh_model.load_state_dict(saved["model"])
    assert fresh.load_state_dict(saved["optimizer"]) == []
    for group in saved["optimizer"]["searching"]["groups"]:
        group["found"].fill_(9)
        group["past"].append(9.0)
    advance(model, optimizer, before, 6)
    advance(fresh_model, fresh, before, 6)
    for one, other in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert torch.equal(one, other)
    (mine, theirs) = (one._parts["searching"].param_groups[0] for one in (optimizer, fresh))
    assert mine["past"] == theirs["past"]
    assert mine["updates"] == theirs["updates"] == 6


def test_hyperparameters_are_the_configs_and_are_told_where_they_differ(tmp_path):
    *_, saved = saved_after(2, tmp_path)
    _, fresh = made(lr=0.2, power=3.0)
    told = fresh.load_state_dict(saved["optimizer"])
    assert told == ["searching.peak_rate: 0.1 -> 0.2", "searching.power: 2.0 -> 3.0"]
    (group, _) = fresh._parts["searching"].param_groups
    assert (group["lr"], group["power"], group["updates"]) == (0.2, 3.0, 2)


def test_state_of_other_groups_has_no_place_and_changes_nothing(tmp_path):
    *_, saved = saved_after(2, tmp_path)
    _, fresh = made(split=2)
    with pytest.raises(CheckpointDamaged, match=r"\(found, past, updates\), and the groups were"):
        fresh.load_state_dict(saved["optimizer"])
    assert "updates" not in fresh._parts["searching"].param_groups[0]


def test_a_value_that_was_not_saved_is_an_error(tmp_path):
    *_, saved = saved_after(2, tmp_path)
    del saved["optimizer"]["searching"]["groups"][1]["found"]
    with pytest.raises(CheckpointDamaged, match=r"nothing was saved for \['found'\] of Searching"):
        made()[1].load_state_dict(saved["optimizer"])


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "NAdam", "RMSprop", "Adafactor"])
def test_torchs_optimizers_keep_no_state_in_their_groups(name):
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    kind = getattr(torch.optim, name)
    (group,) = kind(parameters, lr=0.1).param_groups
    assert set(group) <= hyperparameters_of(kind)


def test_of_the_libraries_what_the_constructor_does_not_take_is_state():
    from pytorch_optimizer import Lion, Prodigy
    from schedulefree import AdamWScheduleFree

    state = {"k", "train_mode", "weight_sum", "lr_max", "scheduled_lr"}
    for kind, expected in ((AdamWScheduleFree, state), (Lion, {"step"}), (Prodigy, None)):
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = kind([parameter])
        getattr(optimizer, "train", lambda: None)()
        parameter.grad = torch.ones(2, 2)
        optimizer.step()
        found = set(optimizer.param_groups[0]) - hyperparameters_of(kind)
        assert found == expected if expected else {"d", "d_max", "d_numerator"} <= found
