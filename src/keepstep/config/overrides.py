"""Overrides from the command line: `--a.b=c`, or `--a.b c`, over the tree of the files."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.config.explain import Problem, Sources


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
        if not name.startswith("--") or len(name) < 3:
            message = "is not a flag; overrides are written --section.key=value"
            problems.append(Problem(path=word, message=message, flag="command line"))
            continue
        path = name[2:].replace("-", "_")
        if not equals:
            if not words or words[0].startswith("--"):
                message = f"needs a value, as in {name}=VALUE"
                problems.append(Problem(path=path, message=message, flag=name))
                continue
            value = words.pop(0)
        sources.add_flag(path, name)
        if not _put(tree, path.split("."), _value(value)):
            problems.append(Problem(path=path, message="is a section, not a key", flag=name))
    return problems


def _put(tree: dict[str, Any], path: list[str], given: FlagValue) -> bool:
    """Set a value in the tree, making tables on the way; False where a plain value is in it."""
    for name in path[:-1]:
        inner = tree.setdefault(name, {})
        if isinstance(inner, FlagValue) and inner.value is None:
            inner = tree[name] = {}
        if not isinstance(inner, dict):
            return False
        tree = inner
    if isinstance(tree.get(path[-1]), dict) and given.value is not None:
        return False
    tree[path[-1]] = given
    return True


def _value(text: str) -> FlagValue:
    if text == "none":
        return FlagValue(text, None)
    try:
        return FlagValue(text, tomllib.loads(f"value = {text}")["value"])
    except tomllib.TOMLDecodeError:
        return FlagValue(text, text)
