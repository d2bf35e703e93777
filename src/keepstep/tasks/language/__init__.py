"""The language task: decoder-only language models on text. Importing this imports no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.config.explain import Problem, suggestion
from keepstep.config.schema import Config
from keepstep.errors import UsageError
from keepstep.store import Checkpoint
from keepstep.tasks.language import library
from keepstep.tasks.language.config import METRICS, LanguageConfig

if TYPE_CHECKING:
    from keepstep.tasks.task import DataShare, Task

CONFIG = LanguageConfig

_POSITION_KEYS = ("max_position_embeddings", "n_positions")


def build(config: Config, share: "DataShare") -> "Task":
    """Build the task; this imports torch and transformers."""
    assert isinstance(config, LanguageConfig), "the registry loads this task's own config"
    _require_library()
    from keepstep.tasks.language.task import LanguageTask

    return LanguageTask(config, share)


def export(
    config: Config, weights: Mapping[str, Any], entry: Checkpoint, folder: Path
) -> list[str]:
    """Fill a folder that `transformers` loads; this imports torch and transformers."""
    assert isinstance(config, LanguageConfig), "the registry loads this task's own config"
    _require_library()
    from keepstep.tasks.language.export import write_hugging_face

    return write_hugging_face(config, weights, entry, folder)


def _require_library() -> None:
    if not library.is_installed():
        raise UsageError(
            "the language task needs transformers and tokenizers, which are not installed",
            hint="Install them with `pip install 'keepstep[language]'`.",
        )


def check(config: Config) -> list[Problem]:
    """Return what of the task's own sections cannot be meant."""
    assert isinstance(config, LanguageConfig), "the registry loads this task's own config"
    found = [*_check_evaluation(config), *_check_data(config), *_check_model(config)]
    return [Problem(path=path, message=message) for path, message in found]


def _check_data(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    for name, least in (("vocab_size", 257), ("megabytes", 1), ("sequence_length", 1)):
        if getattr(data, name) < least:
            yield f"data.{name}", f"must be at least {least}, not {getattr(data, name)}"
    if data.workers < 0:
        yield "data.workers", f"must be at least 0, not {data.workers}"
    if not 0 < data.valid_share < 1:
        yield "data.valid_share", f"must be between 0 and 1, not {data.valid_share}"


def _check_evaluation(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    metric = config.evaluation.metric
    if metric not in METRICS:
        yield "evaluation.metric", f"must be {' or '.join(METRICS)}, not {metric!r}"


def _check_model(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    model, length = config.model, config.data.sequence_length
    for key in _POSITION_KEYS:
        positions = model.settings.get(key)
        if isinstance(positions, int) and positions < length:
            yield f"model.{key}", f"{positions} is less than data.sequence_length ({length})"
    if model.pretrained or not library.is_installed():
        return
    names = library.decoder_names()
    if names and model.architecture not in names:
        near = suggestion(model.architecture, names)
        message = f"transformers has no decoder {model.architecture!r}{near}"
        yield "model.architecture", message
        return
    keys = library.config_keys(model.architecture)
    for key in model.settings:
        if keys is not None and key not in keys:
            own = ("architecture", "pretrained", "attention")
            near = suggestion(key, [*sorted(keys), *own])
            if key in library.OURS:
                near = f"; it is `model.{library.OURS[key]}` here"
            yield f"model.{key}", f"the config of {model.architecture} has no such key{near}"
