"""The language task: decoder-only language models on text. Importing this imports no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.config.explain import Problem, suggestion
from keepstep.config.schema import Config
from keepstep.errors import UsageError
from keepstep.store import Checkpoint
from keepstep.tasks.language import library
from keepstep.tasks.language.config import METRICS, LanguageConfig, ModelConfig

if TYPE_CHECKING:
    from keepstep.tasks.task import DataShare, Task

CONFIG = LanguageConfig

_AT_LEAST_ONE = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "n_embd", "n_head", "n_positions",
)  # fmt: skip
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
        from keepstep.tasks.language.look import MISSING_LIBRARY

        raise UsageError(
            MISSING_LIBRARY,
            hint="Install them with `pip install 'keepstep[language]'`.",
        )


def check(config: Config) -> list[Problem]:
    """Return what of the task's own sections cannot be meant."""
    assert isinstance(config, LanguageConfig), "the registry loads this task's own config"
    found = [*_check_evaluation(config), *_check_data(config), *_check_model(config)]
    return [Problem(path=path, message=message) for path, message in found]


def look(config: Config) -> list[Problem]:
    """Return what of the machine does not fit the task's own sections."""
    assert isinstance(config, LanguageConfig), "the registry loads this task's own config"
    # Here, because a config that is only shown needs no numpy.
    from keepstep.tasks.language.look import faults

    return [Problem(path=path, message=message) for path, message in faults(config)]


def _check_data(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    bounds = (
        ("vocab_size", 257, 2**31 - 1),
        ("megabytes", 1, 2**31 - 1),
        ("sequence_length", 1, 2**31 - 1),
        ("workers", 0, 4096),
    )
    for name, least, most in bounds:
        value = getattr(data, name)
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most:,}"
            yield f"data.{name}", f"must be {limit}, not {value}"
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
        if isinstance(positions, int) and 1 <= positions < length:
            yield f"model.{key}", f"{positions} is less than data.sequence_length ({length})"
    for key in _AT_LEAST_ONE:
        value = model.settings.get(key)
        if type(value) is int and value < 1:
            yield f"model.{key}", f"must be at least 1, not {value}"
    if model.pretrained or not library.is_installed():
        return
    names = library.decoder_names()
    if names and model.architecture not in names:
        near = suggestion(model.architecture, names)
        message = f"transformers has no decoder {model.architecture!r}{near}"
        yield "model.architecture", message
        return
    keys = library.config_keys(model.architecture)
    unknown = [key for key in model.settings if keys is not None and key not in keys]
    for key in unknown:
        own = ("architecture", "pretrained", "attention")
        near = suggestion(key, [*sorted(keys or ()), *own])
        if key in library.OURS:
            near = f"; it is `model.{library.OURS[key]}` here"
        yield f"model.{key}", f"the config of {model.architecture} has no such key{near}"
    if not unknown:
        # Not beside a misspelt key: the library's default would be judged in its place.
        yield from _check_heads(model)


def _check_heads(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Hold the numbers of heads to one another, where the library's text says how."""
    usual = library.defaults(model.architecture)
    if usual is None:
        return
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    size, heads, shared = (model.settings.get(name, usual.get(name)) for name in names)
    if type(heads) is not int or heads < 1:
        return
    if (
        type(size) is int
        and size >= 1
        and size % heads
        and library.heads_divide(model.architecture)
    ):
        path = "model.num_attention_heads"
        yield path, f"{heads} does not divide model.hidden_size ({size})"
    if type(shared) is int and shared >= 1 and heads % shared:
        path = "model.num_key_value_heads"
        yield path, f"{shared} does not divide model.num_attention_heads ({heads})"
