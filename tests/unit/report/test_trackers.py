"""Trackers follow a real journal: back, over errors, over sessions, from anywhere in a long one."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep.report import trackers
from keepstep.report.tensorboard import TensorBoard
from keepstep.report.trackers import Follower, Lines, Record
from keepstep.run.journal import Journal, near
from keepstep.run.outcome import Ending, Outcome
from keepstep.store.disk import Disk
from tests.helpers import tracking

OUTCOME = Outcome(ending=Ending.FINISHED, step=9, updates=9)


class Book:
    """A journal as a run writes it."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path, disk=Disk(), clock=lambda: self.now)

    def steps(self, numbers: Sequence[int], *, loss: float = 1.0) -> None:
        for step in numbers:
            self.now += 0.5
            facts = {"grad_norm": 0.5, "rate": 0.1, "updates": step, "tokens": 32 * step}
            self.journal.write("step", step=step, loss=loss, skipped=False, **facts)


def follow(tracker: Any, book: Book, *, step: int = 0) -> tuple[Follower, list[str]]:
    words: list[str] = []
    follower = Follower("it", tracker, journal=book.path, step=step, tell=words.append)
    follower.start()
    return follower, words


def wait_for(follower: Follower, step: int) -> None:
    deadline = time.monotonic() + 30
    while follower.written != step:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def ended(follower: Follower) -> None:
    follower.end(OUTCOME)
    follower.join(30)
    assert follower.is_done


class Held:
    """A tracker in memory, which fails as often as it is told to."""

    def __init__(self, *, failures: int = 0) -> None:
        self.records: list[Record] = []
        self.failures = failures
        self.asked: list[int] = []

    def rewind(self, step: int) -> int:
        self.asked.append(step)
        self.records = [record for record in self.records if record.step <= step]
        return self.records[-1].step + 1 if self.records else 0

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.step >= 3 and self.failures > 0:
                self.failures -= 1
                raise ConnectionError("the network is gone\nsince noon")
            self.records.append(record)

    def close(self, outcome: Outcome) -> None:
        self.records.append(Record(step=outcome.step, time=0.0, texts={"outcome": "over"}))


def test_what_a_run_goes_back_from_is_taken_back_in_the_middle_of_a_session(tmp_path):
    book = Book(tmp_path)
    book.steps(range(1, 7))
    follower, words = follow(TensorBoard(tmp_path / "tb", config="a = 1\n"), book)
    wait_for(follower, 6)
    book.journal.rewind(3, keep_evaluation=True)
    book.steps([4, 5], loss=2.0)
    follower.rewind(3)
    book.steps([6, 7], loss=2.0)
    ended(follower)
    shown = tracking.tensorboard(tmp_path / "tb")["train/loss"]
    assert shown == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]
    assert words == []


def test_two_ways_back_at_once_are_one_to_the_earlier_step(tmp_path):
    book = Book(tmp_path)
    book.steps(range(1, 5))
    held = Held()
    follower, _ = follow(held, book)
    wait_for(follower, 4)
    follower.rewind(1)
    follower.rewind(3)
    ended(follower)
    assert [record.step for record in held.records] == [1, 2, 3, 4, 9]
    assert min(held.asked[1:]) == 1


@pytest.mark.parametrize("failures", [1, 3])
def test_an_error_is_told_once_and_what_it_cost_is_supplied(tmp_path, monkeypatch, failures):
    monkeypatch.setattr(trackers, "_RETRY_SECONDS", 0.01)
    book = Book(tmp_path)
    book.steps(range(1, 6))
    held = Held(failures=failures)
    follower, words = follow(held, book)
    wait_for(follower, 5)
    ended(follower)
    assert [record.step for record in held.records] == [1, 2, 3, 4, 5, 9]
    assert words == [
        "ConnectionError: the network is gone; tried again every 0.01 s",
        "goes on, and lacks nothing",
    ]


