"""`keepstep audit FOLDER -- COMMAND`: what a power cut could leave of a command's files."""

import json as json_module
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from keepstep.cli.parse import call
from keepstep.errors import UsageError

_USAGE = "keepstep audit FOLDER [--judge NAME | --check 'CMD {dir}'] [--ack REGEX] -- COMMAND ..."
_WORK_CAN_BE_LOST = 3
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 1 << 30


def run_audit(argv: Sequence[str]) -> int:
    """Audit the command behind `--`; return 0 where no work can be lost, else 3."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    flags, command = words[:at], words[at + 1 :]

    def audit(
        folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
        *,
        judge: str = "",
        check: str = "",
        ack: str = "",
        model: Literal["both", "weak", "journal"] = "both",
        limit: int = 2000,
        json: bool = False,
    ) -> int:
        """Run a command, and judge every state that a power cut could have left of its files.

        The command stands behind `--` and is run once, as it is, under strace. What it does to the
        files in FOLDER is recorded; every state that the disk may hold after a power cut is laid
        out and loaded. Exit code 3 where one of them loses work that the command had said was
        saved, or cannot be loaded.

        Args:
            folder: Folder that the command keeps its checkpoints in; made where it is missing.
            judge: Who loads: keepstep, torch, lightning, safetensors, dcp or transformers.
            check: Command that loads instead, as 'python load.py {dir}': code 0 and what was
                loaded, as text; nothing printed means that there is nothing.
            ack: Regular expression; a line of output in which it is found says that all so far is
                saved. Without it, the end of the command says so.
            model: What a disk may do: weak is POSIX and no more, journal is like ext4.
            limit: States at one moment; where there are more, some are taken, and it is said.
            json: Print JSON.
        """
        return _audit(
            command, folder, judge=judge, check=check, ack=ack, model=model, limit=limit, json=json
        )

    if "-h" not in flags and "--help" not in flags and not command:
        raise UsageError("there is no command behind `--`", hint=f"usage: {_USAGE}")
    return call("keepstep audit", audit, flags)


def _audit(
    command: list[str],
    folder: Path,
    *,
    judge: str,
    check: str,
    ack: str,
    model: str,
    limit: int,
    json: bool,
) -> int:
    from keepstep.audit.judges import built_in, by_command
    from keepstep.audit.record import record
    from keepstep.audit.report import as_data, in_words
    from keepstep.audit.verdicts import Audit

    if bool(judge) == bool(check):
        raise UsageError("give one of --judge and --check", hint=f"usage: {_USAGE}")
    if limit < 1:
        raise UsageError(f"--limit is {limit}; at least 1 is needed")
    loads = built_in(judge) if judge else by_command(check)
    acknowledged = _pattern(ack) if ack else None
    folder.mkdir(parents=True, exist_ok=True)
    recording = record(command, folder, acknowledged=acknowledged)
    with tempfile.TemporaryDirectory(prefix="keepstep-audit-", dir=_scratch()) as scratch:
        audit = Audit(
            recording, judge=loads, limit=limit, scratch=Path(scratch), copies=bool(check)
        )
        found = [audit.judge(m) for m in ("weak", "journal") if model in (m, "both")]
    if json:
        print(json_module.dumps(as_data(recording, found), indent=2))
    else:
        for line in in_words(recording, found):
            print(line)
    return _WORK_CAN_BE_LOST if any(findings.faults for findings in found) else 0


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--ack {text!r} is not a regular expression: {error}") from error


def _scratch() -> Path | None:
    """Return a folder in memory, None for the usual temporary one where there is no room."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOM_BYTES:
        return _MEMORY
    return None
