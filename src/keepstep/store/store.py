"""Crash-safe, verified checkpoints in a folder: save, restore, keep, delete.

Invariants:
1. A folder named `step_N` is a whole checkpoint, or was one until something outside damaged it:
   it gets that name by one rename, after everything in it is durable.
2. `save` returns after the rename is durable, and not before.
3. Nothing that has a committed name is ever written to again; it is renamed aside or to trash.
4. `latest` and `best` are for people; this module never reads them.
5. Retention runs after the new checkpoint is durable, in the order of commits.

The sequence number is one more than any that the folder has ever shown, also in `aside/`, so a
checkpoint that was given up never looks newer than one that follows.
"""

import errno
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from keepstep.errors import CheckpointDamaged, NotFound, SaveFailed, UsageError
from keepstep.store import commit, housekeeping
from keepstep.store.best import BestSoFar
from keepstep.store.catalog import Checkpoint, checkpoints_in, look_at
from keepstep.store.disk import Disk
from keepstep.store.facts import Saved, count_of, metrics_of, table_of
from keepstep.store.layout import LOCK_NAME, step_name
from keepstep.store.lock import FolderLock
from keepstep.store.manifest import Best, Facts, Manifest, fingerprint_of
from keepstep.store.ranks import OneRank, Ranks, first, together
from keepstep.store.resume import (
    Like,
    Restored,
    check_identity,
    check_one_run,
    choose,
    look_together,
    set_aside_others,
)
from keepstep.store.retention import Retention
from keepstep.store.sweep import sweep

if TYPE_CHECKING:
    from keepstep.store.tensors import Snapshot

_BACK_OFF_SECONDS = (0.5, 2.0, 8.0)


def _ignore(_event: str, **_facts: Any) -> None:
    """Hear nothing."""


