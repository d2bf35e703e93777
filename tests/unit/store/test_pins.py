"""A pin holds a checkpoint whatever retention says, from when it is acknowledged."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keepstep.errors import CheckpointDamaged, Locked, NotFound
from keepstep.store import Store, list_checkpoints
from keepstep.store.disk import Disk
from keepstep.store.pins import (
    delete_unless_pinned,
    identity_of,
    pin,
    read_pins,
    unpin,
)
from tests.helpers.command import environment
from tests.helpers.recording_disk import RecordingDisk

ASK_FOR_THE_PINS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from keepstep.errors import Locked
from keepstep.store import pins
try:
    with pins._hold(Path(sys.argv[1]), wait_seconds=0):
        print("got them")
except Locked:
    print("refused")
"""


def state(step):
    return {"model": {"weight": torch.full((4,), float(step))}}


def save(folder, *steps, **policy):
    events = []
    with Store(folder, on_event=lambda e, **f: events.append((e, f)), **policy) as store:
        if list_checkpoints(folder):
            store.restore()
        for step in steps:
            store.save(state(step), step=step)
    return events


def steps(folder, **more):
    return [entry.step for entry in list_checkpoints(folder, **more)]


def entry_of(folder, step):
    (entry,) = [e for e in list_checkpoints(folder, aside=True) if e.step == step]
    return entry


def asked_by_another(folder: Path) -> str:
    """Ask for the pins in another process, without waiting; return what it says."""
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_THE_PINS, str(folder)],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    return done.stdout.strip()


def test_a_pinned_checkpoint_outlives_every_later_save_until_it_is_unpinned(tmp_path):
    save(tmp_path, 1, 2, keep_last_n=2)
    assert pin(tmp_path, entry_of(tmp_path, 1), disk=Disk())
    assert not pin(tmp_path, entry_of(tmp_path, 1), disk=Disk())
    save(tmp_path, 3, 4, 5, keep_last_n=1)
    assert steps(tmp_path) == [1, 5]
    unpin(tmp_path, identity_of(entry_of(tmp_path, 1).manifest), disk=Disk())
    save(tmp_path, 6, keep_last_n=1)
    assert steps(tmp_path) == [6]


