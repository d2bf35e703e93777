"""The main path of a training run."""

from collections.abc import Sequence

from keepstep.config.schema import Config
from keepstep.distributed.shard import before_first_update, shard_model
from keepstep.optim.optimizer import build_optimizer
from keepstep.run.loop import settle, step_until_done
from keepstep.run.outcome import Outcome
from keepstep.run.restore import restore_newest
from keepstep.run.run import Run, open_run
from keepstep.run.stop import StopRequests
from keepstep.state.rng import seed_everything
from keepstep.state.training_state import TrainingState
from keepstep.tasks.registry import build_task
from keepstep.tasks.task import DataShare, Task


def train(config: Config, *, stop: StopRequests, hooks: Sequence[object] = ()) -> Outcome:
    """Carry the run to its last step, or to the first safe place to stop."""
    with open_run(config, stop=stop, hooks=hooks) as run:
        task = build_task(config, share_of(run))
        state = initial_state(task, run)
        restore_newest(task, state, run)
        outcome = step_until_done(task, state, run)
        return settle(state, run, outcome)


def share_of(run: Run) -> DataShare:
    """Return which part of each global batch this rank takes."""
    layout = run.layout

    def over_shares(values: list[float]) -> list[float]:
        # The ranks of a tensor-parallel group have one share between them, which counts once.
        return run.group.sum(values if layout.tp_index == 0 else [0.0] * len(values))

    return DataShare(index=layout.data_index, count=layout.data_ranks, sum=over_shares)


def initial_state(task: Task, run: Run) -> TrainingState:
    """Build the state of step 0, a pure function of the config."""
    seed_everything(run.config.run.seed, "init", 0, 0)
    model = task.build_model()
    model.train()
    config = run.config.train
    ordered = config.deterministic_reduction
    shard_model(model, run.layout, bfloat16=config.precision == "bfloat16", ordered=ordered)
    model.to(run.device)
    if config.compile:
        # In place, so that the names of the parameters stay what they are in the checkpoint.
        model.compile()
    optimizer = build_optimizer(run.config.optimizer, model, ordered=ordered)
    optimizer.register_step_pre_hook(before_first_update(model, run.layout, run.group.ranks))
    return TrainingState(model=model, optimizer=optimizer)
