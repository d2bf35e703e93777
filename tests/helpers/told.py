"""Folders of runs as sessions leave them, written in a moment; and a process that holds one."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.run.journal import Journal
from keepstep.store.disk import Disk
from keepstep.store.lock import FolderLock


class Clock:
    """A clock that goes on by so many seconds at each look."""

    def __init__(self, now: float = 1_700_000_000.0, *, each: float = 0.5) -> None:
        self.now = now
        self.each = each

    def __call__(self) -> float:
        self.now += self.each
        return self.now


class Told:
    """A run that only tells: its journal, its run.toml and its outcome are those of a real one."""

    def __init__(self, folder: Path, *, clock: Clock | None = None, **config: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.clock = clock or Clock()
        self.journal = Journal(folder / "journal.jsonl", disk=Disk(), clock=self.clock)
        lines = ['task = "language"', "[run]", f'name = "{config.pop("name", folder.name)}"']
        lines += ["[train]", "max_steps = 100", "log_interval = 10"]
        for section, fields in config.items():
            lines += [f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in fields.items())]
        (folder / "run.toml").write_text("\n".join(lines) + "\n")

    def session(self, *, resumed_at: int | None = None) -> None:
        self.outcome("running", pid=os.getpid())
        self.journal.write("session", pid=os.getpid(), environment={"torch": "2.13.0"})
        if resumed_at is not None:
            self.journal.rewind(resumed_at, keep_evaluation=True)
            path = f"step_{resumed_at}"
            self.journal.write("resumed", step=resumed_at, path=path, journal_lines_taken_back=0)

    def steps(self, first: int, last: int, *, scale: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.step(step, scale / step)

    def step(self, step: int, loss: float) -> None:
        finite = loss == loss and abs(loss) != float("inf")
        self.journal.write(
            "step", step=step, updates=step, loss=loss, grad_norm=1.0 + loss, rate=1e-3,
            skipped=not finite, tokens=step * 32,
        )  # fmt: skip

    def evaluate(self, step: int, **metrics: float) -> None:
        self.journal.write("evaluation", step=step, metrics=metrics)

    def saved(self, step: int, name: str = "") -> None:
        self.journal.write("saved", step=step, sequence=step, path=name or f"step_{step}")

    def end(self, word: str, *, code: int = 0, reason: str = "", step: int = 0) -> None:
        facts = {"step": step, "reason": reason, "code": code, "outcome": word}
        self.journal.write("outcome", **facts)
        self.outcome(word, code=code, reason=reason)

    def outcome(self, word: str, **facts: Any) -> None:
        data = json.dumps({"outcome": word, **facts, "run_id": "r"}).encode()
        Disk().replace_file(self.folder / "outcome.json", data)


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Hold a run's folder in a process of its own, whose number is given; it is killed at the end.

    A process that lives on after that would be a session that nobody ends.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        FolderLock(folder / "lock").acquire()
        os.write(writing, b".")
        signal.pause()
        os._exit(99)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
