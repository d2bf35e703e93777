"""Making a save durable, now or in a thread of its own, one at a time.

Guarantees:
1. At most one save is in flight; whatever needs it to be over waits for it (`join`).
2. What became of a save in flight is told once: the checkpoint by `collect`, an error by the first
   call that joins. Its events are told by the thread that saves, never by the writer's.
3. The exchanges of a save in flight have a group of ranks of their own: they never meet those of
   the training, and every rank makes them in the same order.

Without 3 the digests of one rank could be answered by the gradient norm of another.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import SaveAbandoned, UsageError
from keepstep.store import commit, housekeeping
from keepstep.store.attempts import commit_with_retries
from keepstep.store.disk import Disk
from keepstep.store.facts import Saved
from keepstep.store.file_commit import commit_file, gather_whole, point_files
from keepstep.store.file_read import check_keys
from keepstep.store.line import Line
from keepstep.store.lock import FolderLock
from keepstep.store.manifest import Facts, Manifest
from keepstep.store.methods import Saving
from keepstep.store.pending import Pending
from keepstep.store.ranks import Ranks, first, together
from keepstep.store.retention import Retention
from keepstep.store.staging import Arena, Cut
from keepstep.store.tensors import Snapshot, take_apart
from keepstep.store.unchanged import Unchanged

if TYPE_CHECKING:
    from keepstep.store.remote_commit import Remote

_ABANDON_SECONDS = 5.0
"""How long a writer that was told to give up may take; a system call cannot be interrupted."""


class Writer:
    """Commits what it is given in `folder`, adopts it into the line, and tidies up behind it."""

    def __init__(
        self,
        folder: Path,
        *,
        line: Line,
        policy: Retention,
        saving: Saving,
        remote: "Remote | None",
        lock: FolderLock,
        disk: Disk,
        ranks: Ranks,
        on_event: Callable[..., None],
    ) -> None:
        self._folder = folder
        self._saving = saving
        self._remote = remote
        self._unchanged = Unchanged(ranks.rank)
        self._commit: Callable[..., tuple[Manifest, bool]] = (
            commit_file if saving.files else partial(commit.commit, unchanged=self._unchanged)
        )
        self._line = line
        self._policy = policy
        self._lock = lock
        self._disk = disk
        self._ranks = ranks
        self._on_event = on_event
        self._pending: Pending | None = None
        self._unheard: Saved | None = None
        self._apart: Ranks | None = None
        self._arena = Arena()

    @property
    def is_saving(self) -> bool:
        """Whether there is a save in flight, or one that nobody has collected yet."""
        return self._pending is not None or self._unheard is not None

    def follow(self, manifest: Manifest) -> None:
        """Save from here on what differs from this checkpoint, which was read and verified."""
        if not manifest.is_file:
            path = self._folder / manifest.name
            together(
                self._ranks, "restore: follow", lambda: self._unchanged.restored(path, manifest)
            )

    def take_apart(self, state: Mapping[str, Any]) -> Snapshot:
        """Take a state apart; UnsafeState names what no checkpoint of this layout can hold."""
        if self._saving.files:
            check_keys(state)
        return take_apart(state, self._ranks)

    def bytes_linked(self, snapshot: Snapshot) -> int:
        """Return how much of a state this rank would link and not write, if it were saved now."""
        return self._unchanged.bytes_linked(snapshot)

    def save_now(
        self, state: Mapping[str, Any], snapshot: Snapshot, facts: Facts, *, started: float
    ) -> Saved:
        """Return when the checkpoint is durable. ``started``: when the save was called for."""
        taken = gather_whole(state, snapshot, self._ranks) if self._saving.files else snapshot
        return self._write(taken, facts, started, self._ranks, threading.Event(), self._on_event)

    def cut(self, snapshot: Snapshot, copy_now: bool | Collection[str]) -> Cut:
        """Take the cut of a save that is written later."""
        if self._saving.files:
            raise UsageError("a checkpoint of one file cannot be written while training goes on")
        moving = () if isinstance(copy_now, bool) else copy_now
        if isinstance(moving, str):
            # One name: in a string, every part of it would be another.
            moving = (moving,)
        return Cut(
            snapshot,
            self._arena,
            moving=moving,
            everything=copy_now is True,
            in_place=self._saving.bounded_memory,
        )

    def save_later(self, cut: Cut, facts: Facts, *, started: float) -> None:
        """Begin to write what was cut, and return."""
        if self._apart is None:
            self._apart = self._ranks.apart()
        ranks = self._apart

        def work(pending: Pending) -> Saved:
            copied: list[Snapshot] = []
            together(ranks, "save: copy", lambda: copied.append(cut.copy()))
            if not self._saving.bounded_memory:
                pending.copied.set()
            return self._write(
                copied[0], facts, started, ranks, pending.halt, pending.tell, pending.copied.set
            )

        self._pending = Pending(work)

    def fence(self) -> None:
        """Return when the state of the save in flight is copied."""
        if self._pending is not None:
            self._pending.copied.wait()

    def is_busy(self) -> bool:
        """Tell whether the save in flight goes on; hands on what its writer told meanwhile."""
        if self._pending is None:
            return False
        self._hear(self._pending)
        return self._pending.is_busy

    def join(self) -> None:
        """Wait for the save in flight, if there is one; raise its error."""
        pending = self._pending
        if pending is not None:
            pending.wait()
            self._pending = None
            self._hear(pending)
            self._unheard = pending.result()

    def collect(self) -> Saved | None:
        """Wait for the save in flight; return the one that nobody has collected yet, if any."""
        self.join()
        saved, self._unheard = self._unheard, None
        return saved

    def drain(self, deadline_seconds: float) -> bool:
        """Finish the save in flight, or give it up at the deadline; return whether it is saved."""
        pending = self._pending
        if pending is not None and not pending.wait(deadline_seconds):
            pending.halt.set()
            if not pending.wait(_ABANDON_SECONDS):
                return False
        try:
            self.join()
        except SaveAbandoned:
            return False
        return True

    def point_links(self, tell: Callable[..., None]) -> None:
        """Point `latest` and `best` at the checkpoints of the line."""
        housekeeping.point_links(
            self._folder,
            newest=self._line.newest,
            best=self._line.best.best,
            point=point_files if self._saving.files else commit.point_links,
            disk=self._disk,
            on_event=tell,
        )

    def _write(
        self,
        snapshot: Any,
        facts: Facts,
        started: float,
        ranks: Ranks,
        halt: threading.Event,
        tell: Callable[..., None],
        on_durable: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Commit, adopt and tidy up, in the thread of the caller or of a pending save."""
        first(ranks, "save: lock", self._lock.confirm)
        manifest, new = commit_with_retries(
            snapshot,
            facts,
            commit=self._commit,
            folder=self._folder,
            newest=self._line.newest,
            saving=self._saving,
            disk=self._disk,
            ranks=ranks,
            halt=halt,
            on_event=tell,
        )
        on_durable()
        saved = Saved(
            path=self._folder / manifest.name,
            manifest=manifest,
            new=new,
            seconds=time.monotonic() - started,
        )
        self._line.adopt(saved, facts, tell)
        first(ranks, "save: tidy", lambda: self._tidy(tell))
        if self._remote is not None:
            self._remote.put(self._folder, manifest.step, ranks=ranks, halt=halt, tell=tell)
            first(ranks, "remote: tidy", lambda: self._tidy_remote(halt, tell))
        return replace(saved, seconds=time.monotonic() - started)

    def _tidy(self, tell: Callable[..., None]) -> None:
        """Do what follows a commit; what the disk refuses is told and makes no save a failure."""
        self.point_links(tell)
        self._lock.confirm()
        housekeeping.retain(
            self._folder,
            self._policy,
            now=time.time(),
            best=self._line.best.best,
            disk=self._disk,
            on_event=tell,
        )

    def _tidy_remote(self, halt: threading.Event, tell: Callable[..., None]) -> None:
        assert self._remote is not None, "only where there is one"
        best = self._line.best.best
        self._remote.retain(self._policy, best=best, pins_of=self._folder, halt=halt, tell=tell)

    def _hear(self, pending: Pending) -> None:
        for event, facts in pending.take_events():
            self._on_event(event, **facts)
