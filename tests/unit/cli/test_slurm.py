"""The batch script: what it asks for, what it passes on, and when it requeues its job."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.helpers.slurm import Job

CONFIG = "configs/language/debug.toml"
HARD = ('--run.name=it\'s $HOME `id` "q" \\ {x}', "--data.source=/a b\n/c;&|*", "--run.seed", "3")


def script(capsys, *words: str) -> str:
    assert main(["slurm", CONFIG, *words]) == 0
    return capsys.readouterr().out


def refusal(capsys, *words: str) -> str:
    assert main(["slurm", CONFIG, *words]) == 2
    return capsys.readouterr().err


def options(text: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    assert len(found) == text.count("#SBATCH")
    return dict(found)


def test_the_script_asks_for_what_it_is_told_to_and_for_a_signal_before_the_end(capsys):
    words = ("--nodes=2", "--gpus-per-node", "4", "--time=1-00:00:00", "--run.grace=90s")
    assert options(script(capsys, *words, "--partition=gpu", "--account=a.b-c")) == {
        "job-name": "language-debug",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "time": "1-00:00:00",
        "partition": "gpu",
        "account": "a.b-c",
        "signal": "USR1@90",
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": "",
    }
    few = options(script(capsys, "--ntasks-per-node=3"))
    assert few["ntasks-per-node"] == "3"
    assert not {"gpus-per-node", "time", "partition", "account"} & set(few)


@pytest.mark.parametrize("words", [(), HARD], ids=["plain", "hard"])
def test_the_script_is_sound_bash(capsys, words, tmp_path):
    path = tmp_path / "script"
    path.write_text(script(capsys, *words))
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    checker = Path(sys.executable).with_name("shellcheck")
    # That nothing in the overrides expands is what is meant.
    words = [checker, "--exclude=SC2016", path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_override_reaches_the_command_as_it_was_written(capsys, tmp_path):
    job = Job(tmp_path)
    done = job.run(script(capsys, "--nodes", "1", *HARD, "--time=1:00:00"), FAKE_CODE="0")
    assert done.returncode == 0, done.stdout
    assert job.words == [sys.executable, "-m", "keepstep", "train", CONFIG, *HARD]
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "state", "requeued"),
    [
        ("75", "", "RUNNING", 1),
        ("75", "2", "RUNNING", 1),
        ("75", "3", "RUNNING", 0),
        ("75", "4", "RUNNING", 0),
        ("75", "", "CANCELLED", 0),
        ("75", "", "COMPLETING", 0),
        *[(code, "", "RUNNING", 0) for code in ("0", "1", "2", "3", "4", "5", "6", "7", "138")],
    ],
)
def test_a_job_is_requeued_where_its_run_has_stopped_and_nowhere_else(
    capsys, tmp_path, code, restarts, state, requeued
):
    job = Job(tmp_path)
    variables = {"FAKE_CODE": code, "FAKE_STATE": state, "SLURM_RESTART_COUNT": restarts}
    done = job.run(script(capsys, "--max-requeues=3"), **variables)
    assert job.requeued == requeued
    assert done.returncode == int(code)
    assert ("not requeued" in done.stdout) == (code == "75" and not requeued)


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_the_shell_of_the_job_outlives_a_signal_and_still_requeues(capsys, tmp_path, name):
    job = Job(tmp_path)
    done = job.run(script(capsys), FAKE_CODE="75", FAKE_SIGNAL_TO_SHELL=name)
    assert (done.returncode, job.requeued) == (75, 1), done.stdout


def test_what_cannot_be_asked_for_is_refused(capsys):
    assert "--time=3 is not longer than run.grace (180s)" in refusal(capsys, "--time=3")
    assert "--time=soon is not a time" in refusal(capsys, "--time=soon")
    assert "must be at least 1" in refusal(capsys, "--nodes=0")
    assert "must be a whole number" in refusal(capsys, "--max-requeues=-1")
    assert "must be a name" in refusal(capsys, "--partition=a b\n#SBATCH --exclusive")
    assert "--node: unknown key" in refusal(capsys, "--node=2")
    assert "run.grace" in refusal(capsys, "--run.grace=soon")
    assert main(["slurm"]) == 2
    assert main(["slurm", "--help"]) == 0


@pytest.mark.parametrize(
    ("time", "fits"),
    [("3", False), ("3:01", True), ("0:03:00", False), ("0:03:01", True), ("0-0", False),
     ("0-1", True), ("0-0:03", False), ("0-0:04", True), ("0-0:03:01", True)],
)  # fmt: skip
def test_a_time_is_read_as_sbatch_reads_it(capsys, time, fits):
    assert main(["slurm", CONFIG, f"--time={time}"]) == (0 if fits else 2)
    capsys.readouterr()