def test_a_tracker_in_trouble_is_tried_once_more_at_the_end_and_then_let_be(tmp_path):
    book = Book(tmp_path)
    book.steps(range(1, 6))
    for failures, is_done in ((2, True), (99, False)):
        held = Held(failures=failures)
        follower, words = follow(held, book)
        began = time.monotonic()
        while not words:
            assert time.monotonic() < began + 30
            threading.Event().wait(0.01)
        held.failures -= 1
        follower.end(OUTCOME)
        follower.join(10)
        assert not follower.is_alive()
        assert follower.is_done is is_done
        if not is_done:
            assert follower.lack().startswith("holds no step after 0;")


def test_a_tracker_whose_close_fails_is_not_done(tmp_path):
    class Unsent(Held):
        def close(self, outcome: Outcome) -> None:
            raise TimeoutError("not all is sent")

    book = Book(tmp_path)
    book.steps([1])
    follower, words = follow(Unsent(), book)
    follower.end(OUTCOME)
    follower.join(30)
    assert not follower.is_done
    assert words == ["TimeoutError: not all is sent; tried again every 30 s"]


def test_any_step_of_a_long_journal_is_found_without_reading_it_through(tmp_path):
    book = Book(tmp_path)
    journal = book.journal
    for step in range(1, 3001):
        book.steps([step])
        if step % 100 == 0:
            journal.write("evaluation", step=step, metrics={"valid_loss": 1.0})
            journal.write("saved", step=step, sequence=step, path=f"step_{step}")
    size = book.path.stat().st_size
    assert size > 5 * 65536
    for step in (*range(0, 3003, 77), 1, 100, 2999, 3000, 3001):
        start = near(book.path, step)
        records = everything(Lines(book.path, step))
        wanted = list(range(max(step, 1), 3001))
        assert [r.step for r in records if "train/loss" in r.numbers] == wanted
        evaluated = [r.step for r in records if "evaluation/valid_loss" in r.numbers]
        assert evaluated == [n for n in range(100, 3001, 100) if n >= step]
        saved = [r.step for r in records if "checkpoint/sequence" in r.numbers]
        assert saved == evaluated
        if step > 1500:
            assert start > size / 4


def everything(lines: Lines) -> list[Record]:
    found = []
    while not lines.at_end:
        found += lines.next()
    return found


def test_speed_is_told_within_a_session_only_and_a_loss_may_be_no_number(tmp_path):
    book = Book(tmp_path)
    book.steps([1, 2])
    book.journal.write("session", pid=1, environment={})
    book.now += 3600
    book.steps([3], loss=float("nan"))
    book.steps([4])
    book.now -= 10  # The clock was put back.
    book.steps([5, 6])
    records = everything(Lines(book.path, 0))
    speeds = {r.step: r.numbers.get("train/tokens_per_second") for r in records}
    assert speeds == {1: None, 2: 64.0, 3: None, 4: 64.0, 5: None, 6: 64.0}
    assert str(records[2].numbers["train/loss"]) == "nan"


def test_a_line_that_is_being_written_is_waited_for_and_a_huge_one_is_passed(tmp_path):
    book = Book(tmp_path)
    book.steps([1])
    book.journal.write("notice", word="x", text="y" * 200_000)
    whole = book.path.read_bytes()
    book.steps([2])
    more = book.path.read_bytes()[len(whole) :]
    book.path.write_bytes(whole + more[:20])
    lines = Lines(book.path, 0)
    assert [record.step for record in everything(lines)] == [1]
    book.path.write_bytes(whole + more)
    assert [record.step for record in lines.next()] == [2]


def test_a_clock_that_went_back_puts_no_session_before_another(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        tracker = TensorBoard(tmp_path, config="")
        tracker.rewind(5)
        tracker.write([Record(step=n, time=1.0, numbers={"loss": loss}) for n in (5, 6)])
        tracker.close(OUTCOME)
        newest = max(tmp_path.iterdir())
        begun = newest.name.split(".")[3]
        if loss == 1.0:
            newest.replace(newest.with_name(newest.name.replace(begun, "4000000000")))
    assert tracking.tensorboard(tmp_path)["loss"] == [(5, 3.0), (6, 3.0)]
