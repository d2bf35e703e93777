"""Crash-safe, verified checkpoints for any PyTorch loop.

Importing this package imports no torch; saving and restoring do.
"""

from keepstep.store.catalog import Checkpoint, find_checkpoints_folder, list_checkpoints
from keepstep.store.facts import Saved
from keepstep.store.load import load_state
from keepstep.store.manifest import Best, Manifest
from keepstep.store.resume import Restored
from keepstep.store.single_file import (
    apply_best_valid_loss_floor,
    choose_resume_checkpoint,
    load_checkpoint,
    save_checkpoint_atomic,
)
from keepstep.store.store import Store
from keepstep.store.verify import Fault, verify

__all__ = [
    "Best",
    "Checkpoint",
    "Fault",
    "Manifest",
    "Restored",
    "Saved",
    "Store",
    "apply_best_valid_loss_floor",
    "choose_resume_checkpoint",
    "find_checkpoints_folder",
    "list_checkpoints",
    "load_checkpoint",
    "load_state",
    "save_checkpoint_atomic",
    "verify",
]
