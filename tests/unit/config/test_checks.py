"""What must hold between fields: every bound is held, from both sides."""

from dataclasses import replace

import pytest

from keepstep.config.checks import cross_checks, single_checks
from keepstep.config.schema import Config, DenseWindowConfig
from keepstep.config.validate import flatten

BEYOND = 2**200


def changed(**values):
    """Return the default config with fields set by their paths, `__` for the dot."""
    config = Config()
    for path, value in values.items():
        section, _, name = path.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def paths(config):
    return {problem.path for problem in cross_checks(config)}


def test_the_defaults_are_right():
    assert cross_checks(Config()) == []


@pytest.mark.parametrize(
    "path", [p for p, v in flatten(Config()).items() if type(v) in (int, float)]
)
def test_every_number_has_bounds(path):
    name = path.replace(".", "__")
    assert path in paths(changed(**{name: -1}))
    if path not in {"optimizer.rate", "optimizer.adamw_rate", "optimizer.eps", "train.grad_clip"}:
        assert path in paths(changed(**{name: BEYOND}))


@pytest.mark.parametrize(
    ("path", "low", "below"),
    [
        ("train__max_steps", 1, 0),
        ("train__global_batch", 1, 0),
        ("train__log_interval", 1, 0),
        ("train__micro_batch", 0, -1),
        ("train__grad_clip", 0.0, -1e-9),
        ("optimizer__rate", 1e-300, 0.0),
        ("optimizer__momentum", 0.999, 1.0),
        ("optimizer__beta1", 0.0, -1e-9),
        ("optimizer__beta2", 0.999, 1.0),
        ("schedule__floor", 0.0, -1e-9),
        ("schedule__floor", 1.0, 1.0001),
        ("schedule__cycles", 1, 0),
        ("evaluation__interval", 0, -1),
        ("evaluation__batches", 1, 0),
        ("checkpoint__interval", 0, -1),
        ("checkpoint__keep_last_n", 0, -1),
        ("checkpoint__keep_best_n", 0, -1),
        ("checkpoint__save_retries", 0, -1),
        ("nonfinite__max_consecutive", 1, 0),
        ("nonfinite__max_rollbacks", 1, 0),
        ("nonfinite__rollback_rate_factor", 1e-300, 0.0),
        ("nonfinite__rollback_rate_factor", 1.0, 1.0001),
        ("run__name", "lm small", ""),
        ("run__name", "..x", ".."),
        ("run__name", "a.b", "a/b"),
        ("run__name", "é", "a\nb"),
        ("run__dir", "../a b/é", "a\0b"),
        ("checkpoint__dir", "", "a\n"),
        ("run__grace", "1s", "0s"),
        ("run__time_limit", "", "0s"),
        ("run__time_limit", "366d", "367d"),
        ("checkpoint__interval_time", "", "0s"),
        ("checkpoint__interval_time", "1s", "367d"),
        ("run__grace", "366d", "367d"),
        ("run__grace", "1d", "9" * 400 + "d"),
        ("run__hooks", ("a.b:C_1",), ("a.b",)),
        ("run__hooks", (), ("a:b c",)),
        ("checkpoint__on_resume", "0", "-1"),
        ("checkpoint__on_resume", "fresh", "Fresh"),
        ("checkpoint__on_resume", "120", "step_120"),
        ("checkpoint__on_resume", "12", "١٢"),
        ("train__micro_batch", 16, 5),
        ("train__micro_batch", 8, 32),
        ("schedule__warmup_steps", 999, 1000),
        ("schedule__decay_steps", 0, 5),
    ],
)  # fmt: skip
def test_a_bound_lets_its_last_value_through_and_not_the_next(path, low, below):
    place = path.replace("__", ".")
    assert place not in paths(changed(**{path: low}))
    assert place in paths(changed(**{path: below}))


