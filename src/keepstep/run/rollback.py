"""Back to the newest whole checkpoint, past the batches that led to what is not finite.

Guarantees:
1. The way back is that of a resume, in the same code: weights, moments, counters, the hooks'
   state, the best and the journal are what a fresh session would find.
2. It is durable before the next step is taken: a line of the journal, which names the checkpoint.
   A session that takes up that very checkpoint goes the same way.
3. It ends: all rollbacks of a run are counted in its state.

Without 2 a run that is killed before its next save would take the skipped batches again. Whatever
was not finite for once, by a fault of the hardware, would not be so again, and the run would be
another one. Where the journal is gone, they are taken again and judged again.
"""

from dataclasses import replace

from keepstep.errors import NotFound
from keepstep.run.outcome import Ending, Outcome
from keepstep.run.restore import take_up
from keepstep.run.run import Run
from keepstep.state.training_state import TrainingState


def roll_back(outcome: Outcome, state: TrainingState, run: Run) -> Outcome | None:
    """Return None where `state` is a checkpoint's again, and else the outcome that stands.

    The batches after that checkpoint are skipped, up to the last one that was taken.
    """
    nonfinite, reached = run.config.nonfinite, state.counters
    if outcome.ending is not Ending.DIVERGED or nonfinite.policy != "rollback":
        return outcome
    if reached.rollbacks >= nonfinite.max_rollbacks:
        limit = f"{reached.rollbacks} rollbacks were made (nonfinite.max_rollbacks)"
        return replace(outcome, reason=f"{outcome.reason}; {limit}")
    run.group.health.phase = f"the rollback from step {reached.step}"
    # A save in flight may be the newest, and is told of before the way back to it.
    run.collect()
    # Beside the restored state and what is made of it, they would take more than training does.
    state.optimizer.forget()
    restored = run.store.restore(run_id=run.store.run_id, like=state.like)
    if restored is None:
        raise NotFound(
            f"{outcome.reason}, and {run.store.folder} holds no checkpoint to go back to",
            hint="Those that were saved there are gone: put them back, or start in a new folder.",
        )
    number, manifest = reached.rollbacks + 1, restored.manifest
    facts = {
        "step": reached.step,
        "back_to": manifest.step,
        "samples": reached.samples,
        "rollbacks": number,
        "reason": outcome.reason,
    }
    take_up(restored, state, run, rollback=facts)
    run.hooks.call("on_rewound", run, manifest.step)
    factor = nonfinite.rollback_rate_factor**number
    rate = f", rate x{factor:g}" if factor != 1 else ""
    run.hooks.call(
        "on_notice",
        run,
        "rollback",
        f"{outcome.reason}; back to step {manifest.step:,} (verified),"
        f" skipping samples {manifest.samples:,}..{reached.samples - 1:,}{rate}"
        f" ({number} of {nonfinite.max_rollbacks})"
        + "".join(f" · {item.name} passed over: {item.fault}" for item in restored.skipped),
    )
    return None
