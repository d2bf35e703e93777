"""The exit matrix: each outcome at each moment of a run, on 1, 2 and 4 ranks.

After each: which folders stand, what `latest` and `best` are, that all of it is whole, the code of
every rank, `outcome.json`, the hooks that were called, the last line. Then the same command, to
the end: its bits are those of a run that nothing touched.
"""

import json
import shutil
import signal
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keepstep.store import list_checkpoints, verify
from tests.helpers import hooks, warm, worst_days
from tests.helpers.command import (
    digests,
    events,
    injecting,
    link,
    losses,
    outcome,
    steps,
)
from tests.helpers.world import free_port, place_of

SIZES = (1, 2, 4)
AT_ONCE = 3
HOOKS = f"--run.hooks=['{hooks.CONFIG}', 'tests.helpers.hooks:Record']"
FLAGS = (
    "--train.max_steps=6",
    "--schedule.warmup_steps=1",
    "--checkpoint.interval=2",
    "--checkpoint.keep_last_n=1",
    "--evaluation.interval=2",
    "--data.workers=0",
    "--distributed.lost_after=3s",
)
KILLED, TERMINATED, INTERRUPTED = -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT
RUNNING, NOT_BEGUN = "running", ""


@dataclass(frozen=True, kw_only=True)
class Day:
    """What happens on which ranks (`who`: first, last or all), and what it leaves.

    ``code`` is that of all ranks but where `hurt` gives another to those it happens to. ``told`` is
    what outcome.json says, `told_alone` what it says on one rank, or where the first is hurt.
    """

    name: str
    do: str
    when: str
    at: int
    code: int
    told: str
    step: int
    newest: int
    best: int | None = None
    who: str = "last"
    hurt: int | None = None
    told_alone: str | None = None
    flags: tuple[str, ...] = ()
    inject: dict[str, Any] = field(default_factory=dict)
    more: tuple[dict[str, Any], ...] = ()
    after_the_end: bool = False

    def ranks_hurt(self, size: int) -> list[int]:
        return {"first": [0], "last": [size - 1], "all": list(range(size))}[self.who]

    def code_of(self, rank: int, size: int) -> int:
        return self.hurt if self.hurt is not None and rank in self.ranks_hurt(size) else self.code

    def outcome_on(self, size: int) -> str:
        alone = self.told_alone is not None and 0 in self.ranks_hurt(size)
        return str(self.told_alone) if alone else self.told


def stop(when: str, at: int, step: int, **more: Any) -> Day:
    more = {"do": "SIGTERM", "code": 75, "told": "stopped", "newest": step, **more}
    return Day(name=f"stopped-{when}", when=when, at=at, step=step, **more)


def kill(when: str, at: int, newest: int, **more: Any) -> Day:
    told = NOT_BEGUN if when == "build" else RUNNING
    more = {"told": "unhealthy" if told else NOT_BEGUN, "step": at - (when == "forward"), **more}
    given = {"do": "SIGKILL", "code": 7, "hurt": KILLED, "told_alone": told, **more}
    return Day(name=f"unhealthy-{when}", when=when, at=at, newest=newest, **given)


def fail(when: str, at: int, newest: int) -> Day:
    return Day(
        name=f"failed-{when}", do="raise", when=when, at=at, code=1, told="failed", step=at,
        newest=newest,
    )  # fmt: skip


def second_signal(when: str, at: int, newest: int, who: str = "last") -> Day:
    told = NOT_BEGUN if when == "build" else RUNNING
    return Day(
        name=f"second-{when}-{who}", do="SIGTERM+SIGINT+PAUSE", when=when, at=at, who=who, code=7,
        hurt=INTERRUPTED, told="unhealthy" if told else NOT_BEGUN, told_alone=told,
        step=at - (when == "forward"), newest=newest,
    )  # fmt: skip


def grace_over(when: str, at: int, newest: int, who: str = "all") -> Day:
    told = NOT_BEGUN if when == "build" else RUNNING
    return Day(
        name=f"grace-{when}-{who}", do="SIGTERM+PAUSE", when=when, at=at, who=who, code=7,
        hurt=TERMINATED, told="unhealthy" if told else NOT_BEGUN, told_alone=told,
        step=at - (when == "forward"), newest=newest, flags=("--run.grace=1s",),
    )  # fmt: skip


