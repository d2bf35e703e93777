"""What did not change since the last checkpoint is linked into the next one, not written again.

Each rank writes up to two files: one of the tensors that had the same bytes in its last two
checkpoints (frozen weights), and one of the rest. The first is hard-linked from then on.

Guarantees:
1. A file is linked only where every piece of it is what the state holds now, by digest, and where
   it is the very file that this session wrote or has read and verified: same inode, size and time
   of change. Otherwise it is written anew, and that is told.
2. Each checkpoint is whole by itself: a link is a file like any other, and a delete of one of its
   names leaves the others.
3. No save writes more than the whole state once; a tensor that moves again costs one such save.

Not found: a bit that the medium loses under a file that nobody wrote to. All checkpoints that
share the file then have that fault, as they have its one copy; loading and `verify` find it.
"""

import errno
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.store.disk import Disk
from keepstep.store.layout import data_name, frozen_data_name
from keepstep.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from keepstep.store.methods import NO_LINKS, refuses_links
from keepstep.store.shards import Part
from keepstep.store.tensors import DTYPES, Snapshot, bytes_of, write_tensors

FROZEN_BYTES_MIN = 1 << 20
"""Below this a file of its own costs more, by its sync, than its bytes do."""


@dataclass(frozen=True, kw_only=True)
class _Frozen:
    """A committed file of unchanged tensors, and how to know it again."""

    path: Path
    file: FileEntry
    tensors: tuple[TensorEntry, ...]
    identity: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What an attempt wrote; it counts when the attempt is committed."""

    tensors: tuple[TensorEntry, ...]
    frozen: _Frozen | None


class Unchanged:
    """What this rank wrote last, and which of it stayed the same."""

    def __init__(self, rank: int) -> None:
        self._names = frozen_data_name(rank), data_name(rank)
        self._rank = rank
        self._links = True
        self._last: dict[str, TensorEntry] = {}
        self._still: frozenset[str] = frozenset()
        self._frozen: _Frozen | None = None
        self._attempt: _Written | None = None

    def restored(self, folder: Path, manifest: Manifest) -> None:
        """Follow a checkpoint whose every byte was just verified."""
        of_file = {name: _in_file(manifest.tensors, name) for name in self._names}
        name = self._names[0]
        entry = next((file for file in manifest.files if file.name == name), None)
        frozen = None
        if entry is not None:
            path = folder / name
            frozen = _Frozen(path=path, file=entry, tensors=of_file[name], identity=_identity(path))
        self._last = {entry.name: entry for entries in of_file.values() for entry in entries}
        self._frozen, self._still = frozen, frozenset()

    def write(
        self,
        snapshot: Snapshot,
        staging: Path,
        *,
        disk: Disk,
        go_on: Callable[[], None],
        tell: Callable[..., None],
    ) -> tuple[tuple[FileEntry, ...], tuple[TensorEntry, ...]]:
        """Link or write what this rank has to save, durably; return what the manifest says of it.

        ``go_on``: see `write_tensors`. ``tell``: hears `written_anew`.
        """
        moved = self._moved(snapshot)
        linked = self._to_link(snapshot, moved)
        frozen = None if linked is None else self._link(linked, staging, disk, tell)
        names = self._names_of(frozen) or self._to_freeze(snapshot, moved)
        if names and frozen is None:
            path = staging / self._names[0]
            part = replace(snapshot, written=names)
            file, tensors = write_tensors(
                part, staging, file_name=path.name, disk=disk, go_on=go_on
            )
            frozen = _Frozen(path=path, file=file, tensors=tensors, identity=_identity(path))
        files = () if frozen is None else (frozen.file,)
        entries = () if frozen is None else frozen.tensors
        rest = snapshot.written - names
        if rest or self._rank == 0:
            part = replace(snapshot, written=rest)
            file, tensors = write_tensors(
                part, staging, file_name=self._names[1], disk=disk, go_on=go_on
            )
            files, entries = (*files, file), (*entries, *tensors)
        self._attempt = _Written(tensors=entries, frozen=frozen)
        return files, entries

    def bytes_linked(self, snapshot: Snapshot) -> int:
        """Return the size of the file that a save of this state would link; reads all of it."""
        linked = self._to_link(snapshot, self._moved(snapshot))
        return linked.file.size if linked is not None else 0

    def committed(self, folder: Path) -> None:
        """Follow what was written last, which now has the name `folder`."""
        written, self._attempt = self._attempt, None
        assert written is not None, "what is committed was written"
        frozen = written.frozen
        if frozen is not None:
            frozen = replace(frozen, path=folder / frozen.file.name)
        now = {entry.name: entry for entry in written.tensors}
        self._still = frozenset(
            name
            for name, entry in now.items()
            if name in self._last and _content(entry) == _content(self._last[name])
        )
        self._last, self._frozen = now, frozen

    def _moved(self, snapshot: Snapshot) -> frozenset[str]:
        """Return the names in the frozen file that are not what this rank has to save now."""
        entries = self._frozen.tensors if self._frozen is not None else ()
        return frozenset(
            entry.name
            for entry in entries
            if entry.name not in snapshot.written or not _holds(entry, snapshot.parts[entry.name])
        )

    def _to_link(self, snapshot: Snapshot, moved: frozenset[str]) -> _Frozen | None:
        """Return the frozen file, unless it moved or what else did not change is reason enough."""
        held = self._names_of(self._frozen)
        enough = _bytes(snapshot, self._still - held) <= _bytes(snapshot, held)
        return self._frozen if enough and not moved else None

    def _to_freeze(self, snapshot: Snapshot, moved: frozenset[str]) -> frozenset[str]:
        names = (self._still | self._names_of(self._frozen)) & snapshot.written - moved
        enough = _bytes(snapshot, names) >= FROZEN_BYTES_MIN
        return names if self._links and enough else frozenset()

    def _names_of(self, frozen: _Frozen | None) -> frozenset[str]:
        return frozenset(e.name for e in frozen.tensors) if frozen is not None else frozenset()

    def _link(
        self, frozen: _Frozen, staging: Path, disk: Disk, tell: Callable[..., None]
    ) -> _Frozen | None:
        """Link the last checkpoint's file, durably; None where it must be written anew."""
        path = staging / frozen.file.name
        try:
            disk.link(frozen.path, path)
        except OSError as error:
            if error.errno != errno.ENOENT and not refuses_links(error):
                raise
            # Where there are no links at all, this is told once: no file is set apart from now on.
            self._links = error.errno not in NO_LINKS
            tell("written_anew", name=frozen.file.name, why=str(error))
            return None
        # After the link and of the link: what is looked at is what the checkpoint will have.
        if _identity(path) != frozen.identity:
            disk.unlink(path)
            why = f"{frozen.path} is not the file that was committed"
            tell("written_anew", name=frozen.file.name, why=why)
            return None
        # A restored checkpoint may be a copy that nobody has synced.
        disk.sync_file(path)
        return replace(frozen, path=path)


