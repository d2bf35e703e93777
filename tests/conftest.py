"""What many tests share: the tiny config, and a run of it that nothing ever touched."""

from pathlib import Path

import pytest

from tests.helpers.command import keepstep
from tests.helpers.tiny import write_config


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny config: ten steps, a save every third, an evaluation every fourth."""
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def untouched(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny config, with all checkpoints kept."""
    folder = tmp_path_factory.mktemp("untouched")
    done = keepstep("train", config, f"--checkpoint.dir={folder}", "--checkpoint.keep_last_n=0")
    assert done.returncode == 0, done.stdout
    return folder
