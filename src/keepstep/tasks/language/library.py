"""What `transformers` says of its models, read from its source text: no torch is imported.

A config is checked before anything starts, and importing that library's own config classes would
import torch. What cannot be found out this way is not judged here; building the model does.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

_CAUSAL = re.compile(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\s*\[(.*?)\n    \]", re.S)
_NAME = re.compile(r"\(\"([A-Za-z0-9_\-]+)\",")
_BASE = "PreTrainedConfig"


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
    keys = _annotated(ast.parse(_read("configuration_utils.py")), only=_BASE)
    for node in classes:
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if len(bases) != len(node.bases) or not bases <= names | {_BASE}:
            return None
        keys |= _annotated(ast.Module(body=[node], type_ignores=[]), only=node.name)
    return frozenset(keys) if classes and keys else None


def _annotated(module: ast.Module, *, only: str) -> set[str]:
    """Return the annotated fields of a class and the other names that it maps to them."""
    keys: set[str] = set()
    for node in module.body:
        if not isinstance(node, ast.ClassDef) or node.name != only:
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                keys.add(item.target.id)
            elif isinstance(item, ast.Assign) and isinstance(item.value, ast.Dict):
                targets = {target.id for target in item.targets if isinstance(target, ast.Name)}
                if "attribute_map" in targets:
                    keys |= {str(k.value) for k in item.value.keys if isinstance(k, ast.Constant)}
    return keys


def _read(name: str) -> str:
    """Return a source file of the library, or nothing where there is none."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""
