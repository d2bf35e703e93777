"""The second home of checkpoints, in the memory and the local file system of fsspec."""

import itertools

import pytest
import torch

from keepstep.errors import (
    KeepstepError,
    NotFound,
    OtherRun,
    SaveFailed,
    UsageError,
)
from keepstep.store import Store, list_checkpoints, verify
from keepstep.store.disk import Disk
from keepstep.store.pins import pin
from keepstep.store.remote import ObjectStore
from tests.helpers.recording_objects import FailingObjects, RecordingObjects
from tests.helpers.remote import Ear, names, objects, open_store, save, state_of


def test_a_save_makes_these_requests_in_this_order_and_no_others(tmp_path, url):
    there = RecordingObjects(url)
    with open_store(tmp_path / "run", there, keep_last_n=1, keep_best_n=0) as store:
        store.restore()
        save(store, 1)
        there.log.clear()
        save(store, 2)
    assert there.log == [
        ("put_file", "step_2-2-ID/rank-00000.safetensors"),
        ("read", "session.json"),
        ("put", "step_2-2-ID/manifest.json"),
        ("read", "session.json"),
        ("list", ""),
        ("read", "session.json"),
        ("delete", "step_1-1-ID/manifest.json"),
        ("delete", "step_1-1-ID/rank-00000.safetensors"),
    ]


def test_a_new_machine_goes_on_from_the_newest_and_has_the_best(tmp_path, url):
    ear = Ear()
    with open_store(tmp_path / "old", url) as store:
        assert store.restore() is None
        save(store, 1, 2, 3, 4, 5)
        run_id = store.run_id
    assert names(url) == ["step_2", "step_4", "step_5"]
    with open_store(tmp_path / "new", url, on_event=ear) as store:
        found = store.restore()
        assert found.manifest.step == 5
        assert torch.equal(found.state["weight"], state_of(5)["weight"])
        protocol = url.partition(":")[0]
        assert found.manifest.commit_method == f"rename; remote {protocol}: manifest last"
        assert store.best.step == 2
        assert store.run_id == run_id
        assert (tmp_path / "new/best").readlink().name == "step_2"
        save(store, 6)
        assert store.newest.sequence == 6
    assert [verify(entry) for entry in list_checkpoints(tmp_path / "new")] == [[], [], []]
    assert [facts["name"].rpartition("/")[2].split("-")[0] for facts in ear.of("fetched")] == [
        "step_5",
        "step_2",
    ]
    assert names(url) == ["step_2", "step_5", "step_6"]


def test_another_runs_objects_are_refused_and_stay(tmp_path, url):
    with open_store(tmp_path / "one", url) as store:
        store.restore(must_match={"width": 4})
        store.save(state_of(1), step=1, must_match={"width": 4})
    with Store(tmp_path / "two") as store:
        store.restore()
        save(store, 7)
    before = objects(url)
    with open_store(tmp_path / "two", url) as store, pytest.raises(OtherRun, match="another run"):
        store.restore()
    with open_store(tmp_path / "new", url) as store, pytest.raises(OtherRun, match="width"):
        store.restore(must_match={"width": 8})
    with open_store(tmp_path / "new", url) as store, pytest.raises(OtherRun, match="this is run x"):
        store.restore(run_id="x")
    with open_store(tmp_path / "new", url) as store, pytest.raises(UsageError, match="fresh"):
        store.restore("fresh")
    with open_store(tmp_path / "new", url) as store, pytest.raises(UsageError, match="not looked"):
        save(store, 1)
    assert objects(url) == before
    with open_store(tmp_path / "new", url) as store, pytest.raises(NotFound, match="step 3"):
        store.restore(3)
    changed = {key for key, data in objects(url).items() if before[key] != data}
    # It is this run's own session: it took the prefix, and found no step 3.
    assert changed == {"session.json"}


def test_retention_there_is_that_of_the_run_and_a_pin_holds_there_too(tmp_path, url):
    with open_store(tmp_path / "run", url, keep_last_n=1, keep_every=4) as store:
        store.restore()
        save(store, 1, 2, 3)
        pin(tmp_path / "run", list_checkpoints(tmp_path / "run")[-1], disk=Disk())
        save(store, 4, 5, 6)
    assert names(url) == ["step_2", "step_3", "step_4", "step_6"]


def test_what_is_not_there_is_as_good_as_deleted(url, tmp_path):
    ObjectStore(url).delete("step_1-1-0/manifest.json")


def test_an_error_at_every_request_is_told_or_survived_and_loses_nothing(tmp_path, memory):
    for number in itertools.count(1):
        run, remote = tmp_path / str(number), f"{memory}-{number}"
        failing, told = FailingObjects(remote, number), 0
        try:
            with open_store(run, failing, keep_last_n=1, save_retries=0) as store:
                store.restore()
                for step in (1, 2, 3):
                    save(store, step)
                    told = step
        except KeepstepError as error:
            assert "memory://" in str(error)
        with open_store(tmp_path / f"{number}-new", remote, keep_last_n=1) as store:
            found = store.restore()
            assert (found.manifest.step if found else 0) >= told
        if failing.count < number:
            break
    assert number > 20


def test_a_save_that_did_not_wait_is_over_when_it_is_there(tmp_path, memory):
    late = FailingObjects(memory, at=-1)
    with open_store(tmp_path / "run", late, save_retries=0) as store:
        store.restore()
        store.save(state_of(1), step=1, wait=False)
        assert store.collect().manifest.step == 1
        assert names(memory) == ["step_1"]
        late.at = late.count + 1
        store.save(state_of(2), step=2, wait=False)
        with pytest.raises(SaveFailed, match="could not be put in memory://"):
            store.collect()
        assert store.newest.step == 2


def test_an_attempt_that_fails_is_told_and_made_again(tmp_path, memory):
    ear, late = Ear(), FailingObjects(memory, at=-1)
    with open_store(tmp_path / "run", late, save_retries=1, on_event=ear) as store:
        store.restore()
        late.at = late.count + 1
        save(store, 1)
    [retry] = ear.of("remote_retry")
    assert (retry["what"], retry["attempt"]) == ("put", 1)
    assert names(memory) == ["step_1"]


def test_a_remote_that_cannot_be_is_refused_at_once_without_its_secrets(tmp_path):
    for wrong in ("nothing://a:secret@host/b", "memoryx://b"):
        with pytest.raises(UsageError, match="the remote") as caught:
            Store(tmp_path, remote=wrong)
        assert "secret" not in str(caught.value)
    with pytest.raises(UsageError, match=r"gs://b needs a package that is not there: .*gcsfs"):
        Store(tmp_path, remote="gs://b")
    with pytest.raises(UsageError, match="in folders"):
        Store(tmp_path, remote="memory://b", layout="files")
