"""Plain state as JSON, exactly: what goes in comes out, type by type and bit by bit.

Plain are None, bool, int, float (also nan and inf), str, list, tuple and dict with plain keys.
JSON has no tuples, no keys but strings and no nan, so these are written as one-key objects whose
key begins with `$`. A tensor is a reference by name. Nothing here can name a class or run code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.errors import CheckpointDamaged, UnsafeState

_DEPTH_MAX = 200
"""Of JSON; a reader takes two calls a level, of the thousand that Python allows."""
_TUPLE, _FLOAT, _DICT, _TENSOR = "$tuple", "$float", "$dict", "$tensor"


@dataclass(frozen=True)
class TensorReference:
    """Stands in a tree for the tensor of that name."""

    name: str


def encode(value: Any, *, path: str) -> Any:
    """Return `value` as JSON has it; UnsafeState names the path of what cannot be kept."""
    try:
        encoded = _encode(value, path)
    except RecursionError as error:
        raise too_deep(path) from error
    if is_too_deep(encoded):
        raise too_deep(path)
    return encoded


def too_deep(path: str) -> UnsafeState:
    """Return the error of a state that no reader could follow."""
    return UnsafeState(
        f"{path} is nested more than {_DEPTH_MAX} levels deep, or holds itself",
        hint="No checkpoint may hold that: it could not be read back.",
    )


def is_too_deep(encoded: Any) -> bool:
    """Tell whether JSON data are nested deeper than a reader can follow."""
    level = [encoded]
    for _ in range(_DEPTH_MAX):
        tables = [item for item in level if isinstance(item, (dict, list))]
        if not tables:
            return False
        level = [x for t in tables for x in (t.values() if isinstance(t, dict) else t)]
    return True


def _encode(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is TensorReference:
        return {_TENSOR: value.name}
    if kind is list:
        return [_encode(item, f"{path}[{n}]") for n, item in enumerate(value)]
    if kind is tuple:
        return {_TUPLE: [_encode(item, f"{path}[{n}]") for n, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path)
    raise UnsafeState(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint may hold",
        hint="Save tensors and plain values (numbers, strings, lists, tuples, dicts) only.",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{path}.{key}") for key, item in value.items()}
    pairs = [
        [_encode(key, f"{path} (key)"), _encode(item, f"{path}.{key}")]
        for key, item in value.items()
    ]
    return {_DICT: pairs}


def decode(value: Any) -> Any:
    """Return what was encoded; tensors come back as `TensorReference`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        if key.startswith("$"):
            return _decode_tagged(key, content)
    return {key: decode(item) for key, item in value.items()}


def _decode_tagged(tag: str, content: Any) -> Any:
    match tag, content:
        case "$tuple", list():
            return tuple(decode(item) for item in content)
        case "$float", str() if content in ("nan", "inf", "-inf"):
            return float(content)
        case "$tensor", str():
            return TensorReference(content)
        case "$dict", list() if all(isinstance(p, list) and len(p) == 2 for p in content):
            keys = [decode(key) for key, _ in content]
            if all(_is_plain_key(key) for key in keys):
                return {key: decode(item) for key, (_, item) in zip(keys, content, strict=True)}
    raise CheckpointDamaged(f"the plain state holds an unknown form {tag!r}")


def _is_plain_key(key: Any) -> bool:
    # A tuple can be a key, and what it holds need not be one.
    if isinstance(key, tuple):
        return all(_is_plain_key(item) for item in key)
    return not isinstance(key, (list, dict, TensorReference))
