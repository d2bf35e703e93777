"""The ranks of a loop of one's own: whatever process group it has initialised, or one process.

Guarantees: an exchange returns on every rank or raises on it within the deadline; a rank that dies
is noticed at once. Only plain values travel, as JSON: no rank can make another run code.

It has a group of its own, over gloo: the training group may be NCCL's, whose watchdog kills
healthy ranks that wait while one of them writes.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from keepstep.errors import KeepstepError, Unhealthy
from keepstep.store.ranks import OneRank, Ranks

SAME_ORDER = "Save, choose, restore and close on all ranks, in the same order."

_joined: dict[float, tuple[Any, "JoinedRanks"]] = {}
"""By deadline: the loop's process group, and the ranks that were joined for it."""


def gather_plain(
    value: Any, *, what: str, group: Any, size: int, lost: AbstractContextManager[None]
) -> list[Any]:
    """Return every rank's plain value, by rank, on every rank of a gloo group.

    ``lost``: names the lost peer of a collective that failed. KeepstepError on all where the ranks
    are not in the same exchange.
    """
    import torch
    import torch.distributed as dist

    text = json.dumps([what, value]).encode()
    length = torch.tensor([len(text)], dtype=torch.int64)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    with lost:
        dist.all_gather(lengths, length, group=group)
        longest = max(int(item) for item in lengths)
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
        dist.all_gather(texts, padded, group=group)
    answers = [json.loads(item.numpy().tobytes()) for item in texts]
    for rank, (place, _) in enumerate(answers):
        if place != answers[0][0]:
            raise KeepstepError(
                f"rank 0 is in {answers[0][0]!r}, rank {rank} in {place!r}: they do not do the"
                " same things in the same order",
                hint=SAME_ORDER,
            )
    return [answer for _, answer in answers]


class JoinedRanks:
    """The ranks of the initialised process group, with a deadline for each exchange."""

    def __init__(self, *, deadline_seconds: float) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._deadline_seconds = deadline_seconds
        with self._lost_peers_named("joining"):
            self._group: Any = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=deadline_seconds)
            )

    def meet(self, what: str) -> None:
        """Wait for nobody: each exchange has its deadline."""
        del what

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """Return every rank's plain value, by rank; Unhealthy where one is gone or too late."""
        lost = self._lost_peers_named(what)
        return gather_plain(value, what=what, group=self._group, size=self.size, lost=lost)

    def apart(self) -> "JoinedRanks":
        """Return the same ranks with a group of its own, which another thread may use."""
        return JoinedRanks(deadline_seconds=self._deadline_seconds)

    @contextmanager
    def _lost_peers_named(self, what: str) -> Iterator[None]:
        try:
            yield
        # Lost peers and late ones: every class for them is below this one.
        except RuntimeError as error:
            raise Unhealthy(
                f"rank {self.rank} lost the others in {what}, or waited longer than"
                f" {self._deadline_seconds:g} s for them: {error}",
                hint=SAME_ORDER,
            ) from error


def ranks_of_this_process(*, deadline_seconds: float) -> Ranks:
    """Return the ranks of the process group that is initialised now, or a world of one."""
    # Where nobody has imported it, nobody has initialised it.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return OneRank()
    if dist.get_world_size() == 1:
        return OneRank()
    world, ranks = _joined.get(deadline_seconds, (None, None))
    # A loop may have destroyed its group and made another: ours died with it.
    if ranks is None or world is not dist.group.WORLD:
        ranks = JoinedRanks(deadline_seconds=deadline_seconds)
        _joined[deadline_seconds] = (dist.group.WORLD, ranks)
    return ranks
