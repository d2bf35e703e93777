"""Optimizer state: out by name, back in bit for bit, in this process and in a fresh one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.state.optimizer_state import names_of, restore_state, state_by_name
from keepstep.store import Store, list_checkpoints, load_state

RULES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
}

# Takes updates `first` to `last - 1` of a model for each optimizer, in a process of its own. It
# goes on from the newest checkpoint of the folder where there is one.
SESSION = """
import sys
import torch
from keepstep.config.schema import OptimizerConfig
from keepstep.optim.optimizer import build_optimizer
from keepstep.store import Store

first, last, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def session(name):
    torch.manual_seed(first)  # a session that continues begins with other weights
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
    )
    optimizer = build_optimizer(OptimizerConfig(name=name, rate=0.01), model)
    with Store(f"{folder}/{name}", keep_last_n=0) as store:
        restored = store.restore()
        assert (restored is not None) == (first > 0)
        if restored is not None:
            model.load_state_dict(restored.state["model"])
            assert optimizer.load_state_dict(restored.state["optimizer"]) == []
        for step in range(first, last):
            torch.manual_seed(step)
            optimizer.set_factor(1 / (step + 1))
            loss = model(torch.randint(0, 7, (5,))).pow(2).sum() * (step + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=last)

for name in ("adamw", "sgd", "muon", "lion", "schedulefree_adamw"):
    session(name)
"""


def session(first: int, last: int, folder: Path) -> None:
    words = [sys.executable, "-c", SESSION, str(first), str(last), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_fresh_process_goes_on_as_one_that_was_never_interrupted(tmp_path):
    session(0, 6, tmp_path / "whole")
    session(0, 2, tmp_path / "cut")
    session(2, 6, tmp_path / "cut")
    for name in (*RULES, "lion", "schedulefree_adamw"):
        whole, cut = (
            list_checkpoints(tmp_path / folder / name)[-1].manifest for folder in ("whole", "cut")
        )
        assert [whole.step, cut.step] == [6, 6]
        assert [tensor.name for tensor in whole.tensors if ".state." in tensor.name]
        assert whole.tensors == cut.tensors, name  # digests of every piece among them
        assert whole.plain == cut.plain, name


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4, bias=False).to(dtype)


def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=model.weight.dtype)).float().pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", RULES)
def test_state_that_was_restored_gives_the_same_next_updates(name):
    model, other = linear(), linear()
    optimizer, fresh = RULES[name](model.parameters()), RULES[name](other.parameters())
    advance(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    saved = state_by_name(optimizer, names_of(model))
    restore_state(fresh, names_of(other), saved, saved_parameters=["weight"])
    advance(model, optimizer, 3)
    advance(other, fresh, 3)
    assert torch.equal(model.weight, other.weight)


def test_state_is_kept_by_name_in_torchs_own_words():
    model = linear()
    optimizer = RULES["adamw"](model.parameters())
    assert state_by_name(optimizer, names_of(model)) == {}
    advance(model, optimizer, 2)
    saved = state_by_name(optimizer, names_of(model))
    assert set(saved) == {"weight"}
    assert set(saved["weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["weight"]["exp_avg"] is optimizer.state[model.weight]["exp_avg"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_moment_of_another_type_than_its_parameters_keeps_it(dtype):
    model = linear(torch.bfloat16)
    optimizer = RULES["sgd"](model.parameters())
    moment = torch.full((4, 3), 1 / 3, dtype=dtype)
    saved = {"weight": {"momentum_buffer": moment}}
    restore_state(optimizer, names_of(model), saved, saved_parameters=["weight"])
    found = optimizer.state[model.weight]["momentum_buffer"]
    assert found.dtype == dtype
    assert torch.equal(found, moment)


def test_a_moment_takes_the_layout_of_its_parameter_and_no_memory_of_the_saved_one():
    model = linear()
    model.weight = torch.nn.Parameter(torch.randn(3, 4).t())
    optimizer = RULES["sgd"](model.parameters())
    moment = torch.randn(4, 3)
    saved = {"weight": {"momentum_buffer": moment, "note": "plain"}}
    restore_state(optimizer, names_of(model), saved, saved_parameters=["weight"])
    found = optimizer.state[model.weight]
    assert found["momentum_buffer"].stride() == model.weight.stride() == (1, 4)
    assert torch.equal(found["momentum_buffer"], moment)
    assert found["momentum_buffer"].data_ptr() != moment.data_ptr()
    assert found["note"] == "plain"


class Odd(torch.optim.Optimizer):
    """Keeps state of many forms, and uses all of it."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["past"] = [torch.zeros_like(p), torch.zeros_like(p)]
                state["rows"] = {"mean": torch.zeros(p.shape[0], 1), "bound": {"most": 1.0}}
                state["count"], state["warm"], state["pair"] = torch.tensor(0), False, (0.5, None)
            past, rows = state["past"], state["rows"]
            past[0].mul_(state["pair"][0]).add_(p.grad)
            past[1].add_(past[0] * state["count"])
            rows["mean"].lerp_(p.grad.mean(1, keepdim=True), 0.3)
            rows["bound"]["most"] = max(rows["bound"]["most"], p.grad.abs().max().item())
            state["count"] += 1
            size = 0.1 if state["warm"] else 0.01
            p -= size * (past[0] + past[1] + rows["mean"]) / rows["bound"]["most"]
            state["warm"] = True


