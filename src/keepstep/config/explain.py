"""Problems of a config in words: where, what, what is allowed, what was probably meant."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\"' ]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-\"']+)\s*=")


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
        self._main = "config"

    def add_file(self, path: Path, text: str) -> None:
        """Note the line of every key of a TOML file."""
        self._main = str(path)
        table = ""
        for number, line in enumerate(text.splitlines(), start=1):
            if match := _TABLE.match(line):
                table = _bare(match.group(1))
                self._places[table] = f"{path}:{number}"
            elif match := _KEY.match(line):
                key = _bare(match.group(1))
                self._places[f"{table}.{key}" if table else key] = f"{path}:{number}"

    def add_flag(self, path: str, flag: str) -> None:
        """Note that a flag set a path."""
        self._places[path] = flag

    def where(self, path: str) -> str:
        """Return where a path was set, or where the nearest table around it was."""
        around = path
        while around:
            if around in self._places:
                return self._places[around]
            around = around.rpartition(".")[0]
        return self._main


def explain(problems: Iterable[Problem], sources: Sources) -> list[str]:
    """Return one line a problem: where it was written, which key, what is wrong."""
    lines: dict[str, None] = {}
    for problem in problems:
        place = problem.flag or sources.where(problem.path)
        key = "" if place == f"--{problem.path}" else f"{problem.path}: "
        lines[f"{place}: {key}{problem.message}"] = None
    return list(lines)


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return ` Did you mean ...?` for the closest known names, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
