"""The tree along which gradients are summed: the same additions, whoever makes them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.schema import Config
from keepstep.distributed.mesh import Layout
from keepstep.distributed.ordered import TreeSum, norm_of_whole, require_order
from keepstep.errors import UsageError


def summed(terms):
    tree = TreeSum()
    for term in terms:
        tree.add([None if term is None else term.clone()])
    return tree.total()[0]


def over(ranks, terms):
    """Sum as so many ranks do: of each turn along the ranks first, then over the turns."""
    turns = [terms[first : first + ranks] for first in range(0, len(terms), ranks)]
    return summed([summed(turn) for turn in turns])


def bits(tensor):
    return tensor.view(torch.int32).tolist()


@st.composite
def counts_and_ranks(draw):
    ranks = 2 ** draw(st.integers(0, 4))
    return ranks * draw(st.integers(1, 9)), ranks


@settings(deadline=None)
@given(st.integers(0, 2**32), counts_and_ranks())
def test_any_ranks_that_divide_the_terms_make_the_same_sum_bit_for_bit(seed, sizes):
    count, ranks = sizes
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-20, 20, (count, 1), generator=generator)
    terms = torch.ldexp(torch.randn(count, 8, generator=generator), scales)
    # Zeros keep their sign only where nothing is added to a zero that nobody sent.
    terms[:, 0] = -0.0
    alone = summed(list(terms))
    assert bits(over(ranks, list(terms))) == bits(alone)
    exact = terms.double().sum(0)
    torch.testing.assert_close(alone.double(), exact, rtol=0, atol=count / 2)


def test_the_terms_are_added_in_pairs_and_what_is_left_from_the_last_on():
    big, one = 2.0**24, 1.0
    # As floats, 2^24 + 1 is 2^24: the sum tells in which order it was made.
    assert summed([torch.tensor([x]) for x in (big, one, one, one)]).item() == big + 2
    assert summed([torch.tensor([x]) for x in (big, 0.0, one, 0.0, one, one)]).item() == big + 2
    assert summed([torch.tensor([x]) for x in (one, one, big)]).item() == big + 2
    assert summed([torch.tensor([x]) for x in (big, 0.0, 0.0, 0.0, one, 0.0, one)]).item() == (
        big + 2
    )


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(-99, 99)), min_size=1, max_size=40))
def test_a_term_that_is_not_there_adds_nothing(values):
    terms = [None if value is None else torch.tensor([float(value)]) for value in values]
    there = [value for value in values if value is not None]
    found = summed(terms)
    assert (found is None) == (not there)
    assert found is None or found.item() == sum(there)


def test_it_holds_one_sum_for_each_power_of_two():
    tree = TreeSum()
    for count in range(1, 1025):
        tree.add([torch.zeros(1)])
        assert len(tree._waiting) == count.bit_count()


def test_the_norm_is_that_of_all_tensors_together():
    gradients = [torch.randn(5, 3), torch.randn(7)]
    wanted = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(norm_of_whole(gradients), wanted)


@pytest.mark.parametrize(
    ("count", "ranks", "fits"),
    [(8, 1, True), (7, 1, True), (8, 8, True), (12, 4, True), (12, 3, False), (12, 8, False)],
)
def test_ranks_that_are_no_whole_part_of_the_tree_are_refused(count, ranks, fits):
    train = replace(Config().train, global_batch=2 * count, micro_batch=2)
    config, layout = Config(train=train), Layout(dp_shard=ranks)
    if fits:
        require_order(config, layout)
    else:
        with pytest.raises(UsageError, match=f"{count} micro-batches .* on {ranks} data-parallel"):
            require_order(config, layout)
