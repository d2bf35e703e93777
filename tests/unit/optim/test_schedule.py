"""Schedules: exact values, ends, and properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.config.schema import ScheduleConfig
from keepstep.optim.schedule import build_schedule, damped_restarts, rex


def factors(total, **settings):
    schedule = build_schedule(ScheduleConfig(**settings), total)
    return [schedule(update) for update in range(total)]


NAMES = ["linear", "cosine", "wsd", "rex", "cosine_restarts"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("floor", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_last_update_uses_exactly_the_floor_and_the_first_after_warmup_the_peak(
    name, floor, warmup
):
    decay = {"decay_steps": 10} if name == "wsd" else {}
    found = factors(50, name=name, floor=floor, warmup_steps=warmup, **decay)
    assert found[-1] == floor
    assert found[warmup] == 1.0
    assert found[49 - 1] > floor
    schedule = build_schedule(
        ScheduleConfig(name=name, floor=floor, warmup_steps=warmup, **decay), 50
    )
    assert schedule(50) == schedule(10**9) == floor


def test_the_warmup_rises_to_the_peak_and_never_uses_0():
    assert factors(8, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1, 1, 1, 1]


def test_wsd_is_stable_until_the_decay_and_the_decay_has_its_length():
    found = factors(20, name="wsd", decay_steps=5, floor=0.0)
    assert found[:15] == [1.0] * 15
    assert found[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert found[15] < 1
    root = factors(20, name="wsd", decay_steps=4, floor=0.0, decay="sqrt")
    assert root[16:] == pytest.approx([1 - math.sqrt(k / 4) for k in (1, 2, 3, 4)])


def test_cosine_and_rex_have_their_published_values():
    assert factors(11, name="cosine", floor=0.2)[5] == pytest.approx(0.6)
    assert rex(0.5) == pytest.approx(2 / 3)
    assert (rex(0.0), rex(1.0)) == (1.0, 0.0)


def test_damped_restarts_follow_their_formula():
    r, d, n = 0.1, 0.5, 3
    for p in (0.0, 0.1, 1 / 3, 0.5, 0.7, 0.99):
        c = math.floor(n * p)
        f = n * p - c
        wanted = r + (d**c - r) * (1 + math.cos(math.pi * f)) / 2
        assert damped_restarts(p, cycles=n, damping=d, floor=r) == pytest.approx(wanted)
    assert damped_restarts(1.0, cycles=n, damping=d, floor=r) == r


@given(st.sampled_from(NAMES), st.integers(12, 300), st.integers(0, 5), st.floats(0, 1), st.data())
def test_factors_stay_between_the_floor_and_the_peak(name, total, warmup, floor, data):
    settings = {"decay_steps": data.draw(st.integers(1, 6))} if name == "wsd" else {}
    found = factors(total, name=name, warmup_steps=warmup, floor=floor, **settings)
    assert all(floor - 1e-9 <= factor <= 1 + 1e-9 for factor in found[warmup:])


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 9), st.floats(0.5, 1))
def test_each_cycle_starts_at_its_damped_peak_and_none_a_step_late(cycles, length, warmup, damping):
    settings = {"warmup_steps": warmup, "floor": 0.0, "cycles": cycles, "damping": damping}
    total = warmup + cycles * length + 1
    found = factors(total, name="cosine_restarts", **settings)
    assert found[warmup:-1:length] == [damping**cycle for cycle in range(cycles)]
    assert found[-1] == 0.0


@given(st.integers(1, 400), st.data())
def test_the_decay_of_wsd_has_exactly_its_length(total, data):
    decay = data.draw(st.integers(1, total))
    warmup = data.draw(st.integers(0, total - decay))
    shape = data.draw(st.sampled_from(["linear", "cosine", "sqrt"]))
    found = factors(
        total, name="wsd", warmup_steps=warmup, decay_steps=decay, decay=shape, floor=0.25
    )
    assert found[warmup : total - decay] == [1.0] * (total - decay - warmup)
    assert all(factor < 1 for factor in found[total - decay :])
    assert found[-1] == 0.25


def test_a_decay_with_no_stable_part_still_has_all_its_updates():
    found = factors(8, name="wsd", warmup_steps=4, decay_steps=4, floor=0.0)
    assert found == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("name", ["linear", "cosine", "rex"])
def test_after_the_warmup_the_rate_never_rises(name):
    found = factors(40, name=name, warmup_steps=7)
    assert found[6:] == sorted(found[6:], reverse=True)


@given(st.sampled_from(NAMES), st.lists(st.integers(0, 60), min_size=1))
def test_a_factor_depends_on_the_update_alone(name, asked):
    config = ScheduleConfig(name=name, warmup_steps=5, decay_steps=9 if name == "wsd" else 0)
    used = build_schedule(config, 50)
    for update in asked:
        used(update)
    assert [used(u) for u in range(60)] == [build_schedule(config, 50)(u) for u in range(60)]


def test_a_run_of_one_update_uses_the_floor_and_a_constant_rate_has_none():
    assert factors(1, name="cosine", floor=0.3) == [0.3]
    assert factors(3, name="cosine", floor=0.3, warmup_steps=2) == [0.5, 1.0, 0.3]
    assert factors(3, name="constant", floor=0.3) == [1.0, 1.0, 1.0]
