"""The one door to an object store: every request to it, through fsspec.

Guarantees:
1. A primitive is one request of ours, announced by `operation` before it happens; tests record,
   fail or die there.
2. None waits without a deadline: what makes no progress for `timeout` seconds is a TimeoutError. It
   is left behind in a thread that holds up nothing.
3. Whatever a library raises is an OSError that says which object of which store; no credentials.

An object appears as a whole when its put is answered, and is durable then: so object stores say.
"""

import errno
import importlib
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import SaveAbandoned, UsageError

if TYPE_CHECKING:
    from keepstep.store.disk import Disk
    from keepstep.store.ranks import Ranks
    from keepstep.store.remote_resume import Homecoming

_LOOK_SECONDS = 0.2
"""How soon a request that is to be given up is left behind."""
_USER = re.compile(r"://[^/@\s]*@")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^@?#\s]+")
NEVER = threading.Event()
"""For what is not given up before its deadline."""


def shown(text: str) -> str:
    """Return a text without what an address in it may hold of credentials."""
    return _USER.sub("://***@", text)


class ObjectStore:
    """The objects below one URL, such as `s3://bucket/prefix`; keys are relative to it.

    UsageError where fsspec, or what it needs for the protocol, is missing. `timeout`: seconds
    without progress after which a request has failed.
    """

    def __init__(self, url: str, *, timeout: float = 300.0) -> None:
        self.shown = shown(url).rstrip("/")
        if not _ADDRESS.fullmatch(url):
            # Not said in more words: it may hold credentials in any place.
            raise UsageError(
                f"the remote {self.shown.partition('?')[0]} is no address such as"
                " s3://bucket/prefix",
                hint="It has no user, password, query or white space: credentials belong in the"
                " environment.",
            )
        self.protocol = url.partition("://")[0]
        self.timeout = timeout
        # Listings that are remembered would hide what another session did.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.protocol in ("file", "local"):
            options["auto_mkdir"] = True
        try:
            core = importlib.import_module("fsspec.core")
            self._fs, root = core.url_to_fs(url, **options)
        except ImportError as error:
            raise UsageError(
                f"the remote {self.shown} needs a package that is not there: {error}",
                hint="What s3:// needs comes with: pip install 'keepstep[remote]'",
            ) from error
        except ValueError as error:
            raise UsageError(f"the remote {self.shown} cannot be used: {error}") from error
        self._root = root.rstrip("/")

    def operation(self, name: str, key: str) -> None:
        """Announce a request that is about to happen; the seam of the tests."""

    def put_file(self, path: Path, key: str, *, halt: threading.Event = NEVER) -> None:
        """Put a file under a key. Large ones go in parts and appear when all are there."""

        def work(progress: "_Progress") -> None:
            # Made here: fsspec is imported by now, and by no one who has no remote.
            callback = importlib.import_module("fsspec.callbacks").Callback()
            callback.relative_update = progress.more
            self._fs.put_file(str(path), self._at(key), callback=callback)

        self._do("put_file", key, work, halt)

    def put(self, key: str, data: bytes, *, halt: threading.Event = NEVER) -> None:
        """Put some bytes under a key, in place of what was there."""
        self._do("put", key, lambda _: self._fs.pipe_file(self._at(key), data), halt)

    def copy(self, key: str, new_key: str) -> None:
        """Have the store put the bytes under a key under another one too."""
        self._do("copy", key, lambda _: self._fs.cp_file(self._at(key), self._at(new_key)), NEVER)

    def read(
        self,
        key: str,
        *,
        start: int | None = None,
        end: int | None = None,
        halt: threading.Event = NEVER,
    ) -> bytes:
        """Return the bytes under a key, or a range of them."""
        read = self._do(
            "read", key, lambda _: self._fs.cat_file(self._at(key), start=start, end=end), halt
        )
        return bytes(read)

    def sizes(self, *, halt: threading.Event = NEVER) -> dict[str, int]:
        """Return all keys with the sizes of their objects, as they are now."""

        def work(_: "_Progress") -> dict[str, int]:
            found = self._fs.find(self._root, detail=True)
            return {
                name[len(self._root) + 1 :]: int(facts["size"] or 0)
                for name, facts in found.items()
                if name.startswith(f"{self._root}/")
            }

        listed: dict[str, int] = self._do("list", "", work, halt)
        return listed

    def delete(self, key: str, *, halt: threading.Event = NEVER) -> None:
        """Delete what is under a key; nothing there is as good."""
        try:
            self._do("delete", key, lambda _: self._fs.rm_file(self._at(key)), halt)
        except FileNotFoundError:
            return

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _do(
        self, name: str, key: str, work: Callable[["_Progress"], Any], halt: threading.Event
    ) -> Any:
        """Make a request in a thread that can be left behind; return or raise what it did."""
        self.operation(name, key)
        place = f"{self.shown}/{key}"
        progress = _Progress()
        box: Future[Any] = Future()

        def run() -> None:
            try:
                box.set_result(work(progress))
            except BaseException as error:
                box.set_exception(error)

        threading.Thread(target=run, name="keepstep-remote", daemon=True).start()
        while not wait([box], _LOOK_SECONDS).done:
            if halt.is_set():
                raise SaveAbandoned(f"{name} of {place} was given up")
            if time.monotonic() - progress.last > self.timeout:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"no answer to {name} for {self.timeout:g} s", place
                )
        error = box.exception()
        if error is not None:
            raise _as_os_error(error, place) from error
        return box.result()


class _Progress:
    """When a request last got on."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def more(self, _count: int = 1) -> None:
        """Note that it got on just now."""
        self.last = time.monotonic()


def _as_os_error(error: BaseException, place: str) -> OSError:
    number = errno.EIO
    for kind, known in ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES)):
        if isinstance(error, kind):
            number = known
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        number = error.errno or number
    text = shown(str(error)) or os.strerror(number)
    return OSError(number, f"{type(error).__name__}: {text}", place)


def open_home(
    remote: str | ObjectStore,
    retries: int,
    folder: Path,
    disk: "Disk",
    ranks: "Ranks",
    tell: Callable[..., None],
) -> "Homecoming | None":
    """Return the way between a folder and a remote, its URL or its objects; None without one."""
    if not remote:
        return None
    from keepstep.store.remote_commit import Remote
    from keepstep.store.remote_resume import Homecoming

    objects = ObjectStore(remote) if isinstance(remote, str) else remote
    there = Remote(objects, retries=retries)
    return Homecoming(there, folder, disk=disk, ranks=ranks, tell=tell)
