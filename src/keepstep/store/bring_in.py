"""Weights from files of others into a checkpoint: safetensors, Hugging Face, `.pth`, DCP.

Guarantees: no file that is read here can run code, lead out of its folder, or have memory
allocated for more than it holds. What may be a pickle is read by `store/export.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import CheckpointDamaged, NotFound, UsageError
from keepstep.store.export import DCP_INDEX, plain_name, read_dcp, read_pth
from keepstep.store.regular import opened

_WEIGHTS_NAMES = ("model", "state_dict", "model_state_dict")
_HF_FILE, _HF_INDEX = "model.safetensors", "model.safetensors.index.json"


def read_weights(source: Path, *, key: str = "") -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights by name, and the names of what the source holds besides.

    ``key``: where they are in a source that holds more; looked for under the usual names if empty.
    """
    if not source.exists():
        raise NotFound(f"there is no {source}")
    if source.is_dir():
        if (source / DCP_INDEX).is_file():
            return _chosen(read_dcp(source), key, source)
        return _chosen(_read_hugging_face(source), key, source)
    if source.suffix == ".safetensors":
        return _chosen(_read_safetensors(source), key, source)
    return _chosen(read_pth(source), key, source)


def _chosen(
    found: Mapping[str, Any], key: str, source: Path
) -> tuple[dict[str, torch.Tensor], list[str]]:
    keys = [key] if key else [name for name in _WEIGHTS_NAMES if name in found]
    if key and key not in found:
        raise UsageError(f"{source} holds no {key!r}; it holds {sorted(map(str, found))}")
    weights, others = found, list[str]()
    if keys and isinstance(found[keys[0]], Mapping):
        weights, others = found[keys[0]], [str(name) for name in found if name != keys[0]]
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            raise UsageError(
                f"{source} is no table of tensors: {name!r} is a {type(value).__name__}",
                hint=f"Say where the weights are with --key; there are {sorted(map(str, found))}.",
            )
    if not weights:
        raise UsageError(f"{source} holds no weights")
    return {name: value.detach() for name, value in weights.items()}, others


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # It opens the file itself.
    opened(path).close()
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointDamaged(f"{path} is no whole safetensors file: {error}") from error


def _read_hugging_face(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / _HF_FILE).is_file():
        return _read_safetensors(folder / _HF_FILE)
    index = folder / _HF_INDEX
    if not index.is_file():
        raise UsageError(
            f"{folder} holds neither {_HF_FILE}, nor {_HF_INDEX}, nor a DCP folder's {DCP_INDEX}",
            hint="Weights in pytorch_model.bin are imported by the name of that file.",
        )
    try:
        with opened(index) as file:
            table = dict(json.load(file)["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"{index} is malformed: {error!r}") from error
    found: dict[str, torch.Tensor] = {}
    for name in sorted({plain_name(name, index) for name in table.values()}):
        found.update(_read_safetensors(folder / name))
    missing = sorted(set(table) - set(found))
    if missing:
        raise CheckpointDamaged(f"{index} names tensors that no file holds: {missing}")
    return found
