"""`keepstep ckpt` on folders that a real store wrote."""

import json
import math
import re
import shutil

import pytest
import torch

from keepstep.cli.main import main
from keepstep.store import Store, verify

DATA = "rank-00000.safetensors"
# Step, loss: the last one is not finite, and is then set aside by going back to step 3.
SAVES = [(1, 3.0), (2, 1e-5), (3, 2.0), (4, math.nan)]


@pytest.fixture
def run(tmp_path):
    """A run with four checkpoints, of which the last was set aside."""
    folder = tmp_path / "run"
    write_checkpoints(folder / "checkpoints")
    return folder


def write_checkpoints(folder):
    folder.mkdir(parents=True)
    with Store(folder, keep_last_n=0, best_metric="valid_loss") as store:
        for step, loss in SAVES:
            state = {"model": {"bias": torch.zeros(2), "weight": torch.full((64, 32), loss)}}
            metrics = {"valid_loss": loss}
            store.save(state, step=step, samples=step * 4, metrics=metrics, milestone=step == 1)
    with Store(folder, keep_last_n=0, best_metric="valid_loss") as store:
        store.restore(3)


def flip_byte(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def ckpt(capsys, *words):
    code = main(["ckpt", *map(str, words)])
    return code, capsys.readouterr().out


def json_of(capsys, *words):
    code, text = ckpt(capsys, *words, "--json")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return code, json.loads(text, parse_constant=refuse)


def test_ls_says_of_each_when_how_large_whether_whole_what_for_and_how_good(run, capsys):
    code, text = ckpt(capsys, "ls", run)
    assert code == 0
    heading, *lines = text.splitlines()
    titles = ["step", "saved", "size", "state", "role", "kept because of", "metrics"]
    assert re.split("  +", heading) == titles
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    assert [[c.strip() for c in (row[0], *row[3:])] for row in cells] == [
        ["step_1", "complete", "milestone", "milestone", "valid_loss 3.0000"],
        ["step_2", "complete", "best", "best", "valid_loss 1.000e-05"],
        ["step_3", "complete", "latest", "newest", "valid_loss 2.0000"],
        ["aside/step_4", "complete", "aside", "aside", "valid_loss nan"],
    ]
    assert all(row[2].strip().endswith("kB") for row in cells)


def test_ls_says_why_each_is_kept_by_the_policy_that_the_run_recorded(run, capsys):
    (run / "run.toml").write_text("[checkpoint]\nkeep_last_n = 1\nkeep_every = 1000\n")
    entries = {row["name"]: row for row in json_of(capsys, "ls", run)[1]}
    assert {name: row["kept_because"] for name, row in entries.items()} == {
        "step_1": ["milestone"],
        "step_2": ["best"],
        "step_3": ["last 1", "newest"],
        "aside/step_4": ["aside"],
    }
    assert ckpt(capsys, "pin", run, "3")[0] == 0
    assert "last 1, pinned, newest" in ckpt(capsys, "ls", run)[1]
    assert "last 1, pinned, newest" in ckpt(capsys, "ls", run / "checkpoints")[1]


def test_ls_does_not_say_of_an_unknown_policy_what_it_would_do(run, capsys):
    with Store(run / "checkpoints", keep_last_n=0) as store:
        store.restore()
        store.save({"model": {}}, step=5)
    entries = {row["name"]: row for row in json_of(capsys, "ls", run)[1]}
    assert entries["step_3"]["kept_because"] is None
    (line,) = [line for line in ckpt(capsys, "ls", run)[1].splitlines() if "step_3" in line]
    assert "  ?  " in line


def test_a_policy_in_the_runs_text_that_is_none_is_an_error(run, capsys):
    (run / "run.toml").write_text("[checkpoint]\nkeep_last_n = -1\n")
    assert main(["ckpt", "ls", str(run)]) == 2
    assert "checkpoint.keep_last_n is -1" in capsys.readouterr().err


def test_ls_takes_the_runs_folder_and_the_folder_of_its_checkpoints(run, capsys):
    assert ckpt(capsys, "ls", run) == ckpt(capsys, "ls", run / "checkpoints")


def test_ls_finds_checkpoints_elsewhere_by_the_runs_own_text(run, tmp_path, capsys):
    moved = tmp_path / "large_disk"
    (run / "checkpoints").rename(moved)
    (run / "run.toml").write_text(f"[checkpoint]\ndir = '{moved}'\n")
    assert ckpt(capsys, "ls", run)[1].count("step_") == len(SAVES)
    assert ckpt(capsys, "verify", run)[0] == 0
    assert "valid_loss 2.0000" in ckpt(capsys, "show", run, "latest")[1]


def test_what_a_folder_holds_comes_before_what_its_text_says(run, tmp_path, capsys):
    write_checkpoints(tmp_path / "other")
    folder = run / "checkpoints"
    # The folder was the run's own, and was moved: its text still names the old place.
    (folder / "run.toml").write_text(f"[checkpoint]\ndir = '{tmp_path / 'other'}'\n")
    _, rows = json_of(capsys, "ls", folder)
    assert {row["path"].startswith(str(folder)) for row in rows} == {True}


def test_a_torn_checkpoint_is_listed_with_its_fault(run, capsys):
    (run / "checkpoints/step_2/manifest.json").unlink()
    data = run / "checkpoints/step_1" / DATA
    data.write_bytes(data.read_bytes()[:-1])
    code, rows = json_of(capsys, "ls", run)
    assert code == 0
    faults = {row["name"]: row["fault"] for row in rows}
    assert faults["step_2"] == "manifest.json is missing"
    assert DATA in faults["step_1"]
    assert [row["name"] for row in rows if row["complete"]] == ["step_3", "aside/step_4"]
    assert "damaged: manifest.json is missing" in ckpt(capsys, "ls", run)[1]


def test_names_that_are_not_ours_are_not_listed(run, capsys):
    for name in ("step_best", "step_1200_backup", "notes", "step_01"):
        (run / "checkpoints" / name).mkdir()
    assert len(ckpt(capsys, "ls", run)[1].splitlines()) == 1 + len(SAVES)


def test_json_has_no_numbers_that_json_does_not_have(run, capsys):
    _, rows = json_of(capsys, "ls", run)
    assert rows[-1]["metrics"] == {"valid_loss": "nan"}
    assert rows[1]["metrics"] == {"valid_loss": 1e-5}
    assert json_of(capsys, "show", run, "aside/step_4")[1]["metrics"] == {"valid_loss": "nan"}


def test_verify_says_that_every_byte_is_right(run, capsys):
    code, text = ckpt(capsys, "verify", run)
    assert code == 0
    assert text.splitlines()[0] == "step_1: whole, every byte"
    assert len(text.splitlines()) == len(SAVES)


@pytest.mark.parametrize("offset", [-1, 4096 + 8, 20])
def test_verify_names_the_file_the_tensor_and_the_offset_of_a_flipped_bit(run, capsys, offset):
    path = run / "checkpoints/step_2" / DATA
    place = offset % path.stat().st_size
    flip_byte(path, place)
    code, results = json_of(capsys, "verify", run)
    assert code == 3
    (fault,) = next(r["faults"] for r in results if r["name"] == "step_2")
    assert [r["name"] for r in results if not r["whole"]] == ["step_2"]
    assert fault["file"] == DATA
    assert fault["tensor"] == ("" if offset == 20 else "model.weight")
    assert fault["offset"] <= place
    assert ckpt(capsys, "verify", run, "step_2")[0] == 3
    assert ckpt(capsys, "verify", run, "latest")[0] == 0
    assert f"  {DATA}: bytes" in ckpt(capsys, "verify", run)[1]


def test_a_checkpoint_that_a_live_run_deletes_meanwhile_is_not_damage(run, capsys, monkeypatch):
    def verify_late(entry, **how):
        if entry.name == "step_1":
            shutil.rmtree(entry.path)
        return verify(entry, **how)

    monkeypatch.setattr("keepstep.cli.ckpt.verify", verify_late)
    code, text = ckpt(capsys, "verify", run)
    assert code == 0
    assert "step_1:" not in text
    assert "step_2: whole, every byte" in text


def test_verify_counts_what_was_set_aside_too(run, capsys):
    flip_byte(run / "checkpoints/aside/step_4" / DATA, -1)
    assert ckpt(capsys, "verify", run)[0] == 3


@pytest.mark.parametrize("name", ["step_2", "2", "best"])
def test_show_finds_a_checkpoint_by_name_step_and_role(run, capsys, name):
    code, text = ckpt(capsys, "show", run, name)
    assert code == 0
    assert "samples      8\n" in text
    assert "best so far  valid_loss 1.000e-05 at step 2\n" in text
    assert "model.weight" in text
    assert "[64, 32]" in text


def test_show_of_a_torn_checkpoint_is_damage(run, capsys):
    (run / "checkpoints/step_2/manifest.json").write_text("{}")
    assert main(["ckpt", "show", str(run), "step_2"]) == 3
    assert "step_2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "RUN/nothing"], "there is no folder"),
        (["ls", "RUN/file"], "is a file, not the folder of a run"),
        (["ls", "RUN/empty"], "holds no checkpoints"),
        (["verify", "RUN", "step_7"], "it holds step_1, step_2, step_3, aside/step_4"),
        (["show", "RUN", "4"], "it holds step_1"),
        (["verify", "RUN/checkpoints/step_2"], "checkpoints step_2`"),
    ],
)
def test_what_is_not_there_is_said_with_what_there_is(run, capsys, words, said):
    (run / "empty").mkdir()
    (run / "file").write_text("")
    assert main(["ckpt", *(word.replace("RUN", str(run)) for word in words)]) == 4
    assert said in capsys.readouterr().err
