"""The second home of checkpoints on a real server that speaks S3, and what such a server does."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.errors import KeepstepError, SaveFailed
from keepstep.store import Store, list_checkpoints, verify
from keepstep.store.remote import ObjectStore
from tests.helpers.s3 import Gate, Server, gated_server

numbers = itertools.count()


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Gate]]:
    with gated_server() as (server, gate):
        server.make_bucket("bucket")
        yield server, gate


@pytest.fixture
def gate(servers) -> Iterator[Gate]:
    yield servers[1]
    servers[1].rule = lambda _method, _path: None


@pytest.fixture
def url() -> str:
    return f"s3://bucket/run-{next(numbers)}"


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), float(step))}


def open_store(folder: Path, url: str, **more: Any) -> Store:
    return Store(folder, remote=ObjectStore(url, timeout=20), **more)


def is_data(method: str, path: str) -> bool:
    return method == "PUT" and "rank-" in path


def times(count: int, what: int | str) -> Any:
    """Return a rule that treats so many puts of data in a way, and hands the rest on."""
    left = [count]

    def rule(method: str, path: str) -> int | str | None:
        if is_data(method, path) and left[0]:
            left[0] -= 1
            return what
        return None

    return rule


def test_a_run_lives_there_and_goes_on_elsewhere(tmp_path, gate, url):
    gate.log.clear()
    with open_store(tmp_path / "one", url, keep_last_n=1) as store:
        store.restore()
        for step in (1, 2):
            store.save(state_of(step), step=step)
        assert store.newest.commit_method == "rename; remote s3: manifest last"
    puts = [path.split("/")[-1].split("?")[0] for method, path in gate.log if method == "PUT"]
    assert puts == ["session.json", *["rank-00000.safetensors", "manifest.json"] * 2]
    gone = [path.split("/")[-1] for method, path in gate.log if method == "DELETE"]
    assert gone == ["manifest.json", "rank-00000.safetensors"]
    with open_store(tmp_path / "two", url, keep_last_n=1) as store:
        found = store.restore()
        assert found.manifest.step == 2
        assert torch.equal(found.state["weight"], state_of(2)["weight"])
        assert [entry.step for entry in list_checkpoints(tmp_path / "two")] == [2]


def test_a_listing_is_what_is_there_now(gate, url):
    here, elsewhere = ObjectStore(url), ObjectStore(url)
    elsewhere.put("a/b", b"1")
    assert here.sizes() == {"a/b": 1}
    elsewhere.put("a/c", b"22")
    elsewhere.delete("a/b")
    assert here.sizes() == {"a/c": 2}


def test_the_way_back_holds_there(tmp_path, gate, url):
    with open_store(tmp_path / "one", url) as store:
        store.restore()
        for step in (1, 2):
            store.save(state_of(step), step=step)
    with open_store(tmp_path / "two", url) as store:
        assert store.restore(1).manifest.step == 1
    with open_store(tmp_path / "three", url) as store:
        assert store.restore().manifest.step == 1


@pytest.mark.parametrize("what", [503, 500, "cut"])
def test_a_server_that_stumbles_is_asked_again(tmp_path, gate, url, what):
    with open_store(tmp_path / "one", url) as store:
        store.restore()
        gate.rule = times(2, what)
        store.save(state_of(1), step=1)
    with open_store(tmp_path / "two", url) as store:
        assert store.restore().manifest.step == 1


def test_access_denied_is_told_and_leaves_both_homes_as_they_were(tmp_path, gate, url):
    with open_store(tmp_path / "one", url, save_retries=0) as store:
        store.restore()
        store.save(state_of(1), step=1)
        gate.rule = lambda method, path: 403 if is_data(method, path) else None
        with pytest.raises(SaveFailed, match="Permission") as caught:
            store.save(state_of(2), step=2)
        assert url in str(caught.value)
        assert "hidden-secret" not in str(caught.value)
    assert [verify(entry) for entry in list_checkpoints(tmp_path / "one")] == [[], []]
    with open_store(tmp_path / "two", url) as store:
        assert store.restore().manifest.step == 1
    gate.rule = lambda _method, _path: 403
    with (
        open_store(tmp_path / "three", url, save_retries=0) as store,
        pytest.raises(KeepstepError, match="cannot be used"),
    ):
        store.restore()


def test_a_bucket_that_is_not_there_is_an_error_and_no_fresh_start(tmp_path, gate):
    with (
        open_store(tmp_path, "s3://elsewhere/run", save_retries=0) as store,
        pytest.raises(KeepstepError, match=r"s3://elsewhere/run cannot be used"),
    ):
        store.restore()


@pytest.fixture
def silence(gate) -> Iterator[Any]:
    """A rule by which some requests are not answered before the test is over."""
    over = threading.Event()

    def about(wanted: str) -> Any:
        def rule(method: str, path: str) -> None:
            if wanted in f"{method} {path}":
                over.wait(20)

        return rule

    yield about
    over.set()


def test_a_server_that_never_answers_is_left_at_the_deadline(tmp_path, gate, url, silence):
    with Store(tmp_path, remote=ObjectStore(url, timeout=1), save_retries=0) as store:
        store.restore()
        gate.rule = silence("rank-")
        with pytest.raises(SaveFailed, match="no answer to put_file for 1 s"):
            store.save(state_of(1), step=1)


@pytest.mark.parametrize(
    ("wanted", "is_saved"),
    [("rank-", False), ("session.json", False), ("GET /bucket?list", True), ("DELETE ", True)],
)
def test_an_upload_that_is_to_end_at_once_is_left(tmp_path, gate, url, silence, wanted, is_saved):
    with open_store(tmp_path, url, keep_last_n=1) as store:
        store.restore()
        store.save(state_of(1), step=1)
        gate.rule = silence(wanted)
        store.save(state_of(2), step=2, wait=False)
        started = time.monotonic()
        # What is left of tidying up is for the next session.
        assert store.drain(0.5) == is_saved
        assert not store.is_busy()
        assert time.monotonic() - started < 4


def test_a_server_killed_in_the_middle_of_an_upload_fails_that_save_alone(tmp_path):
    with gated_server() as (server, gate):
        server.make_bucket("bucket")
        with open_store(tmp_path, "s3://bucket/run", save_retries=0) as store:
            store.restore()
            store.save(state_of(1), step=1)

            def rule(method: str, path: str) -> str | None:
                if is_data(method, path):
                    server.kill()
                    return "cut"
                return None

            gate.rule = rule
            with pytest.raises(SaveFailed, match="step 2 is committed in its folder"):
                store.save(state_of(2), step=2)
    assert [verify(entry) for entry in list_checkpoints(tmp_path)] == [[], []]