def _identity(path: Path) -> tuple[int, int, int]:
    facts = path.lstat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _in_file(tensors: Iterable[TensorEntry], name: str) -> tuple[TensorEntry, ...]:
    """Return the tensors that have pieces in a file, with those pieces, in their order there."""
    found = []
    for entry in tensors:
        pieces = [piece for piece in entry.pieces if piece.file == name]
        if pieces:
            pieces.sort(key=lambda piece: piece.start)
            found.append(replace(entry, pieces=tuple(pieces)))
    return tuple(found)


def _content(entry: TensorEntry) -> Any:
    pieces = [(piece.offset, piece.shape, piece.digest) for piece in entry.pieces]
    return entry.dtype, entry.shape, pieces


def _holds(entry: TensorEntry, part: Part) -> bool:
    """Tell whether the pieces of a tensor are, byte for byte, what this process has of it."""
    if (DTYPES[entry.dtype], entry.shape) != (part.local.dtype, part.whole):
        return False
    low = tuple(map(min, zip(*(p.offset for p in entry.pieces), strict=True)))
    ends = [tuple(map(sum, zip(p.offset, p.shape, strict=True))) for p in entry.pieces]
    high = tuple(map(max, zip(*ends, strict=True)))
    begin = part.region.offset
    if (low, high) != (begin, tuple(map(sum, zip(begin, part.region.shape, strict=True)))):
        return False
    data, first = bytes_of(part.local), entry.pieces[0].start
    return all(
        digest_of(data[piece.start - first : piece.end - first]) == piece.digest
        for piece in entry.pieces
    )


def _bytes(snapshot: Snapshot, names: Iterable[str]) -> int:
    parts = [snapshot.parts[name] for name in names if name in snapshot.parts]
    return sum(math.prod(part.region.shape) * part.local.element_size() for part in parts)
