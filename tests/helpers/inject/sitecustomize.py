"""Hooks the real installed command at its file operations; on PYTHONPATH of a child process.

`KEEPSTEP_TEST_INJECT` holds JSON: `at` (the number of the operation, from 1), `action` (kill,
EIO, ENOSPC or log), `only` (a prefix of operations that count, such as a path's part), `every`
(fail at each operation from `at` on), `log` (a file that gets one line an operation), `armed_by`
(a file: operations count only while it is there), `rank` (a rank's number as text: only it
fails). `signal_at_import` ([module, signal]) sends the process a signal when it begins to import a
module. `copies` ([folder, into]) copies a folder before each operation, into one of that number.
`hold_copy` (seconds) is how long the writer of an asynchronous save waits before it copies. The
product is unmodified: only the announcement `Disk.operation`, which does nothing in production,
and that moment are replaced.
"""

import errno
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import signal
import sys
import threading

_SPEC = json.loads(os.environ.get("KEEPSTEP_TEST_INJECT", "{}"))
_count = 0


def _operation(self, name, path):
    global _count
    text = f"{name} {path}"
    if _SPEC.get("rank", os.environ.get("RANK")) != os.environ.get("RANK"):
        return
    if _SPEC.get("only", "") not in text or _SPEC.get("not", "\0") in text:
        return
    if "armed_by" in _SPEC and not os.path.exists(_SPEC["armed_by"]):
        return
    _count += 1
    if "log" in _SPEC:
        with open(_SPEC["log"], "a") as log:
            log.write(f"{_count} {text}\n")
    if "copies" in _SPEC:
        folder, into = _SPEC["copies"]
        shutil.copytree(folder, f"{into}/{_count}", symlinks=True)
    at = _SPEC.get("at", 0)
    if _count == at or (_SPEC.get("every") and at and _count > at):
        if _SPEC["action"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if _SPEC["action"] == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        number = getattr(errno, _SPEC["action"])
        raise OSError(number, os.strerror(number), str(path))


def _announce(module):
    module.Disk.operation = _operation


def _hold_copy(module):
    copy = module.Cut.copy

    def late(cut):
        threading.Event().wait(_SPEC["hold_copy"])
        return copy(cut)

    module.Cut.copy = late


def _changes():
    changes = {"keepstep.store.disk": _announce}
    if "hold_copy" in _SPEC:
        changes["keepstep.store.staging"] = _hold_copy
    return changes


def change_what_is_imported():
    """Make the changes now, in a process that has imported the modules already."""
    for name, change in _changes().items():
        change(importlib.import_module(name))


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces the announcement as soon as the product imports its disk."""

    def find_spec(self, name, path, target=None):
        if name == _SPEC.get("signal_at_import", [None])[0]:
            number = signal.Signals[_SPEC.pop("signal_at_import")[1]]
            os.kill(os.getpid(), number)
        changes = _changes()
        if name not in changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            changes[name](module)

        loader.exec_module = exec_module
        return spec


if _SPEC:
    sys.meta_path.insert(0, _Finder())
