"""The model of the language task: any decoder of `transformers`."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keepstep.errors import NotFound, UsageError
from keepstep.tasks.language.config import ModelConfig


def build_decoder(
    config: ModelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    activation_checkpointing: bool = False,
) -> torch.nn.Module:
    """Return the decoder: input ids (batch, token) to logits (batch, token, vocabulary).

    Randomly initialised from the current random numbers, or read from a local folder. Raises
    UsageError where the library refuses the settings or the vocabulary is too small.
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
    model.config.use_cache = False
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    result: torch.nn.Module = model
    return result


def _initial(config: ModelConfig, vocab_size: int, sequence_length: int) -> Any:
    settings = {"vocab_size": vocab_size, **config.settings}
    try:
        library_config = AutoConfig.for_model(config.architecture, **settings)
        if getattr(library_config, "max_position_embeddings", sequence_length) < sequence_length:
            raise ValueError(
                f"max_position_embeddings is {library_config.max_position_embeddings}, less than"
                f" data.sequence_length ({sequence_length})"
            )
        build: Any = AutoModelForCausalLM.from_config
        return build(library_config, attn_implementation=config.attention)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise UsageError(
            f"transformers cannot build the model {config.architecture!r}: {error}",
            hint="Look at the [model] section; its keys are those of that library's config.",
        ) from error


def _pretrained(config: ModelConfig) -> Any:
    folder = Path(config.pretrained).expanduser()
    if not (folder / "config.json").is_file():
        raise NotFound(f"model.pretrained: {folder} holds no config.json")
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation=config.attention,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            **config.settings,
        )
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {error}") from error
