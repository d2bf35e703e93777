"""Optimizers: state by name into a fresh object, bit for bit."""

import pytest
import torch

from keepstep.config.schema import OptimizerConfig
from keepstep.errors import CheckpointDamaged, UsageError
from keepstep.optim.optimizer import build_optimizer


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.unused = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.to(dtype)

    def forward(self, ids):
        return self.norm(self.hidden(self.embed(ids))).float().pow(2).mean()


def advance(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        optimizer.set_factor(1 / (step + 1))
        loss = model(torch.randint(0, 7, (5,))) * (step + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def through_a_checkpoint(tmp_path, state):
    from keepstep.store import Store, load_state

    with Store(tmp_path / "store") as store:
        saved = store.save(state, step=1)
    return load_state(saved.path)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion", "schedulefree_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 3])
def test_a_fresh_optimizer_goes_on_as_the_old_one_would(tmp_path, name, dtype, before):
    config = OptimizerConfig(name=name, rate=0.01)
    model, fresh_model = Model(dtype), Model(dtype)
    optimizer = build_optimizer(config, model)
    advance(model, optimizer, before)
    saved = through_a_checkpoint(
        tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    fresh_model.load_state_dict(saved["model"])
    fresh = build_optimizer(config, fresh_model)
    assert fresh.load_state_dict(saved["optimizer"]) == []
    advance(model, optimizer, 3, first=before)
    advance(fresh_model, fresh, 3, first=before)
    for (key, one), (_, other) in zip(
        model.state_dict().items(), fresh_model.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), key


def test_a_wider_moment_of_a_narrow_parameter_keeps_its_type():
    model, other = Model(torch.bfloat16), Model(torch.bfloat16)
    optimizer = build_optimizer(OptimizerConfig(), model)
    advance(model, optimizer, 1)
    part = optimizer._parts["adamw"]
    wide = torch.full_like(model.hidden.weight, 1 / 3, dtype=torch.float32)
    part.state[model.hidden.weight]["exp_avg"] = wide
    fresh = build_optimizer(OptimizerConfig(), other)
    fresh.load_state_dict(optimizer.state_dict())
    found = fresh._parts["adamw"].state[other.hidden.weight]["exp_avg"]
    assert found.dtype == torch.float32
    assert torch.equal(found, wide)


def test_state_without_a_place_and_a_parameter_without_its_state_are_errors():
    model = Model()
    optimizer = build_optimizer(OptimizerConfig(), model)
    advance(model, optimizer, 1)
    smaller, larger = Model(), Model()
    del smaller.hidden
    with pytest.raises(CheckpointDamaged, match=r"no parameter for \['hidden\.bias'"):
        build_optimizer(OptimizerConfig(), smaller).load_state_dict(optimizer.state_dict())
    larger.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointDamaged, match=r"nothing saved for \['extra\.bias'"):
        build_optimizer(OptimizerConfig(), larger).load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointDamaged, match="AdamW"):
        build_optimizer(OptimizerConfig(name="sgd"), model).load_state_dict(optimizer.state_dict())


def test_the_configs_settings_win_and_the_differences_are_told():
    model = Model()
    optimizer = build_optimizer(OptimizerConfig(rate=0.1, weight_decay=0.3), model)
    advance(model, optimizer, 1)
    fresh = build_optimizer(OptimizerConfig(rate=0.2, weight_decay=0.3, beta2=0.5), model)
    changes = fresh.load_state_dict(optimizer.state_dict())
    assert "adamw.peak_rate: 0.1 -> 0.2" in changes
    assert "adamw.betas: (0.9, 0.95) -> (0.9, 0.5)" in changes
    assert len(changes) == 2
    fresh.set_factor(0.5)
    assert fresh.rate == 0.1


