"""Every state that a disk may hold after a power cut, at each point of a recording.

Two models. ``weak`` is POSIX and no more: entries of folders survive in any order and any
selection, as long as what builds on an entry comes with it; a sync of a file makes its bytes
durable and not its name; a sync of a folder its names. ``journal`` is like ext4: changes of entries
survive as a beginning of their sequence, and any sync carries all of them that came before.
Bytes that were not synced are in both as in `shapes`. A rename is one step in both.

Complete between two barriers: what could be at an earlier moment can be at the next barrier too,
by leaving more out. So states are told at barriers, acknowledgements and the end only. Where there
are more than a limit, those that lack the least and those that lack the most come first, and
`Cut.bounded` says so.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import xxhash

from keepstep.audit.names import reachable
from keepstep.audit.operations import (
    Acknowledged,
    Barrier,
    DataChange,
    Entry,
    EntryChange,
    Inode,
    Operation,
    Recording,
)
from keepstep.audit.shapes import Shape, after, shapes_of

Model: TypeAlias = Literal["weak", "journal"]
Key: TypeAlias = tuple[int, tuple[int, ...]]
"""A state: its paths, and by path what is there; numbers stand for both."""

_Tree: TypeAlias = tuple[tuple[EntryChange, ...], int, list[int], dict[Inode, list[int]]]
"""What is missing, the paths, what they hold when whole, and the places of files not synced."""

_SELECTIONS_MAX = 5000
"""Pending entry changes are combined in so many ways at most; where there are more, in some."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A moment at which the power may go: before operation `number`, or at the end."""

    number: int
    text: str
    states: Iterator["State"]


@dataclass(frozen=True, kw_only=True)
class State:
    """One state that the disk may hold; `lost` says in words what of the pending is not there."""

    key: Key
    missing: tuple[EntryChange, ...]
    torn: tuple[tuple[Inode, tuple[Shape, int]], ...]

    @property
    def lack(self) -> int:
        """How much is missing, in operations and files."""
        return len(self.missing) + len(self.torn)


@dataclass
class _File:
    durable: bytes = b""
    pending: list[DataChange] = field(default_factory=list)
    shapes: list[Shape] | None = None
    """What it may be; made when it is asked for."""


class Known:
    """Numbers for paths and contents, the same for the same, so that a state is a few numbers.

    The bytes themselves are kept while the cut is looked at that they belong to.
    """

    def __init__(self) -> None:
        self._paths: dict[tuple[tuple[str, str], ...], int] = {}
        self._trees: list[tuple[tuple[str, str], ...]] = []
        self._digests: dict[bytes, int] = {}
        self._bytes: dict[int, bytes] = {}

    def paths(self, paths: tuple[tuple[str, str], ...]) -> int:
        """Return the number of some paths, each with its kind: file, folder, link."""
        if paths not in self._paths:
            self._paths[paths] = len(self._trees)
            self._trees.append(paths)
        return self._paths[paths]

    def content(self, content: bytes) -> int:
        """Return the number of a file's bytes, or of a link's target."""
        digest = xxhash.xxh3_128_digest(content)
        number = self._digests.setdefault(digest, len(self._digests))
        self._bytes[number] = content
        return number

    def forget(self) -> None:
        """Let the bytes go; their numbers stay."""
        self._bytes.clear()

    def tree(self, key: Key) -> list[tuple[str, str, int, bytes]]:
        """Return (path, kind, number, bytes) of all in a state, folders before their insides."""
        return [
            (path, kind, number, self._bytes[number])
            for (path, kind), number in zip(self._trees[key[0]], key[1], strict=True)
        ]


