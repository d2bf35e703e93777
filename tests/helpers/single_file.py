"""States for single-file checkpoints, and the names and bytes of a folder that holds them."""

import os
import traceback
from collections.abc import Callable
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


def in_a_child(work: Callable[[], None]) -> int:
    """Run in a forked process; return its status as the parent sees it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]
