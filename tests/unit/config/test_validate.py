"""A tree against a schema: types are strict, free keys are plain, nothing unknown passes."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

import pytest

from keepstep.config.overrides import FlagValue
from keepstep.config.schema import Config
from keepstep.config.validate import paths_of, validate
from keepstep.tasks.language.config import LanguageConfig


def flag(text, value):
    return FlagValue(text, value)


def build(tree, schema=LanguageConfig):
    config, problems = validate(schema, tree)
    return config, [f"{problem.path}: {problem.message}" for problem in problems]


def only_problem(tree, schema=LanguageConfig):
    _, problems = build(tree, schema)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"train": {"max_steps": "10"}}, "train.max_steps: must be a whole number, not '10'"),
        ({"train": {"max_steps": True}}, "train.max_steps: must be a whole number, not true"),
        ({"train": {"max_steps": 1.5}}, "train.max_steps: must be a whole number, not 1.5"),
        (
            {"train": {"max_steps": 1e3}},
            "train.max_steps: must be a whole number, not 1000.0; write 1000",
        ),
        (
            {"train": {"max_steps": flag("1e3", 1e3)}},
            "train.max_steps: must be a whole number, not 1e3; write 1000",
        ),
        ({"train": {"compile": 1}}, "train.compile: must be true or false, not 1"),
        ({"train": {"compile": "yes"}}, "train.compile: must be true or false, not 'yes'"),
        ({"run": {"name": 3}}, "run.name: must be text in quotes, not 3"),
        ({"run": {"hooks": "a:B"}}, "run.hooks: must be a list ([] is an empty one), not 'a:B'"),
        ({"run": {"hooks": ["a:B", 3]}}, "run.hooks: must be text in quotes, not 3"),
        (
            {"run": {"hooks": flag("['a:B', 3]", ["a:B", 3])}},
            "run.hooks: must be text in quotes, not 3",
        ),
        ({"optimizer": {"rate": float("inf")}}, "optimizer.rate: must be a finite number, not inf"),
        ({"optimizer": {"rate": True}}, "optimizer.rate: must be a number, not true"),
        ({"train": {"max_steps": {"x": 1}}}, "train.max_steps: is a key, not a section"),
        ({"train": 3}, "train: must be a section (a table), not 3"),
        (
            {"train": flag("3", 3)},
            "train: is a section, not a key; its keys are written --train.KEY",
        ),
        (
            {"evaluation": {"metric": "\udcff"}},
            r"evaluation.metric: must be valid Unicode text, not '\udcff'",
        ),
        (
            {"train": {"warmup_steps": 3}},
            "train.warmup_steps: unknown key; did you mean `schedule.warmup_steps`?",
        ),
        (
            {"train": {"interval": 3}},
            "train.interval: unknown key; did you mean `evaluation.interval` or"
            " `checkpoint.interval`?",
        ),
        ({"checkpoint": {"wamup_steps": 3}}, "checkpoint.wamup_steps: unknown key;"
            " did you mean `schedule.warmup_steps`?"),
        ({"max_steps": 3}, "max_steps: unknown key; did you mean `train.max_steps`?"),
        ({"zebra": 3}, "zebra: unknown key"),
        (
            {"model": {"settings": {"a": 1}}},
            "model.settings: write its keys in the section itself, as model.KEY",
        ),
        ({"model": {"x": float("nan")}}, "model.x: must be a finite number, not nan"),
        ({"model": {"x": [{"y": float("nan")}]}}, "model.x.y: must be a finite number, not nan"),
        (
            {"model": {"x": date(2020, 1, 1)}},
            "model.x: must be text, a number, true or false, a list or a table, not 2020-01-01",
        ),
        ({"model": {"x": "\udcff"}}, r"model.x: must be valid Unicode text, not '\udcff'"),
    ],
)  # fmt: skip
def test_what_a_field_cannot_be_is_said_in_words(tree, problem):
    assert only_problem(tree) == problem


def test_whole_numbers_are_fine_for_a_field_that_takes_any_number():
    config, problems = build({"optimizer": {"rate": 1}})
    assert problems == []
    assert config.optimizer.rate == 1.0


def test_a_flag_means_text_where_the_field_is_text_and_a_list_where_it_is_a_list():
    config, problems = build(
        {
            "run": {
                "name": flag("5", 5),
                "dir": flag("true", True),
                "grace": flag("90s", "90s"),
                "hooks": flag('["a:B"]', ["a:B"]),
            },
            "evaluation": {"metric": flag("none", None)},
            "checkpoint": {"on_resume": flag("5", 5)},
        }
    )
    assert problems == []
    assert (config.run.name, config.run.dir, config.run.hooks) == ("5", "true", ("a:B",))
    assert config.evaluation.metric == "none"
    assert config.checkpoint.on_resume == "5"


def test_one_hook_may_be_given_bare_and_a_step_as_a_number():
    tree = {"run": {"hooks": flag("a:B", "a:B")}, "checkpoint": {"on_resume": 7}}
    config, problems = build(tree)
    assert problems == []
    assert config.run.hooks == ("a:B",)
    assert config.checkpoint.on_resume == "7"


def test_free_keys_hold_plain_values_also_where_flags_gave_parts_of_them():
    tree = {"model": {"rope": {"theta": flag("3", 3), "kind": "x", "gone": flag("none", None)}}}
    config, problems = build(tree)
    assert problems == []
    assert config.model.settings == {"rope": {"theta": 3, "kind": "x"}}


def test_none_takes_a_free_key_away():
    config, problems = build({"model": {"a": 1, "b": flag("none", None)}})
    assert problems == []
    assert config.model.settings == {"a": 1}


def test_an_optional_section_can_be_taken_away_in_a_file_too():
    config, problems = build({"checkpoint": {"dyn_ckpt_window": "none"}})
    assert problems == []
    assert config.checkpoint.dyn_ckpt_window is None


@dataclass(frozen=True, kw_only=True)
class OtherConfig(Config):
    """A config as another package's task may have it."""

    label: str | None = None
    count: int | None = None
    level: Literal[1, 2] = 1


def test_optional_fields_of_another_tasks_config_take_none_and_text():
    tree = {"label": flag("5", 5), "count": flag("none", None), "level": flag("2", 2)}
    config, problems = build(tree, OtherConfig)
    assert problems == []
    assert (config.label, config.count, config.level) == ("5", None, 2)
    assert build({"label": flag("none", None)}, OtherConfig)[0].label is None
    assert only_problem({"level": 3}, OtherConfig) == "level: must be 1 or 2, not 3"


def test_the_paths_of_a_schema_hold_optional_sections_and_no_catch_all():
    paths = paths_of(LanguageConfig)
    assert {"train.max_steps", "checkpoint.dyn_ckpt_window.start", "data.source"} <= set(paths)
    assert "model.settings" not in paths
    assert len(paths) == len(set(paths))
