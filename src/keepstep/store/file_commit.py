"""The commit of a checkpoint that is one file, and its other names, `latest.pth` and `best.pth`.

    write the file under a temporary name, sync it; read it back against its CRCs
    rename it to steps_N.pth; sync the folder             <- the commit
    latest.pth, best.pth: link it under a temporary name, rename, sync the folder

Guarantees: `steps_N.pth` is whole whenever it is there, and is never written to again. The other
two are second names of such files, or copies where the file system has no links: they cost
nothing, and no byte is under one of them alone when it is taken away.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.store.archive import check_new, write_archive
from keepstep.store.catalog import checkpoints_in, is_copy, look_at
from keepstep.store.commit import set_aside
from keepstep.store.disk import Disk
from keepstep.store.file_read import sized, with_facts
from keepstep.store.layout import BEST_FILE, LATEST_FILE, file_name, temporary_name
from keepstep.store.manifest import FILE_METHOD, Facts, Manifest
from keepstep.store.ranks import Ranks, first, require_alike
from keepstep.store.single_file import link_or_copy

if TYPE_CHECKING:
    from keepstep.store.tensors import Snapshot


def gather_whole(state: Mapping[str, Any], snapshot: "Snapshot", ranks: Ranks) -> dict[str, Any]:
    """Return the state with every sharded tensor whole on the first rank; nothing on the others.

    Called on all ranks: gathering a tensor is an exchange of its own. Raises on all where the ranks
    do not hold the same names and plain values, or the first one has no room for the whole.
    """
    require_alike([{"state": one} for one in ranks.gather(snapshot.digest(), what="save: gather")])
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
    """Make one attempt to commit; return the manifest, and True: the checkpoint is a new one.

    The first rank writes; its error is raised on all. It leaves no trace but, at worst, a temporary
    file that the next session sweeps away.
    """
    del halt  # Nothing interrupts a save that training waits for.

    def write() -> dict[str, Any]:
        manifest = _manifest(facts, time.time(), ranks.size)
        size, aside = _write(with_facts(state, manifest), folder / manifest.name, disk)
        return {"time": manifest.time, "size": size, "aside": aside}

    told = first(ranks, "save: commit", write)
    on_event("written", step=facts.step)
    manifest = _manifest(facts, told["time"], ranks.size)
    if told["aside"]:
        on_event("set_aside", name=manifest.name, new_name=told["aside"])
    return sized(manifest, told["size"]), True


def _write(content: Mapping[str, Any], final: Path, disk: Disk) -> tuple[int, str]:
    """Make `final` hold the content; return its size, and where what had its name is now."""
    temporary, aside = final.with_name(temporary_name(final.name)), ""
    try:
        write_archive(content, temporary, disk=disk)
        check_new(temporary)
        size = temporary.stat().st_size
        if final.is_symlink() or final.exists():
            aside = set_aside(final, disk=disk)
        disk.rename(temporary, final)
        try:
            disk.sync_folder(final.parent)
        except OSError:
            # What is not known to be durable must not be there; the next attempt is a new file.
            disk.rename(final, temporary)
            raise
    except BaseException as error:
        disk.discard(temporary, because=error)
        raise
    return size, aside


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
    """Set a file aside whose bytes have no other name here."""
    if path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1:
        return
    others = [entry for entry in checkpoints_in(path.parent) if entry.path != path]
    if not any(is_copy(path, entry) for entry in others):
        set_aside(path, disk=disk)


def _manifest(facts: Facts, when: float, world_size: int) -> Manifest:
    known = {name: getattr(facts, name) for name in facts.__dataclass_fields__}
    return Manifest(
        **known,
        time=when,
        world_size=world_size,
        commit_method=FILE_METHOD,
        files=(),
        tensors=(),
        plain=None,
    )
