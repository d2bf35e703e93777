"""What a command did to the files of a folder, as the crash models need it.

Every operation is one of four kinds: entries of folders that change together, bytes or size of a
file, a barrier that makes something durable, or an acknowledgement: from here on the command's
work counts as saved.

Files and folders are numbers (`Inode`), because a file keeps what was written to it when its name
changes. The folder itself is `ROOT`.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Inode: TypeAlias = int
Entry: TypeAlias = tuple[Inode, str]
"""A name in a folder."""

ROOT: Inode = 0


@dataclass(frozen=True, kw_only=True)
class EntryChange:
    """Names that are given, taken or moved in one step; None where nothing has the name."""

    number: int
    text: str
    changes: tuple[tuple[Entry, Inode | None], ...]

    @property
    def entries(self) -> frozenset[Entry]:
        """The names that it touches."""
        return frozenset(entry for entry, _ in self.changes)

    @property
    def folders(self) -> frozenset[Inode]:
        """The folders whose sync makes it durable; of a move between two folders, both."""
        return frozenset(folder for folder, _ in self.entries)


@dataclass(frozen=True, kw_only=True)
class DataChange:
    """Bytes written to a file at an offset, or its new size where `data` is None."""

    number: int
    text: str
    inode: Inode
    offset: int
    data: bytes | None


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """A sync: of a file's bytes, of the names in a folder, or of everything (inode None)."""

    number: int
    text: str
    inode: Inode | None
    kind: Literal["file", "folder", "all"]


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """The command said that what it saved so far is saved."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """No file of the folder is open for writing: what stands there is as it was meant to be."""

    number: int
    text: str = "no file is open for writing"


Operation: TypeAlias = EntryChange | DataChange | Barrier | Acknowledged | Quiet


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What was in the folder before the command: names, and what each file, link or folder is."""

    entries: dict[Entry, Inode]
    contents: dict[Inode, bytes]
    links: dict[Inode, str]
    folders: frozenset[Inode]


@dataclass(kw_only=True)
class Recording:
    """All that a command did to a folder, in order.

    ``links`` and ``folders`` hold those that were made too. ``doubts`` says what could not be
    recorded exactly; the states are then some of those that are possible, not all.
    """

    beginning: Beginning
    operations: list[Operation] = field(default_factory=list)
    links: dict[Inode, str] = field(default_factory=dict)
    folders: set[Inode] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    exit_code: int = 0
