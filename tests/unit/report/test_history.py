"""A journal as columns, whole or torn, growing, shortened and replaced."""

import json
import math
import shutil

import pytest

from keepstep.report.history import History, JournalReader, read_history
from keepstep.run.journal import Journal
from keepstep.store.disk import Disk
from tests.helpers.told import Told


def test_it_holds_every_step_evaluation_save_session_and_ending(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 4)
    run.evaluate(4, valid_loss=0.5)
    run.saved(4)
    run.end("stopped", code=75, reason="SIGTERM", step=4)
    run.session(resumed_at=4)
    run.step(5, math.nan)
    found = read_history(tmp_path / "journal.jsonl")
    assert list(found.steps) == [1, 2, 3, 4, 5]
    assert list(found.tokens) == [32, 64, 96, 128, 160]
    assert found.value("loss", 3) == 1 / 3
    assert found.value("loss", 9) is None
    assert math.isnan(found.value("loss", 5))
    assert found.skipped == [5]
    assert [(e.step, e.metrics) for e in found.evaluations] == [(4, {"valid_loss": 0.5})]
    assert [(s.step, s.name) for s in found.saves] == [(4, "step_4")]
    first, second = found.sessions
    assert (first.resumed_at, first.outcome["code"]) == (None, 75)
    assert (second.resumed_at, second.outcome) == (4, None)
    assert found.unreadable == 0


def test_wherever_the_writing_is_cut_the_whole_lines_are_read_and_no_other(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 5)
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        found = read_history(path)
        assert len(found.steps) + len(found.events) == whole[:cut].count(b"\n")
        assert found.unreadable == 0


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path):
    run = Told(tmp_path)
    run.session()
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path)
    assert [e["kind"] for e in reader.poll()] == ["session"]
    run.step(1, 0.5)
    line = path.read_bytes().splitlines(keepends=True)[-1]
    begun = path.read_bytes()[: -len(line)]
    path.write_bytes(begun + line[:20])
    assert list(reader.poll()) == []
    path.write_bytes(begun + line)
    assert [e["step"] for e in reader.poll()] == [1]
    assert list(reader.poll()) == []


def test_a_line_that_a_kill_left_torn_is_counted_and_costs_no_other(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 2)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    run.journal.close()
    run.steps(2, 3)
    found = read_history(path)
    assert list(found.steps) == [1, 2, 3]
    assert found.unreadable == 1


def test_what_a_resume_takes_back_is_in_it_no_longer_and_what_is_new_is_told_once(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 9)
    reader = JournalReader(tmp_path / "journal.jsonl")
    assert len(list(reader.poll())) == 10
    # By the next look the journal is longer than it was: its size tells nothing.
    run.session(resumed_at=4)
    run.steps(5, 30, scale=2.0)
    told = list(reader.poll())
    assert [e["kind"] for e in told[:2]] == ["session", "resumed"]
    assert [e["step"] for e in told[2:]] == list(range(5, 31))
    assert list(reader.history.steps) == list(range(1, 31))
    assert reader.history.value("loss", 5) == 2 / 5
    assert len(reader.history.sessions) == 2


def test_a_journal_that_is_replaced_or_moved_away_is_read_anew(tmp_path):
    run = Told(tmp_path / "run")
    run.session()
    run.steps(1, 9)
    path = tmp_path / "run/journal.jsonl"
    reader = JournalReader(path)
    assert len(list(reader.poll())) == 10
    other = Told(tmp_path / "other", clock=run.clock)
    other.session()
    other.steps(1, 3, scale=5.0)
    shutil.move(path, tmp_path / "aside")
    assert list(reader.poll()) == []
    assert reader.history.step == 9
    shutil.move(tmp_path / "other/journal.jsonl", path)
    assert [e["kind"] for e in reader.poll()] == ["session", "step", "step", "step"]
    assert list(reader.history.values["loss"]) == [5.0, 2.5, 5 / 3]


