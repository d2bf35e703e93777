"""What a loader makes of a folder: the real loaders of the formats, or a command of the user's.

A judge returns what was loaded as a text that is the same for the same state, None where the
folder holds nothing to load, and raises `Unreadable` where it holds something that cannot be.
"""

import logging
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from keepstep.errors import UsageError

Judge: TypeAlias = Callable[[Path], str | None]

_CHECK_SECONDS_MAX = 120


class Unreadable(Exception):
    """There is something, and it cannot be loaded."""


def built_in(name: str) -> Judge:
    """Return the judge of a format; UsageError lists those that there are."""
    judges: dict[str, Judge] = {
        "keepstep": _keepstep,
        "torch": lambda folder: _newest(folder, (".pt", ".pth", ".ckpt", ".bin"), _torch_file),
        "lightning": lambda folder: _newest(folder, (".ckpt",), _torch_file),
        "safetensors": lambda folder: _newest(folder, (".safetensors",), _safetensors_file),
        "dcp": _dcp,
        "transformers": _transformers,
    }
    if name not in judges:
        raise UsageError(
            f"there is no judge {name!r}; there are {', '.join(judges)}",
            hint="For anything else, --check 'COMMAND {dir}' asks a command of yours.",
        )
    return _guarded(judges[name])


def by_command(text: str) -> Judge:
    """Return a judge that asks a command: code 0 and what it prints, which says what was loaded.

    ``text``: the command, in which `{dir}` stands for the folder. Nothing printed: nothing found.
    """

    def judge(folder: Path) -> str | None:
        words = [word.replace("{dir}", str(folder)) for word in shlex.split(text)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_CHECK_SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unreadable(f"not done after {_CHECK_SECONDS_MAX} s") from error
        if done.returncode != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise Unreadable(f"code {done.returncode}: {' '.join(last)}")
        return done.stdout.strip() or None

    return judge


def digest(value: Any) -> str:
    """Return the digest of a loaded state: tensors by type, shape and bytes, the rest by value."""
    hasher = xxhash.xxh3_128()
    for part in _parts(value):
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    import torch

    from keepstep.store.tensors import bytes_of

    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield bytes_of(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"key {key!r}".encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


def _guarded(judge: Judge) -> Judge:
    def guarded(folder: Path) -> str | None:
        # Loaders log at length what fails, once a state.
        logging.disable()
        try:
            return judge(folder)
        # Whatever a loader raises is its verdict on the folder.
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            # What names the folder of this one state would be another fault in each.
            text = " ".join(first).replace(str(folder), "").lstrip("/")
            raise Unreadable(f"{type(error).__name__}: {text}") from error
        finally:
            logging.disable(logging.NOTSET)

    return guarded


def _newest(folder: Path, endings: tuple[str, ...], load: Callable[[Path], Any]) -> str | None:
    """Load the file that a script takes which goes by names: the last, numbers as numbers."""
    files = [path for path in folder.rglob("*") if path.suffix in endings and path.is_file()]
    if not files:
        return None
    path = max(files, key=lambda path: _natural(str(path.relative_to(folder))))
    return f"{path.relative_to(folder)} {digest(load(path))}"


def _natural(name: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def _torch_file(path: Path) -> Any:
    from keepstep.store.archive import load_archive

    return load_archive(str(path), path, map_location="cpu")


def _safetensors_file(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path)


def _keepstep(folder: Path) -> str | None:
    """Restore as the next session would, which verifies every byte."""
    from keepstep.store import Store
    from keepstep.store.layout import CHECKPOINTS_NAME

    inner = folder / CHECKPOINTS_NAME
    with Store(inner if inner.is_dir() else folder) as store:
        restored = store.restore()
    if restored is None:
        return None
    return f"step {restored.manifest.step} {digest(restored.state)}"


def _dcp(folder: Path) -> str | None:
    """Load the last folder with a `.metadata`, which DCP takes for a complete checkpoint."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found = [path.parent for path in folder.rglob(".metadata")]
    if not found:
        return None
    newest = max(found, key=lambda path: _natural(str(path.relative_to(folder))))
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "state.pt"
        try:
            dcp_to_torch_save(newest, file)
        # Not an Exception to Python.
        except CheckpointException as error:
            failure, _ = next(iter(error.failures.values()))
            raise failure from error
        return f"{newest.relative_to(folder)} {digest(_torch_file(file))}"


def _transformers(folder: Path) -> str | None:
    """Load what `Trainer.train(resume_from_checkpoint=True)` takes: the last `checkpoint-N`."""
    found = [path for path in folder.glob("**/checkpoint-*") if path.is_dir()]
    if not found:
        return None
    newest = max(found, key=lambda path: _natural(path.name))
    state: dict[str, Any] = {}
    for path in sorted(newest.iterdir()):
        if path.suffix == ".safetensors":
            state[path.name] = _safetensors_file(path)
        elif path.suffix in (".pt", ".bin"):
            state[path.name] = _torch_file(path)
        elif path.name == "trainer_state.json":
            state[path.name] = path.read_text()
    if "trainer_state.json" not in state:
        raise Unreadable(f"{newest.name} has no trainer_state.json")
    return f"{newest.name} {digest(state)}"
