"""Problems of a config in words: where, what, what is allowed, what was probably meant."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\"' ]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-\"']+)\s*=")
_MANY_LINES = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'', re.S)
_SHOWN_LENGTH = 80


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong at a path such as `train.max_steps`; `flag` where a flag said it."""

    path: str
    message: str
    flag: str = ""


class Sources:
    """Remembers which line of which file, or which flag, set each path."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._ranks: dict[str, int] = {}
        self._main = "config"

    def add_file(self, path: Path, text: str) -> None:
        """Note the line of every key of a TOML file."""
        self._main = str(path)
        table = ""
        # Text over many lines may look like keys; only its line breaks count.
        text = _MANY_LINES.sub(lambda match: "\n" * match.group().count("\n"), text)
        # Not splitlines(): to TOML, a form feed and its like do not end a line.
        for number, line in enumerate(text.split("\n"), start=1):
            if match := _TABLE.match(line):
                table = _bare(match.group(1))
                self._note(table, f"{path}:{number}")
            elif match := _KEY.match(line):
                key = _bare(match.group(1))
                self._note(f"{table}.{key}" if table else key, f"{path}:{number}")

    def add_flag(self, path: str, flag: str) -> None:
        """Note that a flag set a path."""
        self._note(path, flag)

    def where(self, path: str) -> str:
        """Return where a path was set, or where the nearest table around it was, or began."""
        around = path
        while around:
            if around in self._places:
                return self._places[around]
            inside = [key for key in self._places if key.startswith(f"{around}.")]
            if inside:
                return self._places[inside[-1]]
            around = around.rpartition(".")[0]
        return self._main

    def rank(self, place: str) -> int:
        """Return where a place stands in reading order: by file, by line, then the flags."""
        return self._ranks.get(place, len(self._ranks))

    def _note(self, path: str, place: str) -> None:
        self._places[path] = place
        self._ranks.setdefault(place, len(self._ranks))


def explain(problems: Iterable[Problem], sources: Sources) -> list[str]:
    """Return one line a problem, in reading order: where it stands, which key, what is wrong."""
    lines: dict[str, None] = {}
    placed = [(problem.flag or sources.where(problem.path), problem) for problem in problems]
    for place, problem in sorted(placed, key=lambda pair: sources.rank(pair[0])):
        lines[_line(place, problem)] = None
    return list(lines)


def _line(place: str, problem: Problem) -> str:
    """Say where, which key and what, no key twice."""
    if place.startswith("--"):
        set_there = place[2:].replace("-", "_")
        if set_there == problem.path:
            return f"{place}: {problem.message}"
        if not problem.flag and not problem.path.startswith(f"{set_there}."):
            # Nobody set this key; another flag is why it is wanted.
            return f"--{problem.path}: {problem.message} (beside {place})"
    return f"{place}: {problem.path}: {problem.message}"


def said(value: Any, *, text: str = "") -> str:
    """Return a value as a person wrote it: like TOML, text in quotes, not too long.

    ``text`` is what stood on the command line, where it came from there.
    """
    if isinstance(value, str):
        shown = repr(value)
    elif value is None:
        shown = "none"
    elif isinstance(value, bool):
        shown = str(value).lower()
    else:
        shown = text or str(value)
    return shown if len(shown) <= _SHOWN_LENGTH else f"{shown[:_SHOWN_LENGTH]}..."


def suggestion(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?` with the closest of the known names, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean `{close[0]}`?" if close else ""


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
