"""The line of checkpoints that a session continues: whose it is, the newest, the best, the next.

The sequence number is one more than any that the folder has ever shown, also in `aside/`, so a
checkpoint that was given up never looks newer than one that follows.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

from keepstep.store.best import BestSoFar
from keepstep.store.facts import Saved
from keepstep.store.manifest import Facts, Manifest, fingerprint_of


class Line:
    """What the next checkpoint follows from. In the flight of a save only its writer changes it."""

    def __init__(self, *, metric: str | None, mode: Literal["min", "max"]) -> None:
        self.run_id = secrets.token_hex(8)
        self.newest: Manifest | None = None
        self.best = BestSoFar(metric=metric, mode=mode)
        self.next_sequence = 1

    def facts(self, given: Mapping[str, Any], *, mesh: Mapping[str, int]) -> Facts:
        """Return what the manifest of the next checkpoint says, given what the caller knows."""
        return Facts(
            **given,
            run_id=self.run_id,
            sequence=self.next_sequence,
            parent=self.newest.sequence if self.newest is not None else None,
            fingerprint=fingerprint_of(given["must_match"]),
            best=self.best.after(given["metrics"], sequence=self.next_sequence, step=given["step"]),
            mesh=dict(mesh),
        )

    def adopt(self, saved: Saved, facts: Facts, tell: Callable[..., None]) -> None:
        """Take what stands now for this session's newest, if it is.

        It is also where an attempt had committed it and could not say so: its number must not be
        given again, and its best is the best.
        """
        manifest = saved.manifest
        newest = self.newest.sequence if self.newest is not None else 0
        if manifest.sequence > newest:
            self.next_sequence = max(self.next_sequence, manifest.sequence + 1)
            self.newest = manifest
            self.best.best = manifest.best
            tell("committed", manifest=manifest, path=saved.path, seconds=saved.seconds)
        if not saved.new:
            self.best.best = self.best.after(
                facts.metrics, sequence=manifest.sequence, step=facts.step
            )
