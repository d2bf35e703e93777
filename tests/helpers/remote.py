"""What the tests of a remote share: a run that saves there, and what stands there."""

from pathlib import Path
from typing import Any

import fsspec
import torch

from keepstep.store import Store
from keepstep.store.remote import ObjectStore


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((64,), float(step)), "step": step}


def save(store: Store, *steps: int) -> None:
    """Save steps; the second one measures best."""
    for step in steps:
        store.save(state_of(step), step=step, metrics={"loss": abs(step - 2.0)})


def open_store(folder: Path, remote: str | ObjectStore, **more: Any) -> Store:
    return Store(folder, remote=remote, best_metric="loss", **more)


def objects(url: str) -> dict[str, bytes]:
    """Every object below a URL, by its key."""
    files, root = fsspec.core.url_to_fs(url)
    return {name[len(root) + 1 :]: files.cat_file(name) for name in files.find(root)}


def names(url: str, file: str = "manifest.json") -> list[str]:
    """The steps that stand there, in the order of their numbers."""
    found = [key.split("-") for key in objects(url) if key.endswith(f"/{file}")]
    return [step for step, _ in sorted(((p[0], int(p[1])) for p in found), key=lambda p: p[1])]


def key_of(url: str, start: str, file: str) -> str:
    """The full name of an object of the checkpoint whose name starts so."""
    files, root = fsspec.core.url_to_fs(url)
    [name] = [n for n in files.find(root) if f"/{start}-" in n and n.endswith(f"/{file}")]
    return name


def flip(url: str, start: str, file: str) -> None:
    """Change the last byte of an object of the checkpoint whose name starts so."""
    files, name = fsspec.core.url_to_fs(url)[0], key_of(url, start, file)
    data = bytearray(files.cat_file(name))
    data[-1] ^= 1
    files.pipe_file(name, bytes(data))


class Ear(list):
    """Hears a store: the events with their texts."""

    def __call__(self, event: str, **facts: Any) -> None:
        self.append((event, facts))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self if name == event]
