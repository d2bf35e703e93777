"""One of two ranks runs out of memory: both hear of it in seconds, and nothing is passed over."""

from tests.helpers.world import run_code

CODE = """
import gc, os, resource, sys, time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from keepstep.errors import KeepstepError
from keepstep.store import Store, file_read
from keepstep.store.process_group import ranks_of_this_process

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
ranks = ranks_of_this_process(deadline_seconds=20)

@contextmanager
def short_of_memory(where, megabytes=32):
    if rank == where:
        # What only waits to be collected would be room.
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    started = time.monotonic()
    try:
        yield
        print("TOLD nothing")
    except KeepstepError as error:
        print("TOLD", where, error.message, error.hint)
    except RuntimeError as error:
        print("TOLD", where, error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("SECONDS", time.monotonic() - started)

def check(store, step):
    restored = store.restore()
    assert restored.manifest.step == step, restored.manifest.step
    assert restored.skipped == (), restored.skipped
    assert restored.set_aside == (), restored.set_aside

for layout in ("folders", "files"):
    with Store(f"{sys.argv[1]}/{layout}", ranks=ranks, layout=layout) as store:
        for step, count in ((1, 4), (2, 16 << 20)):
            store.save({"w": torch.ones(count)}, step=step)
    for where in (0, 1):
        with Store(f"{sys.argv[1]}/{layout}", ranks=ranks, layout=layout) as store:
            with short_of_memory(where):
                store.restore()
            check(store, 2)
            with short_of_memory(where):
                # Of files, the facts are looked at anew.
                if rank == where:
                    file_read._facts_of.cache_clear()
                store.restore()

mesh = init_device_mesh("cpu", (2,))
# Rank 0 has room for what it exchanges, and not for the whole of it.
shards = [distribute_tensor(torch.ones(12 << 20), mesh, [Shard(0)]) for _ in range(3)]
state = {"w": shards, "n": 3}
with Store(f"{sys.argv[1]}/files", ranks=ranks, layout="files") as store:
    check(store, 2)
    for where in (0, 1):
        with short_of_memory(where, 48 if where else 112):
            store.save(state, step=3)
    store.save(state, step=3)
    check(store, 3)
dist.barrier()
sys.stdout.flush()
# Threads of gloo that outlive the group abort a process that ends in another way.
os._exit(0)
"""


def test_memory_that_is_short_on_one_rank_is_the_same_error_on_both(tmp_path):
    for code, text in run_code(2, CODE, tmp_path):
        assert code == 0, text
        told = [line for line in text.splitlines() if line.startswith("TOLD")]
        assert len(told) == 10, text
        assert [line.split()[1] for line in told] == [*"0011" * 2, *"01"], text
        assert all("allocate memory" in line for line in told), text
        read = [line for line in told if "could not be read, which is no fault of it" in line]
        assert len(read) == 6, text
        seconds = [float(line.split()[1]) for line in text.splitlines() if "SECONDS" in line]
        assert max(seconds) < 10
