"""Which file each descriptor of each process of a command means, as the kernel keeps it.

Threads share a table of descriptors, a forked child has a copy of it, and both share what was
opened: a write of one moves the place of the next write of the other.
"""

from dataclasses import dataclass, field

from keepstep.audit.operations import Inode
from keepstep.audit.strace import Call


@dataclass(kw_only=True)
class Opened:
    """An open file: which one, and where the next byte goes."""

    inode: Inode | None
    """None for a file that is not in the folder."""
    offset: int = 0
    appends: bool = False
    syncs: bool = False
    """O_SYNC or O_DSYNC: each write is durable when it returns."""
    writable: bool = False
    users: int = 0
    """Descriptors that mean it, over all processes."""


@dataclass
class Table:
    """The descriptors of a process, by number; those in `closed_by_exec` end with an exec."""

    opened: dict[int, Opened] = field(default_factory=dict)
    closed_by_exec: set[int] = field(default_factory=set)
    users: int = 1

    def copy(self) -> "Table":
        """Return the table of a forked child."""
        for item in self.opened.values():
            item.users += 1
        return Table(dict(self.opened), set(self.closed_by_exec))


@dataclass
class Where:
    """The working folder of a process, which threads share."""

    folder: str


class Processes:
    """Every process of the command."""

    def __init__(self, folder: str) -> None:
        self._first_folder = folder
        self._tables: dict[int, Table] = {}
        self._where: dict[int, Where] = {}
        self._begun: dict[int, Call] = {}
        """Forks that have begun; the child may be heard of before they return."""
        self.doubts: list[str] = []

    def hear(self, call: Call) -> None:
        """Take note of a fork, an exec or a change of folder."""
        self._know(call.pid)
        if call.name in ("clone", "clone3", "fork", "vfork"):
            if call.unfinished:
                self._begun[call.pid] = call
            else:
                self._begun.pop(call.pid, None)
                if call.result > 0:
                    self._begin(call.result, call)
        elif call.name in ("execve", "execveat") and not call.unfinished and not call.error:
            table = self._tables[call.pid]
            if table.users > 1:
                table.users -= 1
                table = self._tables[call.pid] = table.copy()
            for number in list(table.closed_by_exec):
                self.close(call.pid, number)

    def where(self, pid: int) -> str:
        """Return the working folder of a process."""
        self._know(pid)
        return self._where[pid].folder

    def move(self, pid: int, folder: str) -> None:
        """Change it."""
        self._where[pid].folder = folder

    def get(self, pid: int, number: int) -> Opened | None:
        """Return what a descriptor means."""
        return self._tables[pid].opened.get(number)

    def open(self, pid: int, number: int, item: Opened, *, closed_by_exec: bool) -> None:
        """Give a descriptor its meaning."""
        self.close(pid, number)
        table = self._tables[pid]
        table.opened[number] = item
        item.users += 1
        if closed_by_exec:
            table.closed_by_exec.add(number)

    def close(self, pid: int, number: int) -> None:
        """Forget a descriptor."""
        table = self._tables[pid]
        item = table.opened.pop(number, None)
        table.closed_by_exec.discard(number)
        if item is not None:
            item.users -= 1

    def keep_through_exec(self, pid: int, number: int, *, closed: bool) -> None:
        """Say whether an exec closes a descriptor."""
        names = self._tables[pid].closed_by_exec
        (names.add if closed else names.discard)(number)

    def end(self, pid: int) -> None:
        """Forget a process that ended, with its descriptors."""
        table = self._tables.pop(pid, None)
        self._where.pop(pid, None)
        if table is not None:
            table.users -= 1
            if table.users == 0:
                for item in table.opened.values():
                    item.users -= 1

    def writes_to_anything(self) -> bool:
        """Tell whether a file of the folder is open for writing."""
        return any(
            item.writable and item.inode is not None
            for table in self._tables.values()
            for item in table.opened.values()
        )

    def _know(self, pid: int) -> None:
        if pid in self._tables:
            return
        if not self._tables:
            self._tables[pid], self._where[pid] = Table(), Where(self._first_folder)
            return
        parents = [call for call in self._begun.values() if call.pid in self._tables]
        if len(parents) != 1:
            self.doubts.append(f"which process forked process {pid} is not certain")
        if parents:
            self._begin(pid, parents[0])
        else:
            self._tables[pid], self._where[pid] = Table(), Where(self._first_folder)

    def _begin(self, child: int, call: Call) -> None:
        if child in self._tables:
            return
        flags = " ".join(call.arguments)
        table, where = self._tables[call.pid], self._where[call.pid]
        if "CLONE_FILES" in flags:
            table.users += 1
            self._tables[child] = table
        else:
            self._tables[child] = table.copy()
        self._where[child] = where if "CLONE_FS" in flags else Where(where.folder)
