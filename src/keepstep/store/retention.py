"""Which checkpoints to keep: a pure function of the manifests and the policy.

Guarantees: the order is that of the commits, never of names, steps or times; a file and its copies
are one checkpoint, and count once. What is newest,
best, pinned, a milestone, or on a step to be kept for ever is always kept. Hours and days are
those of the manifests' times in UTC, whole ones; within one, the newest by the order of commits
stays. What is dated later than `now`, because a clock was set back, is kept as if it were not.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, fields

from keepstep.store.manifest import Manifest

_HOUR_SECONDS, _DAY_SECONDS = 3600, 86400


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The policy. `keep_last_n = 0` keeps all."""

    keep_last_n: int = 2
    keep_best_n: int = 1
    keep_every: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int):
                raise ValueError(f"{item.name} is {value!r}; it must be a whole number")
            if value < 0:
                raise ValueError(f"{item.name} is {value}; it cannot be negative")

    def at_once(self, *, judged: bool) -> int:
        """Return how many checkpoints stand at once at the most; 0 where all are kept.

        The last, the best where none of them is among the last, and the one that is being written.
        Not counted is what only comes with time. ``judged``: whether a metric decides a best.
        """
        best = max(1, self.keep_best_n) if judged else 0
        return self.keep_last_n + best + 1 if self.keep_last_n else 0


def reasons_to_keep(
    manifests: Sequence[Manifest],
    policy: Retention,
    *,
    now: float,
    best: int | None = None,
    pinned: Set[int] = frozenset(),
) -> dict[int, list[str]]:
    """Return for each sequence number why it is kept; what has no reason may go.

    ``best``: the sequence of the best so far. ``now``: the time, in seconds since 1970.
    """
    once = {manifest.sequence: manifest for manifest in manifests}
    ordered = [once[sequence] for sequence in sorted(once)]
    reasons: dict[int, list[str]] = {manifest.sequence: [] for manifest in ordered}
    plain = [manifest for manifest in ordered if not manifest.milestone]
    if policy.keep_last_n == 0:
        for manifest in plain:
            reasons[manifest.sequence].append("all are kept")
    elif plain:
        for manifest in plain[-policy.keep_last_n :]:
            reasons[manifest.sequence].append(f"last {policy.keep_last_n}")
    for manifest in ordered:
        if manifest.milestone:
            reasons[manifest.sequence].append("milestone")
        if policy.keep_every and manifest.step % policy.keep_every == 0:
            reasons[manifest.sequence].append(f"every {policy.keep_every:,}")
        if manifest.sequence in pinned:
            reasons[manifest.sequence].append("pinned")
    for sequence in _newest_of_each(ordered, policy.keep_hourly, _HOUR_SECONDS, now):
        reasons[sequence].append("hourly")
    for sequence in _newest_of_each(ordered, policy.keep_daily, _DAY_SECONDS, now):
        reasons[sequence].append("daily")
    for sequence in _best(ordered, policy.keep_best_n, best):
        reasons[sequence].append("best")
    if ordered:
        reasons[ordered[-1].sequence].append("newest")
    return reasons


def _newest_of_each(
    ordered: Sequence[Manifest], count: int, seconds: int, now: float
) -> Iterable[int]:
    """Return the sequence of the newest of each of the last `count` periods, this one included."""
    oldest = now // seconds - count
    newest = {
        manifest.time // seconds: manifest.sequence
        for manifest in ordered
        if manifest.time // seconds > oldest
    }
    return newest.values() if count else ()


def _best(ordered: Sequence[Manifest], count: int, best: int | None) -> list[int]:
    """Return the sequences of the best `count`; the best so far is always among them."""
    present = {manifest.sequence for manifest in ordered}
    first = [best] if best in present and best is not None else []
    named = next((m.best for m in reversed(ordered) if m.best is not None), None)
    if named is None or count <= 1:
        return first
    sign = 1.0 if named.mode == "min" else -1.0
    scored = [
        (sign * manifest.metrics[named.metric], manifest.sequence)
        for manifest in ordered
        if math.isfinite(manifest.metrics.get(named.metric, math.nan))
    ]
    ranked = [sequence for _, sequence in sorted(scored) if sequence not in first]
    return (first + ranked)[:count]
