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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.errors import KeepstepError
from keepstep.store.disk import AppendFile, Disk

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
        data = self._path.read_bytes()
        cut = _end_of_kept_prefix(data, step)
        prefix, kept, gone = data[:cut], [], 0
        for line in data[cut:].splitlines(keepends=True):
            event = _parsed(line)
            if event is None or _is_taken_back(event, step, keep_evaluation=keep_evaluation):
                gone += 1
            else:
                kept.append(line)
        if gone:
            self._disk.replace_file(self._path, prefix + b"".join(kept))
        return gone

    def write(self, kind: str, **facts: Any) -> None:
        """Append one event; it is in the kernel's hands when this returns."""
        event = {"kind": kind, "time": round(self._clock(), 3), **facts}
        line = (json.dumps(_plain(event), allow_nan=False) + "\n").encode()
        try:
            if self._file is None:
                self._file = self._disk.open_append(self._path)
            self._file.write(line)
        except OSError as error:
            raise KeepstepError(
                f"the journal {self._path} cannot be written: {error.strerror}",
                hint="Make room or mend the disk, then run the same command to continue.",
            ) from error

    def sync(self) -> None:
        """Make every line so far durable."""
        if self._file is not None:
            self._file.sync()

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
    with path.open("rb") as lines:
        for line in lines:
            event = _parsed(line)
            if event is not None:
                yield event


def _end_of_kept_prefix(data: bytes, step: int) -> int:
    """Return where the last step line of at most `step` ends; all before it stays as it is."""
    end = len(data)
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        event = _parsed(data[start:end])
        if event is not None and event["kind"] == "step" and event["step"] <= step:
            return end
        end = start
    return 0


def _is_taken_back(event: dict[str, Any], step: int, *, keep_evaluation: bool) -> bool:
    if event["kind"] not in _OF_A_STEP:
        return False
    if event["kind"] == "evaluation" and not keep_evaluation:
        return bool(event["step"] >= step)
    return bool(event["step"] > step)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None for a line that a kill left torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
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
