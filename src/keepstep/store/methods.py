"""How commits are made on a file system, by what that can do; `probe.py` finds it out."""

import errno
from dataclasses import dataclass
from typing import Literal, Self

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
        """Return itself; UsageError where files cannot be saved by that method, or in a remote."""
        if self.files and method == "manifest-last":
            raise UsageError("one file has no manifest beside it: manifest-last is for folders")
        if self.files and remote:
            raise UsageError("a remote takes checkpoints in folders, and the layout is files")
        return self
