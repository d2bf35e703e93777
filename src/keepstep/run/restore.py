"""How a session continues: which checkpoint it takes, and what it says about the others.

Guarantees: a fresh start happens only in a folder without checkpoints, and is said. The same
command continues, also where it names a step to go back to: the way back is taken once, and is
recorded in every checkpoint that follows from it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from keepstep.config.resolved import RUN_TOML
from keepstep.errors import NotFound
from keepstep.run.changes import config_changes
from keepstep.run.environment import differences
from keepstep.run.run import Run
from keepstep.state.training_state import TrainingState
from keepstep.store import Restored
from keepstep.store.ranks import first
from keepstep.store.standing import newest_known

if TYPE_CHECKING:
    from keepstep.tasks.task import Task

_ON_RESUME = "on_resume"
_NONE: Mapping[str, Any] = {}


def restore_newest(task: "Task", state: TrainingState, run: Run) -> None:
    """Make `state` the one to continue from; a fresh folder leaves it as it is."""
    run.position = state
    run.identity.update({f"data.{name}": value for name, value in task.identity.items()})
    choice = first(run.group.ranks, "choice", lambda: _choice(run))
    run.environment[_ON_RESUME] = run.config.checkpoint.on_resume
    restored = run.store.restore(
        choice, must_match=run.identity, run_id=run.recorded_run_id, like=state.like
    )
    if restored is None and choice != "fresh":
        first(run.group.ranks, "journal", lambda: _require_nothing_saved(run))
    optimizer, changes, gone = take_up(restored, state, run)
    _tell_changes(run, optimizer=optimizer, environment=changes)
    run.begin()
    _tell(restored, run, taken_back=gone)
    if restored is not None or gone:
        run.hooks.call("on_rewound", run, state.counters.step)


def take_up(
    restored: Restored | None,
    state: TrainingState,
    run: Run,
    *,
    rollback: Mapping[str, Any] = _NONE,
) -> tuple[list[str], list[str], int]:
    """Make `state` the restored one, if there is one, and have the journal end at its step.

    Where a rollback to this very checkpoint is told of, the batches that it skipped stay skipped.
    ``rollback``: the facts of one that is being made; they are durable when this returns.

    Returns what is another than before, in the optimizer and in the environment, and how many
    lines of the journal were taken back.
    """
    optimizer, changes = _load(restored, state, run) if restored is not None else ([], [])
    counters = state.counters
    gone = first(
        run.group.ranks,
        "rewind",
        lambda: run.journal.rewind(counters.step, keep_evaluation=not counters.evaluation_owed),
    )
    if restored is not None:
        manifest = restored.manifest
        checkpoint = {"run_id": manifest.run_id, "sequence": manifest.sequence}

        def last_rollback() -> dict[str, Any] | None:
            if rollback:
                run.journal.write("rollback", **checkpoint, **rollback)
                run.journal.sync()
            return run.journal.last_rollback(manifest.step, **checkpoint)

        followed = first(run.group.ranks, "rollback", last_rollback)
        if followed is not None:
            counters.samples, counters.rollbacks = followed["samples"], followed["rollbacks"]
    return optimizer, changes, gone


def _choice(run: Run) -> Literal["newest", "fresh"] | int:
    """Return the choice for the store: a wish that was already granted means the newest."""
    wish = run.config.checkpoint.on_resume
    if wish == "newest":
        return "newest"
    newest = newest_known(run.store.folder, run.store.home)
    if newest is not None and newest.environment.get(_ON_RESUME) == wish:
        return "newest"
    return "fresh" if wish == "fresh" else int(wish)


def _require_nothing_saved(run: Run) -> None:
    """Refuse to start over where the journal tells of checkpoints that are not there."""
    step = run.journal.tells_of_a_save()
    if step is not None:
        raise NotFound(
            f"the journal in {run.folder} tells of a checkpoint of step {step:,}, and"
            f" {run.store.folder} holds none",
            hint="Is it mounted, and the folder that you mean? To start over all the same, use"
            " --checkpoint.on_resume=fresh.",
        )


def _load(restored: Restored, state: TrainingState, run: Run) -> tuple[list[str], list[str]]:
    """Take the saved state; return what changed since: in the optimizer, in the environment."""
    saved = restored.state
    optimizer = state.load(saved)
    orphans = run.hooks.load(saved["hooks"])
    run.saved_step = restored.manifest.step
    for name in orphans:
        run.notice("hooks", f"{name} is not configured any more; its saved state is left out")
    before = dict(restored.manifest.environment)
    # A wish is in the environment so that it is granted once; the config's change tells of it.
    before.pop(_ON_RESUME, None)
    return optimizer, differences(before, run.environment)


def _tell_changes(run: Run, *, optimizer: list[str], environment: list[str]) -> None:
    """Tell what is another than before, and make it durable.

    This comes before the run's record of its config is overwritten: a kill in between would leave
    no trace of what the config was.
    """
    since_session = first(
        run.group.ranks,
        "changes",
        lambda: config_changes(run.folder / RUN_TOML, run.config),
    )
    for change in since_session:
        run.notice("config", f"changed since the last session: {change}")
    if since_session:
        run.journal.sync()
    # What the optimizer sees follows from the config. It adds something where no field says it:
    # the checkpoint is older than the last session, say, or the record is gone.
    explained = any(change.startswith("optimizer.") for change in since_session)
    for change in [*([] if explained else optimizer), *environment]:
        run.notice("config", f"changed since the checkpoint: {change}")


def _tell(restored: Restored | None, run: Run, *, taken_back: int) -> None:
    if restored is None:
        run.notice("start", "no checkpoint here: starting at step 0")
        return
    step = restored.manifest.step
    wish = run.config.checkpoint.on_resume
    if wish == restored.manifest.environment.get(_ON_RESUME) and wish.isdecimal():
        run.notice(
            "resume",
            f"the way back to step {int(wish):,} was taken in an earlier session; to take it once"
            f" more, write --checkpoint.on_resume=0{wish}",
        )
    run.journal.write(
        "resumed",
        step=step,
        sequence=restored.manifest.sequence,
        path=restored.path.name,
        passed_over=[f"{item.name}: {item.fault}" for item in restored.skipped],
        set_aside=list(restored.set_aside),
        journal_lines_taken_back=taken_back,
    )
    run.hooks.call(
        "on_notice",
        run,
        "resume",
        f"step {step:,} of {run.config.train.max_steps:,} from {restored.path.name} (verified)"
        + _skipped_text(restored, run)
        + "".join(f" · {item.name} passed over: {item.fault}" for item in restored.skipped),
    )


def _skipped_text(restored: Restored, run: Run) -> str:
    """Say which samples stay skipped by a rollback of an earlier session."""
    assert run.position is not None, "only a state is restored"
    before, now = restored.manifest.samples, run.position.counters.samples
    return f" · rolled back: samples {before:,}..{now - 1:,} stay skipped" if now > before else ""
