"""One `.pth` file: written by `torch.save`, checked by its CRCs, loaded without running code.

Guarantees:
1. What `write_archive` and `check_new` let pass has a right CRC for every record, and
   `weights_only` will load it: a state that could not be loaded is refused when it is saved.
2. `fault_in` believes no size and unpacks nothing; torch itself never looks at the CRCs.
3. `load_archive` runs no code of the file. What `weights_only` lets a file call with a size of
   the file's choice is refused before: it would allocate whatever the file asks for.
4. Where memory or open files run short, that is the error, and no fault of a file.

The only place that may call `torch.save` and `torch.load`.
"""

import errno
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

# Named to turn them into errors of our own; nothing here pickles.
from pickle import PicklingError, UnpicklingError
from typing import IO, Any, cast

from keepstep.errors import CheckpointDamaged, UnsafeState, fault_from
from keepstep.store.direct import forget
from keepstep.store.disk import Disk
from keepstep.store.handles import NewFile
from keepstep.store.pickled import names_in
from keepstep.store.regular import opened

# All that `zipfile` says of bytes that are no archive, or not the one that was written.
_BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError,
    IndexError, KeyError, OverflowError,
)  # fmt: skip

_END = b"PK\x05\x06" + bytes(18)
"""The last record of an archive, of which the signature and the empty comment are known."""
_ALLOCATING = {"builtins.bytearray", "__builtin__.bytearray", "torch.Tensor"}


def write_archive(state: Mapping[str, Any], path: Path, *, disk: Disk) -> None:
    """Write the archive, with CRCs whatever the process has chosen for its other saves."""
    import torch
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(True)
    try:
        with NewFile(disk, path) as file:
            try:
                torch.save(state, cast(IO[bytes], file))
            except BaseException as error:
                # The archive's writer hides a full disk behind words about positions.
                if file.error is not None and file.error is not error:
                    raise file.error from None
                raise
    except (PicklingError, AttributeError, TypeError) as error:
        raise UnsafeState(
            f"the state of {path.name.removesuffix('.tmp')} holds what cannot be saved: {error}",
            hint="Save tensors and plain values (numbers, strings, lists, tuples, dicts) only.",
        ) from error
    finally:
        set_crc32_options(before)


def check_new(path: Path) -> None:
    """Read back what was just written; OSError where it is something else, which a new attempt may
    mend, and UnsafeState where no checkpoint may hold it.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint

    with opened(path) as file:
        fault = fault_in(file)
    if fault is not None:
        text = f"what is read back is not what was written: {fault}"
        raise OSError(errno.EIO, text, str(path))
    with opened(path) as file:
        unsafe = sorted({*get_unsafe_globals_in_checkpoint(str(path)), *_allocating(file)})
    if unsafe:
        raise UnsafeState(
            f"the state holds {', '.join(unsafe)}, which no checkpoint may hold",
            hint="Save tensors and plain values only: float(x) for a number of numpy, str(p) for"
            " a path.",
        )


def fault_of(path: Path, *, from_disk: bool = False) -> str | None:
    """Return what is wrong with a file, or None; one that cannot be read has that fault.

    ``from_disk``: the page cache is asked to let the file go first.
    """
    try:
        with opened(path) as file:
            if from_disk:
                forget(file.fileno())
            return fault_in(file)
    except OSError as error:
        return fault_from(error)


def fault_in(file: IO[bytes], *, whole: bool = True) -> str | None:
    """Return what is wrong with an archive, or None where every record's CRC holds.

    Nothing is believed before it is checked, and no more than a chunk is ever in memory. Without
    ``whole`` only the record of names and plain values is read: the tensors' bytes are not.
    """
    size = file.seek(0, 2)
    if size == 0:
        return "the file is empty"
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            for record in records:
                # Torch stores records as they are; what is packed may unpack to anything.
                stored = record.compress_type == zipfile.ZIP_STORED
                if not stored or record.file_size != record.compress_size:
                    return f"the record {record.filename} is packed"
            if sum(record.file_size for record in records) > size:
                return "its records are larger than the file"
            heads = [record for record in records if record.filename.endswith("/data.pkl")]
            if not heads:
                return "it is no checkpoint of torch.save: it has no data.pkl"
            file.seek(-len(_END), 2)
            end = file.read()
            if (end[:4], end[-2:]) != (_END[:4], _END[-2:]):
                return "bytes stand behind its end"
            if not whole:
                # A CRC that does not match is raised.
                archive.read(heads[0])
                return None
            broken = archive.testzip()
    except _BROKEN as error:
        return f"it is no whole archive ({fault_from(error)})"
    return None if broken is None else f"the CRC of the record {broken} does not match"


def load_archive(
    file: IO[bytes] | str, path: Path, *, map_location: Any, mmap: bool = False
) -> Any:
    """Return the state in a checked archive; UnsafeState where only running code could load it."""
    import torch

    try:
        named = _allocating(file)
        if named:
            raise UnpicklingError(f"it names {', '.join(sorted(named))}")
        return torch.load(file, weights_only=True, map_location=map_location, mmap=mmap)
    except UnpicklingError as error:
        raise UnsafeState(
            f"{path} holds more than tensors and plain values, and was not loaded: {error}",
            hint="A file that can run code is never opened. Save its tensors and plain values"
            " again, where you trust it.",
        ) from error
    except (*_BROKEN, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} cannot be loaded: {fault_from(error)}") from error


def _allocating(file: IO[bytes] | str) -> set[str]:
    """Return what an archive names that makes memory of a number; leaves the file at its start."""
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        named = names_in(archive.read(name))
    if not isinstance(file, str):
        file.seek(0)
    return named & _ALLOCATING
