"""How commits are made on a file system, by what that can do; `probe.py` finds it out."""

import errno
from dataclasses import dataclass
from typing import Literal

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
    `latest` and `best` are: symbolic links, or files that hold the name.
    """

    commit: CommitMethod = "rename"
    pointers: Literal["links", "files"] = "links"

    def __str__(self) -> str:
        """Return what the log and the manifest say."""
        return self.commit if self.pointers == "links" else f"{self.commit}, pointer files"


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
