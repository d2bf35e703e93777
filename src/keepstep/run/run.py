"""A run while it lives: its folder, its lock, its journal, its store, and how it is let go.

Invariants:
1. Nothing in the folder is touched before this session holds its lock.
2. Nothing of an earlier session is overwritten before it is known to be the same run.
3. Every way out, an exception too, leaves one `outcome.json` and one last line (`_close`).
4. While a session lives `outcome.json` says *running*: a kill never leaves an older ending there.
"""

import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from keepstep.config.quantities import bytes_text, seconds
from keepstep.config.resolved import (
    RUN_TOML,
    checkpoint_folder,
    dump_toml,
    must_match,
    run_folder,
)
from keepstep.config.schema import Config
from keepstep.distributed.group import Group, open_group
from keepstep.distributed.mesh import lay_out
from keepstep.distributed.ordered import require_order
from keepstep.errors import CheckpointDamaged, KeepstepError, NotFinite, UsageError
from keepstep.optim.schedule import build_schedule
from keepstep.run.clock import SAVES_KEPT, Clock
from keepstep.run.environment import choose_device, describe_environment, make_deterministic
from keepstep.run.hooks import Hooks, load_hooks
from keepstep.run.journal import Journal, SilentJournal
from keepstep.run.outcome import Ending, Outcome, ending_of
from keepstep.run.policy import SaveDue
from keepstep.run.stop import StopRequests
from keepstep.run.store_events import tell_of_store
from keepstep.state.training_state import TrainingState
from keepstep.store import Saved, Store
from keepstep.store.catalog import checkpoints_in
from keepstep.store.disk import Disk
from keepstep.store.layout import (
    CHECKPOINTS_NAME,
    JOURNAL_NAME,
    LOCK_NAME,
    OUTCOME_NAME,
)
from keepstep.store.lock import FolderLock
from keepstep.store.manifest import digest_of
from keepstep.store.plain import decode, encode
from keepstep.store.ranks import first, together
from keepstep.store.remote import ObjectStore
from keepstep.store.sweep import sweep