def test_a_step_that_stands_twice_counts_as_it_was_taken_last(tmp_path):
    """A kill in the middle of a rewind may leave some of the old end behind the new one."""
    run = Told(tmp_path)
    run.session()
    run.steps(1, 6)
    run.evaluate(6, valid_loss=1.0)
    run.saved(6)
    run.step(7, math.inf)
    run.steps(4, 5, scale=3.0)
    found = read_history(tmp_path / "journal.jsonl")
    assert list(found.steps) == [1, 2, 3, 4, 5]
    assert found.value("loss", 4) == 3 / 4
    assert (found.evaluations, found.saves, found.skipped) == ([], [], [])
    assert {len(column) for column in found.values.values()} == {5}
    assert len(found.times) == len(found.seconds) == len(found.session) == 5


def step(**changes):
    facts = {"kind": "step", "time": 1.0, "step": 1, "loss": 1.0, "grad_norm": 1.0, "rate": 1.0}
    return {**facts, "tokens": 1, **changes}


@pytest.mark.parametrize(
    "event",
    [
        step(step="1"),
        step(step=-1),
        step(step=1 << 63),
        step(tokens=1 << 80),
        step(tokens=None),
        step(loss="low"),
        step(loss=[]),
        step(time="now"),
        step(time=1e300),
        step(time=math.nan),
        {"kind": "step", "time": 1.0},
        {"kind": "step"},
        {"kind": ["step"]},
        {"kind": "evaluation", "time": 1.0, "step": 1, "metrics": [1]},
        {"kind": "evaluation", "time": 1.0, "step": 1, "metrics": {"loss": "x"}},
        {"kind": "saved", "time": 1.0, "step": 1},
        {"kind": "session", "time": 1.0, "pid": "x", "environment": {}},
        {"kind": "session", "time": 1.0, "pid": 1, "environment": 3},
        {"kind": "resumed", "time": 1.0, "step": None},
    ],
    ids=lambda event: json.dumps(event)[:90],
)
def test_an_event_that_lacks_what_its_kind_has_is_counted_and_leaves_nothing(event):
    history = History()
    assert history.add(step())
    assert not history.add(event)
    assert history.unreadable == 1
    assert (list(history.steps), history.events) == ([1], [])
    columns = [history.times, history.seconds, history.tokens, history.session]
    assert {len(column) for column in [*columns, *history.values.values()]} == {1}


def test_a_kind_that_a_later_version_writes_is_kept_as_it_came():
    history = History()
    event = {"kind": "rollback", "time": 1.0, "to": 3}
    assert history.add(event)
    assert history.events == [event]


def test_time_stands_still_between_sessions_and_speed_is_that_within_them(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 5)
    run.clock.now += 86400
    run.session(resumed_at=5)
    run.clock.each = 0.25
    run.steps(6, 10)
    found = read_history(tmp_path / "journal.jsonl")
    assert found.seconds[-1] == pytest.approx(5 * 0.5 + 0.5 + 5 * 0.25)
    steps, tokens = found.speed()
    assert steps == pytest.approx(8 / (4 * 0.5 + 4 * 0.25))
    assert tokens == pytest.approx(32 * steps)
    # Of the last steps only those of the session that lives.
    assert found.speed(last=100)[0] == pytest.approx(4)
    assert found.speed(last=2)[0] == pytest.approx(4)
    assert History().speed() is None


def test_a_clock_that_was_set_back_makes_no_time(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 3)
    run.clock.now -= 3600
    run.steps(4, 6)
    found = read_history(tmp_path / "journal.jsonl")
    assert list(found.seconds) == sorted(found.seconds)
    assert found.seconds[-1] == pytest.approx(5 * 0.5)


def test_the_best_is_never_a_nan_and_of_two_alike_it_is_the_older(tmp_path):
    run = Told(tmp_path)
    run.session()
    for number, value in enumerate([math.nan, 2.0, 1.0, 1.0, -math.inf, 3.0, math.inf], 1):
        run.evaluate(number, valid_loss=value)
    found = read_history(tmp_path / "journal.jsonl")
    assert found.best("valid_loss", "min") == (3, 1.0)
    assert found.best("valid_loss", "max") == (6, 3.0)
    assert found.best("accuracy", "max") is None


def test_a_real_rewind_of_a_real_journal_is_what_the_reader_sees(tmp_path):
    run = Told(tmp_path)
    run.session()
    run.steps(1, 50)
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path)
    list(reader.poll())
    for back in range(49, 0, -7):
        Journal(path, disk=Disk()).rewind(back, keep_evaluation=True)
        assert list(reader.poll()) == []
        assert reader.history.step == back
