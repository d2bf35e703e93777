"""Crash-safe, verified checkpoints in a folder: save, restore, keep, delete.

Invariants:
1. A `step_N` or `steps_N.pth` that nothing hides is a whole checkpoint, or was one until something
   outside damaged it: one rename or one unlink shows it, when all in it is durable (`commit.py`).
2. `save` returns when that is durable, and not before; with `wait=False` it returns at the cut, and
   `collect` or the next call when it is durable, or raises why it is not.
3. Nothing committed is ever written to again; it is moved aside, or hidden and then removed.
4. `latest` and `best` are for people; this module never reads them.
5. Retention runs after the new checkpoint is durable, in the order of commits.
"""

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from keepstep.store import resume
from keepstep.store.catalog import sequence_of
from keepstep.store.disk import Disk
from keepstep.store.facts import GivenFacts, Saved, checked, require_shared, shared
from keepstep.store.layout import LOCK_NAME
from keepstep.store.line import Line
from keepstep.store.lock import FolderLock
from keepstep.store.manifest import Best, Facts, Manifest
from keepstep.store.methods import CommitMethod, Saving, is_files
from keepstep.store.probe import probe
from keepstep.store.ranks import OneRank, Ranks, first, together
from keepstep.store.remote import ObjectStore, open_home
from keepstep.store.resume import Like, Restored
from keepstep.store.retention import Retention
from keepstep.store.standing import next_sequence, require_none
from keepstep.store.sweep import sweep

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from keepstep.store.rehearsal import Room
    from keepstep.store.staging import Cut
    from keepstep.store.tensors import Snapshot
    from keepstep.store.writer import Writer


def _ignore(_event: str, **_facts: Any) -> None:
    """Hear nothing."""


