"""Step until the run is done, and settle what its ending leaves.

Every way out of `step_until_done` is an `Outcome`; `settle` sees each once. A save that is due at
a step that was skipped moves to the next applied step, and so does an evaluation.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from keepstep.distributed.agree import StepFacts, agree
from keepstep.errors import NotFinite
from keepstep.run.outcome import Ending, FinalSave, Outcome, decides_to_save
from keepstep.run.policy import SaveDue, evaluation_due, save_due
from keepstep.run.rollback import roll_back
from keepstep.run.run import Run
from keepstep.run.step import StepResult, autocast, take_step
from keepstep.state.rng import seed_everything
from keepstep.state.training_state import TrainingState
from keepstep.store.ranks import together

if TYPE_CHECKING:
    from keepstep.tasks.task import Batch, Task


def step_until_done(task: "Task", state: TrainingState, run: Run) -> Outcome:
    """Take steps until the last one, or until the ranks agree that something ends the run."""
    run.hooks.call("on_run_start", run)
    outcome = _finish_what_is_owed(task, state, run)
    while outcome is None:
        outcome = roll_back(_step_until_an_ending(task, state, run), state, run)
        if outcome is None:
            outcome = _finish_what_is_owed(task, state, run)
    return outcome


def _step_until_an_ending(task: "Task", state: TrainingState, run: Run) -> Outcome:
    """Take steps until something ends them; what is not finite and would be saved diverges."""
    outcome = None
    try:
        with closing(_batches(task, state.counters.samples)) as batches:
            while outcome is None:
                outcome = _advance(task, batches, state, run)
        if _final_save(outcome, state, run) is FinalSave.MADE:
            run.require_finite(state)
    except NotFinite as error:
        return run.outcome(Ending.DIVERGED, reason=error.message)
    return outcome


def _advance(
    task: "Task", batches: Iterator["Batch"], state: TrainingState, run: Run
) -> Outcome | None:
    """Take one step and do what is due after it; return the outcome if the run ends here."""
    counters = state.counters
    run.group.health.phase = f"step {counters.step + 1}"
    batch = next(batches, None)
    if batch is None:
        return run.outcome(Ending.STOPPED, reason="the data ran out")
    result = take_step(task, batch, state, run)
    _record(result, state, run)
    if not result.agreed.busy:
        run.collect()
    if _has_diverged(state, run):
        return run.outcome(Ending.DIVERGED, reason=_how_it_diverged(result, state))
    if result.agreed.stop:
        _hear_the_reason(run)
        told = run.stop.reason
        if told.startswith("SIG"):
            told += f" (grace {run.stop.grace_seconds:g} s)"
        run.notice("stop", f"{told}: finishing step {counters.step:,}")
    stop = _evaluate_and_save(task, result, state, run) or result.agreed.stop
    if counters.step < run.config.train.max_steps:
        return run.outcome(Ending.STOPPED, reason=run.stop.reason) if stop else None
    if not result.applied:
        return run.outcome(Ending.FINISHED_SKIPPED, reason=_how_it_diverged(result, state))
    if counters.evaluation_owed:
        return run.outcome(Ending.STOPPED, reason=run.stop.reason)
    return run.outcome(Ending.FINISHED)


def settle(state: TrainingState, run: Run, outcome: Outcome) -> Outcome:
    """Leave what `outcome` calls for: the one place where an ending writes a checkpoint.

    An ending that calls for one and has no time for it is a stop: the same command continues.
    """
    late = agree(run.group, StepFacts(late=not run.clock.save_fits)).late
    save = _final_save(outcome, state, run, fits=not late)
    if save is FinalSave.MADE:
        run.save(state, metrics=run.metrics)
    elif save is FinalSave.NO_TIME:
        # A signal to another rank alone may have come after the last agreement on a stop.
        reason = "; ".join(filter(None, [outcome.reason or run.stop.reason, run.clock.no_time]))
        outcome = replace(outcome, ending=Ending.STOPPED, reason=reason)
    run.collect()
    final = run.outcome(outcome.ending, reason=outcome.reason)
    # A hook that fails there on one rank, or a rank that is lost there, is the ending of all.
    together(run.group.ranks, "end", lambda: run.close(final))
    return final


def _final_save(
    outcome: Outcome, state: TrainingState, run: Run, *, fits: bool = True
) -> FinalSave:
    return decides_to_save(
        outcome.ending,
        step=state.counters.step,
        saved_step=run.saved_step,
        save_after_skipped_end=run.config.checkpoint.save_after_skipped_end,
        fits=fits,
    )


def _finish_what_is_owed(task: "Task", state: TrainingState, run: Run) -> Outcome | None:
    """Do what was left undone at this very step, before a resume or a rollback to it.

    Returns an outcome if that is all.

    An evaluation that a stop cut short is made now. It belongs to the checkpoint that is already
    committed, which is never modified: the store records the best beside it.
    """
    counters, max_steps = state.counters, run.config.train.max_steps
    if _stop_agreed(run):
        return run.outcome(Ending.STOPPED, reason=run.stop.reason)
    owed = counters.evaluation_owed and run.saved_step == counters.step
    if owed and counters.skips_in_a_row == 0:
        metrics = _evaluate(task, state, run)
        if metrics is None:
            return run.outcome(Ending.STOPPED, reason=run.stop.reason)
        run.store.mark_best(metrics, step=counters.step)
        if counters.step >= max_steps:
            return run.outcome(Ending.FINISHED)
    elif counters.step >= max_steps:
        return run.outcome(Ending.NOTHING_TO_DO, reason=f"step {counters.step} of {max_steps}")
    run.rehearse(state)
    if counters.step == 0 and run.saved_step is None:
        counters.save_owed = save_due(0, run.config.checkpoint).value
        # A rollback needs something to go back to from the first step on.
        if counters.save_owed != SaveDue.NO or run.config.nonfinite.policy == "rollback":
            run.save(state, metrics={})
    return None


def _batches(task: "Task", position: int) -> Generator["Batch"]:
    yield from task.batches(position)


def _record(result: StepResult, state: TrainingState, run: Run) -> None:
    counters = state.counters
    facts = {
        "updates": counters.updates,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "rate": result.rate,
        "skipped": not result.applied,
        "tokens": counters.tokens,
    }
    run.journal.write("step", step=counters.step, **facts)
    run.hooks.call("on_step_end", run, counters.step, facts)


def _has_diverged(state: TrainingState, run: Run) -> bool:
    skips, nonfinite = state.counters.skips_in_a_row, run.config.nonfinite
    return skips > 0 and (nonfinite.policy != "skip" or skips >= nonfinite.max_consecutive)


def _how_it_diverged(result: StepResult, state: TrainingState) -> str:
    return (
        f"loss {result.loss:g}, gradient norm {result.grad_norm:g} at step {state.counters.step}"
        f" ({state.counters.skips_in_a_row} in a row not finite)"
    )


def _evaluate_and_save(task: "Task", result: StepResult, state: TrainingState, run: Run) -> bool:
    """Do what is due after a step; return whether the ranks agreed to stop meanwhile."""
    counters, config = state.counters, run.config
    run.metrics = {}
    if evaluation_due(counters.step, config.train.max_steps, config.evaluation):
        counters.evaluation_owed = True
    due = save_due(counters.step, config.checkpoint)
    if due is not SaveDue.NO:
        counters.save_owed = due.value
    elif result.agreed.save and counters.save_owed == SaveDue.NO:
        counters.save_owed = SaveDue.SCHEDULED.value
    if not result.applied or not (counters.evaluation_owed or counters.save_owed != SaveDue.NO):
        return False
    is_best = False
    if counters.evaluation_owed:
        metrics = _evaluate(task, state, run)
        if metrics is None:
            return True
        run.metrics = metrics
        # Whether these are the best depends on what became of the save before.
        run.collect()
        is_best = run.store.would_be_best(metrics)
    # Where the run stops here, the save is the last one, and `settle` makes it.
    if (counters.save_owed != SaveDue.NO or is_best) and not result.agreed.stop:
        run.save(state, metrics=run.metrics)
    return _stop_agreed(run)


def _stop_agreed(run: Run) -> bool:
    """Agree on whether to stop."""
    run.clock.look(saving=run.store.is_saving)
    stop = agree(run.group, StepFacts(stop=run.stop.requested)).stop
    if stop:
        _hear_the_reason(run)
    return stop


def _hear_the_reason(run: Run) -> None:
    """Take over the reason for an agreed stop from the rank that has one."""
    reasons = run.group.ranks.gather(run.stop.reason, what="stop")
    run.request_stop(next(reason for reason in reasons if reason))


def _evaluate(task: "Task", state: TrainingState, run: Run) -> dict[str, float] | None:
    """Return the held-out metrics, or None where a stop cut the evaluation short."""
    counters = state.counters
    seed_everything(run.config.run.seed, "evaluate", run.layout.data_index, counters.step)

    run.group.health.phase = f"the evaluation after step {counters.step}"
    with state.averaged(before=run.store.fence), autocast(run):
        found = task.evaluate(state.model, lambda: _stop_agreed(run))
    if found is None:
        return None
    metrics = dict(found)
    counters.evaluation_owed = False
    run.journal.write("evaluation", step=counters.step, metrics=metrics)
    run.hooks.call("on_evaluated", run, counters.step, metrics)
    return metrics
