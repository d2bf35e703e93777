"""`keepstep ckpt` on files that are not this run's, on one file, and where there is nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from keepstep.cli.main import main
from keepstep.store import Store, save_checkpoint_atomic
from tests.helpers.child import as_nobody


def write_run(folder: Path, *, until: int, layout: str = "files") -> None:
    with Store(folder, keep_last_n=0, best_metric="loss", layout=layout) as store:
        for step in range(1, until + 1):
            state = {"model": {"weight": torch.full((900,), float(step))}}
            store.save(state, step=step, metrics={"loss": 9.0 - step})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((16,), 2.0).numpy().tobytes())] ^= 1
    path.unlink()
    path.write_bytes(content)


def ckpt(capsys, *words):
    code = main(["ckpt", *map(str, words)])
    return code, capsys.readouterr().out


def rows(capsys, *words):
    return {row["name"]: row for row in json.loads(ckpt(capsys, *words, "--json")[1])}


def test_files_of_a_loop_of_ones_own_are_whole_and_no_runs(tmp_path, capsys):
    state = {"weight": torch.full((900,), 2.0), "step": 2}
    save_checkpoint_atomic(tmp_path / "latest.pth", state, best=tmp_path / "best.pth")
    save_checkpoint_atomic(tmp_path / "steps_2.pth", state)
    code, text = ckpt(capsys, "ls", tmp_path)
    assert code == 0
    assert text.count("complete, no run's") == 3
    assert "damaged" not in text
    code, text = ckpt(capsys, "verify", tmp_path)
    assert (code, text.count("whole, every byte; no run's")) == (0, 3)
    assert {row["whose"] for row in rows(capsys, "verify", tmp_path).values()} == {"no run's"}
    assert main(["ckpt", "show", str(tmp_path), "latest.pth"]) == 2
    assert "no run saved it" in capsys.readouterr().err
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--apply"]) == 2
    assert "no checkpoint of this run; nothing is deleted" in capsys.readouterr().err
    flip(tmp_path / "steps_2.pth")
    code, text = ckpt(capsys, "verify", tmp_path)
    assert code == 3
    assert "steps_2.pth: damaged; no run's\n  steps_2.pth: the CRC" in text
    (tmp_path / "latest.pth").unlink()
    (tmp_path / "latest.pth").write_bytes(b"")
    found = rows(capsys, "ls", tmp_path)
    assert (found["latest.pth"]["complete"], found["latest.pth"]["whose"]) == (False, "")
    assert found["best.pth"]["complete"]


def test_a_file_that_no_run_saved_stays_when_a_run_is_pruned(tmp_path, capsys):
    write_run(tmp_path, until=3)
    save_checkpoint_atomic(tmp_path / "steps_9.pth", {"step": 9})
    assert rows(capsys, "ls", tmp_path)["steps_9.pth"]["kept_because"] == ["no run's"]
    code, text = ckpt(capsys, "prune", tmp_path, "--keep-last", "1", "--apply")
    assert code == 0
    assert "steps_9.pth  stays  no run's" in text
    assert {path.name for path in tmp_path.glob("steps_*")} == {"steps_3.pth", "steps_9.pth"}


@pytest.mark.parametrize("known", [True, False], ids=["outcome.json", "names"])
def test_another_runs_latest_has_no_role_here_and_is_not_taken_for_latest(tmp_path, capsys, known):
    write_run(tmp_path / "a", until=2)
    write_run(tmp_path / "b", until=5)
    shutil.copy(tmp_path / "b" / "steps_5.pth", tmp_path / "a" / "latest.pth.new")
    (tmp_path / "a" / "latest.pth.new").replace(tmp_path / "a" / "latest.pth")
    found = rows(capsys, "ls", tmp_path / "a")
    if known:
        # Also where the other one is the only one there is.
        run_id = json.loads(ckpt(capsys, "show", tmp_path / "a", "2", "--json")[1])["run_id"]
        (tmp_path / "a" / "outcome.json").write_text(json.dumps({"run_id": run_id}))
        (tmp_path / "a" / "steps_1.pth").unlink()
        found = rows(capsys, "ls", tmp_path / "a")
    assert (found["latest.pth"]["whose"], found["latest.pth"]["roles"]) == ("another run's", [])
    assert found["steps_2.pth"]["roles"] == ["latest", "best"]
    assert "complete, another run's" in ckpt(capsys, "ls", tmp_path / "a")[1]
    assert "step         2\n" in ckpt(capsys, "show", tmp_path / "a", "latest")[1]
    code, text = ckpt(capsys, "prune", tmp_path / "a", "--keep-last", "1", "--apply")
    assert code == 0
    assert "latest.pth   stays  another run's" in text
    assert (tmp_path / "a" / "steps_2.pth").is_file()
    if known:
        (tmp_path / "a" / "steps_2.pth").unlink()
        (tmp_path / "a" / "best.pth").unlink()
        assert rows(capsys, "ls", tmp_path / "a")["latest.pth"]["roles"] == []


def test_of_two_runs_in_one_folder_neither_is_taken_for_the_other(tmp_path, capsys):
    write_run(tmp_path / "a", until=2, layout="folders")
    write_run(tmp_path / "b", until=5, layout="folders")
    shutil.copytree(tmp_path / "b" / "step_5", tmp_path / "a" / "step_5")
    assert {row["whose"] for row in rows(capsys, "ls", tmp_path / "a").values()} == {
        "another run's"
    }
    assert main(["ckpt", "prune", str(tmp_path / "a"), "--keep-last", "1", "--apply"]) == 2
    assert (tmp_path / "a" / "step_1").is_dir()
    run_id = json.loads(ckpt(capsys, "show", tmp_path / "a", "2", "--json")[1])["run_id"]
    (tmp_path / "a" / "outcome.json").write_text(json.dumps({"run_id": run_id}))
    found = rows(capsys, "ls", tmp_path / "a")
    assert {name: row["whose"] for name, row in found.items()} == {
        "step_1": "", "step_2": "", "step_5": "another run's"
    }  # fmt: skip
    assert found["step_2"]["roles"] == ["latest", "best"]


def test_prune_keeps_what_it_keeps_of_a_run_whatever_another_left_beside_it(tmp_path, capsys):
    losses = {1: 1.0, 2: 5.0, 3: 4.0, 4: 3.0}
    with Store(tmp_path / "a", keep_last_n=0, best_metric="loss") as store:
        for step, loss in losses.items():
            store.save({"w": torch.full((900,), 2.0)}, step=step, metrics={"loss": loss})
    write_run(tmp_path / "b", until=9, layout="folders")
    shutil.copytree(tmp_path / "b" / "step_9", tmp_path / "a" / "step_9")
    run_id = json.loads(ckpt(capsys, "show", tmp_path / "a", "2", "--json")[1])["run_id"]
    (tmp_path / "a" / "outcome.json").write_text(json.dumps({"run_id": run_id}))
    flip(tmp_path / "a" / "step_4" / "rank-00000.safetensors")
    assert ckpt(capsys, "prune", tmp_path / "a", "--keep-last", "1", "--apply")[0] == 0
    # The best, the newest whole, the newest; and the other's.
    assert {path.name for path in (tmp_path / "a").glob("step_*")} == {
        "step_1", "step_3", "step_4", "step_9"
    }  # fmt: skip


def test_one_file_is_listed_and_verified_by_itself(tmp_path, capsys):
    write_run(tmp_path, until=2)
    (tmp_path / "run.toml").write_text("[checkpoint]\nkeep_last_n = 2\n")
    for name in ("best.pth", "steps_2.pth"):
        found = rows(capsys, "ls", tmp_path / name)
        assert found[name]["kept_because"] == ["last 2", "best", "newest"]
    (tmp_path / "best.pth").unlink()
    shutil.copy(tmp_path / "steps_1.pth", tmp_path / "mine.pth")
    found = rows(capsys, "ls", tmp_path / "steps_2.pth")
    assert list(found) == ["steps_2.pth"]
    assert found["steps_2.pth"]["roles"] == ["latest", "best"]
    assert list(rows(capsys, "ls", tmp_path / "mine.pth")) == ["mine.pth"]
    assert rows(capsys, "ls", tmp_path / "mine.pth")["mine.pth"]["step"] == 1
    assert ckpt(capsys, "verify", tmp_path / "mine.pth") == (0, "mine.pth: whole, every byte\n")
    flip(tmp_path / "steps_2.pth")
    assert ckpt(capsys, "verify", tmp_path / "steps_2.pth")[0] == 3
    assert main(["ckpt", "prune", str(tmp_path / "mine.pth"), "--keep-last", "1"]) == 4
    assert "is a file, not the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["ls", "verify"])
@pytest.mark.parametrize(
    ("place", "said", "then"),
    [
        ("nothing", "there is no folder", "Check the path"),
        ("empty", "holds no checkpoints", "Give the folder of a run"),
        ("file", "is a file, not the folder of a run", "take one .pth file"),
        ("pipe.pth", "is a file, not the folder of a run", "take one .pth file"),
    ],
)
def test_a_place_without_checkpoints_is_said_in_words_and_in_json(
    tmp_path, capsys, verb, place, said, then
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe.pth")
    assert main(["ckpt", verb, str(tmp_path / place), "--json"]) == 4
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["code"] == 4
    assert f"error: {found['error']}\n" == err
    assert str(tmp_path / place) in err
    assert said in err
    assert then in err


@pytest.mark.parametrize("place", ["nothing", "empty"])
def test_a_config_that_is_none_says_what_to_give(tmp_path, capsys, place):
    (tmp_path / "empty").mkdir()
    for verb in (["config", "check"], ["train"]):
        assert main([*verb, str(tmp_path / place)]) == 2
        err = capsys.readouterr().err
        assert str(tmp_path / place) in err
        assert "The first argument is a TOML file" in err
    assert main(["config", "check", str(tmp_path / place), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_folder_without_rights_is_said_and_is_json(tmp_path, capfd):
    place = tmp_path / "closed"
    place.mkdir(mode=0)

    def work() -> None:
        os._exit(main(["ckpt", "ls", str(place), "--json"]))

    assert os.waitstatus_to_exitcode(as_nobody(work, place)) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["code"] == 1
    assert "Permission denied\nLook at who owns it and what they allow." in err
