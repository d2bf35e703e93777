"""From system calls to what happened to the files of one folder.

Not recorded exactly, and said so (`Recording.doubts`): writes through shared memory maps, io_uring
and splice; a descriptor that the command was started with. Calls of several processes that overlap
in time are taken in the order in which they ended.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from keepstep.audit.history import History
from keepstep.audit.names import look_at
from keepstep.audit.operations import Beginning, Entry, Recording
from keepstep.audit.processes import Opened, Processes
from keepstep.audit.strace import Call, calls_in, descriptor_of, path_of, text_of, trace

MARKER = "/.keepstep/acknowledged/"
"""A path that a command asks for, in vain, to say that what it saved is saved."""
_STANDARD_STREAMS = (1, 2)


def record(
    command: Sequence[str], folder: Path, *, acknowledged: re.Pattern[str] | None
) -> Recording:
    """Run a command to its end and return what it did to the files in `folder`.

    ``acknowledged``: lines of its output that say that what it saved so far is saved.
    """
    beginning = look_at(folder)
    with tempfile.TemporaryDirectory(prefix="keepstep-audit-") as temporary:
        output = Path(temporary) / "trace"
        code = trace(command, output)
        recording = operations_of(
            calls_in(output), folder, beginning=beginning, acknowledged=acknowledged
        )
    recording.exit_code = code
    return recording


def operations_of(
    calls: Iterable[Call],
    folder: Path,
    *,
    beginning: Beginning,
    acknowledged: re.Pattern[str] | None = None,
) -> Recording:
    """Return what calls did to the files in a folder."""
    recorder = _Recorder(folder, beginning, acknowledged)
    for call in calls:
        recorder.hear(call)
    return recorder.history.recording(recorder.processes.doubts)


class _Recorder:
    """Hears calls and tells the history of the folder."""

    def __init__(
        self, folder: Path, beginning: Beginning, acknowledged: re.Pattern[str] | None
    ) -> None:
        self.history = History(beginning)
        self.processes = Processes(str(Path.cwd()))
        self._roots = {str(folder.absolute()), str(folder.resolve())}
        self._acknowledged = acknowledged
        self._said: dict[int, str] = {}
        self._calls: dict[str, Callable[[Call], None]] = {
            name: getattr(self, f"_{method}")
            for method, names in _METHODS.items()
            for name in names.split()
        }

    def hear(self, call: Call) -> None:
        """Take note of a call."""
        if call.name == "exit":
            self.processes.end(call.pid)
        else:
            self.processes.hear(call)
            if call.name in ("open", "openat") and call.error == "ENOENT":
                self._hear_marker(call)
            if not call.unfinished and not call.error and call.name in self._calls:
                self._calls[call.name](call)
        if not self.processes.writes_to_anything():
            self.history.is_quiet()

    # Which file is meant.

    def _entry(
        self, call: Call, path: str, base: str | None = None, *, follow: bool = True
    ) -> Entry | None:
        """Return the entry that an argument names, None for what is not in the folder.

        ``base``: the argument that says from which folder on a relative path is meant.
        """
        text = text_of(path).decode(errors="surrogateescape")
        if not text.startswith("/"):
            start = path_of(base) if base is not None else ""
            text = f"{start or self.processes.where(call.pid)}/{text}"
        for root in self._roots:
            if text == root or text.startswith(f"{root}/"):
                return self.history.names.entry_at(text[len(root) :].split("/"), follow=follow)
        # A path that leads into the folder only by `..` or by a link outside of it.
        resolved = os.path.normpath(text)
        for root in self._roots:
            if resolved == root or resolved.startswith(f"{root}/"):
                return self.history.names.entry_at(resolved[len(root) :].split("/"), follow=follow)
        return None

    def _path(self, call: Call, *, at: bool) -> tuple[str, str | None]:
        """Return the path of a call, and where it is relative to, which is given where `at`."""
        return (call.arguments[1], call.arguments[0]) if at else (call.arguments[0], None)

    def _two_entries(self, call: Call, *, plain: bool) -> tuple[Entry | None, Entry | None]:
        """Return the old and the new name of a rename or a link."""
        given = call.arguments
        follow = "AT_SYMLINK_FOLLOW" in given[-1]
        if plain:
            paths: tuple[tuple[str, str | None], ...] = ((given[0], None), (given[1], None))
        else:
            paths = ((given[1], given[0]), (given[3], given[2]))
        (old, old_base), (new, new_base) = paths
        return (
            self._entry(call, old, old_base, follow=follow),
            self._entry(call, new, new_base, follow=False),
        )

    def _opened(self, call: Call, argument: str) -> Opened | None:
        number = descriptor_of(argument)
        return None if number is None else self.processes.get(call.pid, number)

    # One method for each way to change something.

    def _open(self, call: Call) -> None:
        path, base = self._path(call, at=call.name in ("openat", "openat2"))
        flags = "O_CREAT|O_WRONLY|O_TRUNC" if call.name == "creat" else " ".join(call.arguments)
        exclusive = "O_EXCL" in flags or "O_NOFOLLOW" in flags
        entry = self._entry(call, path, base, follow=not exclusive)
        inode = None if entry is None else self.history.names.inode_at(entry)
        if entry is not None and "O_TMPFILE" in flags:
            inode = self.history.new_inode()
        elif entry is not None and inode is None and "O_CREAT" in flags:
            inode = self.history.new_inode()
            self.history.change(f"create {self.history.names.path_of(entry)}", (entry, inode))
        writable = "O_WRONLY" in flags or "O_RDWR" in flags
        item = Opened(
            inode=inode,
            appends="O_APPEND" in flags,
            syncs="O_SYNC" in flags or "O_DSYNC" in flags,
            writable=writable,
        )
        if inode is not None and "O_TRUNC" in flags and self.history.size(inode):
            self.history.resize(inode, 0)
        self.processes.open(call.pid, call.result, item, closed_by_exec="O_CLOEXEC" in flags)

    def _close(self, call: Call) -> None:
        number = descriptor_of(call.arguments[0])
        if call.name == "close_range":
            last = int(call.arguments[1].replace("~0U", str(2**31)), 0)
            for each in range(number or 0, min(last, 1 << 16) + 1):
                self.processes.close(call.pid, each)
        elif number is not None:
            self.processes.close(call.pid, number)

    def _duplicate(self, call: Call) -> None:
        closed = False
        if call.name == "fcntl":
            if call.arguments[1] == "F_SETFD":
                number = descriptor_of(call.arguments[0])
                assert number is not None, "fcntl is given a descriptor"
                closed = "FD_CLOEXEC" in call.arguments[2]
                self.processes.keep_through_exec(call.pid, number, closed=closed)
                return
            if not call.arguments[1].startswith("F_DUPFD"):
                return
            closed = call.arguments[1] == "F_DUPFD_CLOEXEC"
        item = self._opened(call, call.arguments[0])
        if item is not None and descriptor_of(call.arguments[0]) != call.result:
            closed = closed or "O_CLOEXEC" in call.arguments[-1]
            self.processes.open(call.pid, call.result, item, closed_by_exec=closed)

    def _write(self, call: Call) -> None:
        item = self._opened(call, call.arguments[0])
        if item is None:
            number = descriptor_of(call.arguments[0])
            if number in _STANDARD_STREAMS:
                self._hear_output(call)
            return
        if item.inode is None:
            return
        data = text_of(call.arguments[1])[: call.result]
        if len(data) < call.result:
            self.history.doubt(f"a write of {call.result:,} bytes is known in part")
            data += bytes(call.result - len(data))
        placed = call.name in ("pwrite64", "pwritev", "pwritev2") and call.arguments[3] != "-1"
        offset = int(call.arguments[3]) if placed else item.offset
        if item.appends:
            offset = self.history.size(item.inode)
        if not placed:
            item.offset = offset + len(data)
        self.history.write(item.inode, offset, data)
        if item.syncs:
            self.history.sync(item.inode, "write through (O_SYNC)")

    def _copy(self, call: Call) -> None:
        """Follow a copy that the kernel makes between two files."""
        if call.name == "sendfile":
            (target, source), places = call.arguments[:2], ("NULL", call.arguments[2])
        else:
            source, target = call.arguments[0], call.arguments[2]
            places = (call.arguments[3], call.arguments[1])
        into, out_of = self._opened(call, target), self._opened(call, source)
        if into is None or into.inode is None:
            return
        if out_of is None:
            name = self.history.name(into.inode)
            self.history.doubt(f"{name} is written by {call.name}: what is not seen")
            return
        # A place that is given is not moved on: `[0] => [10]` shows where it was, and where it is.
        to, start = (_place(place) for place in places)
        begin = out_of.offset if start is None else start
        if out_of.inode is not None:
            data = self.history.content(out_of.inode, begin, call.result)
        else:
            data = _read(path_of(source), begin, call.result)
        self.history.write(into.inode, into.offset if to is None else to, data)
        into.offset += call.result if to is None else 0
        out_of.offset += call.result if start is None else 0

    def _seek(self, call: Call) -> None:
        item = self._opened(call, call.arguments[0])
        if item is not None:
            item.offset = call.result

    def _truncate(self, call: Call) -> None:
        if call.name == "truncate":
            entry = self._entry(call, call.arguments[0])
            inode = None if entry is None else self.history.names.inode_at(entry)
        else:
            item = self._opened(call, call.arguments[0])
            inode = None if item is None else item.inode
        if inode is None:
            return
        if call.name != "fallocate":
            self.history.resize(inode, int(call.arguments[1]))
        elif call.arguments[1] == "0":
            end = int(call.arguments[2]) + int(call.arguments[3])
            if end > self.history.size(inode):
                self.history.resize(inode, end)
        elif "KEEP_SIZE" not in call.arguments[1] or "PUNCH" in call.arguments[1]:
            self.history.doubt(
                f"fallocate({call.arguments[1]}) of {self.history.name(inode)} is not followed"
            )

    def _rename(self, call: Call) -> None:
        old, new = self._two_entries(call, plain=call.name == "rename")
        if old is None and new is None:
            return
        if old is None or new is None:
            self.history.doubt("something was moved into the folder, or out of it")
            return
        one, other = self.history.names.inode_at(old), self.history.names.inode_at(new)
        words = self.history.names.path_of(old), self.history.names.path_of(new)
        if "RENAME_EXCHANGE" in call.arguments[-1]:
            self.history.change(f"exchange {words[0]} and {words[1]}", (old, other), (new, one))
        elif one != other:
            self.history.change(f"rename {words[0]} to {words[1]}", (old, None), (new, one))

    def _link(self, call: Call) -> None:
        old, new = self._two_entries(call, plain=call.name == "link")
        if new is None:
            return
        inode = None if old is None else self.history.names.inode_at(old)
        if inode is None:
            self.history.doubt("a file from outside was linked into the folder")
            return
        self.history.change(f"link {self.history.names.path_of(new)}", (new, inode))

    def _symlink(self, call: Call) -> None:
        path, base = (
            (call.arguments[1], None)
            if call.name == "symlink"
            else (call.arguments[2], call.arguments[1])
        )
        new = self._entry(call, path, base, follow=False)
        if new is not None:
            inode = self.history.new_inode()
            target = text_of(call.arguments[0]).decode(errors="surrogateescape")
            self.history.names.links[inode] = target
            self.history.change(
                f"symlink {self.history.names.path_of(new)} to {target}", (new, inode)
            )

    def _remove(self, call: Call) -> None:
        entry = self._entry(call, *self._path(call, at=call.name == "unlinkat"), follow=False)
        if entry is not None:
            self.history.change(f"remove {self.history.names.path_of(entry)}", (entry, None))

    def _make_folder(self, call: Call) -> None:
        entry = self._entry(call, *self._path(call, at=call.name == "mkdirat"))
        if entry is not None and entry[1] != ".":
            inode = self.history.new_inode()
            self.history.names.folders.add(inode)
            self.history.change(f"make folder {self.history.names.path_of(entry)}", (entry, inode))

    def _flush(self, call: Call) -> None:
        if call.name == "sync":
            self.history.sync(None, "sync")
            return
        item = self._opened(call, call.arguments[0])
        if item is not None and item.inode is not None:
            self.history.sync(None if call.name == "syncfs" else item.inode, call.name)

    def _move(self, call: Call) -> None:
        if call.name == "fchdir":
            self.processes.move(call.pid, path_of(call.arguments[0]))
            return
        path = text_of(call.arguments[0]).decode(errors="surrogateescape")
        here = self.processes.where(call.pid)
        self.processes.move(
            call.pid, os.path.normpath(f"{here}/{path}" if not path.startswith("/") else path)
        )

    def _unknown(self, call: Call) -> None:
        """Say that bytes may have changed in a way that cannot be followed."""
        places = {"mmap": 4, "splice": 2}
        if call.name == "io_uring_setup":
            self.history.doubt("io_uring is used: what is written through it is not seen")
            return
        if call.name == "mmap" and not (
            "MAP_SHARED" in call.arguments[3] and "PROT_WRITE" in call.arguments[2]
        ):
            return
        item = self._opened(call, call.arguments[places[call.name]])
        if item is not None and item.inode is not None:
            name = self.history.name(item.inode)
            self.history.doubt(f"{name} is written by {call.name}: what and when is not seen")

    # What the command says.

    def _hear_output(self, call: Call) -> None:
        if self._acknowledged is None:
            return
        number = descriptor_of(call.arguments[0])
        assert number is not None, "a write is given a descriptor"
        text = self._said.get(number, "") + text_of(call.arguments[1])[: call.result].decode(
            errors="replace"
        )
        *lines, self._said[number] = text.split("\n")
        for line in lines:
            if self._acknowledged.search(line):
                self.history.acknowledge(line.strip())

    def _hear_marker(self, call: Call) -> None:
        path = text_of(call.arguments[1 if call.name == "openat" else 0]).decode(errors="replace")
        if path.startswith(MARKER):
            self.history.acknowledge(path[len(MARKER) :])


_METHODS = {
    "open": "open openat openat2 creat",
    "close": "close close_range",
    "duplicate": "dup dup2 dup3 fcntl",
    "write": "write pwrite64 writev pwritev pwritev2",
    "seek": "lseek",
    "truncate": "truncate ftruncate fallocate",
    "rename": "rename renameat renameat2",
    "link": "link linkat",
    "symlink": "symlink symlinkat",
    "remove": "unlink unlinkat rmdir",
    "make_folder": "mkdir mkdirat",
    "flush": "fsync fdatasync sync syncfs",
    "move": "chdir fchdir",
    "copy": "copy_file_range sendfile",
    "unknown": "mmap splice io_uring_setup",
}


def _place(argument: str) -> int | None:
    """Return the place that a copy was given, None where it goes by the descriptor's own."""
    number = re.match(r"\[(\d+)\]", argument)
    return int(number[1]) if number else None


def _read(path: str, offset: int, size: int) -> bytes:
    """Return bytes of a file outside of the folder, as they are now."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(size)
