"""The store alone on its worse days: dropped locks, stuck folders, odd states and arguments."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from keepstep.errors import Locked, UnsafeState
from keepstep.store import Store, list_checkpoints, load_state
from keepstep.store.disk import Disk


def save(folder, state):
    with Store(folder) as store:
        store.restore()
        return store.save(state, step=1)


def test_a_lock_that_a_copy_of_the_folder_dropped_is_taken_again_or_missed(tmp_path):
    code = "import sys; from keepstep.store import Store; Store(sys.argv[1]).open(); sys.exit(9)"
    with Store(tmp_path / "run") as store:
        store.save({"w": torch.ones(1)}, step=1)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")  # Opens and closes the lock.
        store.save({"w": torch.ones(2)}, step=2)
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
        assert other.returncode != 9
        shutil.copytree(tmp_path / "run", tmp_path / "another")
        hold = (
            "import sys; from keepstep.store import Store; Store(sys.argv[1]).open();"
            "print('held', flush=True); input()"
        )
        thief = subprocess.Popen(
            [sys.executable, "-c", hold, str(tmp_path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert thief.stdout.readline() == b"held\n"
            with pytest.raises(Locked, match=f"process {thief.pid} on"):
                store.save({"w": torch.ones(3)}, step=3)
        finally:
            thief.communicate(b"\n")
    assert [entry.step for entry in list_checkpoints(tmp_path / "run")] == [1, 2]


def test_what_stood_there_already_is_adopted(tmp_path):
    """An attempt committed and could not say so: its number is not given again, its best stays."""

    class Interrupted(Disk):
        armed = False

        def sync_folder(self, path):
            super().sync_folder(path)
            if self.armed and (path / "step_2").exists():
                self.armed = False
                raise KeyboardInterrupt

    disk = Interrupted()
    with Store(tmp_path, disk=disk, best_metric="loss", keep_last_n=0) as store:
        store.save({"w": torch.ones(1)}, step=1, metrics={"loss": 2.0})
        disk.armed = True
        with pytest.raises(KeyboardInterrupt):
            store.save({"w": torch.ones(2)}, step=2, metrics={"loss": 1.0})
        again = store.save({"w": torch.ones(2)}, step=2, metrics={"loss": 1.0})
        assert not again.new
        assert store.newest.step == 2
        assert store.best.step == 2
        last = store.save({"w": torch.ones(3)}, step=3, metrics={"loss": 3.0})
    assert [last.manifest.sequence, last.manifest.parent] == [3, 2]
    assert last.manifest.best.step == 2


def test_a_file_system_without_links_has_files_that_hold_the_names(tmp_path):
    class NoLinks(Disk):
        def symlink(self, target, path):
            raise PermissionError(1, "Operation not permitted", str(path))

    told = []
    for first in (1, 4):
        with Store(
            tmp_path,
            disk=NoLinks(),
            keep_last_n=1,
            on_event=lambda event, **facts: told.append(event),
        ) as store:
            store.restore()
            for step in range(first, first + 3):
                store.save({"w": torch.ones(step)}, step=step)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [6]
    assert told.count("methods") == 2
    assert "housekeeping_failed" not in told
    assert (tmp_path / "latest").read_text() == "step_6\n"
    assert len(load_state(tmp_path / "latest")["w"]) == 6


def test_a_conjugate_view_is_stored_as_what_it_is(tmp_path):
    base = torch.tensor([1 + 2j, 3 - 1j])
    state = load_state(save(tmp_path, {"a": base, "b": base.conj(), "c": base.conj().imag}).path)
    assert torch.equal(state["a"], base)
    assert torch.equal(state["b"], base.conj().resolve_conj())
    assert torch.equal(state["c"], base.conj().imag.resolve_neg())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": "3"}, "step is '3'"),
        ({"metrics": {"loss": "low"}}, "the metric loss is 'low'"),
        ({"must_match": {"rate": math.nan}}, "must_match holds what JSON cannot"),
        ({"environment": {"path": os}}, "environment holds what JSON cannot"),
    ],
)
def test_what_a_manifest_cannot_hold_is_refused_before_anything_is_written(tmp_path, more, words):
    with Store(tmp_path) as store, pytest.raises(UnsafeState, match=words):
        store.save({"w": torch.ones(1)}, **{"step": 1, **more})
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("root", [[torch.ones(1)], torch.ones(1), 3])
def test_a_state_that_is_no_dict_is_refused(tmp_path, root):
    with Store(tmp_path) as store, pytest.raises(UnsafeState, match="must be a dict"):
        store.save(root, step=1)


def test_numbers_of_other_libraries_and_tuples_in_the_identity_are_taken(tmp_path):
    import numpy as np

    identity = {"betas": (0.9, 0.95)}
    with Store(tmp_path) as store:
        store.save(
            {"w": torch.ones(1)},
            step=np.int64(1),
            metrics={"loss": torch.tensor(1.5)},
            must_match=identity,
        )
    with Store(tmp_path) as store:
        found = store.restore(must_match=identity)
    assert found.manifest.metrics == {"loss": 1.5}


def test_the_order_of_a_dict_comes_back(tmp_path):
    saved = save(tmp_path, {"window": {"z": 1, "a": 2, "m": 3}})
    assert list(load_state(saved.path)["window"]) == ["z", "a", "m"]


def test_a_leftover_that_cannot_be_removed_stops_nothing(tmp_path):
    class Stuck(Disk):
        def remove_folder(self, path):
            raise OSError(39, "Directory not empty", str(path))

    save(tmp_path, {"w": torch.ones(1)})
    (tmp_path / ".trash-0123456789abcdef").mkdir()
    told = []
    with Store(tmp_path, disk=Stuck(), on_event=lambda e, **f: told.append((e, f))) as store:
        assert store.restore().manifest.step == 1
    # The old leftover, and the folder in which this session tried what the file system can.
    assert [event for event, _ in told] == ["housekeeping_failed"] * 2


def test_a_store_survives_a_change_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store("run") as store:
        store.save({"w": torch.ones(1)}, step=1)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.save({"w": torch.ones(2)}, step=2)
    monkeypatch.chdir(tmp_path)
    with Store("run") as store:
        assert store.restore().manifest.step == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []
