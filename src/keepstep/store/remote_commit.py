"""The checkpoints of one run in an object store: how one is put there, and how one goes away.

    put     every rank its share of the data objects of `step_N-SEQUENCE-DIGEST/`
            read session.json: is this session the last that began?
            put manifest.json                                 <- the commit there
            read session.json once more: only now it is acknowledged
    delete  manifest.json first, then the rest
    aside   copy the manifest to aside.json, then delete manifest.json

Guarantees:
1. A checkpoint without a manifest is not there. What is put before it is a leftover, which the next
   session of the run sweeps away.
2. A name holds the digest of the manifest, and the manifest those of all bytes: two sessions never
   put different bytes under one key, whatever each believes.
3. The last session to begin has the prefix. An earlier one finds out before it commits, and before
   it says that it has: what was acknowledged is seen by every session that begins later.
4. Names that are not of this form are never touched.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from keepstep.errors import (
    CheckpointDamaged,
    KeepstepError,
    Locked,
    SaveAbandoned,
    SaveFailed,
)
from keepstep.store.attempts import back_off_seconds
from keepstep.store.catalog import Checkpoint
from keepstep.store.layout import (
    ASIDE_OBJECT,
    MANIFEST_NAME,
    SESSION_OBJECT,
    remote_name,
    remote_place_of,
    step_name,
)
from keepstep.store.manifest import (
    MANIFEST_BYTES_MAX,
    Best,
    Manifest,
    digest_of,
    from_bytes,
)
from keepstep.store.pins import identity_of, read_pins
from keepstep.store.ranks import Ranks, first, together
from keepstep.store.regular import opened
from keepstep.store.remote import NEVER, ObjectStore
from keepstep.store.retention import Retention, reasons_to_keep

Tell = Callable[..., None]
Result = TypeVar("Result")


def named(place: Path) -> tuple[str, Manifest, bytes]:
    """Return the name that a checkpoint in a folder has there; its manifest and the text of it."""
    with opened(place / MANIFEST_NAME) as file:
        text = file.read()
    manifest = from_bytes(text, folder_name=place.name)
    return _name_of(manifest, text), manifest, text


def _name_of(manifest: Manifest, text: bytes) -> str:
    return remote_name(manifest.step, manifest.sequence, digest_of(text))


class Remote:
    """The checkpoints of a run below a URL. What is no exchange of ranks is for rank 0 alone."""

    def __init__(self, objects: ObjectStore, *, retries: int) -> None:
        self.objects = objects
        self.entries: list[Checkpoint] = []
        """What stood there at the last look, in the order of commits, damaged ones first."""
        self._retries = retries
        self._token = secrets.token_hex(16)
        self._known: dict[str, Manifest] = {}
        self._found: dict[str, dict[str, int]] = {}

    @property
    def last_sequence(self) -> int:
        """The highest number that any name shows, whole or not; 0 where there is none."""
        places = [remote_place_of(name) for name in self._found]
        return max((place[1] for place in places if place is not None), default=0)

    def look(self, tell: Tell, halt: threading.Event = NEVER) -> list[Checkpoint]:
        """Return what stands there now. Each manifest is read once: a name stands for its bytes."""
        self._found = {}
        sizes = self.again("list", lambda: self.objects.sizes(halt=halt), tell=tell, halt=halt)
        for key, size in sizes.items():
            name, _, file = key.partition("/")
            if remote_place_of(name) is not None:
                self._found.setdefault(name, {})[file] = size
        whole = [name for name, files in self._found.items() if MANIFEST_NAME in files]
        entries = [self._look_at(name, self._found[name], tell) for name in whole]
        self.entries = sorted(entries, key=lambda e: e.manifest.sequence if e.manifest else -1)
        return self.entries

    def begin(self, tell: Tell) -> int:
        """Take the prefix for this session and sweep what a dead one left.

        Returns `last_sequence`. What is read there is first put: the prefix can be used.
        """
        words = {
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        text = json.dumps(words).encode()
        self.again("begin", lambda: self.objects.put(SESSION_OBJECT, text), tell=tell)
        entries = self.look(tell)
        # After the look: what a later session puts is not among what is swept.
        self.again("begin", self.confirm, tell=tell)
        for entry in entries:
            if entry.manifest is None:
                tell("passed_over", name=self.shown(entry.name), fault=entry.fault)
        for name, files in self._found.items():
            if MANIFEST_NAME not in files and ASIDE_OBJECT not in files:
                self._tidy(partial(self._sweep, name, tell), tell)
        return self.last_sequence

    def put(
        self, folder: Path, step: int, *, ranks: Ranks, halt: threading.Event = NEVER, tell: Tell
    ) -> None:
        """Return when a checkpoint that is committed in `folder` is there too; called by all ranks.

        SaveFailed after the retries: here and there all is as it was. Locked where another session
        has taken the prefix. ``halt``: set to give up, SaveAbandoned.
        """
        started, place = time.monotonic(), folder / step_name(step)
        plan = first(ranks, "remote: begin", lambda: self._plan(place))
        if plan is None:
            return
        name, files = plan

        def again(what: str, work: Callable[[], Any]) -> Any:
            return self.again(what, work, tell=tell, halt=halt, saving=step)

        def put_share() -> None:
            for file in files[ranks.rank :: ranks.size]:
                put = partial(self.objects.put_file, place / file, f"{name}/{file}", halt=halt)
                again("put", put)

        def commit() -> None:
            _, manifest, text = named(place)
            key = f"{name}/{MANIFEST_NAME}"
            again("commit", lambda: self.confirm(halt))
            again("commit", lambda: self.objects.put(key, text, halt=halt))
            again("commit", lambda: self.confirm(halt))
            # It need not be read for the next look.
            self._known[name] = manifest

        together(ranks, "remote: put", put_share)
        first(ranks, "remote: commit", commit)
        tell("uploaded", step=step, name=self.shown(name), seconds=time.monotonic() - started)

    def retain(
        self,
        policy: Retention,
        *,
        best: Best | None,
        pins_of: Path,
        halt: threading.Event,
        tell: Tell,
    ) -> None:
        """Delete what the policy has no reason to keep; what fails is told, and harms no save."""

        def delete_some() -> None:
            pinned = set(read_pins(pins_of))
            there = [entry.manifest for entry in self.look(tell, halt) if entry.manifest]
            # After the look: a later session has its own best, and what it puts is not there yet.
            self.confirm(halt)
            reasons = reasons_to_keep(
                there,
                policy,
                now=time.time(),
                best=best.sequence if best is not None else None,
                pinned={m.sequence for m in there if identity_of(m) in pinned},
            )
            for entry in self.entries:
                if entry.manifest is not None and not reasons[entry.manifest.sequence]:
                    self._delete(entry.name, halt)
                    tell("deleted", name=self.shown(entry.name))

        self._tidy(delete_some, tell)

    def set_aside(self, name: str, tell: Tell) -> None:
        """Have a checkpoint not count any more, with all its bytes where they are."""
        old, new = f"{name}/{MANIFEST_NAME}", f"{name}/{ASIDE_OBJECT}"
        self.again("set aside", lambda: self.objects.copy(old, new), tell=tell)
        self.again("set aside", lambda: self.objects.delete(old), tell=tell)
        tell("set_aside", name=self.shown(name), new_name=new)

    def read_manifest(self, name: str, tell: Tell) -> tuple[bytes, Manifest]:
        """Return a manifest and its text; CheckpointDamaged where it is not that of its name."""
        key = f"{name}/{MANIFEST_NAME}"
        text = self.again("read", lambda: self.objects.read(key), tell=tell)
        manifest = from_bytes(text)
        if name != _name_of(manifest, text):
            raise CheckpointDamaged(f"{MANIFEST_NAME} is that of another checkpoint")
        return text, manifest

    def shown(self, name: str) -> str:
        """Return the address of a checkpoint, for people."""
        return f"{self.objects.shown}/{name}"

    def again(
        self,
        what: str,
        work: Callable[[], Result],
        *,
        tell: Tell,
        halt: threading.Event = NEVER,
        saving: int | None = None,
    ) -> Result:
        """Do some requests, again after an error; the last one says what became of it.

        ``saving``: the step whose save this is a part of.
        """
        for attempt in range(self._retries + 1):
            try:
                return work()
            except OSError as error:
                if attempt == self._retries:
                    raise self._failed(what, error, saving) from error
                tell("remote_retry", what=what, attempt=attempt + 1, error=str(error))
                if halt.wait(back_off_seconds(attempt)):
                    raise SaveAbandoned(f"{what} in {self.objects.shown} was given up") from error
        raise AssertionError("the loop above returns or raises")

    def _failed(self, what: str, error: OSError, saving: int | None) -> KeepstepError:
        then = "look at its address, the access to it and the network; then run the same command"
        if saving is None:
            return KeepstepError(
                f"the remote {self.objects.shown} cannot be used ({what}): {error}",
                hint=f"Nothing is begun without it: {then} again.",
            )
        return SaveFailed(
            f"step {saving} is committed in its folder, and could not be put in"
            f" {self.objects.shown} ({what}): {error}; what was there is as it was",
            hint=f"{then.capitalize()} to continue: that puts it there first.",
        )

    def _plan(self, place: Path) -> tuple[str, list[str]] | None:
        """Return the name of a checkpoint there and its data files; None where it stands there."""
        name, manifest, _ = named(place)
        if any(entry.name == name and entry.manifest is not None for entry in self.entries):
            return None
        return name, [entry.name for entry in manifest.files]

    def confirm(self, halt: threading.Event = NEVER) -> None:
        """Return while no later session has begun; Locked says which has."""
        holder: Any = {}
        try:
            holder = json.loads(self.objects.read(SESSION_OBJECT, halt=halt))
        except ValueError:
            # Not ours, then, whatever it is.
            holder = {}
        holder = holder if isinstance(holder, dict) else {}
        if holder.get("token") != self._token:
            who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
            raise Locked(
                f"{self.objects.shown} was taken over by a later session: {who}"
                f" since {holder.get('since', '?')}",
                hint="That one goes on from what is there. To have both, give this one a prefix and"
                " a folder of its own.",
            )

    def _look_at(self, name: str, files: dict[str, int], tell: Tell) -> Checkpoint:
        place = remote_place_of(name)
        assert place is not None, "only names of this form are looked at"
        fault, manifest = "", self._known.get(name)
        try:
            if files[MANIFEST_NAME] > MANIFEST_BYTES_MAX:
                raise CheckpointDamaged(f"{MANIFEST_NAME} has an absurd size")
            if manifest is None:
                manifest = self.read_manifest(name, tell)[1]
            for entry in manifest.files:
                if files.get(entry.name) != entry.size:
                    there = files.get(entry.name)
                    size = "missing" if there is None else f"{there:,} bytes, not {entry.size:,}"
                    raise CheckpointDamaged(f"{entry.name} is {size}")
        except CheckpointDamaged as error:
            fault, manifest = error.message, None
        else:
            self._known[name] = manifest
        path = Path(PurePosixPath(name))
        return Checkpoint(path=path, step=place[0], manifest=manifest, fault=fault)

    def _delete(self, name: str, halt: threading.Event = NEVER) -> None:
        """Delete a checkpoint, or what is left of one: its manifest before all else."""
        for file in sorted(self._found[name], key=lambda file: file != MANIFEST_NAME):
            self.objects.delete(f"{name}/{file}", halt=halt)

    def _sweep(self, name: str, tell: Tell) -> None:
        self._delete(name)
        tell("swept", name=self.shown(name))

    def _tidy(self, work: Callable[[], None], tell: Tell) -> None:
        try:
            work()
        except (OSError, KeepstepError) as error:
            tell("housekeeping_failed", error=str(error))