def at_delete(action: str) -> dict[str, Any]:
    """As the first rank begins to delete step_2, with step_4 committed."""
    return {"at": 1, "only": "remove_folder {run}/.trash", "action": action, "rank": "0"}


FINISHED = {"code": 0, "told": "finished", "step": 6, "newest": 6}
DAYS = [
    Day(name="finished", do="", when="", at=0, **FINISHED),
    Day(name="finished-end", do="SIGTERM", when="end", at=6, **FINISHED),
    Day(
        name="skipped", do="nan_loss", when="step", at=6, code=6, told="finished_skipped", step=6,
        newest=4,
    ),
    Day(
        name="nothing", do="", when="", at=0, code=0, told="nothing_to_do", step=6, newest=6,
        after_the_end=True,
    ),
    stop("build", 0, 0),
    stop("start", 0, 0),
    stop("forward", 5, 5, best=4),
    stop("evaluating", 4, 4, best=2),
    stop("snapshot", 4, 4),
    stop("committed", 4, 4),
    stop("delete", 0, 4, inject=at_delete("sigterm"), who="first"),
    stop("step", 3, 4, best=2, who="first", more=({"when": "forward", "step": 4},)),
    Day(
        name="diverged", do="nan_loss", when="step", at=5, code=6, told="diverged", step=5,
        newest=4, flags=("--nonfinite.policy=stop",),
    ),
    kill("build", 0, 0),
    kill("start", 0, 0),
    kill("forward", 5, 4),
    kill("evaluating", 4, 2),
    kill("snapshot", 4, 2),
    kill("committed", 4, 4),
    kill("delete", 4, 4, inject=at_delete("kill"), who="first"),
    kill("end", 6, 6),
    # A model that cannot be built is for the user to mend.
    Day(
        name="usage-build", do="raise", when="build", at=0, code=2, told=NOT_BEGUN, step=0,
        newest=0,
    ),
    fail("start", 0, 0),
    fail("step", 5, 4),
    fail("evaluated", 4, 2),
    fail("snapshot", 4, 2),
    fail("committed", 4, 4),
    fail("end", 6, 6),
    second_signal("build", 0, 0),
    second_signal("start", 0, 0, who="first"),
    second_signal("forward", 5, 4),
    second_signal("evaluating", 4, 2, who="all"),
    second_signal("snapshot", 4, 2),
    second_signal("committed", 4, 4, who="first"),
    grace_over("build", 0, 0),
    grace_over("forward", 5, 4, who="last"),
    grace_over("snapshot", 4, 2),
]  # fmt: skip


def train(size: int, config: Path, run: Path, day: Day | None = None) -> list[Any]:
    words = ["train", config, f"--checkpoint.dir={run}", HOOKS, *FLAGS]
    port = free_port()
    jobs = []
    for rank in range(size):
        extra = place_of(rank, size, port)
        if day is not None:
            extra |= hooks.acting(*acts_of(day, rank, size))
            only = day.inject.get("only", "").format(run=run)
            extra |= injecting(**{**day.inject, "only": only}) if only else {}
        jobs.append(warm.Job((*words, *(day.flags if day is not None else ())), extra))
    return warm.run_together(jobs)


def acts_of(day: Day, rank: int, size: int) -> list[dict[str, Any]]:
    acts = []
    if day.do and rank in day.ranks_hurt(size):
        acts.append({"when": day.when, "step": day.at, "do": day.do})
    # On one rank it would be the second signal.
    return acts + [{"do": day.do, **act} for act in day.more if rank == size - 1 > 0]


