"""The order in which a checkpoint becomes durable and visible, and in which one goes away.

    write the data files into a staging folder, sync each
    sync the staging folder; write manifest.json durably (temporary, sync, rename); sync the folder
    rename the staging folder to step_N; sync the parent      <- the commit
    links; retention: rename to trash, sync, remove

Where folders cannot be renamed (`manifest-last`), a file beside the folder hides it:

    write .unfinished-step_N, sync the parent; make step_N; the data files, then manifest.json
    remove .unfinished-step_N; sync the parent                <- the commit
    retention: write .unfinished-step_N, sync the parent; remove step_N, then what hid it

Each line stands on the one before. Without a file's sync its bytes, without a folder's sync its
names may be missing after a power cut although a later rename survived.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import CheckpointDamaged, KeepstepError, SaveAbandoned
from keepstep.store.catalog import is_hidden, look_at, pointed_at
from keepstep.store.disk import Disk
from keepstep.store.facts import is_same_run, manifest_of, told_of
from keepstep.store.layout import (
    ASIDE_NAME,
    BEST_NAME,
    LATEST_NAME,
    MANIFEST_NAME,
    MOVING_NAME,
    is_leftover,
    plain_name,
    staging_name,
    step_name,
    step_of,
    trash_name,
    unfinished_name,
)
from keepstep.store.manifest import (
    Facts,
    Manifest,
    file_from_data,
    tensor_from_data,
    tensor_to_data,
    to_bytes,
)
from keepstep.store.ranks import Ranks, first, require_alike, together
from keepstep.store.regular import opened

_NAME_BYTES_MAX = 64

if TYPE_CHECKING:
    from keepstep.store.tensors import Snapshot
    from keepstep.store.unchanged import Unchanged


def commit(
    snapshot: "Snapshot",
    facts: Facts,
    *,
    unchanged: "Unchanged",
    folder: Path,
    disk: Disk,
    ranks: Ranks,
    halt: threading.Event,
    on_event: Callable[..., None],
) -> tuple[Manifest, bool]:
    """Make one attempt to commit; return the manifest, and whether it is a new one.

    Every rank writes its own files, or links what is `unchanged`; the first one commits. An error
    of any rank is raised on all; it leaves no trace but, at worst, a staging folder that the next
    session sweeps away. On other ranks than the first the manifest holds no files, tensors and
    plain state.
    """
    staging = folder / first(ranks, "save: begin", lambda: begin(folder, facts, disk))
    made: list[Manifest] = []

    def make_visible() -> dict[str, Any]:
        manifest, told = _make_visible(snapshot, facts, written, staging, disk)
        made.append(manifest)
        return told

    try:
        written = together(
            ranks,
            "save: write",
            lambda: _write(snapshot, staging, unchanged, disk, halt, on_event),
        )
        require_alike(written)
        on_event("written", step=facts.step)
        told = first(ranks, "save: commit", make_visible)
    except BaseException as error:
        if ranks.rank == 0:
            abandon(staging, disk, because=error)
        raise
    if told["new"]:
        unchanged.committed(folder / step_name(facts.step))
    if told["aside"]:
        on_event("set_aside", name=step_name(facts.step), new_name=told["aside"])
    if ranks.rank == 0:
        return made[0], told["new"]
    return manifest_of(facts, told), told["new"]


def begin(folder: Path, facts: Facts, disk: Disk) -> str:
    """Make the folder that is written into; return its name."""
    final = folder / step_name(facts.step)
    if is_hidden(final):
        # What could not be tidied up before; it would hide this one too.
        remove(final, disk=disk)
    if disk.methods.commit == "rename" or _is_there(final):
        staging = folder / staging_name(facts.step)
        disk.make_folder(staging)
        return staging.name
    _hide_in_place(final, disk)
    disk.make_folder(final)
    return final.name


def abandon(staging: Path, disk: Disk, *, because: BaseException) -> None:
    """Remove what a failed attempt left; what cannot be removed is hidden, or a leftover by name.

    What is committed stays: another rank may have been lost when all was durable.
    """
    if step_of(staging.name) is None:
        disk.discard(staging, because=because)
    elif is_hidden(staging):
        try:
            remove(staging, disk=disk)
        except OSError as second:
            because.add_note(f"{staging} was left behind, hidden: {second}")


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _hiding_file(path: Path) -> Path:
    return path.with_name(unfinished_name(path.name))


def _hide_in_place(path: Path, disk: Disk) -> None:
    """Make a folder invisible under its own name, durably, whatever is in it or comes into it."""
    if not is_hidden(path):
        disk.write_new_file(_hiding_file(path), [])
    disk.sync_folder(path.parent)


def _show(path: Path, disk: Disk) -> None:
    """Make a folder that was hidden in its place visible, durably, or leave it hidden."""
    disk.unlink(_hiding_file(path))
    _sync_or(lambda: _hide_in_place(path, disk), path.parent, disk)


def _make_visible(
    snapshot: "Snapshot", facts: Facts, written: list[dict[str, Any]], staging: Path, disk: Disk
) -> tuple[Manifest, dict[str, Any]]:
    """Commit what all ranks have written; return the manifest and what the other ranks hear."""
    from keepstep.store.tensors import merge

    final = staging.parent / step_name(facts.step)
    told: dict[str, Any] = {
        "time": time.time(),
        "world_size": len(written),
        "sequence": facts.sequence,
        "best": None if facts.best is None else asdict(facts.best),
        "new": True,
        "aside": "",
        "method": str(disk.methods),
    }
    manifest = manifest_of(
        facts,
        told,
        files=[file_from_data(entry) for one in written for entry in one["files"]],
        tensors=merge(tensor_from_data(entry) for one in written for entry in one["tensors"]),
        plain=snapshot.plain,
    )
    disk.sync_folder(staging)
    disk.replace_file(staging / MANIFEST_NAME, to_bytes(manifest))
    standing = look_at(final).manifest
    if (
        standing is not None
        and is_same_run(standing, manifest)
        and standing.content_digest() == manifest.content_digest()
    ):
        disk.remove_tree(staging)
        disk.sync_folder(staging.parent)
        return standing, {**told, **told_of(standing)}
    if staging != final and _is_there(final):
        told["aside"] = _replace(staging, final, disk)
    else:
        appear(staging, final, disk)
    return manifest, told


def appear(staging: Path, final: Path, disk: Disk) -> None:
    """Make what is whole visible under its name, durably; where that fails it is as before."""
    if staging == final:
        _show(final, disk)
    else:
        disk.rename(staging, final)
        _sync_or(lambda: disk.rename(final, staging), final.parent, disk)


def _replace(staging: Path, final: Path, disk: Disk) -> str:
    """Commit in the place of another checkpoint, which is aside from the same instant on.

    The new one goes to `aside/` first and is swapped from there: at no instant does the old one
    have a name under which it could be swept away. Returns the old one's name there.
    """
    if disk.methods.commit == "manifest-last":
        raise KeepstepError(
            f"{final} holds another state, and this file system cannot swap two folders;"
            " nothing was changed",
            hint="Save under another step, or move that folder away.",
        )
    place = free_aside(final, disk)
    disk.rename(staging, place)
    try:
        disk.sync_folder(place.parent)
        disk.exchange(place, final)
    except OSError as error:
        disk.discard(place, because=error)
        raise
    _sync_or(lambda: _swap_back(place, final, disk), final.parent, disk)
    disk.sync_folder(place.parent)
    return f"{ASIDE_NAME}/{place.name}"


def _swap_back(place: Path, final: Path, disk: Disk) -> None:
    disk.exchange(place, final)
    disk.remove_tree(place)


def _sync_or(take_back: Callable[[], None], folder: Path, disk: Disk) -> None:
    """Reach the commit point, or leave no checkpoint that was never known to be durable.

    A second sync of the folder could succeed without the rename being on disk, since the kernel
    reports a failed write once; so the next attempt must begin with files and names of its own.
    """
    try:
        disk.sync_folder(folder)
    except OSError:
        take_back()
        raise


def point_links(folder: Path, *, latest: int | None, best: int | None, disk: Disk) -> None:
    """Point `latest` and `best` at their checkpoints; one that is not there gets no pointer."""
    for name, step in ((LATEST_NAME, latest), (BEST_NAME, best)):
        pointer = folder / name
        target = pointed_at(pointer)
        if target is None and _is_there(pointer):
            # Not ours.
            continue
        if step is not None and (folder / step_name(step)).is_dir():
            if disk.methods.pointers == "links":
                disk.point_link(pointer, step_name(step))
            elif target != step_name(step):
                disk.replace_file(pointer, f"{step_name(step)}\n".encode())
        elif target is not None:
            disk.unlink(pointer)
            disk.sync_folder(folder)


def set_aside(path: Path, *, disk: Disk) -> str:
    """Move a checkpoint to `aside/`, durably; return its new name there."""
    if disk.methods.commit == "rename" or path.is_symlink() or not path.is_dir():
        target = free_aside(path, disk)
        disk.rename(path, target)
    else:
        target = _move_files(path, disk)
    disk.sync_folder(target.parent)
    disk.sync_folder(path.parent)
    return f"{ASIDE_NAME}/{target.name}"


def _move_files(path: Path, disk: Disk) -> Path:
    """Move a checkpoint to `aside/` file by file; one that was cut short goes on where it was.

    Meanwhile it is a damaged one to whoever looks, and the next session sets it aside again: a
    note in it says where to. Nothing in it has a name under which it could be swept away.
    """
    note = path / MOVING_NAME
    if _is_there(note):
        target = path.parent / ASIDE_NAME / _name_in(note)
    else:
        target = free_aside(path, disk)
        disk.replace_file(note, target.name.encode())
    disk.make_folders(target)
    for inner in sorted(path.iterdir()):
        if inner != note and not is_leftover(inner.name):
            disk.rename(inner, target / inner.name)
    disk.sync_folder(target)
    # With the note in it: without, it would be an empty folder of whose files nobody knows.
    _hide_in_place(path, disk)
    remove(path, disk=disk)
    return target


def _name_in(note: Path) -> str:
    """Return where a move goes on to: a name that only `free_aside` can have given this folder."""
    text = ""
    if note.is_file():
        with opened(note) as file:
            text = file.read(_NAME_BYTES_MAX).decode(errors="replace")
    if plain_name(text) != note.parent.name:
        raise CheckpointDamaged(
            f"{note} does not say where the rest of {note.parent.name} was moved to",
            hint=f"Nothing was moved. Move {note.parent} away by hand.",
        )
    return text


def free_aside(path: Path, disk: Disk) -> Path:
    """Return a path in `aside/` that nothing has yet: the name itself, or one with a number."""
    aside = path.parent / ASIDE_NAME
    disk.make_folders(aside)
    target, number = aside / path.name, 1
    while _is_there(target) or is_hidden(target):
        number += 1
        target = aside / f"{path.name}.{number}"
    return target


def hide(path: Path, *, into: Path, disk: Disk) -> Path:
    """Make a checkpoint invisible, durably; return where it is: in `into`, if it can be renamed."""
    if disk.methods.commit == "manifest-last" and path.is_dir():
        _hide_in_place(path, disk)
        return path
    trash = into / trash_name()
    disk.rename(path, trash)
    disk.sync_folder(into)
    if path.parent != into:
        disk.sync_folder(path.parent)
    return trash


def remove(path: Path, *, disk: Disk) -> None:
    """Remove what `hide` has hidden; after a crash the rest is a leftover, or still hidden."""
    if path.is_dir():
        disk.remove_tree(path)
    elif path.is_file():
        disk.unlink(path)
    if is_hidden(path):
        # Else a power cut could leave some of it, and not what hides it.
        disk.sync_folder(path.parent)
        disk.unlink(_hiding_file(path))


def _write(
    snapshot: "Snapshot",
    staging: Path,
    unchanged: "Unchanged",
    disk: Disk,
    halt: threading.Event,
    on_event: Callable[..., None],
) -> dict[str, Any]:
    """Write this rank's files, durably; return what the first rank needs to know of them."""

    def go_on() -> None:
        if halt.is_set():
            raise SaveAbandoned(f"{staging.name} was given up while it was written")

    files, tensors = unchanged.write(snapshot, staging, disk=disk, go_on=go_on, tell=on_event)
    snapshot.confirm()
    return {
        "files": [vars(entry) for entry in files],
        "tensors": [tensor_to_data(entry) for entry in tensors],
        "state": snapshot.digest(),
    }
