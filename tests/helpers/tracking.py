"""Reads back what trackers wrote, with the code of their own makers where there is some."""

import json
import sqlite3
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, float]]]


def tensorboard(folder: Path) -> Series:
    """Every scalar of TensorBoard, as it shows them; `config` and `outcome` are texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    tags = shown.Tags()
    found = {name: [(e.step, e.value) for e in shown.Scalars(name)] for name in tags["scalars"]}
    for name in tags["tensors"]:
        found[name] = [(e.step, e.tensor_proto.string_val[0].decode()) for e in shown.Tensors(name)]
    return found


def trackio(folder: Path, project: str = "keepstep") -> Series:
    """Every metric of trackio's database."""
    found: Series = defaultdict(list)
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            found[name].append((step, value))
    return found


def wandb(folder: Path) -> tuple[str, Series]:
    """The run's id and every row of the newest run file of W&B."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: Series = defaultdict(list)
    run_id = ""
    path = max((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            run_id = record.run.run_id
        if record.HasField("history"):
            row: dict[str, Any] = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                found[name].append((record.history.step.num, value))
    return run_id, found


def _records(data: bytes) -> list[bytes]:
    """Return the records of a log of LevelDB's, which W&B's run file is behind 7 bytes."""
    found, parts, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(parts)
            parts = b""
    return found
