"""The numbers of a run as TensorBoard shows them: event files in a folder.

Guarantees: TensorBoard shows each step once. A new file is begun for each session, behind all
others in the order of names, and its first event takes back what the others hold from its first
step on (as the `purge_step` of a SummaryWriter does). A torn end of a file, from a kill or a full
disk, is passed over by TensorBoard.

Files are not synced: what a power cut takes of their end is supplied, of their middle it is not.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from keepstep.config.resolved import dump_toml, track_folder
from keepstep.report.trackers import Record, ended
from keepstep.store.disk import Disk
from keepstep.store.handles import AppendFile
from keepstep.store.regular import opened

if TYPE_CHECKING:
    from keepstep.run.outcome import Outcome
    from keepstep.run.run import Run

_PREFIX = "events.out.tfevents."
_HEAD_BYTES, _FOOT_BYTES = 12, 4
"""A record: the length of its data (8 bytes) and its checksum, the data, their checksum."""


def build(run: "Run", tell: Callable[[str], None]) -> "TensorBoard":
    """Return the tracker of a run."""
    del tell
    return TensorBoard(track_folder(run.config) / "tensorboard", config=dump_toml(run.config))


class TensorBoard:
    """A tracker that writes event files into `folder`."""

    def __init__(self, folder: Path, *, config: str) -> None:
        self._folder = folder
        self._config = config
        self._disk = Disk()
        self._file: AppendFile | None = None

    def rewind(self, step: int) -> int:
        """Begin a file that takes back what the others hold from the step on that is returned."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
        self._disk.make_folders(self._folder)
        files = sorted(self._folder.glob(f"{_PREFIX}*"), key=lambda path: path.name)
        # The last step that is there is written again: its evaluation may be missing.
        first = min(step, _last_step(files[-1])) if files else 0
        self._file = AppendFile(self._disk, self._folder / _name_behind(files))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        shown = Record(step=first, time=time.time(), texts={"config": f"```\n{self._config}```"})
        self._write(
            [
                event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"),
                event_pb2.Event(wall_time=time.time(), step=first, session_log=start),
                _event(shown),
            ]
        )
        return first

    def write(self, records: Sequence[Record]) -> None:
        """Append the records; they are in the kernel's hands when this returns."""
        self._write([_event(record) for record in records])

    def close(self, outcome: "Outcome") -> None:
        """Append how the session ended."""
        self.write([ended(outcome)])
        assert self._file is not None, "a tracker begins with a rewind"
        self._file.close()
        self._file = None

    def _write(self, events: Sequence[Any]) -> None:
        gathered = _Gathered()
        writer = RecordWriter(gathered)
        for event in events:
            writer.write(event.SerializeToString())
        assert self._file is not None, "a tracker begins with a rewind"
        self._file.write(bytes(gathered.data))


class _Gathered:
    """What a RecordWriter writes, to be appended at once."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data


def _event(record: Record) -> Any:
    values = [
        summary_pb2.Summary.Value(tag=name, simple_value=number)
        for name, number in record.numbers.items()
    ]
    values += [_text(name, text) for name, text in record.texts.items()]
    return event_pb2.Event(
        wall_time=record.time, step=record.step, summary=summary_pb2.Summary(value=values)
    )


def _text(name: str, text: str) -> Any:
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        string_val=[text.encode()],
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
    )
    metadata = create_summary_metadata(display_name=name, description="")
    return summary_pb2.Summary.Value(tag=name, metadata=metadata, tensor=tensor)


def _last_step(path: Path) -> int:
    """Return the step of the last whole record of a file; 0 where there is none."""
    found = (0, 0)
    with opened(path) as file:
        size = file.seek(0, os.SEEK_END)
        at = 0
        while at + _HEAD_BYTES <= size:
            file.seek(at)
            begin, length = at + _HEAD_BYTES, int.from_bytes(file.read(8), "little")
            at = begin + length + _FOOT_BYTES
            if at <= size:
                found = (begin, length)
        file.seek(found[0])
        event = event_pb2.Event.FromString(file.read(found[1]))
    return int(event.step)


def _name_behind(files: Sequence[Path]) -> str:
    """Return the name of a new file that comes after all others, whatever the clock says."""
    begun = int(time.time())
    if files:
        begun = max(begun, int(files[-1].name.removeprefix(_PREFIX).partition(".")[0]) + 1)
    return f"{_PREFIX}{begun:010d}.{socket.gethostname()}.{os.getpid()}"
