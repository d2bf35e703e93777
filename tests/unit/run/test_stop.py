"""Signals in a real process: handlers, chains, the watchdog."""

import signal
import subprocess
import sys

PRELUDE = """
import os, signal, sys, threading
from keepstep.run.stop import StopRequests
def hear(number, frame): print("earlier heard", number, flush=True)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def test_a_handler_sets_the_flag_calls_the_earlier_one_and_puts_it_back():
    done = run("""
signal.signal(signal.SIGUSR1, hear)
with StopRequests() as stop:
    assert not stop.requested
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.reason == "SIGUSR1"
    stop.request("later")
    assert stop.reason == "SIGUSR1"
assert signal.getsignal(signal.SIGUSR1) is hear
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.set_wakeup_fd(-1) == -1
assert threading.active_count() == 1
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"earlier heard {int(signal.SIGUSR1)}\n"


def test_a_second_signal_leaves_while_the_main_thread_is_blocked_in_the_kernel():
    done = run("""
with StopRequests() as stop:
    reader, writer = os.pipe()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    os.read(reader, 1)
""")
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "second signal" in done.stderr


def test_the_grace_counts_from_the_first_signal_also_when_it_is_set_later():
    done = run("""
with StopRequests() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    stop.set_grace(0.2)
    os.read(os.pipe()[0], 1)
""")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "the grace of 0.2 s is over" in done.stderr


def test_an_ignored_hangup_stays_ignored():
    done = run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequests() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.requested
""")
    assert done.returncode == 0, done.stderr


def test_a_launchers_copy_of_the_signal_is_not_a_second_one():
    code = """
with StopRequests() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(0.2)
    assert stop.requested
"""
    assert run(code, TORCHELASTIC_RUN_ID="x").returncode == 0
    assert run(code).returncode == 128 + signal.SIGTERM


ORPHAN = """
reader, writer = os.pipe()
parent = os.getpid()
if os.fork():
    os.read(reader, 1)
    os.kill(parent, signal.SIGKILL)
with StopRequests() as stop:
    os.write(writer, b"x")
    while os.getppid() == parent:
        pass
    print("an orphan", flush=True)
    threading.Event().wait(3)
print("at its end", flush=True)
"""


def test_a_process_does_not_outlive_the_launcher_that_started_it():
    done = run(ORPHAN, TORCHELASTIC_RUN_ID="x")
    assert done.stdout == "an orphan\n"
    assert "is gone; leaving at once. Checkpoints are whole." in done.stderr


def test_a_process_that_a_shell_or_a_scheduler_started_outlives_it():
    """As with `nohup`, `setsid` and `disown`."""
    done = run(ORPHAN)
    assert done.stdout == "an orphan\nat its end\n"
    assert done.stderr == ""


LEAVE = """
import time
from keepstep.distributed.leave import leave
{before}
leave(143, "the last line")
"""


def test_the_last_way_out_waits_for_no_terminal():
    full = "os.set_blocking(2, True)\nr, w = os.pipe()\nos.dup2(w, 2)\nos.set_blocking(w, False)"
    full += "\ntry:\n    while True: os.write(w, b'x' * 65536)\nexcept BlockingIOError: pass"
    full += "\nos.set_blocking(w, True)"
    gone = "r, w = os.pipe()\nos.dup2(w, 2)\nos.close(r)"
    for before in ("", full, gone):
        done = run(LEAVE.format(before=before))
        assert done.returncode == 143, before
        if not before:
            assert done.stderr == "the last line\n"


def test_a_signal_that_was_ignored_from_outside_stays_ignored():
    done = run("""
signal.signal(signal.SIGINT, signal.SIG_IGN)
with StopRequests() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop.requested
""")
    assert done.returncode == 0, done.stderr


def test_two_hooks_of_one_class_that_keep_a_state_are_refused():
    import pytest

    from keepstep.errors import UsageError
    from keepstep.run.hooks import Hooks

    class Keeper:
        def state_dict(self):
            return {}

    with pytest.raises(UsageError, match="only one of them"):
        Hooks([Keeper(), Keeper()], is_first=True)
