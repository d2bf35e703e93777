"""What many tests share: the tiny config, and a run of it that nothing ever touched."""

import signal
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def _signals_are_heard_as_before() -> Iterator[None]:
    """No test leaves a signal ignored: every process that a later one starts would inherit it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