class Store:
    """The checkpoints of one run, in `folder`; open it for a session with `with` or `open`.

    With several `ranks` every method is called by all of them, and each raises on all or on none.
    `layout`: a folder for each checkpoint, or one `.pth` file, which holds sharded tensors whole.
    `best_metric` and `best_mode` say which of the `metrics` given to `save` decides the best.
    `on_event(event, **facts)` hears: swept, methods, snapshot, written, committed, retry,
    damaged, set_aside, written_anew, deleted, best_gone, housekeeping_failed, disk_refused,
    verified_on_disk, not_read_back; of a remote: uploaded, fetched, passed_over, remote_retry.
    `verify_after_write`: a save is over when all of it was read back from the disk.
    `remote`: a URL of fsspec, or an `ObjectStore` that has a deadline of its own, where each
    checkpoint is put as well: a save is over when it is there too.
    `bounded_memory`: with `wait=False` nothing is copied; the fence holds until all is durable.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last_n: int = 2,
        keep_best_n: int = 1,
        keep_every: int = 0,
        keep_hourly: int = 0,
        keep_daily: int = 0,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        save_retries: int = 2,
        commit_method: Literal["auto"] | CommitMethod = "auto",
        layout: Literal["folders", "files"] = "folders",
        verify_after_write: bool = False,
        bounded_memory: bool = False,
        remote: str | ObjectStore = "",
        lock: FolderLock | None = None,
        ranks: Ranks | None = None,
        mesh: Mapping[str, int] | None = None,
        disk: Disk | None = None,
        on_event: Callable[..., None] = _ignore,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.policy = Retention(
            keep_last_n=keep_last_n,
            keep_best_n=keep_best_n,
            keep_every=keep_every,
            keep_hourly=keep_hourly,
            keep_daily=keep_daily,
        )
        method = "file" if layout == "files" else commit_method
        self._disk = disk if disk is not None else Disk()
        self._ranks: Ranks = ranks if ranks is not None else OneRank()
        self._mesh = mesh if mesh is not None else {}
        self._shared_lock = lock
        self._lock = lock if lock is not None else FolderLock(self.folder / LOCK_NAME)
        self._line = Line(metric=best_metric, mode=best_mode)
        self.home = open_home(remote, save_retries, self.folder, self._disk, self._ranks, on_event)
        self._probe = partial(probe, self.folder, self._disk, method, on_event)
        self._saving = Saving(
            retries=save_retries,
            verify_after_write=verify_after_write,
            files=is_files(layout),
            bounded_memory=bounded_memory,
        ).checked(commit_method, remote=bool(remote))
        self._on_event = on_event
        self._ready_to_save = False
        self._open = False
        self._writer: Writer | None = None

    @property
    def run_id(self) -> str:
        """The run whose checkpoints these are."""
        return self._line.run_id

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint of this session's line."""
        return self._line.newest

    @property
    def best(self) -> Best | None:
        """The best value so far and the checkpoint that had it."""
        return self._line.best.best

    @property
    def is_saving(self) -> bool:
        """Whether a save was begun with `wait=False` that nobody has collected yet."""
        return self._writer is not None and self._writer.is_saving

    def open(self) -> None:
        """Hold the folder; Locked if it is in use. Nothing in it is changed yet."""
        if self._open:
            return
        self._line.next_sequence = first(self._ranks, "open", self._hold_folder)
        self._open = True
        self._ready_to_save = False

    def close(self) -> None:
        """Finish what is being written, and let the folder go; raises what became of it."""
        try:
            self._join()
        finally:
            if self._open and self._shared_lock is None and self._ranks.rank == 0:
                self._lock.release()
            self._open = False

    def __enter__(self) -> Self:
        """Open the store."""
        self.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the store; an error of a save does not take the place of one in the block."""
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"and the last save: {type(second).__name__}: {second}")

    def restore(
        self,
        choice: Literal["newest", "fresh"] | int = "newest",
        *,
        must_match: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        like: Like | None = None,
    ) -> Restored | None:
        """Return the state to continue from, every byte verified; None where nothing is there.

        A damaged checkpoint is passed over by name for the newest whole one. What is not on the
        chosen one's line is moved to `aside/`: never deleted, never chosen. What a dead session
        left is swept away, and all of that only when the folder is known to be this run's.
        Raises CheckpointDamaged where none is whole, OtherRun where `must_match` or `run_id` (of
        an earlier session) differs, NotFound for a missing step, UsageError for a "fresh" too late.

        ``like(name, shape)``: what to shard it like; None: it is whole. A rank reads its own part.
        """
        self._join()
        self._ranks.meet("restore")
        self.open()
        # Also where that session left no checkpoint: it is the same run.
        self._line.run_id = run_id if run_id and choice != "fresh" else self.run_id
        found = resume.find(
            self.folder,
            choice,
            files=self._saving.files,
            must_match=must_match,
            run_id=run_id,
            like=like,
            ranks=self._ranks,
            home=self.home,
            ready=self._make_ready_to_save,
        )
        if found is None:
            return None
        restored = resume.take_up(
            *found,
            line=self._line,
            disk=self._disk,
            ranks=self._ranks,
            on_event=self._on_event,
            best_must_stand=self.policy.keep_best_n > 0,
        )
        self._make_writer().follow(restored.manifest)
        if self.home is not None:
            self.home.follow(restored.manifest, self.best if self.policy.keep_best_n else None)
        self._point_links()
        return restored

    @overload
    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        wait: Literal[True] = True,
        **facts: Unpack[GivenFacts],
    ) -> Saved: ...

    @overload
    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        wait: bool,
        copy_now: bool | Collection[str] = (),
        **facts: Unpack[GivenFacts],
    ) -> Saved | None: ...

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        wait: bool = True,
        copy_now: bool | Collection[str] = (),
        **facts: Unpack[GivenFacts],
    ) -> Saved | None:
        """Commit `state` as the checkpoint of `step`; it is durable when this returns.

        `state` is a tree of tensors and plain values; anything else is refused by name
        (UnsafeState). Saving again what is already committed changes nothing. Raises SaveFailed
        after the retries; every older checkpoint is then as it was. ``facts``: see `GivenFacts`.

        ``wait=False`` returns None at once, and a thread writes. Nothing may change large tensors
        before `fence` has returned, which `fence_before` sees to. ``copy_now`` names those that
        change sooner, such as large buffers, or is True for all. What became of the save is for
        `collect`; an error is raised there, or by the next call. A second one waits for the first.
        """
        self._prepare(f"the save of step {step}")
        started, writer = time.monotonic(), self._make_writer()
        taken: list[tuple[Facts, Snapshot, Cut | None]] = []

        def take() -> dict[str, str]:
            known, snapshot = self._take(state, step, facts)
            cut = None if wait else writer.cut(snapshot, copy_now)
            taken.append((known, snapshot, cut))
            return shared(known)

        require_shared(together(self._ranks, "save: state", take))
        known, snapshot, cut = taken[0]
        self._on_event("snapshot", step=step)
        if cut is None:
            return writer.save_now(state, snapshot, known, started=started)
        writer.save_later(cut, known, started=started)
        return None

    def rehearse(
        self, state: Mapping[str, Any], *, bytes_to_come: int = 0, **facts: Unpack[GivenFacts]
    ) -> "Room":
        """Rehearse a save of `state`, before the first step; CannotSave says what is wrong.

        Where this line has a checkpoint, only the room for one more is looked at.
        ``bytes_to_come``: what the state will grow by, as by moments after the first step.
        """
        from keepstep.store.rehearsal import rehearse

        self._prepare("the rehearsal")
        return rehearse(
            lambda: self._take(state, 0, facts),
            folder=self.folder,
            policy=self.policy,
            line=self._line,
            files=self._saving.files,
            bytes_linked=self._make_writer().bytes_linked,
            bytes_to_come=bytes_to_come,
            disk=self._disk,
            ranks=self._ranks,
        )

    def _prepare(self, what: str) -> None:
        """Be ready to save; UsageError in a folder whose checkpoints nobody has looked at."""
        self._join()
        self._ranks.meet(what)
        self.open()
        if not self._ready_to_save:
            look = partial(require_none, self.folder, self._saving, self.home)
            first(self._ranks, "save: look", look)
            self._make_ready_to_save()

    def _take(
        self, state: Mapping[str, Any], step: int, facts: GivenFacts
    ) -> tuple[Facts, "Snapshot"]:
        taken = self._make_writer().take_apart(state)
        return self._line.facts(checked(step, facts), mesh=self._mesh), taken

    def _make_writer(self) -> "Writer":
        """Return the writer. It needs torch, which a store that only looks around does not."""
        if self._writer is None:
            from keepstep.store.writer import Writer

            self._writer = Writer(
                self.folder,
                line=self._line,
                policy=self.policy,
                saving=self._saving,
                lock=self._lock,
                disk=self._disk,
                ranks=self._ranks,
                on_event=self._on_event,
                remote=self.home.remote if self.home is not None else None,
            )
        return self._writer

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def collect(self) -> Saved | None:
        """Wait for the save that was begun with `wait=False`; return it, once, or raise its error.

        None where there is none. Called by all ranks.
        """
        return self._writer.collect() if self._writer is not None else None

    def is_busy(self) -> bool:
        """Tell whether this rank is still writing; hands on what the writer told meanwhile."""
        return self._writer is not None and self._writer.is_busy()

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Tell whether a checkpoint with these metrics would be the best so far."""
        self._join()
        return self._line.best.after(metrics, sequence=-1, step=-1) != self.best

    def mark_best(self, metrics: Mapping[str, float], *, step: int) -> bool:
        """Judge a committed checkpoint by metrics that were found after it was saved.

        It is not modified; the next manifest records it. Returns whether it is the best now.
        """
        self._join()
        before = self.best
        sequence = first(self._ranks, "best", lambda: sequence_of(self.folder, step))
        self._line.best.best = self._line.best.after(metrics, sequence=sequence, step=step)
        self._point_links()
        return self.best != before

    def fence(self) -> None:
        """Return when the state of the last save may be changed: when it is copied."""
        if self._writer is not None:
            self._writer.fence()

    def fence_before(self, optimizer: "Optimizer") -> None:
        """Have each step of one of torch's optimizers wait at the fence first."""
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def drain(self, deadline_seconds: float) -> bool:
        """Finish what is being written, or give it up at the deadline; return whether it is saved.

        On several ranks all of them call it; one that gives up does so for all. A writer that is
        blocked in the kernel is left behind, and `collect` still waits for it.
        """
        return self._writer is None or self._writer.drain(deadline_seconds)

    def _hold_folder(self) -> int:
        """Hold the folder for all ranks; return the next sequence number."""
        self._disk.make_folders(self.folder)
        if self._shared_lock is None:
            self._lock.acquire()
        return next_sequence(self.folder)

    def _make_ready_to_save(self) -> None:
        """Sweep what a dead session left: from here on the folder is known to be this run's."""
        if not self._ready_to_save:
            first(self._ranks, "sweep", lambda: sweep(self.folder, self._disk, self._on_event))
            self._line.run_id = first(self._ranks, "run id", lambda: self.run_id)
            first(self._ranks, "methods", self._probe)
            if self.home is not None:
                self.home.begin(self._line)
            self._ready_to_save = True

    def _point_links(self) -> None:
        writer = self._make_writer()
        first(self._ranks, "links", lambda: writer.point_links(self._on_event))