class Run:
    """What a session holds while it trains; hooks get this object."""

    def __init__(
        self, config: Config, *, stop: StopRequests, group: Group, hooks: Sequence[object]
    ) -> None:
        self.config = config
        self.stop = stop
        self.clock = Clock(config, stop)
        self.group = group
        self.folder = run_folder(config)
        self.device = choose_device(config.train.device, group)
        self.layout = lay_out(
            config.distributed,
            rank=group.rank,
            world_size=group.world_size,
            device=self.device.type,
        )
        if config.train.deterministic_reduction:
            require_order(config, self.layout)
        self.hooks = Hooks([*hooks, *load_hooks(config.run.hooks)], is_first=group.is_first)
        self.identity = must_match(config)
        self.disk = Disk()
        journal = Journal if group.is_first else SilentJournal
        self.journal: Journal = journal(self.folder / JOURNAL_NAME, disk=self.disk)
        self.lock = FolderLock(self.folder / LOCK_NAME)
        self.store: Store = self._make_store()
        self.environment = describe_environment(self.device)
        self.saved_step: int | None = None
        self.save_requested = False
        self.metrics: dict[str, float] = {}
        self.schedule = build_schedule(config.schedule, config.train.max_steps)
        self.position: TrainingState | None = None
        self.begun = False
        self.recorded_run_id: str | None = None
        self._ending_told = False

    def _make_store(self) -> Store:
        config = self.config.checkpoint
        folder = checkpoint_folder(self.config)
        return Store(
            folder,
            # Any other way into this folder asks for this very lock.
            lock=self.lock if folder.resolve() == self.folder.resolve() else None,
            ranks=self.group.ranks,
            mesh=self.layout.sizes,
            keep_last_n=config.keep_last_n,
            keep_best_n=config.keep_best_n,
            keep_every=config.keep_every,
            keep_hourly=config.keep_hourly,
            keep_daily=config.keep_daily,
            best_metric=self.config.evaluation.metric,
            best_mode=self.config.evaluation.mode,
            save_retries=config.save_retries,
            commit_method=config.commit_method,
            layout=config.layout,
            verify_after_write=config.verify_after_write,
            bounded_memory=config.async_mode == "bounded",
            remote=config.remote
            and ObjectStore(config.remote, timeout=seconds(config.remote_timeout)),
            disk=self.disk,
            on_event=partial(tell_of_store, self),
        )

    def let_go(self) -> None:
        """Let go of the folder, and of what must not outlive the process group."""
        self.journal.close()
        self.lock.release()
        if self.position is not None and self.group.world_size > 1:
            # FSDP's hooks and buffers hold the group; freed after it, they abort the process.
            self.position.release()
            gc.collect()

    def request_stop(self, reason: str) -> None:
        """Ask for a stop at the end of this step, on every rank."""
        self.stop.request(reason)

    def request_save(self) -> None:
        """Ask for a checkpoint at the end of this step."""
        self.save_requested = True

    def notice(self, word: str, text: str) -> None:
        """Tell people something that matters, on the terminal and in the journal."""
        self.journal.write("notice", word=word, text=text)
        self.hooks.call("on_notice", self, word, text)

    def begin(self) -> None:
        """Make the folder this session's own: the identity is known to be right."""
        first(self.group.ranks, "begin", self._begin_folder)
        self.begun = True
        self.clock.begin(
            first(self.group.ranks, "clock", partial(self.journal.save_seconds, newest=SAVES_KEPT))
        )

    def _begin_folder(self) -> None:
        sweep(self.folder, self.disk, partial(tell_of_store, self))
        self.disk.replace_file(self.folder / RUN_TOML, dump_toml(self.config).encode())
        # With the id that the first checkpoint will have: a kill must not make two runs of one.
        self.begun = True
        self._write_outcome({"outcome": "running", "pid": os.getpid(), "since": time.time()})
        self.journal.write("session", pid=os.getpid(), environment=dict(self.environment))

    def save(self, state: TrainingState, *, metrics: dict[str, float]) -> None:
        """Save the state as the checkpoint of its step; SaveFailed where that cannot be done.

        NotFinite where it holds nan or inf: it would be taken for the newest, and gone back to.
        It is committed when this returns, or, where saves are asynchronous, after `collect`.
        """
        self.collect()
        self.require_finite(state)
        counters = state.counters
        milestone = counters.save_owed == SaveDue.MILESTONE
        counters.save_owed = SaveDue.NO.value
        self.group.health.phase = f"the save of step {counters.step}"
        self.save_requested = False
        self.journal.sync()
        self.clock.save_begins()
        saved = self.store.save(
            self._captured(state),
            step=counters.step,
            wait=self.config.checkpoint.async_mode == "disabled",
            copy_now=state.moving(),
            updates=counters.updates,
            samples=counters.samples,
            tokens=counters.tokens,
            metrics=metrics,
            milestone=milestone,
            must_match=self.identity,
            environment=self.environment,
        )
        self.saved_step = counters.step
        self._tell_of(saved)

    def require_finite(self, state: TrainingState) -> None:
        """Raise NotFinite on all ranks where a tensor of any of them is not finite."""
        for rank, name in enumerate(together(self.group.ranks, "finite", state.not_finite)):
            if name:
                where = f" on rank {rank}" if self.group.world_size > 1 else ""
                step = state.counters.step
                raise NotFinite(f"{name} is not finite{where} after step {step:,}: it is not saved")

    def rehearse(self, state: TrainingState) -> None:
        """Rehearse a save before the first step of a session; CannotSave says what is wrong."""
        self.group.health.phase = "the rehearsal of a save"
        started = time.monotonic()
        room = self.store.rehearse(
            self._captured(state),
            bytes_to_come=state.optimizer.bytes_to_come(),
            must_match=self.identity,
            environment=self.environment,
        )
        text = f"commit by {self.disk.methods} · room for {room.fits:,} more checkpoint"
        text += f"{'s' * (room.fits != 1)} of {bytes_text(room.checkpoint_bytes)}"
        if not room.reserved:
            text += " (quotas cannot be looked at here)"
        config = self.config.checkpoint
        timed = [n for n in ("keep_every", "keep_hourly", "keep_daily") if getattr(config, n)]
        if config.keep_last_n == 0:
            text += "; keep_last_n = 0 keeps all"
        elif timed:
            text += f"; not counted is what stays by {', '.join(timed)}"
        self.notice("rehearse", text)
        if room.fits < room.wanted:
            wanted = f"up to {room.wanted:,} more will stand at once, and only {room.fits:,} fit"
            self.notice("store", f"{room.folder}: {wanted}: make room")
        share = room.checkpoint_bytes / (1 if config.layout == "files" else self.group.world_size)
        self.clock.rehearsed(time.monotonic() - started, bytes_of_a_rank=share)
        for word, text in self.clock.notices:
            self.notice(word, text)

    def _captured(self, state: TrainingState) -> dict[str, Any]:
        """Return what is saved: the state, and that of the hooks of the first rank."""
        hooks = first(
            self.group.ranks, "hooks", lambda: encode(self.hooks.state(), path="state.hooks")
        )
        return {**state.capture(), "hooks": decode(hooks)}

    def collect(self) -> None:
        """Wait for the save in flight, if there is one, and tell of it; raise its error."""
        self._tell_of(self.store.collect())

    def _tell_of(self, saved: Saved | None) -> None:
        if saved is None or not saved.new:
            return
        manifest = saved.manifest
        warned = self.clock.grace_warning
        self.clock.save_ended(saved.seconds)
        self.journal.write(
            "saved",
            step=manifest.step,
            sequence=manifest.sequence,
            path=saved.path.name,
            seconds=round(saved.seconds, 3),
        )
        if self.clock.grace_warning and not warned:
            self.notice("grace", self.clock.grace_warning)
        self.hooks.call("on_committed", self, saved.path, manifest)

    def outcome(self, ending: Ending, *, reason: str = "", code: int = -1) -> Outcome:
        """Return the outcome of ending here and now."""
        newest = self.store.newest
        counters = self.position.counters if self.position is not None else None
        return Outcome(
            ending=ending,
            step=counters.step if counters else 0,
            updates=counters.updates if counters else 0,
            reason=reason,
            checkpoint=newest.name if newest is not None else None,
            code=code,
        )

    def close(self, outcome: Outcome) -> None:
        """Write down how the run ended and tell the hooks; the file comes last."""
        self.group.health.phase = "the end"
        try:
            self.journal.write("outcome", **outcome.as_data())
            if not self._ending_told:
                # A hook that fails here ends the run as failed: it is not asked a second time.
                self._ending_told = True
                self.hooks.call("on_run_end", self, outcome)
        finally:
            self._write_outcome(outcome.as_data())

    def take_folder(self) -> str | None:
        """Hold the folder; return which run the last session in it was, if there was one."""
        _require_one_place(self)
        self.disk.make_folders(self.folder)
        self.lock.acquire()
        path = self.folder / OUTCOME_NAME
        if path.is_file():
            try:
                found = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                # It is written atomically, so this is damage from outside; checkpoints decide.
                self.notice("run", f"{path} is not JSON ({error}); it is written anew")
                return None
            run_id = found.get("run_id") if isinstance(found, dict) else None
            return run_id if isinstance(run_id, str) else None
        return None

    def note_loss(self, error: KeepstepError) -> None:
        """Write the outcome of a run that is about to be left while its main thread is blocked."""
        ending, code = ending_of(error)
        if self.begun:
            self._write_outcome(self.outcome(ending, reason=str(error), code=code).as_data())

    def _write_outcome(self, data: dict[str, Any]) -> None:
        if not self.group.is_first:
            return
        # Before the run has begun, the checkpoints here are not known to be this session's.
        run_id = self.store.run_id if self.begun else self.recorded_run_id
        text = json.dumps({**data, "run_id": run_id}, indent=2) + "\n"
        self.disk.replace_file(self.folder / OUTCOME_NAME, text.encode())