class Store:
    """The checkpoints of one run, in `folder`; open it for a session with `with` or `open`.

    With several `ranks` every method is called by all of them, and each raises on all or on none.
    `best_metric` and `best_mode` say which of the `metrics` given to `save` decides the best.
    `on_event(event, **facts)` hears: swept, snapshot, written, committed, retry, set_aside,
    deleted, best_gone, housekeeping_failed.
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
        self.run_id = secrets.token_hex(8)
        self.newest: Manifest | None = None
        self._disk = disk if disk is not None else Disk()
        self._ranks: Ranks = ranks if ranks is not None else OneRank()
        self._mesh = mesh if mesh is not None else {}
        self._shared_lock = lock
        self._lock = lock if lock is not None else FolderLock(self.folder / LOCK_NAME)
        self._best = BestSoFar(metric=best_metric, mode=best_mode)
        self._save_retries = save_retries
        self._on_event = on_event
        self._next_sequence = 1
        self._ready_to_save = False
        self._open = False

    @property
    def best(self) -> Best | None:
        """The best value so far and the checkpoint that had it."""
        return self._best.best

    def open(self) -> None:
        """Hold the folder; Locked if it is in use. Nothing in it is changed yet."""
        if self._open:
            return
        self._next_sequence = first(self._ranks, "open", self._hold_folder)
        self._open = True
        self._ready_to_save = False

    def close(self) -> None:
        """Let the folder go."""
        if self._open and self._shared_lock is None and self._ranks.rank == 0:
            self._lock.release()
        self._open = False

    def __enter__(self) -> Self:
        """Open the store."""
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()

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
        an earlier session, if known) differs, NotFound for a step that is not there, UsageError
        for "fresh" in a folder that holds checkpoints.

        ``like(name, shape)``: the tensor like which a saved one is to be sharded, or None for a
        whole one. Each rank reads its own regions only.
        """
        self._ranks.meet("restore")
        self.open()
        found = look_together(self.folder, self._ranks)
        if not found:
            if isinstance(choice, int):
                raise NotFound(f"{self.folder} holds no checkpoint, so none of step {choice}")
            self._make_ready_to_save()
            return None
        if choice == "fresh":
            raise UsageError(
                f"{self.folder} holds {len(found)} checkpoints; a fresh start needs an empty one",
                hint="Choose a new folder, or move the checkpoints away.",
            )
        # Before gigabytes are read, and before anything is said about another run's checkpoints.
        check_one_run(found, folder=self.folder, run_id=run_id)
        together(
            self._ranks,
            "restore: identity",
            lambda: check_identity(found, must_match, folder=self.folder),
        )
        manifest, state, skipped = choose(
            found,
            step=choice if isinstance(choice, int) else None,
            ranks=self._ranks,
            like=like,
        )
        self._make_ready_to_save()
        set_aside = self._take_up(found, manifest)
        return Restored(
            path=self.folder / step_name(manifest.step),
            manifest=manifest,
            state=state,
            skipped=skipped,
            set_aside=tuple(set_aside),
        )

    def _take_up(self, found: list[Checkpoint], manifest: Manifest) -> list[str]:
        """Become the session that follows a checkpoint; return the names of what was set aside."""
        self.run_id = manifest.run_id
        self.newest = manifest
        set_aside: list[str] = first(
            self._ranks,
            "restore: set aside",
            lambda: set_aside_others(found, manifest, self._disk, self._on_event),
        )
        kept = [c.manifest for c in found if c.manifest and c.name not in set_aside]
        gone = self._best.restore(manifest, kept, must_stand=self.policy.keep_best_n > 0)
        if gone is not None:
            self._on_event("best_gone", step=gone.step, metric=gone.metric, value=gone.value)
        first(self._ranks, "links", self._point_links)
        return set_aside

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        updates: int | None = None,
        samples: int = 0,
        tokens: int = 0,
        metrics: Mapping[str, float] | None = None,
        milestone: bool = False,
        must_match: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> Saved:
        """Commit `state` as the checkpoint of `step`; it is durable when this returns.

        `state` is a tree of tensors and plain values; anything else is refused by name
        (UnsafeState). Saving again what is already committed changes nothing. Raises SaveFailed
        after the retries; every older checkpoint is then as it was.
        """
        from keepstep.store.tensors import take_apart

        self._ranks.meet(f"the save of step {step}")
        self.open()
        if not self._ready_to_save:
            if first(self._ranks, "save: look", lambda: len(checkpoints_in(self.folder))):
                raise UsageError(
                    f"{self.folder} holds checkpoints, and this session has not looked at them",
                    hint="Call restore() before the first save, or choose an empty folder.",
                )
            self._make_ready_to_save()
        started = time.monotonic()
        taken: list[tuple[Facts, Snapshot]] = []

        def take() -> None:
            facts = self._facts(
                step=count_of("step", step),
                updates=count_of("updates", step if updates is None else updates),
                samples=count_of("samples", samples),
                tokens=count_of("tokens", tokens),
                must_match=table_of("must_match", must_match),
                environment=table_of("environment", environment),
                metrics=metrics_of(metrics),
                milestone=bool(milestone),
            )
            taken.append((facts, take_apart(state, self._ranks)))

        together(self._ranks, "save: state", take)
        facts, snapshot = taken[0]
        first(self._ranks, "save: lock", self._lock.confirm)
        self._on_event("snapshot", step=step)
        manifest, new = self._commit_with_retries(snapshot, facts)
        saved = Saved(
            path=self.folder / step_name(facts.step),
            manifest=manifest,
            new=new,
            seconds=time.monotonic() - started,
        )
        self._adopt(saved, facts)
        first(self._ranks, "save: tidy", self._tidy)
        return saved

    def _facts(self, **given: Any) -> Facts:
        sequence, newest = self._next_sequence, self.newest
        return Facts(
            **given,
            run_id=self.run_id,
            sequence=sequence,
            parent=newest.sequence if newest is not None else None,
            fingerprint=fingerprint_of(given["must_match"]),
            best=self._best.after(given["metrics"], sequence=sequence, step=given["step"]),
            mesh=dict(self._mesh),
        )

    def _adopt(self, saved: Saved, facts: Facts) -> None:
        """Take what stands now for this session's newest, if it is.

        It is also where an attempt had committed it and could not say so: its number must not be
        given again, and its best is the best.
        """
        manifest = saved.manifest
        newest = self.newest.sequence if self.newest is not None else 0
        if manifest.sequence > newest:
            self._next_sequence = max(self._next_sequence, manifest.sequence + 1)
            self.newest = manifest
            self._best.best = manifest.best
            self._on_event("committed", manifest=manifest, path=saved.path, seconds=saved.seconds)
        if not saved.new:
            self._best.best = self._best.after(
                facts.metrics, sequence=manifest.sequence, step=facts.step
            )

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Tell whether a checkpoint with these metrics would be the best so far."""
        return self._best.after(metrics, sequence=-1, step=-1) != self._best.best

    def mark_best(self, metrics: Mapping[str, float], *, step: int) -> bool:
        """Judge a committed checkpoint by metrics that were found after it was saved.

        The checkpoint is not modified; the next manifest records it. Returns whether it is the
        best now.
        """
        before = self._best.best
        sequence = first(self._ranks, "best", lambda: self._sequence_of(step))
        self._best.best = self._best.after(metrics, sequence=sequence, step=step)
        first(self._ranks, "links", self._point_links)
        return self._best.best != before

    def fence(self) -> None:
        """Return when the parameters may be changed: at once, since saves are synchronous."""

    def drain(self, deadline_seconds: float) -> bool:
        """Finish what is being written; True if nothing is left. Synchronous saves leave none."""
        return deadline_seconds >= 0

    def _hold_folder(self) -> int:
        """Hold the folder for all ranks; return the next sequence number."""
        self._disk.make_folders(self.folder)
        if self._shared_lock is None:
            self._lock.acquire()
        found = checkpoints_in(self.folder, aside=True)
        return 1 + max((entry.manifest.sequence for entry in found if entry.manifest), default=0)

    def _make_ready_to_save(self) -> None:
        """Sweep what a dead session left: from here on the folder is known to be this run's."""
        if not self._ready_to_save:
            first(self._ranks, "sweep", lambda: sweep(self.folder, self._disk, self._on_event))
            self.run_id = first(self._ranks, "run id", lambda: self.run_id)
            self._ready_to_save = True

    def _sequence_of(self, step: int) -> int:
        entry = look_at(self.folder / step_name(step))
        if entry.manifest is None:
            raise CheckpointDamaged(f"{entry.path} cannot be the best: {entry.fault}")
        return entry.manifest.sequence

    def _commit_with_retries(self, snapshot: Any, facts: Facts) -> tuple[Manifest, bool]:
        for attempt in range(self._save_retries + 1):
            try:
                return commit.commit(
                    snapshot,
                    facts,
                    folder=self.folder,
                    disk=self._disk,
                    ranks=self._ranks,
                    on_event=self._on_event,
                )
            except OSError as error:
                if attempt == self._save_retries:
                    raise self._save_failed(error, facts.step) from error
                self._on_event("retry", attempt=attempt + 1, step=facts.step, error=str(error))
                wait = _BACK_OFF_SECONDS[min(attempt, len(_BACK_OFF_SECONDS) - 1)]
                threading.Event().wait(wait)
        raise AssertionError("the loop above returns or raises")

    def _save_failed(self, error: OSError, step: int) -> SaveFailed:
        hint = "Mend the disk, then run the same command to continue."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "Make room, then run the same command to continue."
        newest = f"step_{self.newest.step}" if self.newest is not None else "none"
        return SaveFailed(
            f"step {step} could not be saved in {self.folder}: {error};"
            f" the newest checkpoint is {newest}, and every older one is as it was",
            hint=hint,
        )

    def _point_links(self) -> None:
        housekeeping.point_links(
            self.folder,
            newest=self.newest,
            best=self._best.best,
            disk=self._disk,
            on_event=self._on_event,
        )

    def _tidy(self) -> None:
        """Do what follows a commit; what the disk refuses is told and makes no save a failure."""
        self._point_links()
        self._lock.confirm()
        housekeeping.retain(
            self.folder,
            self.policy,
            now=time.time(),
            best=self._best.best,
            disk=self._disk,
            on_event=self._on_event,
        )
