"""Samples and batches of tokens: pure functions of (seed, position).

Guarantees: the batch at a position does not depend on the number of workers, on what was read
before, or on how the batch is split; each sample comes exactly once an epoch. Workers do not hear
the signals that stop a run (the run hears them), and do not outlive it.
"""

import atexit
import ctypes
import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from keepstep.errors import DataError, KeepstepError
from keepstep.state.data_position import sample_indices
from keepstep.tasks.language.tokens import Tokens, check_vocabulary

_RUN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_WORKER_END_SECONDS = 5.0


class Windows:
    """Tokens cut into samples of `length + 1`, of which the last is the first of the next one."""

    def __init__(self, tokens: Tokens, *, length: int, vocab_size: int, name: str) -> None:
        self._tokens = tokens
        self._length = length
        self._vocab_size = vocab_size
        self._name = name

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned worker needs: the place of the tokens, not the tokens."""
        state, tokens = dict(self.__dict__), self._tokens
        if isinstance(tokens, np.memmap):
            state["_tokens"] = (tokens.filename, tokens.dtype.str, tokens.offset, tokens.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the tokens anew."""
        self.__dict__.update(state)
        if isinstance(self._tokens, tuple):
            name, dtype, offset, shape = self._tokens
            self._tokens = np.memmap(name, dtype=dtype, mode="r", offset=offset, shape=shape)

    def __len__(self) -> int:
        """Return the number of samples."""
        return max(0, (len(self._tokens) - 1) // self._length)

    def take(self, samples: np.ndarray) -> torch.Tensor:
        """Return samples as int64, shape (len(samples), length + 1)."""
        places = samples[:, None] * self._length + np.arange(self._length + 1)
        taken = self._tokens[places]
        check_vocabulary(taken.reshape(-1), self._vocab_size, where=f"data part {self._name!r}")
        return torch.from_numpy(taken.astype(np.int64))

    def require(self, samples: int) -> None:
        """Raise DataError where there are fewer samples than that."""
        if len(self) < samples:
            raise DataError(
                f"data part {self._name!r} has {len(self._tokens):,} tokens, which is"
                f" {len(self)} samples of {self._length}; at least {samples} are needed",
                hint="Prepare more text, or lower data.sequence_length or train.global_batch.",
            )


class BatchDataset(Dataset[np.ndarray | DataError]):
    """The n-th batch behind a position, by n; batches begin `stride` samples after one another.

    ``places``: which samples of a batch are taken, counted from its first.
    An error is returned, not raised: a loader that raises buries it in a worker's traceback.
    """

    def __init__(
        self, windows: Windows, *, seed: int, position: int, places: np.ndarray, stride: int
    ) -> None:
        self._windows = windows
        self._seed = seed
        self._position = position
        self._places = places
        self._stride = stride

    def __getitem__(self, number: int) -> np.ndarray | DataError:
        """Return the samples of a batch, int64 of the shape (len(places), length + 1).

        An array and no tensor: a worker sends an array through its pipe. For a tensor the run
        would have to ask the worker for a file descriptor, a handshake of several turns in which
        a step waits for a process that its own threads keep from running, and that can fail.
        """
        positions = self._position + number * self._stride + self._places
        try:
            chosen = sample_indices(self._seed, positions, len(self._windows))
            return self._windows.take(chosen).numpy()
        except DataError as error:
            return error


def iterate_batches(
    dataset: BatchDataset, *, workers: int, pinned: bool = False, start: str = "fork"
) -> Iterator[torch.Tensor]:
    """Yield batch after batch without end, loaded ahead by `workers` processes.

    ``start``: "fork", or "spawn" where threads of the process group run: a fork may copy a lock
    that one of them holds, and the worker would wait for it for ever.
    """
    # The number of workers is the user's, and the batches do not depend on it.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=_Counting(),
        num_workers=workers,
        worker_init_fn=partial(_begin_worker, run=os.getpid()) if workers else None,
        # Started by the run itself: a worker that a server forks is not the run's child, and
        # would not end with it.
        multiprocessing_context=start if workers else None,
        collate_fn=_as_it_is,
        # A generator of its own: the loader draws from it, and training's must not be touched.
        generator=torch.Generator(),
    )
    with _signals_held_back():
        batches = iter(loader)
    end = partial(_end_workers, batches)
    # Also where nobody closes this generator: what leaves Python asks workers to end with the
    # SIGTERM that ours ignore, and then waits for them without end.
    atexit.register(end)
    try:
        while True:
            samples = _next_batch(batches)
            if isinstance(samples, DataError):
                raise samples
            batch = torch.from_numpy(samples)
            yield batch.pin_memory() if pinned else batch
    finally:
        # Not left to the collector: an error's traceback would keep the workers until the exit.
        atexit.unregister(end)
        end()


def _as_it_is(samples: Any) -> Any:
    """Return a batch as the dataset made it; the loader would make a tensor of it."""
    return samples


def _next_batch(batches: Any) -> np.ndarray | DataError:
    """Return the next batch; where a worker has ended, say so, and not what the pipe said of it."""
    try:
        return next(batches)  # type: ignore[no-any-return]
    except (RuntimeError, OSError) as error:
        workers = getattr(batches, "_workers", [])
        # The pipe breaks a moment before the kernel can say that the process is gone.
        wait([worker.sentinel for worker in workers], timeout=_WORKER_END_SECONDS)
        ended = [worker for worker in workers if not worker.is_alive()]
        if not ended:
            raise
        raise KeepstepError(
            f"a data worker (process {ended[0].pid}) ended with code {ended[0].exitcode}: {error}",
            hint="A code of -9 means that it was killed, often for want of memory: use fewer"
            " data.workers. Run the same command to continue.",
        ) from error


class _Counting:
    """A sampler of 0, 1, 2, ..."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold signals back while workers are forked.

    A worker is born with the run's handlers and wake-up descriptor; a signal to the whole process
    group would go through them and count twice. It keeps the mask until it ignores the signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_workers(batches: Any) -> None:
    """End the workers of a loader's iterator: by asking, and by force where they do not hear."""
    if not hasattr(batches, "_shutdown_workers"):
        return
    # The loader has no public way: it counts on the collector, and on SIGTERM.
    batches._shutdown_workers()
    for worker in batches._workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _begin_worker(worker: int, *, run: int) -> None:
    del worker
    signal.set_wakeup_fd(-1)
    for number in _RUN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RUN_SIGNALS)
    # A run that was killed cannot end its workers; the kernel does.
    libc = ctypes.CDLL(None, use_errno=True)
    # A run that died before this call sends nothing any more; the worker has a new parent then.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != run:
        os._exit(1)
