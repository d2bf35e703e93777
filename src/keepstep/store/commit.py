"""The order in which a checkpoint becomes durable and visible, and in which one goes away.

    write the data files into a staging folder, sync each
    sync the staging folder; write manifest.json durably (temporary, sync, rename); sync the folder
    rename the staging folder to step_N; sync the parent      <- the commit
    links; retention: rename to trash, sync, remove

Each line stands on the one before. Without a file's sync its bytes, without a folder's sync its
names may be missing after a power cut although a later rename survived.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.store.catalog import look_at
from keepstep.store.disk import Disk
from keepstep.store.layout import (
    ASIDE_NAME,
    BEST_NAME,
    LATEST_NAME,
    MANIFEST_NAME,
    data_name,
    staging_name,
    step_name,
    trash_name,
)
from keepstep.store.manifest import Best, Manifest, to_bytes

if TYPE_CHECKING:
    from keepstep.store.tensors import Snapshot


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a save knows besides the state; see `Manifest`."""

    run_id: str
    sequence: int
    parent: int | None
    step: int
    updates: int
    samples: int
    tokens: int
    must_match: dict[str, Any]
    fingerprint: str
    environment: dict[str, Any]
    metrics: dict[str, float]
    best: Best | None
    milestone: bool


def commit(
    snapshot: "Snapshot",
    facts: Facts,
    *,
    folder: Path,
    disk: Disk,
    on_event: Callable[..., None],
) -> tuple[Manifest, bool]:
    """Make one attempt to commit; return the manifest, and whether it is a new one.

    An OSError leaves no trace but, at worst, a staging folder that the next session sweeps away.
    """
    staging = folder / staging_name(facts.step)
    final = folder / step_name(facts.step)
    try:
        disk.make_folder(staging)
        manifest = _write(snapshot, facts, staging, disk)
        on_event("written", step=facts.step)
        standing = look_at(final)
        if standing.manifest is not None and _is_same(standing.manifest, manifest):
            disk.remove_tree(staging)
            disk.sync_folder(folder)
            return standing.manifest, False
        replaces = final.is_symlink() or final.exists()
        if replaces:
            disk.exchange(staging, final)
        else:
            disk.rename(staging, final)
        _sync_or_take_back(staging, final, replaces=replaces, disk=disk)
    except BaseException as error:
        disk.discard(staging, because=error)
        raise
    if replaces:
        new_name = set_aside(staging, disk=disk, name=final.name)
        on_event("set_aside", name=final.name, new_name=new_name)
    return manifest, True


def _sync_or_take_back(staging: Path, final: Path, *, replaces: bool, disk: Disk) -> None:
    """Reach the commit point, or leave no checkpoint that was never known to be durable.

    A second sync of the folder could succeed without the rename being on disk, since the kernel
    reports a failed write once; so the next attempt must begin with files and names of its own.
    """
    try:
        disk.sync_folder(final.parent)
    except OSError:
        if replaces:
            disk.exchange(staging, final)
        else:
            disk.rename(final, staging)
        raise


def point_links(folder: Path, *, latest: int | None, best: int | None, disk: Disk) -> None:
    """Point `latest` and `best` at their checkpoints; one that is not there gets no link."""
    for name, step in ((LATEST_NAME, latest), (BEST_NAME, best)):
        link = folder / name
        if step is not None and (folder / step_name(step)).is_dir():
            if link.is_symlink() or not link.exists():
                disk.point_link(link, step_name(step))
        else:
            disk.remove_link(link)


def set_aside(path: Path, *, disk: Disk, name: str = "") -> str:
    """Move a checkpoint to `aside/`, durably, as `name` or its own; return its new name there."""
    aside, name = path.parent / ASIDE_NAME, name or path.name
    disk.make_folders(aside)
    target, number = aside / name, 1
    while target.is_symlink() or target.exists():
        number += 1
        target = aside / f"{name}.{number}"
    disk.rename(path, target)
    disk.sync_folder(aside)
    disk.sync_folder(path.parent)
    return f"{ASIDE_NAME}/{target.name}"


def delete(path: Path, *, disk: Disk) -> None:
    """Delete a checkpoint: it is invisible, durably, before the first of its files goes."""
    trash = path.parent / trash_name()
    disk.rename(path, trash)
    disk.sync_folder(path.parent)
    disk.remove_tree(trash)


def _write(snapshot: "Snapshot", facts: Facts, staging: Path, disk: Disk) -> Manifest:
    from keepstep.store.tensors import write_tensors

    file, tensors = write_tensors(snapshot, staging, file_name=data_name(0), disk=disk)
    manifest = Manifest(
        **{name: getattr(facts, name) for name in facts.__dataclass_fields__},
        time=time.time(),
        world_size=1,
        mesh={},
        commit_method="rename",
        files=(file,),
        tensors=tensors,
        plain=snapshot.plain,
    )
    disk.sync_folder(staging)
    disk.replace_file(staging / MANIFEST_NAME, to_bytes(manifest))
    return manifest


def _is_same(standing: Manifest, new: Manifest) -> bool:
    """Tell whether the standing checkpoint holds this very state of this very run."""
    return (
        standing.run_id == new.run_id
        and standing.content_digest() == new.content_digest()
        and standing.must_match == new.must_match
    )