def test_an_optimizer_of_ones_own_keeps_state_of_any_form_through_a_checkpoint(tmp_path):
    model, other = linear(), linear()
    optimizer, fresh = Odd(model.parameters()), Odd(other.parameters())
    advance(model, optimizer, 3)
    with Store(tmp_path) as store:
        saved = {"model": model.state_dict(), "state": state_by_name(optimizer, names_of(model))}
        path = store.save(saved, step=3).path
    state = load_state(path)
    other.load_state_dict(state["model"])
    restore_state(fresh, names_of(other), state["state"], saved_parameters=["weight"])
    for inner in (state["state"]["weight"]["past"][0], state["state"]["weight"]["rows"]["mean"]):
        inner.fill_(9)  # What was restored shares no memory with it.
    advance(model, optimizer, 3)
    advance(other, fresh, 3)
    assert torch.equal(model.weight, other.weight)
    (mine,), (theirs,) = optimizer.state.values(), fresh.state.values()
    assert mine["rows"]["bound"] == theirs["rows"]["bound"]
    assert mine["count"] == theirs["count"] == 6


@pytest.mark.parametrize("name", ["Adafactor", "Adam", "RMSprop", "NAdam"])
def test_other_optimizers_of_torch_go_on_as_if_never_interrupted(name):
    model, other = linear(), linear()
    rule = getattr(torch.optim, name)
    optimizer, fresh = rule(model.parameters(), lr=0.01), rule(other.parameters(), lr=0.01)
    advance(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    saved = state_by_name(optimizer, names_of(model))
    restore_state(fresh, names_of(other), saved, saved_parameters=["weight"])
    advance(model, optimizer, 3)
    advance(other, fresh, 3)
    assert torch.equal(model.weight, other.weight)


def test_what_the_optimizer_held_before_is_gone():
    model = linear()
    optimizer = RULES["adamw"](model.parameters())
    advance(model, optimizer, 2)
    restore_state(optimizer, names_of(model), {}, saved_parameters=["weight"])
    assert state_by_name(optimizer, names_of(model)) == {}


@pytest.mark.parametrize(
    ("saved", "parameters", "message"),
    [
        ({"weight": {}, "gone": {}}, ["weight", "gone"], r"no parameter for \['gone'\]"),
        ({"gone": {"step": 1}}, ["weight"], r"no parameter for \['gone'\]"),
        ({}, ["weight", "gone"], r"no parameter for \['gone'\]"),
        ({}, [], r"nothing saved for \['weight'\]"),
        ({"weight": {"exp_avg": torch.zeros(3, 4)}}, ["weight"], r"'exp_avg' of weight .*\(3, 4\)"),
        ({"weight": {"exp_avg": torch.tensor(0.0)}}, ["weight"], r"'exp_avg' of weight .*\(\)"),
        ({"weight": {"step": torch.zeros(2)}}, ["weight"], r"'step' of weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_changes_nothing(saved, parameters, message):
    model = linear()
    optimizer = RULES["adamw"](model.parameters())
    advance(model, optimizer, 1)
    before = dict(optimizer.state[model.weight])
    with pytest.raises(CheckpointDamaged, match=message):
        restore_state(optimizer, names_of(model), saved, saved_parameters=parameters)
    after = optimizer.state[model.weight]
    assert all(after[key] is value for key, value in before.items())


def test_frozen_and_unused_parameters_have_no_state_and_that_is_fine():
    model, other = (torch.nn.ModuleDict({"used": linear(), "unused": linear()}) for _ in range(2))
    for one in (model, other):
        one.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    wanted = ["used.weight", "unused.weight"]
    optimizer, fresh = (
        RULES["adamw"]([p for p in one.parameters() if p.requires_grad]) for one in (model, other)
    )
    advance(model["used"], optimizer, 1)
    saved = state_by_name(optimizer, names_of(model))
    assert set(saved) == {"used.weight"}
    restore_state(fresh, names_of(other), saved, saved_parameters=wanted)
    assert set(state_by_name(fresh, names_of(other))) == {"used.weight"}


def test_a_tied_parameter_has_its_first_name_only():
    model = torch.nn.ModuleDict({"a": linear(), "b": linear()})
    model["b"].weight = model["a"].weight
    assert list(names_of(model).values()) == ["a.weight"]
