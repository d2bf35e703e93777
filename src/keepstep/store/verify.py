"""Re-read every byte of a checkpoint and report; never repair. Needs no lock and no torch."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import CheckpointDamaged, fault_from
from keepstep.store.archive import fault_of
from keepstep.store.catalog import Checkpoint
from keepstep.store.direct import Reader
from keepstep.store.layout import MANIFEST_NAME, is_archive_name, is_data_name
from keepstep.store.manifest import FileEntry, Manifest, digest_of, read_manifest


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a checkpoint: in which file, in which tensor, at which byte."""

    file: str
    tensor: str
    offset: int
    message: str


def verify(checkpoint: Checkpoint, *, from_disk: bool = False) -> list[Fault]:
    """Return all faults of a checkpoint; none means that every byte is what was saved.

    ``from_disk``: past the page cache, also where memory still has the bytes; where the file
    system does not take that, the cache is asked to let them go first.
    """
    if is_archive_name(checkpoint.path.name):
        # That no run saved it is no fault of its bytes.
        known = checkpoint.fault if checkpoint.of_a_run else ""
        fault = known or fault_of(checkpoint.path, from_disk=from_disk)
        return [Fault(file=checkpoint.name, tensor="", offset=0, message=fault)] if fault else []
    try:
        manifest = read_manifest(checkpoint.path)
    except (CheckpointDamaged, OSError) as error:
        # A file that the manifest lists and that is missing or of another size is at fault itself.
        text = fault_from(error)
        name, _, rest = text.partition(" ")
        is_named = name == MANIFEST_NAME or is_data_name(name)
        file, message = (name, rest) if is_named else (MANIFEST_NAME, text)
        return [Fault(file=file, tensor="", offset=0, message=message)]
    faults: list[Fault] = []
    for entry in manifest.files:
        try:
            faults += faults_in(checkpoint.path, manifest, entry, from_disk=from_disk) or []
        except OSError as error:
            faults.append(Fault(file=entry.name, tensor="", offset=0, message=str(error)))
    return faults


def faults_in(
    folder: Path,
    manifest: Manifest,
    entry: FileEntry,
    *,
    from_disk: bool,
    give_up: Callable[[], bool] = lambda: False,
) -> list[Fault] | None:
    """Return the faults of one data file; None where it was given up before its end.

    ``from_disk``: see `verify`. ``give_up``: asked before each piece. Memory: one piece.
    """
    ranges = [("", 0, entry.header_end, entry.header_digest)]
    ranges += [
        (tensor.name, piece.start, piece.end, piece.digest)
        for tensor in manifest.tensors
        for piece in tensor.pieces
        if piece.file == entry.name
    ]
    faults = []
    with closing(Reader(folder / entry.name, from_disk=from_disk)) as reader:
        for tensor, start, end, digest in sorted(ranges, key=lambda part: part[1:3]):
            if give_up():
                return None
            data = memoryview(bytearray(end - start))
            if digest_of(data[: reader.read_into(data, start)]) != digest:
                what = f"tensor {tensor}" if tensor else "the header"
                message = f"bytes {start:,} to {end:,} ({what}) do not match their digest"
                faults.append(Fault(file=entry.name, tensor=tensor, offset=start, message=message))
    return faults