def test_matrices_are_decayed_and_muon_leaves_embeddings_to_adamw():
    model = Model()
    groups = build_optimizer(OptimizerConfig(), model).state_dict()["adamw"]["groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert "norm.weight" in groups[1]["parameters"]
    muon = build_optimizer(OptimizerConfig(name="muon"), model).state_dict()
    assert muon["muon"]["groups"][0]["parameters"] == ["hidden.weight", "unused.weight"]
    assert "embed.weight" in muon["adamw"]["groups"][0]["parameters"]
    assert not any("frozen" in str(part) for part in muon.values())


def test_saving_runs_no_step():
    model = Model()
    optimizer = build_optimizer(OptimizerConfig(), model)
    before = [p.clone() for p in model.parameters()]
    assert optimizer.state_dict()["adamw"]["state"] == {}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_each_part_has_its_own_peak_and_all_follow_the_schedule():
    optimizer = build_optimizer(OptimizerConfig(name="muon", rate=0.02, adamw_rate=0.004), Model())
    optimizer.set_factor(0.5)
    optimizer.set_factor(0.25)
    rates = {
        name: {group["lr"] for group in part.param_groups}
        for name, part in optimizer._parts.items()
    }
    assert rates == {"muon": {0.005}, "adamw": {0.001}}
    assert optimizer.rate == 0.005


def test_a_tied_weight_is_updated_once_and_muon_leaves_the_output_layer_to_adamw():
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(8, 7, bias=False)
            self.out.weight = self.embed.weight

        def get_output_embeddings(self):
            return self.out

    for tied in (True, False):
        model = Tied()
        if not tied:
            model.out.weight = torch.nn.Parameter(torch.zeros(7, 8))
        parts = build_optimizer(OptimizerConfig(name="muon"), model).state_dict()
        names = [n for p in parts.values() for g in p["groups"] for n in g["parameters"]]
        assert len(names) == len(set(names))
        assert ("out.weight" in names) is not tied
        assert parts["muon"]["groups"][0]["parameters"] == ["hidden.weight", "unused.weight"]


def test_the_hook_runs_before_any_parameter_of_any_part_changes():
    model = Model()
    optimizer = build_optimizer(OptimizerConfig(name="muon"), model)
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def hook() -> None:
        calls.append(
            all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        )

    optimizer.register_step_pre_hook(hook)
    advance(model, optimizer, 1)
    assert calls == [True]
    assert not torch.equal(before[0], model.embed.weight)


def test_a_model_with_nothing_to_train_is_refused():
    model = Model().requires_grad_(False)
    for name in ("adamw", "sgd", "muon"):
        with pytest.raises(UsageError, match="nothing to train"):
            build_optimizer(OptimizerConfig(name=name), model)


def test_adamw_is_the_fused_one():
    groups = build_optimizer(OptimizerConfig(), Model()).state_dict()["adamw"]["groups"]
    assert all(group["fused"] for group in groups)


def test_a_saved_state_that_was_loaded_is_not_shared():
    model, other = Model(), Model()
    optimizer = build_optimizer(OptimizerConfig(), model)
    advance(model, optimizer, 2)
    fresh = build_optimizer(OptimizerConfig(), other)
    fresh.load_state_dict(optimizer.state_dict())
    advance(other, fresh, 1, first=2)
    state = optimizer.state_dict()["adamw"]["state"]["hidden.weight"]
    assert state["step"].item() == 2
    assert fresh.state_dict()["adamw"]["state"]["hidden.weight"]["step"].item() == 3


def test_one_update_changes_every_parameter_that_has_a_gradient():
    for name in ("adamw", "sgd", "muon", "lion", "schedulefree_adamw"):
        model = Model()
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        advance(model, build_optimizer(OptimizerConfig(name=name), model), 1)
        same = {key for key, p in model.named_parameters() if torch.equal(before[key], p)}
        assert same == {"unused.weight", "unused.bias", "frozen"}, name


def test_other_groups_of_the_same_parameters_are_told():
    model = Model()
    saved = build_optimizer(OptimizerConfig(), model).state_dict()
    groups = saved["adamw"]["groups"]
    together = {**groups[0], "parameters": groups[0]["parameters"] + groups[1]["parameters"]}
    saved["adamw"]["groups"] = [together]
    changes = build_optimizer(OptimizerConfig(), model).load_state_dict(saved)
    assert changes == ["adamw: 1 groups of parameters -> 2"]


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion", "schedulefree_adamw"])
def test_the_bytes_to_come_are_those_that_the_first_update_makes(name):
    model = Model()
    model.unused.requires_grad_(False)
    optimizer = build_optimizer(OptimizerConfig(name=name), model)
    told = optimizer.bytes_to_come()
    advance(model, optimizer, 1)
    assert told == sum(
        value.nbytes
        for part in optimizer.state_dict().values()
        for entries in part["state"].values()
        for key, value in entries.items()
        if key != "step"
    )
    assert optimizer.bytes_to_come() == 0
