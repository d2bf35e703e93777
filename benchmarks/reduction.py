"""What `train.deterministic_reduction` costs on two gloo ranks: seconds of a step, and memory.

    .venv/bin/python benchmarks/reduction.py [--turns 10] [--optimizer.name=muon ...]

Steps with and without it, of the model of `configs/language/debug.toml` in eight micro-batches,
take turns in the same two processes. The memory is the most that a process of a larger model ever
had, over two steps, each side in processes of its own.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import Group, open_group
from keepstep.distributed.mesh import lay_out
from keepstep.run.step import take_step
from keepstep.tasks.language.task import LanguageTask, data_folder
from keepstep.tasks.registry import load_task_config
from keepstep.tasks.task import DataShare
from keepstep.train import initial_state

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/language/debug.toml"
MICRO = ("--train.device=cpu", "--train.micro_batch=2", "--data.megabytes=1")
SIDES = {
    "plain": (),
    "ordered": ("--train.deterministic_reduction=true",),
}
ADAMW = ("--optimizer.name=adamw", "--optimizer.rate=1e-3")
LARGE = ("--model.hidden_size=512", "--model.intermediate_size=1376", "--model.num_hidden_layers=8")
STEPS_OF_A_TURN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--memory", choices=list(SIDES), help="measure one side, in a rank")
    parser.add_argument("--rank", action="store_true", help="this is a rank")
    given, flags = parser.parse_known_args()
    if given.rank:
        with open_group(DistributedConfig(), device="cpu") as group:
            if given.memory:
                memory(given.memory, flags, group)
            else:
                seconds(flags, group, turns=given.turns)
        return
    # Before the ranks, of which each would prepare them.
    data_folder(load_task_config(CONFIG, MICRO).config.data)
    launch(f"--turns={given.turns}", *flags)
    for name in SIDES:
        launch(f"--memory={name}", *LARGE, *flags)


def launch(*words: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    subprocess.run([sys.executable, *launcher, __file__, "--rank", *words], cwd=ROOT, check=True)


class Side:
    """A model in training, with the option or without."""

    def __init__(self, name: str, flags: list[str], group: Group) -> None:
        config = load_task_config(CONFIG, [*MICRO, *ADAMW, *SIDES[name], *flags]).config
        layout = lay_out(
            config.distributed, rank=group.rank, world_size=group.world_size, device="cpu"
        )
        self.run: Any = SimpleNamespace(
            config=config,
            group=group,
            layout=layout,
            device=torch.device("cpu"),
            stop=SimpleNamespace(requested=False),
            save_requested=False,
            schedule=lambda _update: 1.0,
            store=SimpleNamespace(fence=lambda: None, is_busy=lambda: False),
        )
        share = DataShare(index=layout.data_index, count=layout.data_ranks, sum=group.sum)
        self.task = LanguageTask(config, share)
        self.state = initial_state(self.task, self.run)
        self.batches = self.task.batches(0)

    def turn(self, steps: int) -> float:
        """Take steps; return the seconds of one."""
        begun = time.perf_counter()
        for batch in itertools.islice(self.batches, steps):
            take_step(self.task, batch, self.state, self.run)
        return (time.perf_counter() - begun) / steps


def seconds(flags: list[str], group: Group, *, turns: int) -> None:
    sides = {name: Side(name, flags, group) for name in SIDES}
    found: dict[str, list[float]] = {name: [] for name in sides}
    # The first turn of each warms up.
    for number in range(turns + 1):
        for name, side in sides.items():
            took = side.turn(STEPS_OF_A_TURN)
            if number:
                found[name].append(took)
    ratios = [b / a for a, b in zip(found["plain"], found["ordered"], strict=True)]
    if group.is_first:
        middle = {name: statistics.median(values) for name, values in found.items()}
        print(
            f"a step, ordered / plain: median {statistics.median(ratios):.3f}"
            f" ({min(ratios):.3f} to {max(ratios):.3f}, n = {len(ratios)}),"
            f" {middle['ordered']:.3f} s / {middle['plain']:.3f} s",
            flush=True,
        )
    for side in sides.values():
        side.state.release()


def memory(name: str, flags: list[str], group: Group) -> None:
    side = Side(name, flags, group)
    side.turn(2)
    parameters = sum(p.numel() for p in side.state.model.parameters())
    if group.is_first:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name}: {peak:.0f} MiB at most, {parameters / 1e6:.1f}M parameters", flush=True)
    side.state.release()


if __name__ == "__main__":
    main()
