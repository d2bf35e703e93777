"""A run seen from outside: whether it lives, and what its folder says."""

import os

import pytest

from keepstep.errors import NotFound, RunDamaged
from keepstep.report import view
from keepstep.report.view import find_runs, newest_checkpoint, state_of, view_of
from keepstep.store.lock import FolderLock, seen_lock
from tests.helpers.told import Told, held


def later(path):
    os.utime(path, ns=(1 << 62, 1 << 62))


def test_the_lock_tells_a_run_that_lives_from_one_that_was_killed(tmp_path):
    run = Told(tmp_path)
    with held(tmp_path) as process:
        # The lock alone: a session that has not said anything yet.
        assert state_of(tmp_path).word == "starting"
        # The number in it is that of a process that lives, and says nothing.
        run.outcome("running", pid=os.getpid())
        later(tmp_path / "outcome.json")
        assert state_of(tmp_path).word == "running"
        assert str(process) in state_of(tmp_path).why
        run.outcome("finished", code=0)
        later(tmp_path / "outcome.json")
        assert state_of(tmp_path).word == "finished"
        os.utime(tmp_path / "outcome.json", ns=(1, 1))
        assert state_of(tmp_path).word == "starting"
    run.outcome("running", pid=os.getpid())
    assert state_of(tmp_path).word == "lost"
    run.outcome("stopped", code=75, reason="SIGTERM")
    found = state_of(tmp_path)
    assert (found.word, found.code, found.why) == ("stopped", 75, "SIGTERM")


def test_a_look_at_a_lock_does_not_drop_that_of_this_process(tmp_path):
    with FolderLock(tmp_path / "lock"):
        assert seen_lock(tmp_path / "lock")[0]
        reading, writing = os.pipe()
        if os.fork() == 0:
            from keepstep.store import lock

            lock._held.clear()
            os.write(writing, str(seen_lock(tmp_path / "lock")[0]).encode())
            os._exit(0)
        assert os.read(reading, 9) == b"True"
        os.wait()
        os.close(reading)
        os.close(writing)
    assert not seen_lock(tmp_path / "lock")[0]


def test_a_run_that_ends_while_it_is_looked_at_is_not_lost(tmp_path, monkeypatch):
    run = Told(tmp_path)
    run.outcome("running", pid=1)

    def seen(path):
        run.outcome("finished", code=0)
        return False, {}

    monkeypatch.setattr(view, "seen_lock", seen)
    assert state_of(tmp_path).word == "finished"


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}"])
def test_an_outcome_that_is_damaged_is_an_unknown_state(tmp_path, text):
    (tmp_path / "outcome.json").write_text(text)
    assert state_of(tmp_path).word == "unknown"


def test_runs_are_found_also_one_deeper_and_not_in_a_run(tmp_path):
    for place in ("a", "deep/b", "a/checkpoints", "deep/er/c"):
        Told(tmp_path / place)
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "deep/b"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "gone"):
        with pytest.raises(NotFound):
            find_runs(nothing)


def test_what_is_no_run_or_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(NotFound):
            view_of(folder)
    run = Told(tmp_path / "run")
    (run.folder / "journal.jsonl").write_bytes(b"\x00\n{]\n")
    with pytest.raises(RunDamaged, match="none is an event"):
        view_of(run.folder)
    (run.folder / "journal.jsonl").unlink()
    os.mkfifo(run.folder / "journal.jsonl")
    with pytest.raises(RunDamaged, match="no regular file"):
        view_of(run.folder)
    (run.folder / "run.toml").write_text("= 1")
    with pytest.raises(RunDamaged, match="not valid TOML"):
        view_of(run.folder)


def test_the_newest_file_is_the_last_that_was_saved_and_is_there(tmp_path):
    run = Told(tmp_path)
    for step in (1, 2, 3):
        run.saved(step, f"steps_{step}.pth")
    for step in (1, 2):
        (tmp_path / f"steps_{step}.pth").write_text("")
    assert newest_checkpoint(tmp_path, view_of(tmp_path).history) == "steps_2.pth"