def look_at(day: Day, size: int, run: Path, done: list[Any]) -> None:
    """Assert that a session left what the day says."""
    said = "\n".join(f"-- rank {n}: {one.returncode}\n{one.stdout}" for n, one in enumerate(done))
    codes = [one.returncode for one in done]
    assert codes == [day.code_of(rank, size) for rank in range(size)], said
    entries = list_checkpoints(run)
    assert [verify(entry) for entry in entries] == [[]] * len(entries), said
    told = day.outcome_on(size)
    best = day.newest if day.best is None else day.best
    # The one that is being deleted may stand yet.
    standing = [step for step in steps(run) if day.when != "delete" or step != 2]
    assert standing == sorted({best, day.newest} - {0}), said
    newest = f"step_{day.newest}" if day.newest else None
    # The loss falls, so the newest that was evaluated is the best.
    assert (link(run, "latest"), link(run, "best")) == (newest, f"step_{best}" if best else None)
    if told == NOT_BEGUN:
        assert not (run / "outcome.json").exists(), said
        return
    found = outcome(run)
    assert found["outcome"] == told, said
    if told == RUNNING:
        return
    assert (found["step"], found["code"], found["checkpoint"]) == (day.step, day.code, newest), said
    words = {"finished_skipped": "finished at", "nothing_to_do": "nothing to do:"}
    words["stopped"] = "stopped  at"
    line = f"{words.get(told, f'{told} at')} step {day.step}"
    lines = [text for text in done[0].stdout.splitlines() if text.startswith(line)]
    # What fails as the end is told is told by the error.
    assert len(lines) == (told == "finished" if day.when == "end" else 1), said
    look_at_the_hooks(day, size, run, told)


def look_at_the_hooks(day: Day, size: int, run: Path, told: str) -> None:
    """Assert that the ranks that ended in order heard of each commit, and of the end once."""
    for rank in range(size):
        path = run / (f"calls-{rank}.txt" if rank else "calls.txt")
        hurt = rank in day.ranks_hurt(size) and (day.hurt is not None or day.do == "raise")
        if hurt or not path.exists():
            assert hurt or day.step == 0, path
            continue
        calls = path.read_text().splitlines()
        committed = [int(call.split()[1]) for call in calls if call.startswith("committed")]
        assert f"snapshot {day.newest}" in calls or not committed, calls
        assert max(committed, default=0) == day.newest, calls
        ends = [call for call in calls if call.startswith("end ")]
        if day.when == "end":
            told = "finished"
        assert ends[-1:] == [f"end {told}"], calls
        assert len(ends) == 1 + day.after_the_end, calls


def state(run: Path) -> dict[str, Any]:
    """Return the digests of what step 6 holds, and its plain state but for the hooks' own."""
    found: dict[str, Any] = digests(run, 6)
    return {**found, "plain": {**json.loads(found["plain"][0]), "hooks": None}}


def live_through(day: Day, size: int, config: Path, run: Path, reference: Path) -> None:
    if day.after_the_end:
        shutil.copytree(reference, run, symlinks=True)
    look_at(day, size, run, train(size, config, run, day))
    for done in train(size, config, run):
        assert done.returncode == 0, done.stdout
    assert steps(run) == [6]
    assert state(run) == state(reference)
    assert losses(run) == losses(reference)
    assert (link(run, "best"), link(run, "latest")) == ("step_6", "step_6")
    assert outcome(run)["outcome"] == ("nothing_to_do" if day.newest == 6 else "finished")
    assert len(events(run, "evaluation")) == 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.timeout(900)
def test_each_ending_at_each_moment_leaves_what_it_should_and_continues(config, tmp_path, size):
    """A half of all days on two ranks, a third on one, a sixth on four; or all of them."""
    days = worst_days.some(DAYS, of={1: 3, 2: 2, 4: 6}[size])
    print(f"KEEPSTEP_TEST_SEED={worst_days.SEED}", [day.name for day in days])

    untouched = tmp_path / "untouched"
    for done in train(size, config, untouched):
        assert done.returncode == 0, done.stdout
    with ThreadPoolExecutor(AT_ONCE) as pool:
        lives = {
            day.name: pool.submit(live_through, day, size, config, tmp_path / day.name, untouched)
            for day in days
        }
    errors = {name: error for name, life in lives.items() if (error := life.exception())}
    for name, error in errors.items():
        print(f"== {name}", *traceback.format_exception(error))
    assert list(errors) == []
