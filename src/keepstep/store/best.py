"""The best so far: a number that only a better one can replace.

Guarantees: nan and inf never win; a tie keeps the older; the best so far is part of every manifest
and is compared on resume with what the kept manifests measured themselves.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from keepstep.store.manifest import Best, Manifest


class BestSoFar:
    """Holds the best value of one metric and the checkpoint that had it."""

    def __init__(self, *, metric: str | None, mode: Literal["min", "max"]) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"best_mode is {mode!r}; it must be 'min' or 'max'")
        self.metric = metric
        self.mode = mode
        self.best: Best | None = None

    def after(self, metrics: Mapping[str, float], *, sequence: int, step: int) -> Best | None:
        """Return what the best would be with a checkpoint that measured `metrics`."""
        if self.metric is None or self.metric not in metrics:
            return self.best
        value = float(metrics[self.metric])
        if not math.isfinite(value) or not self._is_better(value, self.best):
            return self.best
        return Best(metric=self.metric, mode=self.mode, value=value, sequence=sequence, step=step)

    def restore(
        self, chosen: Manifest, kept: Sequence[Manifest], *, must_stand: bool
    ) -> Best | None:
        """Take the best of the chosen manifest, or of a kept one on its line that is better.

        A best of another metric or mode is not comparable and begins anew. With ``must_stand`` a
        best whose checkpoint is gone, which only someone else can have done, gives way to the
        best of those that are there, and is returned; without it, it keeps its value.
        """
        best = chosen.best
        same = best is not None and (best.metric, best.mode) == (self.metric, self.mode)
        self.best = best if same else None
        there = {manifest.sequence for manifest in kept}
        gone = self.best if self.best is not None and self.best.sequence not in there else None
        if gone is not None and must_stand:
            self.best = None
        for manifest in sorted(kept, key=lambda m: m.sequence):
            if manifest.sequence <= chosen.sequence:
                self.best = self.after(
                    manifest.metrics, sequence=manifest.sequence, step=manifest.step
                )
        return gone if must_stand else None

    def _is_better(self, value: float, than: Best | None) -> bool:
        if than is None:
            return True
        return value < than.value if self.mode == "min" else value > than.value
