"""A run's model as a folder that `transformers` loads by itself."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, logging

from keepstep.errors import CheckpointDamaged, DataError, KeepstepError, NotFound
from keepstep.store import Checkpoint
from keepstep.tasks.language.config import LanguageConfig
from keepstep.tasks.language.model import build_decoder
from keepstep.tasks.language.task import data_folder
from keepstep.tasks.language.tokens import TOKENIZER_NAME, open_tokens

_LARGER_THAN_ANY_VOCABULARY = 1 << 20


def write_hugging_face(
    config: LanguageConfig, weights: Mapping[str, torch.Tensor], entry: Checkpoint, folder: Path
) -> list[str]:
    """Fill a new folder with weights, config and tokenizer; return what is to be said of it.

    The data need not be there: the size of the vocabulary is that of the saved embedding.
    """
    # Nothing is computed here, so the run's attention need not be installed.
    config = replace(config, model=replace(config.model, attention="eager"))
    hide_progress: Any = logging.disable_progress_bar
    hide_progress()
    model: Any = build_decoder(
        config.model,
        vocab_size=_vocab_size(config, weights),
        sequence_length=config.data.sequence_length,
    )
    try:
        model.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        raise CheckpointDamaged(
            f"{entry.path} does not hold this model's weights: {error}"
        ) from error
    # It was off because training has no use for it.
    model.config.use_cache = True
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise KeepstepError(
            f"{folder.parent}: the weights could not be written: {error}"
        ) from error
    note = _write_tokenizer(config, entry, folder)
    # The library makes some files for their owner only, whatever the umask is.
    mode = (folder / CONFIG_NAME).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)
    return [note]


def _vocab_size(config: LanguageConfig, weights: Mapping[str, torch.Tensor]) -> int:
    """Return the rows of the saved embedding, found by the name that the model has for it."""
    if config.model.pretrained or "vocab_size" in config.model.settings:
        return 1
    with torch.device("meta"):
        model: Any = build_decoder(
            config.model,
            vocab_size=_LARGER_THAN_ANY_VOCABULARY,
            sequence_length=config.data.sequence_length,
        )
    embedding = model.get_input_embeddings().weight
    names = [name for name, parameter in model.named_parameters() if parameter is embedding]
    if not names or names[0] not in weights:
        raise CheckpointDamaged(f"the checkpoint does not hold this model's embedding: {names}")
    return weights[names[0]].shape[0]


def _write_tokenizer(config: LanguageConfig, entry: Checkpoint, folder: Path) -> str:
    """Add the tokenizer of the run's data, if they are there and are the run's; say which."""
    try:
        tokens = open_tokens(data_folder(config.data))
    except (NotFound, DataError, OSError) as error:
        return f"without a tokenizer: {error}"
    trained_on = entry.manifest.must_match.get("data.digest") if entry.manifest else None
    if trained_on != tokens.digest:
        return f"without a tokenizer: {tokens.folder} does not hold the tokens of this run"
    path = tokens.folder / TOKENIZER_NAME
    if not path.is_file():
        return "without a tokenizer: the data have none"
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=Tokenizer.from_file(str(path)))
    tokenizer.save_pretrained(folder)
    return f"with the tokenizer of {tokens.folder}"
