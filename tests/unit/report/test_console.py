"""The words of the console."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepstep.config.schema import Config
from keepstep.report.console import Console, last_line
from keepstep.run.outcome import Ending, Outcome


def ended(ending: Ending, reason: str) -> str:
    outcome = Outcome(ending=ending, step=3, updates=3, reason=reason, checkpoint="step_2")
    return last_line(outcome, Path("runs/x"))


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.UNHEALTHY])
def test_the_last_line_does_not_say_what_the_error_after_it_says(ending):
    text = ended(ending, "CheckpointDamaged: no checkpoint can be continued from:\n  step_2: torn")
    assert text == f"{ending} at step 3; step_2 is saved in runs/x."


def test_the_last_line_of_an_ending_without_an_error_gives_its_reason():
    assert ended(Ending.DIVERGED, "loss nan") == (
        "diverged at step 3: loss nan; step_2 is saved in runs/x."
    )


def test_a_huge_perplexity_is_no_wall_of_digits():
    stream = io.StringIO()
    console = Console(quiet=False, stream=stream)
    console.on_evaluated(None, 4, {"valid_loss": 70.5, "valid_perplexity": 4.1e30})
    assert "valid_loss 70.5000  valid_perplexity 4.100e+30" in stream.getvalue()


def test_the_speed_is_measured_anew_when_the_run_goes_back(monkeypatch):
    clock, stream = iter(range(0, 1000, 10)), io.StringIO()
    monkeypatch.setattr("keepstep.report.console.time.monotonic", lambda: next(clock))
    counters = SimpleNamespace(tokens=2000)
    run = SimpleNamespace(
        config=Config(),
        position=SimpleNamespace(counters=counters),
        store=SimpleNamespace(newest=None),
    )
    console = Console(quiet=False, stream=stream)
    numbers = {"skipped": False, "loss": 1.0, "rate": 1.0, "grad_norm": 1.0}
    console.on_rewound(run, 10)
    console.on_step_end(run, 20, {**numbers, "tokens": 4000})
    counters.tokens = 3000
    console.on_rewound(run, 15)
    console.on_step_end(run, 20, {**numbers, "tokens": 4000})
    before, after = stream.getvalue().splitlines()
    assert "tok/s 200 " in before
    assert "tok/s 100 " in after
