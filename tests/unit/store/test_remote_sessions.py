"""Two sessions on one prefix: the later one has it, and nothing it was told is saved is lost."""

import json
import os

import pytest

from keepstep.errors import Locked, OtherRun, SaveFailed, UsageError
from keepstep.store import list_checkpoints, verify
from keepstep.store.remote import ObjectStore
from tests.helpers.recording_objects import FailingObjects, OvertakenObjects
from tests.helpers.remote import names, objects, open_store, save, state_of

BEGIN = 2
"""The request with which a session takes a prefix: it has listed what is there."""


def test_a_session_that_was_overtaken_commits_nothing_there_and_says_who_did(tmp_path, memory):
    with open_store(tmp_path / "one", memory) as one:
        one.restore()
        save(one, 1)
        with open_store(tmp_path / "two", memory) as two:
            assert two.restore().manifest.step == 1
            with pytest.raises(Locked, match=f"a later session: process {os.getpid()} on"):
                save(one, 2)
            assert names(memory) == ["step_1"]
            save(two, 3)
    assert verify(list_checkpoints(tmp_path / "one")[-1]) == []
    assert names(memory) == ["step_1", "step_3"]


def test_a_session_that_is_overtaken_at_its_manifest_does_not_say_that_it_saved(tmp_path, memory):
    """Where it has put the manifest, only a later session can tell whether that counts."""

    class Overtaken(ObjectStore):
        def operation(self, name: str, key: str) -> None:
            if name == "put" and key.startswith("step_2-"):
                ObjectStore(memory).put("session.json", json.dumps({"token": "another"}).encode())

    with open_store(tmp_path / "one", Overtaken(memory)) as store:
        store.restore()
        save(store, 1)
        with pytest.raises(Locked):
            save(store, 2)


def test_what_was_acknowledged_while_a_later_session_began_is_seen_by_it(tmp_path, memory):
    with open_store(tmp_path / "one", memory) as one:
        one.restore()
        save(one, 1)
        late = OvertakenObjects(memory, BEGIN, lambda: save(one, 2))
        with open_store(tmp_path / "two", late) as two:
            assert two.restore().manifest.step == 2


def test_another_run_that_saved_while_this_one_began_is_refused(tmp_path, memory):
    with open_store(tmp_path / "one", memory) as one:
        one.restore()
        late = OvertakenObjects(memory, BEGIN, lambda: save(one, 1))
        with (
            open_store(tmp_path / "two", late) as two,
            pytest.raises(OtherRun, match="this is run x"),
        ):
            two.restore(run_id="x")
    assert not list((tmp_path / "two").glob("step_*"))


@pytest.mark.parametrize("request_of_the_save", [5, 7])
def test_a_session_that_is_overtaken_while_it_tidies_up_leaves_the_later_ones_alone(
    tmp_path, memory, request_of_the_save
):
    """Before its list, or its first delete. The best of the later one is none of its own."""

    def later() -> None:
        with open_store(tmp_path / "two", memory, keep_last_n=1) as two:
            two.restore()
            two.save(state_of(20), step=20, metrics={"loss": -1.0})
            two.save(state_of(30), step=30, metrics={"loss": 9.0})

    there = OvertakenObjects(memory, -1, later)
    with open_store(tmp_path / "one", there, keep_last_n=1) as one:
        one.restore()
        save(one, 2, 3)
        there.at = there.count + request_of_the_save
        save(one, 4)
        assert {"step_20", "step_30"} <= set(names(memory))
        with pytest.raises(Locked):
            save(one, 5)
    with open_store(tmp_path / "new", memory, keep_last_n=1) as new:
        assert new.restore().manifest.step == 30
        assert new.best.step == 20


