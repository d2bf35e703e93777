"""How commits are made on a file system, by what that can do; `probe.py` finds it out."""

import errno
from dataclasses import dataclass
from typing import Literal, Self, get_args

from keepstep.errors import UsageError

CommitMethod = Literal["rename", "manifest-last"]
NO_LINKS = frozenset({errno.EPERM, errno.EACCES, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP})
"""What file systems say that have no hard links, or none from there to here."""


def refuses_links(error: OSError) -> bool:
    """Tell whether a hard link failed where a copy may not: no links, or no more of this file."""
    return error.errno in NO_LINKS or error.errno == errno.EMLINK


@dataclass(frozen=True, kw_only=True)
class Methods:
    """The methods of a session; the manifest holds them as text.

    `commit`: one rename of the whole folder; or, where folders cannot be renamed, all files under
    the final name, hidden by a file beside it whose removal is the commit. `pointers`: what
    `latest` and `best` are: symbolic links, or files that hold the name. `remote`: the protocol of
    the object store in which each checkpoint is put as well, its manifest last.
    """

    commit: CommitMethod = "rename"
    pointers: Literal["links", "files"] = "links"
    remote: str = ""

    def __str__(self) -> str:
        """Return what the log and the manifest say."""
        pointers = "" if self.pointers == "links" else ", pointer files"
        remote = f"; remote {self.remote}: manifest last" if self.remote else ""
        return f"{self.commit}{pointers}{remote}"


def is_files(layout: str) -> bool:
    """Tell whether each checkpoint is one file; UsageError for a layout that there is not."""
    if layout not in ("folders", "files"):
        raise UsageError(f"layout is {layout!r}; it must be 'folders' or 'files'")
    return layout == "files"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How a session saves, whatever the file system can do.

    `retries`: attempts after the first. `verify_after_write`: a save is over when all of it was
    read back from the disk. `files`: each checkpoint is one file. `bounded_memory`: what is written
    while training goes on is not copied first.
    """

    retries: int
    verify_after_write: bool
    files: bool
    bounded_memory: bool

    def checked(self, method: str, *, remote: bool) -> Self:
        """Return itself; UsageError for what is no way to save, and for what do not go together."""
        if method not in ("auto", *get_args(CommitMethod)):
            raise UsageError(f"commit_method is {method!r}; it must be auto, rename, manifest-last")
        if not isinstance(self.retries, int) or self.retries < 0:
            raise UsageError(f"save_retries is {self.retries!r}; it must be a number from 0 on")
        if self.files and method == "manifest-last":
            raise UsageError("one file has no manifest beside it: manifest-last is for folders")
        if self.files and remote:
            raise UsageError("a remote takes checkpoints in folders, and the layout is files")
        return self
