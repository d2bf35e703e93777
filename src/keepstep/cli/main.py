"""`keepstep`: which command is meant, and how an error leaves.

Everything heavy is imported by the command that needs it: `--help` and every command that only
reads import no torch. For `train`, nothing comes before the signal handlers.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

from keepstep import __version__
from keepstep.errors import KeepstepError, UsageError

_OVERVIEW = """\
usage: keepstep COMMAND ...

Train PyTorch models on machines that get taken away, and lose nothing.

commands
  train CONFIG [--section.key=value ...]   start the run that the config describes, or continue it
  ckpt ls|show|verify|diff RUN ...         look at checkpoints; re-read every byte; compare two
  ckpt pin|unpin|prune RUN ...             say which stay; delete the others
  ckpt export|import ...                   to and from Hugging Face, DCP, .pth and safetensors
  config show|check CONFIG [overrides]     show a config as it resolves; list everything wrong
  language prepare|generate ...            make token files from text; write text with a model

`keepstep COMMAND --help` says more. Exit codes: 0 done, 1 failed, 2 usage or config, 3 damaged,
4 not found, 5 locked, 6 diverged, 7 unhealthy, 75 stopped (run the same command to continue).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeepstepError as error:
        _tell(f"error: {error}", *_notes(error))
        return error.exit_code
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _tell(f"error: {_words_of(error)}", *_notes(error))
            return 1
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
    commands: dict[str, Callable[[], Callable[[Sequence[str]], int]]] = {
        "train": _train,
        "ckpt": _ckpt,
        "config": _config,
        "language": _language,
    }
    if name not in commands:
        from keepstep.config.explain import suggestion

        near = suggestion(name, list(commands))
        raise UsageError(
            f"there is no command {name!r}{near}", hint="`keepstep --help` lists the commands."
        )
    return commands[name]()(rest)


def _tell(*lines: str) -> None:
    """Print to the error output; where its reader is gone the exit code still says it."""
    with contextlib.suppress(BrokenPipeError):
        print(*lines, sep="\n", file=sys.stderr)


def _open_closed_streams() -> None:
    """Give a process that was started without an output (`>&-`) one that nobody reads."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _train() -> Callable[[Sequence[str]], int]:
    from keepstep.cli.train import run_train

    return run_train


def _ckpt() -> Callable[[Sequence[str]], int]:
    from keepstep.cli.ckpt import run_ckpt

    return run_ckpt


def _config() -> Callable[[Sequence[str]], int]:
    from keepstep.cli.config import run_config

    return run_config


def _language() -> Callable[[Sequence[str]], int]:
    from keepstep.cli.language import run_language

    return run_language


def _words_of(error: OSError) -> str:
    """Say what the system refused, where, and what can be done about a full disk."""
    where = f"{error.filename}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "\nMake room, then run the same command to continue." if full else ""
    return f"{where}{error.strerror or error}{hint}"


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))
