"""The journal: one line for every step and event of a run, in one append-only file.

Guarantees:
1. A line is whole or absent: a torn last line (a kill in a write) is dropped when it is opened.
2. What a checkpoint's step stands on is durable before that checkpoint is committed (`sync`).
3. After a resume it holds nothing of the steps that are about to be taken again (`rewind`), at a
   cost that grows with what is taken back and not with the length of the run.

Without the rewind a step that was taken twice would stand in it twice, with two losses.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from keepstep.errors import KeepstepError
from keepstep.store.disk import Disk
from keepstep.store.handles import AppendFile
from keepstep.store.regular import opened

_BLOCK_BYTES = 1 << 20
_PART_BYTES = 1 << 16
_OF_A_STEP = frozenset({"step", "evaluation", "saved"})


class Journal:
    """Appends events to `path`; every line is one JSON object with its `kind` and `time`."""

    def __init__(self, path: Path, *, disk: Disk, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._disk = disk
        self._clock = clock
        self._file: AppendFile | None = None

    def rewind(self, step: int, *, keep_evaluation: bool) -> int:
        """Take back every line of a later step; return how many lines went.

        ``keep_evaluation``: whether the evaluation of `step` itself stays. It does not where that
        evaluation is going to be made again.
        """
        if not self._path.exists():
            return 0
        self.close()
        cut, tail = _split_behind(self._path, step)
        kept, gone = [], 0
        for line in tail.splitlines(keepends=True):
            event = parsed_line(line)
            if event is None or _is_taken_back(event, step, keep_evaluation=keep_evaluation):
                gone += 1
            else:
                kept.append(line)
        if gone:
            self._disk.rewrite_tail(self._path, cut, b"".join(kept))
        return gone

    def last_rollback(self, step: int, **checkpoint: Any) -> dict[str, Any] | None:
        """Return the last rollback to the checkpoint of `step` with these facts, if there is one.

        It is told behind the line of that step, so no more than what follows it is read.
        """
        if not self._path.exists():
            return None
        _, tail = _split_behind(self._path, step)
        found = [event for event in map(parsed_line, tail.splitlines(keepends=True)) if event]
        told = [
            event
            for event in found
            if event["kind"] == "rollback" and checkpoint.items() <= event.items()
        ]
        return told[-1] if told else None

    def tells_of_a_save(self) -> int | None:
        """Return the step of the last save that the journal tells of, if there is one."""
        if not self._path.exists():
            return None
        return next((e["step"] for e in _backwards(self._path) if e["kind"] == "saved"), None)

    def save_seconds(self, *, newest: int) -> list[float]:
        """Return what the `newest` last saves took that were measured, the last one first."""
        if not self._path.exists():
            return []
        timed = (e for e in _backwards(self._path) if e["kind"] == "saved" and "seconds" in e)
        return [float(event["seconds"]) for event in islice(timed, newest)]

    def write(self, kind: str, **facts: Any) -> None:
        """Append one event; it is in the kernel's hands when this returns."""
        event = {"kind": kind, "time": round(self._clock(), 3), **facts}
        line = (json.dumps(_plain(event), allow_nan=False) + "\n").encode()
        try:
            if self._file is None:
                # A line of its own: what stands behind a torn one would be lost with it.
                line = b"\n" * _is_torn(self._path) + line
                self._file = AppendFile(self._disk, self._path)
            self._file.write(line)
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def sync(self) -> None:
        """Make every line so far durable."""
        try:
            if self._file is not None:
                self._file.sync()
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def _cannot_be_written(self, error: OSError) -> KeepstepError:
        return KeepstepError(
            f"the journal {self._path} cannot be written: {error.strerror}",
            hint="Make room or mend the disk, then run the same command to continue.",
        )

    def close(self) -> None:
        """Close the file; the next `write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SilentJournal(Journal):
    """The journal of every rank but the first: it takes what it is given and writes nothing."""

    def rewind(self, step: int, *, keep_evaluation: bool) -> int:
        """Take nothing back."""
        del step, keep_evaluation
        return 0

    def write(self, kind: str, **facts: Any) -> None:
        """Write nothing: the first rank writes it."""


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal in order; a torn last line is left out."""
    with opened(path) as lines:
        for line in lines:
            event = parsed_line(line)
            if event is not None:
                yield event


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal, the last one first, without reading more than is asked for."""
    with opened(path) as file:
        position, tail = file.seek(0, os.SEEK_END), b""
        while position > 0:
            count = min(_BLOCK_BYTES, position)
            position -= count
            file.seek(position)
            lines = (file.read(count) + tail).splitlines(keepends=True)
            # The first one may begin further up.
            tail = lines.pop(0) if position > 0 else b""
            for line in reversed(lines):
                event = parsed_line(line)
                if event is not None:
                    yield event


def near(path: Path, step: int) -> int:
    """Return a byte of a journal shortly before the line of `step`, or before its end.

    Found by halving, as steps only grow: a long journal is not read through.
    """
    with opened(path) as file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while high - low > _PART_BYTES:
            file.seek((low + high) // 2)
            file.readline()
            start = file.tell()
            events = (parsed_line(line) for line in file)
            steps = (event["step"] for event in events if event and event["kind"] == "step")
            if next(steps, step) < step:
                low = start
            else:
                high = (low + high) // 2
        return low


def events_from(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return some of the events from byte `start` on, and the byte at which the next begin.

    Not all at once: a long journal is read part by part. A line that is still being written, or a
    torn one at the end, is not passed yet.
    """
    with opened(path) as file:
        file.seek(start)
        data = file.read(_PART_BYTES) + file.readline()
    end = data.rfind(b"\n") + 1
    found = (parsed_line(line) for line in data[:end].splitlines(keepends=True))
    return [event for event in found if event is not None], start + end


def _split_behind(path: Path, step: int) -> tuple[int, bytes]:
    """Return where the last step line of at most `step` ends, and all that follows it.

    Read from the end, block by block: a long run's beginning is not looked at.
    """
    with opened(path) as file:
        position, tail = file.seek(0, os.SEEK_END), b""
        while True:
            end = _end_of_kept(tail, step, from_start=position == 0)
            if end is not None:
                return position + end, tail[end:]
            count = min(_BLOCK_BYTES, position)
            position -= count
            file.seek(position)
            tail = file.read(count) + tail


def _end_of_kept(tail: bytes, step: int, *, from_start: bool) -> int | None:
    """Return where the last line to stay ends in a file's tail; None where it is not in it."""
    end = len(tail)
    while end > 0:
        start = tail.rfind(b"\n", 0, end - 1) + 1
        if start == 0 and not from_start:
            return None  # The line may begin further up.
        event = parsed_line(tail[start:end])
        if event is not None and event["kind"] == "step" and event["step"] <= step:
            return end
        end = start
    return 0 if from_start else None


def _is_torn(path: Path) -> bool:
    """Tell whether a file's last line has no end."""
    if not path.exists():
        return False
    with opened(path) as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _is_taken_back(event: dict[str, Any], step: int, *, keep_evaluation: bool) -> bool:
    if event["kind"] not in _OF_A_STEP:
        return False
    if event["kind"] == "evaluation" and not keep_evaluation:
        return bool(event["step"] >= step)
    return bool(event["step"] > step)


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None for a line that a kill left torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _plain(value: Any) -> Any:
    """Return the value as JSON has it; numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
