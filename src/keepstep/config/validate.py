"""A tree of TOML values against the schema: strict types, no unknown keys, all faults at once."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from keepstep.config.explain import Problem, said, suggestion
from keepstep.config.overrides import NO_VALUE, NOT_A_KEY, FlagValue
from keepstep.config.schema import Config

CATCH_ALL = "settings"
_WRONG = object()
_AROUND_TEXT = (Annotated, Union, UnionType)


def validate(schema: type[Config], tree: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the config that a tree holds and the problems that were found.

    A field with a problem has its default, so that checks of the other fields can still run; where
    that cannot be, the config is None.
    """
    problems: list[Problem] = []
    config = _Builder(paths_of(schema), problems).section(schema, tree, "")
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


def paths_of(schema: type, prefix: str = "") -> list[str]:
    """Return the path of every key that a schema has, those of optional sections too."""
    paths: list[str] = []
    for name, hint in hints_of(schema).items():
        inner = section_of(hint)
        if inner is not None:
            paths += paths_of(inner, f"{prefix}{name}.")
        elif name != CATCH_ALL:
            paths.append(f"{prefix}{name}")
    return paths


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


class _Builder:
    """Builds sections from tables, and gathers every problem on the way."""

    def __init__(self, known: list[str], problems: list[Problem]) -> None:
        self._known = known
        self._problems = problems

    def section(self, section: type, tree: Mapping[str, Any], prefix: str) -> Any:
        """Build a section from its table; `_WRONG` where a field without default is missing.

        A section with a field `settings` takes every key that it does not know into it.
        """
        hints = hints_of(section)
        values: dict[str, Any] = {}
        for name, given in tree.items():
            path = f"{prefix}{name}"
            if name == CATCH_ALL and CATCH_ALL in hints:
                self._tell(path, f"write its keys in the section itself, as {prefix}KEY")
            elif name not in hints and CATCH_ALL in hints:
                value = self._plain(given, path)
                if value is not _WRONG and value is not None:
                    values.setdefault(CATCH_ALL, {})[name] = value
            elif name not in hints:
                kind = "section" if isinstance(given, dict) else "key"
                near = _likely(name, list(hints), self._known)
                self._tell(path, f"unknown {kind}{near}")
            else:
                value = self._field(hints[name], given, path)
                if value is not _WRONG:
                    values[name] = value
        wanting = False
        for item in dataclasses.fields(section):
            has_default = item.default is not MISSING or item.default_factory is not MISSING
            wanting = wanting or (not has_default and item.name not in values)
            if not has_default and item.name not in tree:
                self._tell(f"{prefix}{item.name}", "is missing, and has no default")
        return _WRONG if wanting else section(**values)

    def _field(self, hint: Any, given: Any, path: str) -> Any:
        """Return the value of a field, or `_WRONG`."""
        text = ""
        if isinstance(given, FlagValue):
            text, given = given.text, _meant(hint, given)
        inner, optional = section_of(hint), type(None) in get_args(hint)
        if given is NO_VALUE:
            wanted = f"needs a value, as in --{path}=VALUE"
            return self._tell(path, NOT_A_KEY.format(path) if inner is not None else wanted)
        if inner is not None:
            if optional and given in (None, "none"):
                return None
            if isinstance(given, dict):
                return self.section(inner, given, f"{path}.")
            if text:
                return self._tell(path, NOT_A_KEY.format(path))
            return self._tell(path, f"must be a section (a table), not {said(given)}")
        if isinstance(given, dict) and get_origin(hint) is not dict:
            return self._tell(path, "is a key, not a section")
        given = self._plain(given, path) if isinstance(given, dict) else given
        if isinstance(given, str) and not _is_unicode(given):
            return self._tell(path, f"must be valid Unicode text, not {said(given)}")
        if get_origin(hint) is tuple and isinstance(given, list):
            given = tuple(given)
        try:
            return _adapter(hint).validate_python(given)
        except ValidationError as error:
            for fault in error.errors():
                # A fault inside a list has a place of its own, and its own value.
                shown = said(fault["input"], text="" if fault["loc"] else text)
                self._tell(path, _words(fault, shown))
            return _WRONG

    def _plain(self, given: Any, path: str) -> Any:
        """Return a value of a free key with every flag's value in its place.

        None stands for `none`, which takes a key away, so that its library's default holds.
        """
        text = ""
        if isinstance(given, FlagValue):
            text, given = given.text, given.value
        if given is NO_VALUE:
            return self._tell(path, f"needs a value, as in --{path}=VALUE")
        if isinstance(given, dict):
            table = {name: self._plain(entry, f"{path}.{name}") for name, entry in given.items()}
            return {n: entry for n, entry in table.items() if entry not in (None, _WRONG)}
        if isinstance(given, list):
            return [self._plain(entry, path) for entry in given]
        if isinstance(given, float) and not math.isfinite(given):
            return self._tell(path, f"must be a finite number, not {said(given, text=text)}")
        if isinstance(given, str) and not _is_unicode(given):
            return self._tell(path, f"must be valid Unicode text, not {said(given)}")
        if given is None or isinstance(given, (bool, int, float, str)):
            return given
        kinds = "text, a number, true or false, a list or a table"
        return self._tell(path, f"must be {kinds}, not {said(given, text=text)}")

    def _tell(self, path: str, message: str) -> Any:
        self._problems.append(Problem(path=path, message=message))
        return _WRONG


def _meant(hint: Any, flag: FlagValue) -> Any:
    """Return what a flag means for a field: for text, `6` is the text "6" and not a number."""
    options = get_args(hint)
    if flag.value is NO_VALUE:
        return NO_VALUE
    if flag.value is None and type(None) in options:
        return None
    if isinstance(flag.value, str):
        # One entry of a list of text may be given bare.
        is_list = get_origin(hint) is tuple and options == (str, ...)
        return [flag.value] if is_list and flag.value else flag.value
    takes_text = hint is str or (get_origin(hint) in _AROUND_TEXT and str in options)
    return flag.text if takes_text else flag.value


def _likely(name: str, beside: list[str], known: list[str]) -> str:
    """Return `; did you mean ...?` for a name that a section does not have.

    First comes that very name in another section, then a close one beside it, then one elsewhere.
    """
    leaves = [path.rpartition(".")[2] for path in known]
    near = [name] if name in leaves else difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)
    elsewhere = [f"`{path}`" for path in known if path.rpartition(".")[2] in near]
    here = "" if name in leaves else suggestion(name, beside)
    return here or (f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else "")


def _is_unicode(text: str) -> bool:
    """Tell whether text can be written down; a byte of a foreign encoding cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _words(fault: Any, given: str) -> str:
    """Say what a field must be, and what it was given."""
    match fault["type"]:
        case "literal_error":
            allowed = fault["ctx"]["expected"]
            names = [part.strip("' ") for part in allowed.replace(" or ", ",").split(",")]
            return f"must be {allowed}, not {given}{suggestion(str(fault['input']), names)}"
        case "value_error":
            return f"{fault['ctx']['error']}, not {given}"
        case "int_type" if isinstance(fault["input"], float) and fault["input"].is_integer():
            return f"must be a whole number, not {given}; write {int(fault['input'])}"
    words = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text in quotes",
        "tuple_type": "a list ([] is an empty one)",
        "dict_type": "a table",
        "finite_number": "a finite number",
    }
    wanted = words.get(fault["type"])
    return f"must be {wanted}, not {given}" if wanted else f"{fault['msg']}, not {given}"
