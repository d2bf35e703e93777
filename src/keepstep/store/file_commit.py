"""The commit of a checkpoint that is one file, and its other names, `latest.pth` and `best.pth`.

    write the file under a temporary name, sync it; read it back against its CRCs
    where another has its name: link that into aside/ too, sync aside/
    rename it to steps_N.pth; sync the folder             <- the commit
    latest.pth, best.pth: link it under a temporary name, rename, sync the folder

Guarantees: `steps_N.pth` is whole whenever it is there, and is never written to again; once it is
there, no save takes the name away from it for an instant. The other two are second names of such
files, or copies where the file system has no links: they cost nothing. Whatever else has one of
these names, a link among it, is somebody's own: it is moved to aside/.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.store.archive import check_new, fault_of, write_archive
from keepstep.store.catalog import checkpoints_in, is_copy, look_at
from keepstep.store.commit import free_aside, set_aside
from keepstep.store.disk import Disk
from keepstep.store.facts import is_same_run, manifest_of, told_of
from keepstep.store.file_read import sized, state_digest, with_facts
from keepstep.store.layout import (
    ASIDE_NAME,
    BEST_FILE,
    LATEST_FILE,
    file_name,
    file_step_of,
    plain_name,
    temporary_name,
)
from keepstep.store.manifest import FILE_METHOD, Facts, Manifest
from keepstep.store.ranks import Ranks, first, require_alike, together
from keepstep.store.single_file import link_or_copy

if TYPE_CHECKING:
    from keepstep.store.tensors import Snapshot


def gather_whole(state: Mapping[str, Any], snapshot: "Snapshot", ranks: Ranks) -> dict[str, Any]:
    """Return the state with every sharded tensor whole on the first rank; nothing on the others.

    Called on all ranks: gathering a tensor is an exchange of its own. Raises on all where the ranks
    do not hold the same names and plain values, or one has no memory for what it gathers.
    """
    require_alike([{"state": one} for one in ranks.gather(snapshot.digest(), what="save: gather")])
    together(ranks, "save: memory", lambda: _ask_for_memory(snapshot, ranks))
    is_first = ranks.rank == 0
    failed: list[Exception] = []

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: whole(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([whole(item) for item in value])
        if hasattr(value, "full_tensor"):
            # One at a time, and off the device: of the whole state it may hold a part only.
            gathered = value.full_tensor()
            if not is_first or failed:
                return None
            try:
                return gathered.cpu()
            except (MemoryError, RuntimeError) as error:
                # The others are in the next exchange: they hear of it when all are over.
                failed.append(error)
                return None
        return value.detach() if hasattr(value, "detach") else value

    found: dict[str, Any] = whole(state)

    def raise_failed() -> None:
        if failed:
            raise failed[0]

    first(ranks, "save: gathered", raise_failed)
    return found if is_first else {}


def _ask_for_memory(snapshot: "Snapshot", ranks: Ranks) -> None:
    """Allocate what the gathering takes, and let it go.

    Whoever found too late that there is none would leave the others waiting in an exchange of
    torch's own, which has no way to say so.
    """
    import torch

    sharded = [part for part in snapshot.parts.values() if part.copies < ranks.size]
    if sharded:
        sizes = [part.bytes for part in sharded]
        # What the ranks sent, and the tensor that is made of it.
        places = [(2 * max(sizes), device) for device in {part.local.device for part in sharded}]
        if ranks.rank == 0:
            places.append((sum(sizes), torch.device("cpu")))
        # All of it at once.
        _ = [torch.empty(size, dtype=torch.uint8, device=on) for size, on in places]


def commit_file(
    state: Mapping[str, Any],
    facts: Facts,
    *,
    folder: Path,
    disk: Disk,
    ranks: Ranks,
    halt: threading.Event,
    on_event: Callable[..., None],
) -> tuple[Manifest, bool]:
    """Make one attempt to commit; return the manifest, and whether it is a new one.

    The first rank writes; its error is raised on all. It leaves no trace but, at worst, a temporary
    file that the next session sweeps away.
    """
    del halt  # Nothing interrupts a save that training waits for.
    made: list[Manifest] = []

    def write() -> dict[str, Any]:
        manifest, told = _write(state, facts, folder, ranks.size, disk)
        made.append(manifest)
        return told

    told = first(ranks, "save: commit", write)
    on_event("written", step=facts.step)
    if told["aside"]:
        on_event("set_aside", name=file_name(facts.step), new_name=told["aside"])
    manifest = made[0] if made else sized(manifest_of(facts, told), told["size"])
    return manifest, told["new"]


def _write(
    state: Mapping[str, Any], facts: Facts, folder: Path, world_size: int, disk: Disk
) -> tuple[Manifest, dict[str, Any]]:
    """Make the step's file hold the state; return the manifest and what the other ranks hear."""
    told: dict[str, Any] = {
        "time": time.time(),
        "world_size": world_size,
        "sequence": facts.sequence,
        "best": None if facts.best is None else asdict(facts.best),
        "new": True,
        "aside": "",
        "method": FILE_METHOD,
    }
    manifest = manifest_of(facts, told)
    final = folder / manifest.name
    temporary = final.with_name(temporary_name(final.name))
    try:
        write_archive(with_facts(state, manifest), temporary, disk=disk)
        check_new(temporary)
        told["size"] = temporary.stat().st_size
        standing = look_at(final).manifest
        if standing is not None and _is_same(final, standing, temporary, manifest):
            disk.unlink(temporary)
            disk.sync_folder(folder)
            return standing, {**told, **told_of(standing), "size": standing.size}
        told["aside"] = _put(temporary, final, disk)
    except BaseException as error:
        disk.discard(temporary, because=error)
        raise
    return sized(manifest, told["size"]), told


