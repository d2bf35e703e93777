"""The short run that crash tests kill and fail, and its file operations."""

from pathlib import Path

import pytest

from tests.helpers.command import keepstep
from tests.helpers.crash import SHORT, logged_operations


@pytest.fixture(scope="session")
def short_reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run, never touched."""
    folder = tmp_path_factory.mktemp("short")
    done = keepstep("train", config, f"--checkpoint.dir={folder}", *SHORT)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="session")
def operations(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every file operation of the short run, in order."""
    folder = tmp_path_factory.mktemp("operations")
    words = ("train", config, f"--checkpoint.dir={folder / 'run'}", *SHORT)
    return logged_operations(folder / "log", *words)
