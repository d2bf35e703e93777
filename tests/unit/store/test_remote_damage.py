"""What a remote holds that is damaged, left over or gone back from, and how it is put right."""

import contextlib
import errno
import itertools
import shutil

import fsspec
import pytest

from keepstep.errors import (
    CheckpointDamaged,
    KeepstepError,
    SaveFailed,
)
from keepstep.store import list_checkpoints, verify
from keepstep.store.disk import Disk
from tests.helpers.recording_disk import FailingDisk, PoorDisk
from tests.helpers.recording_objects import FailingObjects, RecordingObjects
from tests.helpers.remote import Ear, flip, key_of, names, objects, open_store, save


def test_what_is_damaged_there_is_passed_over_by_name_and_stays(tmp_path, url):
    """A flipped byte, a torn manifest, another's manifest, a lost object."""
    with open_store(tmp_path / "old", url, keep_last_n=0) as store:
        store.restore()
        save(store, 1, 2, 3, 4, 5, 6)
    files, data = fsspec.core.url_to_fs(url)[0], "rank-00000.safetensors"
    flip(url, "step_6", data)
    flip(url, "step_5", "manifest.json")
    files.cp_file(key_of(url, "step_1", "manifest.json"), key_of(url, "step_4", "manifest.json"))
    files.rm_file(key_of(url, "step_3", data))
    ear = Ear()
    with open_store(tmp_path / "new", url, keep_last_n=0, on_event=ear) as store:
        assert store.restore().manifest.step == 2
        save(store, 7)
        assert store.newest.sequence == 7
    faults = {
        heard["name"].rpartition("/")[2][:6]: heard["fault"] for heard in ear.of("passed_over")
    }
    assert faults.pop("step_6").startswith(f"{data}: bytes ")
    assert faults == {
        "step_3": f"{data} is missing",
        "step_4": "manifest.json is that of another checkpoint",
        "step_5": "the manifest does not match its own digest",
    }
    assert names(url) == ["step_1", "step_2", "step_7"]
    assert names(url, "aside.json") == ["step_3", "step_4", "step_5", "step_6"]
    assert not list((tmp_path / "new").glob(".staging*"))


def test_a_manifest_of_an_absurd_size_is_not_read(tmp_path, memory, monkeypatch):
    with open_store(tmp_path / "old", memory) as store:
        store.restore()
        save(store, 1, 2)
    monkeypatch.setattr("keepstep.store.remote_commit.MANIFEST_BYTES_MAX", 100_000)
    key = key_of(memory, "step_2", "manifest.json")
    fsspec.core.url_to_fs(memory)[0].pipe_file(key, bytes(100_001))
    there = RecordingObjects(memory)
    with open_store(tmp_path / "new", there) as store:
        assert store.restore().manifest.step == 1
    assert ("read", "step_2-2-ID/manifest.json") not in there.log


@pytest.mark.parametrize("broken", ["disk", "remote"])
def test_what_cannot_be_fetched_is_no_reason_for_an_older_one(tmp_path, memory, broken):
    """Too many open files, at each operation of a new machine."""
    with open_store(tmp_path / "old", memory, keep_last_n=0) as store:
        store.restore()
        save(store, 1, 2, 3)
    told = 0
    for number in itertools.count(1):
        disk = FailingDisk(number if broken == "disk" else -1, errno.EMFILE)
        there = FailingObjects(memory, number if broken == "remote" else -1, errno.EMFILE)
        try:
            with open_store(tmp_path / str(number), there, disk=disk, save_retries=0) as store:
                assert store.restore().manifest.step == 3
        except (KeepstepError, OSError) as error:
            assert not isinstance(error, CheckpointDamaged)
            told += 1
        if max(disk.count, 0) < number > there.count:
            break
    assert told > 5


def test_what_is_damaged_there_and_whole_here_is_put_anew(tmp_path, url):
    with open_store(tmp_path / "run", url) as store:
        store.restore()
        save(store, 1)
    key = key_of(url, "step_1", "rank-00000.safetensors")
    fsspec.core.url_to_fs(url)[0].pipe_file(key, b"short")
    with open_store(tmp_path / "run", url) as store:
        store.restore()
    with open_store(tmp_path / "new", url) as store:
        assert store.restore().manifest.step == 1


def test_a_damaged_best_is_set_aside_there(tmp_path, url):
    with open_store(tmp_path / "old", url) as store:
        store.restore()
        save(store, 1, 2, 3)
    flip(url, "step_2", "rank-00000.safetensors")
    with open_store(tmp_path / "new", url) as store:
        assert store.restore().manifest.step == 3
        assert store.best.step == 3
    assert names(url, "aside.json") == ["step_2"]


