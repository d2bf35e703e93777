"""A remote on two ranks: each puts its own share, and what fails on one fails on both."""

from keepstep.store import load_state
from tests.helpers.world import run_code

CODE = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from keepstep.distributed.group import join_ranks
from keepstep.errors import SaveFailed
from keepstep.store import Store
from keepstep.store.remote import ObjectStore
dist.init_process_group("gloo")
ranks, folder = join_ranks(), Path(sys.argv[1])
puts = []

class Objects(ObjectStore):
    def operation(self, name, key):
        if name == "put_file":
            puts.append(key.rpartition("/")[2])
            if ranks.rank == 1 and key.startswith("step_2-"):
                raise OSError(5, "no luck", key)

remote = Objects(f"file://{folder}/objects")
state = {"a": torch.ones(1000), "b": torch.full((1000,), 2.0)}
with Store(folder / "one", ranks=ranks, remote=remote, save_retries=0) as store:
    store.restore()
    store.save(state, step=1)
    try:
        store.save({**state, "c": torch.zeros(8)}, step=2)
    except SaveFailed as error:
        where = "rank 1 on" in str(error) or ranks.rank == 1
        print("FAILED", error.message.partition(":")[0], where)
print("PUT", *puts)
with Store(folder / "two", ranks=ranks, remote=f"file://{folder}/objects") as store:
    print("RESTORED", store.restore().manifest.step, flush=True)
dist.destroy_process_group()
"""


def test_each_puts_its_share_and_fails_with_the_others(tmp_path):
    for rank, (exit_code, output) in enumerate(run_code(2, CODE, tmp_path)):
        assert exit_code == 0, output
        lines = output.splitlines()
        assert "RESTORED 1" in lines
        assert f"PUT rank-0000{rank}.safetensors rank-0000{rank}.safetensors" in lines
        [failed] = [line for line in lines if line.startswith("FAILED")]
        assert failed.startswith("FAILED step 2 is committed in its folder")
        assert failed.endswith("True")
    assert load_state(tmp_path / "two/step_1")["b"][0] == 2.0
