"""What a launcher tells a process of its place: torchrun's variables, or those of an srun step.

Guarantees: only a task that srun started is taken for a rank of Slurm's. The shell of a batch job
or of `salloc` has nearly the same variables, and a process in it is a run of its own. Variables of
torchrun, or a `WORLD_SIZE` set by hand, come before Slurm's.
"""

import os
import re
from dataclasses import dataclass

from keepstep.errors import UsageError

_NO_STEP_OF_SRUN_FROM = 0xFFFFFFF0
"""Slurm numbers its own steps (the batch script, an interactive shell) from the largest down."""
_PORT_FIRST, _PORTS = 20000, 10000
"""Below those that systems give to outgoing connections, which begin at 32,768 on Linux."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place among the ranks, and where they meet.

    ``attempt``: the start of this very group of processes, among those that meet at one address.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    attempt: str


def find_place() -> Place:
    """Return this process's place; UsageError where the launcher's variables make no sense."""
    if in_srun_task() and not {"RANK", "WORLD_SIZE"} & set(os.environ):
        return _place_in_step()
    return Place(
        rank=_number("RANK", 0),
        size=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0),
        host=os.environ.get("MASTER_ADDR", "localhost"),
        port=_number("MASTER_PORT", 29500),
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def in_srun_task() -> bool:
    """Tell whether this process is a task of an srun step, or was started by one."""
    step = os.environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _NO_STEP_OF_SRUN_FROM:
        return False
    return {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= set(os.environ)


def _place_in_step() -> Place:
    job, step = _number("SLURM_JOB_ID", 0), _number("SLURM_STEP_ID", 0)
    size = _number("SLURM_STEP_NUM_TASKS", 1)
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    host = os.environ.get("MASTER_ADDR") or first_host(nodes)
    if size > 1 and not host:
        raise UsageError(
            f"srun started {size} ranks, and SLURM_STEP_NODELIST does not say where the first is",
            hint="Set MASTER_ADDR to the host of the first rank.",
        )
    return Place(
        rank=_number("SLURM_PROCID", 0),
        size=size,
        local_rank=_number("SLURM_LOCALID", 0),
        host=host,
        # All ranks find the same one; steps at one time on one host find different ones.
        port=_number("MASTER_PORT", _PORT_FIRST + (7 * job + step) % _PORTS),
        attempt=f"{job}.{step}.{_number('SLURM_RESTART_COUNT', 0)}",
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: `rack[1-2]node[03,07-09],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "nothing is a match too"
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group(0))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}, not a whole number")
    return int(text)
