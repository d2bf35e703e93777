"""How the ranks are laid out: data parallel (replicated, sharded) and tensor parallel.

The mesh has the axes `dp_replicate`, `dp_shard` and `tp`, in this order, so that the ranks of one
tensor-parallel group are neighbours, which share a machine's fast links.
"""

from dataclasses import dataclass
from typing import Any

from keepstep.config.schema import DistributedConfig
from keepstep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the mesh and this rank's place in the data-parallel part of it.

    ``mesh`` is torch's DeviceMesh, or None for a single rank.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    data_index: int = 0
    mesh: Any = None

    @property
    def data_ranks(self) -> int:
        """Number of ranks that take different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """The axes that have more than one rank, by name."""
        axes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return {name: size for name, size in axes.items() if size > 1}


def lay_out(config: DistributedConfig, *, rank: int, world_size: int, device: str) -> Layout:
    """Return the layout; UsageError where the sizes do not multiply to the number of ranks."""
    given = config.dp_replicate * config.tp * (config.dp_shard or 1)
    shard = config.dp_shard or world_size // max(1, config.dp_replicate * config.tp)
    if min(config.dp_replicate, config.tp, shard) < 1 or (
        config.dp_replicate * config.tp * shard != world_size
    ):
        raise UsageError(
            f"distributed.dp_replicate ({config.dp_replicate}) x dp_shard"
            f" ({config.dp_shard or 'all others'}) x tp ({config.tp}) = {given} does not fit the"
            f" {world_size} ranks that the launcher started",
            hint="Change these sizes, or start another number of ranks.",
        )
    if config.tp > 1:
        raise UsageError(
            "distributed.tp: tensor parallel training is not there yet",
            hint="Leave distributed.tp at 1.",
        )
    if world_size == 1:
        return Layout()
    from torch.distributed.device_mesh import init_device_mesh

    if config.dp_replicate > 1:
        mesh = init_device_mesh(
            device, (config.dp_replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    else:
        mesh = init_device_mesh(device, (shard,), mesh_dim_names=("dp_shard",))
    return Layout(dp_replicate=config.dp_replicate, dp_shard=shard, data_index=rank, mesh=mesh)
