"""`train.deterministic_reduction` and other numbers of ranks, through the installed command."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.config.resolved import RUN_TOML
from keepstep.state.data_position import sample_indices
from keepstep.store import list_checkpoints, load_state
from keepstep.tasks.language.task import LanguageTask
from keepstep.tasks.registry import load_task_config
from keepstep.tasks.task import DataShare
from tests.helpers import hooks
from tests.helpers.command import events, losses, outcome
from tests.helpers.world import train_on

STEPS = 5
ORDERED = "--train.deterministic_reduction=true"
# Six micro-batches on four ranks would not be a tree; eight are three turns of two ranks at most.
SMALL = (
    "--train.global_batch=8", "--train.micro_batch=1", f"--train.max_steps={STEPS}",
    "--data.workers=0", "--evaluation.interval=2", "--checkpoint.interval=1",
    "--checkpoint.keep_last_n=1", "--train.grad_clip=0.1", "--optimizer.name=muon",
    # Uneven shards too; with a smaller model a norm over shards had the same bits by chance.
    "--model.hidden_size=36", "--model.intermediate_size=70",
)  # fmt: skip
BFLOAT16 = ("--train.precision=bfloat16", "--model.tie_word_embeddings=true")
NO_EVAL = "--evaluation.at_end=false"
# A run of a step or two has no room for one.
NO_WARM_UP = "--schedule.warmup_steps=0"
ACT = f"--run.hooks=['{hooks.CONFIG}']"


def train(size: int, config: Path, run: Path, *flags: str, **extra: Any) -> Path:
    run.mkdir(exist_ok=True)
    assert train_on(size, config, run, *SMALL, *flags, **extra) == [0] * size
    return run


@pytest.fixture(scope="module")
def one_rank(config, tmp_path_factory) -> Path:
    """A run in order on one rank that nothing ever touched."""
    return train(1, config, tmp_path_factory.mktemp("ordered") / "run", ORDERED)


def last_state(run: Path) -> dict[str, Any]:
    """The state at the last step, one entry a leaf, tensors as their bytes."""
    found: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in items:
                walk(f"{path}.{name}", item)
        elif isinstance(value, torch.Tensor):
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[path] = (value.dtype, value.shape, data)
        else:
            found[path] = value

    (entry,) = [entry for entry in list_checkpoints(run) if entry.step == STEPS]
    walk("", load_state(entry.path))
    return found


def evaluations(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [(event["step"], event["metrics"]) for event in events(run, "evaluation")]


def assert_same_bits(run: Path, other: Path) -> None:
    """Of every weight and moment, and every digit of each loss, norm and score."""
    assert losses(run) == losses(other)
    assert evaluations(run) == evaluations(other)
    ours, theirs = last_state(run), last_state(other)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_four_ranks_killed_then_two_killed_then_one_end_with_the_bits_of_one(
    config, one_rank, tmp_path
):
    for size, step in ((4, 3), (2, 5)):
        act = hooks.acting({"when": "forward", "step": step, "do": "SIGKILL"})
        codes = train_on(size, config, tmp_path, *SMALL, ORDERED, ACT, extra=act)
        assert codes == [-signal.SIGKILL] * size
    train(1, config, tmp_path, ORDERED)
    assert [event["step"] for event in events(tmp_path, "resumed")] == [2, 4]
    assert_same_bits(tmp_path, one_rank)


def test_two_groups_of_two_in_bfloat16_have_the_bits_of_one_rank(config, tmp_path):
    one = train(1, config, tmp_path / "one", ORDERED, *BFLOAT16)
    groups = "--distributed.dp_replicate=2"
    four = train(4, config, tmp_path / "four", ORDERED, *BFLOAT16, groups)
    assert_same_bits(four, one)


def test_without_the_option_the_last_bits_follow_the_ranks(config, tmp_path):
    """Or the runs above would prove nothing. Without dropout, which is drawn per rank then."""
    flags = ("--model.attention_dropout=0.0", "--train.max_steps=3")
    runs = [train(size, config, tmp_path / str(size), *flags) for size in (1, 4)]
    first, other = (losses(run) for run in runs)
    assert first != other
    assert [loss for _, loss, _ in first] == pytest.approx([loss for _, loss, _ in other], rel=1e-2)
    assert evaluations(runs[0]) != evaluations(runs[1])


def test_ranks_without_a_place_in_the_tree_are_refused_on_all(config, tmp_path, capsys):
    six = "--train.global_batch=6"
    assert train_on(3, config, tmp_path, *SMALL, ORDERED, six) == [2, 2, 2]
    told = "6 micro-batches (train.global_batch / train.micro_batch) cannot be summed in one order"
    assert capsys.readouterr().out.count(f"{told} on 3 data-parallel ranks") == 3


def test_four_then_two_then_eight_ranks_see_each_sample_once_an_epoch(config, tmp_path):
    """In the order of one rank, whatever the micro-batches and the workers."""
    recording = f"--run.hooks=['{hooks.__name__}:RecordSamples']"
    flags = (
        "--train.global_batch=24",
        "--data.sequence_length=128",
        recording,
        NO_WARM_UP,
        NO_EVAL,
    )
    sessions = (
        (4, 1, ("--train.micro_batch=0", "--data.workers=0")),
        (2, 2, ("--train.micro_batch=4", "--data.workers=1")),
        (8, 3, ("--train.micro_batch=1", "--data.workers=0")),
    )
    for size, last, split in sessions:
        steps = f"--train.max_steps={last}"
        assert train_on(size, config, tmp_path, *flags, *split, steps) == [0] * size
        assert outcome(tmp_path)["outcome"] == "finished"
    seen: dict[int, list[list[int]]] = {}
    for path in tmp_path.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            given = json.loads(line)
            seen.setdefault(given["step"], []).extend(given["samples"])
    task = LanguageTask(load_task_config(tmp_path / RUN_TOML, []).config, DataShare())
    tokens = np.asarray(task.tokens.parts["train"])
    count = (len(tokens) - 1) // 128
    assert count < 3 * 24, "an epoch ends within these steps"
    order = sample_indices(3, np.arange(3 * 24), count)
    assert sorted(order[:count]) == list(range(count))
    for step in range(3):
        wanted = [tokens[s * 128 : s * 128 + 128].tolist() for s in order[24 * step :][:24]]
        assert sorted(seen[step]) == sorted(wanted), step
