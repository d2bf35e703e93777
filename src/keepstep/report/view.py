"""A run seen from outside: what its folder says, and whether a process lives that trains it.

Guarantees: nothing is written, nothing is locked, nobody waits, and torch is not imported. What is
said of a run that lives is from files that its session replaces in one step or only appends to.
"""

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keepstep.config.resolved import RUN_TOML
from keepstep.errors import NotFound, RunDamaged
from keepstep.report.history import History, read_history
from keepstep.store.catalog import checkpoints_in, find_checkpoints_folder
from keepstep.store.layout import JOURNAL_NAME, LOCK_NAME, OUTCOME_NAME, is_file_name, step_of
from keepstep.store.lock import seen_lock
from keepstep.store.regular import opened

STARTING, RUNNING, LOST, UNKNOWN = "starting", "running", "lost", "unknown"


@dataclass(frozen=True, kw_only=True)
class State:
    """What a run does now: `starting`, `running`, `lost`, `unknown`, or how it ended.

    ``why`` says what is known besides; ``code`` is the exit code of an ending.
    """

    word: str
    why: str = ""
    code: int | None = None

    @property
    def text(self) -> str:
        """The state on one line."""
        return f"{self.word} ({one_line(self.why)})" if self.why else self.word


@dataclass(frozen=True, kw_only=True)
class View:
    """A run's folder, its recorded config (empty where there is none), its history and state."""

    folder: Path
    record: dict[str, Any]
    history: History
    state: State

    def checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint that stands there; None where there is none."""
        return newest_checkpoint(checkpoints_place(self.folder, self.record), self.history)

    @property
    def name(self) -> str:
        """The run's name, or that of its folder."""
        return one_line(str(self.field("run.name") or self.folder.absolute().name))

    @property
    def live(self) -> bool:
        """Whether a process trains the run, or is about to."""
        return self.state.word in (STARTING, RUNNING)

    @property
    def max_steps(self) -> int | None:
        """The number of steps after which the run is finished, where it is recorded."""
        found = self.field("train.max_steps")
        return found if isinstance(found, int) else None

    @property
    def metric(self) -> tuple[str, Literal["min", "max"]]:
        """The metric that decides which checkpoint is the best, and whether by its least value."""
        mode: Literal["min", "max"] = "max" if self.field("evaluation.mode") == "max" else "min"
        return str(self.field("evaluation.metric") or "valid_loss"), mode

    def field(self, path: str) -> Any:
        """Return a field of the recorded config, or None."""
        found: Any = self.record
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found


def view_of(folder: Path) -> View:
    """Return what stands in a run's folder; NotFound or RunDamaged say what is wrong with it."""
    require_run(folder)
    record = recorded_config(folder)
    try:
        history = read_history(folder / JOURNAL_NAME)
    except OSError as error:
        raise RunDamaged(f"{folder / JOURNAL_NAME}: {error.strerror or error}") from error
    if history.unreadable and not history.events and not history.steps:
        raise RunDamaged(
            f"{folder / JOURNAL_NAME} holds {history.unreadable:,} lines, and none is an event",
            hint="It is damaged, or the journal of something else.",
        )
    return View(folder=folder, record=record, history=history, state=state_of(folder))


