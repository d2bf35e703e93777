"""Runs on several ranks, through the installed command: endings, kills, failures of one rank."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.test_command_files import FILES, assert_same_state
from tests.helpers import hooks
from tests.helpers.command import (
    digests,
    environment,
    events,
    injecting,
    keepstep,
    link,
    losses,
    outcome,
    steps,
)
from tests.helpers.world import World, train_on

ACT = f"--run.hooks=['{hooks.CONFIG}']"
LOST_SECONDS = 15
"""From the end of one rank to the end of all, by default."""


@pytest.fixture(scope="session")
def two_ranks(config, tmp_path_factory) -> Path:
    """A finished run on two ranks that nothing ever touched."""
    folder = tmp_path_factory.mktemp("two-ranks")
    assert train_on(2, config, folder) == [0, 0]
    return folder


def assert_same_as(run: Path, reference: Path) -> None:
    last = steps(reference)[-1]
    assert digests(run, last) == digests(reference, last)
    assert losses(run) == losses(reference)
    assert link(run, "best") == link(reference, "best")
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(reference, "evaluation")]


def test_two_ranks_train_as_one_does_and_each_writes_its_own_part(config, untouched, two_ranks):
    names = sorted(path.name for path in (two_ranks / "step_10").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    one, two = losses(untouched), losses(two_ranks)
    # Dropout differs by rank, so the losses do after the first update; the first batch is the same.
    assert [step for step, _, _ in one] == [step for step, _, _ in two]
    assert one[0][1] == pytest.approx(two[0][1], rel=0.02)
    assert len(events(two_ranks, "session")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on(
    config, two_ranks, tmp_path, rank
):
    act = {"when": "forward", "step": 5, "do": "SIGTERM", "rank": rank}
    assert train_on(2, config, tmp_path, ACT, extra=hooks.acting(act)) == [75, 75]
    assert outcome(tmp_path)["outcome"] == "stopped"
    assert outcome(tmp_path)["reason"] == "SIGTERM"
    assert steps(tmp_path)[-1] == 5
    assert train_on(2, config, tmp_path) == [0, 0]
    assert_same_as(tmp_path, two_ranks)


@pytest.mark.parametrize(
    ("when", "step", "rank"),
    [("forward", 5, 0), ("snapshot", 6, 1), ("evaluating", 4, 1), ("committed", 3, 0)],
)
def test_a_killed_rank_ends_all_in_seconds_and_nothing_is_lost(
    config, two_ranks, tmp_path, when, step, rank
):
    act = {"when": when, "step": step, "do": "SIGKILL", "rank": rank}
    words = (config, f"--checkpoint.dir={tmp_path}", ACT)
    with World(2, *words, extra=hooks.acting(act)) as world:
        assert world.ranks[rank].end() == -signal.SIGKILL, world.output
        assert world.seconds_to_end() < LOST_SECONDS
        other = world.ranks[1 - rank]
        assert other.process.returncode == 7, world.output
        assert f"rank {rank} on " in other.output
        assert "is lost" in other.output
        assert "Traceback" not in other.output
    assert train_on(2, config, tmp_path) == [0, 0]
    assert_same_as(tmp_path, two_ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_is_named_and_all_others_end(config, two_ranks, tmp_path, rank):
    """Also rank 0, which holds the store through which the ranks hear of each other."""
    act = {"when": "forward", "step": 5, "do": "SIGSTOP", "rank": rank}
    words = (config, f"--checkpoint.dir={tmp_path}", ACT)
    with World(2, *words, extra=hooks.acting(act)) as world:
        other = world.ranks[1 - rank]
        assert other.end() == 7, world.output
        assert f"rank {rank} on " in other.output
        # What it was doing is told once a second, to who holds the store.
        sign = r"without a sign of life, last in (start-up|step [1-5]|the)"
        words = sign if rank == 1 else r"the rendezvous store on \S+ has not answered for \d+ s"
        assert re.search(words, other.output), world.output
        if rank == 1:
            assert outcome(tmp_path)["outcome"] == "unhealthy"
        # It wakes up in a world that has ended, and does not go on alone.
        world.ranks[rank].signal(signal.SIGCONT)
        assert world.ranks[rank].end() == 7, world.output
    assert train_on(2, config, tmp_path) == [0, 0]
    assert_same_as(tmp_path, two_ranks)


def test_a_job_that_is_suspended_as_a_whole_loses_nobody(config, two_ranks, tmp_path):
    """For longer than a lost rank is waited for, as a scheduler does it; and one wakes up first."""
    freeze = {"when": "forward", "do": "SIGSTOP"}
    acts = [{**freeze, "step": step, "rank": rank} for step in (5, 7) for rank in (0, 1)]
    words = (config, f"--checkpoint.dir={tmp_path}", "--distributed.lost_after=5s", ACT)
    with World(2, *words, extra=hooks.acting(*acts)) as world:
        first, other = world.ranks
        # One who thinks in the first that the other is lost leaves in the second.
        for _ in range(2):
            for session in (first, other):
                session.wait_until_frozen()
            with pytest.raises(subprocess.TimeoutExpired):
                first.process.wait(6)
            other.signal(signal.SIGCONT)
            with pytest.raises(subprocess.TimeoutExpired):
                other.process.wait(1.5)
            first.signal(signal.SIGCONT)
        assert world.end() == [0, 0], world.output
    assert_same_as(tmp_path, two_ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_with_its_cause(config, two_ranks, tmp_path, rank):
    act = {"when": "step", "step": 5, "do": "raise", "rank": rank}
    words = (config, f"--checkpoint.dir={tmp_path}", ACT)
    with World(2, *words, extra=hooks.acting(act)) as world:
        assert world.end() == [1, 1], world.output
        assert "the hook fails on purpose" in world.ranks[1 - rank].output
        assert f"rank {rank} on " in world.ranks[1 - rank].output
    assert outcome(tmp_path)["outcome"] == "failed"
    assert "the hook fails on purpose" in outcome(tmp_path)["reason"]
    assert train_on(2, config, tmp_path) == [0, 0]
    assert_same_as(tmp_path, two_ranks)


def test_the_rank_that_holds_the_store_does_not_leave_before_the_other_has_heard(config, tmp_path):
    """Its words would go with it, and the other would name it as lost, with another code."""
    acts = [
        {"when": "step", "step": 5, "do": "SIGSTOP", "rank": 1},
        {"when": "step", "step": 5, "do": "raise", "rank": 0},
    ]
    words = (config, f"--checkpoint.dir={tmp_path}", "--distributed.lost_after=60s", ACT)
    with World(2, *words, extra=hooks.acting(*acts)) as world:
        first, other = world.ranks
        first.wait_for("failed at step 5")
        with pytest.raises(subprocess.TimeoutExpired):
            first.process.wait(3)
        other.signal(signal.SIGCONT)
        assert world.end() == [1, 1], world.output
        assert "rank 0 on " in other.output
        assert "the hook fails on purpose" in other.output


@pytest.mark.parametrize(("operation", "rank"), [("create", "1"), ("write", "0"), ("sync", "1")])
def test_a_write_that_fails_once_on_one_rank_is_tried_again_by_all(
    config, two_ranks, tmp_path, rank, operation
):
    only = f"{operation} {tmp_path}/.staging-6"
    extra = injecting(at=1, action="EIO", only=only, rank=rank)
    assert train_on(2, config, tmp_path, extra=extra) == [0, 0]
    told = [
        e["text"] for e in events(tmp_path, "notice") if "attempt 1 to save failed" in e["text"]
    ]
    assert len(told) == 1
    assert_same_as(tmp_path, two_ranks)


def test_a_disk_that_stays_full_on_one_rank_ends_all_with_everything_older_intact(
    config, two_ranks, tmp_path
):
    extra = injecting(at=1, every=True, action="ENOSPC", only=".staging-6", rank="1")
    words = (config, f"--checkpoint.dir={tmp_path}", "--checkpoint.save_retries=1")
    with World(2, *words, extra=extra) as world:
        assert world.end() == [1, 1], world.output
        for session in world.ranks:
            assert "step 6 could not be saved" in session.output
            assert "No space left on device" in session.output
        assert "(rank 1 on " in world.ranks[0].output
    assert steps(tmp_path) == [3, 4]
    assert keepstep("ckpt", "verify", tmp_path).returncode == 0
    assert train_on(2, config, tmp_path) == [0, 0]
    assert_same_as(tmp_path, two_ranks)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(config, tmp_path):
    act = {"when": "nothing", "step": 5, "do": "nan_loss", "rank": 1}
    assert train_on(2, config, tmp_path, ACT, extra=hooks.acting(act)) == [0, 0]
    assert [e["step"] for e in events(tmp_path, "step") if e["skipped"]] == [5]
    assert outcome(tmp_path)["updates"] == 9


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_ranks_takes_over_the_very_same_state(config, two_ranks, tmp_path, size):
    """It restores, stops before a step and saves nothing; then it takes the rest of the steps."""
    half = ("--train.max_steps=10", "--checkpoint.keep_last_n=0")
    act = {"when": "forward", "step": 5, "do": "SIGTERM", "rank": 0}
    assert train_on(2, config, tmp_path, *half, ACT, extra=hooks.acting(act)) == [75, 75]
    assert train_on(size, config, tmp_path, *half) == [0] * size
    (resumed,) = events(tmp_path, "resumed")
    assert resumed["step"] == 5
    assert [step for step, _, _ in losses(tmp_path)] == list(range(1, 11))
    assert keepstep("ckpt", "verify", tmp_path).returncode == 0


def test_what_does_not_divide_over_the_ranks_is_refused_on_all(config, tmp_path):
    words = (config, f"--checkpoint.dir={tmp_path}", "--train.global_batch=3")
    with World(2, *words) as world:
        assert world.end() == [2, 2], world.output
        assert "train.global_batch (3) does not divide over the 2" in world.ranks[1].output
    with World(2, config, f"--checkpoint.dir={tmp_path}", "--distributed.dp_shard=3") as world:
        assert world.end() == [2, 2], world.output
        assert "does not fit the 2 ranks" in world.ranks[0].output


def test_ranks_that_were_started_with_different_configs_are_refused(config, tmp_path):
    words = (config, f"--checkpoint.dir={tmp_path}")
    with World(2, *words, last=("--optimizer.rate=1e-4",)) as world:
        assert world.end() == [2, 2], world.output
        for session in world.ranks:
            assert "ranks [1] were started with another config than rank 0" in session.output
    assert steps(tmp_path) == []


def test_only_the_first_rank_prints_and_keeps_the_journal(config, tmp_path):
    words = (config, f"--checkpoint.dir={tmp_path}", "--train.max_steps=3")
    with World(2, *words) as world:
        assert world.end() == [0, 0], world.output
        assert "finished at step 3" in world.ranks[0].output
        assert world.ranks[1].output == ""
    assert [step for step, _, _ in losses(tmp_path)] == [1, 2, 3]


def torchrun(config: Path, run: Path, *flags: str, restarts: int = 0, **extra: str) -> int:
    """Run two ranks under the real launcher; return its code, which is not that of its ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        f"--max-restarts={restarts}", "-m", "keepstep", "train", str(config),
        f"--checkpoint.dir={run}",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *flags],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=90 * (1 + restarts),
    )
    print(done.stdout, done.stderr)
    return done.returncode


def test_torchrun_starts_and_resumes_two_ranks(config, two_ranks, tmp_path):
    act = hooks.acting({"when": "committed", "step": 6, "do": "stop", "rank": 1})
    # The launcher has one code for whatever its ranks ended with; the outcome has ours.
    assert torchrun(config, tmp_path, ACT, **act) != 0
    assert outcome(tmp_path)["code"] == 75
    assert torchrun(config, tmp_path) == 0
    assert_same_as(tmp_path, two_ranks)


def test_torchrun_starts_lost_ranks_again_and_their_single_files_continue_three_times(
    config, two_ranks, tmp_path
):
    """A later attempt must not hear the verdict on the first, in the launcher's own store."""
    kills = [
        {"when": "committed", "step": step, "do": "SIGKILL", "rank": rank}
        for step, rank in ((3, 1), (6, 0), (9, 1))
    ]
    assert torchrun(config, tmp_path, ACT, FILES, restarts=3, **hooks.acting(*kills)) == 0
    assert [event["step"] for event in events(tmp_path, "resumed")] == [3, 6, 9]
    assert losses(tmp_path) == losses(two_ranks)
    assert_same_state(tmp_path / "latest.pth", two_ranks / "step_10")