def test_a_pin_changes_nothing_in_the_checkpoint(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "step_1"
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    mtime = folder.stat().st_mtime_ns
    pin(tmp_path, entry_of(tmp_path, 1), disk=Disk())
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before
    assert folder.stat().st_mtime_ns == mtime


def test_a_pin_is_durable_under_its_name_when_it_returns(tmp_path):
    save(tmp_path, 1)
    disk = RecordingDisk()
    pin(tmp_path, entry_of(tmp_path, 1), disk=disk)
    names = [name for name, _ in disk.log]
    assert names == ["create", "write", "sync", "close", "rename", "sync_folder"]


def test_a_pin_follows_a_checkpoint_that_is_set_aside(tmp_path):
    save(tmp_path, 1, 2, keep_last_n=0)
    pin(tmp_path, entry_of(tmp_path, 2), disk=Disk())
    with Store(tmp_path, keep_last_n=0) as store:
        store.restore(1)
    aside = entry_of(tmp_path, 2)
    assert aside.aside
    assert not delete_unless_pinned(tmp_path, aside, disk=Disk())
    assert aside.path.exists()


def test_a_pin_does_not_hold_another_checkpoint_of_the_same_step(tmp_path):
    save(tmp_path, 1, 2, keep_last_n=0)
    pin(tmp_path, entry_of(tmp_path, 2), disk=Disk())
    with Store(tmp_path, keep_last_n=0) as store:
        store.restore(1)
        store.save(state(7), step=2)
    (again,) = [e for e in list_checkpoints(tmp_path) if e.step == 2]
    assert delete_unless_pinned(tmp_path, again, disk=Disk())
    assert steps(tmp_path, aside=True) == [1, 2]


def test_no_pin_is_made_of_what_is_not_there_or_not_whole(tmp_path):
    save(tmp_path, 1, 2, keep_last_n=0)
    gone, torn = entry_of(tmp_path, 1), tmp_path / "step_2"
    assert delete_unless_pinned(tmp_path, gone, disk=Disk())
    with pytest.raises(NotFound, match="went away"):
        pin(tmp_path, gone, disk=Disk())
    (torn / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match="is missing"):
        pin(tmp_path, entry_of(tmp_path, 2), disk=Disk())
    assert read_pins(tmp_path) == {}
    with pytest.raises(NotFound, match="not pinned"):
        unpin(tmp_path, ("run", 1, 0.0), disk=Disk())


def test_no_deletion_looks_at_the_pins_while_one_is_being_written(tmp_path):
    heard = []

    class Asking(Disk):
        def operation(self, name, path):
            if name == "rename" and path.name == "pins.json":
                heard.append(asked_by_another(tmp_path))

    save(tmp_path, 1)
    pin(tmp_path, entry_of(tmp_path, 1), disk=Asking())
    assert heard == ["refused"]
    assert asked_by_another(tmp_path) == "got them"


def test_no_pin_is_written_between_a_deletion_s_look_at_the_pins_and_its_rename(tmp_path):
    heard = []

    class Asking(Disk):
        def operation(self, name, path):
            if name == "rename" and path.name.startswith(".trash-"):
                heard.append(asked_by_another(tmp_path))
            if name == "unlink":
                # The files of a large checkpoint take a while: no pin waits for them.
                heard.append(asked_by_another(tmp_path))

    save(tmp_path, 1, 2, keep_last_n=0)
    assert delete_unless_pinned(tmp_path, entry_of(tmp_path, 1), disk=Asking())
    assert heard == ["refused", "got them", "got them"]


def test_a_save_does_not_wait_for_a_pin_and_leaves_the_deletion_to_the_next_one(
    tmp_path, monkeypatch
):
    waited = []

    class Telling(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return super().wait(timeout)

    # In that module only: threads that begin elsewhere wait for themselves.
    monkeypatch.setattr("keepstep.store.pins.threading", SimpleNamespace(Event=Telling))
    code = ASK_FOR_THE_PINS.replace('print("got them")', 'print("got them", flush=True); input()')
    save(tmp_path, 1, keep_last_n=1)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as holder:
        assert holder.stdout.readline() == "got them\n"
        events = save(tmp_path, 2, keep_last_n=1)
        assert steps(tmp_path) == [1, 2]
        (told,) = [facts for event, facts in events if event == "housekeeping_failed"]
        assert "pins" in told["error"]
        with pytest.raises(Locked):
            delete_unless_pinned(tmp_path, entry_of(tmp_path, 1), disk=Disk())
        assert waited == []
        holder.communicate("\n")
    save(tmp_path, 3, keep_last_n=1)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("text", ["", "{", '{"format": 2, "pinned": []}', '{"format": 1}', "[]"])
def test_pins_that_cannot_be_read_stop_deletions_and_no_save(tmp_path, text):
    save(tmp_path, 1)
    (tmp_path / "pins.json").write_text(text)
    events = save(tmp_path, 2, 3, keep_last_n=1)
    assert steps(tmp_path) == [1, 2, 3]
    assert [e for e, _ in events].count("committed") == 2
    told = [facts["error"] for event, facts in events if event == "housekeeping_failed"]
    assert all("pins.json cannot be read" in error for error in told)
    assert len(told) == 2


def test_a_session_that_sweeps_the_temporary_away_does_not_fail_a_pin(tmp_path):
    class Sweeping(Disk):
        swept = False

        def operation(self, name, path):
            if name == "rename" and not self.swept:
                self.swept = True
                (temporary,) = tmp_path.glob(".pins.json-*.tmp")
                temporary.unlink()

    save(tmp_path, 1)
    assert pin(tmp_path, entry_of(tmp_path, 1), disk=Sweeping())
    assert list(read_pins(tmp_path).values()) == ["step_1"]


def test_a_deletion_from_aside_leaves_its_rest_where_a_session_sweeps(tmp_path):
    class Dying(Disk):
        def operation(self, name, path):
            if name == "unlink":
                raise KeyboardInterrupt

    save(tmp_path, 1, 2, keep_last_n=0)
    with Store(tmp_path, keep_last_n=0) as store:
        store.restore(1)
    with pytest.raises(KeyboardInterrupt):
        delete_unless_pinned(tmp_path, entry_of(tmp_path, 2), disk=Dying())
    assert [p.name[:7] for p in tmp_path.glob(".trash-*")] == [".trash-"]
    events = save(tmp_path, 3, keep_last_n=0)
    assert next(event for event, _ in events) == "swept"
    assert not list(tmp_path.rglob(".trash-*"))
