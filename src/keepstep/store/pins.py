"""Checkpoints that a person wants kept: `pins.json` beside them, and the moment of a deletion.

Guarantees:
1. A pin is a line in a file of its own, written durably and whole: no checkpoint is modified.
2. Once `pin` has returned, nothing of this package deletes that checkpoint until it is unpinned,
   also where a live session was about to. Both sides hold `pins.lock` for a moment: a pin while
   it looks at the checkpoint and writes, a deletion while it reads the pins and renames. So a
   deletion comes wholly before a pin, which then finds nothing to pin and says so, or wholly
   after it, and sees it. Without the lock, a deletion that read the pins a moment too early would
   take a checkpoint that somebody was just told is kept.
3. A deletion never waits for a pin: where the lock is taken it leaves the checkpoint for the next
   time. A frozen `keepstep ckpt pin` does not hold up training.
4. Where the pins cannot be read, nothing is deleted.

A pin names a checkpoint by its run, its number and its time, not by its folder: it follows one
that is set aside, and does not hold another that is saved under the same name later.
"""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.errors import CheckpointDamaged, Locked, NotFound
from keepstep.store import commit
from keepstep.store.catalog import Checkpoint, look_at
from keepstep.store.disk import Disk
from keepstep.store.layout import PINS_LOCK_NAME, PINS_NAME
from keepstep.store.manifest import Manifest
from keepstep.store.regular import opened

Identity = tuple[str, int, float]
Pins = dict[Identity, str]
"""The name that each pinned checkpoint had when it was pinned."""

_FORMAT = 1
_WAIT_SECONDS = 20.0
_ASK_AGAIN_SECONDS = 0.02
# Record locks do not conflict within one process.
_in_this_process = threading.Lock()


def identity_of(manifest: Manifest) -> Identity:
    """Return what a pin knows a checkpoint by."""
    return manifest.run_id, manifest.sequence, manifest.time


def read_pins(folder: Path) -> Pins:
    """Return the pins of a folder of checkpoints; CheckpointDamaged where they cannot be read."""
    path = folder / PINS_NAME
    try:
        with opened(path) as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {_FORMAT}")
        return {
            (str(p["run_id"]), int(p["sequence"]), float(p["time"])): str(p["name"])
            for p in data["pinned"]
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read: {error!r}",
            hint="Nothing is deleted until it is mended. Remove it, and pin again what shall stay.",
        ) from error


def pin(folder: Path, entry: Checkpoint, *, disk: Disk) -> bool:
    """Keep a checkpoint until it is unpinned; False where it was pinned already.

    Needs no session's lock. NotFound where the checkpoint goes away meanwhile.
    """
    if entry.manifest is None:
        raise CheckpointDamaged(f"{entry.path} cannot be pinned: {entry.fault}")
    wanted = identity_of(entry.manifest)
    with _hold(folder, wait_seconds=_WAIT_SECONDS):
        there = look_at(entry.path, aside=entry.aside).manifest
        if there is None or identity_of(there) != wanted:
            raise NotFound(f"{entry.path} went away before it was pinned")
        pins = read_pins(folder)
        if wanted in pins:
            return False
        _write(folder, {**pins, wanted: entry.name}, disk)
    return True


def unpin(folder: Path, identity: Identity, *, disk: Disk) -> None:
    """Let retention decide again; NotFound where there is no such pin."""
    with _hold(folder, wait_seconds=_WAIT_SECONDS):
        pins = read_pins(folder)
        if identity not in pins:
            raise NotFound(f"checkpoint {identity[1]} of run {identity[0]} is not pinned")
        _write(folder, {key: name for key, name in pins.items() if key != identity}, disk)


def delete_unless_pinned(folder: Path, entry: Checkpoint, *, disk: Disk) -> bool:
    """Delete a checkpoint, whole; False where it is pinned. Only under the folder's lock.

    Locked where a pin is just being made or taken back.
    """
    with _hold(folder, wait_seconds=0):
        if entry.manifest is not None and identity_of(entry.manifest) in read_pins(folder):
            return False
        trash = commit.hide(entry.path, into=folder, disk=disk)
    commit.remove(trash, disk=disk)
    return True


def _write(folder: Path, pins: Pins, disk: Disk) -> None:
    rows = [
        {"name": name, "run_id": run_id, "sequence": sequence, "time": when}
        for (run_id, sequence, when), name in sorted(pins.items(), key=lambda item: item[0])
    ]
    text = json.dumps({"format": _FORMAT, "pinned": rows}, indent=2) + "\n"
    try:
        disk.replace_file(folder / PINS_NAME, text.encode())
    except FileNotFoundError:
        # A session that starts just now sweeps temporary files away, once.
        disk.replace_file(folder / PINS_NAME, text.encode())


@contextmanager
def _hold(folder: Path, *, wait_seconds: float) -> Iterator[None]:
    """Hold the pins of a folder for a moment; Locked where others hold them too long."""
    deadline = time.monotonic() + wait_seconds
    if not _in_this_process.acquire(timeout=wait_seconds):
        raise _busy(folder)
    try:
        descriptor = os.open(folder / PINS_LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            while not _taken(descriptor):
                if time.monotonic() >= deadline:
                    raise _busy(folder)
                threading.Event().wait(_ASK_AGAIN_SECONDS)
            yield
        finally:
            os.close(descriptor)
    finally:
        _in_this_process.release()


def _taken(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _busy(folder: Path) -> Locked:
    return Locked(
        f"the pins in {folder} are being changed by another process",
        hint="Try again; if it stays so, look for a stopped `keepstep ckpt pin` or a stopped run.",
    )
