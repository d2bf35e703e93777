"""The order of the data: a permutation each epoch, at any position at once."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.state.data_position import sample_indices
from keepstep.state.rng import derive, seed_everything


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**62), st.integers(1, 3000), st.integers(0, 10**9))
def test_each_sample_comes_exactly_once_an_epoch(seed, size, epoch):
    start = epoch * size
    found = sample_indices(seed, np.arange(start, start + size), size)
    assert sorted(found.tolist()) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100), st.integers(1, 500), st.integers(0, 2000), st.integers(1, 400))
def test_a_batch_is_the_same_however_it_is_asked_for(seed, size, start, count):
    positions = np.arange(start, start + count)
    whole = sample_indices(seed, positions, size)
    single = [sample_indices(seed, [place], size)[0] for place in positions[:20]]
    assert whole[:20].tolist() == single


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(sample_indices(seed, np.arange(e * 50, e * 50 + 50), 50).tolist())
        for seed in range(4)
        for e in range(4)
    }
    assert len(orders) == 16


def test_the_order_looks_random():
    found = sample_indices(1, np.arange(10_000), 10_000).astype(float)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.05


def test_a_position_far_away_costs_the_same():
    def seconds(start: int) -> float:
        began = time.perf_counter()
        for _ in range(20):
            sample_indices(1, np.arange(start, start + 64), 10**7)
        return time.perf_counter() - began

    seconds(0)
    assert min(seconds(10**15) for _ in range(5)) < 20 * min(seconds(0) for _ in range(5))


def test_no_samples_are_an_error():
    with pytest.raises(ValueError, match="at least one"):
        sample_indices(1, [0], 0)


def test_random_numbers_depend_on_the_four_and_nothing_else():
    import random

    import torch

    def draw(*key):
        seed_everything(*key)
        return (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())

    first = draw(1, "step", 0, 7)
    torch.rand(100)
    assert draw(1, "step", 0, 7) == first
    others = [(2, "step", 0, 7), (1, "init", 0, 7), (1, "step", 1, 7), (1, "step", 0, 8)]
    assert len({str(draw(*key)) for key in [(1, "step", 0, 7), *others]}) == 5
    assert derive(1, "1", 1, 1) != derive(11, "", 1, 1)


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 4096, 4097])
def test_sizes_around_powers_of_two_are_permuted_whole(size):
    for epoch in (0, 1, 10**9):
        found = sample_indices(3, np.arange(size) + epoch * size, size)
        assert sorted(found.tolist()) == list(range(size))


def test_an_epoch_boundary_inside_a_batch_belongs_to_both_epochs():
    first, second = sample_indices(3, range(10), 10), sample_indices(3, range(10, 20), 10)
    batch = sample_indices(3, range(7, 13), 10)
    assert batch.tolist() == [*first[7:].tolist(), *second[:3].tolist()]


def test_a_batch_may_hold_several_epochs():
    found = sample_indices(3, range(35), 10).tolist()
    assert [sorted(found[start : start + 10]) for start in (0, 10, 20)] == [list(range(10))] * 3


def test_every_sample_is_about_as_likely_at_every_place():
    size, trials = 6, 6000
    counts = np.zeros((size, size))
    for seed in range(trials):
        counts[np.arange(size), sample_indices(seed, range(size), size)] += 1
    expected = trials / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    # 25 degrees of freedom: a fair shuffle exceeds 60 about once in 10,000 sets of seeds.
    assert chi_squared < 60


def test_more_samples_than_32_bits_can_number_are_no_problem():
    size = 5 * 10**12
    found = sample_indices(3, range(1000), size)
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert 10**12 < found.max() < size


def test_the_order_never_changes_between_releases():
    # A run that was begun by an older release would otherwise see samples twice and others never.
    assert sample_indices(1, range(20), 10).tolist() == [
        6,
        5,
        8,
        9,
        3,
        2,
        4,
        0,
        7,
        1,
        2,
        4,
        1,
        0,
        7,
        8,
        3,
        5,
        9,
        6,
    ]
