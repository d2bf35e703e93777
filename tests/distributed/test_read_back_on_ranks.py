"""Reading back on two ranks: a byte that one of them misses fails the attempt of both."""

import torch

from keepstep.store import load_state
from tests.helpers.world import run_code

CODE = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from keepstep.distributed.group import join_ranks
from keepstep.store import Store
from keepstep.store.disk import Disk
dist.init_process_group("gloo")
heard = []

class Lying(Disk):
    left = 1
    def operation(self, name, path):
        if name == "rename" and path.name == "step_1" and self.left:
            self.left -= 1
            [data] = path.parent.glob(".staging-1-*/rank-00001.safetensors")
            with data.open("r+b") as file:
                file.seek(-1, 2)
                byte = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([byte[0] ^ 1]))

def tell(event, **facts):
    heard.append(event)
    if event == "retry":
        heard.append(facts["error"])

ranks = join_ranks()
with Store(sys.argv[1], ranks=ranks, disk=Lying(), on_event=tell, verify_after_write=True) as store:
    store.restore()
    store.save({"a": torch.ones(1000), "b": torch.full((1000,), 2.0)}, step=1)
print("HEARD", *heard, flush=True)
dist.destroy_process_group()
"""


def test_a_byte_that_one_rank_misses_has_both_save_anew(tmp_path):
    for exit_code, output in run_code(2, CODE, tmp_path):
        assert exit_code == 0, output
        heard = next(line for line in output.splitlines() if line.startswith("HEARD"))
        assert "set_aside retry" in heard
        assert "the disk does not hold what was written: rank-00001.safetensors: bytes" in heard
        assert heard.endswith("verified_on_disk committed")
    found = load_state(tmp_path / "step_1")
    assert torch.equal(found["b"], torch.full((1000,), 2.0))