def _is_same(final: Path, standing: Manifest, temporary: Path, new: Manifest) -> bool:
    """Tell whether the standing file is whole and holds this very state of this very run."""
    return (
        is_same_run(standing, new)
        and fault_of(final) is None
        and state_digest(final) == state_digest(temporary)
    )


def _put(temporary: Path, final: Path, disk: Disk) -> str:
    """Give a new file its name, durably; return where what had the name is now, if anything."""
    if not final.is_file():
        aside = set_aside(final, disk=disk) if final.is_symlink() or final.exists() else ""
        disk.rename(temporary, final)
        try:
            disk.sync_folder(final.parent)
        except OSError:
            # What is not known to be durable must not be there; the next attempt is a new file.
            disk.rename(final, temporary)
            raise
        return aside
    place = free_aside(final, disk)
    # Under a leftover's name first: where there are no links it is a copy, and may be cut short.
    second = place.with_name(temporary_name(place.name))
    try:
        link_or_copy(final, second, disk=disk)
        disk.rename(second, place)
        disk.sync_folder(place.parent)
        disk.rename(temporary, final)
        disk.sync_folder(final.parent)
    except OSError as error:
        disk.discard(second, because=error)
        if place.exists():
            # Where both are names of the old file still, this does nothing.
            disk.rename(place, final)
            disk.discard(place, because=error)
        raise
    return f"{ASIDE_NAME}/{place.name}"


def point_files(folder: Path, *, latest: int | None, best: int | None, disk: Disk) -> None:
    """Make `latest.pth` and `best.pth` other names of these steps' files; one of none goes.

    What is nowhere else, because somebody put it there, is set aside first.
    """
    for name, step in ((LATEST_FILE, latest), (BEST_FILE, best)):
        path = folder / name
        target = look_at(folder / file_name(step)) if step is not None else None
        if target is None or not target.path.is_file():
            if step is not None and look_at(path).step == step:
                # Its other name was taken away by hand.
                continue
            _spare(path, disk)
            if path.is_symlink() or path.is_file():
                disk.unlink(path)
                disk.sync_folder(folder)
        elif not is_copy(path, target):
            if look_at(path).manifest == target.manifest and fault_of(target.path) is not None:
                # The copy outlives what it is a copy of.
                continue
            temporary = path.with_name(temporary_name(name))
            try:
                link_or_copy(target.path, temporary, disk=disk)
                _spare(path, disk)
                disk.rename(temporary, path)
            except OSError as error:
                disk.discard(temporary, because=error)
                raise
            disk.sync_folder(folder)


def _spare(path: Path, disk: Disk) -> None:
    """Set aside what has this name and is no other name of a checkpoint here or in aside/."""
    if not path.is_symlink() and not path.exists():
        return
    others = (
        entry
        for aside in (False, True)
        for entry in checkpoints_in(path.parent, aside=aside)
        if entry.path != path
        and (entry.manifest or file_step_of(plain_name(entry.name)) is not None)
    )
    if not any(is_copy(path, entry) for entry in others):
        set_aside(path, disk=disk)
