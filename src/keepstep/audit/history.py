"""What happened to a folder, told operation by operation, with its names and bytes as they are."""

from typing import Literal

from keepstep.audit.names import Names
from keepstep.audit.operations import (
    ROOT,
    Acknowledged,
    Barrier,
    Beginning,
    DataChange,
    Entry,
    EntryChange,
    Inode,
    Operation,
    Quiet,
    Recording,
)


class History:
    """A folder from its beginning to now."""

    def __init__(self, beginning: Beginning) -> None:
        self.names = Names(beginning)
        self._beginning = beginning
        self._operations: list[Operation] = []
        self._doubts: list[str] = []
        self._contents = {i: bytearray(content) for i, content in beginning.contents.items()}
        self._next = 1 + max([ROOT, *beginning.entries.values()])

    def recording(self, doubts: list[str]) -> Recording:
        """Return all of it. ``doubts``: further ones."""
        return Recording(
            beginning=self._beginning,
            operations=self._operations,
            links=self.names.links,
            folders=self.names.folders,
            doubts=[*self._doubts, *doubts],
        )

    def new_inode(self) -> Inode:
        """Return the number of a new file, folder or link."""
        inode, self._next = self._next, self._next + 1
        return inode

    def size(self, inode: Inode) -> int:
        """Return the size of a file."""
        return len(self._contents.get(inode, b""))

    def content(self, inode: Inode, offset: int, size: int) -> bytes:
        """Return bytes of a file."""
        return bytes(self._contents.get(inode, b"")[offset : offset + size])

    def name(self, inode: Inode) -> str:
        """Return a path that leads to a file."""
        if inode == ROOT:
            return "."
        return next(iter(self.names.paths_of(inode)), "a file without a name")

    def doubt(self, text: str) -> None:
        """Say what could not be recorded exactly; once."""
        if text not in self._doubts:
            self._doubts.append(text)

    def change(self, text: str, *changes: tuple[Entry, Inode | None]) -> None:
        """Give and take names in one step."""
        self.names.change(changes)
        self._tell(EntryChange(number=self._number, text=text, changes=changes))

    def write(self, inode: Inode, offset: int, data: bytes) -> None:
        """Write bytes to a file."""
        content = self._contents.setdefault(inode, bytearray())
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data
        text = f"write {len(data):,} bytes at {offset:,} of {self.name(inode)}"
        self._tell(
            DataChange(number=self._number, text=text, inode=inode, offset=offset, data=data)
        )

    def resize(self, inode: Inode, size: int) -> None:
        """Give a file a size."""
        content = self._contents.setdefault(inode, bytearray())
        del content[size:]
        content.extend(bytes(size - len(content)))
        text = f"set the size of {self.name(inode)} to {size:,}"
        self._tell(DataChange(number=self._number, text=text, inode=inode, offset=size, data=None))

    def sync(self, inode: Inode | None, word: str) -> None:
        """Make a file, the names in a folder, or everything (None) durable."""
        kind: Literal["file", "folder", "all"] = "file"
        if inode is None or inode in self.names.folders:
            kind = "all" if inode is None else "folder"
        text = word if inode is None else f"{word} {self.name(inode)}"
        self._tell(Barrier(number=self._number, text=text, inode=inode, kind=kind))

    def acknowledge(self, text: str) -> None:
        """Say that what is saved so far counts as saved."""
        self._tell(Acknowledged(number=self._number, text=text))

    def is_quiet(self) -> None:
        """Say that no file is open for writing, if something changed since it was said last."""
        if self._operations and isinstance(self._operations[-1], (EntryChange, DataChange)):
            self._tell(Quiet(number=self._number))

    @property
    def _number(self) -> int:
        return len(self._operations)

    def _tell(self, operation: Operation) -> None:
        self._operations.append(operation)
