"""Every error that Keepstep raises on purpose, each with its exit code and a hint.

    KeepstepError            1   something failed; the message says what, where and what to do
    ├── UsageError           2   the command line, or what it names, cannot be used
    │   ├── ConfigError      2   the config has problems; all of them are listed at once
    │   ├── DataError        2   the training data cannot be used as they are
    │   └── OtherRun         2   the folder belongs to another run or to another config
    ├── CheckpointDamaged    3   a checkpoint, or all of them, is not whole
    │   └── NotOfARun        3   a file may be whole, but no run saved it, so none continues from it
    ├── RunDamaged           3   what a run's folder holds beside its checkpoints cannot be read
    ├── NotFound             4   there is no such run or checkpoint
    ├── Locked               5   another live session holds the folder
    ├── Diverged             6   losses or gradients stopped being finite
    │   └── NotFinite        6   weights or moments did; they are not saved
    ├── Unhealthy            7   a collective failed or a peer is gone
    ├── SaveFailed           1   a save gave up; every older checkpoint is as it was
    │   └── SaveAbandoned    1   it was told to, because the time for it was over
    ├── CannotSave           1   no checkpoint could be made here; told before a step is taken
    └── UnsafeState          1   the state holds something that no checkpoint may hold

Errors are for the world; our own mistakes are assertions. What the system refuses is an OSError;
`way_out` says what can be done about it.
"""

import errno
import shlex


class KeepstepError(Exception):
    """Something failed that the user can do something about.

    ``message`` says what and where; ``hint`` says what to do, and is empty where nothing can be.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(KeepstepError):
    """The command line, or what it names, cannot be used."""

    exit_code = 2


class ConfigError(UsageError):
    """The config has problems; ``problems`` holds all of them, one sentence each."""

    def __init__(self, problems: list[str], *, hint: str = "") -> None:
        super().__init__("\n".join(problems), hint=hint)
        self.problems = problems


class DataError(UsageError):
    """The training data cannot be used as they are."""


class OtherRun(UsageError):
    """The folder belongs to another run or to another config; the message shows the difference."""


class CheckpointDamaged(KeepstepError):
    """A checkpoint is not whole, or none of them is; nothing was changed."""

    exit_code = 3


class NotOfARun(CheckpointDamaged):
    """No run saved a file, as those of `save_checkpoint_atomic`: none continues from it."""


class RunDamaged(KeepstepError):
    """A run's `run.toml` or journal cannot be read; nothing was changed."""

    exit_code = 3


class NotFound(KeepstepError):
    """There is no such run or checkpoint."""

    exit_code = 4


class Locked(KeepstepError):
    """Another live session holds the folder; the message says which."""

    exit_code = 5


class Diverged(KeepstepError):
    """Losses or gradients stopped being finite."""

    exit_code = 6


class NotFinite(Diverged):
    """A state that was to be saved holds nan or inf; every older checkpoint is as it was."""


class Unhealthy(KeepstepError):
    """A collective failed or a peer is gone; no further collective may be entered."""

    exit_code = 7


class SaveFailed(KeepstepError):
    """A save gave up after its retries; every older checkpoint is as it was."""


class SaveAbandoned(SaveFailed):
    """A save was given up because the time for it was over; every older checkpoint is as it was."""


class CannotSave(KeepstepError):
    """No checkpoint could be made in a folder; found before a step is taken, nothing is changed."""


class UnsafeState(KeepstepError):
    """The state holds something that is neither a tensor nor plain data; named by its path."""


def way_out(error: OSError, *, then: str) -> str:
    """Return what can be done about what the system refused; empty where nothing is known.

    ``then``: what follows when that is done, as in "run the same command to continue".
    """
    hints = {
        errno.ENOSPC: f"Make room, then {then}.",
        errno.EDQUOT: f"Make room, then {then}.",
        errno.EROFS: "The file system is mounted read-only: use another folder, or mount it anew.",
        errno.EACCES: "Look at who owns it and what they allow.",
        errno.EPERM: "Look at who owns it and what they allow.",
        errno.ENOMEM: f"Make memory free, then {then}.",
        errno.EMFILE: f"Raise the limit on open files (`ulimit -n`), then {then}.",
        errno.EIO: f"The disk fails, or its file system: look at the system's log, then {then}.",
        errno.EISDIR: "A folder is in the place of a file: move it out of the way.",
        errno.ENOTDIR: "A file is in the place of a folder: move it out of the way.",
        errno.EEXIST: "Something else is in its place: move it out of the way.",
    }
    return hints.get(error.errno or 0, "")


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error is for lack of memory or open files: it says nothing of what was read.

    Torch's allocators have no class for it that all of them raise, but words.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    words = ("allocate memory", "out of memory")
    of_torch = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return of_torch or isinstance(error, MemoryError)


def fault_from(error: BaseException) -> str:
    """Return what an error says of the file that was read; a shortage that it came of is raised.

    `zipfile` says of any refused read that the file is not one of its own.
    """
    came_of: BaseException | None = error
    while came_of is not None:
        if is_shortage(came_of):
            raise came_of
        came_of = came_of.__context__
    return str(error)


def room_by_prune(folder: object) -> str:
    """Return how room is made where checkpoints stand: the plan first, then the deletion."""
    command = f"keepstep ckpt prune {shlex.quote(str(folder))} --keep-last 1"
    return f"`{command}` shows which checkpoints could go; with --apply it deletes them."
