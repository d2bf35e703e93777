"""What it costs to find out who writes what: 2,000 sharded tensors on two ranks, ours over DCP's.

    .venv/bin/python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/planning.py

Each side plans the same state again and again, as the saves of a run do, and writes nothing: DCP
with a storage writer that drops what it is given, ours up to the gather of what a save tells the
first rank. The first plan of a session is counted by itself: later ones may know the regions.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

from keepstep.distributed.group import join_ranks
from keepstep.store.manifest import Piece, TensorEntry, tensor_to_data
from keepstep.store.tensors import Snapshot, take_apart


class Nowhere(dcp.StorageWriter):
    """Takes plans, and drops the data."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin anew."""
        del checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Need nothing."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Take a rank's plan."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Take all of them."""
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write nothing."""
        del plan, planner
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        """Keep nothing."""
        del metadata, results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Take any."""
        del checkpoint_id
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Have none."""
        return None


def told(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return what a save tells the first rank of the pieces that this one wrote."""
    entries = []
    for name in snapshot.written:
        part = snapshot.parts[name]
        piece = Piece(
            offset=part.region.offset,
            shape=part.region.shape,
            file="rank-00000.safetensors",
            start=0,
            end=part.local.numel() * part.local.element_size(),
            digest="0" * 32,
        )
        entry = TensorEntry(name=name, dtype="F32", shape=part.whole, pieces=(piece,))
        entries.append(tensor_to_data(entry))
    return entries


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"layers.{n}.weight": distribute_tensor(torch.zeros(16, 16), mesh, [Shard(0)])
        for n in range(given.tensors)
    }
    ranks = join_ranks()
    sides: dict[str, Callable[[], Any]] = {
        "keepstep": lambda: ranks.gather(told(take_apart(state, ranks)), what="plan"),
        "DCP": lambda: dcp.save(state, storage_writer=Nowhere()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, work in sides.items():
            dist.barrier()
            begun = time.perf_counter()
            work()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        ours, other = seconds["keepstep"], seconds["DCP"]
        ratios = [a / b for a, b in zip(ours[1:], other[1:], strict=True)]
        print(f"first: {ours[0]:.3f} s over {other[0]:.3f} s: {ours[0] / other[0]:.3f}")
        print(
            f"later: {statistics.median(ours[1:]):.3f} s over {statistics.median(other[1:]):.3f} s:"
            f" {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
