"""How the ranks of a run come together, before any of them enters a collective.

Guarantees:
1. Where some ranks do not come in time, each one that came ends with the same error, which names
   the missing ones.
2. No wait is without a deadline, also where who holds the rendezvous store is frozen: a thread
   asks it, and the main thread watches the clock.
3. From the moment when all are there nobody waits for the network: a connection has been seen to
   take five seconds, and a rank that is late to tell of itself is taken for lost.

Without this a rank that never started would be a hang of half an hour, and then an address without
a name.
"""

import json
import queue
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from keepstep.errors import KeepstepError, Unhealthy, UsageError

COLLECTIVE_DEADLINE = timedelta(minutes=30)
"""For what may honestly take long, such as writing; a lost peer is found by `Health`."""

_HEAR_SECONDS = 4.0
_ALL = "all"
_FATE = "fate"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet, which of them this is, and how long it waits for the others.

    ``attempt``: the start of this very group, among those that meet at one address.
    ``holds_store``: whether this process holds the store, and not another rank or a launcher.
    """

    host: str
    port: int
    attempt: str
    rank: int
    size: int
    holds_store: bool
    within_seconds: float

    def meet(self) -> tuple[Any, Any]:
        """Return two connections to the store when all ranks are there, one for each thread.

        Unhealthy names those that did not come; UsageError says that the port is taken.
        """
        found: queue.SimpleQueue[tuple[Any, Any] | Exception] = queue.SimpleQueue()

        def come() -> None:
            try:
                found.put(self._come())
            except (KeepstepError, RuntimeError) as error:
                found.put(error)

        threading.Thread(target=come, name="keepstep-rendezvous", daemon=True).start()
        try:
            result = found.get(timeout=self.within_seconds + _HEAR_SECONDS + 1)
        except queue.Empty:
            result = self._no_store("does not answer")
        if isinstance(result, Exception):
            raise result
        return result

    def _come(self) -> tuple[Any, Any]:
        until = time.monotonic() + self.within_seconds
        store, another = self._connection(self.holds_store), self._connection(False)
        try:
            store.set(f"here/{self.rank}", "")
            if store.add("here", 1) == self.size:
                store.set(_FATE, _ALL)
            left = max(until - time.monotonic(), 0.001)
            self._hear(store, timedelta(seconds=left))
            return store, another
        except RuntimeError as error:
            raise self._no_store(f"is gone ({error})") from error

    def _connection(self, holds_store: bool) -> Any:
        """Return a connection as soon as somebody holds the store.

        Each attempt has keys of its own: a launcher that starts lost ranks again keeps its store,
        in which torch's own rendezvous would find the addresses of the dead and the verdict on
        them.
        """
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=holds_store,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.within_seconds),
            )
        except RuntimeError as error:
            if holds_store:
                raise UsageError(
                    f"rank 0 cannot hold the rendezvous store on port {self.port}: {error}",
                    hint="Set MASTER_PORT to a port that is free.",
                ) from error
            raise self._no_store(f"did not come ({error})") from error
        store.set_timeout(COLLECTIVE_DEADLINE)
        return PrefixStore(f"keepstep/{self.attempt}", store)

    def _hear(self, store: Any, left: timedelta) -> None:
        """Return when all are there; raise, on each that came, where the first gave up waiting."""
        from torch.distributed import DistStoreError

        try:
            store.wait([_FATE], left)
        except DistStoreError:
            verdict = [self._present(store), socket.gethostname(), self.within_seconds]
            store.compare_set(_FATE, "", json.dumps(verdict))
        fate = store.get(_FATE).decode()
        if fate == _ALL:
            return
        came, host, seconds = json.loads(fate)
        self._let_hear(store, came)
        missing = [rank for rank in range(self.size) if rank not in came]
        raise Unhealthy(
            f"ranks {missing} of {self.size} did not come within {seconds:g} s (waiting on {host})",
            hint="Look at how they ended, then run the same command to continue."
            " distributed.join_within is the time that they have.",
        )

    def _let_hear(self, store: Any, came: list[int]) -> None:
        """Keep the store, where it is held here, until all that came have heard."""
        from torch.distributed import DistStoreError

        store.set(f"heard/{self.rank}", "")
        if not self.holds_store:
            return
        try:
            store.wait([f"heard/{rank}" for rank in came], timedelta(seconds=_HEAR_SECONDS))
        except DistStoreError:
            # One of them ended meanwhile, and nobody waits for it.
            return

    def _present(self, store: Any) -> list[int]:
        return [rank for rank in range(self.size) if store.check([f"here/{rank}"])]

    def _no_store(self, what: str) -> Unhealthy:
        return Unhealthy(
            f"rank {self.rank} on {socket.gethostname()}: the rendezvous store on"
            f" {self.host}:{self.port}, which rank 0 or its launcher holds, {what}",
            hint="Look at how that ended, then run the same command to continue."
            " distributed.join_within is how long it is waited for.",
        )
