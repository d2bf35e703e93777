"""Batches of tokens: functions of (seed, position), whatever loads them."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from keepstep.errors import DataError
from keepstep.tasks.language import task as task_module
from keepstep.tasks.language.tokens import open_tokens
from tests.helpers.command import environment
from tests.helpers.language import VOCAB_SIZE, make_task, make_tokens

# Newer Pythons warn at each fork of a process with threads; the workers touch none of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty training samples of eight tokens, in five batches of four."""
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


def take(task, position: int, count: int) -> torch.Tensor:
    """Return the samples of the next batches, one after the other."""
    with closing(task.batches(position)) as batches:
        found = [torch.cat(batch.micro_batches) for batch in itertools.islice(batches, count)]
    return torch.cat(found)


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_batches_that_none_gives(source, workers):
    alone = take(make_task(source), 0, 9)
    assert torch.equal(take(make_task(source, workers=workers), 0, 9), alone)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_any_position_are_the_tail_of_those_from_the_start(source, workers):
    whole = take(make_task(source), 0, 12)
    for position in (4, 6, 20, 31):
        tail = take(make_task(source, workers=workers), position, 2)
        assert torch.equal(tail, whole[position : position + 8]), position


def test_how_a_batch_is_split_does_not_change_it(source):
    whole = take(make_task(source), 0, 3)
    task = make_task(source, micro_batch=2)
    batch = next(task.batches(0))
    assert [part.shape for part in batch.micro_batches] == [(2, 9), (2, 9)]
    assert torch.equal(take(task, 0, 3), whole)


def test_another_batch_size_sees_the_same_samples_in_the_same_order(source):
    assert torch.equal(take(make_task(source, global_batch=6), 0, 4), take(make_task(source), 0, 6))


def test_an_epoch_holds_every_sample_of_the_text_once_also_across_a_batch(source):
    # Batches of 6 from 20 samples: the fourth lies in two epochs.
    found = take(make_task(source, global_batch=6), 0, 7).tolist()
    tokens = np.asarray(open_tokens(source).parts["train"]).tolist()
    samples = sorted(tokens[start : start + 9] for start in range(0, 160, 8))
    assert sorted(found[:20]) == samples
    assert sorted(found[20:40]) == samples
    assert found[:20] != found[20:40]


def test_another_seed_has_another_order(source):
    first, other = take(make_task(source), 0, 5), take(make_task(source, seed=8), 0, 5)
    assert not torch.equal(first, other)
    assert sorted(first.tolist()) == sorted(other.tolist())


def test_a_position_far_out_is_reached_at_once(source):
    far = 20 * 10**9
    found = take(make_task(source), far, 5).tolist()
    assert sorted(found) == sorted(take(make_task(source), 0, 5).tolist())


