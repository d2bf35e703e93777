"""Kills and stops at random instants, in chains: a run is ended and continued until it finishes.

Each session of a chain ends at an instant that the seed draws, in start-up or after it; the same
command continues. The finished run equals one that nothing touched, bit for bit. Chains run beside
each other, because most of a session that lost a rank is waiting.
"""

import json
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keepstep.store import list_checkpoints, verify
from tests.helpers import warm, worst_days
from tests.helpers.command import Session, digests, events, link, losses, outcome, steps
from tests.helpers.world import World, train_on

LOST_SECONDS = 15
"""From the end of one rank to the end of all: what it takes to notice (3 s), and to leave."""
STEPS = 40
FLAGS = (
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=2",
    "--evaluation.interval=5",
    "--data.workers=0",
    "--distributed.join_within=20s",
)
LAUNCHER = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from keepstep.cli.main import main

def rank(*words):
    raise SystemExit(main(words))

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="kills", max_restarts=0,
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
)
elastic_launch(config, rank)(*sys.argv[1:])
"""
CHAINS = 4


@pytest.fixture(scope="module")
def references(config, tmp_path_factory) -> dict[int, Path]:
    """The run that nothing touched, by its number of ranks."""
    folder = tmp_path_factory.mktemp("references")
    for size in (1, 2):
        assert train_on(size, config, folder / str(size), *FLAGS) == [0] * size
    return {size: folder / str(size) for size in (1, 2)}


def last_state(run: Path) -> tuple[Any, ...]:
    """The state of the last step, but not whether its evaluation was owed when it was saved.

    It was, where the stop came in the last evaluation; the next session makes it, and the
    checkpoint is not written again. The evaluations are compared by themselves.
    """
    found = dict(digests(run, STEPS))
    (plain,) = found.pop("plain")
    values = json.loads(plain)
    del values["counters"]["evaluation_owed"]
    return found, values


def assert_same_as(run: Path, reference: Path) -> None:
    assert last_state(run) == last_state(reference)
    assert losses(run) == losses(reference)
    assert link(run, "best") == link(reference, "best")
    assert link(run, "latest") == f"step_{STEPS}"
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(reference, "evaluation")]


def assert_all_whole(run: Path) -> None:
    entries = list_checkpoints(run)
    assert [verify(entry) for entry in entries] == [[]] * len(entries)


class Chain:
    """A run that is ended again and again; `end_session` ends one session of it.

    ``end_session`` starts the command in the folder and returns whether it was ended before it
    finished.
    """

    def __init__(self, folder: Path, end_session: Callable[[Path], bool]) -> None:
        self._folder = folder
        self._end_session = end_session
        self._number = 0

    def go(self, count: int, finish: Callable[[Path], None]) -> int:
        """End `count` sessions, then let the run finish; return how many steps it came in all."""
        ended, came = 0, 0
        while ended < count:
            run = self._folder / str(self._number)
            newest = max(steps(run), default=0)
            if not self._end_session(run):
                # It finished before its end came; the next one begins anew.
                finish(run)
                self._number += 1
                continue
            ended += 1
            assert max(steps(run), default=0) >= newest, "a committed checkpoint is gone"
            assert_all_whole(run)
            came += max(steps(run), default=0) - newest
        finish(self._folder / str(self._number))
        return came


def in_chains(
    folder: Path, count: int, end_session: Callable[[random.Random, Path], bool], finish: Callable
) -> int:
    """End `count` sessions in chains beside each other; return how many steps they came."""
    draws = [worst_days.generator(f"{folder.name} {number}") for number in range(CHAINS)]

    def go(number: int) -> int:
        chain = Chain(folder / str(number), lambda run: end_session(draws[number], run))
        return chain.go(len(range(number, count, CHAINS)), finish)

    with ThreadPoolExecutor(CHAINS) as pool:
        return sum(pool.map(go, range(CHAINS)))


def wait_for_the_instant(draw: random.Random, session: Session) -> None:
    """Wait as long as the seed says, in start-up or after the first step."""
    if draw.random() < 0.3:
        seconds = draw.uniform(0.0, 1.2)
    else:
        next((line for line in session.read() if line.startswith("step ")), None)
        seconds = draw.expovariate(1 / 0.5)
    # What this waits for has no event: it is any instant at all.
    threading.Event().wait(seconds)


@pytest.mark.timeout(900)
def test_a_rank_killed_at_any_instant_ends_all_and_loses_nothing(config, references, tmp_path):
    """50 kills of either rank where all days are asked for."""

    def kill_one(draw: random.Random, run: Path) -> bool:
        who = draw.choice([0, 1])
        words = (config, f"--checkpoint.dir={run}", *FLAGS, "--distributed.lost_after=3s")
        with World(2, *words, forked=True) as world:
            wait_for_the_instant(draw, world.ranks[0])
            world.ranks[who].signal(signal.SIGKILL)
            assert world.seconds_to_end() < LOST_SECONDS, world.output
            codes = [session.process.returncode for session in world.ranks]
            if codes[who] == 0:
                return False
            assert codes[who] == -signal.SIGKILL, world.output
            # The other may have finished, or have lost this one as it left.
            assert codes[1 - who] in (0, 7), world.output
            assert "Traceback" not in world.ranks[1 - who].output
            return True

    def finish(run: Path) -> None:
        assert train_on(2, config, run, *FLAGS) == [0, 0]
        assert_same_as(run, references[2])

    count = 50 if worst_days.ALL else 8
    print(f"{count} kills, {in_chains(tmp_path, count, kill_one, finish)} steps")


@pytest.mark.timeout(600)
def test_a_launcher_killed_at_any_instant_takes_its_ranks_along(config, references, tmp_path):
    """Its real agent, in a fork; the ranks are forks of it, and hold the output until they end."""

    def kill_launcher(draw: random.Random, run: Path) -> bool:
        words = ("train", config, f"--checkpoint.dir={run}", *FLAGS)
        with warm.WarmSession(*words, code=LAUNCHER) as launcher:
            wait_for_the_instant(draw, launcher)
            launcher.signal(signal.SIGKILL)
            killed = time.monotonic()
            # The output ends with the last of them.
            code = launcher.end()
            assert time.monotonic() - killed < LOST_SECONDS, launcher.output
            return code == -signal.SIGKILL

    def finish(run: Path) -> None:
        assert train_on(2, config, run, *FLAGS) == [0, 0]
        assert_same_as(run, references[2])

    count = 16 if worst_days.ALL else 4
    print(f"{count} kills, {in_chains(tmp_path, count, kill_launcher, finish)} steps")


def is_settled(run: Path, codes: list[int]) -> bool:
    """Tell whether ranks that were asked to stop did; assert that they left what they should."""
    if codes == [0] * len(codes):
        return False
    assert codes == [75] * len(codes)
    told = outcome(run)
    assert (told["outcome"], told["code"]) == ("stopped", 75)
    assert told["step"] == max(steps(run), default=0), "the agreed step is the newest saved"
    return True


@pytest.mark.timeout(900)
def test_a_stop_at_any_instant_beside_data_workers_saves_the_step_and_loses_nothing(
    config, references, tmp_path
):
    """50 stops where all days are asked for; no worker outlives its run."""

    def stop(draw: random.Random, run: Path) -> bool:
        words = ("train", config, f"--checkpoint.dir={run}", *FLAGS, "--data.workers=2")
        with warm.WarmSession(*words) as session:
            wait_for_the_instant(draw, session)
            session.signal(signal.SIGTERM)
            # The output ends with the last process that holds it, a worker too.
            code = session.end()
            if code == -signal.SIGTERM:
                assert session.output == "", "the handlers are the first thing of all"
                return stop(draw, run)
            return is_settled(run, [code])

    def finish(run: Path) -> None:
        assert train_on(1, config, run, *FLAGS) == [0]
        assert_same_as(run, references[1])

    count = 50 if worst_days.ALL else 8
    print(f"{count} stops, {in_chains(tmp_path, count, stop, finish)} steps")


@pytest.mark.timeout(900)
def test_stops_of_ranks_at_any_instants_end_at_one_step_and_lose_nothing(
    config, references, tmp_path
):
    """Of one rank, or of both, one after the other: across the end of a step, or of the run."""

    def stop(draw: random.Random, run: Path) -> bool:
        words = (config, f"--checkpoint.dir={run}", *FLAGS, "--distributed.lost_after=60s")
        with World(2, *words, forked=True) as world:
            wait_for_the_instant(draw, world.ranks[0])
            order = draw.choice([[0], [1], [0, 1], [1, 0]])
            for rank in order:
                world.ranks[rank].signal(signal.SIGTERM)
                threading.Event().wait(draw.expovariate(1 / 0.05))
            codes = world.end()
            if -signal.SIGTERM in codes:
                silent = [s.output for s, c in zip(world.ranks, codes, strict=True) if c < 0]
                assert set(silent) == {""}, "the handlers are the first thing of all"
                return stop(draw, run)
            return is_settled(run, codes)

    def finish(run: Path) -> None:
        assert train_on(2, config, run, *FLAGS) == [0, 0]
        assert_same_as(run, references[2])

    count = 24 if worst_days.ALL else 8
    print(f"{count} stops, {in_chains(tmp_path, count, stop, finish)} steps")
