"""Text to tokens: the tokenizer, the split, the built-in source `python-stdlib`."""

import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from keepstep.errors import DataError
from keepstep.store.disk import Disk
from keepstep.store.manifest import digest_of
from keepstep.tasks.language.tokens import DESCRIPTION_NAME, TOKENIZER_NAME, Tokens, write_tokens

END_OF_TEXT = "<|endoftext|>"
_BLOCK_CHARACTERS_MIN = 64
_BLOCK_CHARACTERS_MAX = 1 << 14
_STDLIB_PACKAGES_LEFT_OUT = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib"}
)


def prepare(
    texts: Sequence[str],
    folder: Path,
    *,
    vocab_size: int,
    valid_share: float,
    tokenizer: Path | None = None,
) -> None:
    """Write the tokens of `texts` into `folder`, in order, the held-out part from all over them.

    The tokenizer is loaded from `tokenizer` (a folder or a tokenizer.json), or else a byte-level
    BPE of `vocab_size` is trained on the texts.
    """
    if not any(texts):
        raise DataError("there is no text to prepare")
    encoder = _trained(texts, vocab_size) if tokenizer is None else _loaded(tokenizer)
    parts: dict[str, list[Tokens]] = {"train": [], "valid": []}
    end = encoder.token_to_id(END_OF_TEXT)
    for index, (block, ends_text) in enumerate(_blocks(texts)):
        ids = encoder.encode(block, add_special_tokens=False).ids
        if ends_text and end is not None:
            ids.append(end)
        part = "valid" if _is_held_out(index, valid_share) else "train"
        parts[part].append(np.asarray(ids, dtype=np.uint32))
    empty = np.zeros(0, dtype=np.uint32)
    write_tokens(
        folder,
        {name: np.concatenate(found) if found else empty for name, found in parts.items()},
        vocab_size=encoder.get_vocab_size(),
        tokenizer=encoder.to_str(),
        disk=Disk(),
    )


def prepare_python_stdlib(
    cache: Path, *, vocab_size: int, valid_share: float, megabytes: int
) -> Path:
    """Return the prepared folder of the running Python's library, making it on first use."""
    folder = python_stdlib_folder(
        cache, vocab_size=vocab_size, valid_share=valid_share, megabytes=megabytes
    )
    if not (folder / DESCRIPTION_NAME).is_file():
        texts = _stdlib_texts(megabytes * 1_000_000)
        prepare(texts, folder, vocab_size=vocab_size, valid_share=valid_share)
    return folder


def python_stdlib_folder(
    cache: Path, *, vocab_size: int, valid_share: float, megabytes: int
) -> Path:
    """Return where the prepared folder of the running Python's library is, or will be."""
    recipe = f"{platform.python_version()}/{vocab_size}/{valid_share!r}/{megabytes}/2"
    name = f"python-stdlib-{platform.python_version()}-{digest_of(recipe.encode())[:12]}"
    return cache / name


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Return the texts of files; DataError names the one that cannot be read."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"there is no text file {path}") from error
        except (UnicodeDecodeError, OSError) as error:
            raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return texts


def _stdlib_texts(characters: int) -> list[str]:
    """Return the library's modules in the order of a hash of their names, up to a size.

    The hash mixes the packages, so that a part of the text has a bit of everything.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _STDLIB_PACKAGES_LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    texts, total = [], 0
    for name in sorted(names, key=lambda name: digest_of(name.as_posix().encode())):
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        total += len(text)
        if total >= characters:
            break
    if not texts:
        raise DataError(
            f"the source text of Python's library is not in {root}",
            hint="Prepare text files of your own with `keepstep language prepare`.",
        )
    return texts


def _trained(texts: Sequence[str], vocab_size: int):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < smallest:
        raise DataError(f"a byte-level vocabulary has at least {smallest} tokens, not {vocab_size}")
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    encoder.train_from_iterator((block for block, _ in _blocks(texts)), trainer)
    return encoder


def load_tokenizer(path: Path):  # type: ignore[no-untyped-def]
    """Return the tokenizer of a file, or of a folder; DataError where there is none."""
    from tokenizers import Tokenizer

    file = path / TOKENIZER_NAME if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"there is no tokenizer in {path}: no file {TOKENIZER_NAME}")
    try:
        return Tokenizer.from_file(str(file))
    # The library raises nothing more specific.
    except Exception as error:
        raise DataError(f"{file} is not a tokenizer: {error}") from error


def _loaded(path: Path):  # type: ignore[no-untyped-def]
    encoder = load_tokenizer(path)
    # Many published ones cut at their model's length; text would be lost without a word.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _blocks(texts: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the texts in blocks, each with whether it ends its text.

    A block is what is held out or not. There are hundreds of them also in a short text, so that
    the held-out share comes from all over it.
    """
    total = sum(len(text) for text in texts)
    size = max(_BLOCK_CHARACTERS_MIN, min(_BLOCK_CHARACTERS_MAX, total // 256))
    for text in texts:
        for start in range(0, len(text), size):
            yield text[start : start + size], start + size >= len(text)


def _is_held_out(index: int, share: float) -> bool:
    """Tell whether a block is held out: evenly spread, the share exact to one block."""
    return int((index + 1) * share) > int(index * share)
