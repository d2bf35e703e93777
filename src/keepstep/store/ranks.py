"""What the ranks of a save or a load tell each other.

Guarantees:
1. `together` and `first` return on every rank or raise on every rank, the same error with the
   rank, the host and the cause: nobody goes on alone, and nobody is left waiting.
2. Only plain values travel. No rank runs code of another's.

The store knows no process groups: `Ranks` is what it needs of them, and `OneRank` is the world of
a single process. `keepstep.distributed` has the one over gloo.
"""

import os
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from keepstep import errors
from keepstep.errors import KeepstepError, Unhealthy

Result = TypeVar("Result")


class Ranks(Protocol):
    """The processes that save and load together; each call is made by all of them in order."""

    rank: int
    size: int

    def meet(self, what: str) -> None:
        """Return when all ranks are in `what`; raise, naming the missing, if some stay away."""
        ...

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """Return every rank's plain value, by rank, on every rank.

        ``what`` names the exchange; ranks that meet in two different ones all raise.
        """
        ...

    def apart(self) -> "Ranks":
        """Return the same ranks with exchanges of their own, which another thread may make."""
        ...


class OneRank:
    """A world of one process."""

    rank = 0
    size = 1

    def meet(self, what: str) -> None:
        """Wait for nobody."""
        del what

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """Return the value alone."""
        del what
        return [value]

    def apart(self) -> "OneRank":
        """Return itself: nothing is exchanged."""
        return self


def together(ranks: Ranks, what: str, work: Callable[[], Any]) -> list[Any]:
    """Do `work` on every rank and return what each found; the first rank's error is everyone's."""
    if ranks.size == 1:
        return [work()]
    own: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Unhealthy:
        raise
    # Whatever it is, the others must hear of it before it goes on its way.
    except Exception as error:
        own = error
    told = {"result": result, "error": None if own is None else _told(own, ranks)}
    answers = ranks.gather(told, what=what)
    _raise_first([answer["error"] for answer in answers], own, ranks)
    return [answer["result"] for answer in answers]


def first(ranks: Ranks, what: str, work: Callable[[], Any]) -> Any:
    """Do `work` on rank 0 and return its plain result everywhere; its error is everyone's."""
    return together(ranks, what, work if ranks.rank == 0 else lambda: None)[0]


def require_alike(written: list[dict[str, Any]]) -> None:
    """Raise where the ranks do not save the same state: a part of it would be another's."""
    differing = [n for n, one in enumerate(written) if one["state"] != written[0]["state"]]
    if differing:
        raise KeepstepError(
            f"ranks {differing} hold another plain state, or other tensors, than rank 0",
            hint="Everything but the shards of tensors must be the same on all ranks.",
        )


def _told(error: Exception, ranks: Ranks) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "errno": error.errno if isinstance(error, OSError) else None,
        "message": error.message if isinstance(error, KeepstepError) else str(error),
        "hint": error.hint if isinstance(error, KeepstepError) else "",
        "rank": ranks.rank,
        "host": socket.gethostname(),
    }


def _raise_first(told: list[dict[str, Any] | None], own: Exception | None, ranks: Ranks) -> None:
    failed = next((error for error in told if error is not None), None)
    if failed is None:
        return
    if own is not None and failed["rank"] == ranks.rank:
        raise own
    raise as_error(failed) from own


def as_error(told: dict[str, Any]) -> Exception:
    """Return another rank's error as one of the same kind, naming the rank and its host."""
    where = f"rank {told['rank']} on {told['host']}"
    if told["errno"] is not None:
        return OSError(told["errno"], f"{os.strerror(told['errno'])} ({where}: {told['message']})")
    kind = getattr(errors, told["kind"], None)
    if isinstance(kind, type) and issubclass(kind, KeepstepError) and kind.__init__ is _PLAIN:
        return kind(f"{told['message']} ({where})", hint=told["hint"])
    return KeepstepError(f"{where} failed: {told['kind']}: {told['message']}")


_PLAIN = KeepstepError.__init__
