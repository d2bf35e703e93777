"""Single files on two ranks: what fails on rank 0 is everyone's error, within seconds."""

import re

from keepstep.store import load_checkpoint, save_checkpoint_atomic
from tests.helpers.single_file import content_of, state_of
from tests.helpers.world import run_code

BEGIN = """
import errno, os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from keepstep.errors import KeepstepError
from keepstep.store import (
    apply_best_valid_loss_floor, choose_resume_checkpoint, load_checkpoint, save_checkpoint_atomic,
)
from keepstep.store.disk import Disk
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
latest, best = folder / "latest.pth", folder / "best.pth"

class Broken(Disk):
    def operation(self, name, path):
        if name == broken:
            happens()

def fails():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def freezes():
    threading.Event().wait(12)

happens, broken = fails, "nothing"
state = {"step": 7, "rank": rank}
dist.barrier()
started = time.monotonic()
try:
"""
END = """
    print("DONE", flush=True)
except KeepstepError as error:
    print("RAISED", type(error).__name__, error, flush=True)
finally:
    print("SECONDS", time.monotonic() - started, flush=True)
"""


def on_two_ranks(folder, code: str) -> list[str]:
    """Run the lines on two ranks; return what each printed."""
    body = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return [output for _, output in run_code(2, BEGIN + body + END, folder)]


def seconds(output: str) -> float:
    return float(re.search(r"SECONDS ([\d.]+)", output)[1])


def test_rank_0_saves_and_both_go_on(tmp_path):
    code = "save_checkpoint_atomic(latest, state, best=best)\n" * 2
    for output in on_two_ranks(tmp_path, code):
        assert "DONE" in output, output
    assert load_checkpoint(tmp_path / "best.pth") == {"step": 7, "rank": 0}
    assert list(content_of(tmp_path)) == ["best.pth", "latest.pth"]


def test_a_failed_write_verify_or_link_is_the_same_error_on_both(tmp_path):
    save_checkpoint_atomic(tmp_path / "latest.pth", state_of(1))
    before = content_of(tmp_path)
    for broken in ("create", "write", "sync", "link", "rename", "sync_folder"):
        code = f"broken = {broken!r} if rank == 0 else 'nothing'\n"
        code += "save_checkpoint_atomic(latest, state, best=best, disk=Broken())"
        for output in on_two_ranks(tmp_path, code):
            assert "RAISED SaveFailed" in output, f"{broken}: {output}"
            assert "No space left on device" in output
            assert seconds(output) < 10
        assert content_of(tmp_path) == before


def test_a_state_that_is_refused_is_refused_on_both(tmp_path):
    code = "save_checkpoint_atomic(latest, {'a': Path('x')} if rank == 0 else state)"
    for output in on_two_ranks(tmp_path, code):
        assert "RAISED UnsafeState" in output, output
        assert "Path" in output
    assert content_of(tmp_path) == {}


def test_the_death_of_rank_0_in_a_save_is_told_within_seconds(tmp_path):
    code = "broken, happens = 'rename', dies\n"
    code += "save_checkpoint_atomic(latest, state, disk=Broken())"
    _, output = on_two_ranks(tmp_path, code)
    assert "RAISED Unhealthy rank 1 lost the others in save of latest.pth" in output
    assert seconds(output) < 10


def test_a_rank_0_that_is_stuck_is_waited_for_until_the_deadline(tmp_path):
    code = "broken, happens = 'rename', freezes\n"
    code += "save_checkpoint_atomic(latest, state, disk=Broken(), deadline_seconds=3)"
    _, output = on_two_ranks(tmp_path, code)
    assert "RAISED Unhealthy" in output
    assert "waited longer than 3 s" in output
    assert 2 < seconds(output) < 10


def test_a_save_on_one_rank_only_ends_at_the_deadline(tmp_path):
    code = "if rank == 0: save_checkpoint_atomic(latest, state, deadline_seconds=3)\n"
    code += "else: threading.Event().wait(8)"
    output, _ = on_two_ranks(tmp_path, code)
    assert "RAISED Unhealthy" in output, output
    assert "on all ranks" in output
    assert seconds(output) < 10


def test_ranks_that_do_different_things_are_told_so(tmp_path):
    code = "save_checkpoint_atomic(latest if rank else folder / 'steps_7.pth', state)"
    for output in on_two_ranks(tmp_path, code):
        assert "rank 0 is in 'save of steps_7.pth', rank 1 in 'save of latest.pth'" in output


def test_a_choice_and_its_failure_are_the_same_on_both(tmp_path):
    code = "print('CHOSEN', choose_resume_checkpoint(folder).name)"
    for output in on_two_ranks(tmp_path, code):
        assert "RAISED NotFound" in output, output
    save_checkpoint_atomic(tmp_path / "steps_3.pth", state_of(3))
    for output in on_two_ranks(tmp_path, code):
        assert "CHOSEN steps_3.pth" in output, output
    (tmp_path / "steps_3.pth").write_bytes(b"torn")
    for output in on_two_ranks(tmp_path, code):
        assert "RAISED CheckpointDamaged" in output, output


def test_a_choice_that_one_rank_does_not_see_is_an_error_on_both(tmp_path):
    save_checkpoint_atomic(tmp_path / "0" / "latest.pth", state_of(3))
    for output in on_two_ranks(tmp_path, "choose_resume_checkpoint(folder / str(rank))"):
        assert "RAISED" in output, output
        assert "DONE" not in output


def test_the_floor_is_the_same_on_both(tmp_path):
    save_checkpoint_atomic(tmp_path / "best.pth", {"best_valid_loss": 0.125})
    code = "print('FLOOR', apply_best_valid_loss_floor({'best_valid_loss': 0.5}, folder))"
    for output in on_two_ranks(tmp_path, code):
        assert "FLOOR 0.125" in output, output


def test_a_group_that_was_made_anew_is_joined_anew(tmp_path):
    code = "save_checkpoint_atomic(latest, state)\ndist.destroy_process_group()\n"
    code += "store = dist.FileStore(str(folder / 'meet'), 2)\n"
    code += "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
    code += "save_checkpoint_atomic(latest, {**state, 'step': 8})"
    for output in on_two_ranks(tmp_path, code):
        assert "DONE" in output, output
    assert load_checkpoint(tmp_path / "latest.pth")["step"] == 8
