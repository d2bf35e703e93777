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
