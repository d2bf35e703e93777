"""What an ending leaves, over all combinations."""

import itertools

import pytest

from keepstep.errors import CheckpointDamaged, Diverged, Locked, SaveFailed, Unhealthy
from keepstep.run.outcome import (
    EXIT_CODES,
    Ending,
    FinalSave,
    Outcome,
    decides_to_save,
    ending_of,
)

STEPS = (0, 1, 10)
SAVED = (None, 0, 1, 9, 10)


@pytest.mark.parametrize("ending", Ending)
def test_every_combination_of_ending_step_saved_step_wish_and_time(ending):
    for step, saved, wish, fits in itertools.product(STEPS, SAVED, (False, True), (False, True)):
        found = decides_to_save(
            ending, step=step, saved_step=saved, save_after_skipped_end=wish, fits=fits
        )
        wanted = {
            Ending.FINISHED: True,
            Ending.STOPPED: True,
            Ending.FINISHED_SKIPPED: wish,
            Ending.NOTHING_TO_DO: False,
            Ending.DIVERGED: False,
            Ending.UNHEALTHY: False,
            Ending.FAILED: False,
        }[ending]
        made = FinalSave.MADE if fits else FinalSave.NO_TIME
        calls_for_one = wanted and saved != step and step > 0
        assert found is (made if calls_for_one else FinalSave.NOT_WANTED), (step, saved, wish, fits)


def test_the_exit_codes_are_those_that_users_were_promised():
    assert {str(ending): code for ending, code in EXIT_CODES.items()} == {
        "finished": 0,
        "finished_skipped": 6,
        "nothing_to_do": 0,
        "stopped": 75,
        "diverged": 6,
        "unhealthy": 7,
        "failed": 1,
    }


@pytest.mark.parametrize(
    ("error", "ending", "code"),
    [
        (Unhealthy("x"), Ending.UNHEALTHY, 7),
        (ValueError("x"), Ending.FAILED, 1),
        (SaveFailed("x"), Ending.FAILED, 1),
        (CheckpointDamaged("x"), Ending.FAILED, 3),
        (Locked("x"), Ending.FAILED, 5),
        (Diverged("x"), Ending.FAILED, 6),
    ],
)
def test_an_exception_becomes_an_ending_with_its_own_code(error, ending, code):
    assert ending_of(error) == (ending, code)


def test_an_outcome_says_as_data_what_its_code_says():
    outcome = Outcome(ending=Ending.STOPPED, step=3, updates=3, reason="SIGTERM")
    assert outcome.as_data()["outcome"] == "stopped"
    assert outcome.as_data()["code"] == outcome.exit_code == 75
