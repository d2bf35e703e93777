"""Stands in for the two commands of Slurm that a batch script calls, put first in the PATH.

`srun` starts its tasks as processes with the variables that srun gives them, and exits with the
highest of their codes; with FAKE_CODE it starts nothing and exits with that. `scontrol` answers
with FAKE_STATE and writes down what it is asked to requeue.
"""

import os
import subprocess
from pathlib import Path

from tests.helpers.command import environment

_SRUN = """\
#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
printf '%s\\0' "$@" > "$FAKE_PLACE/words"
if [ -n "$FAKE_SIGNAL_TO_SHELL" ]; then kill -s "$FAKE_SIGNAL_TO_SHELL" "$PPID"; fi
if [ -n "$FAKE_CODE" ]; then exit "$FAKE_CODE"; fi
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS="$SLURM_NTASKS" SLURM_STEP_NODELIST=localhost
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
    wait "$task"
    code=$?
    if [ "$code" -gt "$highest" ]; then highest=$code; fi
done
exit "$highest"
"""
_SCONTROL = """\
#!/bin/bash
case "$1" in
    show) echo "JobId=$3 JobName=x"; echo "   JobState=$FAKE_STATE Reason=None" ;;
    requeue) echo "$2" >> "$FAKE_PLACE/requeued" ;;
esac
"""


class Job:
    """A batch job that runs a script in a folder of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
            path = place / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def run(self, script: str, *, tasks: int = 1, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run the script as Slurm does, in its shell, to its end."""
        path = self.place / "script"
        path.write_text(script)
        # A batch job's shell has a rank too, and the number of tasks, and is none of them.
        variables = {
            "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}",
            "FAKE_PLACE": str(self.place),
            "FAKE_STATE": "RUNNING",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": str(tasks),
            **extra,
        }
        return subprocess.run(
            ["bash", str(path)],
            env=environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )

    @property
    def requeued(self) -> int:
        """How often the job asked to be requeued."""
        path = self.place / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def words(self) -> list[str]:
        """The command that srun was given, word by word."""
        return (self.place / "words").read_text().split("\0")[:-1]
