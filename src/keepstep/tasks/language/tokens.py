"""Token files: raw numbers in one file, and a JSON file beside it that says what they are.

    FOLDER/
    ├── train.bin, valid.bin      the tokens, in the type that the JSON names
    ├── tokens.json               type, vocabulary, number of tokens and digest of each part
    └── tokenizer.json            the tokenizer, where there is one

Guarantees: a folder is whole or absent (it is renamed into place); a file is never read as
another type than it was written in; a token beyond the vocabulary is found before training.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.errors import DataError
from keepstep.store.disk import Disk
from keepstep.store.layout import temporary_name
from keepstep.store.manifest import digest_of

DESCRIPTION_NAME = "tokens.json"
TOKENIZER_NAME = "tokenizer.json"
PARTS = ("train", "valid")
_FORMAT = "keepstep-tokens-1"
_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_VERIFIED_BYTES_MAX = 64 << 20
"""Larger files are not read as a whole at each start: a slow disk takes a second for this much."""

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """A prepared folder, opened: tokens by part (memory-mapped), vocabulary size, digest."""

    folder: Path
    vocab_size: int
    digest: str
    parts: Mapping[str, Tokens]


def open_tokens(folder: Path) -> TokenSet:
    """Open a prepared folder; DataError says what of it is wrong, or that it is missing."""
    with _described(folder) as about:
        parts = {name: _open_part(folder, name, about) for name in PARTS}
        digest = digest_of("".join(about["parts"][name]["digest"] for name in PARTS).encode())
        return TokenSet(
            folder=folder, vocab_size=int(about["vocab_size"]), digest=digest, parts=parts
        )


def measure_tokens(folder: Path) -> tuple[int, dict[str, int]]:
    """Return the vocabulary's size and the tokens of each part, without reading any token.

    DataError says what of the folder is wrong, as far as its description and file sizes tell.
    """
    with _described(folder) as about:
        return int(about["vocab_size"]), {
            name: _require_part(folder, name, about)[1] for name in PARTS
        }


@contextmanager
def _described(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Give the description of a prepared folder; what does not fit it becomes a DataError."""
    path = folder / DESCRIPTION_NAME
    if not path.is_file():
        raise DataError(
            f"{folder} is not a folder of prepared tokens: it has no {DESCRIPTION_NAME}",
            hint="Make one with `keepstep language prepare FILES... -o FOLDER`.",
        )
    try:
        about = json.loads(path.read_bytes())
        if about["format"] != _FORMAT:
            raise DataError(f"{path}: the format is {about['format']!r}, not {_FORMAT!r}")
        yield about
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is malformed: {error!r}") from error


def write_tokens(
    folder: Path, parts: Mapping[str, Tokens], *, vocab_size: int, tokenizer: str, disk: Disk
) -> None:
    """Write a prepared folder, whole or not at all; one that another process made first stays."""
    for name in PARTS:
        check_vocabulary(parts[name], vocab_size, where=name)
    type_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    disk.make_folders(folder.parent)
    staging = folder.with_name(temporary_name(folder.name))
    disk.make_folder(staging)
    try:
        about: dict[str, Any] = {
            "format": _FORMAT,
            "type": type_name,
            "vocab_size": vocab_size,
            "parts": {},
        }
        for name in PARTS:
            data = np.ascontiguousarray(parts[name], dtype=_TYPES[type_name])
            view = memoryview(data.data).cast("B") if data.size else memoryview(b"")
            disk.write_new_file(staging / f"{name}.bin", [view])
            about["parts"][name] = {"count": int(data.size), "digest": digest_of(view)}
        disk.write_new_file(staging / TOKENIZER_NAME, [tokenizer.encode()])
        text = json.dumps(about, indent=2) + "\n"
        disk.write_new_file(staging / DESCRIPTION_NAME, [text.encode()])
        disk.sync_folder(staging)
        disk.rename(staging, folder)
    except OSError as error:
        disk.discard(staging, because=error)
        # A rename onto a folder with content fails: somebody else was faster, with the same text.
        if (folder / DESCRIPTION_NAME).is_file():
            return
        raise
    disk.sync_folder(folder.parent)


def check_vocabulary(tokens: Tokens, vocab_size: int, *, where: str) -> None:
    """Raise DataError where a token is not in the vocabulary."""
    largest = int(tokens.max()) if tokens.size else -1
    if largest >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{where}: token {place:,} is {int(tokens[place])}, beyond the vocabulary of"
            f" {vocab_size:,}",
            hint="Raise the vocabulary size, or prepare the data with the right tokenizer.",
        )


def _require_part(folder: Path, name: str, about: Mapping[str, Any]) -> tuple[Path, int]:
    """Return the file of a part and its number of tokens; DataError where its size is another."""
    type_name, count = about["type"], int(about["parts"][name]["count"])
    if type_name not in _TYPES:
        raise DataError(
            f"{folder / DESCRIPTION_NAME}: the type is {type_name!r}; it must be one of"
            f" {', '.join(_TYPES)}"
        )
    path = folder / f"{name}.bin"
    if not path.is_file():
        raise DataError(f"{path} is missing")
    size, expected = path.stat().st_size, count * _TYPES[type_name].itemsize
    if size != expected:
        raise DataError(
            f"{path} is {size:,} bytes; {count:,} tokens of type {type_name} are {expected:,}",
            hint="The file was cut short, or the type in tokens.json is wrong.",
        )
    return path, count


def _open_part(folder: Path, name: str, about: Mapping[str, Any]) -> Tokens:
    path, count = _require_part(folder, name, about)
    kind = _TYPES[about["type"]]
    if count == 0:
        return np.zeros(0, dtype=kind)
    tokens = np.memmap(path, dtype=kind, mode="r")
    if (
        tokens.nbytes <= _VERIFIED_BYTES_MAX
        and digest_of(tokens.data) != about["parts"][name]["digest"]
    ):
        raise DataError(
            f"{path} is not what was written: its digest is another",
            hint="Prepare the data again, into a new folder.",
        )
    return tokens
