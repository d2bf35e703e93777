"""How a session continues: which checkpoint it takes, and what it says about the others.

Guarantees: a fresh start happens only in a folder without checkpoints, and is said. The same
command continues, also where it names a step to go back to: the way back is taken once, and is
recorded in every checkpoint that follows from it.
"""

from typing import TYPE_CHECKING, Literal

from keepstep.config.resolved import changes_since
from keepstep.errors import NotFound
from keepstep.run.environment import differences
from keepstep.run.run import Run
from keepstep.state.training_state import TrainingState
from keepstep.store import Restored
from keepstep.store.catalog import checkpoints_in
from keepstep.store.layout import RUN_TOML_NAME
from keepstep.store.ranks import first

if TYPE_CHECKING:
    from keepstep.tasks.task import Task

_ON_RESUME = "on_resume"


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
    changes = _load(restored, state, run) if restored is not None else []
    counters = state.counters
    gone = first(
        run.group.ranks,
        "rewind",
        lambda: run.journal.rewind(counters.step, keep_evaluation=not counters.evaluation_owed),
    )
    # Read before the config of this session is written over it.
    changes += first(
        run.group.ranks,
        "changes",
        lambda: changes_since(run.folder / RUN_TOML_NAME, run.config) if restored else [],
    )
    run.begin()
    _tell(restored, run, taken_back=gone)
    for change in changes:
        run.notice("config", f"changed since the checkpoint: {change}")


def _choice(run: Run) -> Literal["newest", "fresh"] | int:
    """Return the choice for the store: a wish that was already granted means the newest."""
    wish = run.config.checkpoint.on_resume
    if wish == "newest":
        return "newest"
    whole = [entry.manifest for entry in checkpoints_in(run.store.folder) if entry.manifest]
    if whole and max(whole, key=lambda m: m.sequence).environment.get(_ON_RESUME) == wish:
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


def _load(restored: Restored, state: TrainingState, run: Run) -> list[str]:
    saved = restored.state
    changes = state.load(saved)
    orphans = run.hooks.load(saved["hooks"])
    run.saved_step = restored.manifest.step
    for name in orphans:
        run.notice("hooks", f"{name} is not configured any more; its saved state is left out")
    return changes + differences(dict(restored.manifest.environment), run.environment)


def _tell(restored: Restored | None, run: Run, *, taken_back: int) -> None:
    if restored is None:
        run.notice("start", "no checkpoint here: starting at step 0")
        return
    step = restored.manifest.step
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
        + "".join(f" · {item.name} passed over: {item.fault}" for item in restored.skipped),
    )
