"""What the doctor looks at, on real folders, limits and signals."""

import fcntl
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from keepstep.config.schema import Config
from keepstep.run import examine
from keepstep.store import Store
from keepstep.store.lock import FolderLock, who_holds
from tests.helpers.command import ROOT
from tests.unit.store.test_rehearsal import small_disk

__all__ = ["small_disk"]

HOLD = """
import sys
from pathlib import Path
from keepstep.store.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def config_in(folder: Path, **options) -> Config:
    config = Config()
    run = replace(config.run, dir=str(folder), **options.pop("run", {}))
    checkpoint = replace(config.checkpoint, dir=str(folder), **options)
    return replace(config, run=run, checkpoint=checkpoint)


def folder_checks(config: Config) -> dict[str, examine.Check]:
    return {check.name: check for check in examine._folder(config)}


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def saved(folder: Path, megabytes: float = 0.1) -> None:
    state = {"weight": torch.zeros(int(megabytes * (1 << 20)), dtype=torch.uint8)}
    with Store(folder, best_metric="loss") as store:
        store.save(state, step=1, metrics={"loss": 1.0})


def in_a_child(code: str, before: str) -> str:
    words = (
        f"{before}\nfrom keepstep.run.examine import {code}\nc = {code}()\nprint(c.state, c.text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_every_extra_that_a_user_can_install_is_looked_at():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Nothing imports those of the weather task yet.
    wanted = set(project["optional-dependencies"]) - {"dev", "weather"}
    named = {words.split()[0] for words in examine._extras().text.split(", ")}
    assert wanted <= named, examine._extras().text


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    saved(tmp_path)
    before = listing(tmp_path)
    found = folder_checks(config_in(tmp_path))
    assert {name: check.state for name, check in found.items()} == dict.fromkeys(
        ("folder", "commit", "clock", "room"), "ok"
    )
    assert found["commit"].text == "by rename; hard links"
    assert " -0.0 s" not in found["clock"].text
    assert "kB, of which 3 may come before one goes" in found["room"].text
    assert listing(tmp_path) == before


def test_a_folder_that_is_not_there_is_tried_where_it_would_be_made_and_not_made(tmp_path):
    found = folder_checks(config_in(tmp_path / "a/b"))
    assert found["folder"].text.endswith(f", to be made in {tmp_path}")
    assert found["commit"].state == "ok"
    assert "no checkpoint is there to measure" in found["room"].text
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder_fails(tmp_path):
    (tmp_path / "file").write_text("")
    found = folder_checks(config_in(tmp_path / "file/run"))
    assert [(check.name, check.state) for check in found.values()] == [("folder", "fail")]


def test_a_commit_method_that_the_folder_has_not_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", _refuse)
    monkeypatch.setattr(os, "rename", _refuse)
    found = folder_checks(config_in(tmp_path))
    assert found["commit"].state == "fail"
    assert "cannot replace a file by a rename" in found["commit"].text
    assert list(tmp_path.iterdir()) == []


def _refuse(*_: object, **__: object) -> None:
    raise OSError(95, "Operation not supported")


def test_an_interrupted_trial_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "symlink", interrupted)
    try:
        folder_checks(config_in(tmp_path))
    except KeyboardInterrupt:
        assert list(tmp_path.iterdir()) == []
    else:
        raise AssertionError("it was not interrupted")


def test_a_folder_that_a_session_holds_is_only_read(tmp_path):
    saved(tmp_path)
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        before = listing(tmp_path)
        found = folder_checks(config_in(tmp_path))
        assert f"held by process {other.pid} on " in found["session"].text
        assert not {"commit", "clock"} & set(found)
        assert listing(tmp_path) == before
        assert other.poll() is None
        other.communicate("")
    assert who_holds(tmp_path / "lock") == ""


def test_asking_who_holds_a_lock_takes_it_from_nobody(tmp_path):
    path = tmp_path / "lock"
    assert who_holds(path) == ""
    assert not path.exists()
    with FolderLock(path):
        assert f"process {os.getpid()} on " in who_holds(path)
        # Closing a file drops every lock of the process on it, if it was opened at all.
        code = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), 6)"
        taken = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=False)
        assert taken.returncode != 0
    assert fcntl.LOCK_EX | fcntl.LOCK_NB == 6


def test_room_is_measured_by_the_newest_checkpoint(small_disk):
    saved(small_disk, megabytes=0.5)
    few = folder_checks(config_in(small_disk, keep_last_n=2))["room"]
    assert (few.state, few.hint) == ("ok", "")
    many = folder_checks(config_in(small_disk, keep_last_n=20))["room"]
    assert many.state == "warn"
    assert "keep fewer" in many.hint
    saved(small_disk / "large", megabytes=1.2)
    none = folder_checks(config_in(small_disk / "large"))["room"]
    assert (none.state, none.text.split(" more")[0]) == ("warn", "for 1")
    (small_disk / "filling").write_bytes(b"x" * 900_000)
    assert folder_checks(config_in(small_disk / "large"))["room"].state == "fail"


def test_the_grace_is_compared_with_what_the_last_save_took(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert examine._time(config_in(tmp_path)).text == "the grace is 180s; no save was measured"
    event = {"kind": "saved", "time": 1.0, "step": 1, "seconds": 200.0}
    (tmp_path / "journal.jsonl").write_text(json.dumps(event) + "\n")
    found = examine._time(config_in(tmp_path))
    assert (found.state, found.text) == ("warn", "the grace is 180s; the last save took 200.0 s")
    assert "Raise run.grace" in found.hint
    fine = examine._time(config_in(tmp_path, run={"grace": "10min", "time_limit": "30d"}))
    assert (fine.state, fine.hint) == ("ok", "")
    assert "run.time_limit (30d) comes in" in fine.text
    short = examine._time(config_in(tmp_path, run={"grace": "10min", "time_limit": "1s"}))
    assert short.hint.startswith("There would be no time for a step")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    assert examine._time(config_in(tmp_path, run={"grace": "10min"})).state == "warn"
    monkeypatch.setenv("SLURM_JOB_END_TIME", "x")
    assert examine._time(config_in(tmp_path)).state == "fail"


def test_what_the_parent_took_away_is_told():
    ignore = "import signal; signal.signal(signal.{}, signal.SIG_IGN)"
    assert in_a_child("_signals", "") == "ok SIGTERM, SIGINT and SIGUSR1 are heard\n"
    assert in_a_child("_signals", ignore.format("SIGTERM")).startswith("warn SIGTERM: ignored")
    assert "as under nohup" in in_a_child("_signals", ignore.format("SIGHUP"))
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])"
    assert in_a_child("_signals", block).startswith("warn SIGUSR1: ignored or blocked")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))"
    assert in_a_child("_open_files", limit) == "warn at most 200 at once\n"


def test_ranks_that_cannot_meet_fail(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = examine._ranks()
    assert found.state == "fail"
    assert "over gloo on this host" in found.text
