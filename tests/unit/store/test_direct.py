"""Large files: past the page cache, with room reserved first, and back again."""

import errno
import fcntl
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from keepstep.errors import CheckpointDamaged, SaveFailed
from keepstep.store import Store, direct, list_checkpoints, load_state, verify
from keepstep.store.direct import Reader
from keepstep.store.disk import Disk
from keepstep.store.reading import read_tensor
from tests.helpers.child import in_a_child
from tests.helpers.recording_disk import DyingDisk, RecordingDisk

DATA = "rank-00000.safetensors"
WRITES = 5
"""Of a state below."""


def state_of(step: int, *, millions: float = 8.0) -> dict[str, object]:
    """Return some 10 MB of odd sizes: more than one buffer, and no whole number of blocks."""
    generator = torch.Generator().manual_seed(step)
    half = int(millions * 1e6 / 8)
    large = torch.randn(half + 3, 2, generator=generator).to(torch.bfloat16)
    return {"large": large, "turned": torch.randn(half // 2, 3, generator=generator).t(), "n": step}


def assert_is_state(found: dict[str, object], step: int, **more: float) -> None:
    wanted = state_of(step, **more)
    assert found["n"] == step
    for name in ("large", "turned"):
        assert torch.equal(found[name], wanted[name])


def save(folder: Path, disk: Disk, *steps: int, **more: object) -> list[tuple[str, dict]]:
    heard: list[tuple[str, dict]] = []
    tell = lambda event, **facts: heard.append((event, facts))  # noqa: E731
    with Store(folder, disk=disk, on_event=tell, **more) as store:
        store.restore()
        for step in steps:
            store.save(state_of(step), step=step)
    return heard


class WatchedDisk(RecordingDisk):
    """Also writes down which writes went past the page cache."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[bool] = []

    def write(self, descriptor, data, path) -> None:
        if path.name == DATA:
            self.direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        super().write(descriptor, data, path)


def takes_direct(folder: Path) -> bool:
    with (folder / "probe").open("wb") as file:
        return direct.set_direct(file.fileno())


def needs_a_disk(folder: Path) -> None:
    found = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True)
    if found.stdout.strip() == "tmpfs" or not takes_direct(folder):
        pytest.skip("the temporary folder is not on a disk that is read past the page cache")


def test_a_large_file_is_reserved_written_in_blocks_and_cut_to_its_size(tmp_path):
    disk = WatchedDisk()
    save(tmp_path, disk, 1)
    names = [name for name, file in disk.log if file == DATA]
    assert names == [
        "create", "allocate", *["write"] * len(disk.direct), "truncate", "sync", "close"
    ]  # fmt: skip
    assert disk.direct == [takes_direct(tmp_path)] * WRITES
    [entry] = list_checkpoints(tmp_path)
    assert verify(entry) == []
    assert_is_state(load_state(entry.path), 1)


def test_a_small_file_is_written_at_once(tmp_path):
    disk = WatchedDisk()
    with Store(tmp_path, disk=disk) as store:
        store.restore()
        store.save({"a": torch.ones(100)}, step=1)
    assert [name for name, file in disk.log if file == DATA] == ["create", "write", "sync", "close"]
    assert disk.direct == [False]


def test_a_disk_that_refuses_a_direct_write_gets_the_next_attempt_through_the_cache(
    tmp_path, monkeypatch
):
    if not takes_direct(tmp_path):
        pytest.skip("the temporary folder takes no direct writes")
    needs_a_disk(tmp_path)
    # Not a whole number of blocks: what a device with larger ones would say to ours.
    monkeypatch.setattr(direct, "WRITE_BYTES", 1_000_001)
    disk = WatchedDisk()
    heard = save(tmp_path, disk, 1, 2)
    assert disk.direct[0] is True
    assert not any(disk.direct[1:])
    assert [event for event, _ in heard].count("retry") == 1
    told = [facts["what"] for event, facts in heard if event == "disk_refused"]
    assert told == ["large writes go through the page cache: a write with O_DIRECT is refused"]
    assert_is_state(load_state(tmp_path / "step_2"), 2)


def test_a_file_system_that_cannot_reserve_goes_on_and_says_so_once(tmp_path):
    class Old(RecordingDisk):
        def operation(self, name: str, path: Path) -> None:
            super().operation(name, path)
            if name == "allocate":
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))

    disk = Old()
    heard = save(tmp_path, disk, 1, 2)
    told = [facts["what"] for event, facts in heard if event == "disk_refused"]
    assert told == ["space cannot be reserved: a full disk is found while writing"]
    assert [name for name, _ in disk.log].count("allocate") == 1
    assert "retry" not in [event for event, _ in heard]
    assert_is_state(load_state(tmp_path / "step_2"), 2)


def test_a_full_disk_says_so_before_a_byte_is_written(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    try:
        disk = WatchedDisk()
        with pytest.raises(SaveFailed, match="No space left on device") as caught:
            save(place, disk, 1, 2, save_retries=0)
        assert "Make room" in caught.value.hint
        assert len(disk.direct) == WRITES, "only the first save's"
        assert [entry.name for entry in list_checkpoints(place)] == ["step_1"]
        assert_is_state(load_state(place / "step_1"), 1)
        assert not [path for path in place.iterdir() if path.name.startswith(".staging")]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_kill_at_any_operation_of_a_large_file_leaves_the_older_one(tmp_path):
    disk = RecordingDisk()
    save(tmp_path / "plain", disk, 1, 2)
    numbers = [n for n, (_, file) in enumerate(disk.log, 1) if file == DATA]
    second = numbers[len(numbers) // 2 :]
    assert [disk.log[n - 1][0] for n in second][:3] == ["create", "allocate", "write"]
    for number in second:
        folder = tmp_path / str(number)
        in_a_child(lambda f=folder, n=number: save(f, DyingDisk(n), 1, 2))
        assert [entry.name for entry in list_checkpoints(folder)] == ["step_1"]
        with Store(folder) as store:
            assert_is_state(store.restore().state, 1)
        save(folder, Disk(), 2)
        assert_is_state(load_state(folder / "step_2"), 2)


def test_an_error_of_the_disk_in_the_writing_thread_fails_the_attempt(tmp_path):
    class Failing(RecordingDisk):
        def operation(self, name: str, path: Path) -> None:
            super().operation(name, path)
            if (name, path.name) == ("write", DATA) and self.log.count((name, DATA)) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    heard = save(tmp_path, Failing(), 1)
    assert [event for event, _ in heard][:2] == ["snapshot", "retry"]
    assert_is_state(load_state(tmp_path / "step_1"), 1)


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("warm", [True, False], ids=["from memory", "from disk"])
def test_a_flipped_bit_of_a_large_file_is_found_wherever_it_lies(tmp_path, warm):
    save(tmp_path, Disk(), 1)
    path = tmp_path / "step_1" / DATA
    size = path.stat().st_size
    for place in (4096, size // 2, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        if warm:
            path.read_bytes()
        else:
            forget(path)
        with pytest.raises(CheckpointDamaged, match=f"{DATA}: bytes .* do not match their digest"):
            load_state(path.parent)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(old)
    assert_is_state(load_state(path.parent), 1)


def bytes_from_the_device() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def test_a_file_that_is_let_go_is_in_memory_no_more(tmp_path):
    needs_a_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"a" * (1 << 20))
    Disk().sync_file(path)
    with path.open("rb") as file:
        assert direct.is_in_memory(file.fileno())
        direct.forget(file.fileno())
        assert not direct.is_in_memory(file.fileno())


def test_a_file_that_ends_early_is_no_match_for_what_memory_still_holds(tmp_path, monkeypatch):
    save(tmp_path, Disk(), 1)
    [entry] = list_checkpoints(tmp_path)
    [large] = [tensor for tensor in entry.manifest.tensors if tensor.name == "large"]
    whole = read_tensor(entry.path, large)
    os.truncate(entry.path / DATA, large.pieces[-1].start + 1000)
    # Memory is handed out again as it was left: here by an earlier load of the same tensor.
    monkeypatch.setattr(torch, "empty", lambda *_, **__: whole.clone())
    with pytest.raises(CheckpointDamaged, match="ended early"):
        read_tensor(entry.path, large)


def test_from_disk_asks_the_disk_though_memory_has_it_and_a_load_does_not(tmp_path):
    needs_a_disk(tmp_path)
    save(tmp_path, Disk(), 1)
    [entry] = list_checkpoints(tmp_path)
    size = (entry.path / DATA).stat().st_size
    (entry.path / DATA).read_bytes()
    before = bytes_from_the_device()
    load_state(entry.path)
    assert verify(entry) == []
    assert bytes_from_the_device() - before < size // 2
    assert verify(entry, from_disk=True) == []
    assert bytes_from_the_device() - before >= size


def test_a_cold_load_leaves_the_page_cache_alone(tmp_path):
    needs_a_disk(tmp_path)
    save(tmp_path, Disk(), 1)
    path = tmp_path / "step_1" / DATA
    forget(path)
    for _ in range(2):
        before = bytes_from_the_device()
        assert_is_state(load_state(path.parent), 1)
        assert bytes_from_the_device() - before >= path.stat().st_size


def test_a_device_with_other_blocks_is_read_through_the_cache(tmp_path, monkeypatch):
    save(tmp_path, Disk(), 1)
    path = tmp_path / "step_1" / DATA
    forget(path)
    monkeypatch.setattr(direct, "BLOCK_BYTES", 7)
    assert_is_state(load_state(path.parent), 1)
    assert verify(list_checkpoints(tmp_path)[0], from_disk=True) == []


def test_a_reader_gives_any_range_and_says_where_the_file_ends(tmp_path):
    path = tmp_path / "file"
    content = os.urandom(3 * 4096 + 100)
    path.write_bytes(content)
    for from_disk in (True, False):
        reader = Reader(path, from_disk=from_disk)
        for start, end in [(0, 5000), (1, 2), (4095, 4097), (8192, len(content)), (12000, 20000)]:
            data = memoryview(bytearray(end - start))
            count = reader.read_into(data, start)
            assert bytes(data[:count]) == content[start:end]
        reader.close()


def test_a_save_that_waits_needs_little_memory_whatever_has_to_be_copied(tmp_path):
    def work() -> None:
        state = {"turned": torch.randn(1 << 13, 1 << 13).t(), "plain": torch.randn(1 << 24)}
        with Store(tmp_path) as store:
            store.restore()
            store.save({"small": torch.ones(3)}, step=1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            store.save(state, step=2)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown < 160, f"{grown:.0f} MiB for 320 MiB"

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 0


def damaged_when_committed(times: int) -> Disk:
    """Return a disk that flips a bit of the data just before the folder gets its name."""

    class Lying(Disk):
        left = times

        def operation(self, name: str, path: Path) -> None:
            commits = name == "rename" and path.name in ("step_2", "steps_2.pth")
            if commits and path.parent.name != "aside" and self.left:
                self.left -= 1
                [data] = [*path.parent.glob(f".staging-2-*/{DATA}"), *path.parent.glob("*.tmp")]
                with data.open("r+b") as file:
                    file.seek(9_000_000)
                    byte = file.read(1)
                    file.seek(9_000_000)
                    file.write(bytes([byte[0] ^ 1]))

    return Lying()


def test_what_the_disk_does_not_hold_is_set_aside_and_written_anew(tmp_path):
    heard = save(tmp_path, damaged_when_committed(1), 1, 2, verify_after_write=True, keep_last_n=1)
    events = [event for event, _ in heard]
    assert [e for e in events if e in ("verified_on_disk", "set_aside", "retry", "deleted")] == [
        "verified_on_disk", "set_aside", "retry", "verified_on_disk", "deleted"
    ]  # fmt: skip
    [told] = [facts["error"] for event, facts in heard if event == "retry"]
    assert "the disk does not hold what was written" in told
    assert "(tensor " in told
    assert_is_state(load_state(tmp_path / "step_2"), 2)
    with pytest.raises(CheckpointDamaged):
        load_state(tmp_path / "aside" / "step_2")


def test_a_disk_that_never_holds_it_ends_in_an_error_with_the_older_one_there(tmp_path):
    with pytest.raises(SaveFailed, match="the newest checkpoint is step_1"):
        save(
            tmp_path, damaged_when_committed(9), 1, 2,
            verify_after_write=True, keep_last_n=1, save_retries=0,
        )  # fmt: skip
    assert [entry.name for entry in list_checkpoints(tmp_path)] == ["step_1"]
    with Store(tmp_path) as store:
        assert_is_state(store.restore().state, 1)


def test_an_asynchronous_save_is_read_back_too(tmp_path):
    heard: list[str] = []
    tell = lambda event, **_: heard.append(event)  # noqa: E731
    with Store(tmp_path, on_event=tell, verify_after_write=True) as store:
        store.restore()
        store.save(state_of(1), step=1, wait=False)
        store.collect()
    assert heard == ["snapshot", "written", "verified_on_disk", "committed"]


def test_a_single_file_is_read_back_too_and_verified_from_the_disk(tmp_path, monkeypatch):
    heard = save(
        tmp_path, damaged_when_committed(1), 1, 2,
        verify_after_write=True, keep_last_n=1, layout="files",
    )  # fmt: skip
    events = [event for event, _ in heard]
    assert [e for e in events if e in ("verified_on_disk", "set_aside", "retry", "deleted")] == [
        "verified_on_disk", "set_aside", "retry", "verified_on_disk", "deleted"
    ]  # fmt: skip
    [entry] = list_checkpoints(tmp_path)
    let_go: list[int] = []
    monkeypatch.setattr("keepstep.store.archive.forget", let_go.append)
    assert verify(entry) == []
    assert not let_go
    assert verify(entry, from_disk=True) == []
    assert let_go