def find_runs(root: Path) -> list[Path]:
    """Return the folders of runs at `root`, in it and one level further in, by name.

    What a run's own folder holds is not looked into.
    """
    if not root.is_dir():
        raise NotFound(
            f"there is no folder {root}",
            hint="Give the folder that holds your runs; `keepstep train` makes runs/NAME.",
        )
    if is_run(root):
        return [root]
    found = []
    for child in _folders_in(root):
        found += [child] if is_run(child) else [path for path in _folders_in(child) if is_run(path)]
    if not found:
        raise NotFound(f"{root} holds no run", hint="A run's folder has a run.toml and a journal.")
    return found


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run, by what it holds."""
    return any(os.path.lexists(folder / name) for name in (RUN_TOML, JOURNAL_NAME))


def require_run(folder: Path) -> None:
    """Refuse what is not the folder of a run, with words for what it is instead."""
    if not folder.is_dir():
        what = f"{folder} is a file, not" if folder.exists() else f"there is no folder {folder},"
        raise NotFound(
            f"{what} the folder of a run", hint="`keepstep runs ls` lists the runs in `runs`."
        )
    # Before its first words a new session only holds the lock.
    if not is_run(folder) and not seen_lock(folder / LOCK_NAME)[0]:
        raise NotFound(
            f"{folder} is not the folder of a run: it has neither {RUN_TOML} nor {JOURNAL_NAME}",
            hint="`keepstep runs ls` lists the runs in `runs`.",
        )


def recorded_config(folder: Path) -> dict[str, Any]:
    """Return what a run's `run.toml` holds; empty where there is none."""
    path = folder / RUN_TOML
    try:
        with opened(path) as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunDamaged(
            f"{path}: this is not valid TOML: {error}",
            hint="`keepstep train` writes it anew when the run is continued.",
        ) from error
    except OSError as error:
        raise RunDamaged(f"{path}: {error.strerror or error}") from error


def state_of(folder: Path) -> State:
    """Return what a run does now.

    The lock decides whether a session lives: a process number may have been given to another
    process since, may be that of another host, or may not be seen from inside a container.
    """
    path, lock = folder / OUTCOME_NAME, folder / LOCK_NAME
    while True:
        found, written = _outcome(path)
        held, holder = seen_lock(lock)
        # A session writes its outcome before it lets the lock go: what is still *running* behind
        # a look at the lock, and was not held then, was left so by a session that is dead.
        if held or _outcome(path) == (found, written):
            break
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    if held and (found is None or lock.stat().st_mtime_ns > written):
        # The outcome is that of the session before: this one has not said anything yet.
        return State(word=STARTING, why=who)
    if found is None:
        return State(word=UNKNOWN, why=f"there is no {OUTCOME_NAME}")
    try:
        outcome = json.loads(found)
        word = outcome["outcome"]
    except (KeyError, RecursionError, TypeError, ValueError):
        return State(word=UNKNOWN, why=f"{OUTCOME_NAME} is damaged")
    if word == RUNNING:
        gone = f"{who} holds its lock no longer"
        return State(word=RUNNING, why=who) if held else State(word=LOST, why=gone)
    code = outcome.get("code")
    why = str(outcome.get("reason") or "")
    return State(word=str(word), why=why, code=code if isinstance(code, int) else None)


def _outcome(path: Path) -> tuple[bytes | None, int]:
    """Return what a file holds and when it was written, in ns; None and 0 where there is none."""
    try:
        with opened(path) as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None, 0


def checkpoints_place(folder: Path, record: dict[str, Any]) -> Path:
    """Return the folder of the checkpoints: the run's own first, as it may have been moved."""
    inner = find_checkpoints_folder(folder)
    section = record.get("checkpoint")
    name = section.get("dir") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name or _names_in(inner):
        return inner
    return find_checkpoints_folder(Path(name).expanduser())


def newest_checkpoint(place: Path, history: History) -> str | None:
    """Return the name of the newest checkpoint that stands there; None where there is none.

    The manifests of folders decide. To open a `.pth` file takes torch: the journal's last one that
    is there stands for it.
    """
    names = _names_in(place)
    if not any(step_of(name) is not None for name in names):
        return next((save.name for save in reversed(history.saves) if save.name in names), None)
    whole = [entry for entry in checkpoints_in(place) if entry.manifest is not None]
    return whole[-1].name if whole else None


def _names_in(place: Path) -> set[str]:
    if not place.is_dir():
        return set()
    names = {path.name for path in place.iterdir()}
    return {name for name in names if step_of(name) is not None or is_file_name(name)}


def one_line(text: str) -> str:
    """Return text that a terminal shows as it is: what would move its cursor is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
