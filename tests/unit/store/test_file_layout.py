"""A run's checkpoints as single files: names, choice, damage, retention, and what dies."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from keepstep.errors import (
    CheckpointDamaged,
    NotFound,
    OtherRun,
    SaveFailed,
    UnsafeState,
    UsageError,
)
from keepstep.store import Store, attempts, list_checkpoints, load_checkpoint, verify
from keepstep.store.disk import Disk
from keepstep.store.roles import find_checkpoint
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import DyingDisk, FailingDisk, RecordingDisk
from tests.helpers.single_file import same_file

LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 6.0}
LAST, BEST = 5, 4


class LinklessDisk(Disk):
    """A file system without hard links."""

    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(new))


def make_store(folder: Path, **more) -> Store:
    settings = {"layout": "files", "best_metric": "loss", "save_retries": 0, **more}
    return Store(folder, **settings)


def save(store: Store, step: int) -> None:
    state = {"model": {"weight": torch.full((900,), float(step))}, "step": step}
    store.save(state, step=step, metrics={"loss": LOSSES[step]}, must_match={"seed": 1})


def train(folder: Path, *, until: int = LAST, **more) -> None:
    """Continue from what is there, as a run does."""
    with make_store(folder, **more) as store:
        restored = store.restore()
        first = 1
        if restored is not None:
            first = restored.state["step"] + 1
            weight = restored.state["model"]["weight"]
            assert torch.equal(weight, torch.full((900,), first - 1.0))
        for step in range(first, until + 1):
            save(store, step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pth"))


def flip(path: Path) -> None:
    """Change one bit of a tensor in place, under every name of the file."""
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(torch.full((16,), 5.0).numpy().tobytes()))
        file.write(b"\x01")


def put_damaged_copy(path: Path) -> None:
    """Put a file of its own under a name, with one bit changed."""
    shutil.copy(path, path.with_suffix(".copy"))
    flip(path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def test_a_run_leaves_its_last_files_the_best_and_two_names_that_cost_nothing(tmp_path):
    train(tmp_path, keep_last_n=1)
    assert names(tmp_path) == ["best.pth", "latest.pth", "steps_4.pth", "steps_5.pth"]
    assert same_file(tmp_path / "latest.pth", tmp_path / "steps_5.pth")
    assert same_file(tmp_path / "best.pth", tmp_path / "steps_4.pth")
    found = torch.load(tmp_path / "latest.pth", weights_only=True)
    assert found["step"] == LAST
    assert found["keepstep"]["sequence"] == LAST
    assert found["keepstep"]["metrics"] == {"loss": LOSSES[LAST]}
    entries = list_checkpoints(tmp_path)
    assert [entry.name for entry in entries] == ["steps_4.pth", "steps_5.pth"]
    assert find_checkpoint(tmp_path, "best").name == "steps_4.pth"
    (tensor,) = entries[-1].manifest.tensors
    assert (tensor.name, tensor.shape) == ("model.weight", (900,))
    assert entries[-1].manifest.size == (tmp_path / "latest.pth").stat().st_size


def test_what_stands_under_no_name_but_latest_or_best_continues_and_keeps_its_bytes(tmp_path):
    """A folder in which somebody kept only the two files that people know."""
    train(tmp_path)
    for step in (4, 5):
        (tmp_path / f"steps_{step}.pth").unlink()
    assert {entry.name for entry in list_checkpoints(tmp_path)} == {"latest.pth", "best.pth"}
    with make_store(tmp_path) as store:
        restored = store.restore()
        assert restored.path.name == "steps_5.pth"
        assert store.best.step == BEST
        assert (restored.skipped, restored.set_aside) == ((), ())
    assert names(tmp_path) == ["best.pth", "latest.pth", "steps_4.pth", "steps_5.pth"]
    assert same_file(tmp_path / "best.pth", tmp_path / "steps_4.pth")


def test_a_best_whose_other_name_goes_meanwhile_stays(tmp_path):
    train(tmp_path, until=4)
    with make_store(tmp_path) as store:
        store.restore()
        (tmp_path / "steps_4.pth").unlink()
        save(store, 5)
    assert load_checkpoint(tmp_path / "best.pth")["step"] == BEST


@pytest.mark.parametrize("disk", [Disk(), LinklessDisk()], ids=["links", "no links"])
def test_damage_under_all_names_is_passed_over_for_the_newest_whole_one(tmp_path, disk):
    train(tmp_path, disk=disk)
    flip(tmp_path / "latest.pth")
    if isinstance(disk, LinklessDisk):
        flip(tmp_path / "steps_5.pth")
    assert [len(verify(entry)) for entry in list_checkpoints(tmp_path)][-1] == 1
    with make_store(tmp_path, disk=disk) as store:
        restored = store.restore()
    assert restored.state["step"] == 4
    assert "CRC" in restored.skipped[0].fault
    assert "steps_5.pth" in {item.name for item in restored.skipped}
    assert (tmp_path / "aside" / "steps_5.pth").is_file()
    assert load_checkpoint(tmp_path / "latest.pth")["step"] == 4
    train(tmp_path, disk=disk)
    assert load_checkpoint(tmp_path / "latest.pth")["step"] == LAST


def test_a_damaged_latest_of_its_own_is_named_and_set_aside(tmp_path):
    train(tmp_path)
    put_damaged_copy(tmp_path / "latest.pth")
    with make_store(tmp_path) as store:
        restored = store.restore()
    assert restored.state["step"] == LAST
    assert restored.set_aside == ("latest.pth",)
    assert (tmp_path / "aside" / "latest.pth").is_file()
    assert same_file(tmp_path / "latest.pth", tmp_path / "steps_5.pth")


def test_a_whole_latest_beside_a_damaged_file_of_its_step_is_taken(tmp_path):
    train(tmp_path)
    put_damaged_copy(tmp_path / "steps_5.pth")
    with make_store(tmp_path) as store:
        restored = store.restore()
    assert restored.state["step"] == LAST
    assert restored.set_aside == ("steps_5.pth",)
    assert not verify(find_checkpoint(tmp_path, "latest"))


def test_where_none_is_whole_the_list_is_told_and_nothing_changes(tmp_path):
    train(tmp_path)
    for name in ("steps_4.pth", "steps_5.pth"):
        os.truncate(tmp_path / name, 900)
    (tmp_path / "best.pth").unlink()
    shutil.copy(tmp_path / "steps_4.pth", tmp_path / "best.pth")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.pth")}
    with make_store(tmp_path) as store, pytest.raises(CheckpointDamaged) as caught:
        store.restore()
    for name in ("steps_4.pth", "steps_5.pth"):
        assert f"{name}: it is no whole archive" in caught.value.message
    assert {path: path.read_bytes() for path in tmp_path.glob("*.pth")} == before


def test_a_best_alone_is_never_continued_from_unless_it_is_asked_for(tmp_path):
    train(tmp_path)
    for name in ("steps_4.pth", "steps_5.pth", "latest.pth"):
        (tmp_path / name).unlink()
    with make_store(tmp_path) as store:
        with pytest.raises(CheckpointDamaged, match=r"best.pth: .*--checkpoint.on_resume=4"):
            store.restore()
        assert store.restore(BEST).state["step"] == BEST


def test_files_of_a_loop_of_ones_own_are_no_runs(tmp_path):
    torch.save({"step": 3}, tmp_path / "latest.pth")
    with make_store(tmp_path) as store, pytest.raises(CheckpointDamaged, match="no run saved it"):
        store.restore()


@pytest.mark.parametrize("layouts", [("files", "folders"), ("folders", "files")])
def test_a_folder_of_the_other_layout_is_refused(tmp_path, layouts):
    train(tmp_path, until=1, layout=layouts[0])
    before = sorted(tmp_path.rglob("*"))
    with (
        make_store(tmp_path, layout=layouts[1]) as store,
        pytest.raises(UsageError, match=f"holds checkpoints in {layouts[0]}"),
    ):
        store.restore()
    assert sorted(tmp_path.rglob("*")) == before


def test_another_config_and_another_run_are_refused(tmp_path):
    train(tmp_path / "a", until=2)
    train(tmp_path / "b", until=3)
    with make_store(tmp_path / "a") as store, pytest.raises(OtherRun, match="seed: saved 1, now 2"):
        store.restore(must_match={"seed": 2})
    shutil.copy(tmp_path / "b" / "steps_3.pth", tmp_path / "a")
    with make_store(tmp_path / "a") as store, pytest.raises(OtherRun, match="another run"):
        store.restore()


def test_going_back_sets_the_later_ones_aside_with_their_names(tmp_path):
    train(tmp_path, keep_last_n=0)
    with make_store(tmp_path, keep_last_n=0) as store:
        with pytest.raises(NotFound):
            store.restore(9)
        assert store.restore(2).set_aside == ("steps_3.pth", "steps_4.pth", "steps_5.pth")
    assert names(tmp_path) == ["best.pth", "latest.pth", "steps_1.pth", "steps_2.pth"]
    assert same_file(tmp_path / "best.pth", tmp_path / "steps_2.pth")
    # What is moved back into the way of a save is set aside again, not written over.
    (tmp_path / "aside" / "steps_3.pth").rename(tmp_path / "steps_3.pth")
    old = (tmp_path / "steps_3.pth").read_bytes()
    with make_store(tmp_path, keep_last_n=0) as store:
        store.restore(2)
        shutil.copy(tmp_path / "aside" / "steps_3.pth", tmp_path / "steps_3.pth")
        store.save({"step": 3}, step=3)
    assert (tmp_path / "aside" / "steps_3.pth.2").read_bytes() == old
    assert [e.manifest.sequence for e in list_checkpoints(tmp_path)] == [1, 2, 6]
    assert len(list_checkpoints(tmp_path, aside=True)) == 7


def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path):
    with make_store(tmp_path) as store:
        with pytest.raises(UnsafeState, match=r"state.thing is a builtins.object"):
            store.save({"thing": object()}, step=1)
        with pytest.raises(UnsafeState, match="'keepstep'"):
            store.save({"keepstep": 1}, step=1)
        with pytest.raises(UsageError, match="while training goes on"):
            store.save({"x": 1}, step=1, wait=False)
    assert names(tmp_path) == []


def test_files_that_are_not_ours_are_never_touched(tmp_path):
    for name in ("best_model.pth", "steps_x.pth", "steps_1.pth.bak", "notes.pth"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".steps_3.pth-0123456789abcdef.tmp").write_text("half")
    train(tmp_path)
    for name in ("best_model.pth", "steps_x.pth", "steps_1.pth.bak", "notes.pth"):
        assert (tmp_path / name).read_text() == "mine"
    assert not list(tmp_path.glob(".*.tmp"))


def test_what_somebody_put_in_the_place_of_a_name_is_set_aside_and_not_lost(tmp_path):
    train(tmp_path, until=3)
    with make_store(tmp_path) as store:
        store.restore()
        for name in ("latest.pth", "best.pth"):
            (tmp_path / name).unlink()
            (tmp_path / name).write_text(f"mine, {name}")
        save(store, 4)
    for name in ("latest.pth", "best.pth"):
        assert (tmp_path / "aside" / name).read_text() == f"mine, {name}"
        assert same_file(tmp_path / name, tmp_path / "steps_4.pth")


def operations_of_the_last_save(folder: Path, **more) -> list[tuple[str, str]]:
    """The save of the best: data, commit, both names, the delete of an older one."""
    train(folder, until=BEST - 1, keep_last_n=1)
    disk = RecordingDisk()
    with make_store(folder, keep_last_n=1, disk=disk, **more) as store:
        store.restore()
        disk.log.clear()
        save(store, BEST)
    return disk.log


def test_a_kill_at_every_operation_of_a_session_loses_nothing(tmp_path):
    operations = operations_of_the_last_save(tmp_path / "log")
    kinds = [f"{name} {path}" for name, path in operations]
    first = kinds.index("rename steps_4.pth")
    assert kinds[first : first + 8] == [
        "rename steps_4.pth", "sync_folder log",
        kinds[first + 2], "rename latest.pth", "sync_folder log",
        kinds[first + 5], "rename best.pth", "sync_folder log",
    ]  # fmt: skip
    template = tmp_path / "template"
    train(template, until=BEST - 1, keep_last_n=1)
    number, status = 0, -1
    while status != 0:
        number += 1
        run = tmp_path / str(number)
        shutil.copytree(template, run)

        def work(run: Path = run, number: int = number) -> None:
            train(run, until=BEST, keep_last_n=1, disk=DyingDisk(number))

        status = in_a_child(work)
        assert status in (0, signal.SIGKILL)
        assert load_checkpoint(run / "latest.pth")["step"] >= BEST - 1
        assert load_checkpoint(run / "best.pth")["step"] in (2, BEST)
        train(run, keep_last_n=1)
        assert names(run) == ["best.pth", "latest.pth", "steps_4.pth", "steps_5.pth"], number
        assert same_file(run / "latest.pth", run / "steps_5.pth"), number
        assert same_file(run / "best.pth", run / "steps_4.pth"), number
        assert not list(run.glob(".*")), number
        shutil.rmtree(run)
    assert number > len(operations)


def test_an_error_at_every_operation_of_a_save_leaves_the_older_ones_or_is_told(tmp_path):
    operations = operations_of_the_last_save(tmp_path / "log")
    commit = [name for name, _ in operations].index("rename") + 2
    template = tmp_path / "template"
    train(template, until=BEST - 1, keep_last_n=1)
    for number in range(1, len(operations) + 1):
        run, told, disk = tmp_path / str(number), [], FailingDisk(0, errno.EIO)
        shutil.copytree(template, run)

        def hear(event: str, told: list[str] = told, **_: object) -> None:
            told.append(event)

        with make_store(run, keep_last_n=1, disk=disk, on_event=hear) as store:
            store.restore()
            disk.at = disk.count + number
            if number <= commit:
                with pytest.raises(SaveFailed, match=r"newest checkpoint is steps_3.pth"):
                    save(store, BEST)
                assert load_checkpoint(run / "latest.pth")["step"] == BEST - 1
                assert not (run / "steps_4.pth").exists(), operations[number - 1]
            else:
                save(store, BEST)
                assert "housekeeping_failed" in told, operations[number - 1]
        assert not list(run.glob(".*.tmp")), operations[number - 1]
        train(run, keep_last_n=1)
        assert same_file(run / "best.pth", run / "steps_4.pth")
        assert same_file(run / "latest.pth", run / "steps_5.pth")


def test_bytes_that_the_disk_changes_while_they_are_written_never_get_the_name(tmp_path):
    class Spoiling(Disk):
        def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
            spoiled = bytearray(data)
            if len(data) > 1000:
                spoiled[len(data) // 2] ^= 4
            super().write(descriptor, spoiled, path)

    train(tmp_path, until=1)
    with make_store(tmp_path, disk=Spoiling()) as store:
        store.restore()
        with pytest.raises(SaveFailed, match="is not what was written"):
            save(store, 2)
    assert names(tmp_path) == ["best.pth", "latest.pth", "steps_1.pth"]


def test_bytes_that_the_disk_changes_once_are_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "_BACK_OFF_SECONDS", (0.0,))

    class SpoilingOnce(Disk):
        spoiled = False

        def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
            if len(data) > 1000 and not self.spoiled:
                self.spoiled = True
                data = bytearray(data)
                data[len(data) // 2] ^= 4
            super().write(descriptor, data, path)

    heard = []
    with make_store(
        tmp_path,
        disk=SpoilingOnce(),
        save_retries=1,
        on_event=lambda event, **facts: heard.append((event, facts.get("error", ""))),
    ) as store:
        save(store, 1)
    ((_, error),) = [told for told in heard if told[0] == "retry"]
    assert "is not what was written: the CRC of the record" in error
    assert load_checkpoint(tmp_path / "steps_1.pth")["step"] == 1


def test_a_file_under_the_name_of_another_step_is_no_checkpoint_of_it(tmp_path):
    train(tmp_path, until=2)
    shutil.copy(tmp_path / "steps_2.pth", tmp_path / "steps_9.pth")
    found = {entry.name: entry.fault for entry in list_checkpoints(tmp_path)}
    assert found == {"steps_1.pth": "", "steps_2.pth": "", "steps_9.pth": "it holds step 2"}
    with make_store(tmp_path) as store:
        assert store.restore().path.name == "steps_2.pth"


def test_what_a_file_says_wrongly_of_itself_is_not_laid_to_a_manifest_json(tmp_path):
    train(tmp_path, until=1)
    content = torch.load(tmp_path / "steps_1.pth", weights_only=True)
    content["keepstep"]["samples"] = 99
    torch.save(content, tmp_path / "steps_1.pth")
    faults = {entry.name: entry.fault for entry in list_checkpoints(tmp_path)}
    assert faults["steps_1.pth"] == "the manifest does not match its own digest"