@contextmanager
def open_run(config: Config, *, stop: StopRequests, hooks: Sequence[object]) -> Iterator[Run]:
    """Hold the run's folder; an exception inside becomes an outcome and goes on its way."""
    with open_group(config.distributed, device=config.train.device) as group:
        if config.train.deterministic:
            make_deterministic()
        run: Run | None = None
        try:
            run = Run(config, stop=stop, group=group, hooks=hooks)
            _require_one_config(run)
            run.recorded_run_id = first(group.ranks, "folder", run.take_folder)
            group.health.leave_with(run.note_loss)
            with run.store:
                yield run
        except BaseException as error:
            cause = group.health.explain(_as_failure(error))
            group.health.report(cause, ending_of(cause)[1])
            if run is not None and (run.begun or isinstance(cause, CheckpointDamaged)):
                _close_after(cause, run)
            if cause is error:
                raise
            raise cause from error
        finally:
            if run is not None:
                run.let_go()


def _as_failure(error: BaseException) -> BaseException:
    """Return an error for what would end Python by itself, with a code that is not the run's."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return KeepstepError(
            f"a hook or a library left the run by {type(error).__name__}({error})",
            hint="A hook that wants the run to end calls run.request_stop(reason).",
        )
    return error


def _require_one_config(run: Run) -> None:
    """Refuse ranks that were started with different configs."""
    digests = run.group.ranks.gather(digest_of(dump_toml(run.config).encode()), what="config")
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise UsageError(
            f"ranks {differing} were started with another config than rank 0",
            hint="Start all ranks with the same command and the same files.",
        )


def _require_one_place(run: Run) -> None:
    """Refuse a `checkpoint.dir` that is the folder of a run whose checkpoints stand further in.

    Its newest checkpoint would be ignored, and one run would be split into two.
    """
    inner = run.folder / CHECKPOINTS_NAME
    if run.store.folder.resolve() == run.folder.resolve() and checkpoints_in(inner):
        raise UsageError(
            f"checkpoint.dir: {run.folder} is a run's folder; its checkpoints are in {inner}",
            hint=f"Use --run.dir={run.folder} to continue that run, or another folder.",
        )


def _close_after(error: BaseException, run: Run) -> None:
    """Leave the outcome of an exception; where even that fails, the exception says so."""
    ending, code = ending_of(error)
    reason = f"{type(error).__name__}: {error}"
    try:
        run.close(run.outcome(ending, reason=reason, code=code))
    # Whatever fails now, a hook or the disk, must not take the place of what ended the run.
    except Exception as second:
        error.add_note(f"and while the run was closed: {type(second).__name__}: {second}")
