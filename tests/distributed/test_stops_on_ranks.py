"""Signals to a rank that cannot reach the place where it would hear of them."""

import signal
import time

import pytest

from tests.helpers import hooks
from tests.helpers.command import outcome
from tests.helpers.crash import SHORT, assert_same_as
from tests.helpers.world import World, train_on

ACT = f"--run.hooks=['{hooks.CONFIG}']"
LEAVES = {
    "second signal": ([signal.SIGTERM, signal.SIGINT], 128 + signal.SIGINT),
    "the grace of 2 s is over": ([signal.SIGTERM], 128 + signal.SIGTERM),
}


@pytest.fixture(scope="module")
def untouched_pair(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched-pair")
    assert train_on(2, config, folder, *SHORT) == [0, 0]
    return folder


@pytest.mark.parametrize("why", LEAVES)
def test_a_rank_that_is_blocked_by_a_frozen_one_leaves_when_it_is_told(
    config, untouched_pair, tmp_path, why
):
    """Its main thread waits in a collective of step 4, and nobody is lost for a minute yet.

    Nothing is evaluated, saved or agreed on between its line of step 3 and that collective.
    """
    signals, code = LEAVES[why]
    act = {"when": "forward", "step": 4, "do": "SIGSTOP", "rank": 1}
    words = (config, f"--checkpoint.dir={tmp_path}", *SHORT, ACT, "--run.grace=2s")
    lost_late = "--distributed.lost_after=60s"
    with World(2, *words, lost_late, extra=hooks.acting(act), forked=True) as world:
        first = world.ranks[0]
        first.wait_for("step 3/")
        told = time.monotonic()
        for number in signals:
            first.signal(number)
        assert first.end() == code, first.output
        assert time.monotonic() - told < 15
        assert why in first.output
    assert outcome(tmp_path)["outcome"] == "running"
    assert train_on(2, config, tmp_path, *SHORT) == [0, 0]
    assert_same_as(tmp_path, untouched_pair)
