"""Several ranks of the installed command, each a process that the test can see, signal and kill."""

import contextlib
import random
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.helpers import warm
from tests.helpers.command import Session


def free_port() -> int:
    """Return a port that nobody listens at, and that no connection is given as its own end."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def place_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what a launcher tells a rank of its place."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_code(size: int, code: str, *words: object) -> list[tuple[int, str]]:
    """Run Python code on `size` ranks; return exit code and output by rank."""
    port = free_port()
    jobs = [warm.Job(words, place_of(rank, size, port), code) for rank in range(size)]
    return [(done.returncode, done.stdout) for done in warm.run_together(jobs)]


class World:
    """`size` ranks of `keepstep train`; leave it and none of them is left.

    ``last``: more words for the last rank alone. ``forked``: whether they are forks, for which
    see `warm`.
    """

    def __init__(
        self,
        size: int,
        *words: object,
        extra: Mapping[str, str] | None = None,
        last: tuple[str, ...] = (),
        forked: bool = False,
    ) -> None:
        port = free_port()
        start = warm.WarmSession if forked else Session
        self._stack = ExitStack()
        self.ranks: list[Session] = []
        for rank in range(size):
            place = place_of(rank, size, port)
            own = last if rank == size - 1 else ()
            session = start("train", *words, *own, extra={**(extra or {}), **place})
            self.ranks.append(self._stack.enter_context(session))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def end(self) -> list[int]:
        """Wait for all; return the exit codes by rank."""
        return [session.end() for session in self.ranks]

    def seconds_to_end(self) -> float:
        """Wait for all; return how long it took from now."""
        started = time.monotonic()
        self.end()
        return time.monotonic() - started

    @property
    def output(self) -> str:
        return "\n".join(f"-- rank {n}\n{one.output}" for n, one in enumerate(self.ranks))


def train_on(
    size: int, config: Path, run: Path, *flags: str, extra: Mapping[str, str] | None = None
) -> list[int]:
    """Run the command on `size` ranks to its end; return the exit codes."""
    # Not the default: here nobody is lost, and a busy machine must not make it seem so.
    patient = "--distributed.lost_after=60s"
    words = ("train", config, f"--checkpoint.dir={run}", patient, *flags)
    port = free_port()
    jobs = [
        warm.Job(words, {**(extra or {}), **place_of(rank, size, port)}) for rank in range(size)
    ]
    ended = warm.run_together(jobs)
    for rank, done in enumerate(ended):
        print(f"-- rank {rank}\n{done.stdout}")
    return [done.returncode for done in ended]
