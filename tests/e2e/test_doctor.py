"""The doctor through the installed command."""

import json

from keepstep.cli.main import main
from tests.helpers.command import keepstep

NAMES = [
    "versions", "extras", "device", "threads", "open files", "shared memory", "signals", "launcher",
    "ranks", "folder", "commit", "clock", "room", "time",
]  # fmt: skip


def test_a_sound_run_has_nothing_that_fails_and_is_left_as_it_is(untouched):
    before = {path: path.lstat().st_mtime_ns for path in untouched.rglob("*")}
    done = keepstep("doctor", untouched, "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["ok"]
    assert [check["name"] for check in found["checks"]] == NAMES
    assert {path: path.lstat().st_mtime_ns for path in untouched.rglob("*")} == before


def test_what_fails_is_shown_with_what_to_do_and_the_exit_code_says_it(
    config, tmp_path, monkeypatch, capsys
):
    from keepstep.run import examine

    fine = examine.Check(name="ranks", state="ok", text="not looked at again")
    monkeypatch.setattr(examine, "_ranks", lambda: fine)
    (tmp_path / "file").write_text("")
    assert main(["doctor", str(config), f"--checkpoint.dir={tmp_path}/file/run"]) == 1
    shown = capsys.readouterr().out
    assert "fail  config" in shown
    assert "fail  folder" in shown
    assert "-> Choose another, or mend it." in shown


def test_a_folder_that_is_no_run_and_a_wrong_config_have_their_own_codes(config, tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 4
    assert main(["doctor", str(config), "--run.grace=soon"]) == 2
    assert main(["doctor", str(config), "--jsn"]) == 2
    assert main(["doctor", str(tmp_path), "--json"]) == 4
    out = capsys.readouterr().out
    assert json.loads(out)["code"] == 4
