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
