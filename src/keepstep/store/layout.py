"""Every name in a run's folder, once.

Names that are not made by these functions are not ours, and are never touched.
"""

import re
import secrets

MANIFEST_NAME = "manifest.json"
CHECKPOINTS_NAME = "checkpoints"
ASIDE_NAME = "aside"
LOCK_NAME = "lock"
JOURNAL_NAME = "journal.jsonl"
OUTCOME_NAME = "outcome.json"
LATEST_NAME = "latest"
BEST_NAME = "best"
LATEST_FILE = "latest.pth"
BEST_FILE = "best.pth"
PINS_NAME = "pins.json"
PINS_LOCK_NAME = "pins.lock"
MOVING_NAME = ".moving-to"
SESSION_OBJECT = "session.json"
ASIDE_OBJECT = "aside.json"

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_STEPS_FILE = re.compile(r"steps_([0-9]+)\.pth")
_LEFTOVER = re.compile(
    r"\.(?:staging-[0-9]+|trash|probe|rehearsal)-[0-9a-f]{16}|\.[A-Za-z0-9_.-]+-[0-9a-f]{16}\.tmp"
)
_UNFINISHED = re.compile(r"\.unfinished-(step_(?:0|[1-9][0-9]*)(?:\.[0-9]+)?)")
_DATA_FILE = re.compile(r"rank-[0-9]{5}(-frozen)?\.safetensors")
_REMOTE = re.compile(r"step_(0|[1-9][0-9]{0,18})-([1-9][0-9]{0,18})-[0-9a-f]{16}")
_NUMBER = re.compile(r"\.[0-9]+$")


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint folder: `step_1200`."""
    return f"step_{step}"


def step_of(name: str) -> int | None:
    """Return the step that a folder's name stands for, or None if it is not a checkpoint's name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def file_name(step: int) -> str:
    """Return the name of a step's checkpoint of one file: `steps_1200.pth`."""
    return f"steps_{step}.pth"


def file_step_of(name: str) -> int | None:
    """Return the step that a file's name stands for, or None if it is not a checkpoint's name."""
    match = _STEPS_FILE.fullmatch(name)
    return int(match.group(1)) if match else None


def is_file_name(name: str) -> bool:
    """Tell whether a name is one of a checkpoint of one file, also where it was set aside."""
    plain = plain_name(name)
    return plain in (LATEST_FILE, BEST_FILE) or file_step_of(plain) is not None


def is_archive_name(name: str) -> bool:
    """Tell whether what has a name is one file, also where a person chose the name."""
    return name.endswith(".pth") or is_file_name(name)


def plain_name(name: str) -> str:
    """Return the name that a checkpoint had before it was set aside, where its name was taken."""
    return _NUMBER.sub("", name)


def data_name(rank: int) -> str:
    """Return the name of the data file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def frozen_data_name(rank: int) -> str:
    """Return the name of the file for what a rank did not have to write again."""
    return f"rank-{rank:05d}-frozen.safetensors"


def is_frozen_data_name(name: str) -> bool:
    """Tell whether a data file is one that later checkpoints may share."""
    return is_data_name(name) and name.endswith("-frozen.safetensors")


def is_data_name(name: str) -> bool:
    """Tell whether a name is one that a rank's data file can have: never a path."""
    return _DATA_FILE.fullmatch(name) is not None


def remote_name(step: int, sequence: int, digest: str) -> str:
    """Return the name of a checkpoint in an object store: `step_1200-7-` and its own digest."""
    return f"step_{step}-{sequence}-{digest[:16]}"


def remote_place_of(name: str) -> tuple[int, int] | None:
    """Return step and sequence of a checkpoint's name in an object store; None if it is none."""
    match = _REMOTE.fullmatch(name)
    return (int(match.group(1)), int(match.group(2))) if match else None


def staging_name(step: int) -> str:
    """Return a new name for a save in progress."""
    return f".staging-{step}-{secrets.token_hex(8)}"


def trash_name() -> str:
    """Return a new name for a delete in progress."""
    return f".trash-{secrets.token_hex(8)}"


def probe_name() -> str:
    """Return a new name for a folder in which it is tried what the file system can."""
    return f".probe-{secrets.token_hex(8)}"


def rehearsal_name() -> str:
    """Return a new name for a folder in which a save is rehearsed."""
    return f".rehearsal-{secrets.token_hex(8)}"


def unfinished_name(name: str) -> str:
    """Return the name of the file that makes the folder `name` beside it invisible."""
    return f".unfinished-{name}"


def unfinished_of(name: str) -> str | None:
    """Return which folder a file of that name makes invisible, or None if it is no such name."""
    match = _UNFINISHED.fullmatch(name)
    return match.group(1) if match else None


def temporary_name(name: str) -> str:
    """Return a new name for a file or link that is about to be renamed to `name`."""
    return f".{name}-{secrets.token_hex(8)}.tmp"


def is_leftover(name: str) -> bool:
    """Tell whether a name is one that only a save, a delete or a rename in progress can have."""
    return _LEFTOVER.fullmatch(name) is not None
