"""When saves and evaluations are due."""

from keepstep.config.schema import CheckpointConfig, DenseWindowConfig, EvaluationConfig
from keepstep.run.policy import SaveDue, evaluation_due, save_due


def saved(checkpoint, steps):
    return [step for step in range(steps) if save_due(step, checkpoint) is not SaveDue.NO]


def test_the_interval_saves_its_multiples_but_not_the_initial_weights():
    assert saved(CheckpointConfig(interval=4), 13) == [4, 8, 12]
    assert saved(CheckpointConfig(interval=0), 13) == []


def test_inside_the_window_the_strategy_decides_and_outside_the_interval():
    window = DenseWindowConfig(start=6, stop=20)
    checkpoint = CheckpointConfig(interval=5, dyn_ckpt_window=window)
    assert saved(checkpoint, 31) == [5, 6, 7, 8, 10, 14, 25, 30]
    kinds = {step: save_due(step, checkpoint) for step in (5, 6, 14, 15, 25)}
    assert kinds == {
        5: SaveDue.SCHEDULED,
        6: SaveDue.MILESTONE,
        14: SaveDue.MILESTONE,
        15: SaveDue.NO,
        25: SaveDue.SCHEDULED,
    }


def test_the_last_step_of_the_window_belongs_to_it():
    window = DenseWindowConfig(start=6, stop=8)
    assert save_due(8, CheckpointConfig(interval=4, dyn_ckpt_window=window)) is SaveDue.MILESTONE
    window = DenseWindowConfig(start=5, stop=8)
    assert save_due(8, CheckpointConfig(interval=4, dyn_ckpt_window=window)) is SaveDue.NO


def test_a_window_from_0_saves_the_initial_weights():
    window = DenseWindowConfig(start=0, stop=4)
    checkpoint = CheckpointConfig(interval=0, dyn_ckpt_window=window)
    assert saved(checkpoint, 10) == [0, 1, 2, 4]


def test_evaluations_are_due_at_the_interval_and_at_the_end():
    every = EvaluationConfig(interval=3, at_end=True)
    assert [s for s in range(11) if evaluation_due(s, 10, every)] == [3, 6, 9, 10]
    none = EvaluationConfig(interval=0, at_end=False)
    assert not any(evaluation_due(step, 10, none) for step in range(11))
