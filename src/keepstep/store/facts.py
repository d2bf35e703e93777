"""What a save is told besides the state, checked before a byte is written; what it returns."""

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from keepstep.errors import UnsafeState, UsageError
from keepstep.store.manifest import Best, Facts, Manifest


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A committed checkpoint; `new` is False where it was there already, from this very state.

    `seconds`: from the call until all was done, in the remote too.
    """

    path: Path
    manifest: Manifest
    new: bool
    seconds: float

    @property
    def bytes(self) -> int:
        """Size of all data files."""
        return self.manifest.size


class GivenFacts(TypedDict, total=False):
    """What a save may be told besides the state and its step. All of it is in the manifest."""

    updates: int | None
    """Optimizer steps applied; the step's own number if not given."""
    samples: int
    tokens: int
    metrics: Mapping[str, float] | None
    """Values by name; the store's `best_metric` among them decides the best."""
    milestone: bool
    """Whether retention keeps it for ever."""
    must_match: Mapping[str, Any] | None
    """What must be the same when the run is continued."""
    environment: Mapping[str, Any] | None
    """Versions, hardware and the like, for people."""


def checked(step: Any, given: GivenFacts) -> dict[str, Any]:
    """Return every fact in the form that a manifest holds; UnsafeState names one that is wrong."""
    unknown = sorted(set(given) - set(GivenFacts.__annotations__))
    if unknown:
        raise TypeError(f"save() got an unexpected keyword argument {unknown[0]!r}")
    updates = given.get("updates")
    return {
        "step": count_of("step", step),
        "updates": count_of("updates", step if updates is None else updates),
        "samples": count_of("samples", given.get("samples", 0)),
        "tokens": count_of("tokens", given.get("tokens", 0)),
        "must_match": table_of("must_match", given.get("must_match")),
        "environment": table_of("environment", given.get("environment")),
        "metrics": metrics_of(given.get("metrics")),
        "milestone": bool(given.get("milestone", False)),
    }


def shared(facts: Facts) -> dict[str, str]:
    """Return, as text, what all ranks must say alike of a save."""
    names = ("step", "updates", "samples", "tokens", "metrics", "milestone", "must_match")
    return {name: json.dumps(getattr(facts, name), sort_keys=True) for name in names}


def require_shared(told: list[dict[str, str]]) -> None:
    """Raise where a rank saves another step, or knows it as something else than the first does."""
    for rank, one in enumerate(told):
        differing = [f"{name} {one[name]}" for name in one if one[name] != told[0][name]]
        if differing:
            first = ", ".join(told[0][text.partition(" ")[0]] for text in differing)
            raise UsageError(
                f"rank {rank} saves {', '.join(differing)}, and rank 0 {first}",
                hint="Give save() the same facts on all ranks: metrics are means over all of them.",
            )


def count_of(name: str, value: Any) -> int:
    """Return a counter as an int; UnsafeState where it is none or is negative."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise UnsafeState(f"{name} is {value!r}, not a whole number") from error
    if number < 0:
        raise UnsafeState(f"{name} is {number}; it cannot be negative")
    return number


def metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats by name; UnsafeState names one that is no number."""
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise UnsafeState(f"the metric {name} is {value!r}, not a number") from error
    return found


def table_of(what: str, table: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a table as JSON gives it back, so that it equals what a manifest holds of it.

    UnsafeState where JSON cannot hold it: nan, paths, objects.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(table or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UnsafeState(f"{what} holds what JSON cannot: {error}") from error
    return plain


def manifest_of(
    facts: Facts, told: dict[str, Any], *, files: Any = (), tensors: Any = (), plain: Any = None
) -> Manifest:
    """Return the manifest of a save: what is known before it, and what the first rank told."""
    known = {name: getattr(facts, name) for name in facts.__dataclass_fields__}
    known["sequence"] = told["sequence"]
    known["best"] = None if told["best"] is None else Best(**told["best"])
    return Manifest(
        **known,
        time=told["time"],
        world_size=told["world_size"],
        commit_method=told["method"],
        files=tuple(files),
        tensors=tuple(tensors),
        plain=plain,
    )


def told_of(standing: Manifest) -> dict[str, Any]:
    """Return what the other ranks hear where the state is committed already."""
    best = None if standing.best is None else asdict(standing.best)
    return {
        "time": standing.time, "sequence": standing.sequence, "best": best, "new": False
    }  # fmt: skip


def is_same_run(standing: Manifest, new: Manifest) -> bool:
    """Tell whether a standing checkpoint is of this run and config; its state is not looked at."""
    return standing.run_id == new.run_id and standing.must_match == new.must_match
