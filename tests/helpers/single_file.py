"""States for single-file checkpoints, and the names and bytes of a folder that holds them."""

from pathlib import Path
from typing import Any

import torch


def state_of(step: int) -> dict[str, Any]:
    """Return a state that differs from that of any other step, in every part."""
    return {
        "weight": torch.full((300_000,), float(step)),
        "step": step,
        "best_valid_loss": 10.0 - step,
        "pair": (step, None),
    }


def assert_is_state(found: Any, step: int) -> None:
    assert found["step"] == step
    assert torch.equal(found["weight"], torch.full((300_000,), float(step)))
    assert found["pair"] == (step, None)


def content_of(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder with its bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def same_file(one: Path, other: Path) -> bool:
    return one.stat().st_ino == other.stat().st_ino
