"""Files of somebody's own under the names of a run's: moved aside, or let be; never lost."""

from pathlib import Path

import pytest
import torch

from keepstep.errors import UsageError
from tests.helpers.single_file import same_file
from tests.unit.store.test_file_layout import make_store, save, train


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "broken link", "loop", "folder"])
def test_a_link_that_somebody_put_in_the_place_of_a_name_is_set_aside(tmp_path, kind):
    """A link is somebody's way to their own file: replaced, nobody would find it again."""
    train(tmp_path / "run", until=3)
    mine = tmp_path / "mine.pth"
    torch.save({"weight": 1}, mine)
    with make_store(tmp_path / "run") as store:
        store.restore()
        for name in ("latest.pth", "best.pth"):
            path = tmp_path / "run" / name
            path.unlink()
            if kind == "hard link":
                path.hardlink_to(mine)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to({"symbolic link": mine, "loop": name}.get(kind, "nowhere.pth"))
        save(store, 4)
    for name in ("latest.pth", "best.pth"):
        moved = tmp_path / "run" / "aside" / name
        assert moved.is_symlink() or moved.is_dir() or same_file(moved, mine)
        assert same_file(tmp_path / "run" / name, tmp_path / "run" / "steps_4.pth")
    assert torch.load(mine, weights_only=True) == {"weight": 1}


def test_a_link_to_a_file_of_the_run_is_one_of_its_names(tmp_path):
    train(tmp_path, until=3)
    with make_store(tmp_path) as store:
        store.restore()
        (tmp_path / "latest.pth").unlink()
        (tmp_path / "latest.pth").symlink_to("steps_3.pth")
        save(store, 4)
    assert not (tmp_path / "aside").exists()
    assert same_file(tmp_path / "latest.pth", tmp_path / "steps_4.pth")


def somebodys(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


def of_another_kind(path: Path) -> None:
    path.write_bytes(b"\x80\x02}q\x00.")


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [somebodys, of_another_kind, a_loop], ids=lambda m: m.__name__)
def test_a_best_of_ones_own_stands_in_the_way_of_no_folder(tmp_path, make):
    for name in ("latest.pth", "best.pth"):
        make(tmp_path / name)
    if make is somebodys:
        make(tmp_path / "steps_7.pth")
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    with make_store(tmp_path, layout="folders") as store:
        assert store.restore() is None
        save(store, 1)
    with make_store(tmp_path, layout="folders") as store:
        with pytest.raises(UsageError, match="has not looked at them"):
            save(store, 2)
        assert store.restore().state["step"] == 1
    for name, facts in before.items():
        now = (tmp_path / name).lstat()
        assert (now.st_ino, now.st_mtime_ns) == (facts.st_ino, facts.st_mtime_ns)


def test_a_best_of_ones_own_needs_no_look_before_the_first_save(tmp_path):
    somebodys(tmp_path / "best.pth")
    with make_store(tmp_path, layout="folders") as store:
        save(store, 1)
    assert (tmp_path / "step_1").is_dir()


def test_a_torn_file_of_a_step_is_a_run_that_folders_would_leave_behind(tmp_path):
    (tmp_path / "steps_7.pth").write_bytes(b"PK")
    with (
        make_store(tmp_path, layout="folders") as store,
        pytest.raises(UsageError, match="holds checkpoints in files"),
    ):
        store.restore()
