"""The numbers of a run in trackio, where it keeps them on this machine.

Guarantees: each step stands in its table once. What the run takes back is deleted there, before
it is written anew. Its own `trackio.log` hands lines to a thread that swallows every error; here
they are written by the function below it, which raises.

The folder is trackio's own (TRACKIO_DIR). `trackio sync` puts a project on a Hugging Face Space.
"""

import dataclasses
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trackio.sqlite_storage import SQLiteStorage

from keepstep.report.trackers import Record, ended

if TYPE_CHECKING:
    from keepstep.run.outcome import Outcome
    from keepstep.run.run import Run

_LOCKED_SECONDS = 30.0
"""So long another process, such as a dashboard, may hold the database."""


def build(run: "Run", tell: Callable[[str], None]) -> "Trackio":
    """Return the tracker of a run."""
    del tell
    config = dataclasses.asdict(run.config)
    project, name = run.config.track.project, run.config.run.name
    return Trackio(project, name=name, run_id=run.store.run_id, config=config)


class Trackio:
    """A tracker that writes into the database of a project."""

    def __init__(self, project: str, *, name: str, run_id: str, config: dict[str, Any]) -> None:
        self._project = project
        self._name = name
        self._run_id = run_id
        self._config = config

    def rewind(self, step: int) -> int:
        """Delete what is held from the step on that is returned."""
        path = SQLiteStorage.init_db(self._project)
        with closing(sqlite3.connect(path, timeout=_LOCKED_SECONDS)) as database, database:
            held = database.execute(
                "SELECT MAX(step) FROM metrics WHERE run_id = ?", [self._run_id]
            )
            (last,) = held.fetchone()
            # The last step that is there is written again: its evaluation may be missing.
            first = 0 if last is None else min(step, last)
            gone = "DELETE FROM metrics WHERE run_id = ? AND step >= ?"
            database.execute(gone, [self._run_id, first])
        return first

    def write(self, records: Sequence[Record]) -> None:
        """Insert the records; they are durable when this returns."""
        SQLiteStorage.bulk_log(
            self._project,
            self._name,
            [{**record.numbers, **record.texts} for record in records],
            steps=[record.step for record in records],
            timestamps=[datetime.fromtimestamp(record.time, UTC).isoformat() for record in records],
            config=self._config,
            run_id=self._run_id,
        )

    def close(self, outcome: "Outcome") -> None:
        """Insert how the session ended."""
        self.write([ended(outcome)])