@pytest.mark.parametrize("request_of_the_start", [BEGIN + 1, BEGIN + 2])
def test_a_session_that_is_overtaken_as_it_begins_sweeps_nothing(
    tmp_path, memory, request_of_the_start
):
    """What it sees may be what the later one is putting just now."""

    def later() -> None:
        ObjectStore(memory).put("session.json", b"{}")
        ObjectStore(memory).put(f"step_9-9-{'0' * 16}/rank-00000.safetensors", b"on its way")

    with (
        open_store(tmp_path, OvertakenObjects(memory, request_of_the_start, later)) as store,
        pytest.raises(Locked, match="process"),
    ):
        store.restore()
    assert len(objects(memory)) == 2


def test_a_session_that_is_overtaken_goes_back_for_nobody_else(tmp_path, memory):
    with open_store(tmp_path / "one", memory, keep_last_n=0) as one:
        one.restore()
        save(one, 1, 2)

    def later() -> None:
        ObjectStore(memory).put("session.json", b"{}")

    # It has listed, read two manifests, begun with three requests, and fetched the data.
    there = OvertakenObjects(memory, 8, later)
    with open_store(tmp_path / "two", there, keep_last_n=0) as two, pytest.raises(Locked):
        two.restore(1)
    assert names(memory) == ["step_1", "step_2"]


@pytest.mark.parametrize("more", [(), (5,)])
def test_what_was_never_said_to_be_saved_gives_way_to_what_was(tmp_path, memory, more):
    """A machine that committed its third, and could not put it there, comes back after another."""
    late = FailingObjects(memory, -1)
    with open_store(tmp_path / "one", late, save_retries=0) as one:
        one.restore()
        save(one, 1, 2)
        late.at = late.count + 1
        with pytest.raises(SaveFailed):
            one.save(state_of(3), step=3, metrics={"loss": -7.0})
    with open_store(tmp_path / "two", memory) as two:
        two.restore()
        two.save(state_of(4), step=4, metrics={"loss": -1.0})
        save(two, *more)
    with open_store(tmp_path / "one", memory) as one:
        found = one.restore()
        assert (found.manifest.step, one.best.step) == (max((4, *more)), 4)
    assert (tmp_path / "one/aside/step_3").is_dir()


@pytest.mark.parametrize("failed", [1, 2, 3])
def test_what_an_overtaken_session_went_on_to_commit_here_gives_way(tmp_path, memory, failed):
    """A loop that takes no notice of the error commits step after step, with higher numbers."""
    with open_store(tmp_path / "one", memory, keep_last_n=0) as one:
        one.restore()
        save(one, 1)
        with open_store(tmp_path / "two", memory) as two:
            two.restore()
            for step in range(2, 2 + failed):
                with pytest.raises(Locked):
                    save(one, step)
            save(two, 9)
    with open_store(tmp_path / "one", memory, keep_last_n=0) as one:
        assert one.restore().manifest.step == 9
        save(one, 10)
    assert [entry.step for entry in list_checkpoints(tmp_path / "one")] == [1, 9, 10]


def test_what_follows_from_the_newest_there_is_continued_though_it_is_not_there(tmp_path, memory):
    with open_store(tmp_path / "one", memory) as one:
        one.restore()
        save(one, 1)
    late = FailingObjects(memory, -1)
    with open_store(tmp_path / "one", late, save_retries=0, keep_last_n=1) as one:
        one.restore()
        late.at = late.count + 1
        with pytest.raises(SaveFailed):
            save(one, 2)
    # What it follows from has gone here, and is what stands there.
    assert [entry.step for entry in list_checkpoints(tmp_path / "one")] == [2]
    with open_store(tmp_path / "one", memory) as one:
        assert one.restore().manifest.step == 2


@pytest.mark.parametrize(
    "url", ["s3://me:secret@bucket/x", "file:///x?key=secret", "relative/path", "file://a b"]
)
def test_what_is_no_plain_address_is_refused_and_not_repeated(url):
    with pytest.raises(UsageError, match="is no address") as told:
        ObjectStore(url)
    assert "secret" not in str(told.value)
