"""Who this process is, by what a launcher says."""

import pytest

from keepstep.distributed.launcher import find_place, first_host, in_srun_task
from keepstep.errors import UsageError
from keepstep.run.stop import _launcher_repeat_seconds

TASK = {
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}
INTERACTIVE, BATCH = str(0xFFFFFFFA), str(0xFFFFFFFB)


@pytest.fixture
def place_with(monkeypatch):
    def found(**variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *TASK):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return find_place()

    return found


def test_a_task_of_srun_is_the_rank_that_slurm_says(place_with):
    place = place_with(**TASK)
    assert (place.rank, place.size, place.local_rank) == (5, 8, 1)
    assert place.host == "gpu07"
    assert in_srun_task()
    assert _launcher_repeat_seconds() > 0, "srun forwards what Slurm has sent its tasks"
    other = place_with(**{**TASK, "SLURM_STEP_ID": "3"})
    assert other.port != place.port
    assert other.attempt != place.attempt, "ports of two steps may be the same all the same"
    assert 20000 <= place.port < 30000
    again = place_with(**TASK, SLURM_RESTART_COUNT="1")
    assert again.attempt != place.attempt


def test_where_the_ranks_meet_can_be_said_by_hand(place_with):
    place = place_with(**TASK, MASTER_ADDR="10.0.0.1", MASTER_PORT="4000")
    assert (place.host, place.port, place.rank) == ("10.0.0.1", 4000, 5)


@pytest.mark.parametrize("step", [INTERACTIVE, BATCH, "", "batch"])
def test_a_process_in_the_shell_of_an_allocation_is_a_run_of_its_own(place_with, step):
    place = place_with(**{**TASK, "SLURM_STEP_ID": step})
    assert (place.rank, place.size) == (0, 1)
    assert not in_srun_task()
    assert _launcher_repeat_seconds() == 0


def test_torchrun_under_srun_and_a_world_set_by_hand_come_first(place_with):
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h"}
    place = place_with(**TASK, **torchrun)
    assert (place.rank, place.size, place.host, place.port) == (1, 2, "h", 29500)
    assert place_with(**TASK, WORLD_SIZE="1").size == 1


def test_what_makes_no_sense_is_refused(place_with):
    with pytest.raises(UsageError, match="SLURM_PROCID is 'x', not a whole number"):
        place_with(**{**TASK, "SLURM_PROCID": "x"})
    nowhere = {**TASK, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}
    with pytest.raises(UsageError, match="does not say where the first is"):
        place_with(**nowhere)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("a1,b2", "a1"),
        ("node[001-004,007]", "node001"),
        ("node[3,5-7],other[1-2]", "node3"),
        ("rack[1-2]node[03,07-09]-ib,x", "rack1node03-ib"),
        ("a.example.org,b", "a.example.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_is_found(nodes, first):
    assert first_host(nodes) == first
