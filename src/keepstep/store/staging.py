"""What an asynchronous save holds between the cut and the copy, and the proof that they are one.

Guarantees:
1. What is written is the state at the cut. What is small, or named as moving, is copied before
   `save` returns; the rest is copied by the writer, while whoever changes it waits at the fence.
2. A tensor that was written to all the same, by a step without a fence, is found: by its version
   counter, and by samples of its bytes, since fused optimizers, `.data` and numpy do not move the
   counter. The save then fails by that tensor's name.
3. The memory of the copies is allocated once and used again: saving does not grow a process.
4. Where memory is bounded, nothing is copied but what is small or moving: the rest is written from
   where it is, and whoever changes it waits until it is durable.

Not found: a write that misses every sample and moves no counter, such as one row of an embedding
changed through `.data`.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from keepstep.errors import SaveFailed
from keepstep.store.tensors import Snapshot, bytes_in, bytes_of, in_file_order

_AT_ONCE_BYTES = 16 << 10
"""What is at most so large is copied at the cut: to watch it would cost as much."""
_SAMPLES = 32
_WIDEST_BYTES = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Arena:
    """Host memory for the copies of one save at a time; it grows to the largest and stays."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, size: int, *, pinned: bool) -> None:
        """Have room for so many bytes."""
        if size > self._memory.numel():
            # The old one goes first: both would be twice the state.
            self._memory, self._typed = torch.empty(0, dtype=torch.uint8), {}
            size += -size % _WIDEST_BYTES
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def place(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor for a copy of `like` that begins at byte `start`.

        In the order of a file, wide types first, each is aligned to its own width.
        """
        memory = self._typed.get(like.dtype)
        if memory is None:
            memory = self._typed[like.dtype] = self._memory.view(like.dtype)
        rows = like if like.is_contiguous() else torch.empty(like.shape, device="meta")
        return memory.as_strided(like.shape, rows.stride(), start // like.element_size())


class Cut:
    """The state that a save is of: some of it copied already, the rest watched until it is.

    Training waits while it is taken: what can be left to the writer is.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        arena: Arena,
        *,
        moving: Collection[str],
        everything: bool,
        in_place: bool,
    ) -> None:
        """Take the cut. ``moving``: names copied at once; ``everything``: all of them are.

        ``in_place``: the rest is never copied.
        """
        self._snapshot = snapshot
        self._arena = arena
        self._in_place = in_place
        self._watched: list[_Watched] = []
        now: list[tuple[str, int, torch.Tensor]] = []
        start = 0
        for name in in_file_order(snapshot):
            local = snapshot.parts[name].local
            size = bytes_in(local)
            at_once = everything or size <= _AT_ONCE_BYTES or name in moving
            rows = None if at_once else _sampled(local)
            if rows is None:
                now.append((name, start, local))
            else:
                item = _Watched(name, local, start, _version(local), rows, _copy_of(rows))
                self._watched.append(item)
            if rows is None or not in_place:
                start += size
        cuda = any(item.source.is_cuda for item in self._watched)
        arena.reserve(start, pinned=cuda or any(local.is_cuda for _, _, local in now))
        self._places = {name: arena.place(at, local) for name, at, local in now}
        if now:
            torch._foreach_copy_(list(self._places.values()), [local for _, _, local in now])
        # On a GPU the update before the cut may still be running; the copy waits for it.
        self._event = None
        if cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def copy(self) -> Snapshot:
        """Copy the rest and return the state in memory of its own; SaveFailed if it was changed.

        Called by the writer, once. What stays in place is confirmed when it is written.
        """
        if self._in_place:
            return self._with_copies(confirm=self._confirm)
        if self._event is None:
            self._copy_watched()
        else:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(self._event)
            with torch.cuda.stream(stream):
                self._copy_watched()
            stream.synchronize()
        self._confirm()
        self._watched = []
        return self._with_copies(confirm=lambda: None)

    def _confirm(self) -> None:
        """Raise SaveFailed where something that is watched was changed since the cut."""
        changed = [item.name for item in self._watched if item.is_changed()]
        if changed:
            raise SaveFailed(
                f"{', '.join(changed[:3])}{' and others' * (len(changed) > 3)} changed while being"
                " saved; nothing was saved",
                hint="Call store.fence() before whatever writes to the weights, as"
                " store.fence_before(optimizer) does, or save with copy_now=True.",
            )

    def _with_copies(self, *, confirm: Callable[[], None]) -> Snapshot:
        parts = self._snapshot.parts
        copied = {name: parts[name]._replace(local=place) for name, place in self._places.items()}
        return replace(self._snapshot, parts={**parts, **copied}, confirm=confirm)

    def _copy_watched(self) -> None:
        for item in self._watched:
            place = self._places[item.name] = self._arena.place(item.start, item.source)
            if item.source.device.type == "cpu" and item.source.is_contiguous():
                # Not torch's copy, whose threads would be taken from the training.
                np.copyto(np.asarray(bytes_of(place)), np.asarray(bytes_of(item.source)))
            else:
                place.copy_(item.source, non_blocking=True)


class _Watched(NamedTuple):
    """A tensor that is still to be copied, and what it was like at the cut."""

    name: str
    source: torch.Tensor
    start: int
    version: int
    rows: torch.Tensor
    sample: Any

    def is_changed(self) -> bool:
        """Tell whether something wrote to it since the cut."""
        if _version(self.source) != self.version:
            return True
        now = _copy_of(self.rows)
        if isinstance(now, np.ndarray):
            return not np.array_equal(now, self.sample)
        return not torch.equal(now, self.sample)


def _copy_of(rows: torch.Tensor) -> Any:
    return rows.numpy().copy() if rows.device.type == "cpu" else rows.clone()


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode have no counter.
    return 0 if tensor.is_inference() else tensor._version


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the first and the last element of equal parts, up to both ends, as integers.

    None where there are gaps between the elements.
    """
    if not tensor.is_contiguous():
        spans = zip(tensor.shape, tensor.stride(), strict=True)
        if 1 + sum((size - 1) * stride for size, stride in spans) != tensor.numel():
            return None
    step = tensor.numel() // _SAMPLES
    integers = tensor.view(_INTEGERS[tensor.element_size()])
    return integers.as_strided((_SAMPLES, 2), (step, step - 1))