def test_counts_are_those_of_the_whole_batch(source):
    batch = next(make_task(source, micro_batch=2).batches(0))
    assert (batch.samples, batch.tokens) == (4, 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_random_numbers_of_training(source, workers):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    take(make_task(source, workers=workers), 0, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_set_smaller_than_a_batch_is_refused_with_its_size(source):
    with pytest.raises(DataError, match="161 tokens, which is 20 samples of 8; at least 21"):
        make_task(source, global_batch=21)


def test_no_held_out_sample_is_refused(tmp_path):
    with pytest.raises(DataError, match="'valid' has 8 tokens"):
        make_task(make_tokens(tmp_path / "tokens", valid=8))


def with_a_token_beyond_the_vocabulary(folder: Path) -> Path:
    make_tokens(folder)
    about = json.loads((folder / "tokens.json").read_text())
    about["vocab_size"] = 40
    (folder / "tokens.json").write_text(json.dumps(about))
    return folder


def test_a_token_beyond_the_vocabulary_is_found_before_anything_starts(tmp_path):
    with pytest.raises(DataError, match=r"'train'.* beyond the vocabulary of 40"):
        make_task(with_a_token_beyond_the_vocabulary(tmp_path / "t"))


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_large_file_it_is_a_plain_message_all_the_same_not_a_workers_traceback(
    tmp_path, workers, monkeypatch
):
    monkeypatch.setattr(task_module, "_TOKENS_TO_CHECK_AT_START", 0)
    task = make_task(with_a_token_beyond_the_vocabulary(tmp_path / "t"), workers=workers)
    with pytest.raises(DataError, match=r"'train'.* beyond the vocabulary of 40") as caught:
        take(task, 0, 5)
    assert "Traceback" not in str(caught.value)
    assert caught.value.hint


def worker_of(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    names = {int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
    own = Path(f"/proc/{process}/cmdline").read_bytes()
    return next(child for child, name in names.items() if name == own)


def signals_of(process: int, kind: str) -> set[int]:
    status = Path(f"/proc/{process}/status").read_text()
    mask = int(re.search(rf"^{kind}:\s*([0-9a-f]+)$", status, re.M).group(1), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_worker_ignores_the_signals_that_stop_a_run_and_holds_none_back(source):
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
    with closing(make_task(source, workers=1).batches(0)) as batches:
        next(batches)
        worker = worker_of(os.getpid())
        assert stopping <= signals_of(worker, "SigIgn")
        assert not stopping & signals_of(worker, "SigBlk")
        for number in stopping:
            os.kill(worker, number)
        assert len(list(itertools.islice(batches, 20))) == 20
    assert not stopping & signals_of(os.getpid(), "SigBlk")


BEGIN = """
import os, pathlib, signal, sys
from tests.helpers.language import make_task
from tests.unit.tasks.test_language_data import worker_of
batches = make_task(pathlib.Path(sys.argv[1]), workers=2).batches(0)
next(batches)
"""


def run_to_its_end(code: str, source: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own; one that hangs at its exit fails the test."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(source)],
        capture_output=True,
        env=environment(),
        text=True,
        timeout=60,
    )


def test_a_worker_that_is_killed_is_an_error_and_no_hang_though_the_other_one_lives(source):
    # In a process of its own: the error is raised by a signal, wherever the code then is.
    kill = "os.kill(worker_of(os.getpid()), signal.SIGKILL)"
    done = run_to_its_end(f"{kill}\nfor _ in range(50): next(batches)", source)
    assert done.returncode == 1
    # Where the signal of its death comes first, torch says it; else the pipe broke, and we do.
    words = ("is killed by signal: Killed", "ended with code -9")
    assert any(said in done.stderr for said in words), done.stderr


def test_workers_end_with_a_process_that_never_closed_its_batches(source):
    done = run_to_its_end("print('the end')", source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_a_worker_that_hears_nothing_any_more_does_not_hold_up_the_end(source):
    done = run_to_its_end("os.kill(worker_of(os.getpid()), signal.SIGSTOP)", source)
    assert done.returncode == 0


ORPHAN = """
import os, pathlib, signal, sys
from tests.helpers.language import make_task
from tests.unit.tasks.test_language_data import worker_of
batches = make_task(pathlib.Path(sys.argv[1]), workers=1).batches(0)
next(batches)
worker = worker_of(os.getpid())
# A stopped worker cannot notice by itself that its parent is gone.
os.kill(worker, signal.SIGSTOP)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_does_not_outlive_a_run_that_was_killed(source):
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(source)],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    # The worker holds the pipe too: its end is the end of the last of the two.
    output: list[str] = [process.stdout.readline()]
    try:
        output.append(process.communicate(timeout=20)[0])
    except subprocess.TimeoutExpired:
        os.kill(int(output[0]), signal.SIGKILL)
        process.communicate()
        raise AssertionError("the worker lives on") from None
    assert process.returncode == -signal.SIGKILL
    assert int(output[0]) > 0


def test_the_vocabulary_of_the_data_is_what_the_folder_says(source):
    assert make_task(source).tokens.vocab_size == VOCAB_SIZE
