"""Tasks by name: entry points of the group `keepstep.tasks`, so that one can live anywhere.

An entry point is a module with `CONFIG` (the config class), `build(config, share)` (which may
import torch) and, if it has them: `check(config)` and `look(config)` (which may not): what of its
sections cannot be meant, and what of the machine does not fit them; and `export(config, weights,
entry, folder)`, which fills a folder for `transformers`. Importing the module must stay light.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from keepstep.config.explain import Problem, suggestion
from keepstep.config.load import Loaded, load_config
from keepstep.config.schema import Config
from keepstep.config.surroundings import look_around
from keepstep.errors import ConfigError, UsageError
from keepstep.store import Checkpoint

if TYPE_CHECKING:
    from keepstep.tasks.task import DataShare, Task

_GROUP = "keepstep.tasks"


def load_task_config(path: Path | str, overrides: Sequence[str], *, look: bool = False) -> Loaded:
    """Load a config with the sections and the checks of the task that it names.

    ``look``: whether folders, hooks and data that it names are looked at too.
    """
    looks_of: Callable[[Config], Sequence[Problem]] = _looks if look else lambda _: ()
    return load_config(
        path, overrides, schema_of=config_class, checks_of=_checks, looks_of=looks_of
    )


def config_class(task: str) -> type[Config]:
    """Return the config class of a task; ConfigError where there is no such task."""
    return cast(type[Config], _module(task).CONFIG)


def build_task(config: Config, share: "DataShare") -> "Task":
    """Build the task that a config names, for this rank's share of the data."""
    return cast("Task", _module(config.task).build(config, share))


def export_model(
    config: Config, weights: Mapping[str, Any], entry: Checkpoint, folder: Path
) -> list[str]:
    """Have the task fill a folder for `transformers`; return what is to be said of it."""
    export = getattr(_module(config.task), "export", None)
    if export is None:
        raise UsageError(
            f"models of the task {config.task!r} have no Hugging Face format",
            hint="Weights alone can be written with --format safetensors.",
        )
    return cast(list[str], export(config, weights, entry, folder))


def _checks(config: Config) -> Sequence[Problem]:
    check = getattr(_module(config.task), "check", None)
    return cast(Sequence[Problem], check(config)) if check is not None else []


def _looks(config: Config) -> Sequence[Problem]:
    look = getattr(_module(config.task), "look", None)
    return [*look_around(config), *(look(config) if look is not None else ())]


def _module(task: str) -> ModuleType:
    known = {point.name: point for point in entry_points(group=_GROUP)}
    if task not in known:
        names = ", ".join(sorted(known))
        near = suggestion(task, list(known))
        raise ConfigError([f"there is no task {task!r}; there are {names}{near}"])
    try:
        return cast(ModuleType, known[task].load())
    except ImportError as error:
        named = f"the task {task!r} ({known[task].value})"
        raise ConfigError([f"{named} cannot be imported: {error}"]) from error
