"""A command under strace: every file operation of it and of its children, as calls.

strace needs no root for processes that one starts oneself. All strings are printed in
hexadecimal (`-xx`), so no name and no byte that is written can be taken for something else, and
descriptors with their paths (`-y`).
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import NotFound

_CALLS = (
    "open,openat,openat2,creat,close,close_range,write,pwrite64,writev,pwritev,pwritev2,lseek,"
    "ftruncate,truncate,fallocate,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,"
    "unlinkat,rmdir,mkdir,mkdirat,fsync,fdatasync,sync,syncfs,sync_file_range,mmap,dup,dup2,dup3,"
    "fcntl,clone,clone3,fork,vfork,execve,execveat,chdir,fchdir,copy_file_range,sendfile,splice,"
    "io_uring_setup"
)
_STRING_BYTES_MAX = 1 << 28
"""strace takes no more; a longer write is known in part."""
_HEX = re.compile(r"(?:\\x[0-9a-f]{2})+")
_BEGUN = re.compile(r"(\d+) +(\w+)\((.*)$", re.DOTALL)
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_ENDED = re.compile(r"(\d+) +\+\+\+ ")
_UNFINISHED = " <unfinished ...>"
_RESULT = re.compile(r"\) += (-?\d+|\?|0x[0-9a-f]+)(<[^>]*>)?(?: (\w+) )?.*$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One system call that succeeded, or failed where `error` is its name (`ENOENT`).

    ``unfinished``: it has begun, and other processes go on meanwhile; it comes again when done.
    """

    pid: int
    name: str
    arguments: tuple[str, ...]
    result: int = 0
    error: str = ""
    unfinished: bool = False


def trace(command: Sequence[str], output: Path) -> int:
    """Run a command under strace, which writes to `output`; return the command's exit code.

    NotFound where there is no strace.
    """
    strace = shutil.which("strace")
    if strace is None:
        raise NotFound(
            "strace is not installed, and nothing else sees what a command does to its files",
            hint="Install it (`apt install strace`, `dnf install strace`) and try again.",
        )
    done = subprocess.run(
        [
            strace, "-f", "-q", "-y", "-xx", "-s", str(_STRING_BYTES_MAX), "--seccomp-bpf",
            "-e", f"trace={_CALLS}", "-e", "signal=none", "-o", str(output), "--", *command,
        ],
        check=False,
    )  # fmt: skip
    return done.returncode


def calls_in(output: Path) -> Iterator[Call]:
    """Yield the calls of a trace, each when it was done; those that took turns, also when begun."""
    begun: dict[int, str] = {}
    with output.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            resumed = _RESUMED.match(line)
            if resumed:
                pid = int(resumed[1])
                head = begun.pop(pid, None)
                if head is not None:
                    yield from _finished(pid, resumed[2], head + resumed[3])
                continue
            started = _BEGUN.match(line)
            if started is None:
                ended = _ENDED.match(line)
                if ended:
                    yield Call(pid=int(ended[1]), name="exit", arguments=())
                continue
            pid, name, rest = int(started[1]), started[2], started[3]
            if rest.rstrip().endswith(_UNFINISHED.strip()):
                begun[pid] = rest.rstrip()[: -len(_UNFINISHED.strip())].rstrip()
                arguments = _split(begun[pid])
                yield Call(pid=pid, name=name, arguments=arguments, unfinished=True)
            else:
                yield from _finished(pid, name, rest)


def text_of(argument: str) -> bytes:
    """Return the bytes of a string argument."""
    return b"".join(bytes.fromhex(found.replace("\\x", "")) for found in _HEX.findall(argument))


def descriptor_of(argument: str) -> int | None:
    """Return the number of a descriptor argument, None for AT_FDCWD."""
    number = re.match(r"-?\d+", argument)
    return int(number[0]) if number else None


def path_of(argument: str) -> str:
    """Return the path that strace shows of a descriptor, empty where it shows none."""
    start = argument.find("<")
    if start < 0:
        return ""
    return text_of(argument[start : argument.index(">", start)]).decode(errors="surrogateescape")


def _finished(pid: int, name: str, rest: str) -> Iterator[Call]:
    # The last one: a path may hold what looks like it, in hexadecimal it does not.
    at = rest.rfind(") ")
    result = _RESULT.match(rest[at:]) if at >= 0 else None
    if result is None or result[1] == "?":
        return
    yield Call(
        pid=pid,
        name=name,
        arguments=_split(rest[:at]),
        result=int(result[1], 0),
        error=result[3] or "" if result[1].startswith("-") else "",
    )


def _split(text: str) -> tuple[str, ...]:
    """Return the arguments, split at the commas that stand in no bracket."""
    found, depth, start = [], 0, 0
    for match in re.finditer(r"[\[\](){},]", text):
        match match[0]:
            case "[" | "(" | "{":
                depth += 1
            case "]" | ")" | "}":
                depth -= 1
            case "," if depth == 0:
                found.append(text[start : match.start()].strip())
                start = match.end()
    found.append(text[start:].strip())
    return tuple(found)
