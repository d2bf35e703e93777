"""Plans of what to delete: nothing that a run needs to continue from is ever in one."""

import errno
import os

import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.store import Store, list_checkpoints
from keepstep.store.disk import Disk
from keepstep.store.pins import pin
from keepstep.store.prune import kept_because, plan
from keepstep.store.retention import Retention
from keepstep.store.roles import roles_of

DATA = "rank-00000.safetensors"


@pytest.fixture
def folder(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}
    with Store(tmp_path, keep_last_n=0, best_metric="loss") as store:
        for step, loss in losses.items():
            state = {"model": {"weight": torch.full((64,), float(step))}}
            store.save(state, step=step, metrics={"loss": loss})
    return tmp_path


def planned(folder, *, aside=False, **policy):
    found = plan(folder, Retention(**policy), aside=aside, now=0.0)
    return {item.entry.name: item.reasons for item in found}


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_plan_lets_go_what_has_no_reason_and_says_why_the_rest_stays(folder):
    assert planned(folder, keep_last_n=1) == {
        "step_1": (),
        "step_2": ("best",),
        "step_3": (),
        "step_4": ("last 1", "newest", "newest whole"),
    }


def test_a_newest_one_that_is_damaged_inside_never_costs_the_newest_whole_one(folder):
    damage(folder / "step_4" / DATA)
    assert planned(folder, keep_last_n=1)["step_3"] == ("newest whole",)
    (folder / "step_3" / "manifest.json").unlink()
    found = planned(folder, keep_last_n=1)
    assert found["step_3"] == ("damaged",)
    assert found["step_2"] == ("best", "newest whole")


@pytest.mark.parametrize("keep_best_n", [0, 1])
def test_where_the_best_is_damaged_the_one_that_a_resume_takes_stays(folder, keep_best_n):
    (folder / "step_2" / "manifest.json").unlink()
    found = planned(folder, keep_last_n=1, keep_best_n=keep_best_n)
    assert found["step_3"] == ("best",)
    assert found["step_2"] == ("damaged",)
    entries = list_checkpoints(folder)
    assert [entry.name for entry in entries if "best" in roles_of(entry, entries)] == ["step_3"]


def test_nothing_is_planned_where_no_checkpoint_is_whole(folder):
    for step in range(1, 5):
        damage(folder / f"step_{step}" / DATA)
    with pytest.raises(CheckpointDamaged, match="none of the checkpoints"):
        plan(folder, Retention(keep_last_n=1), aside=True, now=0.0)


def test_what_is_set_aside_goes_only_if_asked_and_not_if_pinned(folder):
    with Store(folder, keep_last_n=0, best_metric="loss") as store:
        store.restore(2)
    assert planned(folder, keep_last_n=1)["step_3"] == ("aside",)
    assert planned(folder, keep_last_n=1, aside=True)["step_3"] == ()
    (three,) = [e for e in list_checkpoints(folder, aside=True) if e.step == 3]
    pin(folder, three, disk=Disk())
    found = planned(folder, keep_last_n=1, aside=True)
    assert (found["step_3"], found["step_4"]) == (("pinned",), ())


def test_bytes_that_have_another_name_are_not_counted_as_freed(folder):
    def freed():
        found = plan(folder, Retention(keep_last_n=1), aside=False, now=0.0)
        return next(item.bytes for item in found if item.entry.name == "step_1")

    size, before = (folder / "step_1" / DATA).stat().st_size, freed()
    os.link(folder / "step_1" / DATA, folder / "elsewhere")
    assert before - freed() == size


def test_without_a_policy_only_what_is_sure_is_said(folder):
    entries = list_checkpoints(folder)
    found = kept_because(folder, entries, None, now=0.0)
    assert [found[e.path] for e in entries] == [None, ("best",), None, ("newest",)]


def test_a_copy_of_a_file_that_is_torn_pushes_no_whole_one_out(tmp_path):
    class NoLinks(Disk):
        def link(self, old, new):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(new))

    with Store(tmp_path, layout="files", keep_last_n=0, disk=NoLinks()) as store:
        for step in (1, 2, 3):
            store.save({"w": torch.full((5000,), float(step))}, step=step)
    path = tmp_path / "steps_3.pth"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = planned(tmp_path, keep_last_n=2)
    assert sorted(found) == ["latest.pth", "steps_1.pth", "steps_2.pth", "steps_3.pth"]
    assert [name for name, reasons in found.items() if not reasons] == ["steps_1.pth"]
