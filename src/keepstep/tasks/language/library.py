"""What `transformers` says of its models, read from its source text: no torch is imported.

A config is checked before anything starts, and importing that library's own config classes would
import torch. What cannot be found out this way is not judged here; building the model does.
"""

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_CAUSAL = re.compile(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\s*\[(.*?)\n    \]", re.S)
_NAME = re.compile(r"\(\"([A-Za-z0-9_\-]+)\",")
_BASE = "PreTrainedConfig"
_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Older names, at the top level, that every config with `rope_parameters` still takes."""
OURS = {"attn_implementation": "attention"}
"""What the section has a key of its own for, and that key."""


def is_installed() -> bool:
    """Tell whether the library is there."""
    return importlib.util.find_spec("transformers") is not None


@cache
def decoder_names() -> tuple[str, ...]:
    """Return the model types that can be a decoder-only language model; () if unknown."""
    match = _CAUSAL.search(_read("models/auto/modeling_auto.py"))
    return tuple(sorted(set(_NAME.findall(match.group(1))))) if match else ()


@cache
def config_keys(architecture: str) -> frozenset[str] | None:
    """Return the keys that the config of a model type knows, or None where that is unclear."""
    folder = architecture.replace("-", "_")
    text = _read(f"models/{folder}/configuration_{folder}.py")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes}
    keys = _keys_of(ast.parse(_read("configuration_utils.py")).body, only={_BASE})
    for node in classes:
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if len(bases) != len(node.bases) or not bases <= names | {_BASE}:
            return None
    own = _keys_of(classes, only=names)
    if not own:
        return None
    return frozenset(keys | own | (_ROPE_KEYS if "rope_parameters" in own else set()))


@cache
def defaults(architecture: str) -> Mapping[str, int | None] | None:
    """Return the numbers that a model type's config has by default, or None where unclear."""
    own = _only_config(architecture)
    if own is None:
        return None
    found: dict[str, int | None] = {}
    for item in own.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                if value is None or type(value) is int:
                    found[name] = value
    return found


@cache
def heads_divide(architecture: str) -> bool:
    """Tell whether the library refuses heads that do not divide the hidden size."""
    own = _only_config(architecture)
    return own is not None and "self.hidden_size % self.num_attention_heads" in ast.unparse(own)


def _only_config(architecture: str) -> ast.ClassDef | None:
    """Return the config class of a model type that has one only, and nothing between it."""
    folder = architecture.replace("-", "_")
    tree = ast.parse(_read(f"models/{folder}/configuration_{folder}.py"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if len(classes) != 1 or [ast.unparse(base) for base in classes[0].bases] != [_BASE]:
        return None
    return classes[0]


def _keys_of(nodes: Sequence[ast.stmt], *, only: set[str]) -> set[str]:
    """Return every name that the classes take as a key.

    These are their fields and attributes, the other names that `attribute_map` gives them, and
    what is taken out of `kwargs` by name. A key too many is found when the model is built; a key
    too few would refuse a config that is right.
    """
    keys: set[str] = set()
    for top in nodes:
        if not isinstance(top, ast.ClassDef) or top.name not in only:
            continue
        for item in ast.walk(top):
            match item:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    keys.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    keys.add(name)
                case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as names):
                    keys |= {str(k.value) for k in names.keys if isinstance(k, ast.Constant)}
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="kwargs")),
                    args=[ast.Constant(value=str() as name), *_],
                ):
                    keys.add(name)
    return {name for name in keys if not name.startswith("_")} - set(OURS)


def _read(name: str) -> str:
    """Return a source file of the library, or nothing where there is none."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""
