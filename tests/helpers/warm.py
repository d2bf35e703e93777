"""Runs the command in processes that are forked from one that has already imported torch.

For loops over many kills: importing takes longer than all else that so short a run does. What a
process does while it starts is for the commands that `tests.helpers.command` starts.
"""

import contextlib
import importlib.util
import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tests.helpers.command import DEADLINE_SECONDS, Session, environment

_INJECT = Path(__file__).parent / "inject" / "sitecustomize.py"
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.helpers.warm_imports"])
_starting = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A command of ours, or Python code, with its words and environment."""

    words: tuple[object, ...]
    extra: Mapping[str, str] | None = None
    code: str = ""


def keepstep(
    *words: object, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; the output holds both streams."""
    return run_together([Job(words, extra)])[0]


class WarmSession(Session):
    """A command, or Python code, that runs in a fork while the test looks on."""

    def __init__(
        self, *words: object, extra: Mapping[str, str] | None = None, code: str = ""
    ) -> None:
        _prepare()
        read, write = os.pipe()
        process = _start(Job(words, extra, code), write)
        os.close(write)
        self._look_at(_Fork(process, os.fdopen(read, errors="replace")))

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, unless it has ended and is waited for already."""
        with contextlib.suppress(ProcessLookupError):
            super().signal(number)

    def kill_group(self) -> None:
        """Kill the command, which may not lead its group yet, and everything it started."""
        super().kill_group()
        self.process.kill()


@dataclass(frozen=True)
class _Fork:
    """A fork as `Session` sees a process."""

    process: Any
    stdout: IO[str]

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def returncode(self) -> int | None:
        return None if self.process.exitcode is None else int(self.process.exitcode)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return self.returncode


def _prepare() -> None:
    with _starting, mock.patch.dict(os.environ, environment(), clear=True):
        # What it imports sees the environment of a command, which each fork is given again.
        forkserver.ensure_running()


def run_together(jobs: list[Job]) -> list[subprocess.CompletedProcess[str]]:
    """Run several at once to their ends, such as the ranks of a run."""
    _prepare()
    with ExitStack() as stack:
        outputs = [stack.enter_context(_output()) for _ in jobs]
        running = [
            (job, _start(job, output.fileno()), output)
            for job, output in zip(jobs, outputs, strict=True)
        ]
        deadline = time.monotonic() + DEADLINE_SECONDS
        for _, process, _ in running:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for _, process, _ in running if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        ended = [_ended(*one) for one in running]
    # What hangs must not pass for what a test kills.
    assert not late, f"not over after {DEADLINE_SECONDS} s: {ended}"
    return ended


def _output() -> IO[bytes]:
    return tempfile.TemporaryFile()


@dataclass(frozen=True)
class _Given:
    """A descriptor that is handed over with the order to fork: no thread here serves it later."""

    descriptor: int

    def __reduce__(self) -> Any:
        return _taken, (reduction.DupFd(self.descriptor),)


def _taken(given: Any) -> int:
    return int(given.detach())


def _start(job: Job, output: int) -> Any:
    command = ["keepstep", *map(str, job.words)]
    variables = environment(job.extra)
    process = _forks.Process(target=_run, args=(command, job.code, variables, _Given(output)))
    with _starting:
        process.start()
        # Whoever starts another looks at all that are listed, and its thread would take away the
        # exit code that this one waits for.
        multiprocessing.process._children.discard(process)
    return process


def _ended(job: Job, process: Any, output: IO[bytes]) -> subprocess.CompletedProcess[str]:
    output.seek(0)
    text = output.read().decode(errors="replace")
    return subprocess.CompletedProcess(job.words, process.exitcode, stdout=text)


def _run(command: list[str], code: str, variables: dict[str, str], descriptor: int) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
    sys.argv = command
    if "KEEPSTEP_TEST_INJECT" in variables:
        spec = importlib.util.spec_from_file_location("inject", _INJECT)
        assert spec is not None and spec.loader is not None
        inject = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(inject)
        inject.change_what_is_imported()
    if code:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        return
    from keepstep.cli.main import main

    sys.exit(main())
