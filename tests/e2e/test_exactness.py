"""Interrupted against untouched, bit for bit, in new processes."""

import itertools
from pathlib import Path

import pytest

from tests.helpers import hooks, warm, worst_days
from tests.helpers.command import digests, events, keepstep, link, losses, steps

HOOK = f"--run.hooks=['{hooks.CONFIG}']"
SCHEDULES = {
    "constant": [],
    "linear": [],
    "cosine": [],
    "wsd": ["--schedule.decay_steps=4"],
    "rex": [],
    "cosine_restarts": ["--schedule.cycles=2", "--schedule.damping=0.5"],
}
OPTIMIZERS = {
    "adamw": [],
    "sgd": ["--optimizer.rate=0.1"],
    "muon": ["--optimizer.rate=0.02"],
    "lion": ["--optimizer.rate=0.003"],
    "schedulefree_adamw": ["--checkpoint.async_mode=async"],
}


def train(config: Path, run: Path, *flags: str, acts: tuple[dict, ...] = (), by=keepstep):
    command = ("train", config, f"--checkpoint.dir={run}", HOOK, *flags)
    return by(*command, extra=hooks.acting(*acts))


def tensors(run: Path, step: int) -> dict[str, list[str]]:
    return {name: found for name, found in digests(run, step).items() if name != "plain"}


def assert_interrupted_equals_untouched(config, folder, *flags, poison=(), by=keepstep):
    """Kill once, stop once, and let a third session finish; `by` runs the untouched one."""
    bad = tuple({"step": step, "do": "nan"} for step in poison)
    untouched, run = folder / "untouched", folder / "run"
    done = train(config, untouched, *flags, acts=bad, by=by)
    assert done.returncode == 0, done.stdout
    kill = {"when": "forward", "step": 6, "do": "SIGKILL"}
    assert train(config, run, *flags, acts=(*bad, kill), by=warm.keepstep).returncode == -9
    stop = {"when": "step", "step": 7, "do": "SIGTERM"}
    stopped = train(config, run, *flags, acts=(*bad, stop), by=warm.keepstep)
    assert stopped.returncode == 75, stopped.stdout
    assert "resume" in stopped.stdout
    done = train(config, run, *flags, acts=bad, by=warm.keepstep)
    assert done.returncode == 0, done.stdout
    assert [event["kind"] for event in events(run, "resumed")] == ["resumed"] * 2
    assert tensors(run, 10) == tensors(untouched, 10)
    assert losses(run) == losses(untouched)
    assert [e["rate"] for e in events(run, "step")] == [
        e["rate"] for e in events(untouched, "step")
    ]
    assert link(run, "best") == link(untouched, "best")
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(untouched, "evaluation")]


PAIRS = [
    ("adamw", "wsd"),
    ("adamw", "rex"),
    ("adamw", "linear"),
    ("sgd", "cosine"),
    ("sgd", "constant"),
    ("muon", "cosine"),
    ("muon", "cosine_restarts"),
    ("lion", "cosine"),
    ("schedulefree_adamw", "constant"),
]


def flags_of(optimizer: str, schedule: str) -> list[str]:
    flags = [f"--optimizer.name={optimizer}", f"--schedule.name={schedule}"]
    return flags + OPTIMIZERS[optimizer] + SCHEDULES[schedule]


@pytest.mark.parametrize(("optimizer", "schedule"), PAIRS)
def test_each_optimizer_and_schedule_resumes_to_the_same_bits(
    config, tmp_path, optimizer, schedule
):
    assert_interrupted_equals_untouched(config, tmp_path, *flags_of(optimizer, schedule))


def test_each_other_pair_resumes_to_the_same_bits_with_accumulation_and_workers(config, tmp_path):
    """A quarter of them each day; dropout is on in all."""
    others = [
        (optimizer, schedule, f"--train.micro_batch={micro}", f"--data.workers={workers}")
        for (optimizer, schedule), (micro, workers) in zip(
            sorted(set(itertools.product(OPTIMIZERS, SCHEDULES)) - set(PAIRS)),
            itertools.cycle([(2, 0), (0, 2), (1, 1), (2, 2), (0, 0)]),
            strict=False,
        )
        # What decays is refused with it.
        if optimizer != "schedulefree_adamw"
    ]
    print(f"KEEPSTEP_TEST_SEED={worst_days.SEED}")
    for optimizer, schedule, *more in worst_days.some(others, of=4):
        print(optimizer, schedule, *more)
        flags = (*flags_of(optimizer, schedule), *more)
        place = tmp_path / f"{optimizer}-{schedule}"
        assert_interrupted_equals_untouched(config, place, *flags, by=warm.keepstep)


