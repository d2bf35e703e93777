"""A tree of TOML values against the schema: strict types, no unknown keys, all faults at once."""

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from keepstep.config.explain import Problem, suggestion
from keepstep.config.overrides import FlagValue
from keepstep.config.schema import Config

CATCH_ALL = "settings"
_WRONG = object()


def validate(schema: type[Config], tree: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the config that a tree holds and the problems that were found.

    A field with a problem has its default, so that checks of the other fields can still run; where
    that cannot be, the config is None.
    """
    problems: list[Problem] = []
    config = _build(schema, tree, "", problems)
    return (None if config is _WRONG else cast(Config, config)), problems


def flatten(config: Any) -> dict[str, Any]:
    """Return every field of a config by its path; a section that is not there is None."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            inner = flatten(value)
            flat.update({f"{item.name}.{name}": entry for name, entry in inner.items()})
        else:
            flat[item.name] = value
    return flat


def section_of(hint: Any) -> type | None:
    """Return the dataclass that a field's type stands for, also where it is optional."""
    for option in (hint, *get_args(hint)):
        # Only types: what annotates a type (a validator, say) may be a dataclass' instance.
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


@cache
def hints_of(section: type) -> dict[str, Any]:
    """Return the types of a section's fields, `Annotated` left in place."""
    return get_type_hints(section, include_extras=True)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    # Strict, so that "10" is not a number and 1 is not true; nan and inf are never meant.
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _build(section: type, tree: Mapping[str, Any], prefix: str, problems: list[Problem]) -> Any:
    """Build a section from its table, adding every problem; `_WRONG` where it cannot be.

    A section with a field `settings` takes every key that it does not know into it.
    """
    hints = hints_of(section)
    values: dict[str, Any] = {}
    for name, given in tree.items():
        path = f"{prefix}{name}"
        if name not in hints and CATCH_ALL in hints:
            plain = given.value if isinstance(given, FlagValue) else given
            values.setdefault(CATCH_ALL, {})[name] = plain
        elif name not in hints:
            kind = "section" if isinstance(given, dict) else "key"
            near = suggestion(name, list(hints))
            problems.append(Problem(path=path, message=f"unknown {kind}{near}"))
        elif name == CATCH_ALL and isinstance(given, dict):
            values[name] = {**values.get(name, {}), **given}
        else:
            value = _value(hints[name], given, path, problems)
            if value is not _WRONG:
                values[name] = value
    wanting = False
    for item in dataclasses.fields(section):
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        wanting = wanting or (not has_default and item.name not in values)
        if not has_default and item.name not in tree:
            problems.append(
                Problem(path=f"{prefix}{item.name}", message="is missing, and has no default")
            )
    return _WRONG if wanting else section(**values)


def _value(hint: Any, given: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(given, FlagValue):
        is_text = isinstance(given.value, str) or not _takes_text(hint)
        given = given.value if is_text else given.text
    inner = section_of(hint)
    if inner is not None and isinstance(given, dict):
        return _build(inner, given, f"{path}.", problems)
    if inner is not None and not (given is None and type(None) in get_args(hint)):
        message = f"must be a section (a table), not {given!r}"
        problems.append(Problem(path=path, message=message))
        return _WRONG
    if get_origin(hint) is tuple and isinstance(given, list):
        given = tuple(given)
    try:
        return _adapter(hint).validate_python(given)
    except ValidationError as error:
        problems.extend(_problem(path, fault) for fault in error.errors())
        return _WRONG


def _takes_text(hint: Any) -> bool:
    """Tell whether a field holds text: then `6` on the command line is the text "6"."""
    return hint is str or (get_origin(hint) is Annotated and get_args(hint)[0] is str)


def _problem(path: str, fault: Any) -> Problem:
    given = fault["input"]
    match fault["type"]:
        case "literal_error":
            allowed = fault["ctx"]["expected"]
            names = [part.strip("' ") for part in allowed.replace(" or ", ",").split(",")]
            near = suggestion(str(given), names)
            return Problem(path=path, message=f"must be {allowed}, not {given!r}{near}")
        case "value_error":
            return Problem(path=path, message=f"{fault['ctx']['error']}, not {given!r}")
    words = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text in quotes",
        "tuple_type": "a list",
        "dict_type": "a table",
        "finite_number": "a finite number",
    }
    wanted = words.get(fault["type"])
    return Problem(
        path=path, message=f"must be {wanted}, not {given!r}" if wanted else str(fault["msg"])
    )
