"""Runs the command in processes that are forked from one that has already imported torch.

For loops over many kills: importing takes longer than all else that so short a run does. What a
process does while it starts is for the commands that `tests.helpers.command` starts.
"""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.command import DEADLINE_SECONDS, environment

_INJECT = Path(__file__).parent / "inject" / "sitecustomize.py"
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.helpers.warm_imports"])


def keepstep(
    *words: object, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; the output holds both streams."""
    with mock.patch.dict(os.environ, environment(), clear=True):
        # What it imports sees the environment of a command, which each fork is given again.
        forkserver.ensure_running()
    command = ["keepstep", *map(str, words)]
    with tempfile.TemporaryFile() as output:
        there = reduction.DupFd(output.fileno())
        process = _forks.Process(target=_run, args=(command, environment(extra), there))
        process.start()
        process.join(DEADLINE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode, stdout=text)


def _run(command: list[str], variables: dict[str, str], output: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    descriptor = output.detach()
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
    from keepstep.cli.main import main

    sys.exit(main())
