"""`keepstep audit` on scripts of a dozen lines, whose answers are known."""

import json
import shutil

import pytest

from tests.helpers.command import keepstep

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

IN_PLACE = """
import torch
for step in (1, 2):
    torch.save({"w": torch.full((5000,), float(step))}, FOLDER + "/latest.pt")
    print("saved", step, flush=True)
"""
BY_RENAME = """
import os, torch
for step in (1, 2):
    with open(FOLDER + "/tmp", "wb") as file:
        torch.save({"w": torch.full((5000,), float(step))}, file)
        if SYNC_FILE:
            file.flush()
            os.fsync(file.fileno())
    os.replace(FOLDER + "/tmp", FOLDER + "/latest.pt")
    if SYNC_FOLDER:
        folder = os.open(FOLDER, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    print("saved", step, flush=True)
"""
OURS = """
import torch
from keepstep.store import Store
with Store(FOLDER, keep_last_n=1) as store:
    store.restore()
    for step in (1, 2):
        store.save({"w": torch.full((5000,), float(step))}, step=step)
        print("saved", step, flush=True)
"""
DCP = """
import torch, torch.distributed.checkpoint as dcp
dcp.save({"w": torch.ones(5000)}, checkpoint_id=FOLDER + "/step_1", no_dist=True)
print("saved 1", flush=True)
"""


def audit(tmp_path, code, *flags, judge="torch", **names):
    import sys

    folder = tmp_path / "out"
    script = tmp_path / "script.py"
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    script.write_text(f"FOLDER = {str(folder)!r}\n{given}{code}")
    done = keepstep(
        "audit", folder, "--judge", judge, "--ack", "saved", *flags, "--", sys.executable, script
    )
    return done.returncode, done.stdout


def counts(text, model):
    data = json.loads(text[text.index("{") :])
    (found,) = [item for item in data["models"] if item["model"] == model]
    return found


def test_a_file_written_in_place_loses_what_was_acknowledged(tmp_path):
    code, text = audit(tmp_path, IN_PLACE, "--json")
    assert code == 3, text
    for model in ("weak", "journal"):
        found = counts(text, model)
        assert found["states"]["unreadable"] > 0
        assert found["states"]["nothing left"] == 1
        assert not found["bounded"]


def test_a_rename_without_a_sync_leaves_an_empty_file_and_the_sync_is_named(tmp_path):
    code, text = audit(tmp_path, BY_RENAME, SYNC_FILE=False, SYNC_FOLDER=True)
    assert code == 3, text
    assert "not            latest.pt: empty" in text
    assert "kept by        an fsync of latest.pt before `rename tmp to latest.pt`" in text


def test_a_rename_whose_folder_is_not_synced_loses_the_newest(tmp_path):
    code, text = audit(tmp_path, BY_RENAME, "--json", SYNC_FILE=True, SYNC_FOLDER=False)
    assert code == 3, text
    assert counts(text, "weak")["states"]["unreadable"] == 0
    assert counts(text, "weak")["states"]["lost"] > 0
    (lost,) = [e for e in counts(text, "weak")["examples"] if e["verdict"] == "lost"]
    assert lost["remedy"] == "an fsync of the folder . after `rename tmp to latest.pt`"


def test_a_rename_with_both_syncs_loses_nothing(tmp_path):
    code, text = audit(tmp_path, BY_RENAME, SYNC_FILE=True, SYNC_FOLDER=True)
    assert code == 0, text
    assert "no state of the disk loses what was acknowledged" in text


def test_our_store_loses_nothing_in_any_state(tmp_path):
    code, text = audit(tmp_path, OURS, "--json", "--limit", "100000", judge="keepstep")
    assert code == 0, text
    for model in ("weak", "journal"):
        found = counts(text, model)
        assert not found["bounded"]
        assert found["states"]["old"] > 100
        assert found["states"]["new"] > 0


def test_torchs_own_checkpoint_can_be_lost_after_it_was_acknowledged(tmp_path):
    code, text = audit(tmp_path, DCP, judge="dcp")
    assert code == 3, text
    assert "nothing left" in text
    assert "unreadable" in text


@pytest.mark.parametrize("what", ["sync", "sync_folder"])
def test_without_its_syncs_our_store_is_caught(tmp_path, what):
    patch = f"""
from keepstep.store.disk import Disk
Disk.{what} = lambda *_: None
"""
    code, text = audit(tmp_path, patch + OURS, "--limit", "20", judge="keepstep")
    assert code == 3, text


def test_a_command_of_ones_own_judges(tmp_path):
    import sys

    folder, script = tmp_path / "out", tmp_path / "save.py"
    script.write_text(
        f"import os\nfor step in '12':\n    open({str(folder / 'a')!r}, 'w').write(step)\n"
    )
    check = f"{sys.executable} -I -c 'import sys;print(open(sys.argv[1]+chr(47)+chr(97)).read())'"
    done = keepstep(
        "audit", folder, "--check", check + " {dir}", "--model", "weak", "--",
        sys.executable, "-I", script,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout
    assert "code 1: FileNotFoundError" in done.stdout


def test_wrong_words_are_told(tmp_path):
    for words, text in (
        ((tmp_path, "--judge", "torch"), "there is no command behind `--`"),
        ((tmp_path, "--judge", "tortch", "--", "true"), "there is no judge 'tortch'"),
        ((tmp_path, "--", "true"), "give one of --judge and --check"),
        ((tmp_path, "--judge", "torch", "--ack", "(", "--", "true"), "not a regular expression"),
    ):
        done = keepstep("audit", *words)
        assert done.returncode == 2, done.stdout
        assert text in done.stdout