def test_where_nothing_there_is_whole_nothing_is_begun(tmp_path, url):
    with open_store(tmp_path / "old", url) as store:
        store.restore()
        save(store, 1)
    flip(url, "step_1", "rank-00000.safetensors")
    with (
        open_store(tmp_path / "new", url) as store,
        pytest.raises(CheckpointDamaged, match=r"rank-00000\.safetensors: bytes"),
    ):
        store.restore()
    assert names(url) == ["step_1"]


@pytest.mark.parametrize("disk", [Disk, PoorDisk])
@pytest.mark.parametrize("damaged", [(3,), (2, 3)])
def test_what_is_damaged_here_comes_back_from_there(tmp_path, url, damaged, disk):
    with open_store(tmp_path / "run", url) as store:
        store.restore()
        save(store, 1, 2, 3)
    for step in damaged:
        path = tmp_path / f"run/step_{step}/rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with open_store(tmp_path / "run", url, disk=disk()) as store:
        found = store.restore()
        assert found.manifest.step == 3
        assert found.skipped == ()
        assert verify(list_checkpoints(tmp_path / "run")[-1]) == []
    assert (tmp_path / "run/aside/step_3").is_dir()


def test_what_is_damaged_there_takes_nothing_whole_from_here(tmp_path, url):
    """Another step 2, later and damaged, has the name of the one here."""
    with open_store(tmp_path / "one", url) as store:
        store.restore()
        save(store, 1, 2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with open_store(tmp_path / "two", url) as store:
        store.restore(1)
        save(store, 2)
    flip(url, "step_2-3", "rank-00000.safetensors")
    with open_store(tmp_path / "one", url) as store:
        found = store.restore()
        assert (found.manifest.step, found.manifest.sequence) == (2, 2)


def test_what_was_not_put_there_is_put_first_by_the_next_session(tmp_path, memory):
    with open_store(tmp_path / "run", memory, save_retries=0) as store:
        store.restore()
        save(store, 1)
    # The first request of a save after the five of the start: nothing of step 2 gets there.
    late = FailingObjects(memory, at=8)
    with (
        open_store(tmp_path / "run", late, save_retries=0) as store,
        pytest.raises(SaveFailed, match=r"step 2 is committed in its folder.*memory://") as caught,
    ):
        store.restore()
        late.count = 7
        save(store, 2)
    assert "look at its address" in caught.value.hint.lower()
    assert names(memory) == ["step_1"]
    assert verify(list_checkpoints(tmp_path / "run")[-1]) == []
    with open_store(tmp_path / "run", memory) as store:
        assert store.restore().manifest.step == 2
        assert names(memory) == ["step_1", "step_2"]


def test_what_a_dead_session_left_is_swept_and_names_of_others_stay(tmp_path, url):
    with open_store(tmp_path / "run", url) as store:
        store.restore()
        save(store, 1)
    files, root = fsspec.core.url_to_fs(url, auto_mkdir=True)
    mine = f"step_2-2-{'0' * 16}/rank-00000.safetensors"
    others = ["step_9/rank-00000.safetensors", "notes/step_2-2.txt", f"step_2-2-{'0' * 15}/file"]
    for key in (mine, *others):
        files.pipe_file(f"{root}/{key}", b"some bytes")
    ear = Ear()
    with open_store(tmp_path / "run", url, on_event=ear) as store:
        store.restore()
        save(store, 3)
        # No number that any name there shows is given again.
        assert store.newest.sequence == 3
    left = set(objects(url))
    assert mine not in left
    assert set(others) <= left
    assert [facts["name"] for facts in ear.of("swept")] == [f"{url}/{mine.partition('/')[0]}"]


def test_the_way_back_holds_there_too(tmp_path, url):
    with open_store(tmp_path / "one", url, keep_last_n=0) as store:
        store.restore()
        save(store, 1, 2, 3, 4)
    with open_store(tmp_path / "two", url, keep_last_n=0) as store:
        assert store.restore(2).manifest.step == 2
        save(store, 3)
        assert store.newest.sequence == 5
    with open_store(tmp_path / "three", url, keep_last_n=0) as store:
        found = store.restore()
        assert (found.manifest.step, found.manifest.sequence, found.manifest.parent) == (3, 5, 2)
    assert names(url, "aside.json") == ["step_3", "step_4"]


def test_a_way_back_that_is_cut_short_loses_no_manifest(tmp_path, memory):
    for number in itertools.count(1):
        remote = f"{memory}-{number}"
        with open_store(tmp_path / f"{number}-one", remote, keep_last_n=0) as store:
            store.restore()
            save(store, 1, 2, 3)
        failing = FailingObjects(remote, number)
        with (
            contextlib.suppress(KeepstepError),
            open_store(tmp_path / f"{number}-two", failing, save_retries=0) as store,
        ):
            store.restore(1)
        assert {*names(remote), *names(remote, "aside.json")} == {"step_1", "step_2", "step_3"}
        if failing.count < number:
            break
    assert number > 10
