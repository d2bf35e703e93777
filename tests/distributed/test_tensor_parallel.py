"""Tensor parallel training through the installed command: exactness, endings, other meshes."""

import signal

import pytest

from tests.distributed.test_training_on_ranks import assert_same_as
from tests.helpers import hooks
from tests.helpers.command import events, losses, outcome
from tests.helpers.warm import keepstep
from tests.helpers.world import train_on

ACT = f"--run.hooks=['{hooks.CONFIG}']"
MODEL = ("--model.num_key_value_heads=2", "--model.tie_word_embeddings=true")
TP = "--distributed.tp=2"
ALL = (
    *MODEL, TP, "--model.architecture=phi", "--model.resid_pdrop=0.2",
    "--train.precision=bfloat16", "--train.activation_checkpointing=true", "--train.micro_batch=2",
)  # fmt: skip


def stopping(step):
    return hooks.acting({"when": "step", "step": step - 1, "do": "SIGTERM", "rank": 0})


def test_the_mesh_may_change_in_every_session_and_the_losses_are_those_of_one_rank(
    config, tmp_path
):
    """Without dropout, which is drawn by share of the batch and by rank of heads."""
    words = (*MODEL, "--model.attention_dropout=0.0", "--train.micro_batch=1")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert train_on(1, config, alone, *words) == [0]
    assert train_on(4, config, run, *words, TP, ACT, extra=stopping(3)) == [75] * 4
    assert train_on(2, config, run, *words, TP, ACT, extra=stopping(6)) == [75] * 2
    assert train_on(2, config, run, *words, ACT, extra=stopping(8)) == [75] * 2
    assert train_on(1, config, run, *words) == [0]
    assert [event["step"] for event in events(run, "resumed")] == [3, 6, 8]
    for found, expected in zip(losses(run), losses(alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    found, expected = (
        [event["metrics"]["valid_loss"] for event in events(folder, "evaluation")]
        for folder in (run, alone)
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_run_that_is_stopped_and_killed_ends_with_the_bits_of_one_that_was_not(config, tmp_path):
    """In bfloat16, with recomputed activations and two micro-batches.

    With dropout on each rank's heads and on what all hold: were it another on each, the gradients
    would be, and the first update would not be made.
    """
    reference, run = tmp_path / "reference", tmp_path / "run"
    assert train_on(2, config, reference, *ALL) == [0, 0]
    act = {"when": "step", "step": 4, "do": "SIGTERM", "rank": 1}
    assert train_on(2, config, run, *ALL, ACT, extra=hooks.acting(act)) == [75, 75]
    assert outcome(run)["reason"] == "SIGTERM"
    act = {"when": "forward", "step": 8, "do": "SIGKILL"}
    ended = train_on(2, config, run, *ALL, ACT, extra=hooks.acting(act))
    assert ended == [-signal.SIGKILL] * 2
    assert train_on(2, config, run, *ALL) == [0, 0]
    assert [event["step"] for event in events(run, "resumed")] == [4, 6]
    assert_same_as(run, reference)
    # One process reads it whole, and writes text with it.
    done = keepstep("language", "generate", run, "--prompt", "the", "--max-tokens", 4)
    assert done.returncode == 0, done.stdout


def test_a_plan_that_is_wrong_ends_the_run_before_its_first_update(config, tmp_path):
    """That of Apertus does not say that its activation's weights get a part of their gradient."""
    words = (*MODEL, TP, "--model.architecture=apertus")
    assert train_on(2, config, tmp_path, *words) == [2, 2]
    assert "leaves model.layers.0.mlp.act_fn.alpha_" in outcome(tmp_path)["reason"]
    assert outcome(tmp_path)["updates"] == 0
