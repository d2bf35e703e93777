"""Schedule-free AdamW: what is trained, what is evaluated, what is saved and what is exported."""

import threading

import pytest
import torch

from keepstep.config.schema import SCHEDULE_FREE, OptimizerConfig, ScheduleConfig
from keepstep.optim.averaged import load_averaged
from keepstep.optim.optimizer import build_optimizer
from keepstep.optim.schedule import build_schedule
from keepstep.state.training_state import TrainingState
from keepstep.store import Store, list_checkpoints, load_state, staging

ROWS = 80


class Tied(torch.nn.Module):
    """Large enough to be copied after a save returned; its output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(9, ROWS)
        self.hidden = torch.nn.Linear(ROWS, ROWS)
        self.unused = torch.nn.Linear(3, 3)
        self.out = torch.nn.Linear(ROWS, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.hidden(self.embed(ids)))


def made(**options) -> TrainingState:
    model = Tied()
    config = OptimizerConfig(name=SCHEDULE_FREE, rate=0.01, **options)
    return TrainingState(model=model, optimizer=build_optimizer(config, model))


def advance(state, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        state.optimizer.zero_grad()
        state.model(torch.randint(0, 9, (5,))).square().mean().backward()
        state.optimizer.step()


def weights(state):
    return {name: value.clone() for name, value in state.model.state_dict().items()}


def evaluated(state):
    with state.averaged(before=lambda: None):
        return weights(state)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def saved(state, folder, **options):
    with Store(folder, **options) as store:
        store.save({**state.capture()}, step=1, must_match={"optimizer.name": SCHEDULE_FREE})
    return list_checkpoints(folder)[0]


def test_an_evaluation_sees_the_average_and_changes_no_bit_of_what_is_trained():
    state, other = made(), made()
    for step in range(6):
        advance(state, step, step + 1)
        advance(other, step, step + 1)
        trained = weights(state)
        average = evaluated(state)
        assert_same(weights(state), trained)
        assert not torch.equal(average["hidden.weight"], trained["hidden.weight"]) or step == 0
    assert_same(weights(state), weights(other))
    assert (
        state.optimizer.state_dict()["schedulefree_adamw"]["groups"]
        == (other.optimizer.state_dict()["schedulefree_adamw"]["groups"])
    )


def test_the_average_is_that_of_the_paper():
    """x is the mean of all z, weighted by the square of the largest rate so far."""
    state = made()
    part = state.optimizer._parts[SCHEDULE_FREE]
    past, rates = [], [0.25, 0.5, 0.75, 1.0, 1.0]
    for step, factor in enumerate(rates):
        state.optimizer.set_factor(factor)
        advance(state, step, step + 1)
        past.append(part.state[state.model.hidden.weight]["z"].double().clone())
    shares = torch.tensor([rate**2 for rate in rates], dtype=torch.float64)
    mean = (torch.stack(past) * shares[:, None, None]).sum(0) / shares.sum()
    torch.testing.assert_close(evaluated(state)["hidden.weight"].double(), mean, atol=1e-6, rtol=0)


def test_an_evaluation_that_fails_leaves_the_trained_weights():
    state = made()
    advance(state, 0, 3)
    trained = weights(state)
    with pytest.raises(RuntimeError, match="a peer is gone"), state.averaged(before=lambda: None):
        raise RuntimeError("a peer is gone")
    assert_same(weights(state), trained)
    advance(state, 3, 4)


@pytest.mark.parametrize("layout", ["folders", "files"])
def test_what_is_used_of_a_checkpoint_has_the_bits_that_were_evaluated(tmp_path, layout):
    state = made()
    advance(state, 0, 4)
    entry = saved(state, tmp_path, layout=layout)
    assert_same(load_state(entry.path)["model"], weights(state))
    assert_same(load_averaged(entry, only="model")["model"], evaluated(state))
    whole = load_averaged(entry)
    assert_same(whole["model"], evaluated(state))
    tied = whole["model"]
    assert tied["embed.weight"].data_ptr() == tied["out.weight"].data_ptr()
    groups = whole["optimizer"][SCHEDULE_FREE]["groups"]
    assert [group["train_mode"] for group in groups] == [False, False]
    assert set(load_averaged(entry, only="counters")) == {"counters"}


def test_a_whole_state_in_evaluation_goes_on_in_the_library_alone(tmp_path):
    """What `export --format pth` writes is what the library asks to be saved: after `eval()`."""
    from schedulefree import AdamWScheduleFree

    state = made()
    advance(state, 0, 4)
    whole = load_averaged(saved(state, tmp_path))
    model = Tied()
    model.load_state_dict(whole["model"])
    named = dict(model.named_parameters())
    part = whole["optimizer"][SCHEDULE_FREE]
    groups = [
        {**group, "params": [named[name] for name in group.pop("parameters")]}
        for group in part["groups"]
    ]
    alone = AdamWScheduleFree(groups, lr=0.01)
    for name, entries in part["state"].items():
        alone.state[named[name]] = entries
    alone.train()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights(state)[name], atol=1e-7, rtol=1e-5)


def test_a_save_in_flight_has_copied_before_an_evaluation_swaps_the_weights(tmp_path, monkeypatch):
    held, copy = threading.Event(), staging.Cut.copy

    def late(cut):
        held.wait(1.0)
        return copy(cut)

    monkeypatch.setattr(staging.Cut, "copy", late)
    state = made()
    advance(state, 0, 3)
    cut = weights(state)
    with Store(tmp_path) as store:
        store.restore()
        store.save(state.capture(), step=3, wait=False)
        with state.averaged(before=store.fence):
            # Had the swap not waited, the writer would see it.
            held.set()
            assert store.collect().manifest.step == 3
    assert_same(load_state(tmp_path / "step_3")["model"], cut)


def test_another_beta1_keeps_the_average_and_is_told():
    state, other = made(beta1=0.9), made(beta1=0.8)
    advance(state, 0, 4)
    other.model.load_state_dict(state.model.state_dict())
    told = other.optimizer.load_state_dict(state.optimizer.state_dict())
    assert told == [f"{SCHEDULE_FREE}.betas: (0.9, 0.95) -> (0.8, 0.95)"]
    for name, value in evaluated(state).items():
        torch.testing.assert_close(evaluated(other)[name], value, atol=1e-7, rtol=1e-5)
    gap = (weights(other)["hidden.weight"] - weights(state)["hidden.weight"]).abs().max()
    assert gap > 1e-4
    advance(other, 4, 5)


def test_the_schedules_warm_up_is_the_librarys_own():
    from schedulefree import AdamWScheduleFree

    state, model = made(weight_decay=0.0), Tied()
    alone = AdamWScheduleFree(
        [p for _, p in model.named_parameters()], lr=0.01, betas=(0.9, 0.95), warmup_steps=3
    )
    alone.train()
    schedule = build_schedule(ScheduleConfig(name="constant", warmup_steps=3), 8)
    for step in range(8):
        state.optimizer.set_factor(schedule(step))
        advance(state, step, step + 1)
        torch.manual_seed(step)
        alone.zero_grad()
        model(torch.randint(0, 9, (5,))).square().mean().backward()
        alone.step()
    assert_same(weights(state), dict(model.state_dict()))


def test_an_optimizer_without_an_average_evaluates_what_it_trains_and_waits_for_nothing():
    model = Tied()
    state = TrainingState(model=model, optimizer=build_optimizer(OptimizerConfig(), model))
    waited = []
    with state.averaged(before=lambda: waited.append(1)):
        assert_same(weights(state), dict(model.state_dict()))
    assert waited == []
