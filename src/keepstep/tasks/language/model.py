"""The model of the language task: any decoder of `transformers`."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from keepstep.config.explain import suggestion
from keepstep.errors import UsageError
from keepstep.tasks.language.config import ModelConfig

_REFUSALS = (
    ArithmeticError,
    AssertionError,
    ImportError,
    LookupError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
_ATTENTION = re.compile("attn|attention")
_OLDER_KEYS = ("rope_theta", "partial_rotary_factor", "torch_dtype")
"""What the library takes and puts under another name."""


def build_decoder(
    config: ModelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    activation_checkpointing: bool = False,
    tp: int = 1,
) -> torch.nn.Module:
    """Return the decoder: input ids (batch, token) to logits (batch, token, vocabulary).

    Randomly initialised from the current random numbers, or read from a local folder. Raises
    UsageError where the library refuses the settings, the vocabulary is too small, or ``tp`` ranks
    cannot split the attention heads between them.
    """
    model = (
        _pretrained(config) if config.pretrained else _initial(config, vocab_size, sequence_length)
    )
    size = model.get_input_embeddings().num_embeddings
    if size < vocab_size:
        raise UsageError(
            f"the model's vocabulary has {size:,} tokens, the data's has {vocab_size:,}",
            hint="Leave model.vocab_size out, or raise it.",
        )
    _require_heads_for(model, tp)
    model.config.use_cache = False
    if activation_checkpointing:
        _recompute_activations(model)
    result: torch.nn.Module = model
    return result


def _require_heads_for(model: Any, tp: int) -> None:
    """Refuse heads that would be cut in two, where the model's plan has each rank take some."""
    split = any(
        style == "colwise" and _ATTENTION.search(name)
        for name, style in (model.tp_plan or {}).items()
    )
    settings = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(settings, key, None)
        if split and isinstance(heads, int) and heads % tp:
            raise UsageError(
                f"distributed.tp ({tp}) does not divide model.{key} ({heads})",
                hint=f"Change model.{key}, or distributed.tp.",
            )


def router_loss_weight(model: Any) -> float:
    """Return the weight of the loss that keeps a mixture's experts in balance; 0 without one."""
    return float(getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0))


def _recompute_activations(model: Any) -> None:
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        # The name that it had in the first releases of transformers 5.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _initial(config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
    settings = {"vocab_size": vocab_size, **config.settings}
    with _refusals_explained(config.architecture):
        _require_known(config, AutoConfig.for_model(config.architecture))
        library_config = AutoConfig.for_model(config.architecture, **settings)
        if getattr(library_config, "max_position_embeddings", sequence_length) < sequence_length:
            raise ValueError(
                f"max_position_embeddings is {library_config.max_position_embeddings}, less than"
                f" data.sequence_length ({sequence_length})"
            )
        _make_trainable(library_config, config.settings)
        build: Any = AutoModelForCausalLM.from_config
        return build(library_config, attn_implementation=config.attention)


def _require_known(config: ModelConfig, library_config: Any) -> None:
    """Refuse keys that the library would store and never read: a typing error trains silently."""
    known = set(library_config.to_dict()) | set(type(library_config).attribute_map)
    for key in config.settings:
        if key not in known and not hasattr(library_config, key) and key not in _OLDER_KEYS:
            near = suggestion(key, sorted(known))
            raise ValueError(f"its config has no key {key!r}{near}")


def _make_trainable(library_config: Any, settings: Mapping[str, Any]) -> None:
    """Set what the library leaves off, where the settings do not say otherwise."""
    # Encoders that can serve as decoders would look at the tokens that they are to predict.
    if "is_decoder" not in settings and getattr(library_config, "is_decoder", None) is False:
        library_config.is_decoder = True
    # Without its loss for the balance of the experts, a mixture uses a few of them.
    if "output_router_logits" not in settings and hasattr(library_config, "output_router_logits"):
        library_config.output_router_logits = True


@contextmanager
def _refusals_explained(architecture: str) -> Iterator[None]:
    """Turn what the library raises for settings that it cannot build into a UsageError."""
    try:
        yield
    except (*_REFUSALS, RuntimeError) as error:
        raise UsageError(
            f"transformers cannot build the model {architecture!r}:"
            f" {type(error).__name__}: {error}",
            hint="Look at the [model] section; its keys are those of that library's config.",
        ) from error


def _pretrained(config: ModelConfig) -> Any:
    folder = Path(config.pretrained).expanduser()
    if not (folder / "config.json").is_file():
        raise UsageError(f"model.pretrained: {folder} holds no config.json")
    try:
        library_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _require_known(config, library_config)
        for key, value in config.settings.items():
            setattr(library_config, key, value)
        _make_trainable(library_config, config.settings)
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=library_config,
            attn_implementation=config.attention,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
        )
    except (*_REFUSALS, OSError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {error}") from error
