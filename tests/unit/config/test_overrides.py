"""Flags over the tree of the files: what the words of a command line mean."""

import pytest

from keepstep.config.explain import Sources
from keepstep.config.overrides import NO_VALUE, FlagValue, apply_overrides


def put(*words, tree=None):
    """Return the tree with plain values in place of the flags', and the problems' words."""
    tree = {} if tree is None else tree
    problems = apply_overrides(tree, words, Sources())

    def plain(node):
        if isinstance(node, FlagValue):
            return node.value
        return {name: plain(entry) for name, entry in node.items()} if _is_table(node) else node

    return plain(tree), [f"{problem.flag}: {problem.message}" for problem in problems]


def _is_table(node):
    return isinstance(node, dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("-1", -1),
        ("1_000", 1000),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("-.5e2", -50.0),
        ("5.", 5.0),
        ("true", True),
        ("True", True),
        ("False", False),
        ("none", None),
        ("None", "None"),
        ("ten", "ten"),
        ("", ""),
        ("007", "007"),
        ("'10'", "10"),
        ('"a b"', "a b"),
        ("['a:B', 'c:D']", ["a:B", "c:D"]),
        ("{a = 1, b = {c = 'd'}}", {"a": 1, "b": {"c": "d"}}),
        ("a=b", "a=b"),
        ("--x", "--x"),
        # What stands behind a value must not vanish, nor set another key.
        ("3 # steps", "3 # steps"),
        ("3\nother = 4", "3\nother = 4"),
        ("3, other = 4", "3, other = 4"),
        ("3 }\n[x]\ny = { z = 4", "3 }\n[x]\ny = { z = 4"),
    ],
)
def test_a_value_is_read_as_toml_or_else_as_it_stands(text, value):
    tree, problems = put(f"--a.b={text}")
    assert problems == []
    assert tree == {"a": {"b": value}}
    assert type(tree["a"]["b"]) is type(value)


def test_the_next_word_is_the_value_also_where_it_is_negative():
    assert put("--a.b", "-1", "--c", "x")[0] == {"a": {"b": -1}, "c": "x"}


@pytest.mark.parametrize("words", [["--a.b"], ["--a.b", "--c=1"]])
def test_a_flag_without_a_value_takes_no_other_flag_for_it(words):
    tree, problems = put(*words)
    assert problems == []
    assert tree["a"] == {"b": NO_VALUE}


@pytest.mark.parametrize(
    "word", ["x", "-x=1", "--", "--=1", "--.=1", "--a..b=1", "---a=1", "--a.="]
)
def test_what_is_not_a_flag_is_named(word):
    tree, problems = put(word)
    assert problems == ["command line: is not a flag; overrides are written --section.key=value"]
    assert tree == {}


def test_dashes_in_a_flag_stand_for_underscores_in_a_key():
    assert put("--train.max-steps=3")[0] == {"train": {"max_steps": 3}}


def test_the_last_flag_wins_over_earlier_ones_and_over_the_file():
    assert put("--a.b=2", "--a.b=3", tree={"a": {"b": 1, "c": 5}})[0] == {"a": {"b": 3, "c": 5}}


def test_a_table_can_be_taken_away_given_as_a_whole_and_then_refined():
    table = {"w": {"start": 1, "stop": 2}}
    assert put("--w=none", tree=table)[0] == {"w": None}
    assert put("--w=none", "--w.start=3")[0] == {"w": {"start": 3}}
    assert put("--w={start = 5}", tree={"w": {"stop": 2}})[0] == {"w": {"start": 5}}
    assert put("--w={start = 5}", "--w.stop=9")[0] == {"w": {"start": 5, "stop": 9}}


def test_a_section_is_not_a_key_and_a_key_is_not_a_section():
    _, problems = put("--a=3", tree={"a": {"b": 1}})
    assert problems == ["--a: is a section, not a key; its keys are written --a.KEY"]
    tree, problems = put("--a.b.c=3", tree={"a": {"b": 1}})
    assert problems == ["--a.b.c: a.b is a key, not a section"]
    assert tree == {"a": {"b": 1}}
    assert put("--a.b=1", "--a.b.c=3")[1] == ["--a.b.c: a.b is a key, not a section"]
