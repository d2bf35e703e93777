"""A whole checkpoint that cannot be read for lack of memory or descriptors is no damaged one."""

import os
import resource
from pathlib import Path

import pytest
import torch

from keepstep.errors import KeepstepError
from keepstep.store import Store, list_checkpoints
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
