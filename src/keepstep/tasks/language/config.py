"""The sections that a language run adds to the config."""

from dataclasses import dataclass, field
from typing import Any

from keepstep.config.schema import MUST_MATCH, Config, must_match

METRICS = ("valid_loss", "valid_perplexity")
"""What an evaluation measures: nats a token, and e to the power of that."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of `transformers`. Every key of its own config is a key here: hidden_size, ..."""

    architecture: str = must_match("llama")
    """Model type as `transformers` names it: llama, qwen3, gpt2, mixtral, ..."""
    pretrained: str = ""
    """Folder with a pretrained model to start from; empty initialises at random."""
    attention: str = "sdpa"
    """Attention implementation, as `transformers` names it: sdpa, eager, flash_attention_2."""
    settings: dict[str, Any] = field(default_factory=dict, metadata={MUST_MATCH: True})
    """Every other key of the section goes here: that library's own key names (hidden_size, ...)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut into samples."""

    source: str = "python-stdlib"
    """`python-stdlib` (the source text of the running Python's library), or a prepared folder."""
    cache: str = ""
    """Folder for what built-in sources prepare. Empty: `~/.cache/keepstep`."""
    vocab_size: int = must_match(2048)
    """python-stdlib: size of the vocabulary of the tokenizer that is trained on it."""
    megabytes: int = must_match(4)
    """python-stdlib: text to use, in millions of characters; the whole library has about 11."""
    valid_share: float = must_match(0.05)
    """python-stdlib: share of the text that is held out for evaluation."""
    sequence_length: int = must_match(128)
    """Tokens that the model sees in one sample; each sample has one more, as the last target."""
    workers: int = 0
    """Processes that load data ahead; 0: the run itself, fastest where tokens are read quickly.

    The batches do not depend on it.
    """


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(Config):
    """A run of the language task."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
