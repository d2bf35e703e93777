"""What a save that returns at once stores: the state at the cut, or it fails loudly."""

import threading

import pytest
import torch

from keepstep.errors import SaveFailed
from keepstep.store import Store, list_checkpoints, load_state, staging

ROWS = 100


class Training:
    """A model and an optimizer with state, both large enough to be copied later."""

    def __init__(self, kind="adamw", **options):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(ROWS, ROWS), torch.nn.Linear(ROWS, ROWS))
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        self.optimizer = kinds[kind](self.model.parameters(), lr=0.1, **options)
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, ROWS)).square().sum().backward()
        self.optimizer.step()

    def state(self):
        moments = {
            str(number): dict(self.optimizer.state[parameter])
            for number, parameter in enumerate(self.model.parameters())
        }
        return {"model": self.model.state_dict(), "moments": moments}


def copied(state):
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.detach().clone() if torch.is_tensor(state) else state


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[name], value)
        else:
            assert torch.equal(found[name], value), name


@pytest.fixture
def held(monkeypatch):
    """Hold the writer before it copies, until the event is set or 0.3 s have passed."""
    event, copy = threading.Event(), staging.Cut.copy

    def late(cut):
        event.wait(0.3)
        return copy(cut)

    monkeypatch.setattr(staging.Cut, "copy", late)
    return event


OPTIMIZERS = {
    "sgd": ("sgd", {"momentum": 0.9, "foreach": False}),
    "foreach": ("adamw", {"foreach": True}),
    "fused": ("adamw", {"fused": True}),
    "one by one": ("adamw", {"foreach": False}),
}


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_waits_at_the_fence_and_what_is_stored_is_the_cut(
    tmp_path, held, optimizer, bounded
):
    kind, options = OPTIMIZERS[optimizer]
    training = Training(kind, **options)
    with Store(tmp_path, keep_last_n=0, bounded_memory=bounded) as store:
        store.fence_before(training.optimizer)
        store.restore()
        cuts = []
        for step in (1, 2):
            cuts.append(copied(training.state()))
            assert store.save(training.state(), step=step, wait=False) is None
            training.step()
            # Had the step not waited, the writer would copy what it left.
            held.set()
        assert store.collect().manifest.step == 2
        assert store.collect() is None
    for step, cut in enumerate(cuts, 1):
        assert_equal(load_state(tmp_path / f"step_{step}"), cut)
    assert not torch.equal(cuts[0]["model"]["0.weight"], cuts[1]["model"]["0.weight"])


def in_place(training):
    with torch.no_grad():
        training.model[0].weight.add_(1.0)


def through_data(training):
    training.model[0].weight.data.add_(1.0)


def through_numpy(training):
    training.model[0].weight.detach().numpy()[:] += 1.0


WRITES = {"in place": in_place, ".data": through_data, "numpy": through_numpy}


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("write", [*WRITES, *OPTIMIZERS])
def test_a_write_without_the_fence_fails_the_save_by_name(tmp_path, held, write, bounded):
    kind, options = OPTIMIZERS.get(write, ("adamw", {"fused": True}))
    training = Training(kind, **options)
    with Store(tmp_path, bounded_memory=bounded) as store:
        store.restore()
        store.save(training.state(), step=1)
        store.save(training.state(), step=2, wait=False)
        WRITES.get(write, Training.step)(training)
        held.set()
        with pytest.raises(SaveFailed, match=r"model\.0\.weight.* changed while being saved"):
            store.collect()
        assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
        cut = copied(training.state())
        store.save(training.state(), step=3, wait=False)
    assert_equal(load_state(tmp_path / "step_3"), cut)


@pytest.mark.parametrize("row", [0, -1])
def test_a_row_at_either_end_is_watched(tmp_path, held, row):
    weight = torch.zeros(ROWS, ROWS)
    with Store(tmp_path) as store:
        store.restore()
        store.save({"weight": weight}, step=1, wait=False)
        weight.numpy()[row] += 1
        held.set()
        with pytest.raises(SaveFailed, match="weight"):
            store.collect()


def test_a_single_element_that_no_sample_holds_is_noticed_by_its_version(tmp_path, held):
    weight = torch.zeros(ROWS * ROWS)
    with Store(tmp_path) as store:
        store.restore()
        store.save({"weight": weight}, step=1, wait=False)
        weight[5] += 1
        held.set()
        with pytest.raises(SaveFailed, match="weight"):
            store.collect()


def test_small_tensors_and_plain_values_are_of_the_cut_without_a_fence(tmp_path, held):
    small, plain = torch.zeros(4), {"steps": [1]}
    with Store(tmp_path) as store:
        store.restore()
        store.save({"small": small, "plain": plain}, step=1, wait=False)
        small.add_(1)
        plain["steps"].append(2)
        held.set()
    found = load_state(tmp_path / "step_1")
    assert found["small"].tolist() == [0, 0, 0, 0]
    assert found["plain"] == {"steps": [1]}


def test_what_lies_between_the_elements_of_a_view_is_no_part_of_it(tmp_path, held):
    memory = torch.arange(4e4)
    rows = memory.view(200, 200)[:, ::2]
    with Store(tmp_path) as store:
        store.restore()
        expected = rows.clone()
        store.save({"rows": rows}, step=1, wait=False)
        memory.data.view(200, 200)[:, 1::2] += 1.0
        held.set()
        assert store.collect().manifest.step == 1
    assert torch.equal(load_state(tmp_path / "step_1")["rows"], expected)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("copy_now", [True, ("running",)])
def test_what_is_copied_now_may_change_at_once(tmp_path, held, copy_now, bounded):
    running = torch.zeros(ROWS, ROWS)
    with Store(tmp_path, bounded_memory=bounded) as store:
        store.restore()
        store.save({"running": running}, step=1, wait=False, copy_now=copy_now)
        running.add_(1)
        held.set()
    assert not load_state(tmp_path / "step_1")["running"].any()


def test_a_name_that_is_given_alone_is_one_name(tmp_path, held):
    state = {name: torch.zeros(ROWS, ROWS) for name in ("running", "run")}
    with Store(tmp_path) as store:
        store.restore()
        store.save(state, step=1, wait=False, copy_now="running")
        state["run"].add_(1)
        held.set()
        with pytest.raises(SaveFailed, match="run changed"):
            store.collect()


def odd_tensors():
    base = torch.randn(64, 96, 3)
    return {
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1::3],
        "channels last": torch.randn(8, 16, 8, 8).to(memory_format=torch.channels_last),
        "bfloat16": torch.randn(200, 100).to(torch.bfloat16),
        "bool": torch.rand(200, 100) > 0.5,
        "complex": torch.randn(100, 100, dtype=torch.complex64),
        "float8": torch.randn(200, 100).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.0),
        "inference": torch.inference_mode()(lambda: torch.randn(100, 100))(),
    }


@pytest.mark.parametrize("bounded", [False, True])
def test_tensors_of_every_kind_come_back_as_a_synchronous_save_stores_them(tmp_path, bounded):
    state = odd_tensors()
    state["tied"] = state["bfloat16"]
    with Store(tmp_path, keep_last_n=0, bounded_memory=bounded) as store:
        store.restore()
        store.save(state, step=1)
        store.save(state, step=2, wait=False)
        now, later = store.newest, store.collect().manifest
    assert now.content_digest() == later.content_digest()
    assert [entry.pieces for entry in now.tensors] == [entry.pieces for entry in later.tensors]
