"""What a config needs of the machine: folders, hooks, packages, a device. Looks; needs no torch.

Guarantees: nothing is made, imported or run. What is a problem here would end the run at its
start; what is not seen here (a hook's own code, a full disk) still can.
"""

import ast
import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from keepstep.config.explain import Problem, suggestion
from keepstep.config.resolved import checkpoint_folder, run_folder
from keepstep.config.schema import SCHEDULE_FREE, TRACKERS, Config

_NAME_BYTES_MAX = 255
_TOO_LONG = f"a name in it is longer than {_NAME_BYTES_MAX} bytes"
_PACKAGES = {"lion": "pytorch_optimizer", SCHEDULE_FREE: "schedulefree"}
_NO_CUDA_BUILD = re.compile(r"^cuda\b[^=]*= None$.*^hip\b[^=]*= None$", re.M | re.S)


def look_around(config: Config) -> list[Problem]:
    """Return what of the machine does not fit a config, each at the path that names it."""
    looks = (_folders, _hooks, _optimizer, _trackers, _device)
    found = [problem for look in looks for problem in look(config)]
    return [Problem(path=path, message=message) for path, message in found]


def folder_fault(folder: Path) -> str:
    """Return why a folder cannot be there, or be made; nothing where it can."""
    for name in folder.parts:
        if len(os.fsencode(name)) > _NAME_BYTES_MAX:
            return f"{_TOO_LONG}: {name[:20]}..."
    try:
        for place in (folder, *folder.absolute().parents):
            if place.is_dir():
                # Whatever the rights say, nothing can be written into a read-only file system.
                denied = f"{place} cannot be written into: look at who owns it and what it allows"
                return "" if os.access(place, os.W_OK) else denied
            if place.exists():
                return f"{place} is a file, not a folder"
            if place.is_symlink():
                return f"{place} is a link to nothing"
    except OSError as error:
        return f"{folder} cannot be looked at: {error.strerror}"
    return ""


def _folders(config: Config) -> Iterator[tuple[str, str]]:
    named = {"run.dir": run_folder(config), "checkpoint.dir": checkpoint_folder(config)}
    if not config.checkpoint.dir:
        del named["checkpoint.dir"]
    elif not config.run.dir:
        del named["run.dir"]
    for path, folder in named.items():
        fault = folder_fault(folder)
        # A name that is too long is told at `run.name`, where that made it.
        if fault and (getattr(config, path.partition(".")[0]).dir or _TOO_LONG not in fault):
            yield path, fault


def _hooks(config: Config) -> Iterator[tuple[str, str]]:
    for name in config.run.hooks:
        module, _, attribute = name.partition(":")
        if attribute and (fault := _hook_fault(module, attribute)):
            yield "run.hooks", f"{name!r}: {fault}"


def _hook_fault(module: str, attribute: str) -> str:
    """Return why a hook cannot be there, as far as its module's text tells."""
    spec = _spec_of(module)
    if isinstance(spec, str):
        return f"there is no module {spec}; it must be importable from this folder"
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    try:
        names = _top_names(ast.parse(Path(spec.origin).read_bytes()).body)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{spec.origin} cannot be read as Python: {error}"
    if attribute in names or {"*", "__getattr__"} & names:
        return ""
    return f"{spec.origin} has no {attribute}{suggestion(attribute, sorted(names))}"


def _spec_of(module: str) -> ModuleSpec | str | None:
    """Return where a module is, None where that is unclear, or the name that is not there.

    No package is imported on the way, as `find_spec` of a dotted name would do.
    """
    first, *rest = module.split(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)
    name = first
    for part in rest:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec if spec is not None else name


def _top_names(body: list[ast.stmt]) -> set[str]:
    """Return every name that a module's text binds, also within its `if` and `try`."""
    names: set[str] = set()
    for item in body:
        match item:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for field in ("body", "orelse", "finalbody"):
                    names |= _top_names(getattr(item, field, []))
                for handler in getattr(item, "handlers", []):
                    names |= _top_names(handler.body)
            case _:
                stored = (n for n in ast.walk(item) if isinstance(n, ast.Name))
                names |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return names


def _optimizer(config: Config) -> Iterator[tuple[str, str]]:
    package = _PACKAGES.get(config.optimizer.name)
    if package is not None and importlib.util.find_spec(package) is None:
        yield (
            "optimizer.name",
            f"{config.optimizer.name!r} needs the package {package}, which is not installed:"
            " pip install keepstep[optim]",
        )


def _trackers(config: Config) -> Iterator[tuple[str, str]]:
    for name in config.track.to:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            yield (
                "track.to",
                f"{name!r} needs the package {name}, which is not installed:"
                " pip install keepstep[trackers]",
            )
    if config.track.to and config.track.dir:
        fault = folder_fault(Path(config.track.dir).expanduser())
        if fault:
            yield "track.dir", fault


def _device(config: Config) -> Iterator[tuple[str, str]]:
    if config.train.device != "cuda":
        return
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = version.read_text(encoding="utf-8") if version and version.is_file() else ""
    if _NO_CUDA_BUILD.search(text):
        yield "train.device", "is cuda, and the installed torch is built without it; use auto"
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not Path("/dev/kfd").exists():
            yield "train.device", "is cuda, and this machine has no driver for it; use auto"
