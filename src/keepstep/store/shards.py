"""Which part of a tensor this process holds, and which of several holders writes it.

Guarantees: both follow from the tensor's own placement, without a word between the ranks; of all
holders of a region exactly one writes it, and the bytes are spread over them.

Torch's planner gathers every rank's plan at every save, which costs more than writing where there
are many small tensors. Here a region is looked up by (shape, mesh, placements), once.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from keepstep.errors import UnsafeState
from keepstep.store.ranks import Ranks

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A block of a tensor: where it begins and how large it is, by axis."""

    offset: Shape
    shape: Shape


class Part(NamedTuple):
    """What this process holds of a tensor whose shape is `whole`: `local` is the `region` of it.

    `copies` is how many processes hold that region, and `copy` which of them this one is.
    One is made for each tensor while the training waits, so it is a tuple, which is made quickly.
    """

    local: torch.Tensor
    whole: Shape
    region: Region
    copies: int
    copy: int

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.whole) * self.local.element_size()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor goes when it is read: the region that is wanted, and what to make of it."""

    region: Region
    assemble: Callable[[torch.Tensor], torch.Tensor]


def part_of(tensor: torch.Tensor, path: str, ranks: Ranks) -> Part:
    """Return what this process holds of a tensor; a plain one is held by all ranks alike."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        shape = tuple(tensor.shape)
        return Part(tensor, shape, region=all_of(shape), copies=ranks.size, copy=ranks.rank)
    shape = tuple(tensor.shape)
    placements = tuple(spec.placements)
    if any(placement.is_partial() for placement in placements):
        raise UnsafeState(f"{path} is a sum that the ranks have not made yet ({placements})")
    region, copies, copy = _held(shape, spec.mesh, placements)
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if tuple(local.shape) != region.shape:
        raise UnsafeState(f"{path}: this rank holds {tuple(local.shape)}, not {region.shape}")
    return Part(local=local, whole=shape, region=region, copies=copies, copy=copy)


def place_like(tensor: torch.Tensor) -> Place | None:
    """Return the place of a tensor that is sharded as this one is; None for one that is whole."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return None
    from torch.distributed.tensor import DTensor

    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    mesh, placements = spec.mesh, tuple(spec.placements)
    region, _, _ = _held(shape, mesh, placements)

    def assemble(local: torch.Tensor) -> torch.Tensor:
        local = local.to(mesh.device_type)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    return Place(region=region, assemble=assemble)


def written_here(parts: Mapping[str, Part]) -> set[str]:
    """Return the names that this process writes: of each region's copies one, by bytes in turn.

    The largest first, each to the copy that has least so far; every rank comes to the same
    answer, because it depends on whole shapes only.
    """
    loads: dict[int, list[int]] = {}
    chosen = {name for name, part in parts.items() if part.copies == 1 and _is_of_use(part)}
    shared = [name for name, part in parts.items() if part.copies > 1]
    for name in sorted(shared, key=lambda name: (-parts[name].bytes, name)):
        part = parts[name]
        load = loads.setdefault(part.copies, [0] * part.copies)
        writer = load.index(min(load))
        load[writer] += part.bytes
        if writer == part.copy and _is_of_use(part):
            chosen.add(name)
    return chosen


def _is_of_use(part: Part) -> bool:
    """Tell whether a part has bytes; of a tensor that is empty as a whole, every part counts."""
    return math.prod(part.region.shape) > 0 or math.prod(part.whole) == 0


@functools.lru_cache(maxsize=4096)
def all_of(shape: Shape) -> Region:
    """Return the region that is the whole of a tensor."""
    return Region(offset=(0,) * len(shape), shape=shape)


@functools.cache
def _held(shape: Shape, mesh: Any, placements: tuple[Any, ...]) -> tuple[Region, int, int]:
    """Return the region that this process holds, how many hold it, and which of them this is."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    coordinate = mesh.get_coordinate()
    copies, copy = _groups_like(mesh)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            copies *= mesh.size(axis)
            copy = copy * mesh.size(axis) + (coordinate[axis] if coordinate else 0)
    if coordinate is None:
        # Not one of them, and all the same it counts what they hold as they do.
        return Region(offset=(0,) * len(shape), shape=(0,) * len(shape)), copies, copies
    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Region(offset=tuple(offset), shape=tuple(local_shape)), copies, copy


def _groups_like(mesh: Any) -> tuple[int, int]:
    """Return how many groups of ranks hold what this one holds, and which of them this one is.

    A mesh that is a slice of another, as that of FSDP beside tensor parallel ranks, has one such
    group for each place along the axes that it leaves out.
    """
    root = mesh._get_root_mesh()
    places = torch.isin(root.mesh, mesh.mesh).nonzero()
    groups, group = 1, 0
    for axis in range(root.ndim):
        if len(set(places[:, axis].tolist())) == 1:
            groups *= root.size(axis)
            group = group * root.size(axis) + int(places[0, axis])
    return groups, group
