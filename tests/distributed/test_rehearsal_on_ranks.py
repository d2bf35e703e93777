"""The rehearsal on two ranks: both hear the same, and a folder that is not shared is found."""

import pytest

from tests.helpers.world import run_code

CODE = """
import os, sys
import torch
import torch.distributed as dist
from keepstep.errors import CannotSave
from keepstep.store import Store
from keepstep.store.process_group import ranks_of_this_process

dist.init_process_group("gloo")
folder = sys.argv[1] + (f"/{dist.get_rank()}" if sys.argv[2] == "apart" else "")
with Store(folder, ranks=ranks_of_this_process(deadline_seconds=30)) as store:
    assert store.restore() is None
    try:
        print("fits", store.rehearse({"w": torch.zeros(4), "n": 1}).fits > 1)
    except CannotSave as error:
        print("refused", error)
dist.barrier()
sys.stdout.flush()
# Threads of gloo that outlive the group abort a process that ends in another way.
os._exit(0)
"""


@pytest.mark.parametrize(
    ("where", "heard"), [("shared", "fits True"), ("apart", "All ranks need the same folder")]
)
def test_a_rehearsal_is_one_answer_on_all_ranks(tmp_path, where, heard):
    for code, text in run_code(2, CODE, tmp_path, where):
        assert code == 0, text
        assert heard in text
    assert not list(tmp_path.rglob(".*"))


DIFFERING = """
import os, sys
import torch
import torch.distributed as dist
from keepstep.errors import KeepstepError
from keepstep.store import Store
from keepstep.store.process_group import ranks_of_this_process

dist.init_process_group("gloo")
rank = dist.get_rank()

def rehearse(state, more=0):
    with Store(sys.argv[1], ranks=ranks_of_this_process(deadline_seconds=10)) as store:
        store.restore()
        try:
            print("fits", store.rehearse(state, bytes_to_come=more).fits > 1)
        except KeepstepError as error:
            print("refused", error)

one = {"w": torch.zeros(4)}
rehearse(one if rank else {**one, "wide": torch.zeros(4, dtype=torch.float64)})
rehearse({"w": torch.zeros(4 + rank)})
# More than there is, for one of them.
rehearse(one, more=rank << 60)
rehearse(one, more=(1 - rank) << 60)
rehearse(one)
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_ranks_that_differ_in_their_state_or_in_what_it_takes_hear_the_same(tmp_path):
    for code, text in run_code(2, DIFFERING, tmp_path):
        assert code == 0, text
        told = [line for line in text.splitlines() if line.startswith(("refused", "fits"))]
        assert len(told) == 5, text
        assert all("ranks [1] hold another plain state, or other" in line for line in told[:2])
        assert all("has no room for 3 more checkpoints" in line for line in told[2:4])
        assert told[4] == "fits True"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
