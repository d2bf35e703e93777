"""What is not finite on one rank alone: all ranks go back together, or end together."""

import signal
from pathlib import Path

import pytest

from keepstep.store import list_checkpoints
from tests.helpers import hooks
from tests.helpers.command import digests, events, losses, outcome, steps
from tests.helpers.crash import SHORT
from tests.helpers.world import World, train_on
from tests.unit.run.test_rollback import assert_nothing_is_poisoned

ACT = f"--run.hooks=['{hooks.CONFIG}']"
ROLLBACK = "--nonfinite.policy=rollback"
FLAGS = (ACT, *SHORT, ROLLBACK, "--nonfinite.rollback_rate_factor=0.5")
BAD = {"samples": 12, "do": "nan_loss", "rank": 1}
"""The batch of step 4, at which a save is due; the newest checkpoint is that of step 2."""


@pytest.fixture(scope="module")
def rolled_back(config, tmp_path_factory) -> Path:
    """A run on two ranks, of which one had a loss that was not finite."""
    run = tmp_path_factory.mktemp("rolled-back")
    assert train_on(2, config, run, *FLAGS, extra=hooks.acting(BAD)) == [0, 0]
    return run


def assert_same(run: Path, reference: Path) -> None:
    assert digests(run, 6) == digests(reference, 6)
    assert losses(run) == losses(reference)
    assert len(events(run, "rollback")) == 1


def test_all_ranks_go_back_for_a_loss_that_is_not_finite_on_one(rolled_back):
    (told,) = events(rolled_back, "rollback")
    wanted = {"step": 4, "back_to": 2, "samples": 16, "rollbacks": 1}
    assert {name: told[name] for name in wanted} == wanted
    assert [step for step, _, _ in losses(rolled_back)] == list(range(1, 7))
    assert_nothing_is_poisoned(rolled_back)


def test_a_rank_that_is_killed_in_a_rollback_ends_all_and_the_decision_stands(
    config, rolled_back, tmp_path
):
    kill = {"when": "rewound", "samples": 16, "do": "SIGKILL", "rank": 1}
    words = (config, f"--checkpoint.dir={tmp_path}", *FLAGS, "--distributed.lost_after=3s")
    with World(2, *words, extra=hooks.acting(BAD, kill)) as world:
        assert world.end() == [7, -signal.SIGKILL], world.output
    # What was not finite does not come again.
    assert train_on(2, config, tmp_path, *FLAGS) == [0, 0]
    assert_same(tmp_path, rolled_back)


def test_a_stop_of_one_rank_in_the_step_that_is_not_finite_on_another(
    config, rolled_back, tmp_path
):
    stop = {"when": "forward", "step": 4, "do": "SIGTERM", "rank": 0}
    assert train_on(2, config, tmp_path, *FLAGS, extra=hooks.acting(BAD, stop)) == [75, 75]
    assert (outcome(tmp_path)["outcome"], outcome(tmp_path)["step"]) == ("stopped", 2)
    assert steps(tmp_path)[-1] == 2
    assert train_on(2, config, tmp_path, *FLAGS) == [0, 0]
    assert_same(tmp_path, rolled_back)


@pytest.mark.parametrize(
    ("size", "policy", "codes", "standing"), [(2, "skip", 6, 2), (4, "rollback", 0, 6)]
)
def test_a_weight_that_is_not_finite_on_one_rank_is_saved_by_none(
    config, tmp_path, size, policy, codes, standing
):
    """In the last shard alone, at a step whose save is due."""
    bad = {"when": "step", "samples": 16, "do": "inf_weight", "rank": size - 1}
    flags = (*FLAGS, f"--nonfinite.policy={policy}")
    assert train_on(size, config, tmp_path, *flags, extra=hooks.acting(bad)) == [codes] * size
    assert list_checkpoints(tmp_path)[-1].step == standing
    assert_nothing_is_poisoned(tmp_path)
    told = [event["reason"] for event in events(tmp_path, "rollback")]
    told = told or [outcome(tmp_path)["reason"]]
    assert f"model.model.embed_tokens.weight is not finite on rank {size - 1}" in told[0]
