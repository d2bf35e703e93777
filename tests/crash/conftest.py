"""The short run that crash tests kill and fail, and its file operations."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.command import keepstep
from tests.helpers.crash import SHORT, logged_operations


@dataclass(frozen=True)
class Killed:
    """Operations in order, and the folder of what each would have found, by its number from 1."""

    operations: list[str]
    copies: Path


@pytest.fixture(scope="session")
def short_reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run, never touched."""
    folder = tmp_path_factory.mktemp("short")
    done = keepstep("train", config, f"--checkpoint.dir={folder}", *SHORT)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="session")
def killed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The short run as a SIGKILL would have left it before each of its operations."""
    folder = tmp_path_factory.mktemp("operations")
    run, copies = folder / "run", folder / "copies"
    run.mkdir()
    words = ("train", config, f"--checkpoint.dir={run}", *SHORT)
    found = logged_operations(folder / "log", *words, copies=(run, copies))
    return Killed(operations=found, copies=copies)


@pytest.fixture(scope="session")
def operations(killed: Killed) -> list[str]:
    """Every file operation of the short run, in order."""
    return killed.operations
