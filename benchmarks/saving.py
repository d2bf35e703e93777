"""What saves cost: ratios within one run of this file, the sides taking turns.

    .venv/bin/python benchmarks/saving.py [--gib 0.5] [--rounds 5] [--folder /tmp]

1. The time of a training loop that saves every 10 steps, over that of one that does not: with
   `save(wait=False)`, with the asynchronous saves of others, and with `save`.
2. How long the call blocks the loop, and how long the optimizer's step waits at the fence.
3. A save that is durable when it returns, over those of others, each with fsync and with the
   removal of the one before, and over as many bytes written past the page cache; a load of what no
   memory holds, over reading as many bytes past the page cache.
4. A durable save of a state of which nine tenths are frozen, over one that moves as a whole.
5. With `--only returns`: how long the call of `save(wait=False)` takes for states of three sizes,
   and the rate of short steps while a save is written, over that of steps beside none.

The model is a chain of linear layers under AdamW; `--gib` is the size of weights and moments.
"""

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import asynchronous_peers, durable_peers, remove, sync

from keepstep.store import Store, load_state
from keepstep.store.direct import forget, set_direct

LAYERS, STEPS, EVERY = 16, 20, 10
RAW_BYTES = 8 << 20


class Training:
    """A model of a given size under AdamW; one step takes some tenths of a second a GiB."""

    def __init__(self, gib: float, *, batch: int = 512) -> None:
        width = int((gib * 2**30 / 12 / LAYERS) ** 0.5)
        layers = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(batch, width)
        self.fence: Callable[[], None] = lambda: None
        self.waited: list[float] = []
        self.step()

    def step(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        begun = time.perf_counter()
        self.fence()
        self.waited.append(time.perf_counter() - begun)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return weights and moments as a flat table of tensors."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        table = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for parameter, entries in self.optimizer.state.items():
            for key, value in entries.items():
                table[f"optimizer.{names[id(parameter)]}.{key}"] = value
        return table


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Keepstep:
    """Our saves, with the face of `peers.Asynchronous`."""

    def __init__(self, folder: Path, *, wait: bool = False, bounded: bool = False) -> None:
        self._store = Store(folder, keep_last_n=1, bounded_memory=bounded)
        self._store.restore()
        self._wait, self._count = wait, 0
        self.fence, self.end, self.close = self._store.fence, self._store.collect, self._store.close

    def save(self, state: dict[str, Any]) -> None:
        """Save, or begin to."""
        self._count += 1
        self._store.save(state, step=self._count, wait=self._wait)

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._store.is_busy()


def loop(training: Training, side: Any = None, calls: list[float] | None = None) -> float:
    """Return the seconds of a loop; each save has half an interval of steps behind it."""
    calls = [] if calls is None else calls
    training.fence, training.waited = side.fence if side else lambda: None, []

    def run() -> None:
        for step in range(1, STEPS + 1):
            training.step()
            if side and step % EVERY == EVERY // 2:
                calls.append(timed(lambda: side.save(training.state())))
        if side:
            side.end()

    return timed(run)


def loops(training: Training, folder: Path, rounds: int) -> None:
    """Print what each way of saving costs the loop."""
    sides = {
        "keepstep, wait=False": Keepstep(folder / "later"),
        "keepstep, bounded": Keepstep(folder / "bounded", bounded=True),
        **asynchronous_peers(folder),
        "keepstep, wait=True": Keepstep(folder / "now", wait=True),
    }
    ratios: dict[str, list[float]] = {name: [] for name in sides}
    calls: dict[str, list[float]] = {name: [] for name in sides}
    waited: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.save(training.state())
        side.end()
    for _ in range(rounds):
        alone = loop(training)
        for name, side in sides.items():
            ratios[name].append(loop(training, side, calls[name]) / alone)
            waited[name] += training.waited
    print(f"a loop of {STEPS} steps: {alone:.2f} s; a save every {EVERY}")
    for name, side in sides.items():
        side.close()
        print(
            f"{name:22} loop {spread(ratios[name], 3)}; the call blocks"
            f" {1000 * statistics.median(calls[name]):.1f} ms, at most"
            f" {1000 * max(calls[name]):.1f}; an update waits at most"
            f" {1000 * max(waited[name]):.1f} ms"
        )


def returns(folder: Path, rounds: int) -> None:
    """Print how long the call takes, and how fast short steps are beside a save."""
    for gib in (0.25, 1.0, 4.0):
        training, side = Training(gib, batch=16), Keepstep(folder / f"returns-{gib}")
        calls = []
        for _ in range(10 * rounds):
            side.save(training.state())
            side.end()
            training.step()
            calls.append(1000 * timed(lambda t=training, s=side: s.save(t.state())))
            side.end()
        side.close()
        shutil.rmtree(folder / f"returns-{gib}")
        calls.sort()
        print(f"{gib} GiB: the call takes {calls[len(calls) // 2]:.1f} ms, at most {calls[-1]:.1f}")
    training = Training(1.0, batch=16)
    sides = {
        "keepstep, wait=False": Keepstep(folder / "later"),
        "keepstep, bounded": Keepstep(folder / "bounded", bounded=True),
        **asynchronous_peers(folder),
    }
    for name, side in sides.items():
        rates = []
        for number in range(rounds + 1):
            training.fence = side.fence
            alone = statistics.median(timed(training.step) for _ in range(8))
            side.save(training.state())
            begun, count = time.perf_counter(), 0
            while side.busy:
                training.step()
                count += 1
            beside = (time.perf_counter() - begun) / max(1, count)
            side.end()
            # The first save of a side allocates what the others use again.
            if number:
                rates.append(alone / beside)
        side.close()
        print(
            f"{name:22} steps beside a save, over steps beside none: {spread(rates)}, {count} steps"
        )


def spread(found: list[float], digits: int = 2) -> str:
    """Return median and range."""
    middle, low, high = statistics.median(found), min(found), max(found)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def durable(training: Training, folder: Path, rounds: int) -> None:
    """Print how long a durable save takes, over others' that are made durable."""
    state = training.state()
    ratios: dict[str, list[float]] = {}
    loads: list[float] = []

    peers = durable_peers()
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    with Store(folder / "durable", keep_last_n=1) as store:
        store.restore()
        for number in range(1, rounds + 1):
            # Every byte moves: what does not is linked, which is not what is compared here.
            training.step()
            ours = timed(lambda n=number: store.save(state, step=n))
            for name, write in peers.items():
                new, old = (folder / f"{name}-{(number + n) % 2}" for n in (0, 1))

                def save(write: Any = write, new: Path = new, old: Path = old) -> None:
                    write(state, new)
                    sync(new)
                    remove(old)

                ratios.setdefault(name, []).append(ours / timed(save))
            remove(folder / "raw")
            ratios.setdefault("raw writing", []).append(
                ours / timed(lambda: raw(folder / "raw", write=size))
            )
            path = folder / "durable" / f"step_{number}"
            for data in path.glob("*.safetensors"):
                with data.open("rb") as file:
                    forget(file.fileno())
            read = timed(lambda: raw(folder / "raw"))
            loads.append(timed(lambda p=path: load_state(p)) / read)
    for name, found in ratios.items():
        print(f"durable and with digests, over {name:20} {spread(found)}")
    print(f"a verified load of what no memory holds, over raw reading: {spread(loads)}")


def raw(path: Path, *, write: int = 0) -> None:
    """Write as many bytes past the page cache, durably; or read the whole file so."""
    buffer = memoryview(mmap.mmap(-1, RAW_BYTES))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if write else os.O_RDONLY
    descriptor = os.open(path, flags, 0o666)
    assert set_direct(descriptor), "this file system has no direct access: choose a --folder"
    if write:
        for _ in range(-(-write // RAW_BYTES)):
            os.write(descriptor, buffer)
        os.fsync(descriptor)
    else:
        while os.readv(descriptor, [buffer]):
            pass
    os.close(descriptor)


def frozen(training: Training, folder: Path, rounds: int) -> None:
    """Print how long a durable save takes of which nine tenths are frozen, over one of all."""
    seconds: dict[str, list[float]] = {}
    for side, part in (("all", 1), ("tenth", 10)):
        state = {name: tensor.clone() for name, tensor in training.state().items()}
        moving = [tensor for tensor in state.values() if tensor.dim() == 2][::part]
        with Store(folder / f"frozen-{side}", keep_last_n=1) as store:
            for number in range(1, 4 + rounds):
                for tensor in moving:
                    tensor.add_(1)
                taken = timed(lambda n=number, s=state: store.save(s, step=n))
                # The first three find out what is frozen.
                if number > 3:
                    seconds.setdefault(side, []).append(taken)
    found = statistics.median(seconds["tenth"]) / statistics.median(seconds["all"])
    print(f"a durable save of which nine tenths are frozen, over one of all of it: {found:.2f}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only", choices=["returns"], default="")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=given.folder))
    try:
        if given.only:
            returns(folder, given.rounds)
            return
        training = Training(given.gib)
        loops(training, folder, given.rounds)
        durable(training, folder, given.rounds)
        frozen(training, folder, given.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
