"""A checkpoint in the formats of others: safetensors, `.pth`, DCP; and the last two back.

Guarantees: every byte that is exported was compared with its digest. What is written has a
temporary name until all of it is durable, and never takes a name that something has: whoever
finds the name finds all of it. The source is not touched.

No file of others can run code: `.pth` is read with `weights_only`. The index of a DCP folder is a
bare pickle, which torch itself loads without a check; here it may name a list of harmless classes
and nothing else, and of what it lists only tensors are read, from files of that folder.

Not promised: `.pth` and DCP have no digests. What becomes of such a file later nobody notices.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from keepstep.errors import CheckpointDamaged, KeepstepError, UsageError
from keepstep.store.archive import fault_of, load_archive, write_archive
from keepstep.store.disk import Disk
from keepstep.store.layout import temporary_name
from keepstep.store.pickled import require_modest
from keepstep.store.regular import opened
from keepstep.store.tensors import take_apart, write_tensors

DCP_INDEX = ".metadata"
Writer = Callable[[Mapping[str, Any], Path, Disk], None]


def write_out(output: Path, write: Callable[[Path], None], *, disk: Disk) -> None:
    """Have `write` fill a temporary name, and give it its own when all of it is durable.

    UsageError where `output` is there already, also where it came to be meanwhile.
    """
    require_free(output)
    disk.make_folders(output.parent)
    staging = output.with_name(temporary_name(output.name))
    with _discarded_on_failure(staging, disk):
        write(staging)
        if staging.is_dir():
            disk.sync_tree(staging)
        try:
            disk.rename_new(staging, output)
        except FileExistsError as error:
            raise _taken(output) from error
    disk.sync_folder(output.parent)


def require_free(output: Path) -> None:
    """Raise UsageError where something has the name already."""
    if output.is_symlink() or output.exists():
        raise _taken(output)


def write_safetensors(state: Mapping[str, Any], path: Path, disk: Disk) -> None:
    """Write a flat table of tensors as one safetensors file, each under its own name.

    The format cannot share: a tied tensor is written once for each of its names.
    """
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} is a {type(value).__name__}; a safetensors file holds tensors only",
                hint="Choose a part that is a table of tensors with --only, or another format.",
            )
    seen: set[int] = set()
    alone = {}
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        alone[str(name)] = tensor.clone() if place in seen else tensor
        seen.add(place)
    write_tensors(take_apart(alone), path.parent, file_name=path.name, disk=disk)


def write_pth(state: Mapping[str, Any], path: Path, disk: Disk) -> None:
    """Write a state as a file that `torch.load(weights_only=True)` reads; ties stay tied."""
    write_archive(dict(state), path, disk=disk)


def write_dcp(state: Mapping[str, Any], path: Path, disk: Disk) -> None:
    """Write a state as a folder that `torch.distributed.checkpoint.load` reads."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    disk.make_folder(path)
    # `write_out` makes all of it durable, the names too.
    writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=False)
    try:
        with one_process():
            save(dict(state), storage_writer=writer, no_dist=True)
    except (CheckpointException, RuntimeError) as error:
        raise KeepstepError(f"{path.parent}: DCP could not write there: {_cause(error)}") from error


_DCP_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}

WRITERS: Mapping[str, Writer] = {
    "dcp": write_dcp,
    "pth": write_pth,
    "safetensors": write_safetensors,
}


@contextmanager
def one_process() -> Iterator[None]:
    """Let DCP work in this process alone without its warning that this is so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def read_pth(path: Path) -> Mapping[str, Any]:
    """Return the table that a `.pth` file holds; UnsafeState where it holds objects."""
    fault = fault_of(path)
    if fault is not None:
        raise CheckpointDamaged(f"{path} is no whole .pth file: {fault}")
    found = load_archive(str(path), path, map_location="cpu")
    if not isinstance(found, Mapping):
        raise UsageError(f"{path} holds a {type(found).__name__}, not a table")
    return found


class _DcpIndex(pickle.Unpickler):
    """Opens the index of a DCP folder, and nothing that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that the index may name."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _DCP_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_dcp(folder: Path) -> dict[str, Any]:
    """Return the tensors of a DCP folder, in tables as they were saved."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    path = folder / DCP_INDEX
    try:
        with opened(path) as file:
            pickled = file.read()
        require_modest(pickled)
        index = _DcpIndex(io.BytesIO(pickled)).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
        for place in index.storage_data.values():
            plain_name(place.relative_path, path)
        wanted = {
            name: entry
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if any(size < 0 for entry in wanted.values() for size in entry.size):
            raise pickle.UnpicklingError("it has a negative size")
        needed = sum(e.size.numel() * e.properties.dtype.itemsize for e in wanted.values())
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{path} is not the index of a DCP folder: {error}", hint="It was not opened."
        ) from error
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if needed > held:
        raise CheckpointDamaged(f"{path} tells of {needed:,} bytes; the folder holds {held:,}")

    class Reader(FileSystemReader):
        """Reads with the index that was opened above, not with torch's own unpickling."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            index.storage_meta = StorageMeta(load_id=self.load_id)
            return cast(Metadata, index)

    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in wanted.items()
    }
    try:
        with one_process():
            load(
                cast(dict[str, Any], state),
                storage_reader=Reader(folder),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                no_dist=True,
            )
    except (CheckpointException, RuntimeError, OSError, KeyError) as error:
        raise CheckpointDamaged(f"{folder} cannot be read as a DCP folder: {error}") from error
    tree = _nested(state, index.planner_data)
    for name in index.state_dict_metadata:
        # What is no tensor is pickled there, and only named here.
        tree.setdefault(_path_of(name, index.planner_data)[0], None)
    return tree


def _nested(flat: Mapping[str, torch.Tensor], paths: Any) -> dict[str, Any]:
    """Return the tensors of a DCP folder by the first key of their paths, then by the rest.

    The index records the path of each flat name. The name alone would not do: `model.norm` is a
    key of the table `model`, or a parameter of that name.
    """
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        keys = _path_of(name, paths)
        if len(keys) == 1:
            tree[keys[0]] = tensor
        else:
            tree.setdefault(keys[0], {})[".".join(keys[1:])] = tensor
    return tree


def _path_of(name: str, paths: Any) -> list[str]:
    path = paths.get(name) if isinstance(paths, Mapping) else None
    return [str(key) for key in path] if isinstance(path, tuple) and path else [name]


def plain_name(name: Any, source: Path) -> str:
    """Return a name that leads to no other folder; CheckpointDamaged for any other."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointDamaged(f"{source} names a file outside its folder: {name!r}")
    return name


def _cause(error: BaseException) -> str:
    """Return the last line of what a library says, which is where it names the cause."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@contextmanager
def _discarded_on_failure(staging: Path, disk: Disk) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        disk.discard(staging, because=error)
        raise


def _taken(output: Path) -> UsageError:
    return UsageError(f"{output} is there already", hint="Choose another name, or move it away.")
