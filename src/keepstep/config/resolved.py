"""What follows from a config: its folders, its identity, its text as TOML."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from keepstep.config.schema import MUST_MATCH, CheckpointConfig, Config
from keepstep.config.validate import CATCH_ALL
from keepstep.errors import UsageError

RUN_TOML = "run.toml"


def run_folder(config: Config) -> Path:
    """Return the folder of the run."""
    if config.run.dir:
        return Path(config.run.dir).expanduser()
    if config.checkpoint.dir:
        return Path(config.checkpoint.dir).expanduser()
    return Path("runs") / config.run.name


def track_folder(config: Config) -> Path:
    """Return the folder in which trackers keep files of their own."""
    return Path(config.track.dir).expanduser() if config.track.dir else run_folder(config)


def checkpoint_folder(config: Config) -> Path:
    """Return the folder of the checkpoints; the run's own where only that one was given."""
    if config.checkpoint.dir:
        return Path(config.checkpoint.dir).expanduser()
    return run_folder(config) / "checkpoints"


def recorded_retention(run: Path) -> dict[str, int] | None:
    """Return the numbers of `checkpoint.keep_*` that a run's `run.toml` holds, or None.

    One that is not in it, written by an older version, has its default.
    """
    section = _recorded_checkpoint(run)
    if section is None:
        return None
    found = {}
    for item in dataclasses.fields(CheckpointConfig):
        if item.name.startswith("keep_"):
            value = section.get(item.name, item.default)
            if type(value) is not int or value < 0:
                raise UsageError(f"{run / RUN_TOML}: checkpoint.{item.name} is {value!r}")
            found[item.name] = value
    return found


def recorded_checkpoint_folder(run: Path) -> Path | None:
    """Return the folder that a run's `run.toml` names for its checkpoints, or None."""
    name = (_recorded_checkpoint(run) or {}).get("dir")
    return Path(name).expanduser() if isinstance(name, str) and name else None


def _recorded_checkpoint(run: Path) -> dict[str, Any] | None:
    """Return the section `checkpoint` of a run's `run.toml`; None where there is no such file."""
    path = run / RUN_TOML
    if not path.is_file():
        return None
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("checkpoint", {})
    except ValueError as error:
        raise UsageError(f"{path}: this is not valid TOML: {error}") from error
    return section if isinstance(section, dict) else {}


def must_match(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of every field that must be the same when a run is continued.

    The free keys of a section stand one by one, so that a difference names the key.
    """
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            found.update(must_match(value, f"{prefix}{item.name}."))
        elif item.metadata.get(MUST_MATCH) and item.name == CATCH_ALL:
            found.update({f"{prefix}{name}": entry for name, entry in value.items()})
        elif item.metadata.get(MUST_MATCH):
            found[f"{prefix}{item.name}"] = value
    return found


def dump_toml(config: Config) -> str:
    """Return a config as TOML that loads to an equal config."""
    lines: list[str] = []
    _dump_section(config, "", lines)
    return "\n".join(lines).strip() + "\n"


def _dump_section(section: Any, name: str, lines: list[str]) -> None:
    if name:
        lines.extend(["", f"[{name}]"])
    inner = []
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            inner.append((f"{name}.{item.name}" if name else item.name, value))
        elif item.name == CATCH_ALL:
            lines.extend(f"{_key(key)} = {_toml(entry)}" for key, entry in value.items())
        elif value is not None:
            lines.append(f"{item.name} = {_toml(value)}")
    for path, value in inner:
        _dump_section(value, path, lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    raise UsageError(f"a config cannot hold {value!r}")


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
    return name if bare else _quoted(name)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped and JSON does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