def wsd(**values):
    return changed(schedule__name="wsd", train__max_steps=10, **values)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (wsd(schedule__warmup_steps=4, schedule__decay_steps=6), set()),
        (wsd(schedule__warmup_steps=5, schedule__decay_steps=6), {"schedule.decay_steps"}),
        (wsd(schedule__warmup_steps=6, schedule__decay_steps=5), {"schedule.warmup_steps"}),
        (wsd(), {"schedule.decay_steps"}),
        (changed(schedule__name="constant", schedule__warmup_steps=1000), set()),
        (
            changed(schedule__name="constant", schedule__warmup_steps=1001),
            {"schedule.warmup_steps"},
        ),
        (changed(schedule__name="cosine_restarts", schedule__cycles=1000), set()),
        # The peak of the second of two cycles is damped once: it is just the floor.
        (
            changed(schedule__name="cosine_restarts", schedule__cycles=2, schedule__damping=0.1),
            set(),
        ),
        (changed(schedule__name="cosine_restarts", schedule__cycles=1001), {"schedule.cycles"}),
        (
            changed(schedule__name="cosine_restarts", schedule__cycles=3, schedule__damping=0.3),
            {"schedule.damping"},
        ),
        (changed(optimizer__name="sgd", optimizer__momentum=0.0), {"optimizer.nesterov"}),
        (changed(train__compile=True, distributed__tp=2), {"train.compile"}),
        (changed(train__compile=True, distributed__dp_shard=2), set()),
        (
            changed(
                optimizer__name="sgd", optimizer__momentum=0.0, optimizer__nesterov=False
            ),
            set(),
        ),
        (changed(checkpoint__dyn_ckpt_window=DenseWindowConfig(start=4, stop=4)), set()),
        (
            changed(checkpoint__dyn_ckpt_window=DenseWindowConfig(start=4, stop=3)),
            {"checkpoint.dyn_ckpt_window.stop"},
        ),
        (
            changed(checkpoint__dyn_ckpt_window=DenseWindowConfig(start=-1, stop=3)),
            {"checkpoint.dyn_ckpt_window.start"},
        ),
        (
            changed(
                checkpoint__dyn_ckpt_window=DenseWindowConfig(start=1, stop=3, strategy="pow2")
            ),
            {"checkpoint.dyn_ckpt_window.strategy"},
        ),
    ],
)  # fmt: skip
def test_a_config_that_cannot_do_what_its_numbers_say_is_refused(config, wrong):
    assert paths(config) == wrong


def test_single_checks_leave_out_what_depends_on_other_fields():
    config = changed(schedule__warmup_steps=5000, train__micro_batch=5, run__seed=-1)
    assert {problem.path for problem in single_checks(config)} == {"run.seed"}
    assert {"schedule.warmup_steps", "train.micro_batch", "run.seed"} == paths(config)


def test_schedulefree_wants_a_constant_schedule_and_a_beta1():
    free = {"optimizer__name": "schedulefree_adamw"}
    assert paths(changed(**free)) == {"schedule.name"}
    assert paths(changed(**free, schedule__name="wsd", schedule__decay_steps=5)) == {
        "schedule.name"
    }
    constant = {**free, "schedule__name": "constant", "schedule__warmup_steps": 5}
    assert paths(changed(**constant)) == set()
    assert paths(changed(**constant, optimizer__beta1=0.0)) == {"optimizer.beta1"}
    assert paths(changed(optimizer__beta1=0.0)) == set()


def test_an_order_that_no_rank_changes_needs_what_is_the_same_on_all():
    ordered = {"train__deterministic_reduction": True}
    assert paths(changed(**ordered)) == {"train.micro_batch"}
    ordered["train__micro_batch"] = 4
    assert paths(changed(**ordered, distributed__dp_replicate=2)) == set()
    for path, value in (
        ("train__deterministic", False),
        ("train__compile", True),
        ("distributed__tp", 2),
        ("distributed__dp_replicate", 3),
    ):
        assert paths(changed(**ordered, **{path: value})) == {path.replace("__", ".")}
        assert paths(changed(**{path: value})) == set()
