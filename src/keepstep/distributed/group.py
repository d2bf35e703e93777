"""The ranks of a run: who they are, how they talk, and how they part.

Guarantees:
1. The launcher's environment says which rank this is (`launcher.py`); a world that the config does
   not fit is refused before any model exists.
2. Agreements have a gloo group of their own: a training collective never waits behind one.
3. The group is left after the health of the others is settled, and after the run has let go of
   its model and optimizer (`Run.let_go`), which hold it.

Without 2 a barrier of the store could be answered by another rank's gradient.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from keepstep.config.quantities import seconds
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.agree import TorchRanks
from keepstep.distributed.health import Health, NoHealth
from keepstep.distributed.launcher import find_place
from keepstep.distributed.rendezvous import COLLECTIVE_DEADLINE, Rendezvous
from keepstep.store.ranks import OneRank, Ranks


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of a run, as this process sees them."""

    rank: int
    world_size: int
    local_rank: int
    backend: str = ""
    ranks: Ranks = field(default_factory=OneRank)
    health: Health | NoHealth = field(default_factory=NoHealth)

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks, in float64, the same bits on each."""
        if self.world_size == 1:
            return values
        assert isinstance(self.ranks, TorchRanks), "several ranks have a process group"
        return self.ranks.sum(values)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what there is once: journal, outcome, terminal."""
        return self.rank == 0

    @property
    def description(self) -> str:
        """Say the group in the words of the terminal: `2 ranks (gloo)`."""
        if self.world_size == 1:
            return "1 rank"
        return f"{self.world_size} ranks ({self.backend})"


@contextmanager
def open_group(config: DistributedConfig, *, device: str) -> Iterator[Group]:
    """Join the other ranks; leave them in order at the end.

    ``device``: the config's `train.device`. UsageError where the launcher's variables make no
    sense, Unhealthy where the others do not come.
    """
    place = find_place()
    rank, size, local_rank, host = place.rank, place.size, place.local_rank, place.host
    if size == 1:
        yield Group(rank=0, world_size=1, local_rank=local_rank)
        return
    import torch
    import torch.distributed as dist

    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if cuda else "gloo"
    rendezvous = Rendezvous(
        host=host,
        port=place.port,
        attempt=place.attempt,
        rank=rank,
        size=size,
        holds_store=rank == 0 and not _launcher_holds_store(),
        within_seconds=seconds(config.join_within),
    )
    # Of its own for each: a request of one thread may wait where another's must not.
    store, store_of_health = rendezvous.meet()
    health = Health(
        rank=rank,
        size=size,
        deadline_seconds=seconds(config.lost_after),
        store=store_of_health,
        store_host=host,
    )
    try:
        with health:
            dist_backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            ranks = _join(store, dist_backend, rank=rank, size=size, health=health)
            yield Group(
                rank=rank,
                world_size=size,
                local_rank=local_rank,
                backend=backend,
                ranks=ranks,
                health=health,
            )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(store: Any, backend: str, *, rank: int, size: int, health: Health) -> TorchRanks:
    """Return the ranks of a new process group; a peer that is lost meanwhile is named."""
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_DEADLINE
        )
        talk: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_DEADLINE)
    except RuntimeError as error:
        raise health.explain(error) from error
    return TorchRanks(talk, rank=rank, size=size, health=health)


def join_ranks(*, meet_seconds: float = 30.0) -> TorchRanks:
    """Return the ranks of the process group that a loop of one's own has initialised.

    For `Store(folder, ranks=join_ranks())`, called once, by all ranks. ``meet_seconds``: how long
    a rank waits in a save or a restore for the others to come there too.
    """
    import torch.distributed as dist

    talk: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_DEADLINE)
    return TorchRanks(
        talk,
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        health=NoHealth(),
        meet_seconds=meet_seconds,
    )


def _launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
