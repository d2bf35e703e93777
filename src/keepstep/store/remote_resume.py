"""What a session takes home from an object store before it continues, and brings there after.

Guarantees: the newest whole checkpoint of folder and remote is the one to continue from; what is
fetched is verified byte by byte before the commit that makes it visible; the best comes along.
What is damaged there is passed over by name, and set aside, never deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from keepstep.errors import CheckpointDamaged, KeepstepError, NotFound, way_out
from keepstep.store import commit
from keepstep.store.catalog import Checkpoint, checkpoints_in
from keepstep.store.disk import Disk
from keepstep.store.layout import MANIFEST_NAME, step_name
from keepstep.store.line import Line
from keepstep.store.manifest import Best, FileEntry, Manifest
from keepstep.store.pins import identity_of
from keepstep.store.ranks import OneRank, Ranks, first
from keepstep.store.remote_commit import Remote, Tell, named
from keepstep.store.resume import Whole
from keepstep.store.standing import look_together
from keepstep.store.verify import faults_in

_PART_BYTES = 64 << 20
"""What is held in memory of an object while it is fetched."""


class Homecoming:
    """Fetches from `remote` into `folder`; the methods are called by all ranks."""

    def __init__(
        self, remote: Remote, folder: Path, *, disk: Disk, ranks: Ranks, tell: Tell
    ) -> None:
        self.remote = remote
        self._folder = folder
        self._disk = disk
        self._ranks = ranks
        self._tell = tell
        self._tried: set[str] = set()
        self._faulty: dict[str, str] = {}

    def begin(self, line: Line) -> None:
        """Take the prefix for this session; the line's numbers are higher than any there.

        From here on manifests name the remote beside the method of the commit.
        """
        protocol = self.remote.objects.protocol
        self._disk.methods = replace(self._disk.methods, remote=protocol)
        last: int = first(self._ranks, "remote: begin", lambda: self.remote.begin(self._tell))
        line.next_sequence = max(line.next_sequence, last + 1)

    def look(self) -> list[Checkpoint]:
        """Return what stands there now; no exchange of ranks."""
        return self.remote.look(self._tell)

    def check(self, found: Sequence[Checkpoint], check: Callable[..., None], *, look: bool) -> None:
        """Have what stands there and here checked as that of one folder: `check_choice`.

        ``look``: look there first; else it is what was seen when the prefix was taken.
        """

        def check_both() -> None:
            there = self.look() if look else self.remote.entries
            check([*found, *there], ranks=OneRank())

        first(self._ranks, "restore: remote", check_both)

    def choose(
        self,
        found: list[Checkpoint],
        pick: Callable[[list[Checkpoint]], Whole],
        *,
        step: int | None,
    ) -> tuple[list[Checkpoint], Whole] | None:
        """Return what stands here, and the newest whole one of both; None where nothing is.

        ``pick``: finds it in a folder. ``step``: only of that step.
        """
        self._tried.clear()
        here = [e.manifest for e in found if e.manifest and step in (None, e.manifest.step)]
        fork = self._fork(found) if step is None else None
        than = max((m.sequence for m in here), default=0) if fork is None else fork.sequence
        if self._fetch_newer(than, here, step=step):
            if fork is not None:
                first(self._ranks, "remote: fork", lambda: self._set_aside_from(fork))
            found = look_together(self._folder, self._ranks, files=False)
        while found:
            try:
                whole = pick(found)
            except CheckpointDamaged:
                if not self._fetch_newer(0, [], step=step):
                    raise
            else:
                skipped = whole[3]
                newest = whole[1]
                if not skipped or not self._fetch_newer(newest.sequence, [newest], step=step):
                    return self._with_best(found, whole[1].best), whole
            found = look_together(self._folder, self._ranks, files=False)
        first(self._ranks, "remote: nothing", lambda: self._require_nothing(step))
        return None

    def follow(self, chosen: Manifest, best: Best | None) -> None:
        """Set aside there what does not lead to the chosen one, and put it, and the best, there."""
        first(self._ranks, "remote: set aside", lambda: self._set_aside_others(chosen))
        for step in dict.fromkeys([chosen.step, *([best.step] if best is not None else [])]):
            self.remote.put(self._folder, step, ranks=self._ranks, tell=self._tell)

    def _fork(self, found: Sequence[Checkpoint]) -> Manifest | None:
        """Return the newest one there, where what is here does not follow from it.

        Then another session had taken the prefix, and whatever this folder's last one went on to
        commit here was never said to be saved.
        """
        there = [entry.manifest for entry in self.remote.entries if entry.manifest is not None]
        newest = max(there, key=lambda manifest: manifest.sequence, default=None)
        if newest is None:
            return None
        here = {e.manifest.sequence: identity_of(e.manifest) for e in found if e.manifest}
        same = here.get(newest.sequence, identity_of(newest)) == identity_of(newest)
        return None if same else newest

    def _set_aside_from(self, fetched: Manifest) -> None:
        for entry in checkpoints_in(self._folder):
            manifest = entry.manifest
            if manifest and manifest.sequence > fetched.sequence:
                new_name = commit.set_aside(entry.path, disk=self._disk)
                self._tell("set_aside", name=entry.name, new_name=new_name)

    def _fetch_newer(self, than: int, here: Sequence[Manifest], *, step: int | None) -> bool:
        """Fetch the newest whole one whose number is higher; tell whether there was one.

        Of two with that very number the one there was said to be saved, and that of `here` not.
        """
        known = {identity_of(manifest) for manifest in here}

        def wanted(manifest: Manifest) -> bool:
            is_other = manifest.sequence == than and identity_of(manifest) not in known
            return step in (None, manifest.step) and (manifest.sequence > than or is_other)

        return self._fetch_first(wanted)

    def _with_best(self, found: list[Checkpoint], best: Best | None) -> list[Checkpoint]:
        """Return what was found, and the best with it if it had to be fetched and could be."""
        here = {identity_of(entry.manifest) for entry in found if entry.manifest is not None}
        if best is not None and self._fetch_first(
            lambda one: one.sequence == best.sequence and identity_of(one) not in here
        ):
            return look_together(self._folder, self._ranks, files=False)
        return found

    def _require_nothing(self, step: int | None) -> None:
        """Raise where something is there, and nothing of it could be fetched."""
        place = self.remote.objects.shown
        wanted = [entry for entry in self.remote.entries if step in (None, entry.step)]
        faults = [f"  {e.name}: {self._faulty.get(e.name, e.fault)}" for e in wanted]
        if faults:
            raise CheckpointDamaged(
                f"no checkpoint in {place} can be continued from:\n" + "\n".join(faults),
                hint="Nothing was changed. Mend or restore one, or choose another prefix.",
            )
        if step is not None:
            raise NotFound(f"neither {self._folder} nor {place} holds a checkpoint of step {step}")

    def _fetch_first(self, wanted: Callable[[Manifest], bool]) -> bool:
        """Fetch the newest whole one of those that are wanted; tell whether there was one."""

        def fetch() -> bool:
            for entry in reversed(self.remote.entries):
                manifest = entry.manifest
                if manifest is None or not wanted(manifest) or entry.name in self._tried:
                    continue
                self._tried.add(entry.name)
                try:
                    self._fetch(entry.name, manifest)
                except CheckpointDamaged as error:
                    self._faulty[entry.name] = error.message
                    name = self.remote.shown(entry.name)
                    self._tell("passed_over", name=name, fault=error.message)
                else:
                    self._tell("fetched", name=self.remote.shown(entry.name))
                    return True
            return False

        fetched: bool = first(self._ranks, "remote: fetch", fetch)
        return fetched

    def _fetch(self, name: str, manifest: Manifest) -> None:
        """Commit one in the folder, as a save does. What has its name or number is set aside."""
        final = self._folder / step_name(manifest.step)
        in_place = self._disk.methods.commit == "manifest-last"
        try:
            if in_place:
                self._make_way(final, manifest)
            staging = self._folder / commit.begin(self._folder, manifest, self._disk)
            try:
                for file in manifest.files:
                    self._fetch_file(name, file, manifest, staging)
                self._disk.sync_folder(staging)
                text, _ = self.remote.read_manifest(name, self._tell)
                self._disk.replace_file(staging / MANIFEST_NAME, text)
                if not in_place:
                    # Only now: had it been damaged, these would be what is left.
                    self._make_way(final, manifest)
                commit.appear(staging, final, self._disk)
            except BaseException as error:
                commit.abandon(staging, self._disk, because=error)
                raise
        except OSError as error:
            then = "run the same command again"
            raise KeepstepError(
                f"{self.remote.shown(name)} could not be fetched into {self._folder}: {error}",
                hint=way_out(error, then=then) or f"Mend the disk, then {then}.",
            ) from error

    def _make_way(self, final: Path, manifest: Manifest) -> None:
        for entry in checkpoints_in(self._folder):
            known = entry.manifest
            if entry.path == final or (known and known.sequence == manifest.sequence):
                new_name = commit.set_aside(entry.path, disk=self._disk)
                self._tell("set_aside", name=entry.name, new_name=new_name)

    def _fetch_file(self, name: str, file: FileEntry, manifest: Manifest, staging: Path) -> None:
        chunks = self._parts(f"{name}/{file.name}", file.size)
        self._disk.write_new_file(staging / file.name, chunks, size=file.size)
        for fault in faults_in(staging, manifest, file, from_disk=False) or []:
            raise CheckpointDamaged(f"{file.name}: {fault.message}")

    def _parts(self, key: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, _PART_BYTES):
            end = min(start + _PART_BYTES, size)

            def read(start: int = start, end: int = end) -> bytes:
                return self.remote.objects.read(key, start=start, end=end)

            yield self.remote.again("fetch", read, tell=self._tell)

    def _set_aside_others(self, chosen: Manifest) -> None:
        own, _, _ = named(self._folder / chosen.name)
        for entry in list(self.remote.entries):
            manifest = None if entry.name in self._faulty else entry.manifest
            leads = manifest is not None and manifest.sequence < chosen.sequence
            # The chosen's own, where it is damaged there, is put anew in its place.
            if not leads and entry.name != own:
                self.remote.again("set aside", self.remote.confirm, tell=self._tell)
                self.remote.set_aside(entry.name, self._tell)
