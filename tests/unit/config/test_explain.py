"""Where a key stands, and how a problem reads."""

from pathlib import Path

import pytest

from keepstep.config.explain import Problem, Sources, explain, said, suggestion

TEXT = '''\
task = "language"  # line 1
run.seed = 1

[train]
max_steps = 3
note = """
max_steps = 4
[optimizer]
"""
global_batch = 2

[ checkpoint . "dyn_ckpt_window" ]  # line 12
start = 1
[model]
"quoted" = 1
hooks = [
  "a = b",
]
last = 1
'''


def sources(*flags):
    found = Sources()
    found.add_file(Path("c.toml"), TEXT)
    for flag in flags:
        found.add_flag(flag.removeprefix("--"), flag)
    return found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("task", 1),
        ("run.seed", 2),
        ("train", 4),
        ("train.max_steps", 5),
        ("train.global_batch", 10),
        ("checkpoint.dyn_ckpt_window", 12),
        ("checkpoint.dyn_ckpt_window.start", 13),
        ("model.quoted", 15),
        ("model.last", 19),
        # Not written anywhere: the nearest table around it, or its first neighbour.
        ("train.compile", 4),
        ("checkpoint.dyn_ckpt_window.stop", 12),
        ("run.grace", 2),
    ],
)
def test_the_place_of_a_key_is_its_line_or_that_of_its_section(path, line):
    assert sources().where(path) == f"c.toml:{line}"


def test_what_stands_nowhere_is_placed_at_the_file():
    assert sources().where("optimizer.rate") == "c.toml"
    assert Sources().where("optimizer.rate") == "config"


def test_a_missing_key_of_a_section_that_a_flag_made_is_placed_at_the_flag():
    assert sources("--w.start").where("w.stop") == "--w.start"


def test_a_form_feed_is_not_a_line():
    found = Sources()
    found.add_file(Path("c.toml"), "# \f\x85\u2028\na = 1\n")
    assert found.where("a") == "c.toml:2"


def test_problems_come_in_reading_order_files_first_and_each_once():
    problems = [
        Problem(path="train.rate", message="flag", flag="--train.rate"),
        Problem(path="train.global_batch", message="late"),
        Problem(path="x", message="is not a flag", flag="command line"),
        Problem(path="task", message="early"),
        Problem(path="task", message="early"),
        Problem(path="w.stop", message="is missing"),
    ]
    assert explain(problems, sources("--train.rate", "--w.start")) == [
        "c.toml:1: task: early",
        "c.toml:10: train.global_batch: late",
        "--train.rate: flag",
        "--w.stop: is missing (beside --w.start)",
        "command line: x: is not a flag",
    ]


def test_a_value_is_shown_as_it_was_written():
    assert [said(v) for v in (None, True, 3, 0.1, "a\nb", [1])] == [
        "none", "true", "3", "0.1", "'a\\nb'", "[1]",
    ]  # fmt: skip
    assert said(1000.0, text="1e3") == "1e3"
    assert said("ten", text="ten") == "'ten'"
    assert len(said("x" * 10_000)) < 100


def test_only_a_close_name_is_suggested():
    assert suggestion("max_stpes", ["min_steps", "max_steps"]) == "; did you mean `max_steps`?"
    assert suggestion("zebra", ["max_steps"]) == ""
