"""What of a run's config changed since its last session, in words.

Guarantees: every field that has another value than the run's own record of its last session
(`run.toml`) is named once, with both values, whatever field it is. Without it a run would go on
under another batch size, schedule or metric, and nothing would say so: the record is overwritten
by each session.
"""

import tomllib
from pathlib import Path

from keepstep.config.explain import said
from keepstep.config.schema import Config
from keepstep.config.validate import CATCH_ALL, flatten, validate

_PLACES = frozenset({"run.dir", "checkpoint.dir", "data.cache"})


def config_changes(record: Path, config: Config) -> list[str]:
    """Return what is another in `config` than in the recorded one, one phrase a field.

    A field that the record does not have (it is of an older version) had its default. Where a run
    lives is no change of it.
    """
    if not record.is_file():
        return []
    try:
        tree = tomllib.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"{record} cannot be read ({error}): what changed is not known"]
    before, problems = validate(type(config), tree)
    if before is None:
        named = "; ".join(f"{problem.path}: {problem.message}" for problem in problems)
        return [f"{record} is not a config ({named}): what changed is not known"]
    old, new = _fields(before), _fields(config)
    return [
        f"{path}: {said(old.get(path))} -> {said(new.get(path))}"
        for path in [*new, *(path for path in old if path not in new)]
        if old.get(path) != new.get(path) and path not in _PLACES
    ]


def _fields(config: Config) -> dict[str, object]:
    """Return every field by its path, the free keys of a section one by one."""
    found: dict[str, object] = {}
    for path, value in flatten(config).items():
        section, _, name = path.rpartition(".")
        if name == CATCH_ALL and isinstance(value, dict):
            found.update({f"{section}.{key}": entry for key, entry in value.items()})
        else:
            found[path] = value
    return found
