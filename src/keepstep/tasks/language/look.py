"""What of the machine does not fit a language config: its data, its model's folder, its library.

Looks only; needs no torch. What it finds would end the run at its start.
"""

from collections.abc import Iterator
from pathlib import Path

from keepstep.config.surroundings import folder_fault
from keepstep.errors import DataError
from keepstep.tasks.language import library
from keepstep.tasks.language.config import LanguageConfig
from keepstep.tasks.language.prepare import python_stdlib_folder
from keepstep.tasks.language.tokens import DESCRIPTION_NAME, measure_tokens

MISSING_LIBRARY = "the language task needs transformers and tokenizers, which are not installed"


def faults(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    """Yield what does not fit, each with the path that names it."""
    if not library.is_installed():
        yield "task", MISSING_LIBRARY
    if config.model.pretrained:
        folder = Path(config.model.pretrained).expanduser()
        if not (folder / "config.json").is_file():
            yield "model.pretrained", f"{folder} holds no config.json"
    yield from _data(config)


def _data(config: LanguageConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    folder = Path(data.source).expanduser()
    if data.source == "python-stdlib":
        cache = Path(data.cache or "~/.cache/keepstep").expanduser()
        if fault := folder_fault(cache):
            yield "data.cache", fault
            return
        folder = python_stdlib_folder(
            cache,
            vocab_size=data.vocab_size,
            valid_share=data.valid_share,
            megabytes=data.megabytes,
        )
        if not (folder / DESCRIPTION_NAME).is_file():
            # It is made on first use; only a very short text has a smaller vocabulary.
            yield from _vocabulary(config, data.vocab_size)
            return
    try:
        vocab_size, counts = measure_tokens(folder)
    except DataError as error:
        yield "data.source", f"{error.message}. {error.hint}".removesuffix(". ")
        return
    except OSError as error:
        yield "data.source", f"{folder} cannot be read: {error.strerror}"
        return
    yield from _vocabulary(config, vocab_size)
    wanted = (("train", config.train.global_batch, "train.global_batch"),
              ("valid", 1, "data.sequence_length"))  # fmt: skip
    for name, needed, path in wanted:
        samples = max(0, counts[name] - 1) // data.sequence_length
        if samples < needed:
            yield (
                path,
                f"the part {name!r} of {folder} has {counts[name]:,} tokens, which is {samples}"
                f" samples of {data.sequence_length}; at least {needed} are needed",
            )


def _vocabulary(config: LanguageConfig, vocab_size: int) -> Iterator[tuple[str, str]]:
    size = config.model.settings.get("vocab_size")
    if isinstance(size, int) and not config.model.pretrained and size < vocab_size:
        yield (
            "model.vocab_size",
            f"{size:,} is less than the data's vocabulary of {vocab_size:,}; leave it out, or"
            " raise it",
        )
