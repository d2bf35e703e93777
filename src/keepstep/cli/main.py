"""`keepstep`: which command is meant, and how an error leaves.

Everything heavy is imported by the command that needs it: `--help` and every command that only
reads import no torch. For `train`, nothing comes before the signal handlers.
"""

import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper

from keepstep import __version__
from keepstep.distributed.leave import ended, must_leave
from keepstep.errors import KeepstepError, UsageError, room_by_prune, way_out

_COMMANDS = (
    "train", "ckpt", "runs", "watch", "plot", "report", "config", "slurm", "doctor", "language",
    "audit",
)  # fmt: skip
"""Each is a module of this package, with a function `run_<name>`."""

_OVERVIEW = """\
usage: keepstep COMMAND ...

Train PyTorch models on machines that get taken away, and lose nothing.

commands
  train CONFIG [--section.key=value ...]   start the run that the config describes, or continue it
  ckpt ls|show|verify|diff RUN ...         look at checkpoints; re-read every byte; compare two
  ckpt pin|unpin|prune RUN ...             say which stay; delete the others
  ckpt export|import ...                   to and from Hugging Face, DCP, .pth and safetensors
  runs ls|compare ...                      list runs and what became of them; compare some
  watch RUN                                follow a run that another process trains
  plot RUN ...                             curves in the terminal, or as PNG or SVG
  report RUN -o FILE.html                  all about a run on one page
  config show|check CONFIG [overrides]     show a config as it resolves; list everything wrong
  slurm CONFIG [options] [overrides]       print a batch script that stops in time and requeues
  doctor [CONFIG | RUN]                    could a run begin and end well on this machine?
  language prepare|generate ...            make token files from text; write text with a model
  audit FOLDER -- COMMAND ...              find what a power cut could leave of a script's files

`keepstep COMMAND --help` says more. Exit codes: 0 done, 1 failed, 2 usage or config, 3 damaged,
4 not found, 5 locked, 6 diverged, 7 unhealthy, 75 stopped (run the same command to continue).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, or leave with it at once if a thread hangs.

    With `argv` Python goes on afterwards, and hears signals as before; without, it ends.
    """
    try:
        with _signals_as_before() if argv is not None else contextlib.nullcontext():
            return ended(_answered(argv))
    except Exception:
        if must_leave():
            traceback.print_exc()
            ended(1)
        raise


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """Put back what `train` leaves ignored for the end of the process."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _answered(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    _fill_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        # A letter that the terminal's encoding has not is escaped, and ends nothing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeepstepError as error:
        return _fail(str(error), error, words, code=error.exit_code)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            return _fail(_words_of(error, words), error, words, code=1)
        # Whoever read our output went away, as in `keepstep ckpt ls | head`. Nothing is left to
        # flush at exit into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        # `train` has handlers of its own; a command that only reads has nothing to put in order.
        return 128 + signal.SIGINT


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_OVERVIEW, end="")
        return 0 if words else UsageError.exit_code
    name, *rest = words
    if name in ("--version", "-V"):
        print(f"keepstep {__version__}")
        return 0
    if name not in _COMMANDS:
        from keepstep.config.explain import suggestion

        near = suggestion(name, list(_COMMANDS))
        raise UsageError(
            f"there is no command {name!r}{near}", hint="`keepstep --help` lists the commands."
        )
    run: Callable[[Sequence[str]], int] = getattr(
        importlib.import_module(f"keepstep.cli.{name}"), f"run_{name}"
    )
    return run(rest)


def _fail(text: str, error: BaseException, words: list[str], *, code: int) -> int:
    """Say what went wrong, to people, and to a program that asked for JSON; return the code."""
    lines = [text, *getattr(error, "__notes__", [])]
    with contextlib.suppress(BrokenPipeError):
        print("error:", "\n".join(lines), file=sys.stderr)
        # What stands behind `--` is the command of somebody else.
        own = words[: words.index("--")] if "--" in words else words
        if "--json" in own and own[0] != "train":
            print(json.dumps({"error": "\n".join(lines), "code": code}, indent=2), flush=True)
    return code


def _fill_closed_streams() -> None:
    """Put the null device in the place of standard streams that are closed (`keepstep ... >&-`).

    Their numbers would go to the next files that are opened, and what a library prints would land
    in a checkpoint.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        # The lowest free number is taken, which is the closed one.
        null = os.open(os.devnull, os.O_RDWR)
        setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _words_of(error: OSError, words: list[str]) -> str:
    """Say what the system refused, where, and what can be done about it."""
    where = f"{error.filename}: " if error.filename else ""
    train = words[:1] == ["train"]
    hint = way_out(error, then=f"run the same command {'to continue' if train else 'again'}")
    if train and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint += f"\n{room_by_prune('RUN')}"
    return f"{where}{error.strerror or error}" + (f"\n{hint}" if hint else "")
