"""A batch job on two ranks: told to stop, requeued, continued and done."""

from tests.helpers import hooks
from tests.helpers.command import KEEPSTEP, environment, events, losses, outcome
from tests.helpers.slurm import Job


def test_a_job_that_is_told_to_stop_is_requeued_and_the_next_one_finishes(config, tmp_path):
    import subprocess

    run, job = tmp_path / "a run", Job(tmp_path)
    words = [f"--run.dir={run}", f"--run.hooks=['{hooks.CONFIG}']", "--distributed.lost_after=60s"]
    made = subprocess.run(
        [KEEPSTEP, "slurm", config, *words, "--ntasks-per-node=2"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    act = hooks.acting({"when": "forward", "step": 5, "do": "SIGUSR1"})
    done = job.run(made.stdout, tasks=2, **act)
    assert done.returncode == 75, done.stdout
    assert "2 ranks (gloo)" in done.stdout
    assert (outcome(run)["reason"], outcome(run)["step"]) == ("SIGUSR1", 5)
    assert job.requeued == 1
    done = job.run(made.stdout, tasks=2, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stdout
    assert [event["step"] for event in events(run, "resumed")] == [5]
    assert [step for step, _, _ in losses(run)] == list(range(1, 11))
    assert job.requeued == 1, "what is finished is not requeued"
