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
    """The sizes of the mesh and this rank's place in it.

    ``data_index`` counts the ranks that take different samples, ``tp_index`` those of one
    tensor-parallel group, which take the same. ``mesh`` is torch's DeviceMesh, or None for a single
    rank.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    data_index: int = 0
    tp_index: int = 0
    mesh: Any = None

    @property
    def data_ranks(self) -> int:
        """Number of ranks that take different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_mesh(self) -> Any:
        """The part of the mesh over which FSDP2 shards and replicates."""
        return self.mesh[tuple(name for name in self.mesh.mesh_dim_names if name != "tp")]

    @property
    def tp_mesh(self) -> Any:
        """The part of the mesh over which matrices are split."""
        return self.mesh["tp"]

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
    if world_size == 1:
        return Layout()
    from torch.distributed.device_mesh import init_device_mesh

    # Sharding has its axis also where it has one rank: FSDP2 is what reduces and casts.
    axes = {"dp_replicate": config.dp_replicate, "dp_shard": shard, "tp": config.tp}
    axes = {name: size for name, size in axes.items() if size > 1 or name == "dp_shard"}
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if config.tp > 1:
        # For sums over both axes, such as a norm's: one collective, in one order on all ranks.
        mesh["dp_shard", "tp"]._flatten()
    return Layout(
        dp_replicate=config.dp_replicate,
        dp_shard=shard,
        tp=config.tp,
        data_index=rank // config.tp,
        tp_index=rank % config.tp,
        mesh=mesh,
    )
