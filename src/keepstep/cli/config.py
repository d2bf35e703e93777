"""`keepstep config show|check CONFIG [overrides]`: look at a config; needs no torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from keepstep.cli.switches import require_switches
from keepstep.config.explain import suggestion
from keepstep.config.resolved import dump_toml
from keepstep.errors import ConfigError, UsageError
from keepstep.tasks.registry import load_task_config

_OPTIONS = "[--json] [--section.key=value ...]"
_USAGE = f"""\
usage: keepstep config show CONFIG {_OPTIONS}
       keepstep config check CONFIG {_OPTIONS}

show    print the config as it resolves: files, what they extend, overrides, defaults
check   list everything that is wrong, with line, allowed values and a suggestion: keys and values,
        and the folders, hooks, data and device that they name on this machine
"""

_NOT_LOOKED_AT = [
    "whether the model can be built and fits into memory",
    "what the hooks' code does",
    "the bytes of the data",
    "room on the disk",
    "what stands in the run's folder",
]
"""`train` finds these out; each would cost torch, time, or the user's own code."""


def run_config(argv: Sequence[str]) -> int:
    """Show or check a config; return the exit code."""
    verbs: dict[str, Callable[[Sequence[str], bool], int]] = {"show": _show, "check": _check}
    words = [word for word in argv if word != "--json"]
    if not words or {"-h", "--help"} & set(words):
        print(_USAGE, end="")
        return 0 if words else UsageError.exit_code
    verb, *rest = words
    if verb not in verbs:
        near = suggestion(verb, list(verbs))
        message = f"there is no command `keepstep config {verb}`{near}"
        raise UsageError(message, hint="`keepstep config --help` lists them.")
    if not rest or rest[0].startswith("--"):
        message = f"`keepstep config {verb}` needs a config file first"
        raise UsageError(message, hint=f"usage: keepstep config {verb} CONFIG {_OPTIONS}")
    usage = f"keepstep config {verb} CONFIG {_OPTIONS}"
    require_switches(rest, ("--json", "--help"), usage=usage)
    return verbs[verb](rest, "--json" in argv)


def _show(words: Sequence[str], as_json: bool) -> int:
    config = load_task_config(words[0], words[1:]).config
    print(json.dumps(asdict(config), indent=2) if as_json else dump_toml(config).rstrip())
    return 0


def _check(words: Sequence[str], as_json: bool) -> int:
    try:
        loaded = load_task_config(words[0], words[1:], look=True)
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "problems": error.problems}, indent=2))
        return error.exit_code
    if as_json:
        print(json.dumps({"ok": True, "problems": [], "not_looked_at": _NOT_LOOKED_AT}, indent=2))
    else:
        print(f"{loaded.path}: OK, nothing is wrong")
        print(f"not looked at: {'; '.join(_NOT_LOOKED_AT)}")
    return 0