@pytest.mark.parametrize(
    "flags",
    [
        ("--train.micro_batch=2", "--train.grad_clip=0.5"),
        ("--train.precision=bfloat16", "--train.activation_checkpointing=true"),
        ("--model.architecture=gpt2", "--model.n_embd=16", "--train.grad_clip=0"),
        (
            "--model.architecture=mixtral",
            "--model.num_local_experts=2",
            "--model.output_router_logits=true",
        ),
        ("--model.tie_word_embeddings=true", "--data.sequence_length=64"),
    ],
    ids=["accumulation", "bfloat16", "gpt2", "mixture", "tied"],
)
def test_each_way_of_training_resumes_to_the_same_bits(config, tmp_path, flags):
    if "gpt2" in flags[0]:
        text = config.read_text()
        start, end = text.index("[model]"), text.index("[data]")
        config = tmp_path / "gpt2.toml"
        model = '[model]\narchitecture = "gpt2"\nn_layer = 1\nn_head = 2\n\n'
        config.write_text(text[:start] + model + text[end:])
    assert_interrupted_equals_untouched(config, tmp_path, *flags)


def test_a_skipped_step_before_an_interruption_leaves_the_same_bits(config, tmp_path):
    assert_interrupted_equals_untouched(config, tmp_path, poison=(3, 7))


def test_the_batches_do_not_depend_on_the_number_of_workers(config, untouched, tmp_path):
    for workers in (0, 2):
        run = tmp_path / str(workers)
        assert train(config, run, f"--data.workers={workers}").returncode == 0
        assert tensors(run, 10) == tensors(untouched, 10)
        assert losses(run) == losses(untouched)


def test_saving_at_every_step_or_never_gives_the_same_weights(config, untouched, tmp_path):
    for interval, evaluate in (("1", "1"), ("0", "0")):
        run = tmp_path / interval
        flags = (f"--checkpoint.interval={interval}", f"--evaluation.interval={evaluate}")
        assert train(config, run, *flags).returncode == 0
        assert tensors(run, 10) == tensors(untouched, 10)
        assert losses(run) == losses(untouched)


def test_dropout_is_on_and_its_numbers_come_from_the_seed(config, untouched, tmp_path):
    run = tmp_path / "off"
    assert train(config, run, "--model.attention_dropout=0.0").returncode == 0
    assert losses(run)[0][0] == losses(untouched)[0][0]
    assert losses(run)[0][1] != losses(untouched)[0][1]


def test_the_dense_window_saves_its_milestones_and_keeps_them(config, tmp_path):
    flags = (
        "--checkpoint.dyn_ckpt_window.start=0",
        "--checkpoint.dyn_ckpt_window.stop=5",
        "--checkpoint.interval=3",
        "--checkpoint.keep_last_n=1",
        "--evaluation.interval=0",
    )
    assert train(config, tmp_path, *flags).returncode == 0
    # In the window 0, 1, 2, 4; outside of it 6 and 9 by the interval, and 10 as the last.
    assert [event["step"] for event in events(tmp_path, "saved")] == [0, 1, 2, 4, 6, 9, 10]
    assert steps(tmp_path) == [0, 1, 2, 4, 10]
    listed = keepstep("ckpt", "ls", tmp_path).stdout
    assert sum("milestone" in line for line in listed.splitlines()) == 4


def test_a_run_killed_after_its_initial_weights_were_saved_continues_from_step_0(config, tmp_path):
    flags = (
        "--checkpoint.dyn_ckpt_window.start=0",
        "--checkpoint.dyn_ckpt_window.stop=0",
        "--checkpoint.interval=0",
    )
    kill = {"when": "forward", "step": 2, "do": "SIGKILL"}
    assert train(config, tmp_path, *flags, acts=(kill,)).returncode == -9
    assert steps(tmp_path) == [0]
    done = train(config, tmp_path, *flags)
    assert done.returncode == 0, done.stdout
    assert "step 0 of 10 from step_0 (verified)" in done.stdout


def test_compiled_training_is_restored_under_the_same_names(config, tmp_path):
    """Compiled code is not promised to round as eager code does; the names are the same."""
    flags = ("--train.compile=true", "--data.workers=0")
    stop = {"when": "step", "step": 3, "do": "stop"}
    first = train(config, tmp_path, *flags, acts=(stop,))
    assert first.returncode == 75, first.stdout
    done = train(config, tmp_path, *flags)
    assert done.returncode == 0, done.stdout
    assert "from step_3 (verified)" in done.stdout
    names = list(itertools.islice(tensors(tmp_path, 10), 3))
    assert not any("_orig_mod" in name for name in names)


def test_a_resume_far_into_a_run_costs_no_more_than_an_early_one(config, tmp_path):
    """Nothing is replayed: the batch of any position is computed at once."""
    from keepstep.state.data_position import sample_indices

    far = sample_indices(1, range(10**15, 10**15 + 4), 61)
    assert far.shape == (4,)
    assert set(sample_indices(1, range(61 * 10**12, 61 * 10**12 + 61), 61)) == set(range(61))