class CrashModel:
    """What is durable and what is pending, while the operations of a recording happen."""

    def __init__(self, recording: Recording, model: Model, *, limit: int, known: Known) -> None:
        """``limit``: states told at one cut at most."""
        beginning = recording.beginning
        self._recording = recording
        self._model = model
        self._limit = limit
        self._entries: dict[Entry, Inode] = dict(beginning.entries)
        self._pending: list[tuple[EntryChange, set[Inode]]] = []
        self._files = {i: _File(content) for i, content in beginning.contents.items()}
        self._known = known
        self._numbered: dict[Inode, list[tuple[Shape, int]]] = {}
        self.bounded = False
        """Whether some states were left out."""

    def cuts(self) -> Iterator[Cut]:
        """Yield each moment that is looked at, in order, with the states that it may leave."""
        operations = self._recording.operations
        for operation in operations:
            if isinstance(operation, (Barrier, Acknowledged)):
                text = f"before {operation.text}"
                if isinstance(operation, Acknowledged):
                    text = f"when it said {operation.text!r}"
                yield Cut(number=operation.number, text=text, states=self._states())
            self.apply(operation)
        yield Cut(number=len(operations), text="at the end", states=self._states())

    def apply(self, operation: Operation) -> None:
        """Let an operation happen."""
        match operation:
            case EntryChange():
                self._pending.append((operation, set(operation.folders)))
            case DataChange():
                file = self._files.setdefault(operation.inode, _File())
                file.pending.append(operation)
                file.shapes = None
            case Barrier():
                self._sync(operation)

    def whole(self) -> Key:
        """Return the state in which everything that happened is there, as a reader sees it now."""
        self._known.forget()
        self._numbered.clear()
        changes = [change for change, _ in self._pending]
        paths, contents, _ = self._tree(changes)
        return paths, tuple(contents)

    def _sync(self, barrier: Barrier) -> None:
        for inode, file in self._files.items():
            if barrier.kind == "all" or inode == barrier.inode:
                file.durable, file.pending, file.shapes = (
                    after(file.durable, file.pending),
                    [],
                    None,
                )
        if self._model == "journal" or barrier.kind == "all":
            durable = set(range(len(self._pending)))
        else:
            durable = set()
            for number, (_, waiting) in enumerate(self._pending):
                waiting.discard(barrier.inode if barrier.inode is not None else -1)
                if not waiting:
                    durable |= self._needs(number)
        for number in sorted(durable):
            _carry_out(self._entries, self._pending[number][0])
        self._pending = [p for n, p in enumerate(self._pending) if n not in durable]

    def _needs(self, number: int) -> set[int]:
        """Return a pending change with those that it builds on: they had one of its entries."""
        needed = {number}
        for earlier in range(number - 1, -1, -1):
            entries = self._pending[earlier][0].entries
            if any(entries & self._pending[later][0].entries for later in needed):
                needed.add(earlier)
        return needed

    def _makes_its_folder(self, number: int) -> int | None:
        """Return the pending change that made the folder in which a change is, if one did."""
        folders = self._pending[number][0].folders
        for earlier in range(number):
            made = {inode for _, inode in self._pending[earlier][0].changes}
            if made & folders:
                return None if made & folders <= set(self._entries.values()) else earlier
        return None

    def _states(self) -> Iterator[State]:
        """Yield each state of this moment once, those that lack least and most first."""
        self._known.forget()
        self._numbered.clear()
        seen: set[Key] = set()
        told = 0
        for state in self._in_order():
            if state.key in seen:
                continue
            if told == self._limit:
                self.bounded = True
                return
            seen.add(state.key)
            told += 1
            yield state

    def _in_order(self) -> Iterator[State]:
        different: dict[tuple[int, ...], _Tree] = {}
        for kept in self._selections():
            changes = [self._pending[number][0] for number in kept]
            paths, contents, loose = self._tree(changes)
            chosen = set(kept)
            missing = tuple(c for n, (c, _) in enumerate(self._pending) if n not in chosen)
            # Those that lack least come first, and stand for all that look the same.
            different.setdefault((paths, *contents, *loose), (missing, paths, contents, loose))
        trees = list(different.values())
        for tree in trees:
            # Nothing of any file was written back: what is forgotten most often.
            yield from self._torn(*tree, count=len(tree[3]), last=True)
        most = max((len(missing) + len(loose) for missing, _, _, loose in trees), default=0)
        for lack in range(most + 1):
            for missing, paths, contents, loose in trees:
                count = lack - len(missing)
                if 0 <= count <= len(loose):
                    yield from self._torn(missing, paths, contents, loose, count=count)

    def _torn(
        self,
        missing: tuple[EntryChange, ...],
        paths: int,
        contents: list[int],
        loose: dict[Inode, list[int]],
        *,
        count: int,
        last: bool = False,
    ) -> Iterator[State]:
        """Yield the states of one tree in which so many files are not whole.

        ``loose``: the places, in the tree, of each file that has pending bytes. ``last``: only
        that in which each is as it was synced last.
        """
        for files in itertools.combinations(loose, count):
            choices = [self._shapes(inode)[1 : 2 if last else None] for inode in files]
            for chosen in itertools.product(*choices):
                found = list(contents)
                for inode, (_, number) in zip(files, chosen, strict=True):
                    for place in loose[inode]:
                        found[place] = number
                yield State(
                    key=(paths, tuple(found)),
                    missing=missing,
                    torn=tuple(zip(files, chosen, strict=True)),
                )

    def _selections(self) -> list[tuple[int, ...]]:
        """Return which pending entry changes may be there together, by number."""
        count = len(self._pending)
        everything = range(count)
        if self._model == "journal":
            return [tuple(range(kept)) for kept in range(count, -1, -1)]
        needs = [self._needs(number) for number in everything]
        for number, above in enumerate(map(self._makes_its_folder, everything)):
            # In a folder without a name nobody sees it: it may as well not be there.
            if above is not None:
                needs[number] |= needs[above]
        found = _closed(needs, most=_SELECTIONS_MAX)
        if len(found) > _SELECTIONS_MAX:
            self.bounded = True
            found = []
            for size in range(3):
                for out in itertools.combinations(everything, size):
                    found.append(tuple(n for n in everything if not needs[n] & set(out)))
            for number in everything:
                found += [tuple(sorted(needs[number])), tuple(range(number))]
        return sorted(dict.fromkeys(found), key=len, reverse=True)

    def _tree(
        self, changes: Sequence[EntryChange]
    ) -> tuple[int, list[int], dict[Inode, list[int]]]:
        """Return a tree's paths, what each of them holds when whole, and which are not synced."""
        entries = dict(self._entries)
        for change in changes:
            _carry_out(entries, change)
        paths, contents = [], []
        loose: dict[Inode, list[int]] = {}
        for path, inode in reachable(entries, self._recording.folders):
            if inode in self._recording.links:
                paths.append((path, "link"))
                contents.append(self._known.content(_encoded(self._recording.links[inode])))
            elif inode in self._recording.folders:
                paths.append((path, "folder"))
                contents.append(self._known.content(b""))
            else:
                paths.append((path, "file"))
                shapes = self._shapes(inode)
                contents.append(shapes[0][1])
                if len(shapes) > 1:
                    loose.setdefault(inode, []).append(len(paths) - 1)
        return self._known.paths(tuple(paths)), contents, loose

    def _shapes(self, inode: Inode) -> list[tuple[Shape, int]]:
        """Return what a file may be at this cut, with the numbers of the contents."""
        if inode not in self._numbered:
            file = self._files.setdefault(inode, _File())
            if file.shapes is None:
                file.shapes = shapes_of(file.durable, file.pending)
            self._numbered[inode] = [
                (shape, self._known.content(shape.content)) for shape in file.shapes
            ]
        return self._numbered[inode]


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _closed(needs: list[set[int]], *, most: int) -> list[tuple[int, ...]]:
    """Return every selection that holds what its members need; one more than `most` is enough."""
    found: list[tuple[int, ...]] = [()]
    for number, needed in enumerate(needs):
        earlier = needed - {number}
        found += [(*chosen, number) for chosen in found if earlier <= set(chosen)]
        if len(found) > most:
            break
    return found


def _carry_out(entries: dict[Entry, Inode], change: EntryChange) -> None:
    for entry, inode in change.changes:
        if inode is None:
            entries.pop(entry, None)
        else:
            entries[entry] = inode
