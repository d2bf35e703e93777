"""Overrides from the command line: `--a.b=c`, or `--a.b c`, over the tree of the files."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.config.explain import Problem, Sources, suggestion

NOT_A_KEY = "is a section, not a key; its keys are written --{}.KEY"

_WORDS_WITHOUT_VALUE = ("--quiet", "--help")
_FLAG = re.compile(r"--[A-Za-z_][\w-]*(\.[\w-]+)*")
_BARE_FLOAT = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")
_PYTHON_WORDS = {"True": True, "False": False}


@dataclass(frozen=True)
class FlagValue:
    """What a flag gave: the text, and what it is as TOML. The field's type says which is meant."""

    text: str
    value: Any


def apply_overrides(
    tree: dict[str, Any], overrides: Sequence[str], sources: Sources
) -> list[Problem]:
    """Put the overrides into the tree, in order; return what cannot be understood.

    A value becomes a `FlagValue`. `none` takes an optional section away.
    """
    problems: list[Problem] = []
    words = list(overrides)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not _FLAG.fullmatch(name):
            message = "is not a flag; overrides are written --section.key=value"
            problems.append(Problem(path=word, message=message, flag="command line"))
            continue
        path = name[2:].replace("-", "_")
        if not equals:
            if not words or words[0].startswith("--"):
                near = suggestion(name, _WORDS_WITHOUT_VALUE)
                message = f"needs a value, as in {name}=VALUE{near}"
                problems.append(Problem(path=path, message=message, flag=name))
                continue
            value = words.pop(0)
        sources.add_flag(path, name)
        if refusal := _put(tree, path.split("."), _value(value)):
            problems.append(Problem(path=path, message=refusal, flag=name))
    return problems


def _put(tree: dict[str, Any], path: list[str], given: FlagValue) -> str:
    """Set a value in the tree, making tables on the way; return why it cannot be, or nothing."""
    for depth, name in enumerate(path[:-1], start=1):
        inner = tree.setdefault(name, {})
        if isinstance(inner, FlagValue):
            # An earlier flag took the table away, or gave it as a whole: `--a.b={c = 1}`.
            inner = tree[name] = {} if inner.value is None else inner.value
        if not isinstance(inner, dict):
            return f"{'.'.join(path[:depth])} is a key, not a section"
        tree = inner
    table_stays = isinstance(tree.get(path[-1]), dict)
    if table_stays and not (given.value is None or isinstance(given.value, dict)):
        return NOT_A_KEY.format(".".join(path))
    tree[path[-1]] = given
    return ""


def _value(text: str) -> FlagValue:
    """Read a flag's text as TOML where it is; `.5` and `True`, as other tools write them, too."""
    if text == "none":
        return FlagValue(text, None)
    if text in _PYTHON_WORDS:
        return FlagValue(text, _PYTHON_WORDS[text])
    if _BARE_FLOAT.fullmatch(text):
        return FlagValue(text, float(text))
    try:
        # Within braces, so that neither a comment nor a second line can hide behind the value.
        table = tomllib.loads(f"it = {{ value = {text} }}")
    except tomllib.TOMLDecodeError:
        return FlagValue(text, text)
    alone = list(table) == ["it"] and list(table["it"]) == ["value"]
    return FlagValue(text, table["it"]["value"] if alone else text)
