"""Other ways to save a state, behind one face: durable when they return, or behind the loop.

torchsnapshot, torch_checkpointing and Orbax take part where they are installed:

    .venv/bin/pip install -c constraints.txt torchsnapshot torch_checkpointing orbax-checkpoint
"""

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

State = dict[str, Any]


def found(name: str) -> ModuleType | None:
    """Return a package, or say that it does not take part."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} does not take part: {error}")
        return None


def durable_peers() -> dict[str, Callable[[State, Path], Any]]:
    """Return what writes a state under a path; nothing of it is synced yet."""
    peers: dict[str, Callable[[State, Path], Any]] = {
        "torch.save": torch.save,
        "safetensors": save_file,
        "DCP": lambda state, path: dcp.save(state, checkpoint_id=path),
        "DCP, 2 threads": lambda state, path: dcp.save(
            state, storage_writer=dcp.FileSystemWriter(path, thread_count=2)
        ),
    }
    snapshots = found("torchsnapshot")
    if snapshots is not None:
        peers["torchsnapshot"] = lambda state, path: snapshots.Snapshot.take(
            path=str(path), app_state={"all": snapshots.StateDict(state=state)}
        )
    checkpointing = found("torch_checkpointing")
    if checkpointing is not None:
        manager = _manager(checkpointing, save=checkpointing.SyncCheckpointSaverConfig())
        peers["torch_checkpointing"] = lambda state, path: manager.save(str(path), {"all": state})
    orbax = found("orbax.checkpoint")
    if orbax is not None:
        checkpointer = orbax.PyTreeCheckpointer()
        peers["Orbax"] = lambda state, path: checkpointer.save(
            path, {name: tensor.numpy() for name, tensor in state.items()}
        )
    return peers


def _manager(package: ModuleType, **settings: Any) -> Any:
    """Return a manager that writes through the page cache: its direct writes are not aligned."""
    files = importlib.import_module("torch_checkpointing.storage.filesystem")
    storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
    return package.CheckpointManager.Config(storage_config=storage, **settings).build()


def sync(path: Path) -> None:
    """Make what stands under a path durable, and its name."""
    places = [path, *path.rglob("*")] if path.is_dir() else [path]
    for place in (*places, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


class Asynchronous:
    """Saves behind the loop: `save`, `fence` before an update, `end` after the last, `close`.

    One that is done takes the place of the one before, which is removed.
    """

    def __init__(
        self,
        begin: Callable[[State, Path], Any],
        folder: Path,
        *,
        fence: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        folder.mkdir()
        self.fence, self.close = fence, close
        self._begin = begin
        self._folder = folder
        self._under_way: tuple[Any, Path] | None = None
        self._older: Path | None = None
        self._count = 0

    def save(self, state: State) -> None:
        """Begin to save; wait first for the one that is being written."""
        self.end()
        self._count += 1
        path = self._folder / str(self._count)
        self._under_way = (self._begin(state, path), path)

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._under_way is not None and not self._under_way[0].done()

    def end(self) -> None:
        """Wait for what is being written."""
        if self._under_way is not None:
            future, path = self._under_way
            future.result()
            if self._older is not None:
                remove(self._older)
            self._under_way, self._older = None, path


def asynchronous_peers(folder: Path) -> dict[str, Asynchronous]:
    """Return what saves while the loop goes on."""

    def dcp_thread(state: State, path: Path) -> Any:
        return dcp.async_save(state, checkpoint_id=path)

    def dcp_process(state: State, path: Path) -> Any:
        return dcp.async_save(
            state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )

    # The process of its own wants a group to be in, be it of one.
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    peers = {
        "DCP, a thread": Asynchronous(dcp_thread, folder / "dcp"),
        "DCP, a process": Asynchronous(dcp_process, folder / "dcp-process"),
    }
    checkpointing = found("torch_checkpointing")
    if checkpointing is not None:
        manager = _manager(checkpointing)

        def save(state: State, path: Path) -> Any:
            return manager.save(str(path), {"all": state})

        def fence() -> None:
            with manager.lock():
                pass

        peers["torch_checkpointing"] = Asynchronous(
            save, folder / "torch_checkpointing", fence=fence, close=manager.close
        )
    return peers
