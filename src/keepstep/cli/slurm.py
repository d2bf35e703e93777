"""`keepstep slurm CONFIG`: print a batch script that carries a run through Slurm's time limits."""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.config.quantities import seconds
from keepstep.config.schema import Config
from keepstep.errors import UsageError
from keepstep.tasks.registry import load_task_config

_USAGE = (
    "keepstep slurm CONFIG [--nodes N] [--gpus-per-node N] [--ntasks-per-node N] [--time T]"
    " [--partition P] [--account A] [--max-requeues N] [--section.key=value ...]"
)
_DESCRIPTION = """\
Print an sbatch file that runs `keepstep train CONFIG` with one rank a task, tells the ranks to stop
`run.grace` before the job's end, and requeues the job where the run has stopped and is not done.
Whatever else sbatch knows can be given when it is submitted: `sbatch --mem=64G FILE`.
"""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_WORD = re.compile(r"[\w.,:+=-]+")
_SIGNAL_SECONDS_MAX = 65535
"""The largest that sbatch takes."""

_SCRIPT = """\
#!/bin/bash
{options}
# From `keepstep slurm`. It can be submitted again at any time: the run continues where it was.

# Signals are for the ranks. This shell must outlive them, to decide what follows.
trap : TERM USR1

cd {folder} || exit 1
# srun does not take this over from sbatch by itself.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# The ranks end together. One that stays behind all the same is ended after a minute.
srun --kill-on-bad-exit=0 --wait=60 \\
    {command}
code=$?

# 75: stopped, saved and to be continued. All else is the end of it: done, or for people to look at.
if [ "$code" -ne 75 ]; then exit "$code"; fi
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_requeues} ]; then
    echo "stopped, and not requeued: its limit is {max_requeues} requeues" >&2
    exit "$code"
fi
# A job that was cancelled, or that Slurm requeues itself, is not running any more.
if ! scontrol show job "$SLURM_JOB_ID" | grep -q "JobState=RUNNING"; then
    echo "stopped, and not requeued: Slurm is ending this job" >&2
    exit "$code"
fi
echo "stopped: requeueing job $SLURM_JOB_ID" >&2
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def run_slurm(argv: Sequence[str]) -> int:
    """Print the script that `argv` (CONFIG, options, overrides) calls for; return the exit code."""
    parser = _parser()
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        return 0
    if not argv or argv[0].startswith("-"):
        raise UsageError("`keepstep slurm` needs a config file first", hint=f"usage: {_USAGE}")
    try:
        options, overrides = parser.parse_known_args(list(argv[1:]))
    except argparse.ArgumentError as error:
        raise UsageError(str(error), hint=f"usage: {_USAGE}") from error
    config = load_task_config(argv[0], overrides).config
    command = [sys.executable, "-m", "keepstep", "train", argv[0], *overrides]
    print(
        _SCRIPT.format(
            options="\n".join(f"#SBATCH {line}" for line in _options(options, config)),
            folder=shlex.quote(str(Path.cwd())),
            command=" ".join(shlex.quote(word) for word in command),
            max_requeues=options.max_requeues,
        ),
        end="",
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description=_DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--nodes", type=_positive, default=1, help="nodes (default: 1)")
    parser.add_argument(
        "--gpus-per-node", type=_count, default=0, help="GPUs of a node, each a rank"
    )
    parser.add_argument(
        "--ntasks-per-node", type=_positive, help="ranks of a node, if not its GPUs"
    )
    parser.add_argument("--time", help="time limit of the job, as sbatch takes it: 1-12:00:00")
    parser.add_argument("--partition", type=_word, help="partition to run in")
    parser.add_argument("--account", type=_word, help="account to charge")
    parser.add_argument(
        "--max-requeues",
        type=_count,
        default=100,
        help="requeues after which it ends (default: 100)",
    )
    return parser


def _options(options: argparse.Namespace, config: Config) -> list[str]:
    """Return what sbatch is asked for, one option each."""
    grace = min(math.ceil(seconds(config.run.grace)), _SIGNAL_SECONDS_MAX)
    if options.time is not None and _time_seconds(options.time) <= grace:
        raise UsageError(
            f"--time={options.time} is not longer than run.grace ({config.run.grace}): the job"
            " would be told to stop when it starts",
            hint="Ask for more time, or for a shorter --run.grace.",
        )
    found = {
        "job-name": re.sub(r"[^\w.-]+", "-", config.run.name),
        "nodes": options.nodes,
        "ntasks-per-node": options.ntasks_per_node or options.gpus_per_node or 1,
        "gpus-per-node": options.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        # Slurm sends it to the tasks of srun, and not to the shell of the script.
        "signal": f"USR1@{grace}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    lines = [f"--{name}={value}" for name, value in found.items() if value is not None]
    return [*lines, "--requeue"]


def _time_seconds(text: str) -> int:
    """Return a time of sbatch's in seconds: minutes, minutes:seconds, days-hours:minutes, ..."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--time={text} is not a time as sbatch takes it",
            hint="Write minutes, hours:minutes:seconds or days-hours:minutes:seconds.",
        )
    a, b, c = (int(match[name] or 0) for name in "abc")
    if match["days"] is not None:
        return ((int(match["days"]) * 24 + a) * 60 + b) * 60 + c
    return (a * 60 + b) * 60 + c if match["c"] is not None else a * 60 + b


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a name as Slurm has them, not {text!r}")
    return text
