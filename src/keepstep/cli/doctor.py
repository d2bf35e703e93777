"""`keepstep doctor [CONFIG | RUN]`: could a run begin and end well here?"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from keepstep.cli.switches import require_switches
from keepstep.config.resolved import RUN_TOML
from keepstep.config.schema import Config
from keepstep.errors import ConfigError, NotFound
from keepstep.tasks.registry import load_task_config

_USAGE = "keepstep doctor [CONFIG | RUN] [--json] [--section.key=value ...]"
_DESCRIPTION = f"""\
usage: {_USAGE}

Look at this machine, and at the folders of the run that CONFIG describes or RUN is: versions,
device, threads, limits, signals, whether two processes can meet; what the file system can do, its
clock, room; the grace and the time limit against what a save has taken. Nothing is left behind, and
a session that lives is not disturbed. Exit code 0 where nothing fails, 1 where something does.
"""


def run_doctor(argv: Sequence[str]) -> int:
    """Print every check; return the exit code."""
    if {"-h", "--help"} & set(argv):
        print(_DESCRIPTION, end="")
        return 0
    require_switches(argv, ("--json", "--help"), usage=_USAGE)
    words = [word for word in argv if word != "--json"]
    config, problems = _load(words) if words else (None, [])
    # Below the config, whose errors come first: torch takes seconds.
    from keepstep.run.examine import Check, examine

    hint = "`keepstep config check` says the same."
    found = (Check(name="config", state="fail", text=text, hint=hint) for text in problems)
    checks = []
    for check in chain(found, examine(config)):
        checks.append(check)
        if "--json" not in argv:
            print(f"{check.state:<5} {check.name:<14} {check.text}", flush=True)
            if check.hint:
                print(f"{'':<20} -> {check.hint}")
    sound = all(check.state != "fail" for check in checks)
    if "--json" in argv:
        print(json.dumps({"ok": sound, "checks": [asdict(check) for check in checks]}, indent=2))
    return 0 if sound else 1


def _load(words: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the config of a file or of a run's folder, and what of the machine does not fit it."""
    place = Path(words[0])
    path = place / RUN_TOML if place.is_dir() else place
    if place.is_dir() and not path.is_file():
        raise NotFound(f"{place} is not the folder of a run: there is no {RUN_TOML} in it")
    config = load_task_config(path, words[1:]).config
    problems = []
    try:
        load_task_config(path, words[1:], look=True)
    except ConfigError as error:
        problems = error.problems
    if place.is_dir():
        # It may have been moved since the file was written.
        config = replace(config, run=replace(config.run, dir=str(place)))
    return config, problems
