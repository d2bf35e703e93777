"""Tensor parallel training through the installed command: exactness, endings, other meshes."""

import re
from pathlib import Path

import pytest

from tests.helpers import hooks
from tests.helpers.command import digests, events, keepstep, losses, outcome, steps
from tests.helpers.world import World, train_on

ACT = f"--run.hooks=['{hooks.CONFIG}']"
MODEL = ("--model.num_key_value_heads=2", "--model.tie_word_embeddings=true")
TP = (*MODEL, "--distributed.tp=2")
STILL = "--model.attention_dropout=0.0"
"""Dropout is drawn by share of the batch and by rank of heads, so it differs by layout."""


def numbers(run: Path) -> list[float]:
    """Every loss and gradient norm of the journal, and every metric."""
    found = [number for _, *pair in losses(run) for number in pair]
    return found + [n for e in events(run, "evaluation") for n in e["metrics"].values()]


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    words = (f"--checkpoint.dir={folder}", *MODEL, STILL, "--train.micro_batch=1")
    assert train_on(1, config, folder, *words) == [0]
    return folder


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, ()),
        (4, ("--train.activation_checkpointing=true",)),
        (4, ("--distributed.dp_replicate=2",)),
    ],
    ids=["1xtp2", "2xtp2", "2 replicas of tp2"],
)
def test_the_losses_are_those_of_one_rank_to_rounding(config, alone, tmp_path, size, flags):
    """Two micro-batches a rank: what is reduced once must not be reduced twice."""
    words = (*TP, STILL, *flags, f"--train.micro_batch={size // 2 and 1}")
    assert train_on(size, config, tmp_path, *words) == [0] * size
    assert numbers(tmp_path) == pytest.approx(numbers(alone), rel=1e-4)
    assert [s for s, _, _ in losses(tmp_path)] == [s for s, _, _ in losses(alone)]
