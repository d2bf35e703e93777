"""When a session stops for its end, and when a save is due or cannot be made: over given times."""

import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from keepstep.config.schema import Config
from keepstep.errors import UsageError
from keepstep.run.clock import Clock
from keepstep.run.stop import StopRequests

END = "SLURM_JOB_END_TIME"


class Now:
    """A time that passes as the test says."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv(END, raising=False)


def clock_of(now, *, stop=None, limit="", interval="", grace="180s", slurm=True):
    config = Config()
    run = replace(config.run, time_limit=limit, grace=grace, slurm_end_time=slurm)
    checkpoint = replace(config.checkpoint, interval_time=interval)
    config = replace(config, run=run, checkpoint=checkpoint)
    return Clock(config, stop if stop is not None else StopRequests(), now=now)


def began(now, stop, **options):
    """A clock at the first step, as if the process had begun this instant."""
    clock = clock_of(now, stop=stop, **options)
    clock.rehearsed(0.0, bytes_of_a_rank=0.0)
    return clock


def save(clock, now, seconds):
    clock.save_begins()
    now.seconds += seconds
    clock.save_ended(seconds)


def steps_until_stop(clock, stop, now, seconds, *, saving=False):
    while not stop.requested:
        now.seconds += seconds
        clock.look(saving=saving)
        assert now.seconds < 1e5, "it never stops"


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize(("step", "saved"), [(1.0, 10.0), (30.0, 10.0), (0.1, 100.0)])
def test_a_stop_leaves_time_for_one_more_step_and_for_the_saves_with_a_margin(step, saved, saving):
    now, stop = Now(), StopRequests()
    clock = began(now, stop, limit="1000s")
    ends_at = min(clock._ends)[0]
    save(clock, now, saved)
    steps_until_stop(clock, stop, now, step, saving=saving)
    needed = 1.25 * (step + saved * (1 + saving)) + 2
    assert needed - step <= ends_at - now.seconds <= needed
    assert stop.reason.startswith("run.time_limit (1000s) comes in ")


def test_the_longest_of_what_was_measured_counts_and_not_the_last():
    now, stop = Now(), StopRequests()
    clock = began(now, stop, limit="1000s")
    for seconds in (5.0, 40.0, 5.0):
        save(clock, now, seconds)
    for seconds in (90.0, 1.0, 20.0, 1.0):
        now.seconds += seconds
        clock.look(saving=False)
        if seconds == 90.0:
            assert clock.reserve_seconds(saving=False) == 1.25 * (40 + 90) + 2
    # The first step of a session compiles: it counts until there is another.
    assert clock.reserve_seconds(saving=False) == 1.25 * (40 + 20) + 2


def test_a_save_is_no_part_of_a_step():
    now, stop = Now(), StopRequests()
    clock = began(now, stop, limit="1000s")
    now.seconds += 1
    clock.look(saving=False)
    save(clock, now, 50.0)
    now.seconds += 1
    clock.look(saving=False)
    assert clock.reserve_seconds(saving=False) == 1.25 * (50 + 1) + 2


def test_what_an_earlier_session_measured_counts_until_there_is_more():
    now, stop = Now(), StopRequests()
    clock = clock_of(now, stop=stop, limit="1000s")
    clock.begin([50.0, 100.0, 70.0])
    clock.rehearsed(1.0, bytes_of_a_rank=1e9)
    assert clock.reserve_seconds(saving=False) == 1.25 * 100 + 2
    assert "a save takes 100.0 s" in clock.end_text


def test_one_slow_save_of_an_earlier_session_leaves_time_to_measure_another():
    now, stop = Now(), StopRequests()
    clock = clock_of(now, stop=stop, limit="1000s")
    clock.begin([5000.0, 10.0])
    clock.rehearsed(1.0, bytes_of_a_rank=1e9)
    left = min(clock._ends)[0] - now.seconds
    assert clock.reserve_seconds(saving=False) == pytest.approx(1.25 * left / 2 + 2)
    for _ in range(8):
        save(clock, now, 10.0)
    assert clock.reserve_seconds(saving=False) == 1.25 * 10 + 2


def test_what_is_assumed_is_said_and_never_takes_the_time_of_the_steps():
    now, stop = Now(), StopRequests()
    clock = clock_of(now, stop=stop, limit="1000s")
    clock.begin([])
    clock.rehearsed(2.0, bytes_of_a_rank=5e9)
    assert clock.reserve_seconds(saving=False) == 1.25 * 52 + 2
    assert "a save is assumed to take 52.0 s until one is measured" in clock.end_text
    clock.rehearsed(2.0, bytes_of_a_rank=1e15)
    left = min(clock._ends)[0] - now.seconds
    assert clock.reserve_seconds(saving=False) == pytest.approx(1.25 * left / 2 + 2)
    save(clock, now, 600.0)
    assert clock.reserve_seconds(saving=False) == 1.25 * 600 + 2, "what is measured counts whole"


def test_a_run_without_an_end_never_stops_for_it():
    now, stop = Now(), StopRequests()
    clock = began(now, stop)
    now.seconds += 1e9
    clock.look(saving=True)
    assert not stop.requested
    assert clock.end_text == ""


def test_the_end_of_the_job_counts_too_and_the_earlier_of_both_wins(monkeypatch):
    now = Now()
    monkeypatch.setenv(END, str(int(time.time()) + 500))
    assert min(clock_of(now)._ends)[0] == pytest.approx(now.seconds + 500, abs=2)
    assert "the end of the Slurm job comes in" in clock_of(now, limit="1000s").end_text
    assert "run.time_limit (400s) comes in" in clock_of(now, limit="400s").end_text.replace(",", "")
    assert clock_of(now, slurm=False)._ends == []


def test_an_end_of_a_job_that_is_over_is_told_and_stops_nothing(monkeypatch):
    monkeypatch.setenv(END, str(int(time.time()) - 60))
    clock = clock_of(Now())
    assert clock._ends == []
    assert f"{END} was 6" in clock.unheeded


def test_an_end_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(END, "tomorrow")
    with pytest.raises(UsageError, match="'tomorrow', not seconds since 1970"):
        clock_of(Now())


def test_a_save_is_due_by_the_clock_counted_from_the_one_before():
    now = Now()
    clock = began(now, StopRequests(), interval="10s")
    found = []
    for _ in range(25):
        now.seconds += 1
        if clock.save_is_due:
            found.append(now.seconds - 1000)
            clock.save_begins()
    assert found == [10, 20]
    assert not began(now, StopRequests()).save_is_due


def test_only_a_measured_save_that_is_longer_than_the_grace_left_is_not_begun():
    now, stop = Now(), SimpleNamespace(grace_left_seconds=5.0, grace_seconds=8.0)
    clock = clock_of(now, stop=stop, grace="8s")
    clock.rehearsed(100.0, bytes_of_a_rank=1e12)
    assert clock.save_fits, "what is assumed keeps nothing from being tried"
    save(clock, now, 7.0)
    assert not clock.save_fits
    assert clock.grace_warning == ""
    save(clock, now, 9.0)
    assert "a save took 9.0 s, and run.grace is 8s" in clock.grace_warning
    assert "the fastest took 7.0 s" in clock.no_time
    save(clock, now, 4.0)
    assert clock.save_fits, "one was fast enough"
    stop.grace_left_seconds = None
    assert clock.save_fits, "no signal came"


def test_the_time_counts_from_the_start_of_the_process_and_not_of_its_first_line():
    code = (
        "import time; first = time.monotonic()\n"
        "from keepstep.config.schema import Config, RunConfig\n"
        "from keepstep.run.clock import Clock\n"
        "from keepstep.run.stop import StopRequests\n"
        "clock = Clock(Config(run=RunConfig(time_limit='100s')), StopRequests())\n"
        "print(100 - (clock._ends[0][0] - first))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # How long before the first line the limit began: the kernel counts in hundredths of a second.
    assert -0.02 < float(done.stdout) < time.monotonic() - started
