"""Overrides from the command line: `--a.b=c`, or `--a.b c`, over the tree of the files."""

import tomllib
from collections.abc import Sequence
from typing import Any

from keepstep.config.explain import Problem, Sources


def apply_overrides(
    tree: dict[str, Any], overrides: Sequence[str], sources: Sources
) -> list[Problem]:
    """Put the overrides into the tree, in order; return what cannot be understood.

    A value is read as TOML where it is valid TOML (`10`, `true`, `[1, 2]`), else as text.
    `none` takes an optional section away.
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


def _put(tree: dict[str, Any], path: list[str], value: Any) -> bool:
    """Set a value in the tree, making tables on the way; False where a plain value is in it."""
    for name in path[:-1]:
        inner = tree.setdefault(name, {})
        if inner is None:
            inner = tree[name] = {}
        if not isinstance(inner, dict):
            return False
        tree = inner
    if isinstance(tree.get(path[-1]), dict) and not isinstance(value, dict) and value is not None:
        return False
    tree[path[-1]] = value
    return True


def _value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
