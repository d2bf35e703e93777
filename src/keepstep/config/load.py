"""From TOML files and overrides to one checked, frozen config.

Guarantees: everything that is wrong is said at once, before anything starts, each with where it
stands (file and line, or the flag), what is allowed and, for a name, what was probably meant.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config.checks import cross_checks, single_checks
from keepstep.config.explain import Problem, Sources, explain, said
from keepstep.config.overrides import NO_VALUE, FlagValue, apply_overrides
from keepstep.config.schema import Config
from keepstep.config.validate import validate
from keepstep.errors import ConfigError

EXTENDS = "extends"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A config and where it came from."""

    config: Config
    path: Path


def load_config(
    path: Path | str,
    overrides: Sequence[str],
    *,
    schema_of: Callable[[str], type[Config]],
    checks_of: Callable[[Config], Sequence[Problem]],
    looks_of: Callable[[Config], Sequence[Problem]] = lambda _: (),
) -> Loaded:
    """Load a config; ConfigError lists all problems.

    ``schema_of`` gives the config class of a task's name, ``checks_of`` the task's own checks,
    ``looks_of`` what of the machine does not fit.
    """
    place = Path(path)
    sources = Sources()
    tree = _read(place, sources, chain=())
    problems = apply_overrides(tree, overrides, sources)
    task = tree.get("task", "language")
    if isinstance(task, FlagValue):
        task = "language" if task.value is NO_VALUE else task.text
    try:
        schema = schema_of(task if isinstance(task, str) else said(task))
    except ConfigError as error:
        raise ConfigError([f"{sources.where('task')}: {error.message}"]) from error
    config, found = validate(schema, tree)
    problems += found
    if config is not None:
        # Checks between fields would judge the defaults that stand in for wrong values.
        checked = single_checks(config) if problems else cross_checks(config)
        problems += [*checked, *checks_of(config), *looks_of(config)]
    if problems:
        raise ConfigError(explain(problems, sources))
    assert config is not None, "a config without problems was built"
    return Loaded(config=config, path=place)


def _read(path: Path, sources: Sources, *, chain: tuple[Path, ...]) -> dict[str, Any]:
    """Return the tree of a file over the tree of what it extends."""
    if path.resolve() in chain:
        names = " -> ".join(item.name for item in (*chain, path))
        raise ConfigError([f"{path}: {EXTENDS!r} goes round in a circle: {names}"])
    hint = "The first argument is a TOML file, such as configs/language/debug.toml."
    if chain:
        hint = f"{chain[-1]} extends it."
    try:
        # TOML is UTF-8 whatever the locale; some editors put a mark of it in front.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError([f"there is no config file {path}"], hint=hint) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{path}: cannot be read as text: {reason}"], hint=hint) from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: this is not valid TOML: {error}"]) from error
    base: dict[str, Any] = {}
    parent = tree.pop(EXTENDS, None)
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError([f"{path}: {EXTENDS!r} must be the name of a file"])
        base = _read(path.parent / parent, sources, chain=(*chain, path.resolve()))
    sources.add_file(path, text)
    return _merged(base, tree)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(value, dict) and isinstance(below, dict)
        result[name] = _merged(below, value) if both and below is not None else value
    return result
