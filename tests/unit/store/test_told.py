"""What the store tells where something is wrong: what, where, what stands in, what to do."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from keepstep.cli.main import main
from keepstep.errors import CannotSave, SaveFailed, UsageError
from keepstep.store import Store, list_checkpoints, load_checkpoint, save_checkpoint_atomic, verify
from tests.helpers.child import as_nobody
from tests.helpers.command import ROOT
from tests.unit.store.test_file_layout import (
    BEST,
    LAST,
    LinklessDisk,
    make_store,
    names,
    put_damaged_copy,
    train,
)
from tests.unit.store.test_rehearsal import STATE, small_disk

__all__ = ["small_disk"]


def restore(folder: Path, **more):
    """Restore; return what was restored, the best, and what was told."""
    told = []
    with make_store(folder, on_event=lambda event, **facts: told.append((event, facts))) as store:
        return store.restore(**more), store.best, told


def spoil(path: Path, *, step: int) -> None:
    """Change one bit of the tensor of a step under one name."""
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((16,), float(step)).numpy().tobytes())] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("left", ["latest.pth", "best.pth"])
def test_of_a_torn_newest_file_and_a_whole_copy_the_copy_is_taken_and_the_torn_one_named(
    tmp_path, left
):
    train(tmp_path, until=BEST)
    for name in {"latest.pth", "best.pth"} - {left}:
        (tmp_path / name).unlink()
    put_damaged = tmp_path / "steps_4.pth"
    spoil(put_damaged, step=4)
    restored, best, told = restore(tmp_path)
    assert restored.state["step"] == BEST
    assert best.step == BEST
    assert [item.name for item in restored.skipped] == ["steps_4.pth"]
    assert restored.skipped[0].fault.endswith(
        f"does not match; its copy {left} is whole and takes its place"
    )
    assert restored.set_aside == ("steps_4.pth",)
    assert not [facts for event, facts in told if event == "best_gone"]
    assert [verify(entry) for entry in list_checkpoints(tmp_path)][-1] == []
    for name in ("latest.pth", "best.pth", "steps_4.pth"):
        assert load_checkpoint(tmp_path / name)["step"] == BEST


def test_a_torn_older_best_gives_its_name_to_its_whole_copy(tmp_path):
    train(tmp_path, disk=LinklessDisk())
    spoil(tmp_path / "steps_4.pth", step=4)
    restored, best, told = restore(tmp_path)
    assert restored.state["step"] == LAST
    assert best.step == BEST
    assert restored.set_aside == ("steps_4.pth",)
    (damaged,) = [facts for event, facts in told if event == "damaged"]
    assert damaged["name"] == "steps_4.pth"
    assert "CRC" in damaged["fault"]
    assert {path.name for path in (tmp_path / "aside").iterdir()} == {"steps_4.pth"}
    for name in ("best.pth", "steps_4.pth"):
        assert load_checkpoint(tmp_path / name)["step"] == BEST


def test_a_torn_copy_beside_its_whole_file_is_named_and_the_file_stays(tmp_path):
    train(tmp_path, disk=LinklessDisk())
    spoil(tmp_path / "best.pth", step=4)
    restored, best, told = restore(tmp_path)
    assert [facts["name"] for event, facts in told if event == "damaged"] == ["best.pth"]
    assert restored.set_aside == ("best.pth",)
    assert best.step == BEST
    assert names(tmp_path) == ["best.pth", "latest.pth", "steps_4.pth", "steps_5.pth"]
    assert load_checkpoint(tmp_path / "best.pth")["step"] == BEST


def test_a_best_under_whose_file_another_best_stands_is_not_taken_for_the_newest(tmp_path):
    """Only the copy of a file that stands there is that checkpoint; an older one never is."""
    train(tmp_path)
    put_damaged_copy(tmp_path / "steps_5.pth")
    for name in ("latest.pth", "steps_4.pth"):
        (tmp_path / name).unlink()
    with make_store(tmp_path) as store, pytest.raises(Exception, match="on_resume=4 takes it"):
        store.restore()


@pytest.mark.parametrize("others", [True, False], ids=["next best", "none"])
def test_a_damaged_best_is_named_with_its_step_and_what_stands_in_for_it(tmp_path, others):
    losses = {1: 3.0, 2: 1.0, 3: 2.0} if others else {2: 1.0, 3: None}
    with Store(tmp_path, keep_last_n=0, best_metric="loss") as store:
        for step, loss in losses.items():
            metrics = {} if loss is None else {"loss": loss}
            store.save({"w": torch.ones(3)}, step=step, metrics=metrics)
    shutil.copytree(tmp_path / "step_2", tmp_path / "copy")
    os.truncate(tmp_path / "step_2" / "rank-00000.safetensors", 100)
    told = []
    with Store(
        tmp_path, best_metric="loss", on_event=lambda event, **f: told.append((event, f))
    ) as store:
        store.restore()
    (facts,) = [facts for event, facts in told if event == "best_gone"]
    assert facts["gone"].step == 2
    assert "rank-00000.safetensors" in facts["fault"]
    assert (facts["instead"].step if others else facts["instead"]) == (3 if others else None)
    # What is told to be done about it helps.
    (tmp_path / "copy").rename(tmp_path / "step_2")
    with Store(tmp_path, best_metric="loss") as store:
        store.restore()
        assert store.best.step == 2


@pytest.mark.parametrize("wanted", ["auto", "manifest-last"])
def test_a_method_that_was_asked_for_is_not_laid_to_the_file_system(tmp_path, wanted):
    told = []
    with Store(
        tmp_path, commit_method=wanted, on_event=lambda event, **f: told.append((event, f))
    ) as store:
        store.save({}, step=1)
    found = [facts for event, facts in told if event == "methods"]
    asked = {"methods": "manifest-last", "why": "checkpoint.commit_method asks for it"}
    assert found == ([asked] if wanted == "manifest-last" else [])


def test_a_full_disk_at_a_resume_names_the_prune_that_makes_room(small_disk, capsys):
    with Store(small_disk, keep_last_n=0) as store:
        store.save(STATE, step=1)
        store.save(STATE, step=2)
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 4096)
        except OSError:
            filler.truncate(filler.tell() - (1 << 16))
    with Store(small_disk, keep_last_n=1) as store, pytest.raises(CannotSave) as caught:
        store.restore()
        store.rehearse(STATE)
    command = f"keepstep ckpt prune {small_disk} --keep-last 1"
    assert f"`{command}`" in caught.value.hint
    assert main([*command.split()[1:]]) == 0
    assert "1 would go" in capsys.readouterr().out
    assert main([*command.split()[1:], "--apply"]) == 0
    with Store(small_disk, keep_last_n=1) as store:
        store.restore()
        assert store.rehearse(STATE).fits == 1


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["no writing", "no entry"])
def test_a_single_file_in_a_folder_without_rights_names_the_rights(tmp_path, mode):
    place = tmp_path / "place"
    place.mkdir(mode)

    def work() -> None:
        with pytest.raises(SaveFailed, match="Permission denied") as caught:
            save_checkpoint_atomic(place / "latest.pth", {"step": 1})
        assert str(place / "latest.pth") in caught.value.message
        assert caught.value.hint == "Look at who owns it and what they allow."

    assert as_nobody(work, place) == 0


def test_the_program_of_the_page_on_frozen_weights_continues(tmp_path, monkeypatch):
    page = (ROOT / "docs/concepts/frozen-weights.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("range(first, 5)", "range(first, 3)"), before := {})
    exec(code, after := {})
    assert torch.equal(after["head"].weight, before["head"].weight + 2)
    assert torch.equal(after["encoder"].weight, before["encoder"].weight)


def test_a_folder_in_the_place_of_a_single_file_is_to_be_moved(tmp_path):
    (tmp_path / "latest.pth").mkdir()
    with pytest.raises(UsageError, match=r"latest\.pth is a folder") as caught:
        save_checkpoint_atomic(tmp_path / "latest.pth", {"step": 1})
    assert "Move it out of the way" in caught.value.hint
