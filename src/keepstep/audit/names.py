"""The names in a folder at one moment, and what a path leads to."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.audit.operations import ROOT, Beginning, Entry, Inode

_LINKS_MAX = 40
"""As many symbolic links as Linux follows in one path."""


class Names:
    """Which entry leads to which file; folders know their parents."""

    def __init__(self, beginning: Beginning) -> None:
        self.entries: dict[Entry, Inode] = dict(beginning.entries)
        self.links: dict[Inode, str] = dict(beginning.links)
        self.folders: set[Inode] = set(beginning.folders)
        self._parent: dict[Inode, Inode] = {
            inode: folder for (folder, _), inode in self.entries.items() if inode in self.folders
        }

    def change(self, changes: tuple[tuple[Entry, Inode | None], ...]) -> None:
        """Give and take names."""
        for entry, inode in changes:
            if inode is None:
                self.entries.pop(entry, None)
            else:
                self.entries[entry] = inode
                if inode in self.folders:
                    self._parent[inode] = entry[0]

    def entry_at(
        self, parts: list[str], start: Inode = ROOT, *, follow: bool = True
    ) -> Entry | None:
        """Return the entry that a relative path names; None where it leaves the folder.

        ``follow``: whether a symbolic link at the end is followed.
        """
        folder, rest, links = start, list(parts), 0
        while rest:
            part = rest.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                if folder == ROOT:
                    return None
                folder = self._parent[folder]
                continue
            inode = self.entries.get((folder, part))
            if inode in self.links and (rest or follow):
                target, links = self.links[inode], links + 1
                if target.startswith("/") or links > _LINKS_MAX:
                    return None
                rest = [*target.split("/"), *rest]
                continue
            if not rest:
                return folder, part
            if inode not in self.folders:
                return None
            folder = inode
        return folder, "."

    def inode_at(self, entry: Entry) -> Inode | None:
        """Return what an entry leads to."""
        return entry[0] if entry[1] == "." else self.entries.get(entry)

    def path_of(self, entry: Entry) -> str:
        """Return the path of an entry inside the folder."""
        parts = [] if entry[1] == "." else [entry[1]]
        folder = entry[0]
        while folder != ROOT:
            above = self._parent[folder]
            parts.append(
                next(n for (f, n), i in self.entries.items() if f == above and i == folder)
            )
            folder = above
        return "/".join(reversed(parts)) or "."

    def paths_of(self, inode: Inode) -> list[str]:
        """Return every path that leads to a file."""
        return [self.path_of(entry) for entry, found in self.entries.items() if found == inode]


def reachable(
    entries: Mapping[Entry, Inode], folders: frozenset[Inode] | set[Inode]
) -> Iterator[tuple[str, Inode]]:
    """Yield every path that leads somewhere, with what it leads to, folders before what is in them.

    An entry in a folder that has no name itself is not there for anybody.
    """
    inside: dict[Inode, list[tuple[str, Inode]]] = {}
    for (folder, name), inode in entries.items():
        inside.setdefault(folder, []).append((name, inode))
    waiting = [("", ROOT)]
    seen = {ROOT}
    while waiting:
        path, folder = waiting.pop()
        for name, inode in sorted(inside.get(folder, ())):
            below = f"{path}/{name}" if path else name
            yield below, inode
            if inode in folders and inode not in seen:
                seen.add(inode)
                waiting.append((below, inode))


def look_at(folder: Path) -> Beginning:
    """Read what is in a folder before a command begins."""
    entries: dict[Entry, Inode] = {}
    contents: dict[Inode, bytes] = {}
    links: dict[Inode, str] = {}
    numbers: dict[tuple[int, int], Inode] = {}
    inodes: dict[Path, Inode] = {folder: ROOT}
    folders = {ROOT}
    for place, inner, files in os.walk(folder):
        here = Path(place)
        for name in [*inner, *files]:
            path = here / name
            status = path.lstat()
            inode = numbers.setdefault((status.st_dev, status.st_ino), len(numbers) + 1)
            entries[inodes[here], name] = inode
            if path.is_symlink():
                links[inode] = str(path.readlink())
            elif path.is_dir():
                folders.add(inode)
                inodes[path] = inode
            elif path.is_file():
                contents[inode] = path.read_bytes()
    return Beginning(entries=entries, contents=contents, links=links, folders=frozenset(folders))
