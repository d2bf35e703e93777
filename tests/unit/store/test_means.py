"""A whole checkpoint that cannot be read for lack of memory or descriptors is no damaged one."""

import errno
import io
import os
import resource
from pathlib import Path

import pytest
import torch

from keepstep.errors import KeepstepError
from keepstep.store import Store, list_checkpoints, verify
from keepstep.store.archive import fault_in, fault_of
from keepstep.store.catalog import look_at
from tests.helpers.child import in_a_child


def used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def without_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + (96 << 20), resource.RLIM_INFINITY))


@pytest.mark.parametrize("layout", ["folders", "files"])
def test_for_lack_of_memory_no_older_checkpoint_is_taken(tmp_path, layout):
    with Store(tmp_path, layout=layout) as store:
        for step, millions in ((1, 1), (2, 48)):
            store.save({"w": torch.ones(millions << 20), "n": step}, step=step)
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def work() -> None:
        with Store(tmp_path, layout=layout) as store:
            without_memory()
            with pytest.raises(KeepstepError, match=r"no fault of it: .*allocate") as caught:
                store.restore()
            assert "No older one is taken for it" in caught.value.hint

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1, 2]


def test_for_lack_of_descriptors_no_older_checkpoint_is_taken(tmp_path):
    # Of frozen weights there is a second file: both are open at once.
    frozen = torch.ones(1 << 18)
    with Store(tmp_path) as store:
        for step in (1, 2, 3):
            store.save({"frozen": frozen, "w": torch.full((4,), float(step))}, step=step)
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def work() -> None:
        refused, restored = 0, None
        for more in range(40):
            with Store(tmp_path) as store:
                free = os.open("/", os.O_RDONLY)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, 4096))
                try:
                    restored = store.restore()
                except (OSError, KeepstepError) as error:
                    assert "Too many open files" in str(error), error
                    refused += 1
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            if restored is not None:
                break
            assert sorted(path.name for path in tmp_path.rglob("*")) == before
        assert refused > 1
        assert (restored.manifest.step, restored.skipped, restored.set_aside) == (3, (), ())

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 0


def test_a_system_without_memory_for_a_read_lays_it_to_no_file():
    class Unread(io.BytesIO):
        number = errno.EIO

        def read(self, count=-1):
            raise OSError(self.number, os.strerror(self.number))

    file = Unread(b"x" * 4096)
    assert "it is no whole archive" in fault_in(file)
    file.number = errno.ENOMEM
    with pytest.raises(OSError, match="Cannot allocate memory"):
        fault_in(file)


@pytest.mark.parametrize("layout", ["folders", "files"])
def test_for_lack_of_descriptors_nothing_has_a_fault(tmp_path, layout):
    with Store(tmp_path, layout=layout) as store:
        path = store.save({"w": torch.ones(4)}, step=1).path
    entry = look_at(path)
    looks = [lambda: look_at(path).fault, lambda: verify(entry)]
    if layout == "files":
        looks.append(lambda: fault_of(path))

    def work() -> None:
        for look in looks:
            # Those that another look needs, one by one.
            for more in range(10):
                free = os.open("/", os.O_RDONLY)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, 4096))
                try:
                    assert not look()
                    assert more
                    break
                except OSError as error:
                    assert "Too many open files" in str(error), error
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))

    assert os.waitstatus_to_exitcode(in_a_child(work)) == 0
